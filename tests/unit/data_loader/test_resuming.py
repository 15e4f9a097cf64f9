"""After resuming, samples, their order and random numbers equal those of an uninterrupted run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler, get_worker_info

from notebook_accelerate import Accelerator
from notebook_accelerate.config.kwargs_handlers import DataLoaderConfiguration
from notebook_accelerate.data_loader.pass_order import expected_item, with_last_read
from notebook_accelerate.state.warn_once import reset_warnings
from tests.support.nightly import rest_nightly
from tests.support.trainings import seed_everything

LENGTH, SIZE, EPOCHS = 16, 2, 4  # With these numbers, two workers read as many batches as one.
Log = list[list[tuple[list[int], float]]]


class Numbers(Dataset[int]):
    """A dataset whose items are their indices."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Epochs(Dataset[int]):
    """A dataset whose items contain the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch


class Stream(IterableDataset[int]):
    """An iterable dataset that is shuffled by epoch and divided among workers."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        worker = get_worker_info()
        return iter(order if worker is None else order[worker.id :: worker.num_workers])


class Shuffled(Sampler[int]):
    """A sampler without an attribute `generator`, which draws from torch's global generator."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


class ShuffledBatches(Sampler[list[int]]):
    """A batch sampler that shuffles samples, and then batches, with NumPy's and Python's random numbers."""

    def __len__(self) -> int:
        return LENGTH // SIZE

    def __iter__(self) -> Iterator[list[int]]:
        samples = np.random.permutation(LENGTH).tolist()  # noqa: NPY002 - the global one
        batches = [samples[begin : begin + SIZE] for begin in range(0, LENGTH, SIZE)]
        random.shuffle(batches)
        yield from batches


SOURCES: dict[str, Any] = {
    "in order": lambda: {"dataset": Numbers()},
    "shuffled": lambda: {"dataset": Numbers(), "shuffle": True},
    "own generator": lambda: {"dataset": Numbers(), "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "subset": lambda: {"dataset": Numbers(), "sampler": SubsetRandomSampler(range(LENGTH))},
    "own sampler": lambda: {"dataset": Numbers(), "sampler": Shuffled()},
    "own batches": lambda: {"dataset": Numbers(), "batch_sampler": ShuffledBatches()},
    "by epoch": lambda: {"dataset": Epochs(), "shuffle": True},
    "stream": lambda: {"dataset": Stream()},
}


class Run:
    """A process that trains, and logs samples and random numbers."""

    def __init__(self, seed: int, source: str, workers: int, persistent: bool, **configuration: Any) -> None:
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
        seed_everything(seed)
        given = SOURCES[source]()
        size: dict[str, Any] = {} if "batch_sampler" in given else {"batch_size": SIZE}
        plain = DataLoader(num_workers=workers, persistent_workers=persistent, **size, **given)
        self.loader = self.accelerator.prepare(plain)

    def epoch(self, skipped: int | None = None, save: tuple[int, str] | None = None) -> list[tuple[list[int], float]]:
        """Read an epoch, or the rest of one, and save a checkpoint after a number of batches. Return the log."""
        loader = self.loader
        if skipped is not None:
            loader = self.accelerator.skip_first_batches(loader, skipped)
        log = []
        for done, batch in enumerate(loader, start=(skipped or 0) + 1):
            noise = float(torch.rand(1)) + random.random() + float(np.random.rand())  # noqa: NPY002 - the global one
            log.append((batch.tolist(), noise))
            if save is not None and save[0] == done:
                self.accelerator.save_state(save[1])
        return log


def uninterrupted(folder: Path, *options: Any, **configuration: Any) -> Log:
    """Train without interruption. Save a checkpoint within an epoch, at an epoch's last batch, and between epochs."""
    run = Run(1, *options, **configuration)
    batches = LENGTH // SIZE
    log = [run.epoch()]
    log.append(run.epoch(save=(3, str(folder / "within"))))
    run.accelerator.save_state(str(folder / "between"))
    log.append(run.epoch(save=(batches, str(folder / "last"))))
    log.append(run.epoch())
    return log


