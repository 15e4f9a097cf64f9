"""Skipping the first batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from notebook_accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_accelerate.data_loader.samplers import advance, iterate_from

CPU = torch.device("cpu")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Numbers(Dataset[int]):
    """A dataset that records which samples are requested."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def read(dataloader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in dataloader]


def _generated() -> Iterator[int]:
    yield from [0, 1, 2, 3, 4]
    yield 5
    yield 6
    yield from range(7, 12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(list(range(12))),
        lambda: iter(tuple(range(12))),
        lambda: iter(range(12)),
        lambda: map(int, range(12)),
        _generated,
    ],
    ids=["list", "tuple", "range", "map", "generator"],
)
def test_an_iterator_is_advanced_from_any_position(make: Any) -> None:
    for started in range(14):
        for count in range(15):
            iterator = make()
            for _ in range(started):
                next(iterator, None)
            assert list(advance(iterator, count)) == list(range(12))[started + count :]


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(23)),
    "random": lambda: RandomSampler(range(23), generator=torch.Generator().manual_seed(1)),
    "random more than once": lambda: RandomSampler(
        range(5), num_samples=23, generator=torch.Generator().manual_seed(1)
    ),
    "with replacement": lambda: RandomSampler(range(23), True, 70, generator=torch.Generator().manual_seed(1)),
    "seedable": lambda: SeedableRandomSampler(range(23), data_seed=4),
    "subset": lambda: SubsetRandomSampler(range(3, 23), generator=torch.Generator().manual_seed(1)),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0], 23, generator=torch.Generator().manual_seed(1)),
    "distributed": lambda: DistributedSampler(range(46), num_replicas=2, rank=1, seed=3),
    "list": lambda: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3],
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_starts_in_the_middle(name: str, drop_last: bool) -> None:
    for skipped in range(10):
        whole = list(BatchSampler(SAMPLERS[name](), 3, drop_last))
        assert list(iterate_from(BatchSampler(SAMPLERS[name](), 3, drop_last), skipped)) == whole[skipped:]
        assert list(SkipBatchSampler(BatchSampler(SAMPLERS[name](), 3, drop_last), skipped)) == whole[skipped:]


def test_a_skipping_sampler_has_the_attributes_of_the_wrapped_one() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 3, False)
    skipping = SkipBatchSampler(sampler, 2)
    assert (skipping.batch_size, skipping.sampler, skipping.drop_last) == (3, sampler.sampler, False)
    assert (len(skipping), skipping.total_length) == (2, 4)
    assert len(SkipBatchSampler(sampler, 9)) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}])
@pytest.mark.parametrize("skipped", [0, 1, 2, 50])
def test_the_rest_of_a_prepared_loader_is_read(ranks: int, options: dict[str, Any], skipped: int) -> None:
    for rank in range(ranks):
        dataset = Numbers(40)
        made = prepare_data_loader(
            DataLoader(dataset, batch_size=6), num_processes=ranks, process_index=rank, **options
        )
        expected = read(made)[skipped:]
        dataset.asked.clear()
        rest = skip_first_batches(made, skipped)
        assert read(rest) == expected
        assert len(dataset.asked) == sum(map(len, expected))  # Skipped samples must not be loaded.
        assert len(rest) == len(expected)


def test_every_attribute_is_kept() -> None:
    plain = DataLoader(range(10), batch_size=2, shuffle=True, num_workers=0, generator=torch.Generator())
    made: Any = prepare_data_loader(
        plain, CPU, 2, 1, put_on_device=True, rng_types=["torch"], use_seedable_sampler=True, non_blocking=True
    )
    made.note = {"mine": 1}
    made.set_epoch(3)
    rest: Any = skip_first_batches(made, 2)
    changed = {"batch_sampler", "_iterator", "_original", "_resumes"}
    assert type(rest) is DataLoaderShard
    assert {k: v for k, v in vars(rest).items() if k not in changed} == {
        k: v for k, v in vars(made).items() if k not in changed
    }
    assert rest.batch_sampler.batch_sampler is made.batch_sampler
    assert rest.total_batch_size == made.total_batch_size == 4
    assert rest.note is made.note
    assert get_sampler(rest) is get_sampler(made)
    assert skip_first_batches(rest, 1).total_batch_size == 4


def test_plain_loaders_keep_their_class_and_attributes() -> None:
    class Mine(DataLoader[Any]):
        pass

    plain: Any = Mine(range(10), batch_size=2, timeout=0)
    plain.note = "mine"
    rest: Any = skip_first_batches(plain, 3)
    assert type(rest) is Mine
    assert rest.note == "mine"
    assert read(rest) == [[6, 7], [8, 9]]
    assert read(plain)[0] == [0, 1]


