"""Training runs that were not used to develop the profiler's rules: other models, loops, sizes and styles.

The rules were developed with the training runs in ``tests.support.profiled_trainings``.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as most trainings import it
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as most trainings import it
from torch.utils.data import DataLoader, Dataset

from notebook_accelerate import Accelerator
from notebook_accelerate.utils import ProjectConfiguration

FOREVER = 10_000_000


class Digits(nn.Module):
    """A small convolutional network."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 5, padding=2)
        self.body = nn.Sequential(nn.BatchNorm2d(channels), nn.GELU(), nn.Conv2d(channels, channels, 3, stride=2))
        self.head = nn.LazyLinear(10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.body(self.stem(images)).mean(dim=(2, 3))
        scores: torch.Tensor = self.head(features)
        return scores


class Language(nn.Module):
    """A small transformer."""

    def __init__(self, words: int = 200, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=3 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.unembed = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.unembed(self.blocks(self.embed(tokens)))
        return scores

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self(tokens), tokens)


def next_token_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images that each take time to load, like those that must be decoded."""

    def __init__(self, seconds: float = 0.0, only_rank: int | None = None) -> None:
        self.seconds, self.only_rank = seconds, only_rank

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.only_rank is None or dist.get_rank() == self.only_rank:
            time.sleep(self.seconds)
        return torch.full((1, 28, 28), index % 7 / 7), index % 10


def digits(channels: int = 24) -> Digits:
    torch.manual_seed(3)
    model = Digits(channels)
    model(torch.zeros(1, 1, 28, 28))
    return model


def in_group() -> int:
    """Initialize torch's process group by hand, and return the rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


# ---- planted faults


def loader_processes_too_few() -> None:
    """Plain torch: the two worker processes of rank 0 decode more slowly than the rank trains."""
    rank = in_group()
    net = DDP(digits())
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    workers = iter(DataLoader(Images(0.02 if rank == 0 else 0.0), batch_size=32, num_workers=2))
    for _ in range(FOREVER):
        x, y = next(workers)
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()
        opt.step()


def slow_everywhere() -> None:
    """Accelerator: all ranks decode in the main process."""
    accelerator = Accelerator(cpu=True)
    model = digits()
    loader = DataLoader(Images(0.001), batch_size=48)
    model, opt, loader = accelerator.prepare(model, torch.optim.RMSprop(model.parameters(), lr=1e-4), loader)
    for _epoch, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.nll_loss(F.log_softmax(model(x), dim=-1), y))
            opt.step()
            opt.zero_grad()


def slow_reader() -> None:
    """Plain torch, a generator instead of a DataLoader: rank 1 reads from a slow disk."""
    rank = in_group()
    net = DDP(Language())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def read() -> Iterator[torch.Tensor]:
        source = random.Random(rank)
        while True:
            if rank == 1:
                time.sleep(0.4)  # This is longer than the delays that a busy machine causes.
            yield torch.tensor([[source.randrange(200) for _ in range(32)] for _ in range(8)])

    for tokens in read():
        opt.zero_grad()
        next_token_loss(net(tokens), tokens).backward()
        opt.step()


def long_sequences() -> None:
    """Accelerator: rank 1's sequences are four times as long as rank 0's, in batches of the same number of rows."""
    accelerator = Accelerator(cpu=True)
    model = Language()
    model, opt = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    length = 256 if accelerator.process_index == 1 else 64
    while True:
        tokens = torch.randint(0, 200, (12, length))
        accelerator.backward(next_token_loss(model(tokens), tokens))
        opt.step()
        opt.zero_grad()


