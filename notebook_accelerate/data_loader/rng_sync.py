"""Synchronises random number generators over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from notebook_accelerate.config.enums import RNGType
from notebook_accelerate.state import PartialState


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None, num_processes: int | None = None
) -> None:
    """Copy the state of one random number generator from rank 0 to every rank. Every rank must call this.

    Args:
        rng_type: A member of RNGType or its value: ``"torch"`` for the CPU's generator, ``"generator"`` for
            `generator`, the name of a device type for the device's.
        generator: The generator for ``"generator"``.
        num_processes: Number of ranks; with 1 nothing is done. None: that of `PartialState`.

    Raises:
        ValueError: An unknown `rng_type`, or ``"generator"`` without one.
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
    """Copy the states of random number generators from rank 0 to every rank. Every rank must call this.

    Args:
        rng_types: Members of RNGType or their values.
        generator: The generator for ``"generator"``.

    Raises:
        ValueError: An unknown type, or ``"generator"`` without one.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _from_rank_0(state: torch.Tensor) -> torch.Tensor:
    """Receive rank 0's copy of a small CPU tensor."""
    from notebook_accelerate.collectives import broadcast

    received: torch.Tensor = broadcast(state.to(PartialState().device))
    return received.cpu()
