"""A rank's file of a sharded state: torch's format for distributed checkpoints, without torch's work for each tensor.

torch.save takes a quarter of a millisecond for a tensor, most of it in Python: as long as writing a megabyte. What it
puts around the values depends on their type and shape alone, so it is asked once for each of these.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

Sums = dict[str, tuple[int, int]]
"""Size in bytes and CRC-32 of files, by path relative to the folder they are in."""
Infos = dict[MetadataIndex, _StorageInfo]
"""Where a file has what."""


class ShardWriter(FileSystemWriter):
    """torch's writer of one file per rank; the files are summed up while they are written.

    Args:
        folder: Where to; torch makes it, in a step whose failure on one rank every rank learns of.

        beside: As for `SummedFiles`.

    Attributes:
        files: What the files are written through.
        items: What this rank has written, in order, once it has.
        name: Name of its file.
        infos: Where the file has what.
        metadata: What all ranks have written, on the rank that writes it down.
    """

    def __init__(self, folder: Path, beside: bool = False) -> None:
        super().__init__(folder)
        self.fs = self.files = SummedFiles(beside)
        self.items: list[WriteItem] = []
        self.name = ""
        self.infos: Infos = {}
        self.metadata: Metadata | None = None

    def storage_meta(self) -> None:
        """Return nothing: the folder is not where the checkpoint will be found."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Args:
            plan: What goes in.
            planner: Knows the values.

        Returns:
            Where everything is, at once.
        """
        # What has no fixed size comes last: everything else is at the same place in the next checkpoint.
        self.items = sorted(plan.items, key=is_object)
        self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        contents = ((item.index, planner.resolve_data(item)) for item in self.items)
        self.infos = write_file(self.files, Path(self.path) / self.name, contents)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, info.length, info) for index, info in self.infos.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write down what all ranks have written; called on one of them.

        Args:
            metadata: The plan of all ranks.
            results: Where everything is.
        """
        super().finish(metadata, results)
        self.metadata = metadata


def is_object(item: WriteItem) -> bool:
    """Tell whether an item is no tensor."""
    return item.type == WriteItemType.BYTE_IO


def write_file(files: SummedFiles, path: Path, contents: Iterable[tuple[MetadataIndex, Any]]) -> Infos:
    """Write a rank's file, to the disk itself.

    Args:
        files: What it is written through.
        path: The file.
        contents: Tensors, and streams of bytes for everything else.

    Returns:
        Where the file has what.
    """
    infos: Infos = {}
    with files.create_stream(path, "wb") as stream:
        for index, content in contents:
            begin = stream.tell()
            if isinstance(content, torch.Tensor):
                _write_tensor(stream, content)
            else:
                stream.write(content.getbuffer())
            infos[index] = _StorageInfo(path.name, begin, stream.tell() - begin)
        stream.sync()
    return infos


# -- tensors ----------------------------------------------------------------------------------------------------------

_FRAMED = 1 << 24
"""Bytes up to which torch's work for a tensor counts; a frame takes as much memory for a moment."""
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