def confusion_by_element() -> None:
    """Plain torch: a confusion matrix is filled element by element."""
    in_group()
    net = DDP(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    matrix = [[0] * 5 for _ in range(5)]
    x, y = torch.randn(1500, 20), torch.randint(0, 5, (1500,))
    while True:
        scores = net(x)
        loss = F.cross_entropy(scores, y)
        for target, guess in zip(y, scores.argmax(dim=1), strict=True):
            matrix[int(target)][int(guess)] += 1
        opt.zero_grad()
        loss.backward()
        opt.step()


class Recurrent(nn.Module):
    """A gated recurrent network, written out step by step."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.gates, self.proposal = nn.Linear(width + 6, width), nn.Linear(width + 6, width)
        self.out, self.width = nn.Linear(width, 3), width

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        hidden = series.new_zeros(series.shape[0], self.width)
        for moment in series.unbind(dim=1):
            joined = torch.cat([hidden, moment], dim=1)
            gate = torch.sigmoid(self.gates(joined))
            hidden = gate * hidden + (1 - gate) * torch.tanh(self.proposal(joined))
        result: torch.Tensor = self.out(hidden)
        return result


def recurrent_by_hand() -> None:
    """One process: a recurrent network runs as a Python loop over 250 time steps."""
    net = Recurrent()
    opt = torch.optim.Adam(net.parameters())
    while True:
        series, target = torch.randn(4, 250, 6), torch.randn(4, 3)
        opt.zero_grad()
        F.mse_loss(net(series), target).backward()
        opt.step()


def two_barriers() -> None:
    """Plain torch on three ranks: each step has a barrier before and after it."""
    in_group()
    net = DDP(nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)))
    opt = torch.optim.Adagrad(net.parameters())
    for _ in itertools.count():
        dist.barrier()
        opt.zero_grad()
        F.smooth_l1_loss(net(torch.ones(256, 64)), torch.zeros(256, 64)).backward()
        opt.step()
        dist.barrier()


@dataclass
class Loop:
    """A loop in a class with hooks, like Lightning's."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    history: dict[str, list[Any]] = field(default_factory=lambda: {"train": [], "rate": []})
    average: Any = 0.0

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return next_token_loss(self.model(batch), batch)

    def on_step_end(self, loss: torch.Tensor) -> None:
        """Do nothing, unless a class overrides it."""

    def fit(self, length: int = 48, rows: int = 12) -> None:
        for index in itertools.count():
            batch = torch.randint(0, 200, (rows, length))
            self.optimizer.zero_grad()
            loss = self.training_step(batch, index)
            loss.backward()
            self.optimizer.step()
            self.on_step_end(loss)


class KeepsHistory(Loop):
    def on_step_end(self, loss: torch.Tensor) -> None:
        self.history["train"].append(loss)


def history_with_graphs() -> None:
    """A loop in a class on two ranks: a dictionary of the object keeps the losses with their graphs."""
    in_group()
    net = DDP(Language())
    KeepsHistory(net, torch.optim.AdamW(net.parameters())).fit()


class KeepsAverage(Loop):
    def on_step_end(self, loss: torch.Tensor) -> None:
        self.average = 0.98 * self.average + 0.02 * loss


def average_with_graphs() -> None:
    """One process: the moving average of the loss refers to the graphs of all steps."""
    net = Language(layers=1)
    KeepsAverage(net, torch.optim.NAdam(net.parameters())).fit()


class Remembers(nn.Module):
    """A network that keeps its hidden states for later inspection."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 1024), nn.Linear(1024, 64)
        self.inspected: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inspected.clear()
        hidden = torch.relu(self.encoder(x))
        self.inspected.append(hidden)
        y: torch.Tensor = self.decoder(hidden)
        return y


def remembered_states() -> None:
    """Accelerator: a module keeps its hidden states, 16 MB, with their graphs, across steps."""
    accelerator = Accelerator(cpu=True)
    net = Remembers()
    net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    x = torch.randn(4096, 64)
    while True:
        accelerator.backward(F.mse_loss(net(x), x))
        opt.step()
        opt.zero_grad()


def unwrapped_from_bf16() -> None:
    """Accelerator with bf16, one process: the step calls the model without its wrapper."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = digits(48)
    model, opt = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    for _ in range(FOREVER):
        accelerator.backward(F.cross_entropy(plain(x), y))
        opt.step()
        opt.zero_grad()


def prints_each_row() -> None:
    """Plain torch: rank 0 prints every prediction."""
    rank = in_group()
    net = DDP(nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 1)))
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = torch.randn(400, 30), torch.randn(400, 1)
    for number in itertools.count():
        guess = net(x)
        loss = F.mse_loss(guess, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            for row, value in enumerate(guess.squeeze(1).tolist()):
                print(f"step {number} row {row}: predicted {value:.4f}")


def state_each_step() -> None:
    """Accelerator: the complete state is saved after each step."""
    folder = Path(tempfile.gettempdir(), f"state-each-step-{os.getppid()}")  # All ranks use the same folder.
    try:
        settings = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, project_config=settings)
        model = Language(width=256)
        model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(opt, 0.999))
        while True:
            tokens = torch.randint(0, 200, (2, 16))
            accelerator.backward(next_token_loss(model(tokens), tokens))
            opt.step()
            schedule.step()
            opt.zero_grad()
            accelerator.save_state()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def busy_thread() -> None:
    """Plain torch: a thread on rank 0 computes statistics in Python all the time."""
    rank = in_group()
    net = DDP(digits())
    opt = torch.optim.SGD(net.parameters(), lr=0.01, nesterov=True, momentum=0.9)

    def statistics() -> None:
        seen: deque[str] = deque(maxlen=500)
        for number in itertools.count():
            seen.append(json.dumps({"number": number, "words": [chr(97 + number % 26)] * 20}))
            sorted(set("".join(seen)))

    if rank == 0:
        threading.Thread(target=statistics, name="statistics", daemon=True).start()
    x, y = torch.randn(96, 1, 28, 28), torch.randint(0, 10, (96,))
    while True:
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()


