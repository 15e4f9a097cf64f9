"""Context parallelism: each rank computes a part of every sequence, and attention layers exchange keys and values.

Sources: Liu et al., "Ring Attention", https://arxiv.org/abs/2310.01889, and torch's experimental `context_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from notebook_accelerate.strategies.module_queries import layer_kinds


@contextmanager
def split_sequences(
    mesh: DeviceMesh, exchange: str, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept_split: set[torch.Tensor]
) -> Iterator[None]:
    """Split sequences across ranks inside a `with` block; every rank must enter the block.

    Args:
        mesh: The mesh of the ranks that share sequences.
        exchange: How ranks exchange keys and values: "allgather" or "alltoall".
        buffers: The tensors to split in place.
        dims: The sequence dimension of each buffer.
        kept_split: The buffers that are not restored afterwards.

    Yields:
        Nothing.

    Raises:
        ValueError: Buffers and dimensions do not match, or a sequence cannot be split evenly.
    """
    from torch.distributed.tensor.experimental import context_parallel

    from notebook_accelerate.torch_internals import set_rotate_method

    _check_buffers(buffers, dims, kept_split, 2 * mesh.size())
    set_rotate_method(exchange)
    with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=list(dims), no_restore_buffers=set(kept_split)):
        yield


def _check_buffers(
    buffers: Sequence[torch.Tensor], dims: Sequence[int], kept_split: set[torch.Tensor], pieces: int
) -> None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"maybe_context_parallel was given {len(buffers)} buffers and {len(dims)} buffer_seq_dims; pass the "
            "sequence dimension of each buffer"
        )
    if not all(any(kept is buffer for buffer in buffers) for kept in kept_split):
        raise ValueError("no_restore_buffers contains a tensor that is not in buffers; pass a subset of buffers")
    for buffer, dim in zip(buffers, dims, strict=True):
        # Later positions attend to more keys. Each rank gets one piece from the front and one from the back, so that
        # all ranks have the same amount of work.
        if not -buffer.dim() <= dim < buffer.dim() or buffer.shape[dim] % pieces:
            raise ValueError(
                f"a buffer of shape {list(buffer.shape)} cannot be split along buffer_seq_dims={dim}: that dimension "
                f"must be a multiple of {pieces}, twice cp_size; pad the sequences"
            )


def make_attention_causal(model: nn.Module) -> None:
    """Make a transformers model use causal attention instead of a mask. The model is changed in place.

    A mask for the whole sequence does not fit a part of it, and torch's context-parallel attention accepts no masks.

    Args:
        model: A model whose attention modules are named self_attn.

    Raises:
        ValueError: Some layers need a mask other than the causal one (sliding windows, chunks), or do not use
            attention.
    """
    if others := [kind for kind in layer_kinds(model) if kind != "full_attention"]:
        raise ValueError(
            f"context parallelism computes causal attention over the whole sequence, but {type(model).__name__} has "
            f"layers of the kind {', '.join(others)}, whose mask would be lost; train a model with full attention, or "
            "write ParallelismConfig(...) without cp_size"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_causal, with_kwargs=True)


def _causal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    changed: dict[str, Any] = {"attention_mask": None} if "attention_mask" in kwargs else {}
    if "is_causal" in kwargs:
        changed["is_causal"] = True
    return args, {**kwargs, **changed}
