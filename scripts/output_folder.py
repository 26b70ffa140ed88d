"""Types of command-line options for results: they create the folder, or reject it, before the work.

If a type raises, argparse prints its message and exits with code 2.
"""

import argparse
import os
import tempfile
from pathlib import Path


def output_folder(text: str) -> Path:
    """Return a folder in which files can be written; create it, and its parents, if it is missing.

    :param text: the option's value.
    :raises ArgumentTypeError: if the folder cannot be created, or takes no files.
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
    """Return a file that can be written; create its folder, and leave an existing file unchanged.

    :param text: the option's value.
    :raises ArgumentTypeError: if the file cannot be created or overwritten.
    """
    file = Path(text)
    output_folder(str(file.parent))
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if file.exists() and not os.access(file, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is write-protected: name another file")
    return file
