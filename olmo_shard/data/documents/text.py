"""Reading of plain text, one document per file, and the test whether bytes are text."""

import codecs
from pathlib import Path

from olmo_shard.data.documents.compression import READ_ERRORS, open_bytes
from olmo_shard.data.documents.report import REPLACED, BadInputError, Report

# First bytes of binary formats.
_SIGNATURES = {
    b"\x1f\x8b": "gzip data (give the file the ending .gz)",
    b"\x28\xb5\x2f\xfd": "zstd data (give the file the ending .zst)",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ\x00": "xz data",
    b"PK\x03\x04": "a zip archive",
    b"\x7fELF": "an ELF binary",
    b"PAR1": "Parquet data (give the file the ending .parquet)",
    b"%PDF-": "a PDF document",
}
_PRINTABLE_SIGNATURES = (b"BZh", b"PAR1")
"""Signatures that a text may begin with. Only a NUL character shows that the file is binary."""
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LARGEST_INVALID_SHARE = 0.1
"""Share of invalid characters above which a text is taken to be in another encoding."""
HEAD = 1 << 16
"""Bytes at the start of a JSON Lines file that are tested for text."""


def read_text(path: Path, compression: str, report: Report) -> str:
    """Return the whole file as one document.

    Bytes that are not UTF-8 are replaced and counted, a byte-order mark is removed, and every line
    end becomes ``\\n``.

    :param compression: ``.gz``, ``.zst``, or nothing.
    :raises BadInputError: if the file cannot be read, or is not UTF-8 text.
    """
    try:
        with open_bytes(path, compression) as file:
            content = file.read()
    except READ_ERRORS as error:
        raise BadInputError(f"{path}: {_reason(error)}") from error
    require_text(content, path)
    text = content.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text:
        # The file itself may contain U+FFFD, which is not an invalid character.
        invalid = text.count("\ufffd") - content.count("\ufffd".encode())
        if invalid > _LARGEST_INVALID_SHARE * len(text):
            raise BadInputError(
                f"{path}: not UTF-8 text: {invalid:,} of {len(text):,} characters are invalid; "
                "convert it, for example with iconv -f LATIN1 -t UTF-8"
            )
        if invalid:
            report.count(REPLACED, str(path), invalid)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def require_text(content: bytes, path: Path) -> None:
    """Check that bytes can be UTF-8 text.

    :param path: file of the bytes, for the message.
    :raises BadInputError: for a known binary format, UTF-16, UTF-32, or NUL characters.
    """
    if content.startswith((*_UTF_32, *_UTF_16)):
        width = 32 if content.startswith(_UTF_32) else 16
        raise BadInputError(f"{path}: {_other_encoding(width)}")
    # Some signatures are printable, and a text may begin with them: only a NUL makes it binary.
    has_nul = b"\x00" in content
    for signature, name in _SIGNATURES.items():
        if content.startswith(signature) and (has_nul or signature not in _PRINTABLE_SIGNATURES):
            raise BadInputError(f"{path}: not text but {name}")
    if has_nul:
        # UTF-16 of a mostly Latin text has a NUL in every second byte.
        halves = (content[0::2].count(0), content[1::2].count(0))
        if max(halves) > len(content) / 4 and min(halves) < max(halves) / 4:
            raise BadInputError(f"{path}: {_other_encoding(16)}")
        raise BadInputError(f"{path}: not text: {sum(halves):,} of {len(content):,} bytes are NUL")


def _other_encoding(width: int) -> str:
    """A clause about text in UTF-16 or UTF-32."""
    return (
        f"UTF-{width} text; only UTF-8 is read: convert it, for example with "
        f"iconv -f UTF-{width} -t UTF-8"
    )


def _reason(error: Exception) -> str:
    """The operating system's reason, or the text of the error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
