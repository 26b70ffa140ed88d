"""Signals end prepare inside of native code, and leave nothing."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from olmo_shard.data.signals import call_in_thread
from olmo_shard.errors import DataError

TRAINING = """
from olmo_shard import cli
from olmo_shard.data import tokenizer

real = tokenizer.call_in_thread

def call(train, texts, trainer):
    def then_say():
        yield from texts
        print("native", flush=True)
    return real(train, then_say(), trainer)

tokenizer.call_in_thread = call
cli.main()
"""
# PBKDF2 stands for the tokenizer: like it, it runs without Python's lock and for minutes.
ENCODING = """
import hashlib
from olmo_shard import cli
from olmo_shard.data import encode

def ids(*_):
    print("native", flush=True)
    return hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

encode._ids = ids
cli.main()
"""


@pytest.fixture(scope="module")
def many_words(tmp_path_factory) -> Path:
    """Text from which a large vocabulary takes minutes to train."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    path = tmp_path_factory.mktemp("words") / "a.txt"
    path.write_text(" ".join("".join(generator.choices(letters, k=12)) for _ in range(300_000)))
    return path


def run_until_signal(code: str, number: int, *arguments: object) -> tuple[int, str]:
    """Start prepare, send a signal once native code runs: exit code and stderr."""
    command = [sys.executable, "-c", code, "prepare", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "native\n"
        time.sleep(0.5)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_training_of_a_tokenizer(tmp_path, many_words, number):
    out = tmp_path / "deep" / "out"
    arguments = (many_words, "--train-bpe", 200_000, "--out", out)
    code, errors = run_until_signal(TRAINING, number, *arguments)
    assert (code, errors) == (128 + number, f"olmo-shard: interrupted by {number.name}\n")
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_encoding_and_removes_the_files(tmp_path, number):
    (tmp_path / "a.txt").write_text("a few words " * 50)
    arguments = (tmp_path / "a.txt", "--train-bpe", 260, "--out", tmp_path / "out")
    code, errors = run_until_signal(ENCODING, number, *arguments)
    assert (code, errors) == (128 + number, f"olmo-shard: interrupted by {number.name}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_ignored_signal_stays_ignored():
    code = (
        "import os, signal; from olmo_shard.data.signals import ended_by_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with ended_by_signals(): os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "True\n")


def test_results_and_errors_come_back_from_the_thread():
    def fail() -> None:
        raise DataError("named")

    assert call_in_thread(divmod, 7, 3) == (2, 1)
    with pytest.raises(DataError, match="named"):
        call_in_thread(fail)
