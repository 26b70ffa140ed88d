"""Whether a W&B run can be online: the client's own settings, a key, a server that answers."""

import http.client
import netrc
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

_PROBE_SECONDS = 5.0
"""Longest wait for the first bytes of an answer. A server that needs longer is not used."""

_OLDER_NAMES = {"run": "online", "dryrun": "offline"}


class ClientSettings(Protocol):
    """The part of ``wandb.Settings`` that decides the mode.

    ``wandb.setup().settings`` holds the values of W&B's environment variables and settings files.
    ``wandb.Settings()`` holds defaults only.
    """

    @property
    def mode(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def identity_token_file(self) -> str | None: ...


class Choice(NamedTuple):
    mode: str
    """``online``, ``shared``, ``offline`` or ``disabled``."""
    reason: str
    """Why the run is not online; empty for an online run."""


def choose(settings: ClientSettings, environ: Mapping[str, str] = os.environ) -> Choice:
    """The mode of a run: online where a key is at hand and the server answers.

    ``WANDB_MODE=online`` skips the probe of the server, not the search for a key.
    """
    mode = _OLDER_NAMES.get(settings.mode, settings.mode)
    if mode not in ("online", "shared"):
        return Choice(mode, f"W&B's own settings say mode = {settings.mode}")
    if not has_key(settings, environ):
        return Choice("offline", f"no API key for {settings.base_url}")
    problem = None if "WANDB_MODE" in environ else probe(settings.base_url)
    return Choice("offline", problem) if problem else Choice(mode, "")


def has_key(settings: ClientSettings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable, a settings file or netrc holds credentials for the server."""
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).netloc
    try:
        found = netrc.netrc(_netrc_file(environ)).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return False
    return bool(found and found[2])


def probe(url: str, seconds: float = _PROBE_SECONDS) -> str | None:
    """Why a server does not answer, or ``None``. Any answer counts, errors of HTTP included.

    Proxies of the environment are used, as the client uses them.
    """
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        # The client has certificates of its own, and judges the server's certificate itself.
        return None if isinstance(reason, ssl.SSLError) else f"{url} does not answer: {reason}"
    return None


def _netrc_file(environ: Mapping[str, str]) -> Path:
    """The netrc file that W&B's client reads."""
    if environ.get("NETRC"):
        return Path(environ["NETRC"]).expanduser()
    usual, other = (Path(name).expanduser() for name in ("~/.netrc", "~/_netrc"))
    return other if other.exists() and not usual.exists() else usual
