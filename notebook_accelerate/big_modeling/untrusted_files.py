"""Bounds and errors for files that may be damaged or made to do harm."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.errors import BrokenCheckpointError
from notebook_accelerate.telemetry.error_text import describe_error

MALFORMED: tuple[type[Exception], ...] = (
    LookupError,  # KeyError, IndexError, an unknown encoding
    TypeError,
    ValueError,  # UnicodeDecodeError, broken JSON
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    MemoryError,
    EOFError,
    pickle.UnpicklingError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""What readers of files raise for content that they do not expect, beside their own errors."""
UNREADABLE: tuple[type[Exception], ...] = (OSError, *MALFORMED)
MAX_JSON_BYTES = 1 << 26
"""Size of the largest index or manifest: 64 MiB name half a million files."""
_EXPANSION = 1 << 26
"""Bytes by which the content of a file in torch's format may exceed the file: torch does not compress."""
_ENTRY = re.compile(rb"PK\x01\x02.{20}(.{4})", re.DOTALL)
ZIP_BEGIN = b"PK\x03\x04"
"""The first bytes of a file in torch's format; others are in a format before torch 1.6."""
_END = b"PK\x05\x06"
_END_64 = b"PK\x06\x06"
_LOCATOR_64 = b"PK\x06\x07"
_END_BYTES = (1 << 16) + 22
_UNKNOWN = 0xFFFFFFFF
"""The size of an entry above 4 GiB, whose actual size is in an extension."""


@contextmanager
def naming_file(path: object, kinds: tuple[type[Exception], ...] = MALFORMED) -> Iterator[None]:
    """Raise the errors that malformed content causes as one class, with the name of the file.

    Args:
        path: The file or folder.
        kinds: The errors that mean malformed content here.

    Raises:
        BrokenCheckpointError: An error of these kinds.
    """
    try:
        yield
    except BrokenCheckpointError:
        raise
    except kinds as error:
        raise broken_file(path, error) from error


def broken_file(path: object, error: BaseException) -> BrokenCheckpointError:
    """Return the error for a file with unexpected content.

    Args:
        path: The file or folder.
        error: The reader's error.
    """
    first_line = describe_error(error).splitlines()[0][:500]
    return BrokenCheckpointError(f"{path} is broken: {first_line}".rstrip(": "))


def read_json(path: AnyPath) -> Any:
    """Read a JSON file of limited size.

    Args:
        path: The file.

    Raises:
        BrokenCheckpointError: It is too large, nested too deeply, or is not JSON in UTF-8.
    """
    with naming_file(path):
        if not isinstance(path, Path):
            return json.loads(path.read_text())
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise BrokenCheckpointError(f"{path} is broken: it has more than {MAX_JSON_BYTES:,} bytes.")
        return json.loads(content.decode("utf-8"))


def check_expansion(file: str | Path | BinaryIO) -> None:
    """Refuse a zip file whose content is much larger than the file; other files are accepted.

    torch allocates the size that the file's directory states, before it reads: 2 MB of zeros, compressed, took 4 GB.

    Args:
        file: The file, as `torch.load` accepts it.

    Raises:
        BrokenCheckpointError: Its content is too large.
    """
    if not isinstance(file, (str, Path)):
        return
    with Path(file).open("rb") as opened:
        if opened.read(4) != ZIP_BEGIN:  # not a zip file
            return
        size = opened.seek(0, 2)
        directory = _read_directory(opened, size)
    total = _stated_bytes(directory)
    if total is None or total > size:
        with naming_file(file, (*MALFORMED, NotImplementedError)), zipfile.ZipFile(file) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
    if total > size + _EXPANSION:
        raise BrokenCheckpointError(
            f"{file} is broken: it has {size:,} bytes and states a content of {total:,}; torch does not compress."
        )


def _read_directory(file: BinaryIO, size: int) -> bytes:
    """Return the directory of a zip file, which its last bytes locate; empty if there is none."""
    file.seek(max(size - _END_BYTES, 0))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        return b""
    length, start = struct.unpack_from("<II", tail, at + 12)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR_64:  # torch always writes both
        (record,) = struct.unpack_from("<Q", tail, at - 12)
        file.seek(min(record, size))
        end = file.read(56)
        if len(end) == 56 and end[:4] == _END_64:
            length, start = struct.unpack_from("<QQ", end, 40)
    file.seek(min(start, size))
    return file.read(min(length, size))


def _stated_bytes(directory: bytes) -> int | None:
    """Return the sum of the sizes that a directory states, or more; None if an entry has its size elsewhere."""
    sizes = np.frombuffer(b"".join(_ENTRY.findall(directory)), dtype="<u4")
    return None if (sizes == _UNKNOWN).any() else int(sizes.sum(dtype=np.uint64))
