"""The choices that make up each random program, and the known differences between the two packages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

ORDERS = {
    "given": "",
    "shuffle": "shuffle=True",
    "generator": "shuffle=True, generator=torch.Generator().manual_seed(5)",
    "random": "sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5))",
    "weighted": "sampler=WeightedRandomSampler([1.0, 2.0] * {length}, {length})",
    "short": "sampler=SubsetRandomSampler(range({length} // 2 + 1))",
    "own": "sampler=Shuffled({length})",
    "batches": "batch_sampler=Reversed({length}, {batch_size}, {drop_last})",
}
OPTIMIZERS = {
    "SGD": "torch.optim.SGD({parameters}, lr=0.1, momentum=0.9)",
    "AdamW": "torch.optim.AdamW({parameters}, lr=0.01)",
    "Adagrad": "torch.optim.Adagrad({parameters}, lr=0.1)",
    "NAdam": "torch.optim.NAdam({parameters}, lr=0.01)",
}
SCHEDULERS = {
    "": "",
    "StepLR": "torch.optim.lr_scheduler.StepLR({optimizer}, 3, 0.5)",
    "LambdaLR": "torch.optim.lr_scheduler.LambdaLR({optimizer}, lambda step: 1 / (1 + step))",
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR({optimizer}, 0.1, total_steps=400)",
    "Cosine": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts({optimizer}, 5)",
    "LinearLR": "torch.optim.lr_scheduler.LinearLR({optimizer}, 0.1, total_iters=10)",
}
MODELS = (("Perceptron",), ("Dropped",), ("Averaged",), ("Tied",), ("Branches",), ("Perceptron", "Dropped"))
PHASES = ("train", "train", "read", "evaluate", "resume", "save and load", "collect", "leave")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choices that make up a program. Its parts are named as in `pieces` and in the tables above."""

    number: int
    ranks: int
    dataset: str
    row: str
    length: int
    batch_size: int
    order: str
    drop_last: bool
    workers: int
    split_batches: bool
    dispatch_batches: bool | None
    even_batches: bool
    seedable: bool
    data_seed: int | None
    stateful: bool
    device_specific: bool
    models: tuple[str, ...]
    optimizer: str
    scheduler: str
    accumulation: int
    sync_with_dataloader: bool
    adjust_scheduler: bool
    sync_each_batch: bool
    step_scheduler_with_optimizer: bool
    clip: str
    precision: str
    phases: tuple[str, ...]
    evaluated_inside: bool
    counter: bool
    fresh: bool
    skipped: int

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable."""
        return "Stream" in self.dataset

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 reads for all ranks."""
        return self.is_stream if self.dispatch_batches is None else self.dispatch_batches

    @property
    def draws_order(self) -> bool:
        """Whether random numbers determine the order of samples, and no sampler of Accelerate restores that order."""
        remembered = self.seedable and self.order in ("shuffle", "generator", "random")
        return self.order not in ("given", "batches") and not remembered

    @property
    def draws_in_steps(self) -> bool:
        """Whether a step draws random numbers."""
        return "Dropped" in self.models or self.dataset == "Noisy"

    @property
    def is_shuffled_for_others(self) -> bool:
        """Whether rank 0 draws the order of the samples that it sends to the other ranks."""
        return self.is_dispatched and self.ranks > 1 and self.order in ("shuffle", "weighted", "short", "own")

    @property
    def has_short_rounds(self) -> bool:
        """Whether rank 0 may divide short batches before the end, because each worker's part ends with a short one."""
        return self.is_dispatched and self.is_stream and self.ranks > 1 and self.workers > 1

    @property
    def has_different_numbers(self) -> bool:
        """Whether the ranks' random numbers differ after a pass, because ranks with fewer samples draw fewer."""
        return self.ranks > 1 and not self.is_dispatched and not self.even_batches and self.draws_in_steps

    @property
    def depends_on_epochs(self) -> bool:
        """Whether the order of a pass may differ between epochs."""
        return self.is_stream or self.draws_order or self.seedable

    @property
    def padding_differs(self) -> bool:
        """Whether the last round of a pass is padded with the first batch that was read, which a resumed pass skips."""
        return self.is_dispatched and self.ranks > 1

    @property
    def has_same_losses(self) -> bool:
        """Whether the losses after resuming equal the losses of the uninterrupted pass.

        The gradients of an open window, the counters in a model, and the noise of a batch that was read ahead
        are not saved. A window stays open after an interrupted pass, or if the end of a pass does not close it.
        """
        stays_open = "leave" in self.phases or not self.sync_with_dataloader
        in_window = self.skipped % self.accumulation > 0 or (stays_open and self.accumulation > 1)
        return not (in_window or self.evaluated_inside or self.dataset == "Noisy" or "Branches" in self.models)

    @property
    def samples(self) -> int | None:
        """The number of samples gathered for metrics in a pass, or None if it is unknown or samples are dropped."""
        if self.drop_last or self.has_short_rounds:
            return None
        return self.rows

    @property
    def rows(self) -> int:
        """The number of samples in a pass."""
        return self.length // 2 + 1 if self.order == "short" else self.length


