"""Healthy training runs, held out while the profiler's rules were developed; see ``heldout_trainings``."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as most trainings import it
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as most trainings import it
from torch.utils.data import DataLoader, IterableDataset

from notebook_accelerate import Accelerator
from notebook_accelerate.utils import set_seed
from tests.support.heldout_trainings import FOREVER, Images, Language, Loop, digits, in_group, next_token_loss


def images_with_workers() -> None:
    """Plain torch: a loader with a worker process, the loss in a progress bar, and a line every fifty steps."""
    in_group()
    net = DDP(digits(32))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar = tqdm(DataLoader(Images(), batch_size=64, num_workers=1), disable=dist.get_rank() != 0)
    for number, (x, y) in enumerate(bar):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        bar.set_postfix(loss=loss.item())
        if number % 50 == 0:
            print(f"step {number}: {loss.item():.3f}")


def language_model() -> None:
    """Accelerator: clipped gradients, a schedule, and a sum of detached losses."""
    set_seed(5)
    accelerator = Accelerator(cpu=True)
    model = Language(width=128)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10_000)
    model, opt, schedule = accelerator.prepare(model, opt, schedule)
    total = torch.zeros(())
    for number in itertools.count(1):
        tokens = torch.randint(0, 200, (16, 64))
        loss = next_token_loss(model(tokens), tokens)
        total += loss.detach()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad()
        if number % 20 == 0:
            accelerator.log({"mean_loss": (total / number).item(), "rate": schedule.get_last_lr()[0]}, step=number)


def two_optimizers() -> None:
    """One process: a generator and a discriminator, with an optimizer each."""
    make = nn.Sequential(nn.Linear(32, 512), nn.LeakyReLU(), nn.Linear(512, 784), nn.Tanh())
    judge = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(), nn.Linear(512, 1))
    makes = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judges = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real, ones, zeros = torch.rand(256, 784), torch.ones(256, 1), torch.zeros(256, 1)
    losses: dict[str, list[float]] = {"judge": [], "make": []}
    for _ in range(FOREVER):
        fake = make(torch.randn(256, 32))
        judges.zero_grad()
        judged = F.binary_cross_entropy_with_logits(judge(real), ones)
        judged = judged + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        judged.backward()
        judges.step()
        makes.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(fake), ones)
        fooled.backward()
        makes.step()
        losses["judge"].append(judged.item())
        losses["make"].append(fooled.item())


@dataclass
class Evaluates(Loop):
    """A loop that keeps the last loss and the detached losses, and evaluates every twenty steps."""

    last: Any = None
    values: list[torch.Tensor] = field(default_factory=list)

    def on_step_end(self, loss: torch.Tensor) -> None:
        self.last = loss
        self.values.append(loss.detach())
        if len(self.values) % 20 == 0:
            self.model.eval()
            with torch.no_grad():
                tokens = torch.randint(0, 200, (8, 48))
                self.history["rate"].append(next_token_loss(self.model(tokens), tokens))
            self.model.train()


def loop_with_hooks() -> None:
    """A loop in a class, on two ranks, with an occasional evaluation."""
    in_group()
    net = DDP(Language())
    Evaluates(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)).fit()


def teacher_and_student() -> None:
    """One process: a student learns from a teacher, which is the student's moving average."""
    student = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 64, 3), nn.Flatten(2))
    teacher = deepcopy(student).requires_grad_(requires_grad=False)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
    while True:
        pictures = torch.rand(16, 3, 32, 32)
        with torch.no_grad():
            goal = teacher(pictures).mean(dim=2)
        seen = student(pictures + 0.1 * torch.randn_like(pictures)).mean(dim=2)
        loss = 2 - 2 * F.cosine_similarity(seen, goal).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.01)


@dataclass
class Episode:
    chances: list[torch.Tensor] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def episodes() -> None:
    """One process: policy gradients. An episode's log probabilities are kept with their graphs, and then dropped."""
    policy = nn.Sequential(nn.Linear(16, 768), nn.Tanh(), nn.Linear(768, 4))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
    episode = Episode()
    source = random.Random(0)
    while True:
        for _ in range(source.randint(4, 9)):
            choice = torch.distributions.Categorical(logits=policy(torch.randn(512, 16)))
            action = choice.sample()
            episode.chances.append(choice.log_prob(action).mean())
            episode.rewards.append(float((action == 0).float().mean()))
        returns = torch.tensor(episode.rewards).flip(0).cumsum(0).flip(0)
        loss = -(torch.stack(episode.chances) * (returns - returns.mean())).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        episode.chances.clear()
        episode.rewards.clear()


class Sentences(IterableDataset[torch.Tensor]):
    """Batches of sentences whose lengths vary between batches, with the same mean on each rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        source = random.Random(dist.get_rank())
        while True:
            yield torch.randint(0, 200, (12, 8 * source.randint(7, 9)))


def lengths_by_chance() -> None:
    """Plain torch: gradients are accumulated over two batches, whose lengths differ slightly."""
    in_group()
    net = DDP(Language())
    opt = torch.optim.AdamW(net.parameters())
    losses: list[torch.Tensor] = []
    loader = DataLoader(Sentences(), batch_size=None)
    for number, tokens in enumerate(loader, 1):
        last = number % 2 == 0
        with nullcontext() if last else net.no_sync():
            loss = next_token_loss(net(tokens), tokens) / 2
            loss.backward()
        losses.append(loss.detach())
        if last:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()


def saves_sometimes() -> None:
    """Accelerator with bf16 on three ranks: a checkpoint every hundred steps, and a mean over ranks every ten."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = Language(width=128)
    model, opt = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count(1):
            tokens = torch.randint(0, 200, (16, 48))
            loss = next_token_loss(model(tokens), tokens)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            if number % 10 == 0:
                mean: Any = accelerator.reduce(loss.detach(), reduction="mean")
                accelerator.print(f"step {number}: {mean.item():.3f}")
            if number % 100 == 0 and accelerator.is_main_process:
                torch.save(accelerator.unwrap_model(model).state_dict(), Path(folder) / "model.pt")


HEALTHY: list[tuple[Callable[[], None], int]] = [
    (images_with_workers, 2), (language_model, 2), (two_optimizers, 1), (loop_with_hooks, 2), (teacher_and_student, 1),
    (episodes, 1), (lengths_by_chance, 2), (saves_sometimes, 3),
]  # fmt: skip
"""Each function with its number of ranks."""
