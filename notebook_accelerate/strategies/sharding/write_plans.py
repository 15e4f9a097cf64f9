"""Who writes what of a sharded state: planned by torch once, kept as long as no rank's part changes its form.

torch's plan for a thousand tensors takes every rank half a second of Python, as much as writing a hundred megabytes:
all ranks' parts are listed, sent to one rank, compared, sent back, and what was written is sent around once more.
"""

from __future__ import annotations

import io
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from notebook_accelerate.strategies.sharding.shard_files import (
    Infos,
    ShardWriter,
    SummedFiles,
    Sums,
    is_object,
    unsummed,
    write_file,
)

Place = tuple[Any, ...]
"""Keys and positions that lead to a value of a nested state."""
Outline = list[Any]
"""All that a plan depends on: of each value its place and its form, in plain data."""


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
class _Item:
    """One entry of a rank's file, and where the state has it."""

    index: MetadataIndex
    place: Place
    is_object: bool


@dataclass
class _Plan:
    """What a rank does for each checkpoint of a state of one form."""

    token: str
    """The same on all ranks, for this plan alone."""
    outline: Outline
    name: str
    """Name of the rank's file."""
    items: list[_Item]
    infos: Infos
    """Where the file had what at the last time."""
    metadata: Metadata | None
    """What all ranks had written then, on the rank that writes it down."""
    written: bytes = b""
    """The same as a file; nothing where it has changed."""


_plans: dict[str, _Plan] = {}


def clear_plans() -> None:
    """Let go of all plans."""
    _plans.clear()


def write_planned(value: Any, outline: Outline | None, state: Any, folder: Path, group: Any = None) -> Sums:
    """Write a rank's part of a sharded state into a folder; every rank must call this.

    Args:
        value: The part, without torch's wrappers.
        outline: Its form; None where it takes a plan of its own each time.
        state: Makes the part with torch's wrappers.
        folder: The folder; made where it does not exist.
        group: Processes that agree on who writes what, beside training; None: torch's default group, in its place.

    Returns:
        The files that this rank wrote, on the disk itself.

    Raises:
        ShardsError: Some rank could not.
    """
    plan = _plans.get(folder.name) if outline is not None else None
    if plan is not None and plan.outline != outline:
        plan = None
    offers = _exchange((None if plan is None else plan.token, uuid.uuid4().hex), group)
    if plan is not None and {token for token, _ in offers} == {plan.token}:
        return _write_again(plan, value, folder, group)
    writer = _plan_and_write(state(), planner := DefaultSavePlanner(), folder, group)
    _plans.pop(folder.name, None)
    if outline is not None and (items := _places(writer, planner, value)) is not None:
        _plans[folder.name] = _Plan(offers[0][1], outline, writer.name, items, writer.infos, writer.metadata)
    return writer.files.sums


def _plan_and_write(state: Any, planner: DefaultSavePlanner, folder: Path, group: Any) -> ShardWriter:
    writer = ShardWriter(folder, beside=group is not None)
    try:
        with unsummed():
            save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise ShardsError({rank: failure for rank, (failure, _) in error.failures.items()}) from error
    return writer


def _places(writer: ShardWriter, planner: DefaultSavePlanner, value: Any) -> list[_Item] | None:
    """Find what was written in the state itself; None where torch has put something else in its file."""
    items = []
    for item in writer.items:
        try:
            found = _at(value, place := planner.mappings[item.index.fqn])
        except (LookupError, TypeError):  # torch makes texts of keys
            return None
        if not is_object(item) and not _is_same(found, planner.resolve_data(item)):
            return None
        items.append(_Item(item.index, place, is_object(item)))
    return items


def _is_same(found: Any, written: Any) -> bool:
    both = isinstance(found, torch.Tensor) and isinstance(written, torch.Tensor)
    return both and found.data_ptr() == written.data_ptr() and found.shape == written.shape


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


# -- with a kept plan -------------------------------------------------------------------------------------------------


def _write_again(plan: _Plan, value: Any, folder: Path, group: Any) -> Sums:
    """Write what the plan says; a failure on one rank is every rank's."""
    files, infos, failure = SummedFiles(beside=group is not None), {}, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unsummed():
            infos = write_file(files, folder / plan.name, _contents(plan, value))
    except BaseException as error:  # noqa: BLE001 - raised below, once the others know
        failure = error
    changed = {index: info for index, info in infos.items() if plan.infos[index] != info}
    parts = _agreed(failure, changed, group)
    plan.infos.update(changed)
    if plan.metadata is not None:
        failure = _attempt_metadata(plan, parts, files, folder)
    _agreed(failure, None, group)
    return files.sums


def _contents(plan: _Plan, value: Any) -> Iterator[tuple[MetadataIndex, Any]]:
    for item in plan.items:
        found = _at(value, item.place)
        if item.is_object:
            stream = io.BytesIO()
            torch.save(found, stream)
            found = stream
        yield item.index, found


def _attempt_metadata(plan: _Plan, parts: list[Infos], files: SummedFiles, folder: Path) -> BaseException | None:
    """Write down what all ranks have written, and return what went wrong."""
    assert plan.metadata is not None
    try:
        for changed in parts:
            plan.metadata.storage_data.update(changed)
        if any(parts) or not plan.written:
            plan.written = pickle.dumps(plan.metadata)
        path = folder / ".metadata"
        with files.create_stream(beside := path.with_suffix(".tmp"), "wb") as stream:
            stream.write(plan.written)
            stream.sync()
        files.rename(beside, path)
    except BaseException as error:  # noqa: BLE001 - raised by the caller, once the others know
        return error
    return None


def _agreed(failure: BaseException | None, value: Any, group: Any) -> list[Any]:
    """Return every rank's value, or raise every rank's failures; every rank must call this."""
    found = _exchange((_sendable(failure), value), group)
    if failures := {rank: error for rank, (error, _) in enumerate(found) if error is not None}:
        raise ShardsError(failures) from failure
    return [value for _, value in found]


def _sendable(failure: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # noqa: BLE001 - of whatever kind it is
        return RuntimeError(f"{type(failure).__name__}: {failure}")
    return failure


def _exchange(value: Any, group: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
