"""Where a W&B run goes: mode, key and server."""

from dataclasses import dataclass

import pytest

from olmo_shard.train.tracking.server import choose, has_key, probe
from tests.support.wandb_server import closed_port, silent_server, wandb_server

KEY = "x" * 40
URL = "http://tracker.test:8080"


@dataclass(kw_only=True)
class Settings:
    mode: str = "online"
    base_url: str = URL
    api_key: str | None = None
    identity_token_file: str | None = None


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("found", [Settings(api_key=KEY), Settings(identity_token_file="file")])
def test_a_key_from_variables_or_settings_files_is_at_hand(found):
    assert has_key(found, {})
    assert not has_key(Settings(), {})


@pytest.mark.parametrize("place", ["NETRC", ".netrc", "_netrc"])
def test_a_key_in_netrc_is_at_hand(tmp_path, place):
    path = tmp_path / ("elsewhere" if place == "NETRC" else place)
    path.write_text(f"machine tracker.test:8080\n  login user\n  password {KEY}\n")
    environ = {"NETRC": str(path)} if place == "NETRC" else {}
    assert has_key(Settings(), environ)
    assert not has_key(Settings(base_url="http://other.test"), environ)


@pytest.mark.parametrize("content", ["machine tracker.test:8080\n  login user\n", "machine\n"])
def test_a_netrc_without_a_key_or_with_a_mistake_holds_no_key(tmp_path, content):
    (tmp_path / ".netrc").write_text(content)
    assert not has_key(Settings(), {})


def test_online_with_a_key_and_a_server_that_answers():
    with wandb_server() as server:
        assert choose(Settings(api_key=KEY, base_url=server.url), {}) == ("online", "")


def test_offline_without_a_key():
    assert choose(Settings(), {}) == ("offline", f"no API key for {URL}")


def test_offline_without_the_server_and_the_reason_names_it():
    with closed_port() as url:
        mode, reason = choose(Settings(api_key=KEY, base_url=url), {})
    assert mode == "offline"
    assert reason.startswith(f"{url} does not answer: ")
    assert "Connection refused" in reason


def test_a_server_that_accepts_and_never_answers_is_given_up():
    with silent_server() as url:
        assert probe(url, seconds=0.2) == f"{url} does not answer: timed out"


def test_the_variable_for_online_skips_the_probe():
    with closed_port() as url:
        found = choose(Settings(api_key=KEY, base_url=url), {"WANDB_MODE": "online"})
    assert found == ("online", "")


@pytest.mark.parametrize(
    ("named", "mode"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")]
)
def test_a_mode_of_wandbs_own_settings_is_kept(named, mode):
    found = choose(Settings(mode=named, api_key=KEY), {})
    assert found == (mode, f"W&B's own settings say mode = {named}")
