"""DeepSpeed's sequence parallelism: each rank computes a piece of every sequence, and some of the attention heads.

Sources: Jacobs et al., "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509, and DeepSpeed's version for transformers
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
from notebook_accelerate.config.parallelism_config import DeepSpeedSequenceParallelConfig
from notebook_accelerate.data_loader import SequenceLoader
from notebook_accelerate.state import GradientState, process_group
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from notebook_accelerate.strategies.deepspeed.initialize_arguments import EngineParts, object_kind
from notebook_accelerate.strategies.module_queries import layer_kinds

_MICRO = "train_micro_batch_size_per_gpu"
_SHAPE = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
_MARK = "_splits_sequences_for"
_numbers = itertools.count(1)


class UlyssesStrategy(DeepSpeedStrategy):
    """Trains with DeepSpeed's ZeRO across all ranks. The ranks along the dimension "sp" share sequences.

    Each rank reads its own batches. Loaders that are prepared together with the trained model yield pieces of sequences
    (`SequenceLoader`). Use `deepspeed_ulysses_dl_adapter` to convert other loaders.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        layout = setup.state.parallelism_config
        self._ranks, self._handler = int(layout.sp_size), layout.sp_handler
        self._attention: SplitAttention | None = None
        self._starting_engine = False

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """See `DeepSpeedStrategy.prepare`.

        Raises:
            ValueError: The objects, the configuration and the layout do not fit each other, or the sequences of this
                model cannot be split.
        """
        before = self.engine
        results = super().prepare(objects, placements)
        if self.engine is not before:
            for at, item in enumerate(objects):
                if object_kind(item) == "data_loader":
                    results[at] = self.sequence_loader(results[at])
        return results

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """See `Strategy.prepare_data_loader`. Unless it is a `SequenceLoader`, the loader yields whole sequences."""
        if isinstance(data_loader, SequenceLoader):
            super().prepare_data_loader(data_loader.loader, device_placement, slice_fn_for_dispatch)
            return data_loader
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def sequence_loader(self, loader: Any) -> Any:
        """Return a loader of pieces of sequences; every rank must call this.

        Args:
            loader: A loader, prepared or not.

        Returns:
            The loader of pieces. A `SequenceLoader` is returned as it is.

        Raises:
            ValueError: The loader may give ranks different numbers of batches, so that they would wait for each other
                forever.
        """
        if isinstance(loader, SequenceLoader):
            return loader
        loader = self.prepare_data_loader(loader)
        if getattr(loader.batch_sampler, "even_batches", True) is False:
            raise ValueError(
                "even_batches=False gives ranks different numbers of batches, but ranks that share sequences need "
                "equal numbers; pass DataLoaderConfiguration(even_batches=True)"
            )
        mesh, device = self.setup.state.device_mesh["sp"], self.setup.device
        kind: Any = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter
        rank, group = mesh.get_local_rank(), mesh.get_group()

        def split(batches: Any) -> Any:
            return kind(batches, rank, group, self._ranks, device)

        return SequenceLoader(loader, split, self._ranks, self._micro_batch_size(), loader.device)

    def _micro_batch_size(self) -> int | None:
        size = self.plugin.get_value(_MICRO)
        return None if size in {None, AUTO} else int(size)

    def _make_engine(self, parts: EngineParts) -> Any:
        """Create the engine that trains the model, and split the model's attention across ranks."""
        parts.sequence_ranks = self._ranks
        self._starting_engine = True
        try:
            return super()._make_engine(parts)
        finally:
            self._starting_engine = False

    def _initialize(self, **arguments: Any) -> Any:
        if self._starting_engine:
            self._attention = SplitAttention(arguments["model"], self._ranks, self._handler)
            arguments["mpu"] = self._attention.install(self._micro_batch_size(), self.setup.gradient_state)
        return super()._initialize(**arguments)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """See `DeepSpeedStrategy.backward`; every rank must call this.

        Args:
            loss: The loss over all pieces, gathered by torch.distributed.nn.functional.all_gather, and already divided
                by the number of batches in a window.
            kwargs: The arguments of `DeepSpeedStrategy.backward`.
        """
        super().backward(loss / self._gradient_multiplicity(), **kwargs)

    def _gradient_multiplicity(self) -> int:
        """Return the factor by which DeepSpeed scales the gradients of a loss that all ranks of a sequence compute.

        The backward pass of all_gather sums the gradient over these ranks. DeepSpeed then sums the gradient over all
        ranks, and divides it by the number of sequences or, if stage 3 scatters the sums, by the number of ranks.
        """
        if self.engine is None:
            return 1
        zero = self.engine.engine._config.zero_config
        return 1 if zero.stage == 3 and zero.reduce_scatter else self._ranks

    def clear(self) -> None:
        """Forget all prepared objects, free the engine's memory, and restore the model's attention function."""
        super().clear()
        if self._attention is not None:
            self._attention.restore()
        self._attention = None


