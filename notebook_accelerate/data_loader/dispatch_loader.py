"""The loader that reads the dataset on rank 0 and sends each rank its part."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from notebook_accelerate.collectives import (
    broadcast,
    broadcast_object_list,
    child_of,
    concatenate,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    is_container,
    leaves_of,
    map_children,
    recursively_apply,
    send_to_device,
    slice_tensors,
    with_tensors,
)
from notebook_accelerate.data_loader.pass_order import draw_order
from notebook_accelerate.data_loader.prepared_loader import NOTHING, PreparedDataLoader
from notebook_accelerate.data_loader.samplers import advance
from notebook_accelerate.data_loader.shard_loader import data_parallel_rank
from notebook_accelerate.state import GradientState, PartialState
from notebook_accelerate.telemetry import step_time

Column: TypeAlias = "torch.Tensor | list[Any] | tuple[Any, ...]"
"""The type of a part of a batch that has one entry per sample."""

# The kinds of announcements that rank 0 broadcasts before a round.
_END, _SAME_FORM, _NEW_FORM, _FAILED = range(4)


class DataLoaderDispatcher(PreparedDataLoader):
    """A loader that reads its dataset only on rank 0, and gives each rank its part of each round.

    Sending a round takes one small broadcast, and one broadcast per dtype. The structure of a batch is sent only when
    it changes.

    Args:
        dataset: The dataset to load from, which only rank 0 uses.
        split_batches: Whether a round is one batch that is split between the ranks. If False, a round consists of one
            batch for each rank.
        skip_batches: The number of rounds to skip at the start of each pass.
        use_stateful_dataloader: Whether to use torchdata's StatefulDataLoader.
        _drop_last: Whether to drop the last round if it is not full.
        _non_blocking: Whether to copy batches to the device asynchronously.
        slice_fn: A function with the arguments of `slice_tensors` that returns a rank's part of a round.
        torch_device_mesh: A device mesh. Ranks that differ only in model-parallel dimensions get the same part.
        iteration: The epoch of the first pass.
        **kwargs: Arguments for torch's DataLoader.

    Attributes:
        submesh_tp, submesh_dp, submesh_fsdp: Dimensions of the mesh if it has a dimension tp, otherwise None.
    """

    submesh_tp: Any
    submesh_dp: Any
    submesh_fsdp: Any

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self.state = PartialState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.torch_device_mesh = torch_device_mesh
        names = getattr(torch_device_mesh, "mesh_dim_names", None) or ()
        for name in ("tp", "dp", "fsdp"):
            setattr(self, f"submesh_{name}", torch_device_mesh[name] if {"tp", name} <= {*names} else None)
        self.iteration = iteration
        self.dp_size, self.dp_rank = data_parallel_rank(
            torch_device_mesh, self.state.num_processes, self.state.process_index
        )
        self.device = self.state.device
        self._reads_dataset = self.state.process_index == 0
        self._reads_one_ahead = self.state.num_processes == 1
        self._opening: list[Column] | None = None  # The first samples of this epoch, which pad its last round.

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self._local_batches() if self.state.num_processes == 1 else self._dispatched_batches()
        return step_time.waiting(batches) if step_time.running() else batches

    def _dispatched_batches(self) -> Iterator[Any]:
        """Yield this rank's part of each round."""
        try:
            self.begin()
            self.set_epoch(self.iteration)
            for batch, size, last in self._send_rounds() if self._reads_dataset else self._receive_rounds():
                if last:
                    self.remainder = -1 if self._drop_last else size
                    self._mark_last_batch(batch)
                else:
                    self.gradient_state._add_dataloader(self)
                yield self._rank_part(batch)
            self._finish_pass()
        finally:
            self.end()

    def _rank_part(self, batch: Any) -> Any:
        """Return this rank's part of a round."""
        if self.dp_size == 1:
            return batch
        size = _size(batch)
        part = math.ceil(size / self.dp_size)
        own = slice(part * self.dp_rank, part * (self.dp_rank + 1))
        if self.slice_fn is slice_tensors:
            return _map_columns(lambda column: column[own], batch, size)
        return self.slice_fn(batch, own, process_index=self.dp_rank, num_processes=self.dp_size)

    def _mark_last_batch(self, batch: Any) -> None:
        """Record that the next batch is the last one.

        With a single rank, the size of the batch is the number of samples in its round.
        """
        super()._mark_last_batch(batch)
        size = ignorant_find_batch_size(batch)
        if self.is_only_rank and not self._drop_last and size is not None:
            self.remainder = size

    # ---- sending and receiving

    def _send_rounds(self) -> Iterator[tuple[Any, int, bool]]:
        """Read rounds on rank 0, one round ahead, and send them to the other ranks.

        Yields:
            Each round on the device, its number of samples without padding (-1 if unknown), and whether it is the last
            one.
        """
        form = b""
        rounds = self._reporting_failure(self._open_rounds)
        upcoming = self._reporting_failure(next, rounds, NOTHING)
        if upcoming is NOTHING:
            self._announce(_END)
        while upcoming is not NOTHING:
            batch, size = upcoming
            batch = send_to_device(batch, self.state.device, non_blocking=self._non_blocking)
            upcoming = self._reporting_failure(next, rounds, NOTHING)
            last = upcoming is NOTHING
            described = self._reporting_failure(_description, batch)
            self._announce(_SAME_FORM if described == form else _NEW_FORM, size, last)
            if described != form:
                broadcast_object_list([described])
            form = described
            yield _broadcast_tensors(batch), size, last

    def _receive_rounds(self) -> Iterator[tuple[Any, int, bool]]:
        """Receive the rounds that rank 0 sends.

        Yields:
            The same tuples that `_send_rounds` yields on rank 0.
        """
        self._draw_as_reader()
        form: Any = None
        last = False
        while not last:
            kind, size, last = broadcast(torch.zeros(3, dtype=torch.int64, device=self.state.device)).tolist()
            if kind == _END:
                return
            if kind != _SAME_FORM:
                (form,) = broadcast_object_list([None])
            if kind == _FAILED:
                raise RuntimeError(f"Rank 0 could not read the next batch, so this rank does not get one: {form}")
            yield _broadcast_tensors(initialize_tensors(pickle.loads(form))), size, bool(last)

    def _draw_as_reader(self) -> None:
        """Draw the same random numbers as rank 0 does when it starts a pass.

        Ranks with equal seeds then keep equal random states, so that dropout and shared decisions agree.
        """
        resumed, self._order.resumed = self._order.resumed, None
        if self._is_over or self._loaded_position():
            return
        is_drawn = self._has_drawn_seed() or self._resumes
        if not is_drawn and not self.workers_seeded:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self.workers_seeded = True
        # With workers, or if the sampler is not wrapped, creating the iterator draws the order.
        is_late = not self.num_workers and getattr(self._index_sampler, "draws_late", False)
        if resumed is None and (is_late or not is_drawn):
            draw_order(self)

    def _announce(self, kind: int, size: int = 0, last: bool = False) -> None:
        broadcast(torch.tensor([kind, size, int(last)], device=self.state.device))

    def _reporting_failure(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on rank 0. If it raises, send the error to the other ranks, which are waiting."""
        try:
            return function(*args)
        except Exception as error:
            self._announce(_FAILED)
            broadcast_object_list([f"{type(error).__name__}: {error}"])
            raise

    # ---- reading, on rank 0

    def _open_rounds(self) -> Iterator[tuple[Any, int]]:
        """Start reading, and return an iterator over rounds."""
        rounds = self._track_position(self._pad_rounds(self._join_rounds(self._read_batches())))
        return advance(rounds, self.skip_batches)

    def _join_rounds(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Concatenate the batches of each round."""
        if self.split_batches or self.dp_size == 1:
            yield from batches
            return
        while group := list(itertools.islice(batches, self.dp_size)):
            joined = _concatenated(group)
            if not self._drop_last or _size(joined) == self.dp_size * _size(group[0]):
                yield joined

    def _pad_rounds(self, rounds: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        """Pad rounds that cannot be split evenly, using the first samples of the epoch.

        If the first samples have a different form, such as longer sequences, a round is padded with its own samples.

        Yields:
            Each round, and its number of samples without padding.
        """
        for batch in rounds:
            if self.dp_size == 1:
                yield batch, -1 if (found := ignorant_find_batch_size(batch)) is None else found
                continue
            size = _size(batch)
            if self._opening is None:
                self._opening = [_first(column, self.dp_size - 1) for column in _columns(batch, size)]
            missing = -size % self.dp_size
            yield (_padded(batch, size, missing, self._opening) if missing else batch), size
        self._opening = None

    def _extra_state(self) -> dict[str, Any]:
        return {"opening": self._opening}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        self._opening = state.get("opening")

    def __len__(self) -> int:
        batches = super(PreparedDataLoader, self).__len__()
        if not self.split_batches:
            batches = batches // self.dp_size if self._drop_last else math.ceil(batches / self.dp_size)
        return max(batches - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int:
        """The number of samples in one round, for all ranks together."""
        size = int(getattr(self.batch_sampler, "batch_size", None) or self.batch_size or 1)
        return size if self.split_batches else size * self.dp_size


def _broadcast_tensors(batch: Any) -> Any:
    """Broadcast the tensors of rank 0. Everything else has already been sent as a part of the description."""
    leaves = leaves_of(batch)
    return with_tensors(batch, broadcast(leaves)) if leaves else batch


def _description(batch: Any) -> bytes:
    """Return a description of a batch without the values of its tensors. Descriptions can be compared."""
    return pickle.dumps(get_data_structure(batch))


def _size(batch: Any) -> int:
    """Count the samples in a batch."""
    size = ignorant_find_batch_size(batch)
    if size is None:
        raise ValueError(
            "a batch contains no tensors, but dispatch_batches=True splits batches along the first dimension of their "
            "tensors; pass DataLoaderConfiguration(dispatch_batches=False)"
        )
    return size


def _is_column(node: Any, size: int) -> bool:
    """Return whether a part of a batch is a column: a tensor, or a list of objects, with one entry for each sample.

    torch's collate function keeps strings in lists. If the items of a list are tuples with one entry for each sample,
    the list is not a column itself, but contains a column for each field. Any other list of the right length is a
    column.
    """
    if isinstance(node, torch.Tensor):
        return True
    if type(node) not in (list, tuple) or len(node) != size or leaves_of(node):
        return False
    return not all(type(item) is tuple and len(item) == size for item in node)


def _map_columns(function: Callable[[Any], Any], batch: Any, size: int) -> Any:
    """Return a copy of a batch with a function applied to each column."""
    return recursively_apply(function, batch, test_type=lambda node: _is_column(node, size))


def _columns(batch: Any, size: int) -> list[Column]:
    """List the columns of a batch, in the batch's order."""
    columns: list[Column] = []
    _map_columns(columns.append, batch, size)
    return columns


def _first(column: Any, count: int) -> Any:
    """Copy the first entries of a column."""
    return column[:count].clone() if isinstance(column, torch.Tensor) else column[:count]


def _padded(batch: Any, size: int, missing: int, opening: list[Column]) -> Any:
    """Append samples to a batch: the first ones of the epoch if their form is the same, otherwise the batch's own."""
    own = _columns(batch, size)
    sources = opening if len(opening) == len(own) and all(map(_can_be_joined, own, opening)) else own
    padding = iter(sources)

    def padded(column: Any) -> Any:
        source = next(padding)
        pieces = [source[: min(len(source), missing - i)] for i in range(0, missing, len(source))]
        return _joined_column([column, *pieces])

    return _map_columns(padded, batch, size)


def _can_be_joined(column: Any, other: Any) -> bool:
    if isinstance(column, torch.Tensor) and isinstance(other, torch.Tensor):
        return column.shape[1:] == other.shape[1:] and column.dtype == other.dtype and len(other) > 0
    return type(column) is type(other) and len(other) > 0


def _joined_column(pieces: list[Any]) -> Any:
    """Concatenate columns. Tuples are joined into one tuple, and lists into one list."""
    if isinstance(pieces[0], torch.Tensor):
        return torch.cat(pieces)
    return type(pieces[0])(itertools.chain.from_iterable(pieces))


def _concatenated(batches: list[Any]) -> Any:
    """Concatenate batches along their first dimension."""
    if len(batches) == 1:
        return batches[0]
    try:
        return _joined(batches, [_size(batch) for batch in batches])
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            "dispatch_batches=True concatenates one batch per rank, but these batches cannot be concatenated: "
            f"{error}. Return batches of the same form from collate_fn (tensors that differ only in their first "
            "dimension, lists with one entry per sample), or pass DataLoaderConfiguration(dispatch_batches=True, "
            "split_batches=True) or DataLoaderConfiguration(dispatch_batches=False)."
        ) from error


def _joined(nodes: list[Any], sizes: list[int]) -> Any:
    """Concatenate the parts that are in the same position in several batches."""
    if all(map(_is_column, nodes, sizes)):
        return _joined_column(nodes)
    if not is_container(nodes[0]):
        return concatenate(nodes)
    return map_children(nodes[0], lambda key, _: _joined([child_of(node, key) for node in nodes], sizes))