def resumed(folder: Path, when: str, *options: Any, **configuration: Any) -> Log:
    """Resume from a checkpoint as another process would. Return the log from there on."""
    run = Run(2, *options, **configuration)
    run.accelerator.load_state(str(folder / when.partition(",")[0]))
    if when == "within":
        return [run.epoch(skipped=3), run.epoch(), run.epoch()]
    if when == "between":
        return [run.epoch(), run.epoch()]
    if when == "last, as the start of the next":  # Scripts skip `steps % len(loader)` batches, which is 0 in this case.
        return [run.epoch(skipped=0)]
    if when == "last, nothing skipped":
        return [run.epoch()]
    assert run.epoch(skipped=LENGTH // SIZE) == []
    return [run.epoch()]


WHEN = ("within", "between", "last", "last, as the start of the next", "last, nothing skipped")
WORKERS = [(0, False), (1, False), (1, True), (2, True)]
KINDS = [*((source, False) for source in SOURCES), ("shuffled", True), ("by epoch", True)]


@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
@pytest.mark.parametrize(
    ("source", "seedable", "workers", "persistent"),
    rest_nightly(
        [(*kind, *workers) for kind, workers in product(KINDS, WORKERS)],
        daily=lambda *case: case[2:] != (1, True),
    ),
)
def test_resumed_runs_equal_the_uninterrupted_one(
    tmp_path: Path, source: str, seedable: bool, stateful: bool, workers: int, persistent: bool
) -> None:
    configuration = {"use_seedable_sampler": seedable, "use_stateful_dataloader": stateful}
    log = uninterrupted(tmp_path, source, workers, persistent, **configuration)
    if source == "by epoch":  # Even persistent workers must receive the epoch.
        assert [{item // 100 for batch, _ in batches for item in batch} for batches in log] == [{0}, {1}, {2}, {3}]
    elif source != "in order":
        assert len({str([batch for batch, _ in batches]) for batches in log}) == EPOCHS
    rest = {"within": [log[1][3:], *log[2:]], "between": log[2:], "last": log[3:]}
    for when in WHEN:
        found = resumed(tmp_path, when, source, workers, persistent, **configuration)
        assert found == rest[when.partition(",")[0]], when


class ShuffledWhenCreated(ShuffledBatches):
    """A batch sampler that draws when the iterator is created, and not when the first batch is read."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index] for index in torch.randperm(LENGTH).tolist()])


@pytest.mark.parametrize("batches", [ShuffledBatches, ShuffledWhenCreated])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_batch_sampler_draws_the_same_numbers_as_without_preparing(batches: Any, workers: int) -> None:
    found = []
    for prepare in (lambda loader: loader, Accelerator(cpu=True).prepare):
        seed_everything(3)
        loader = prepare(DataLoader(Numbers(), batch_sampler=batches(), num_workers=workers))
        read = [batch.tolist() for _ in range(2) for batch in loader]
        found.append((read, float(torch.rand(1)), random.random(), float(np.random.rand())))  # noqa: NPY002
    assert found[0] == found[1]


class Private(Shuffled):
    """A sampler that draws from a generator that checkpoints do not contain."""

    def __init__(self) -> None:
        self.numbers = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.sample(range(LENGTH), LENGTH))


class Lazy(Shuffled):
    """A sampler that draws each index when it is read."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class ByEpoch(Private):
    """A sampler whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.numbers = random.Random(epoch)


@pytest.mark.parametrize(
    ("sampler", "noise", "known"),
    [(Private, 0, False), (Lazy, 1, False), (ByEpoch, 1, True)],
    ids=["private", "lazy in a training that draws", "by epoch"],
)
@pytest.mark.parametrize(("stateful", "workers"), [(False, 0), (False, 1), (True, 0), (True, 1)])
def test_an_order_that_cannot_be_repeated_is_reported_once(
    tmp_path: Path, sampler: Any, noise: int, known: bool, stateful: bool, workers: int
) -> None:
    reset_warnings()
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful), project_dir=tmp_path
    )
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=SIZE, sampler=sampler(), num_workers=workers))
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        torch.rand(noise)
        if len(whole) == 3:
            accelerator.save_state(str(tmp_path / "state"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.load_state(str(tmp_path / "state"))
            rest = loader if stateful else accelerator.skip_first_batches(loader, 3)
            again = [batch.tolist() for batch in rest]
    told = [str(warning.message) for warning in caught if "a different order" in str(warning.message)]
    assert (again == whole[3:]) == known
    assert [sampler.__name__ in message for message in told] == [True] * (not known)


def test_only_the_rank_that_saved_an_order_compares_it_and_only_with_as_many_ranks() -> None:
    here = with_last_read({"python": None}, (5, [2, 3]))
    assert expected_item(here) == 5
    for place in ((1, 1), (0, 2)):
        assert expected_item({**here, "last_read": (place, *here["last_read"][1:])}) is None
