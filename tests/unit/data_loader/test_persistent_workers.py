"""Persistent workers follow the loader's epoch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_accelerate.data_loader import prepare_data_loader
from notebook_accelerate.data_loader.prepared_loader import EpochFollower, separate_worker_seed


class Several(Dataset[int]):
    """A dataset that returns whole batches, which contain the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.epoch for _ in indices]


class Stream(IterableDataset[int]):
    """An iterable dataset that yields the epoch, and the number that `tell` set when the worker started."""

    told = -1

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch, self.told, int(isinstance(self, Stream))]


def tell(worker: int) -> None:
    Stream.told = 70 + worker


def made(dataset: Any, count: int = 1, **options: Any) -> Any:
    plain = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True, **options)
    return prepare_data_loader(plain, num_processes=count, process_index=0, dispatch_batches=False)


def test_datasets_of_complete_batches_follow_the_epoch() -> None:
    loader = made(Several())
    assert [[batch.tolist() for batch in loader] for _ in range(3)] == [[[e, e], [e, e]] for e in range(3)]


@pytest.mark.parametrize("count", [1, 2])
def test_the_users_function_is_called_first_and_the_class_is_unchanged(count: int) -> None:
    loader = made(Stream(), count, worker_init_fn=tell)
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        assert [item for batch in loader for item in batch.tolist()][:2] == [epoch, 70]


def test_an_interrupted_pass_does_not_affect_the_next() -> None:
    loader = made(Several(), prefetch_factor=2)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert next(iter(loader)).tolist() == [epoch, epoch]


def test_a_loader_prepared_again_follows_its_own_epoch() -> None:
    first = made(Several())
    again = prepare_data_loader(first, num_processes=1, process_index=0)
    assert again.worker_init_fn.function is None
    first.set_epoch(4)
    assert [batch.tolist() for batch in again] == [[0, 0], [0, 0]]


@pytest.mark.leaks_ok("multiprocessing keeps its thread that passes descriptors to other processes")
def test_the_number_is_shared_with_spawned_workers() -> None:
    follower = EpochFollower(None)
    there = pickle.loads(ForkingPickler.dumps(follower))
    follower.epoch.fill_(3)
    assert int(there.epoch) == 3


def test_other_loaders_do_not_follow_epochs() -> None:
    assert made(torch.arange(4)).worker_init_fn is None
    plain = DataLoader(Several(), num_workers=1, worker_init_fn=tell)
    assert prepare_data_loader(plain, num_processes=1, process_index=0).worker_init_fn is tell


def test_a_separate_worker_seed_changes_no_random_numbers() -> None:
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(range(4), generator=own)
    before = own.get_state(), torch.get_rng_state()
    with separate_worker_seed(loader):
        iter(loader)
    assert loader.generator is own
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