@dataclass(frozen=True)
class Exclusion:
    """A combination of choices that programs do not contain, and the reason."""

    reason: str
    applies: Callable[[Plan], bool]
    instead: Callable[[Plan], dict[str, Any]]


EXCLUSIONS = (
    Exclusion("streams have no samplers", lambda p: p.is_stream, lambda p: {"order": "given"}),
    Exclusion("noise is added to dicts", lambda p: p.dataset == "Noisy", lambda p: {"row": "row_dict"}),
    Exclusion(
        "both packages refuse a batch size that is not a multiple of the ranks",
        lambda p: p.split_batches and p.batch_size % p.ranks > 0,
        lambda p: {"batch_size": p.batch_size * p.ranks},
    ),
    Exclusion(
        "Accelerate cannot divide texts over ranks",
        lambda p: p.is_dispatched and p.row == "row_nested",
        lambda p: {"row": "row_dict"},
    ),
    Exclusion(
        "ranks with more batches than others wait for them in collectives",
        lambda p: not p.even_batches and p.ranks > 1,
        lambda p: {
            "phases": ("read", "read"),
            "evaluated_inside": False,
            "length": max(p.length, 2 * p.ranks * p.batch_size),  # Each rank has at least one batch.
        },
    ),
    Exclusion(
        "objects are registered once, and a new Accelerator has none",
        lambda p: p.counter and p.fresh,
        lambda p: {"counter": False},
    ),
    Exclusion(
        "Accelerate's dispatched stateful loaders fail with TypeError after a pass that was left early",
        lambda p: p.stateful and p.is_dispatched and "leave" in p.phases,
        lambda p: {"phases": tuple(phase for phase in p.phases if phase != "leave")},
    ),
    Exclusion(
        "in Accelerate each rank shuffles by its own seed, and samples are read twice",
        lambda p: p.seedable and p.device_specific,
        lambda p: {"device_specific": False},
    ),
)


@dataclass(frozen=True)
class Apart:
    """A known difference, after which the packages are not compared, and only this package's results are checked.

    Attributes:
        reason: The behaviour of Accelerate.
        place: "start" for the start of the program, "load" for loading a state that was saved between two passes,
            "resume" for loading one that was saved within a pass, or "resumed" for the end of that pass.
        applies: Whether programs of a plan have the difference.
        labels: The values that are not compared from there on. If empty, nothing is compared.
    """

    reason: str
    place: str
    applies: Callable[[Plan], bool]
    labels: tuple[str, ...] = ()


