"""One small transformer, trained in plain torch by one process and through an Accelerator by several ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accelerate.utils import TorchDynamoPlugin

WORDS, LENGTH, WIDTH = 17, 6, 8
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Case:
    """What is trained, how, and what of it."""

    fsdp: dict[str, Any] | None = None
    deepspeed: dict[str, Any] | None = None
    degrees: dict[str, int] | None = None
    precision: str = "no"
    accumulation: int = 1
    clip: float | None = 0.5
    first: int = 0
    steps: int = 20
    dynamo: dict[str, Any] | None = None


class Block(nn.Module):
    """Attention and a perceptron, each around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.between = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this block."""
        normed = self.before(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.perceptron(self.between(hidden))


class Transformer(nn.Module):
    """Two blocks between an embedding and a head that share their weights."""

    tp_plan: ClassVar = {"blocks.*.perceptron.0": "colwise", "blocks.*.perceptron.2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score for each word at each place."""
        hidden = self.embedding(words) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def parts(seed: int = 1) -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Transformer()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def dataset(case: Case) -> TensorDataset:
    samples = GLOBAL_BATCH * (case.first + case.steps) * case.accumulation
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (samples, LENGTH + 1), generator=generator)
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


def plain(case: Case) -> list[float]:
    """Train in plain torch, in this process; return the loss of each batch."""
    model, optimizer = parts()
    losses = []
    for index, (words, targets) in enumerate(DataLoader(dataset(case), batch_size=GLOBAL_BATCH)):
        with torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else contextlib.nullcontext():
            scores = model(words)
        loss = loss_of(scores, targets)
        (loss / case.accumulation).backward()
        losses.append(loss.item())
        if (index + 1) % case.accumulation == 0:
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def accelerator_of(case: Case) -> Accelerator:
    return Accelerator(
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
        fsdp_plugin=None if case.fsdp is None else FullyShardedDataParallelPlugin(**case.fsdp),
        deepspeed_plugin=None if case.deepspeed is None else DeepSpeedPlugin(**case.deepspeed),
        dynamo_plugin=None if case.dynamo is None else TorchDynamoPlugin(**case.dynamo),
        parallelism_config=None if case.degrees is None else ParallelismConfig(**case.degrees),
    )


def accelerated(case: Case, save: str | None = None, load: str | None = None) -> dict[str, Any]:
    """Train on one rank; return the losses of all ranks' batches, averaged, and the whole weights (rank 0's)."""
    accelerator = accelerator_of(case)
    model, optimizer = parts(1 + accelerator.process_index)  # the strategy makes the ranks start equal
    layout = accelerator.parallelism_config
    readers = accelerator.num_processes // (1 if layout is None else layout.non_data_parallel_size)
    loader = DataLoader(dataset(case), batch_size=GLOBAL_BATCH // readers)
    # The optimizer was made before the sharding, and is given first.
    optimizer, loader, model = accelerator.prepare(optimizer, loader, model)
    if load is not None:
        accelerator.load_state(load, elastic=True)
        loader = accelerator.skip_first_batches(loader, case.first * case.accumulation)
    losses = []
    for words, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(words), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients and case.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if save is not None:
        accelerator.save_state(save)
    return {
        "losses": losses,
        "weights": accelerator.get_state_dict(model),
        "elements": sum(held(p) for p in model.parameters()),
        "state": sum(held(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
    }


def held(tensor: torch.Tensor) -> int:
    """Return how many elements of a tensor this rank holds."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel()
