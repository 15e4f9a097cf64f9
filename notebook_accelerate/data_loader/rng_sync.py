"""The same random numbers on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from notebook_accelerate.config.enums import RNGType
from notebook_accelerate.state import PartialState


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None, num_processes: int | None = None
) -> None:
    """Give every rank the state that one random number generator has on rank 0. Every rank must call this.

    Args:
        rng_type: Which generator: a member of RNGType or its value. ``"torch"`` is the CPU's, ``"generator"`` the
            one in `generator`, the name of a device that of the device.
        generator: The generator that ``"generator"`` means.
        num_processes: How many ranks there are; with 1 nothing is done. None asks the state.

    Raises:
        ValueError: An unknown `rng_type`, or ``"generator"`` without one.
    """
    if rng_type not in list(RNGType) and rng_type not in RNGType.list():
        raise ValueError(f"rng_type is {rng_type!r}; it may be one of {', '.join(RNGType.list())}.")
    kind = RNGType(rng_type)
    if kind is RNGType.GENERATOR and generator is None:
        raise ValueError('rng_type "generator" needs the generator: synchronize_rng_state("generator", generator).')
    if (PartialState().num_processes if num_processes is None else num_processes) <= 1:
        return
    if kind is RNGType.GENERATOR:
        assert generator is not None
        generator.set_state(_of_rank_0(generator.get_state()))
    elif kind is RNGType.TORCH:
        torch.set_rng_state(_of_rank_0(torch.get_rng_state()))
    elif kind is RNGType.XLA:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int(_of_rank_0(torch.tensor(xm.get_rng_state())).item()))
    else:
        backend = getattr(torch, kind.value)
        backend.set_rng_state(_of_rank_0(backend.get_rng_state()))


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every rank the states that random number generators have on rank 0. Every rank must call this.

    Args:
        rng_types: Which generators: members of RNGType or their values.
        generator: The generator that ``"generator"`` means.

    Raises:
        ValueError: An unknown type, or ``"generator"`` without one.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _of_rank_0(state: torch.Tensor) -> torch.Tensor:
    """Receive rank 0's copy of a small CPU tensor."""
    from notebook_accelerate.collectives import broadcast

    received: torch.Tensor = broadcast(state.to(PartialState().device))
    return received.cpu()
