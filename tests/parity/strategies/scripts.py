"""A small transformer that one process trains in plain torch, and several ranks train with an Accelerator."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accelerate.utils import (
    TorchDynamoPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

WORDS, LENGTH, WIDTH = 17, 6, 8
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Case:
    """The model, data and options of a training run."""

    fsdp: dict[str, Any] | None = None
    deepspeed: dict[str, Any] | None = None
    degrees: dict[str, int] | None = None
    precision: str = "no"
    accumulation: int = 1
    clip: float | None = 0.5
    first: int = 0
    steps: int = 20
    dynamo: dict[str, Any] | None = None
    ranks_of_a_machine: int | None = None


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

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
        """Return a score for each word at each position."""
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
    """Train in plain torch in this process. Return the loss of each batch."""
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


class Training:
    """An Accelerator on one rank, with the prepared model, optimizer and loader of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.accelerator = accelerator = accelerator_of(case)
        # The seeds differ, because the strategy must make all ranks start with equal weights.
        model, optimizer = parts(1 + accelerator.process_index)
        layout = accelerator.parallelism_config
        readers = accelerator.num_processes // (1 if layout is None else layout.non_data_parallel_size)
        loader = DataLoader(dataset(case), batch_size=GLOBAL_BATCH // readers)
        # Pass the optimizer first, even though it was created before the model was sharded.
        self.optimizer, self.loader, self.model = accelerator.prepare(optimizer, loader, model)

    def load(self, folder: str) -> None:
        """Resume from a checkpoint."""
        self.accelerator.load_state(folder, elastic=True)
        self.loader = self.accelerator.skip_first_batches(self.loader, self.case.first * self.case.accumulation)

    def losses(self) -> Iterator[float]:
        """Train. Yield each batch's loss, averaged over the ranks."""
        accelerator, model, optimizer, clip = self.accelerator, self.model, self.optimizer, self.case.clip
        for words, targets in self.loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(words), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            yield accelerator.reduce(loss.detach(), "mean").item()


def accelerated(case: Case, save: str | None = None, load: str | None = None) -> dict[str, Any]:
    """Train on one rank. Return the losses, averaged over all ranks, and on rank 0 the whole weights."""
    training = Training(case)
    if load is not None:
        training.load(load)
    losses = list(training.losses())
    if save is not None:
        training.accelerator.save_state(save)
    return {"losses": losses, "weights": training.accelerator.get_state_dict(training.model)}


def killed(case: Case, folder: str, results: str) -> None:
    """Train, saving halfway. Finally, rank 0 writes losses and weights to a file, and all ranks are killed."""
    training = Training(case)
    losses = []
    for loss in training.losses():
        losses.append(loss)
        if len(losses) == case.steps // 2 * case.accumulation:
            training.accelerator.save_state(folder)
    weights = training.accelerator.get_state_dict(training.model)
    if training.accelerator.is_main_process:
        torch.save({"losses": losses, "weights": weights}, results)
    training.accelerator.wait_for_everyone()
    os.kill(os.getpid(), signal.SIGKILL)


def saves_alone(case: Case, folder: str) -> None:
    """Train, and save on the main rank only, which is correct without sharding. Then continue."""
    training = Training(case)
    for number, _ in enumerate(training.losses(), 1):
        if number == 2 and training.accelerator.is_main_process:
            training.accelerator.save_state(folder)


def saved_by_hand(case: Case, folder: str) -> list[str]:
    """Save model and optimizer with the functions that libraries call, clear them, and load. Return what differs."""
    training = Training(case)
    accelerator, model, optimizer = training.accelerator, training.model, training.optimizer
    list(training.losses())
    place = (accelerator.state.fsdp_plugin, accelerator)
    save_fsdp_model(*place, model, folder)
    save_fsdp_optimizer(*place, optimizer, model, folder)
    expected = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    moments = [tensor.clone() for tensor in _moments(optimizer)]
    with torch.no_grad():
        for tensor in (*model.parameters(), *_moments(optimizer)):
            tensor.zero_()
    load_fsdp_model(*place, model, folder)
    load_fsdp_optimizer(*place, optimizer, model, folder)
    found = accelerator.get_state_dict(model)
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    return wrong + [
        f"moment {n}" for n, (a, b) in enumerate(zip(_moments(optimizer), moments, strict=True)) if not _equal(a, b)
    ]


def _moments(optimizer: Any) -> list[torch.Tensor]:
    kept = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    return [tensor for state in kept for _, tensor in sorted(state.items())]


def _equal(first: Any, second: Any) -> bool:
    first, second = (t.to_local() if hasattr(t, "to_local") else t for t in (first, second))
    return torch.equal(first, second)


def held(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's elements that this rank holds."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel()
