"""The folder of a script's results: made, or refused, before the work starts.

Both functions are types of command-line options: argparse prints the message of a refusal and exits
with code 2.
"""

import argparse
import os
import tempfile
from pathlib import Path


def output_folder(text: str) -> Path:
    """A folder in which files can be written; a missing one is created with its parents.

    :param text: the option's value.
    :raises ArgumentTypeError: where no such folder can be.
    """
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise argparse.ArgumentTypeError(f"{text} is a file: name a folder") from error
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot take files ({error.strerror}): name a folder, or a place for a new one"
        ) from error
    return folder


def output_file(text: str) -> Path:
    """A file that can be written; its folder is created, an older file stays until then.

    :param text: the option's value.
    :raises ArgumentTypeError: where no such file can be.
    """
    file = Path(text)
    output_folder(str(file.parent))
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if file.exists() and not os.access(file, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is write-protected: name another file")
    return file
