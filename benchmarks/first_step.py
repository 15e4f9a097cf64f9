"""The time from a launch to the first optimizer step of rank 0, and the time of that step in the kernel itself.

Each measurement uses a new kernel, whose first cell imports torch and the launcher. As with "Run all", the launches
follow immediately, so that the server process of the zygote may still be importing torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from benchmarks.bench import Figure, alternate, compared, row
from benchmarks.launch import HERE, PEER, Launcher

METHODS = ("fork", "zygote", "auto")
LAUNCHES = {"first": 0, "second": 1, "fifth": 4}
ROUNDS = 7

LATER = {2: 0.25, 8: 0.6}
"""The goal for the second and later launches in seconds, by number of ranks."""
LATER_RATIO, FIRST_RATIO = 0.18, 1.1
"""The goals for later launches relative to Accelerate, and for the first one relative to the step in one process."""

# The measurement ends when rank 0 has taken its step. Lightning's launcher sets only LOCAL_RANK.
STAMP = """
def note(text):
    (FOLDER / os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))).write_text(text)
"""
TRAIN = """
from {package} import Accelerator

def train():
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 64)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    inputs, = next(iter(loader))
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    stamp()
"""
ALONE = """
import time, torch
stamp = lambda: print(time.monotonic() - begin)
{train}
begin = time.monotonic()
train()
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.clients.trainer import TinyConfig, TinyModel

class Stamp(TrainerCallback):
    def on_step_end(self, *args, **options):
        stamp()

def train():
    settings = TrainingArguments(
        "out", max_steps=1, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True,
    )
    samples = 64 * [{"x": torch.ones(4), "labels": 1}]
    Trainer(TinyModel(TinyConfig()), settings, train_dataset=samples, callbacks=[Stamp()]).train()
"""
AS_ACCELERATE = "import notebook_accelerate; notebook_accelerate.as_accelerate()\n"
LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(64, 1)

    def training_step(self, batch, index):
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *args):
        stamp()

def train(strategy="ddp"):
    data = torch.utils.data.TensorDataset(torch.ones(64, 64))
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=8))
"""
IN_LIGHTNING = """
def notebook_launcher(function, args, num_processes, use_port):
    function("ddp_notebook")
"""


class Side(NamedTuple):
    """What is launched in the kernels of one side of a comparison.

    Attributes:
        name: The side's name in the labels.
        package: The package of the launcher, or code that defines it.
        train: The cell that defines the training function.
        options: Further arguments of the launch.
    """

    name: str
    package: str
    train: str
    options: str = ""


def _methods(train: str) -> list[Side]:
    """Return a side of this package for each start method."""
    return [Side(method, HERE, train, f"start_method={method!r}") for method in METHODS]


def _seconds(side: Side, ranks: int, launches: int, env: Mapping[str, str | None] | None = None) -> list[float]:
    """Return the times from the call to the end of rank 0's first step, in the first launches of a new kernel."""
    with Launcher(side.package, env, forked=False) as launcher:
        launcher.kernel.check(STAMP + side.train)
        return [launcher.time_of_rank_0("train", ranks, side.options) for _ in range(launches)]


def _rounds(
    sides: Sequence[Side], ranks: int, launches: int, env: Mapping[str, str | None] | None = None
) -> dict[str, list[tuple[float, ...]]]:
    """Return the times of each launch, by the name of the side."""
    found: dict[str, list[list[float]]] = defaultdict(list)

    def measure(side: Side) -> float:
        found[side.name].append(_seconds(side, ranks, launches, env))
        return 0.0

    alternate(ROUNDS, *(partial(measure, side) for side in sides))
    return {name: list(zip(*rounds[1:], strict=True)) for name, rounds in found.items()}


@row("first step", "first step of 2 ranks")
def first_step_of_2_ranks() -> Iterator[Figure]:
    """Measure launches of 2 ranks."""
    times = yield from _compare(2)
    alone = alternate(ROUNDS, _alone)[0]
    note = "the peer is the same step in one new process that has imported torch and Accelerator"
    for method in METHODS:
        what = f"2 ranks, {method}, first launch, relative to one process"
        yield compared(what, times[method][0], alone, unit="s", ratio=FIRST_RATIO, note=note)


