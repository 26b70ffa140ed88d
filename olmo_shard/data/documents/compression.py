"""Reading of plain, gzip and zstd files. A file that ends within a frame is an error."""

import gzip
import io
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from olmo_shard.data.documents.endings import GZIP, ZSTD
from olmo_shard.errors import DataError

READ_ERRORS = (OSError, EOFError, zlib.error)
"""Exceptions of a file that cannot be read, or of damaged compressed data."""
_CHUNK = 1 << 16
"""Bytes per read."""
_LARGEST_WINDOW = 1 << 31
"""Bytes of the largest window that ``zstd --long=31`` writes."""


def open_bytes(path: Path, compression: str) -> io.BufferedReader:
    """Open a file for reading its decompressed bytes, over all of its frames or members.

    A read raises one of ``READ_ERRORS`` if the compressed data are damaged or cut.

    :param compression: ``.gz``, ``.zst``, or nothing.
    :raises DataError: if the package for zstd is missing.
    """
    zstandard = optional_module("zstandard", path) if compression == ZSTD else None
    # An empty file is no valid gzip or zstd file, but both readers would return no bytes.
    file = path.open("rb")
    if compression and not file.peek(1):
        file.close()
        raise EOFError("it is empty: not even one compressed frame")
    if compression == GZIP:
        # The gzip module reads all members, and raises if one is cut.
        return io.BufferedReader(_OwningGzip(file), _CHUNK)  # pyright: ignore[reportArgumentType]
    if zstandard is not None:
        return io.BufferedReader(_ZstdReader(file, zstandard), _CHUNK)
    return file


def optional_module(name: str, path: Path) -> Any:
    """Import a package that only some formats need.

    :param path: file that needs the package, for the message.
    :raises DataError: with the command that installs the package, if it is missing.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: reading it needs {error.name}: pip install 'olmo-shard[data]'"
        ) from error


class _OwningGzip(gzip.GzipFile):
    """Gzip reader that closes its file as well."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        """Close the reader and its file."""
        super().close()
        self._file.close()


class _ZstdReader(io.RawIOBase):
    """Reader of the decompressed bytes of all zstd frames.

    The package's stream reader treats a cut frame as the end of the file. This reader uses one
    decompressor per frame, which shows whether its frame is complete.
    """

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        """Decompressor of the current frame; ``None`` between frames."""
        self._unused = b""
        """Compressed bytes that were read but belong to the next frame."""
        self._ready = memoryview(b"")
        """Decompressed bytes that were not returned yet."""

    def readable(self) -> bool:
        """See :meth:`io.IOBase.readable`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See :meth:`io.RawIOBase.readinto`."""
        while not self._ready:
            if not self._decompress():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        """Close the reader and its file."""
        super().close()
        self._file.close()

    def _decompress(self) -> bool:
        """Decompress the next chunk. Returns ``False`` at the end of the file."""
        chunk = self._unused or self._file.read(_CHUNK)
        if not chunk:
            if self._frame is not None:
                raise EOFError("it ends inside a zstd frame: the file is cut")
            return False
        if self._frame is None:
            decompressor = self._zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
            self._frame = decompressor.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(chunk))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        # At the end of a frame, the rest of the chunk belongs to the next frame.
        self._unused = b""
        if self._frame.eof:
            self._unused, self._frame = self._frame.unused_data, None
        return True