class SplitAttention:
    """The attention of one model, split across the ranks that share its sequences.

    DeepSpeed itself replaces the attention function of all transformers models in the process. This class does not
    change other models. The model attends to whole sequences if it is evaluated on a loader that does not yield pieces.

    Args:
        model: The transformers model whose attention is split.
        ranks: The number of ranks that share sequences.
        settings: The settings for the length of sequences and the implementation of attention.

    Raises:
        ValueError: The model is not from transformers, or its attention cannot be split.
    """

    def __init__(self, model: nn.Module, ranks: int, settings: DeepSpeedSequenceParallelConfig) -> None:
        self._model, self._ranks, self._settings = model, ranks, settings
        self._name = _attention_name(model, settings.sp_attn_implementation, ranks)
        self._whole: Any = None

    def install(self, micro_batch_size: int | None, gradient_state: GradientState) -> Any:
        """Split the attention; every rank must call this.

        Args:
            micro_batch_size: The number of sequences per batch and rank.
            gradient_state: The gradient state, which has a reference to the active loader.

        Returns:
            The groups of ranks, for the argument `mpu` of `deepspeed.initialize`.
        """
        functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        _reset_groups()
        whole = functions[self._name]
        ulysses = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
        groups = ulysses.register_with_transformers(
            self._model,
            self._name,
            self._ranks,
            micro_batch_size,
            seq_length=self._settings.sp_seq_length,
            seq_length_is_variable=self._settings.sp_seq_length_is_variable,
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
        process_group.call_before_group_ends(self.restore)
        return groups

    def restore(self) -> None:
        """Restore the model's attention function, and release the groups of ranks."""
        if self._whole is None:
            return
        functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        functions[self._name], self._whole = self._whole, None
        for module in self._model.modules():
            module.__dict__.pop(_MARK, None)
        _reset_groups()


def _reset_groups() -> None:
    """Remove the groups of an earlier training run, which would keep DeepSpeed from creating new ones."""
    groups: Any = import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    groups._SEQUENCE_PARALLEL_GROUP = groups._SEQUENCE_DATA_PARALLEL_GROUP = None
    import_module("deepspeed.utils.groups").mpu = None  # type: ignore[attr-defined]
    getattr(import_module("deepspeed.sequence.layer"), "_all_to_all_groups", {}).clear()


def _attention_name(model: nn.Module, wanted: str | None, ranks: int) -> str:
    """Return the name of a model's attention function in transformers."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if missing := [name for name in _SHAPE if getattr(text, name, None) is None]:
        raise ValueError(
            f"sp_size={ranks} splits the attention of transformers models, but {type(model).__name__} has no config "
            f"with {', '.join(missing)}; use a model such as LlamaForCausalLM, or leave sp_size out"
        )
    if recurrent := [kind for kind in layer_kinds(model) if "linear_attention" in kind]:
        raise ValueError(
            f"sp_size={ranks} splits sequences, but {type(model).__name__} has layers of the kind "
            f"{', '.join(recurrent)}, whose state would be reset in each piece; use a model without them, or leave "
            "sp_size out"
        )
    current = getattr(config, "_attn_implementation", None)
    if wanted is not None and current not in {None, wanted}:
        raise ValueError(
            f"sp_attn_implementation={wanted!r}, but {type(model).__name__} uses the attention {current!r}; load "
            f"it with attn_implementation={wanted!r}"
        )
    name = wanted or current
    if name is None or "eager" in name:
        raise ValueError(
            f"{type(model).__name__} uses the attention {name!r}, whose mask of all pairs of positions cannot be "
            "split; load it with attn_implementation='sdpa', or a flash attention"
        )
    return str(name)
