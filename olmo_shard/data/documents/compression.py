"""Bytes of plain, gzip and zstd files. A file that ends inside a frame is an error."""

import gzip
import io
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from olmo_shard.data.documents.endings import GZIP, ZSTD
from olmo_shard.errors import DataError

READ_ERRORS = (OSError, EOFError, zlib.error)
"""The exceptions of a file that cannot be read, or whose compression is broken."""
_CHUNK = 1 << 16
_LARGEST_WINDOW = 1 << 31
"""Bytes of the largest window that ``zstd --long=31`` writes."""


def open_bytes(path: Path, compression: str) -> io.BufferedReader:
    """Open a file for reading its decompressed bytes, over all its frames or members.

    Reading raises one of ``READ_ERRORS`` where the compressed data are damaged or cut.

    :raises DataError: where a package is missing.
    """
    zstandard = optional_module("zstandard", path) if compression == ZSTD else None
    file = path.open("rb")
    if compression and not file.peek(1):
        file.close()
        raise EOFError("it is empty: not even one compressed frame")
    if compression == GZIP:
        # The gzip module reads all members and raises for a cut one.
        return io.BufferedReader(_OwningGzip(file), _CHUNK)  # pyright: ignore[reportArgumentType]
    if zstandard is not None:
        return io.BufferedReader(_ZstdReader(file, zstandard), _CHUNK)
    return file


def optional_module(name: str, path: Path) -> Any:
    """:raises DataError: naming the file that needs the package, and the way to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: reading it needs {error.name}: pip install 'olmo-shard[data]'"
        ) from error


class _OwningGzip(gzip.GzipFile):
    """A gzip reader that closes its file."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of all frames.

    The package's own stream reader takes a cut frame for the end of the file. This reader feeds
    one decompressor per frame, which says whether its frame is complete.
    """

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._unused = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._decompress():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        super().close()
        self._file.close()

    def _decompress(self) -> bool:
        """Decompress the next chunk; ``False`` at the end of the file."""
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
        self._unused = b""
        if self._frame.eof:
            self._unused, self._frame = self._frame.unused_data, None
        return True
