"""A small mixture of experts that is written like the models of transformers 5, and its training."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

EXPERTS, WIDTH, WORDS, STEPS, BATCH = 4, 8, 17, 8, 4
CLIP = 0.5


class Experts(nn.Module):
    """Perceptrons as experts, with the weights of all experts stacked in one tensor per layer."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 3)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 3)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts."""
        total = torch.zeros_like(hidden)
        # As in transformers, experts without tokens are not computed and get no gradient.
        for expert in nn.functional.one_hot(index, self.num_experts).sum((0, 1)).nonzero().flatten().tolist():
            tokens, places = torch.where(index == expert)
            inner = torch.relu(nn.functional.linear(hidden[tokens], self.up[expert], self.up_bias[expert]))
            found = nn.functional.linear(inner, self.down[expert]) * weights[tokens, places, None]
            total = total.index_add(0, tokens, found.to(total.dtype))
        return total


class Mixture(nn.Module):
    """A router and its experts, with a residual connection. `only` routes every token to one expert."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.only = only

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this block."""
        flat = hidden.flatten(0, -2)
        weights, index = self.router(flat).softmax(-1).topk(1 if self.only is not None else 2)
        if self.only is not None:
            index = torch.full_like(index, self.only)
        mixed: torch.Tensor = self.experts(flat, index, weights).view_as(hidden)
        return hidden + mixed


class Net(nn.Module):
    """Two mixtures between an embedding and a head. In the second one, a single expert gets all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Mixture(), Mixture(only=3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score for each word at each position."""
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


def make(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches() -> torch.Tensor:
    """Return the words of all batches, indexed by step, sample and position."""
    return torch.randint(0, WORDS, (STEPS, BATCH, 6), generator=torch.Generator().manual_seed(3))


def loss_of(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each sequence of words in reverse."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flip(1).flatten())


def plain() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train in plain torch. Return the losses, the gradient norms and the weights."""
    model, optimizer = make()
    losses, norms = [], []
    for words in batches():
        loss = loss_of(model(words), words)
        torch.autograd.backward(loss)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


class ExpertTraining:
    """The same training as in `plain`, on one of several ranks.

    Args:
        degrees: The arguments of `ParallelismConfig`.
        fsdp: Arguments of the FSDP 2 plugin. If None, the plugin that a sharding layout creates is used.
    """

    def __init__(self, degrees: dict[str, Any], fsdp: dict[str, Any] | None = None) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(fsdp_version=2, **fsdp),
            parallelism_config=ParallelismConfig(**degrees),
        )
        model, optimizer = make(self.accelerator.process_index)
        readers = degrees.get("dp_replicate_size", 1) * degrees.get("dp_shard_size", 1)
        words: Any = batches().flatten(0, 1)
        loader: Any = DataLoader(words, batch_size=BATCH // readers)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.router_gradients: list[Any] = []

    def train(self, first: int = 0, last: int = STEPS) -> None:
        """Train on the batches of these steps."""
        for words in itertools.islice(self.loader, first, last):
            loss = loss_of(self.model(words), words)
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            gradient = self.model.blocks[0].router.weight.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            self.router_gradients.append(gradient.tolist())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
            self.norms.append(norm.item())