@row("first step", "first step of 8 ranks")
def first_step_of_8_ranks() -> Iterator[Figure]:
    """Measure launches of 8 ranks."""
    yield from _compare(8)


def _compare(ranks: int) -> Generator[Figure, None, dict[str, list[tuple[float, ...]]]]:
    """Yield the figures of each start method. Return the times of each launch, by start method."""
    sides = [*_methods(TRAIN.format(package=HERE)), Side("peer", PEER, TRAIN.format(package=PEER))]
    times = _rounds(sides, ranks, 1 + max(LAUNCHES.values()))
    for method in METHODS:
        for launch, index in LAUNCHES.items():
            limit, ratio = (LATER[ranks], LATER_RATIO) if index else (None, None)
            what = f"{ranks} ranks, {method}, {launch} launch"
            yield compared(what, times[method][index], times["peer"][index], unit="s", ratio=ratio, limit=limit)
    return times


def _alone() -> float:
    """Return the time of the step in one new process."""
    program = ALONE.format(train=TRAIN.format(package=HERE))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout)


@row("first step", "first step in the kernel")
def first_step_in_the_kernel() -> Iterator[Figure]:
    """Measure calls to the training function in a cell, and launches of one process."""
    packages = HERE, PEER
    calls: list[list[list[float]]] = [[], []]

    def call(index: int) -> float:
        with Launcher(packages[index], forked=False) as launcher:
            launcher.kernel.check(STAMP + TRAIN.format(package=packages[index]))
            calls[index].append([launcher.time_in_kernel("train()") for _ in range(2)])
        return 0.0

    alternate(ROUNDS, partial(call, 0), partial(call, 1))
    sides = [Side(package, package, TRAIN.format(package=package)) for package in packages]
    launches = _rounds(sides, 1, 2)
    for index, turn in enumerate(("first", "second")):
        ours, theirs = ([times[index] for times in each[1:]] for each in calls)
        yield compared(f"in the kernel, {turn} call", ours, theirs, unit="s", ratio=1.0)
        yield compared(f"1 process, {turn} launch", launches[HERE][index], launches[PEER][index], unit="s")


@row("trainer", "first step of the Trainer")
def first_step_of_trainer() -> Iterator[Figure]:
    """Measure launches of 2 ranks that train with transformers' Trainer."""
    if find_spec("transformers") is None or find_spec(PEER) is None:
        note = "run make bench ROWS=trainer, which installs transformers and Accelerate"
        yield Figure(what="the Trainer's first step", unit="s", ours=None, note=note)
        return
    sides = [*_methods(AS_ACCELERATE + TRAINER), Side("peer", PEER, TRAINER)]
    yield from _library("Trainer", sides, env={"HF_HUB_OFFLINE": "1"})


@row("lightning", "first step of Lightning")
def first_step_of_lightning() -> Iterator[Figure]:
    """Measure launches of 2 ranks that train with Lightning, compared with its own launcher."""
    if find_spec("lightning") is None:
        note = "run make bench ROWS=lightning, which installs Lightning"
        yield Figure(what="Lightning's first step", unit="s", ours=None, note=note)
        return
    sides = [*_methods(LIGHTNING), Side("peer", IN_LIGHTNING, LIGHTNING)]
    yield from _library("Lightning", sides, note="the peer is Lightning's own launcher, ddp_notebook")


def _library(
    name: str, sides: Sequence[Side], *, env: Mapping[str, str | None] | None = None, note: str = ""
) -> Iterator[Figure]:
    times = _rounds(sides, 2, 2, env)
    for method in METHODS:
        for index, launch in enumerate(("first", "second")):
            what = f"{name}, 2 ranks, {method}, {launch} launch"
            yield compared(what, times[method][index], times["peer"][index], unit="s", ratio=1.0, note=note)
