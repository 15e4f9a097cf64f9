"""Write a rank's file of a distributed checkpoint in torch's format, without calling torch.save for each tensor.

torch.save takes 0.25 ms per tensor, as long as writing a megabyte, and spends most of that time in Python. The bytes
that torch.save writes before and after a tensor's values depend only on the dtype and shape, so this module creates
them once for each dtype and shape (see `write_plans` for measurements).
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
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from notebook_accelerate.files.weight_files import read_metadata
from notebook_accelerate.torch_internals import StorageInfo

FileChecksums = dict[str, tuple[int, int]]
"""The size in bytes and the CRC-32 of each file, by path relative to the folder."""
Locations = dict[MetadataIndex, StorageInfo]
"""The file, the offset and the length of each entry."""


class ShardWriter(FileSystemWriter):
    """torch's writer of one file per rank, which here also computes checksums while it writes.

    Args:
        folder: The folder, which torch creates. If one rank cannot create it, torch raises on every rank.
        background: Whether training continues while files are written (see `ChecksumFiles`).

    Attributes:
        files: The file system that computes checksums.
        items: The entries that this rank has written, in order.
        name: The name of this rank's file.
        locations: The locations of the entries in the file.
        metadata: The metadata of all ranks' files on the rank that writes it, or None on other ranks.
    """

    def __init__(self, folder: Path, background: bool = False) -> None:
        super().__init__(folder)
        self.fs = self.files = ChecksumFiles(background)
        self.items: list[WriteItem] = []
        self.name = ""
        self.locations: Locations = {}
        self.metadata: Metadata | None = None

    def storage_meta(self) -> None:
        """Store no metadata about the location, because the checkpoint is moved once it is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Args:
            plan: The entries of the file.
            planner: The planner, which returns the values of the entries.

        Returns:
            A completed future with the locations of the entries.
        """
        # Put objects last, because their sizes can change: this way, the tensors' offsets stay the same.
        self.items = sorted(plan.items, key=is_object)
        self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        contents = ((item.index, planner.resolve_data(item)) for item in self.items)
        self.locations = write_rank_file(self.files, Path(self.path) / self.name, contents)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, info.length, info) for index, info in self.locations.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata. torch calls this on one rank.

        Args:
            metadata: The metadata of all ranks' entries, without locations.
            results: The locations of all ranks' entries.
        """
        super().finish(metadata, results)
        # Read the metadata from the file, because some versions of torch (2.9) only add the locations to a copy.
        with Path(self.path, ".metadata").open("rb") as file:
            self.metadata = read_metadata(file)


def is_object(item: WriteItem) -> bool:
    """Return whether an item is an object other than a tensor."""
    return item.type == WriteItemType.BYTE_IO


def write_rank_file(files: ChecksumFiles, path: Path, contents: Iterable[tuple[MetadataIndex, Any]]) -> Locations:
    """Write a rank's file, and sync it to the disk.

    Args:
        files: The file system that computes the checksum.
        path: The file to write.
        contents: The entries, which are tensors, or pickled objects as byte streams.

    Returns:
        The locations of the entries in the file.
    """
    locations: Locations = {}
    with files.create_stream(path, "wb") as stream:
        for index, content in contents:
            begin = stream.tell()
            if isinstance(content, torch.Tensor):
                _write_tensor(stream, content)
            else:
                stream.write(content.getbuffer())
            locations[index] = StorageInfo(path.name, begin, stream.tell() - begin)
        stream.sync()
    return locations


# ---- tensors

_MAX_FRAMED = 1 << 24
"""The maximum size in bytes of a framed tensor, whose surrounding bytes are reused.

For larger tensors, torch.save costs little in comparison, and creating a frame would take as much memory as the tensor.
"""
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


