"""The loader that reads on rank 0 and sends every rank its part."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from notebook_accelerate.collectives import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    leaves_of,
    send_to_device,
    slice_tensors,
    with_leaves,
)
from notebook_accelerate.data_loader.mesh_ranks import data_parallel_place
from notebook_accelerate.data_loader.prepared_loader import NOTHING, PreparedDataLoader
from notebook_accelerate.data_loader.stream_skipping import advance
from notebook_accelerate.state import GradientState, PartialState
from notebook_accelerate.telemetry import step_time

# What rank 0 announces before a round.
_END, _SAME_FORM, _NEW_FORM, _FAILED = range(4)


class DataLoaderDispatcher(PreparedDataLoader):
    """A loader of which only rank 0 reads the dataset; every rank gets its part of what was read.

    A round costs one small broadcast and one per dtype; what a batch looks like is sent only when it changes.

    Args:
        dataset: The dataset to load from; only rank 0 uses it.
        split_batches: A batch that was read is cut into parts for the ranks; otherwise rank 0 reads as many batches as
            there are ranks for one round.
        skip_batches: Rounds to leave out at the start.
        use_stateful_dataloader: Build on torchdata's StatefulDataLoader.
        _drop_last: A last round that is not full is dropped.
        _non_blocking: Copy to the device without waiting.
        slice_fn: Cuts a rank's part out of a round, called as `slice_tensors`.
        torch_device_mesh: Ranks that differ only in its model-parallel dimensions get the same part.
        iteration: Epoch of the first pass.
        **kwargs: What torch's DataLoader takes.
    """

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
        self.iteration = iteration
        place = data_parallel_place(torch_device_mesh, self.state.num_processes, self.state.process_index)
        self.count, self.place = place
        self.device = self.state.device
        self._reads = self.state.process_index == 0
        self._steps_back = self.state.num_processes == 1
        self._opening: list[torch.Tensor] | None = None  # the first samples of this epoch, to fill up its last round

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self._in_turn() if self.state.num_processes == 1 else self._dispatched()
        return step_time.waiting(batches) if step_time.running() else batches

    def _dispatched(self) -> Iterator[Any]:
        """Hand out this rank's part of every round."""
        try:
            self.begin()
            self.set_epoch(self.iteration)
            for batch, size, last in self._sent() if self._reads else self._received():
                if last:
                    self.remainder = -1 if self._drop_last else size
                    self._note_last()
                else:
                    self.gradient_state._add_dataloader(self)
                yield self._part(batch)
            self._finish_pass()
        finally:
            self.end()

    def _part(self, batch: Any) -> Any:
        """Cut this rank's part out of a round."""
        if self.count == 1:
            return batch
        part = math.ceil(_size(batch) / self.count)
        own = slice(part * self.place, part * (self.place + 1))
        return self.slice_fn(batch, own, process_index=self.place, num_processes=self.count)

    # ---- sending and receiving

    def _sent(self) -> Iterator[tuple[Any, int, bool]]:
        """Read rounds on rank 0, one ahead, and send them.

        Yields:
            A round on the device, how many of its samples are no padding (-1: not known), and whether it is the last.
        """
        form = b""
        rounds = self._told(self._open_rounds)
        upcoming = self._told(next, rounds, NOTHING)
        if upcoming is NOTHING:
            self._announce(_END)
        while upcoming is not NOTHING:
            batch, size = upcoming
            batch = send_to_device(batch, self.state.device, non_blocking=self._non_blocking)
            upcoming = self._told(next, rounds, NOTHING)
            last = upcoming is NOTHING
            described = self._told(_described, batch)
            self._announce(_SAME_FORM if described == form else _NEW_FORM, size, last)
            if described != form:
                broadcast_object_list([described])
            form = described
            yield _shared(batch), size, last

    def _received(self) -> Iterator[tuple[Any, int, bool]]:
        """Receive the rounds that rank 0 sends.

        Yields:
            What `_sent` yields on rank 0.
        """
        form: Any = None
        last = False
        while not last:
            kind, size, last = broadcast(torch.zeros(3, dtype=torch.int64, device=self.state.device)).tolist()
            if kind == _END:
                return
            if kind != _SAME_FORM:
                (form,) = broadcast_object_list([None])
            if kind == _FAILED:
                raise RuntimeError(f"Rank 0 could not read the next batch, so there is none for this rank: {form}")
            yield _shared(initialize_tensors(pickle.loads(form))), size, bool(last)

    def _announce(self, kind: int, size: int = 0, last: bool = False) -> None:
        broadcast(torch.tensor([kind, size, int(last)], device=self.state.device))

    def _told(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call what may fail on rank 0 only; if it does, tell the ranks that wait."""
        try:
            return function(*args)
        except Exception as error:
            self._announce(_FAILED)
            broadcast_object_list([f"{type(error).__name__}: {error}"])
            raise

    # ---- reading, on rank 0

    def _open_rounds(self) -> Iterator[tuple[Any, int]]:
        """Start reading."""
        rounds = self._watched(self._filled(self._rounds(self._read())))
        return advance(rounds, self.skip_batches)

    def _rounds(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Join the batches of one round."""
        if self.split_batches or self.count == 1:
            yield from batches
            return
        while group := list(itertools.islice(batches, self.count)):
            joined = _joined(group)
            if not self._drop_last or _size(joined) == self.count * _size(group[0]):
                yield joined

    def _filled(self, rounds: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        """Let a round that cannot be divided go on with the first samples of the epoch.

        Yields:
            A round and how many of its samples are no padding.
        """
        for batch in rounds:
            if self.count == 1:
                yield batch, -1 if (found := ignorant_find_batch_size(batch)) is None else found
                continue
            if self._opening is None:
                self._opening = [tensor[: self.count - 1].clone() for tensor in leaves_of(batch)]
            size = _size(batch)
            opening = with_leaves(batch, self._opening)
            missing, kept = -size % self.count, _size(opening)
            parts = [slice_tensors(opening, slice(0, min(kept, missing - i))) for i in range(0, missing, kept)]
            yield (concatenate([batch, *parts]) if missing else batch), size
        self._opening = None

    def _more_state(self) -> dict[str, Any]:
        return {"opening": self._opening}

    def _load_more_state(self, state: dict[str, Any]) -> None:
        self._opening = state.get("opening")

    def __len__(self) -> int:
        batches = super(PreparedDataLoader, self).__len__()
        if not self.split_batches:
            batches = batches // self.count if self._drop_last else math.ceil(batches / self.count)
        return max(batches - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int:
        """Number of samples of one round, for all ranks together."""
        size = int(getattr(self.batch_sampler, "batch_size", None) or self.batch_size or 1)
        return size if self.split_batches else size * self.count


def _shared(batch: Any) -> Any:
    """Give every rank the tensors of rank 0; what is no tensor has come with the description."""
    leaves = leaves_of(batch)
    return with_leaves(batch, broadcast(leaves)) if leaves else batch


def _described(batch: Any) -> bytes:
    """Describe a batch without the values of its tensors, in a form that can be compared."""
    return pickle.dumps(get_data_structure(batch))


def _size(batch: Any) -> int:
    """Count the samples of a batch."""
    size = find_batch_size(batch)
    if size is None:
        raise ValueError(
            "dispatch_batches divides batches along the first dimension of their tensors; got an empty one."
        )
    return size


def _joined(batches: list[Any]) -> Any:
    """Join batches along their first dimension."""
    if len(batches) == 1:
        return batches[0]
    try:
        return concatenate(batches)
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            "dispatch_batches joins one batch per rank into one, and these cannot be joined: "
            f"{error}. Give all batches the same form in collate_fn (tensors that differ in their first dimension "
            "only), or use DataLoaderConfiguration(dispatch_batches=True, split_batches=True), or "
            "DataLoaderConfiguration(dispatch_batches=False)."
        ) from error
