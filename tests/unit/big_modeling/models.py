"""Small models with tied parameters, buffers and repeated blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ThreeLayers(nn.Module):
    """Three layers of 64, 72 and 100 bytes. Device maps in the tests depend on these sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Block(nn.Module):
    """Two layers, of 440 bytes each if the width is 10."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return x + self.b(torch.relu(self.a(x)))


class Deep(nn.Module):
    """A model with an embedding, blocks, a norm and a head. With `own`, the model itself also has a parameter."""

    def __init__(self, blocks: int = 4, width: int = 10, tied: bool = False, own: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, width)
        self.h = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20, bias=False)
        if own:
            self.scale = nn.Parameter(torch.rand(20))
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Any) -> Any:
        x = self.emb(tokens)
        for block in self.h:
            x = block(x)
        x = self.head(self.ln(x))
        return x * self.scale if hasattr(self, "scale") else x


def devices(model: nn.Module) -> dict[str, str]:
    """Return the device of each parameter and buffer, by name."""
    return {name: str(tensor.device) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
