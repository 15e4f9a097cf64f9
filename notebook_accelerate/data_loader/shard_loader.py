"""Loaders for ranks that read their own share of the data, and functions that determine that share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from notebook_accelerate.collectives import broadcast, ignorant_find_batch_size, send_to_device
from notebook_accelerate.config.enums import RNGType
from notebook_accelerate.data_loader.prepared_loader import PreparedDataLoader
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    index_source,
    innermost,
)
from notebook_accelerate.state import GradientState, PartialState
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.telemetry import step_time


class DataLoaderShard(PreparedDataLoader):
    """A loader that moves batches to a device, and reads one batch ahead to know which one is the last.

    Args:
        dataset: The dataset to load from.
        device: The device of the batches. If None, batches are not moved.
        rng_types: The random number generators to synchronise across ranks at the start of each pass.
        synchronized_generator: The generator to use for ``"generator"`` in `rng_types`.
        skip_batches: The number of batches to skip at the start of each pass.
        use_stateful_dataloader: Whether to use torchdata's StatefulDataLoader.
        _drop_last: Whether the last incomplete round is dropped, so that there is no padding.
        _non_blocking: Whether to copy batches to the device asynchronously.
        torch_device_mesh: Accepted for compatibility, but not used. `prepare_data_loader` determines what each rank
            reads.
        iteration: The epoch of the first pass.
        **kwargs: Arguments for torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration
        if self.num_workers == 1 and isinstance(dataset, IterableDatasetShard):
            dataset.share_last_round()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return step_time.waiting(self._local_batches()) if step_time.running() else self._local_batches()

    def _start_pass(self) -> Iterator[Any]:
        """Synchronise the random numbers and start a pass."""
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        sampler = get_sampler(self)
        if isinstance(sampler, SeedableRandomSampler) and isinstance(self._batch_shard(), BatchSamplerShard):
            sampler.share_seed()
        return super()._start_pass()

    def _mark_last_batch(self, batch: Any) -> None:
        """Record that the next batch is the last one, and how many samples of its round are not padding."""
        super()._mark_last_batch(batch)
        shard = self.dataset if isinstance(self.dataset, IterableDatasetShard) else self._batch_shard()
        # A shard in this process or in a single worker has now reached its end. Shards in several workers do not share
        # their last round with this process.
        if isinstance(shard, IterableDatasetShard | BatchSamplerShard):
            if shard.last_round is not None:
                self.remainder = -1 if self._drop_last else shard.last_round
        elif self.is_only_rank and not self._drop_last and not self._length_is_exact:
            size = ignorant_find_batch_size(batch)
            if size is not None:
                self.remainder = 0 if size == self.total_batch_size else size

    @property
    def _length_is_exact(self) -> bool:
        """Whether the length of the sampler is the number of samples in a pass.

        A stream may have no length or a wrong one, and a custom batch sampler may create batches of any size. In these
        cases, samples are counted in the last batch itself.
        """
        batches = innermost(index_source(self))
        return (
            isinstance(batches, BatchSampler)
            and hasattr(batches.sampler, "__len__")
            and not isinstance(self.dataset, IterableDataset)
        )

    def _batch_shard(self) -> Any:
        """Return the batch sampler that divides the data, which may be inside others that skip batches."""
        batch_sampler: Any = index_source(self)
        while isinstance(batch_sampler, SkipBatchSampler):
            batch_sampler = batch_sampler.batch_sampler
        return batch_sampler

    @property
    def total_batch_size(self) -> int:
        """The number of samples per round, for all ranks together."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.window
        shard = self._batch_shard()
        if not isinstance(shard, BatchSamplerShard):
            return int(getattr(shard, "batch_size", 1))
        return int(shard.batch_size) * (1 if shard.split_batches else shard.num_processes)


# ---- sequence-parallel ranks

_NEEDED = ("input_ids", "position_ids", "labels")
Splitter = Callable[[Iterable[Any]], Iterable[Any]]


class SequenceLoader(DataLoader[Any]):
    """A loader that yields this rank's piece of every sequence that the sequence-parallel ranks read.

    Each rank reads its own batches. When all ranks have read a batch, this rank gets its piece of the first rank's
    batch, then of the second rank's, and so on. A pass therefore has `ranks` times as many batches. All other
    attributes come from the inner loader.

    Args:
        loader: The prepared loader of this rank's batches.
        split: A function that takes an iterable of this rank's batches, and returns an iterable of pieces.
        ranks: The number of ranks that share sequences.
        rows: The number of sequences in each batch. If None, any number is allowed.
        device: The device that pieces are moved to. If None, they are not moved.
        skipped: The number of pieces to skip at the start of each pass.

    Attributes:
        loader: The loader of this rank's batches.
    """

    def __init__(
        self,
        loader: Any,
        split: Splitter,
        ranks: int,
        rows: int | None = None,
        device: torch.device | None = None,
        skipped: int = 0,
    ) -> None:
        # Don't call DataLoader.__init__, because this loader is only a view of another one, and has no dataset or
        # workers.
        self.loader, self.ranks, self.rows, self.device = loader, ranks, rows, device
        self._split, self._skipped = split, skipped
        loader.hands_out_pieces = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # The attribute is not set yet while the object is copied.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(len(self.loader) * self.ranks - self._skipped, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ended = False
        for number, piece in enumerate(self._split(self._checked())):
            ended = ended or self.loader.end_of_dataloader
            # The pass ends with the last rank's batch. A piece does not say which of its samples are padding.
            self.loader.end_of_dataloader = self.loader.exhausted = ended and number % self.ranks == self.ranks - 1
            self.loader.remainder = -1
            if number >= self._skipped:
                yield send_to_device(_contiguous(piece), self.device) if self.device is not None else _contiguous(piece)

    def _checked(self) -> Iterator[Any]:
        for batch in self.loader:
            _check(batch, self.rows)
            yield batch

    def skipping(self, skip: Callable[[Any, int], Any], count: int) -> SequenceLoader:
        """Return a copy of this loader that skips `count` more pieces at the start of every pass.

        Args:
            skip: A function that returns a copy of the inner loader that skips batches.
            count: The number of pieces to skip.
        """
        batches, pieces = divmod(self._skipped + count, self.ranks)
        return SequenceLoader(skip(self.loader, batches), self._split, self.ranks, self.rows, self.device, pieces)


def _check(batch: Any, rows: int | None) -> None:
    missing = [name for name in _NEEDED if not isinstance(batch, Mapping) or name not in batch]
    if missing:
        had = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"a batch has {had}, but no {', '.join(missing)}; splitting sequences needs input_ids, position_ids and "
            "labels of shape [batch, sequence]. Add the missing ones in collate_fn, for example "
            "batch['position_ids'] = torch.arange(length).expand(rows, -1)"
        )
    count = len(batch["input_ids"])
    if rows is not None and count != rows:
        raise ValueError(
            f"a batch has {count} sequences, but DeepSpeed's attention was created for {rows} in each batch; pass "
            "DataLoader(..., drop_last=True), or keep even_batches=True"
        )
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        warn_once(
            "attention_mask masks the beginning of sequences, but attention that is split across ranks ignores masks: "
            "pad sequences at their end, with labels of -100"
        )


def _contiguous(piece: Any) -> Any:
    """Return a piece with contiguous tensors.

    Models reshape these tensors, and a view would keep the whole sequence in memory.
    """
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in piece.items()}


# ---- which ranks read different data

# Ranks that differ only in these dimensions use the same samples, because they share a model, a sequence or a pipeline.
# Ranks along "sp" share sequences, too, but each of them reads different ones, which `SequenceLoader` combines.
MODEL_DIMENSIONS = frozenset({"tp", "cp", "pp", "ep"})


def data_parallel_rank(mesh: Any, num_processes: int, process_index: int) -> tuple[int, int]:
    """Return this rank's index among the ranks that read different data.

    Args:
        mesh: A torch DeviceMesh with named dimensions, or None if all ranks are data parallel.
        num_processes: The number of all ranks.
        process_index: The index of this rank.

    Returns:
        The number of ranks that read different data, and this rank's index among them.
    """
    if mesh is None or not mesh.mesh_dim_names:
        return num_processes, process_index
    dp_size, dp_rank = 1, 0
    for name, size, position in zip(mesh.mesh_dim_names, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name not in MODEL_DIMENSIONS:
            dp_size, dp_rank = dp_size * size, dp_rank * size + position
    return dp_size, dp_rank


# ---- equal random numbers on all ranks


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None, num_processes: int | None = None
) -> None:
    """Copy the state of one random number generator from rank 0 to all ranks; every rank must call this.

    Args:
        rng_type: A member of RNGType, or its value: ``"torch"`` for the CPU's generator, ``"generator"`` for
            `generator`, or a device type for the generator of this rank's device.
        generator: The generator to use for ``"generator"``.
        num_processes: The number of ranks. None means the number in `PartialState`. If 1, nothing is done.

    Raises:
        ValueError: `rng_type` is unknown, or is ``"generator"`` without a `generator`.
    """
    if rng_type not in list(RNGType) and rng_type not in RNGType.list():
        raise ValueError(f"rng_type={rng_type!r} is not allowed; pass one of {', '.join(RNGType.list())}")
    kind = RNGType(rng_type)
    if kind is RNGType.GENERATOR and generator is None:
        raise ValueError('rng_type="generator" needs a generator: synchronize_rng_state("generator", generator)')
    if (PartialState().num_processes if num_processes is None else num_processes) <= 1:
        return
    if kind is RNGType.GENERATOR:
        assert generator is not None
        generator.set_state(_from_rank_0(generator.get_state()))
    elif kind is RNGType.TORCH:
        torch.set_rng_state(_from_rank_0(torch.get_rng_state()))
    elif kind is RNGType.XLA:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int(_from_rank_0(torch.tensor(xm.get_rng_state())).item()))
    else:
        backend = getattr(torch, kind.value)
        backend.set_rng_state(_from_rank_0(backend.get_rng_state()))


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Copy the states of random number generators from rank 0 to all ranks; every rank must call this.

    Args:
        rng_types: Members of RNGType, or their values.
        generator: The generator to use for ``"generator"``.

    Raises:
        ValueError: A type is unknown, or is ``"generator"`` without a `generator`.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _from_rank_0(state: torch.Tensor) -> torch.Tensor:
    """Return the values that a small CPU tensor has on rank 0; every rank must call this."""
    received: torch.Tensor = broadcast(state.to(PartialState().device))
    return received.cpu()