def feeding_thread() -> None:
    """One process: a thread creates the batches in Python and competes with the training for the interpreter."""
    net = nn.Sequential(nn.EmbeddingBag(300, 64), nn.ReLU(), nn.Linear(64, 4))
    opt = torch.optim.Adam(net.parameters())
    ready: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def feed() -> None:
        text = "the quick brown fox jumps over the lazy dog " * 40
        while True:
            rows = [[hash((word, row)) % 300 for word in text.split()] for row in range(64)]
            ready.put(torch.tensor(rows))

    threading.Thread(target=feed, name="feeder", daemon=True).start()
    for _ in range(FOREVER):
        rows = ready.get()
        loss = F.cross_entropy(net(rows), torch.randint(0, 4, (64,)))
        opt.zero_grad()
        loss.backward()
        opt.step()


class Compiles(Loop):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.fast = torch.compile(self.model, backend="eager")
        self.fast(torch.zeros(2, 48, dtype=torch.long))


def attribute_not_called() -> None:
    """A loop in a class: the compiled model is an attribute, but the step calls the original model."""
    in_group()
    net = DDP(Language())
    Compiles(net, torch.optim.SGD(net.parameters(), lr=0.1)).fit()


def made_eager() -> None:
    """One process: the compiled model is called, but compilation is switched off."""
    net: Any = torch.compile(digits(), backend="eager")
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.compiler.set_stance("force_eager")
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    while True:
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()


def distance(one: str, other: str) -> int:
    """Return the edit distance of two sequences."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, same in enumerate(other, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (letter != same))
    return row[-1]


def scores_on_one_rank() -> None:
    """Plain torch on three ranks: rank 2 computes a score in Python after each step."""
    rank = in_group()
    net = DDP(Language(layers=1))
    opt = torch.optim.AdamW(net.parameters())
    worst = 0
    while True:
        tokens = torch.randint(0, 200, (4, 24))
        opt.zero_grad()
        next_token_loss(net(tokens), tokens).backward()
        opt.step()
        if rank == 2:
            worst = max(worst, distance("accelerated" * 40, "unaccelerated" * 40))


@dataclass(frozen=True)
class Planted:
    """A training run with a fault.

    Attributes:
        train: The training function.
        ranks: The number of ranks.
        rules: The rules that name the fault.
        sentence: A part of the sentence that reports the fault.
        about: The numbers of the ranks that the sentence must name.
    """

    train: Callable[[], None]
    ranks: int
    rules: tuple[str, ...]
    sentence: str
    about: tuple[int, ...]


PLANTED = [
    Planted(loader_processes_too_few, 2, ("slow_loader",), r"rank 0's data loading .* worker processes", (0,)),
    Planted(slow_everywhere, 2, ("slow_loader",), r"data loading .*num_workers", (0, 1)),
    Planted(slow_reader, 2, ("slow_loader", "slowest_rank"), r"rank 0 waits .* for rank 1 .*time.sleep", (1,)),
    Planted(long_sequences, 2, ("unbalanced_batches",), r"rank 1 computes .* 3072 .* 768", (1,)),
    Planted(confusion_by_element, 2, ("reads_of_values",), r"ranks 0, 1 .*item\(\).*int\(", (0, 1)),
    Planted(recurrent_by_hand, 1, ("small_operations",), r"rank 0 .*small operations", (0,)),
    Planted(two_barriers, 3, ("barriers",), r"barrier", (0, 1, 2)),
    Planted(history_with_graphs, 2, ("growing_graphs",), r"history.* keeps the graph", (0, 1)),
    Planted(average_with_graphs, 1, ("growing_graphs",), r"average.* keeps the graph", (0,)),
    Planted(remembered_states, 2, ("retained_activations",), r"inspected.* keeps .* MB", (0, 1)),
    Planted(unwrapped_from_bf16, 1, ("full_precision",), r"rank 0 .*float32.*bf16", (0,)),
    Planted(prints_each_row, 2, ("logging_storm",), r"rank 0's printing .*print\(f", (0,)),
    Planted(state_each_step, 2, ("checkpoint_each_step",), r"save a checkpoint .*save_state", (0, 1)),
    Planted(busy_thread, 2, ("interpreter_lock",), r"rank 0 .*'statistics'", (0,)),
    Planted(feeding_thread, 1, ("interpreter_lock",), r"rank 0 .*'feeder'", (0,)),
    Planted(attribute_not_called, 2, ("not_compiled",), r"no compiled code .* self\.fast requests", (0, 1)),
    Planted(made_eager, 1, ("not_compiled",), r"no compiled code .* net", (0,)),
    Planted(scores_on_one_rank, 3, ("slowest_rank",), r"wait .* for rank 2 .*line \d+", (2,)),
]