_METRICS, _NUMBERS = ("metrics",), ("random states",)
_ORDER = (
    "Accelerate resumes a shuffled epoch in a different order, so that some samples are read twice and others never"
)
_DRAWS = "No random numbers are drawn by skip_first_batches here, so a resumed run continues with the saved ones"
_EPOCHS = "the epoch after a resumed one is the next epoch here; Accelerate repeats the first (accelerate#2016)"
_OTHERS = (
    "Accelerate draws the order of a dispatched loader on rank 0 only, "
    "and the ranks' random numbers differ from then on"
)
APART = (
    Apart(
        "Accelerate truncates results to the length of the dataset, even if the sampler is shorter",
        "start", lambda p: p.order == "short", _METRICS,
    ),
    Apart(
        "Accelerate truncates results of the last batch if a batch sampler dropped an incomplete one",
        "start", lambda p: p.order == "batches" and p.drop_last and not p.is_dispatched, _METRICS,
    ),
    Apart(
        "Accelerate does not count the samples of divided streams, and gathers padding as results",
        "start", lambda p: p.is_stream and not p.is_dispatched and p.ranks > 1, _METRICS,
    ),
    Apart(
        "Accelerate counts too many batches of a divided stream with split_batches",
        "start", lambda p: p.is_stream and not p.is_dispatched and p.split_batches, ("length",),
    ),
    Apart(
        "Accelerate adds rounds with repeated samples to a dispatched loader whose batch sampler drops the last batch",
        "start", lambda p: p.is_dispatched and p.order == "batches" and p.drop_last,
    ),
    Apart(
        "Accelerate drops the generator of a dispatched loader, which then draws from torch's generator and shuffles "
        "in a different order from torch",
        "start", lambda p: p.is_dispatched and p.order == "generator",
    ),
    Apart(
        "Accelerate drops samples of a dispatched batch that is smaller than the number of ranks",
        "start", lambda p: p.has_short_rounds and p.split_batches,
    ),
    Apart(
        "Accelerate fails on dispatched loaders without a batch",
        "start", lambda p: p.is_dispatched and p.drop_last and p.rows // p.batch_size < p.ranks,
    ),
    Apart(
        "with use_seedable_sampler, Accelerate divides the orders of other samplers even though ranks draw them "
        "differently: some samples are read twice, others never",
        "start", lambda p: p.seedable and p.order in ("weighted", "short") and p.has_different_numbers,
    ),
    Apart(
        "Accelerate gathers padding as results after skip_first_batches",
        "resume", lambda p: p.ranks > 1, _METRICS,
    ),
    Apart(
        "Accelerate's seedable order is different if worker processes read a stateful loader",
        "start", lambda p: p.seedable and p.stateful and p.workers > 0,
    ),
    Apart(_OTHERS, "start", lambda p: p.is_shuffled_for_others and p.draws_in_steps),
    Apart(_OTHERS, "start", lambda p: p.is_shuffled_for_others, _NUMBERS),
    Apart(_ORDER, "load", lambda p: p.draws_order),
    Apart(_ORDER, "resume", lambda p: p.draws_order or (p.seedable and not p.fresh)),
    Apart(_ORDER, "resume", lambda p: p.seedable and (p.is_dispatched or p.stateful)),
    Apart(_DRAWS, "load", lambda p: p.stateful and p.draws_in_steps),
    Apart(_DRAWS, "load", lambda p: p.stateful, _NUMBERS),
    Apart(_DRAWS, "resume", lambda p: p.draws_in_steps),
    Apart(_DRAWS, "resume", lambda p: True, _NUMBERS),
    Apart(_EPOCHS, "load", lambda p: p.depends_on_epochs),
    Apart(_EPOCHS, "resume", lambda p: p.is_stream),
    Apart(_EPOCHS, "resumed", lambda p: p.depends_on_epochs),
)  # fmt: skip


def plan(number: int) -> Plan:
    """Return the choices of a program, after replacing excluded combinations."""
    chosen = _choose(number)
    for exclusion in EXCLUSIONS:
        if exclusion.applies(chosen):
            chosen = replace(chosen, **exclusion.instead(chosen))
    return chosen


def _choose(number: int) -> Plan:
    chance = random.Random(number)

    def rarely(share: float = 0.2) -> bool:
        return chance.random() < share

    return Plan(
        number=number,
        ranks=1 + number % 3,
        models=chance.choice(MODELS),
        phases=tuple(chance.choices(PHASES, k=chance.randint(2, 4))),
        dataset=chance.choices(("Rows", "Noisy", "Stream", "SizedStream"), (6, 1, 2, 1))[0],
        row=chance.choice(("row_dict", "row_tuple", "row_nested")),
        length=chance.randint(4, 25),
        batch_size=chance.randint(1, 4),
        order=chance.choice(list(ORDERS)),
        drop_last=rarely(),
        workers=chance.choices((0, 1, 2), (8, 1, 1))[0],
        split_batches=rarely(),
        dispatch_batches=chance.choices((None, True, False), (5, 2, 1))[0],
        even_batches=not rarely(0.1),
        seedable=rarely(0.25),
        data_seed=chance.choice((None, 3)),
        stateful=rarely(0.25),
        device_specific=rarely(),
        optimizer=chance.choice(list(OPTIMIZERS)),
        scheduler=chance.choice(list(SCHEDULERS)),
        accumulation=chance.choices((1, 2, 3, 4), (3, 2, 2, 1))[0],
        sync_with_dataloader=not rarely(),
        adjust_scheduler=not rarely(),
        sync_each_batch=rarely(),
        step_scheduler_with_optimizer=not rarely(),
        clip=chance.choice(("", "", "norm", "value")),
        precision=chance.choices(("no", "bf16"), (4, 1))[0],
        evaluated_inside=rarely(),
        counter=rarely(),
        fresh=rarely(0.5),
        skipped=chance.randint(1, 3),
    )
