"""The choice of a W&B run's mode, by the client's settings, the API key and the server."""

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
"""Longest wait in seconds for the first bytes of an answer. A slower server is not used."""

# Modes of older versions of W&B.
_OLDER_NAMES = {"run": "online", "dryrun": "offline"}


class ClientSettings(Protocol):
    """The part of ``wandb.Settings`` that decides the mode.

    ``wandb.setup().settings`` holds the values of W&B's environment variables and settings files.
    ``wandb.Settings()`` holds defaults only.
    """

    @property
    def mode(self) -> str:
        """Mode of the run."""
        ...

    @property
    def base_url(self) -> str:
        """Address of the server."""
        ...

    @property
    def api_key(self) -> str | None:
        """API key, if a variable or a settings file has one."""
        ...

    @property
    def identity_token_file(self) -> str | None:
        """File of an identity token, which replaces an API key."""
        ...


class Choice(NamedTuple):
    """The mode of a W&B run."""

    mode: str
    """``online``, ``shared``, ``offline`` or ``disabled``."""
    reason: str
    """Reason why the run is not online; empty for an online run."""


def choose(settings: ClientSettings, environ: Mapping[str, str] = os.environ) -> Choice:
    """Choose the mode of a run: online if there is an API key and the server answers.

    ``WANDB_MODE=online`` skips the probe of the server, but not the search for a key.

    :param settings: settings of W&B's client. A mode in them wins.
    """
    mode = _OLDER_NAMES.get(settings.mode, settings.mode)
    if mode not in ("online", "shared"):
        return Choice(mode, f"W&B's own settings say mode = {settings.mode}")
    if not has_key(settings, environ):
        return Choice("offline", f"no API key for {settings.base_url}")
    problem = None if "WANDB_MODE" in environ else probe(settings.base_url)
    return Choice("offline", problem) if problem else Choice(mode, "")


def has_key(settings: ClientSettings, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a variable, a settings file or netrc has credentials for the server."""
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).netloc
    try:
        credentials = netrc.netrc(_netrc_file(environ)).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return False
    # (login, account, password): the password is the key.
    return bool(credentials and credentials[2])


def probe(url: str, seconds: float = _PROBE_SECONDS) -> str | None:
    """Describe why a server does not answer; ``None`` if it does. An HTTP error is an answer.

    The request uses the proxies of the environment, as the client does.

    :param seconds: longest wait for the first bytes.
    """
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        # The client has its own certificates, and verifies the server's certificate itself.
        return None if isinstance(reason, ssl.SSLError) else f"{url} does not answer: {reason}"
    return None


def _netrc_file(environ: Mapping[str, str]) -> Path:
    """The netrc file that W&B's client reads."""
    if environ.get("NETRC"):
        return Path(environ["NETRC"]).expanduser()
    usual, other = (Path(name).expanduser() for name in ("~/.netrc", "~/_netrc"))
    return other if other.exists() and not usual.exists() else usual
