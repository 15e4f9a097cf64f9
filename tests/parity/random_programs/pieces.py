"""Datasets, samplers and models of random programs. A program contains the source of the pieces that it names."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

SEEN: list[Any] = []


def see(label: str, *values: Any) -> None:
    """Record a value to compare."""
    SEEN.append([label, *map(plain, values)])


def plain(value: Any) -> Any:
    """Return a value with its tensors as lists, at any depth."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().tolist()]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def numbers() -> list[int]:
    """Return a checksum of the state of each random number generator: torch's, Python's and NumPy's."""
    states = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), repr(np.random.get_state()).encode())  # fmt: skip  # noqa: E501, NPY002
    return [zlib.crc32(state) for state in states]


def row_dict(number: int) -> Any:
    return {"ids": number, "x": torch.tensor([number, number % 3, 1.0]) / 10}


def row_tuple(number: int) -> Any:
    return number, torch.tensor([number, number % 3, 1.0]) / 10


def row_nested(number: int) -> Any:
    x = torch.tensor([number, number % 3, 1.0]) / 10
    return {"ids": number, "more": {"x": x, "text": f"row {number}", "half": [x[:2], number / 2]}}


class Rows(Dataset[Any]):
    """A dataset that has a length."""

    def __init__(self, length: int, row: Any) -> None:
        self.length, self.row = length, row

    def __getitem__(self, number: int) -> Any:
        return self.row(number)

    def __len__(self) -> int:
        return self.length


class Noisy(Rows):
    """A dataset that adds random noise to its rows."""

    def __getitem__(self, number: int) -> Any:
        row = self.row(number)
        row["x"] = row["x"] + torch.rand(3) / 100 + random.random() / 100
        return row


class Stream(IterableDataset[Any]):
    """A stream of unknown length whose order differs between epochs."""

    def __init__(self, length: int, row: Any) -> None:
        self.length, self.row, self.epoch = length, row, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for number in range(self.length) if worker is None else range(worker.id, self.length, worker.num_workers):
            yield self.row((number + 2 * self.epoch) % self.length)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.length


class Shuffled(Sampler[int]):
    """A sampler like those of other libraries, which draws from torch's global random number generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class Reversed(Sampler[list[int]]):
    """A batch sampler like those of other libraries, which goes from the end of the dataset to its start."""

    def __init__(self, length: int, batch_size: int, drop_last: bool = False) -> None:
        self.length, self.batch_size, self.drop_last = length, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.length))[::-1]
        for begin in range(0, self.length, self.batch_size):
            batch = order[begin : begin + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Dropped(Perceptron):
    """A model that draws random numbers in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.5, self.training))


class Averaged(Perceptron):
    """A model with a buffer that changes during training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().float().mean(0) * 0.1
        return super().forward(x - self.mean)


class Tied(nn.Module):
    """A model whose weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class Branches(nn.Module):
    """A model that uses one of its two branches in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.calls = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.branches[self.calls % 2](x)


class Counter:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