def _write_tensor(stream: Any, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu()
    if not _is_framed(tensor):
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes whole storages
            tensor = tensor.clone()
        torch.save(tensor, stream)
        return
    before, after = _frame(tensor.dtype, tensor.shape)
    stream.write(before)
    stream.keep(tensor.reshape(-1).view(torch.uint8).numpy().data)
    stream.write(after)


def _is_framed(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _DTYPES
        and 0 < tensor.nbytes <= _FRAMED
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


@lru_cache(maxsize=1024)
def _frame(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after the values of a contiguous tensor."""
    stream = io.BytesIO()
    with unsummed():
        torch.save(torch.zeros(shape, dtype=dtype), stream)
    content = stream.getbuffer()
    with zipfile.ZipFile(stream) as records:
        record = next(entry for entry in records.infolist() if entry.filename.endswith("/data/0"))
    # A record begins with 30 bytes, of which the last four are the lengths of its name and of its padding.
    name, padding = (int.from_bytes(content[record.header_offset + at :][:2], "little") for at in (26, 28))
    begin = record.header_offset + 30 + name + padding
    return bytes(content[:begin]), bytes(content[begin + record.file_size :])


def unsummed() -> Any:
    """Return a context in which torch makes no sums of records, in this thread: the manifest has those of files."""
    return serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined]


# -- files ------------------------------------------------------------------------------------------------------------


class SummedFiles(FileSystem):
    """Files whose sums are made while they are written: to read a gigabyte again for them takes a second.

    Args:
        beside: Whether training goes on meanwhile, which comes first then.
    """

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.sums: Sums = {}
        self._call: Call = _behind if beside else _directly

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; what is written to it is summed up.

        Args:
            path: The file.
            mode: As for `open`.
        """
        with super().create_stream(path, mode) as file:
            if "w" not in mode:
                yield file
                return
            stream = SummedStream(file, self._call)
            yield stream
            stream.close()
            self.sums[Path(path).name] = (stream.size, stream.crc)

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file, and its sums.

        Args:
            path: The file.
            new_path: Its new path.
        """
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


Call = Callable[..., Any]
"""Calls a function with arguments and returns what it returns."""
_SMALL, _FULL = 1 << 15, 1 << 18
"""Bytes below which pieces are collected, and how many are one piece then."""
_MANY, _MUCH = 512, 1 << 26
"""Pieces and bytes that go to the system at once; it takes up to 1024 pieces, and copies from a device are held."""
_AT_ONCE = 1 << 30
"""Bytes of one call: macOS refuses 2 GiB."""


@dataclass
class SummedStream:
    """A file that is written from the beginning to the end, in as few calls of the system as there can be."""

    file: Any
    call: Call
    size: int = 0
    crc: int = 0
    _collected: bytearray = field(default_factory=bytearray)
    _waiting: list[Any] = field(default_factory=list)
    _written: int = 0

    def write(self, content: Any) -> int:
        """Write bytes, which may be gone afterwards."""
        size = self.keep(content)
        if size >= _SMALL:
            self._pass_on()
        return size

    def keep(self, content: Any) -> int:
        """Write bytes, which stay as they are until the file is closed."""
        size = len(content)
        self.size += size
        if size < _SMALL:
            self._collected += content
            if len(self._collected) >= _FULL:
                self._line_up(b"")
        else:
            self._line_up(content)
        if len(self._waiting) >= _MANY or self.size - self._written >= _MUCH:
            self._pass_on()
        return size

    def _line_up(self, content: Any) -> None:
        for piece in (self._collected, content):
            if piece:
                self.crc = zlib.crc32(piece, self.crc)
                self._waiting.append(piece)
        self._collected = bytearray()

    def _pass_on(self) -> None:
        self._line_up(b"")
        pieces, self._waiting, self._written = self._waiting, [], self.size
        while pieces:
            pieces = _rest(pieces, self.call(_write_some, self.file, pieces))

    def tell(self) -> int:
        """Return how much was written."""
        return self.size

    def fileno(self) -> int:
        """Return the file's descriptor, once the system has all that was written."""
        self._pass_on()
        return int(self.file.fileno())

    def flush(self) -> None:
        """Do nothing: torch asks for it after every tensor."""

    def sync(self) -> None:
        """Wait until the disk has all that was written."""
        self.call(os.fsync, self.fileno())

    def close(self) -> None:
        """Pass all on and close the file."""
        self._pass_on()
        self.file.close()


def _write_some(file: Any, pieces: list[Any]) -> int:
    """Write the first of the pieces, without Python's lock, and return how many bytes it was."""
    if hasattr(os, "writev") and sum(map(len, pieces)) <= _AT_ONCE:
        return os.writev(file.fileno(), pieces)
    return os.write(file.fileno(), memoryview(pieces[0])[:_AT_ONCE])


def _rest(pieces: list[Any], written: int) -> list[Any]:
    for index, piece in enumerate(pieces):
        if written < len(piece):
            return [memoryview(piece)[written:], *pieces[index + 1 :]]
        written -= len(piece)
    return []


# -- beside training --------------------------------------------------------------------------------------------------

_BEHIND = 10
"""How far a thread stands behind the training: it gets a tenth of a core that both want."""


def _directly(function: Call, *arguments: Any) -> Any:
    return function(*arguments)


def _behind(function: Call, *arguments: Any) -> Any:
    """Call a function of the system in a thread that lets the training go first, and wait for it.

    The caller's own thread must not step back: it would wait for a core with Python's lock, which training needs.
    """
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
    thread = threading.Thread(target=_run_behind, args=(outcome, function, arguments), name="save_state writes")
    try:
        thread.start()
    except RuntimeError:  # a limit on threads, or an interpreter that is ending
        return function(*arguments)
    thread.join()
    return outcome.result()


def _run_behind(outcome: concurrent.futures.Future[Any], function: Call, arguments: tuple[Any, ...]) -> None:
    if sys.platform == "linux":  # elsewhere threads have no priorities of their own
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _BEHIND)
    try:
        outcome.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - raised by who waits
        outcome.set_exception(error)