def test_iterable_datasets_are_read_and_dropped() -> None:
    plain: Any = DataLoader(Stream(), batch_size=4)
    plain.note = "mine"
    rest: Any = skip_first_batches(plain, 1)
    assert isinstance(rest, SkipDataLoader)
    assert rest.note == "mine"
    assert read(rest) == read(rest) == [[4, 5, 6, 7], [8, 9]]
    assert read(skip_first_batches(rest, 1)) == [[8, 9]]
    shard = prepare_data_loader(DataLoader(Stream(), batch_size=4), num_processes=2, process_index=1)
    assert read(skip_first_batches(shard, 1)) == [[2, 3, 4, 5]]
    dispatcher = prepare_data_loader(DataLoader(Stream(), batch_size=4), CPU, put_on_device=True)
    assert isinstance(dispatcher, DataLoaderDispatcher)
    assert read(skip_first_batches(dispatcher, 2)) == [[8, 9]]


def test_items_without_batches_are_skipped_too() -> None:
    plain = DataLoader(range(10), batch_size=None)
    assert list(skip_first_batches(plain, 8)) == [8, 9]
    made = prepare_data_loader(plain, num_processes=2, process_index=1)
    assert list(skip_first_batches(made, 4)) == [9]


def test_resuming_continues_with_the_right_epoch() -> None:
    """Accelerate repeats the first epoch instead: https://github.com/huggingface/accelerate/issues/2016."""

    def make() -> Any:
        plain = DataLoader(range(10), batch_size=2, shuffle=True)
        return prepare_data_loader(plain, num_processes=2, process_index=0, use_seedable_sampler=True, data_seed=1)

    straight = make()
    epochs = [read(straight) for _ in range(4)]
    resumed = make()
    resumed.set_epoch(2)
    assert read(skip_first_batches(resumed, 1)) == epochs[2][1:]
    assert resumed.iteration == 3
    assert read(resumed) == epochs[3]

    again = make()
    sampler = SeedableRandomSampler(range(10), data_seed=1)
    sampler.set_epoch(2)
    again.set_sampler(sampler)  # Loading a checkpoint makes this call.
    assert again.get_sampler() is sampler
    assert read(again) == epochs[2]


def test_a_resumed_pass_draws_no_random_numbers() -> None:
    made = prepare_data_loader(DataLoader(range(10), batch_size=2), num_processes=1, process_index=0)
    before = torch.get_rng_state()
    for _ in skip_first_batches(made, 2):
        break
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("number", [-1, -100])
def test_a_negative_number_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_batches={number}"):
        skip_first_batches(DataLoader(range(4)), number)


def test_other_objects_than_loaders_are_refused() -> None:
    with pytest.raises(ValueError, match="dataloader is a list"):
        skip_first_batches([1], 1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_time_does_not_depend_on_the_number_of_skipped_batches(ranks: int, shuffle: bool) -> None:
    plain = DataLoader(range(2 * 100_100 * ranks), batch_size=2, shuffle=shuffle)
    made = prepare_data_loader(plain, num_processes=ranks, process_index=0, use_seedable_sampler=True)

    def seconds(skipped: int) -> float:
        times = []
        for _ in range(7):
            start = time.thread_time()  # Measure CPU time, because test machines are busy.
            next(iter(skip_first_batches(made, skipped)))
            times.append(time.thread_time() - start)
        return min(times)

    few, many = seconds(10), seconds(100_000)
    assert many < 2 * few + 5e-4, f"10: {few * 1e3:.2f} ms, 100,000: {many * 1e3:.2f} ms"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"sampler": SubsetRandomSampler(range(5, 30))}, {"shuffle": True, "persistent_workers": True}],
    ids=["shuffled", "subset", "persistent"],
)
def test_an_interrupted_order_can_be_read_again(
    workers: int, ranks: int, generator: bool, options: dict[str, Any]
) -> None:
    if options.get("persistent_workers") and not workers:
        return

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(seed) if generator else None
        plain = DataLoader(range(30), batch_size=2, num_workers=workers, generator=own, **options)
        return prepare_data_loader(plain, num_processes=ranks, process_index=0)

    straight = make(1)
    read(straight)
    assert straight.order_state() is None
    second, saved = [], None
    for batch in straight:
        second.append(batch.tolist())
        if len(second) == 3:
            own = get_sampler(straight).generator
            saved = straight.order_state(), torch.get_rng_state(), own and own.get_state()
    third = read(straight)

    resumed = make(2)
    resumed.load_order_state(saved[0])
    resumed.workers_seeded = straight.workers_seeded
    torch.set_rng_state(saved[1])
    if saved[2] is not None:
        get_sampler(resumed).generator.set_state(saved[2])
    assert read(skip_first_batches(resumed, 3)) == second[3:]
    assert read(resumed) == third