def _write_tensor(stream: Any, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu()
    if not _can_be_framed(tensor):
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write the whole storage of a view.
        torch.save(tensor, stream)
        return
    before, after = bytes_around_values(tensor.dtype, tensor.shape)
    stream.write(before)
    stream.keep(tensor.reshape(-1).view(torch.uint8).numpy().data)
    stream.write(after)


def is_framed(dtype: torch.dtype, nbytes: int) -> bool:
    """Return whether contiguous tensors of this dtype and size are framed."""
    return dtype in _DTYPES and 0 < nbytes <= _MAX_FRAMED


def _can_be_framed(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and is_framed(tensor.dtype, tensor.nbytes)
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


@lru_cache(maxsize=1024)
def bytes_around_values(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return the bytes that torch.save writes before and after the values of a contiguous tensor.

    Args:
        dtype: The dtype of the tensor.
        shape: The shape of the tensor.
    """
    stream = io.BytesIO()
    with without_record_checksums():
        torch.save(torch.zeros(shape, dtype=dtype), stream)
    content = stream.getbuffer()
    with zipfile.ZipFile(stream) as records:
        record = next(entry for entry in records.infolist() if entry.filename.endswith("/data/0"))
    # The header of a zip record has 30 bytes. The last four are the lengths of its name and of its padding.
    name, padding = (int.from_bytes(content[record.header_offset + at :][:2], "little") for at in (26, 28))
    begin = record.header_offset + 30 + name + padding
    return bytes(content[:begin]), bytes(content[begin + record.file_size :])


@contextmanager
def without_record_checksums() -> Iterator[None]:
    """Keep torch.save from computing checksums of records. The manifest contains checksums of whole files instead."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


# ---- files


class ChecksumFiles(FileSystem):
    """Computes checksums of files while writing them, because reading them again would take a second per gigabyte.

    Args:
        background: Whether training continues while files are written. If so, they are written with low priority.
    """

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        self.checksums: FileChecksums = {}
        self._call: Call = _call_at_low_priority if background else _call

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file. If it is opened for writing, its checksum is computed while it is written.

        Args:
            path: The file to open.
            mode: The mode, as in `open`.
        """
        with super().create_stream(path, mode) as file:
            if "w" not in mode:
                yield file
                return
            stream = ChecksumStream(file, self._call)
            yield stream
            stream.close()
            self.checksums[Path(path).name] = (stream.size, stream.crc)

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file, and record its checksum under the new name.

        Args:
            path: The current path of the file.
            new_path: The path to rename the file to.
        """
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


Call = Callable[..., Any]
"""A function that calls another function with arguments, and returns its result."""
_MIN_PIECE, _FULL_PIECE = 1 << 15, 1 << 18
"""Pieces smaller than `_MIN_PIECE` bytes are joined into pieces of at least `_FULL_PIECE` bytes."""
_MAX_PIECES, _MAX_QUEUED = 512, 1 << 26
"""The maximum numbers of pieces and bytes to queue.

The system accepts up to 1024 pieces in one call, and tensors that were copied from a device take up memory while they
are queued.
"""
_MAX_CALL = 1 << 19
"""The maximum number of bytes to write in one system call.

For longer calls, Linux 6.18 allocates the page cache in larger blocks. In a virtual machine, these took up to 10 times
as much CPU time: 240 to 390 ms for 115 MB, compared with 40 ms with calls of 512 KiB.
"""


@dataclass
class ChecksumStream:
    """A file that is written sequentially, in as few system calls as possible."""

    file: Any
    call: Call
    size: int = 0
    crc: int = 0
    _small: bytearray = field(default_factory=bytearray)
    _queued: list[Any] = field(default_factory=list)
    _passed: int = 0

    def write(self, content: Any) -> int:
        """Write bytes now. The caller may reuse their memory after this call."""
        size = self.keep(content)
        if size >= _MIN_PIECE:
            self._write_queued()
        return size

    def keep(self, content: Any) -> int:
        """Write bytes, now or later. The caller must not change their memory until the file is closed."""
        size = len(content)
        self.size += size
        if size < _MIN_PIECE:
            self._small += content
            if len(self._small) >= _FULL_PIECE:
                self._queue(b"")
        else:
            self._queue(content)
        if len(self._queued) >= _MAX_PIECES or self.size - self._passed >= _MAX_QUEUED:
            self._write_queued()
        return size

    def _queue(self, content: Any) -> None:
        for piece in (self._small, content):
            if piece:
                self.crc = zlib.crc32(piece, self.crc)
                self._queued.append(piece)
        self._small = bytearray()

    def _write_queued(self) -> None:
        self._queue(b"")
        pieces, self._queued, self._passed = self._queued, [], self.size
        while pieces:
            pieces = _remaining(pieces, self.call(_write_pieces, self.file, pieces))

    def tell(self) -> int:
        """Return the number of bytes written so far, including queued ones."""
        return self.size

    def fileno(self) -> int:
        """Write everything that is queued, and return the file's descriptor."""
        self._write_queued()
        return int(self.file.fileno())

    def flush(self) -> None:
        """Do nothing, because torch calls this after every tensor."""

    def sync(self) -> None:
        """Write everything that is queued, and sync the file to the disk."""
        self.call(os.fsync, self.fileno())

    def close(self) -> None:
        """Write everything that is queued, and close the file."""
        self._write_queued()
        self.file.close()


def _write_pieces(file: Any, pieces: list[Any]) -> int:
    """Write as many pieces as the system accepts, and return the number of bytes written.

    Most of the time is spent in system calls, which release the GIL.
    """
    descriptor, total = file.fileno(), 0
    for batch in list(_batches(pieces)):
        written = os.writev(descriptor, batch) if hasattr(os, "writev") else os.write(descriptor, batch[0])
        total += written
        if written < sum(map(len, batch)):
            break
    return total


def _batches(pieces: list[Any]) -> Iterator[list[Any]]:
    """Split pieces into batches, one for each system call."""
    batch: list[Any] = []
    room = _MAX_CALL
    for content in pieces:
        piece = memoryview(content)
        begin = 0
        while begin < len(piece):
            batch.append(piece[begin : begin + room])
            begin += len(batch[-1])
            room -= len(batch[-1])
            if not room:
                yield batch
                batch, room = [], _MAX_CALL
    if batch:
        yield batch


def _remaining(pieces: list[Any], written: int) -> list[Any]:
    for index, piece in enumerate(pieces):
        if written < len(piece):
            return [memoryview(piece)[written:], *pieces[index + 1 :]]
        written -= len(piece)
    return []


# ---- in the background

_NICENESS = 10
"""The amount added to a writing thread's niceness. The thread then gets about a tenth of a core that training uses."""


def _call(function: Call, *arguments: Any) -> Any:
    return function(*arguments)


def _call_at_low_priority(function: Call, *arguments: Any) -> Any:
    """Call a system function in a thread of low priority, and wait until it returns.

    The calling thread keeps its own priority. If it had a low priority, it might wait for a core while holding the GIL,
    which training needs.
    """
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_run_at_low_priority, args=(outcome, function, arguments), name="save_state writes"
    )
    try:
        thread.start()
    except RuntimeError:  # The limit on threads has been reached, or the interpreter is shutting down.
        return function(*arguments)
    thread.join()
    return outcome.result()


def _run_at_low_priority(outcome: concurrent.futures.Future[Any], function: Call, arguments: tuple[Any, ...]) -> None:
    if sys.platform == "linux":  # On other systems, threads do not have separate priorities.
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
    try:
        outcome.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        outcome.set_exception(error)
