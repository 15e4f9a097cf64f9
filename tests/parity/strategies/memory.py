"""The memory in bytes that a rank really uses for parameters, gradients and optimizer state."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from tests.parity.strategies.scripts import Case, accelerator_of

WIDTH, BLOCKS, SAMPLES = 64, 4, 2


class Block(nn.Module):
    """A perceptron with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the output of the perceptron."""
        return x + self.down(torch.relu(self.up(x)))


class Wide(nn.Module):
    """A model with a megabyte of parameters, all of which are in blocks, and hardly any activations."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the blocks for x."""
        for block in self.blocks:
            x = block(x)
        return x


WHOLE = sum(parameter.numel() * parameter.element_size() for parameter in Wide().parameters())
"""The size in bytes of all parameters in one process."""


@dataclass(frozen=True)
class ShardSizes:
    """The memory of one rank, relative to the size of all parameters."""

    parameters: float
    """The parameters, between steps."""
    between: float
    """The parameters, between forward and backward. Those kept whole for the backward pass count twice."""
    gradients: float
    """The gradients, between backward and step."""
    state: float
    """The optimizer's state, after a step."""


def measured(case: Case) -> ShardSizes:
    """Train one step. Return the memory that this rank holds during and after it."""
    accelerator = accelerator_of(case)
    model: Any = Wide()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    compiled = case.dynamo is not None  # A compiler keeps tensors of its own.
    before = 0 if compiled else held()
    loss = model(torch.randn(SAMPLES, WIDTH)).pow(2).mean()
    kept = 0 if compiled else held() - before
    accelerator.backward(loss)
    gradients = size_of(p.grad for p in model.parameters())
    optimizer.step()
    resting = size_of(model.parameters())
    state = size_of(value for values in optimizer.state.values() for value in values.values())
    return ShardSizes(*(size / WHOLE for size in (resting, resting + kept, gradients, state)))


def held() -> int:
    """Return the size in bytes of all living tensors.

    After `wait` returns, a thread of gloo may hold the tensors of the collective for a moment, so this is the smallest
    of several readings.
    """
    readings = [size_of(living())]
    for _ in range(5):
        time.sleep(0.1)
        readings.append(size_of(living()))
    return min(readings)


def size_of(tensors: Iterable[Any]) -> int:
    """Return how many bytes of memory tensors use, counting shared memory once."""
    pieces: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            pieces[storage.data_ptr()] = max(storage.nbytes(), pieces.get(storage.data_ptr(), 0))
    return sum(pieces.values())


def living() -> list[torch.Tensor]:
    """Return all tensors that Python's garbage collector tracks."""
    gc.collect()
    kinds = {torch.Tensor, nn.Parameter, FlatParameter, DTensor}
    return [item for item in gc.get_objects() if type(item) in kinds]  # noqa: TID251 - the peer runs this, too
