"""A rank's part of a sharded state, apart from torch's wrappers of it: memory that a thread can copy and write."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config as serialization

Place = tuple[Any, ...]
"""Keys and positions that lead to a value of a nested state."""
Dress = Callable[[Any], Any]
"""Puts torch's wrapper around a rank's own memory."""
Sums = dict[str, tuple[int, int]]
"""Size in bytes and CRC-32 of files, by path relative to the folder they are in."""


class ShardsError(RuntimeError):
    """A rank could not write its part.

    Args:
        failures: What happened, by rank.
    """

    def __init__(self, failures: dict[int, BaseException]) -> None:
        first = min(failures)
        super().__init__(f"rank {first}: {type(failures[first]).__name__}: {failures[first]}")
        self.failures = failures


@dataclass
class StatePart:
    """What goes into one entry of a checkpoint's folder.

    Attributes:
        name: The entry: a file that this rank writes alone, or a folder that all ranks write to.
        value: Nested dicts and lists of this rank's own tensors; for a folder, without torch's wrappers.
        dresses: The wrappers of a folder's values; None for a file.
        optimizer: torch's optimizer whose step alone changes the tensors; None for everything else.
    """

    name: str
    value: Any
    dresses: dict[Place, Dress] | None = None
    optimizer: Any = None

    def write(self, value: Any, path: Path, group: Any = None) -> Sums:
        """Write a folder; every rank must call this.

        Args:
            value: The value, or a copy of it.
            path: The folder.
            group: Processes that agree on who writes what; None: torch's default group.

        Returns:
            The files that this rank wrote, which are on the disk itself then.

        Raises:
            ShardsError: Some rank could not.
        """
        assert self.dresses is not None
        return write_shards(_dressed(value, self.dresses, ()), path, group)

    def write_here(self, folder: Path) -> None:
        """Write the value itself into a folder, now; every rank must call this.

        Args:
            folder: The folder that the entry goes to.
        """
        if self.dresses is None:
            torch.save(self.value, folder / self.name)
        else:
            self.write(self.value, folder / self.name)


def part_of(name: str, state: dict[str, Any], optimizer: Any = None) -> StatePart:
    """Return the part of a checkpoint's folder that a sharded state becomes.

    Args:
        name: Name of the folder.
        state: The state, with torch's sharded tensors.
        optimizer: torch's optimizer that the state is of, if it is.
    """
    dresses: dict[Place, Dress] = {}
    return StatePart(name, _bare(state, dresses, ()), dresses, optimizer)


def _bare(value: Any, dresses: dict[Place, Dress], place: Place) -> Any:
    """Return a nested state with this rank's own memory, and note what was around it."""
    if isinstance(value, DTensor):
        dresses[place] = _dress_of_dtensor(value)
        return value.to_local().detach()
    if isinstance(value, ShardedTensor):
        dresses[place] = _dress_of_sharded(value)
        return [shard.tensor.detach() for shard in value.local_shards()]
    if isinstance(value, dict):
        return {key: _bare(item, dresses, (*place, key)) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_bare(item, dresses, (*place, index)) for index, item in enumerate(value))
    return value


def _dressed(value: Any, dresses: dict[Place, Dress], place: Place) -> Any:
    if place in dresses:
        return dresses[place](value)
    if isinstance(value, dict):
        return {key: _dressed(item, dresses, (*place, key)) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_dressed(item, dresses, (*place, index)) for index, item in enumerate(value))
    return value


def _dress_of_dtensor(tensor: DTensor) -> Dress:
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda local: DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _dress_of_sharded(tensor: ShardedTensor) -> Dress:
    metadata, group = tensor.metadata(), tensor._process_group
    places = [shard.metadata for shard in tensor.local_shards()]

    def dress(locals_: list[torch.Tensor]) -> ShardedTensor:
        shards = [Shard(local, place) for local, place in zip(locals_, places, strict=True)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=metadata, process_group=group
        )

    return dress


# -- torch's distributed checkpoints ----------------------------------------------------------------------------------


def write_shards(state: dict[str, Any], folder: Path, group: Any = None) -> Sums:
    """Write a sharded state into a folder, one file per rank; every rank must call this.

    Args:
        state: The state, with torch's sharded tensors.
        folder: The folder; made where it does not exist.
        group: As for `StatePart.write`.

    Returns:
        The files that this rank wrote.

    Raises:
        ShardsError: Some rank could not.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    # torch's writer makes the folder, in a step whose failure on one rank every rank learns of.
    writer, files = FileSystemWriter(folder), _SummedFiles()
    writer.fs = files
    try:
        # The manifest has sums of whole files; torch's, of each record, cost as much again. Set for this thread only.
        with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise ShardsError({rank: failure for rank, (failure, _) in error.failures.items()}) from error
    return files.sums


def read_shards(state: dict[str, Any], folder: Path) -> None:
    """Fill a sharded state from a folder; every rank must call this.

    Args:
        state: The state, with torch's sharded tensors.
        folder: The folder.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FileSystemReader(folder))


class _SummedFiles(FileSystem):
    """Files whose sums are made while they are written: to read a gigabyte again for them takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Sums = {}

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
            stream = _SummedStream(file)
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


_SMALL, _FULL = 1 << 12, 1 << 18


@dataclass
class _SummedStream:
    """What torch calls of a file that it writes from the beginning to the end.

    torch writes a tensor in some forty pieces, of which one is large: the small ones are collected.
    """

    file: Any
    size: int = 0
    crc: int = 0
    _collected: bytearray = field(default_factory=bytearray)

    def write(self, content: Any) -> int:
        size = len(content)
        self.size += size
        if size < _SMALL:
            self._collected += content
            if len(self._collected) > _FULL:
                self._pass_on()
            return size
        self._pass_on()
        self.crc = zlib.crc32(content, self.crc)
        self.file.write(content)
        return size

    def _pass_on(self) -> None:
        if self._collected:
            self.crc = zlib.crc32(self._collected, self.crc)
            self.file.write(self._collected)
            self._collected = bytearray()

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._pass_on()
        self.file.flush()
        return int(self.file.fileno())

    def flush(self) -> None:
        """Do nothing: torch asks for it after every tensor."""

    def close(self) -> None:
        self._pass_on()
        self.file.close()
