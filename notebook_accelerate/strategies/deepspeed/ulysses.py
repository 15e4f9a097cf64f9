"""DeepSpeed's sequence parallelism: each rank computes on a piece of every sequence, and on all of it for some heads.

Source: Jacobs et al., "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509; as DeepSpeed offers it for transformers'
models, https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accelerate.config.deepspeed_config import AUTO
from notebook_accelerate.data_loader import SequenceLoader
from notebook_accelerate.state import process_group
from notebook_accelerate.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from notebook_accelerate.strategies.deepspeed.initialize_arguments import Parts, part_kind
from notebook_accelerate.strategies.strategy_setup import Setup

_MICRO = "train_micro_batch_size_per_gpu"
_SHAPE = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
_MARK = "_splits_sequences_for"
_numbers = itertools.count(1)


class UlyssesStrategy(DeepSpeedStrategy):
    """DeepSpeed's ZeRO over all ranks, of which those along the dimension "sp" share sequences.

    Each rank reads batches of its own. Loaders that are prepared together with the model that is trained hand out
    pieces (`SequenceLoader`); others do so once they went through `deepspeed_ulysses_dl_adapter`.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        layout = setup.state.parallelism_config
        self._ranks, self._how = int(layout.sp_size), layout.sp_handler
        self._attention: SplitAttention | None = None
        self._starts = False

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """Prepare objects in any order; every rank must call this with the same kinds.

        Args:
            objects: Models, optimizers, loaders, schedulers. A model, its optimizer and its schedule come together.
            placements: For each, whether it goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared objects, in the order given.

        Raises:
            ValueError: Objects, configuration and layout contradict each other, or sequences of this model cannot be
                split.
        """
        before = self.engine
        results = super().prepare(objects, placements)
        if self.engine is not before:
            for at, item in enumerate(objects):
                if part_kind(item) == "data_loader":
                    results[at] = self.sequence_loader(results[at])
        return results

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Prepare a loader, which hands out whole sequences yet.

        Args:
            data_loader: The loader.
            device_placement: Whether batches go to the device; None means the Accelerator's setting.
            slice_fn_for_dispatch: How a batch that rank 0 reads is cut for the ranks; None: by the first dimension.

        Returns:
            The prepared loader; one that hands out pieces already is returned as it is.
        """
        if isinstance(data_loader, SequenceLoader):
            super().prepare_data_loader(data_loader.loader, device_placement, slice_fn_for_dispatch)
            return data_loader
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def sequence_loader(self, loader: Any) -> Any:
        """Make a loader hand out pieces of sequences; every rank must call this.

        Args:
            loader: A loader, prepared or not.

        Returns:
            The loader of pieces; one of pieces is returned as it is.

        Raises:
            ValueError: Ranks may have different numbers of batches, and would wait for each other for ever.
        """
        if isinstance(loader, SequenceLoader):
            return loader
        loader = self.prepare_data_loader(loader)
        if getattr(loader.batch_sampler, "even_batches", True) is False:
            raise ValueError(
                "even_batches=False gives ranks different numbers of batches, and ranks that share sequences read in "
                "step; write DataLoaderConfiguration(even_batches=True)"
            )
        mesh, device = self.setup.state.device_mesh["sp"], self.setup.device
        kind: Any = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter
        rank, group = mesh.get_local_rank(), mesh.get_group()

        def split(batches: Any) -> Any:
            return kind(batches, rank, group, self._ranks, device)

        return SequenceLoader(loader, split, self._ranks, self._rows(), loader.device)

    def _rows(self) -> int | None:
        rows = self.plugin.get_value(_MICRO)
        return None if rows in {None, AUTO} else int(rows)

    def _engine_of(self, parts: Parts) -> Any:
        """Make the engine of a training, whose model's attention exchanges heads for places."""
        parts.sequence_ranks = self._ranks
        self._starts = True
        try:
            return super()._engine_of(parts)
        finally:
            self._starts = False

    def _initialize(self, **arguments: Any) -> Any:
        if self._starts:
            self._attention = SplitAttention(arguments["model"], self._ranks, self._how)
            arguments["mpu"] = self._attention.start(self._rows(), self.setup.gradient_state)
        return super()._initialize(**arguments)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of the loss of whole sequences; every rank must call this.

        Args:
            loss: The loss over all pieces, gathered by torch.distributed.nn.functional.all_gather, divided by the
                batches of a window already.
            kwargs: As for `DeepSpeedStrategy.backward`.
        """
        super().backward(loss / self._counted(), **kwargs)

    def _counted(self) -> int:
        """Return how often DeepSpeed counts the gradients of a loss that every rank of a sequence has computed.

        The backward of all_gather sums over these ranks what is one gradient. DeepSpeed then sums over all ranks and
        divides by the number of sequences, or, where stage 3 scatters the sums, by the number of ranks.
        """
        if self.engine is None:
            return 1
        zero = self.engine.engine._config.zero_config
        return 1 if zero.stage == 3 and zero.reduce_scatter else self._ranks

    def clear(self) -> None:
        """Forget all prepared objects, and give the engine's memory and transformers' attention back."""
        super().clear()
        if self._attention is not None:
            self._attention.end()
        self._attention = None


class SplitAttention:
    """The attention of one model, exchanged between the ranks that share its sequences.

    DeepSpeed replaces the attention function of all of transformers' models in the process. Here all but one model
    keep theirs, and that one computes on whole sequences where it is evaluated on a loader that hands out no pieces.

    Args:
        model: A model of transformers.
        ranks: How many ranks share sequences.
        how: A `DeepSpeedSequenceParallelConfig`.

    Raises:
        ValueError: The model is none of transformers', or computes its attention in a way that cannot be split.
    """

    def __init__(self, model: nn.Module, ranks: int, how: Any) -> None:
        self._model, self._ranks, self._how = model, ranks, how
        self._name = _attention_of(model, how.sp_attn_implementation, ranks)
        self._whole: Any = None

    def start(self, rows: int | None, gradient_state: Any) -> Any:
        """Split the attention; every rank must call this.

        Args:
            rows: How many sequences each batch has.
            gradient_state: Tells which loader is read.

        Returns:
            What `deepspeed.initialize` takes as `mpu`: the groups of ranks.
        """
        functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        _forget_groups()
        whole = functions[self._name]
        ulysses = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
        groups = ulysses.register_with_transformers(
            self._model,
            self._name,
            self._ranks,
            rows,
            seq_length=self._how.sp_seq_length,
            seq_length_is_variable=self._how.sp_seq_length_is_variable,
        )
        split, number = functions[self._name], next(_numbers)
        for module in self._model.modules():
            setattr(module, _MARK, number)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(module, _MARK, None) != number:
                return whole(module, *args, **kwargs)
            pieces = module.training or getattr(gradient_state.active_dataloader, "hands_out_pieces", False)
            return (split if pieces else whole)(module, *args, **kwargs)

        functions[self._name], self._whole = attend, whole
        process_group.before_the_end(self.end)
        return groups

    def end(self) -> None:
        """Give transformers its attention back, and let go of the groups."""
        if self._whole is None:
            return
        functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        functions[self._name], self._whole = self._whole, None
        for module in self._model.modules():
            module.__dict__.pop(_MARK, None)
        _forget_groups()


def _forget_groups() -> None:
    """Have DeepSpeed forget the groups of an earlier training: it makes new ones only where it has none."""
    groups: Any = import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    groups._SEQUENCE_PARALLEL_GROUP = groups._SEQUENCE_DATA_PARALLEL_GROUP = None
    import_module("deepspeed.utils.groups").mpu = None  # type: ignore[attr-defined]
    getattr(import_module("deepspeed.sequence.layer"), "_all_to_all_groups", {}).clear()


def _attention_of(model: nn.Module, wanted: str | None, ranks: int) -> str:
    """Return by which of transformers' functions a model computes its attention."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if missing := [name for name in _SHAPE if getattr(text, name, None) is None]:
        raise ValueError(
            f"sp_size={ranks} splits the attention of transformers' models, and {type(model).__name__} has no config "
            f"with {', '.join(missing)}; take a model such as LlamaForCausalLM, or leave sp_size out"
        )
    has = getattr(config, "_attn_implementation", None)
    if wanted is not None and has not in {None, wanted}:
        raise ValueError(
            f"sp_attn_implementation={wanted!r}, and {type(model).__name__} computes its attention by {has!r}; load "
            f"it with attn_implementation={wanted!r}"
        )
    name = wanted or has
    if name is None or "eager" in name:
        raise ValueError(
            f"{type(model).__name__} computes its attention by {name!r}, which takes a mask of all pairs of places, "
            "and cannot be split; load it with attn_implementation='sdpa', or a flash attention"
        )
    return str(name)


__all__ = ["SplitAttention", "UlyssesStrategy"]
