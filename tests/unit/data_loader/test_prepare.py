"""`prepare_data_loader` on a single rank, and on one of several ranks."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from notebook_accelerate.collectives import gather_for_metrics
from notebook_accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_accelerate.state import GradientState

CPU = torch.device("cpu")


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


def prepared(dataloader: DataLoader[Any], ranks: int = 1, rank: int = 0, **options: Any) -> Any:
    return prepare_data_loader(dataloader, num_processes=ranks, process_index=rank, **options)


def read(dataloader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in dataloader]


def of_all(dataloader: Any, ranks: int, **options: Any) -> list[list[list[int]]]:
    return [read(prepared(dataloader, ranks, rank, **options)) for rank in range(ranks)]


def test_one_rank_reads_what_the_plain_loader_reads() -> None:
    plain = DataLoader(range(10), batch_size=3, shuffle=True)
    torch.manual_seed(3)
    expected = read(plain), read(plain)
    torch.manual_seed(3)
    made = prepared(plain)
    assert (read(made), read(made)) == expected
    assert isinstance(made, DataLoaderShard)
    assert isinstance(made, DataLoader)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seedable", [False, True])
def test_ranks_share_an_epoch(shuffle: bool, seedable: bool) -> None:
    shares = []
    for rank in (0, 1):
        torch.manual_seed(0)
        plain = DataLoader(range(12), batch_size=3, shuffle=shuffle)
        made = prepared(plain, 2, rank, use_seedable_sampler=seedable)
        shares.append([i for batch in read(made) for i in batch])
    assert sorted(shares[0] + shares[1]) == list(range(12))
    assert len(shares[0]) == len(shares[1]) == 6


def test_the_order_for_a_seed_and_an_epoch_equals_accelerate() -> None:
    made = prepared(DataLoader(range(6), batch_size=6, shuffle=True), use_seedable_sampler=True, data_seed=5)
    # These orders were observed with Accelerate 1.15.
    assert [read(made)[0] for _ in range(4)] == [
        [5, 0, 1, 3, 4, 2],
        [2, 0, 5, 1, 4, 3],
        [3, 0, 1, 5, 2, 4],
        [3, 4, 0, 2, 5, 1],
    ]
    assert made.iteration == get_sampler(made).epoch == 4
    made.set_epoch(1)
    assert read(made)[0] == [2, 0, 5, 1, 4, 3]
    assert isinstance(get_sampler(made), SeedableRandomSampler)


def test_the_shuffled_shares_for_a_seed_equal_accelerate() -> None:
    shares = []
    for rank in (0, 1):
        torch.manual_seed(0)
        made = prepared(DataLoader(range(8), batch_size=2, shuffle=True), 2, rank)
        shares.append([read(made), read(made)])
    # These shares were observed with Accelerate 1.15.
    assert shares == [[[[2, 5], [1, 7]], [[4, 2], [0, 5]]], [[[4, 6], [0, 3]], [[1, 6], [7, 3]]]]


@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(range(2, 10)), WeightedRandomSampler([1.0] * 10, 8, replacement=False)], ids=type
)
def test_samplers_that_draw_get_a_generator_that_ranks_can_share(sampler: Any) -> None:
    plain = DataLoader(range(10), batch_size=2, sampler=sampler)
    shares = []
    for rank in (0, 1):
        torch.manual_seed(4)
        made = prepared(plain, 2, rank, rng_types=["generator"])
        assert made.synchronized_generator is get_sampler(made).generator is not None
        torch.manual_seed(100 + rank)  # Each rank has drawn different numbers by now.
        shares.append([i for batch in read(made) for i in batch])
    assert len(set(shares[0] + shares[1])) == 8
    assert sampler.generator is None


@pytest.mark.parametrize("seedable", [False, True])
def test_loaders_of_torchdata_are_shuffled_equally_on_all_ranks(seedable: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = StatefulDataLoader(range(12), batch_size=3, shuffle=True)
    options = {"use_stateful_dataloader": True, "use_seedable_sampler": seedable, "rng_types": ["generator"]}
    made = [prepared(plain, 2, rank, **options) for rank in (0, 1)]
    assert isinstance(get_sampler(made[0]), SeedableRandomSampler) is seedable
    assert (made[0].synchronized_generator is None) is seedable
    if seedable:
        assert sorted(i for one in made for batch in read(one) for i in batch) == list(range(12))


def test_the_users_loader_is_not_changed() -> None:
    plain = DataLoader(range(8), batch_size=2, shuffle=True)
    before = plain.sampler, plain.batch_sampler, plain.batch_sampler.sampler
    prepared(plain, 2, 0)
    prepared(plain, 2, 0, use_seedable_sampler=True)
    assert (plain.sampler, plain.batch_sampler, plain.batch_sampler.sampler) == before
    assert isinstance(plain.sampler, RandomSampler)
    assert plain.sampler.generator is None


def test_arguments_are_copied() -> None:
    def collate(items: list[int]) -> torch.Tensor:
        return torch.tensor(items) * 2

    def init(_: int) -> None:
        return None

    generator = torch.Generator()
    plain = DataLoader(
        range(8),
        batch_size=2,
        collate_fn=collate,
        num_workers=1,
        worker_init_fn=init,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=7,
        generator=generator,
        multiprocessing_context="fork",
    )
    made = prepared(plain, 2, 0)
    for name in (
        "collate_fn",
        "num_workers",
        "worker_init_fn",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "generator",
    ):
        assert getattr(made, name) == getattr(plain, name), name
    assert made.multiprocessing_context.get_start_method() == "fork"


def test_persistent_workers_serve_every_epoch() -> None:
    plain = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    made = prepared(plain, 2, 1)
    assert read(made) == [[2, 3], [6, 7]]
    workers = [process.pid for process in made._iterator._workers]
    assert read(made) == [[2, 3], [6, 7]]
    assert [process.pid for process in made._iterator._workers] == workers
    made._iterator._shutdown_workers()


def test_split_batches_cuts_the_batches_of_the_plain_loader() -> None:
    plain = DataLoader(range(8), batch_size=4)
    assert of_all(plain, 2, split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert prepared(plain, 2, 0, split_batches=True).total_batch_size == 4
    assert prepared(plain, 2, 0).total_batch_size == 8
    with pytest.raises(ValueError, match=r"num_processes=3 equal parts.* is 4; use a multiple of 3"):
        prepared(plain, 3, 0, split_batches=True)
    assert read(prepared(plain, 1, 0, split_batches=True)) == read(plain)


def test_uneven_batches_lose_and_add_nothing() -> None:
    plain = DataLoader(range(7), batch_size=2)
    assert of_all(plain, 2, even_batches=False) == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_custom_batch_samplers_are_divided() -> None:
    plain = DataLoader(range(8), batch_sampler=[[1, 2], [3], [4, 5, 6], [7]])
    assert of_all(plain, 2) == [[[1, 2], [4, 5, 6]], [[3], [7]]]


def test_loaders_without_batches_are_divided_item_by_item() -> None:
    plain = DataLoader(range(5), batch_size=None)
    assert list(prepared(plain)) == [0, 1, 2, 3, 4]
    assert [list(prepared(plain, 2, rank)) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 0]]


class Slices(Dataset[torch.Tensor]):
    """A dataset that returns whole batches, like those of `datasets`."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)

    def __len__(self) -> int:
        return 8


def test_a_batch_sampler_in_place_of_the_sampler_is_divided() -> None:
    plain = DataLoader(Slices(), batch_size=None, sampler=BatchSampler(RandomSampler(range(8)), 2, False))
    made = prepared(plain, use_seedable_sampler=True, data_seed=1)
    assert sorted(i for batch in read(made) for i in batch) == list(range(8))
    assert isinstance(get_sampler(made), SeedableRandomSampler)
    plain = DataLoader(Slices(), batch_size=None, sampler=BatchSampler(range(8), 2, False))
    assert of_all(plain, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (False, [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]),
        (True, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
    ],
)
def test_iterable_datasets_are_divided(split: bool, expected: Any) -> None:
    plain = DataLoader(Stream(10), batch_size=4)
    assert of_all(plain, 2, split_batches=split) == expected
    made = prepared(plain, 2, 0, split_batches=split)
    assert isinstance(made.dataset, IterableDatasetShard)
    assert made.total_batch_size == (4 if split else 8)


def test_iterable_datasets_of_batches_are_divided_batch_by_batch() -> None:
    plain = DataLoader(Stream(5), batch_size=None)
    assert [list(prepared(plain, 2, rank)) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 0]]


def test_iterable_datasets_are_dispatched_if_batches_go_to_a_device() -> None:
    plain = DataLoader(Stream(10), batch_size=4)
    assert isinstance(prepared(plain, put_on_device=True, device=CPU), DataLoaderDispatcher)
    assert isinstance(prepared(plain, put_on_device=True, device=CPU, dispatch_batches=False), DataLoaderShard)
    assert isinstance(prepared(plain), DataLoaderShard)
    with pytest.raises(ValueError, match="put_on_device=True"):
        prepared(plain, dispatch_batches=True)


def test_other_objects_than_loaders_are_refused() -> None:
    with pytest.raises(ValueError, match="dataloader is a list; pass a torch DataLoader"):
        prepare_data_loader([1, 2])


def test_random_numbers_are_synchronised_only_if_there_is_a_generator() -> None:
    shuffled = DataLoader(range(8), shuffle=True)
    made = prepared(shuffled, 2, 0, rng_types=["torch", "generator"])
    assert made.rng_types == ["torch", "generator"]
    assert made.synchronized_generator is get_sampler(made).generator
    asked = ["torch", "generator"]
    assert prepared(DataLoader(range(8)), 2, 0, rng_types=asked).rng_types == ["torch"]
    assert asked == ["torch", "generator"]
    stream: Any = Stream(4)
    stream.generator = torch.Generator()
    assert prepared(DataLoader(stream), 2, 0, rng_types=asked).synchronized_generator is stream.generator


def test_ranks_of_one_model_read_the_same() -> None:
    class Mesh:
        """A mesh of two groups, each with two ranks that share a model. This is rank 2 of 4."""

        mesh_dim_names = ("dp_shard", "tp")
        mesh = torch.arange(4).view(2, 2)

        @staticmethod
        def get_coordinate() -> list[int]:
            return [1, 0]

    made = prepared(DataLoader(range(8), batch_size=2), 4, 2, torch_device_mesh=Mesh())
    assert read(made) == [[2, 3], [6, 7]]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Example:
    values: torch.Tensor
    name: str


BATCHES: list[Any] = [
    torch.ones(2),
    [torch.ones(2), {"a": (torch.ones(2), "text")}],
    Pair(torch.ones(2), [torch.zeros(1)]),
    collections.UserDict(a=torch.ones(2)),
    Example(torch.ones(2), "name"),
    None,
    "text",
    {},
]


@pytest.mark.parametrize("device", [None, CPU, torch.device("meta")])
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_nested_batches_are_moved(batch: Any, device: torch.device | None) -> None:
    plain = DataLoader(range(3), collate_fn=lambda _: batch)
    got = list(prepared(plain, put_on_device=device is not None, device=device))
    assert len(got) == 3
    assert all(type(item) is type(batch) for item in got)
    if isinstance(batch, torch.Tensor):
        assert got[0].device == (device or CPU)
    if isinstance(batch, Pair):
        assert got[0].right[0].device == (device or CPU)


def test_batches_on_the_cpu_are_not_copied() -> None:
    batch = {"a": [torch.ones(2)]}
    plain = DataLoader(range(3), collate_fn=lambda _: batch)
    assert all(got is batch for got in prepared(plain, put_on_device=True, device=CPU))


# ---- updates of the gradient state


def ends(dataloader: Any) -> list[tuple[bool, int]]:
    state = GradientState()
    return [(state.end_of_dataloader, state.remainder) for _ in dataloader]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("device", [None, torch.device("meta")])
def test_the_last_batch_is_known_to_be_the_last(length: int, device: Any) -> None:
    made = prepared(DataLoader(range(length), batch_size=2), put_on_device=True, device=device)
    flags = [end for end, _ in ends(made)]
    assert flags == [False] * (len(made) - 1) + [True] * (len(made) > 0)
    assert not GradientState().in_dataloader


@pytest.mark.parametrize(
    ("plain", "remainder"),
    [
        (DataLoader(range(10), batch_size=2), 2),
        (DataLoader(range(8), batch_size=2), 0),
        (DataLoader(range(10), batch_size=2, drop_last=True), -1),
        (DataLoader(range(10), sampler=SubsetRandomSampler(range(5)), batch_size=2), 1),
        (DataLoader(range(10), batch_sampler=BatchSampler(range(10), 2, True)), -1),
        (DataLoader(range(10), batch_sampler=[[0, 1], [2, 3], [4, 5]]), 2),
        (DataLoader(Stream(10), batch_size=2), 2),
        (DataLoader(Stream(8), batch_size=2), 0),
        (DataLoader(Stream(10), batch_size=2, num_workers=1), 2),
        (DataLoader(Stream(8), batch_size=2, num_workers=1), 0),
        (DataLoader(Stream(10), batch_size=2, num_workers=2), -1),
        (DataLoader(Stream(10), batch_size=2, num_workers=1, multiprocessing_context="spawn"), 2),
        (DataLoader(Stream(10), batch_size=2, drop_last=True), -1),
        (DataLoader(Stream(1), batch_size=2), 1),
    ],
)
def test_the_remainder_counts_samples_without_padding(plain: DataLoader[Any], remainder: int) -> None:
    assert ends(prepared(plain, 2, 0))[-1] == (True, remainder)


class Announced(Stream):
    """A dataset that reports the wrong length."""

    def __init__(self, length: int, announced: int) -> None:
        super().__init__(length)
        self.announced = announced

    def __len__(self) -> int:
        return self.announced


class Batches(Stream):
    """A dataset that yields complete batches."""

    def __iter__(self) -> Any:
        return iter(torch.arange(self.length).split(4))


class Uncounted(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Any:
        return iter(range(10))


class OwnBatches:
    """A user-defined batch sampler whose batches have different sizes."""

    batch_size = 4

    def __iter__(self) -> Any:
        return iter([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]])

    def __len__(self) -> int:
        return 3


ENDS_THAT_NOTHING_ANNOUNCES: dict[str, Any] = {
    "a stream": lambda: DataLoader(Stream(10), batch_size=4),
    "a full last batch": lambda: DataLoader(Stream(8), batch_size=4),
    "a stream that is read by a worker": lambda: DataLoader(Stream(10), batch_size=4, num_workers=1),
    "a length that is too large": lambda: DataLoader(Announced(10, 12), batch_size=4),
    "a length that is too small": lambda: DataLoader(Announced(10, 8), batch_size=4),
    "a stream of batches": lambda: DataLoader(Batches(10), batch_size=None),
    "a sampler without a length": lambda: DataLoader(range(20), batch_size=4, sampler=Uncounted()),
    "a batch sampler of another class": lambda: DataLoader(range(10), batch_sampler=OwnBatches()),
}


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", ENDS_THAT_NOTHING_ANNOUNCES)
def test_one_process_cuts_results_at_the_end_of_data_of_unknown_length(
    kind: str, stateful: bool, dispatch: bool
) -> None:
    """transformers' Trainer repeats a short batch's loss to the full batch size, and relies on this cut."""
    made = prepared(
        ENDS_THAT_NOTHING_ANNOUNCES[kind](),
        device=CPU, put_on_device=True, dispatch_batches=dispatch, use_stateful_dataloader=stateful,
    )  # fmt: skip
    for _ in range(2):
        batches, repeated = [], []
        for batch in made:
            batches.append(len(batch))
            results = batch.double().mean().repeat(max(len(batch), 4 if made.end_of_dataloader else 0))
            repeated.append(len(gather_for_metrics(results, GradientState())))
        assert repeated == batches
        assert made.end_of_dataloader


@pytest.mark.parametrize("dispatch", [False, True])
def test_the_rest_of_a_stream_is_cut_too(dispatch: bool) -> None:
    made = prepared(DataLoader(Stream(10), batch_size=4), device=CPU, put_on_device=True, dispatch_batches=dispatch)
    assert ends(skip_first_batches(made, 1))[-1] == (True, 2)
    for _ in made:  # Leave this pass unfinished.
        break
    assert ends(made)[-1] == (True, 2)


def test_batches_of_unknown_size_are_not_cut() -> None:
    made = prepared(DataLoader(Stream(10), batch_size=4, collate_fn=str))
    assert ends(made)[-1] == (True, -1)


def test_an_interrupted_loader_is_not_active() -> None:
    state = GradientState()
    made = prepared(DataLoader(range(10), batch_size=2))
    for _ in made:
        assert state.active_dataloader is made
        break
    assert not state.in_dataloader
    assert made.iteration == 0
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in made]
    assert [end for end, _ in ends(made)] == [False, False, False, False, True]


def test_an_evaluation_in_between_changes_nothing() -> None:
    state = GradientState()
    train = prepared(DataLoader(range(6), batch_size=2))
    evaluation = prepared(DataLoader(range(3), batch_size=2))
    held = []
    for step, _ in enumerate(train):
        assert state.active_dataloader is train
        for _ in evaluation:
            assert state.active_dataloader is evaluation
            if step == 1:
                break
        single = iter(prepared(DataLoader(range(1))))
        next(single)  # Reading the only batch reports the end, but the pass stays open.
        held.append(single)
        if step < 2:
            continue
        assert state.end_of_dataloader
    del held, single
    assert not state.in_dataloader


def test_an_open_loader_does_not_stay_the_active_one() -> None:
    state = GradientState()
    train = prepared(DataLoader(range(6), batch_size=2))
    held: list[Any] = []
    seen = []
    for _ in train:
        seen.append((state.active_dataloader is train, state.end_of_dataloader))
        held.append(iter(prepared(DataLoader(range(1)))))
        next(held[-1])
    assert seen == [(True, False), (True, False), (True, True)]
    held.clear()
    assert not state.in_dataloader


def test_shards_are_found_below_wrappers() -> None:
    made = prepared(DataLoader(range(8), batch_size=2), 2, 0)
    assert isinstance(made.batch_sampler, BatchSamplerShard)
    assert made.total_dataset_length == 8
    assert made.base_dataloader is made
    made.base_dataloader = made


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}], ids=str)
def test_another_torch_loader_can_be_assigned(options: dict[str, Any], kind: Any) -> None:
    made = prepared(DataLoader(range(8), batch_size=2), put_on_device=True, device=CPU, **options)
    assert read(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    made.base_dataloader = kind(range(10, 15), batch_size=3)
    assert (read(made), len(made), made.batch_size, list(made.dataset)) == (
        [[10, 11, 12], [13, 14]],
        2,
        3,
        [10, 11, 12, 13, 14],
    )
    assert read(made) == [[10, 11, 12], [13, 14]]


def test_a_loader_with_a_custom_iteration_cannot_be_assigned() -> None:
    class Doubled(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter([1, 2])

    made = prepared(DataLoader(range(8), batch_size=2))
    with pytest.raises(ValueError, match=r"base_dataloader=Doubled\(...\) is not allowed; assign a torch DataLoader"):
        made.base_dataloader = Doubled(range(2))


def test_the_loader_of_a_skipping_one_can_be_replaced() -> None:
    made = SkipDataLoader(range(6), skip_batches=1)
    made.base_dataloader = DataLoader(range(3), batch_size=1)
    assert read(made) == [[1], [2]]


def test_a_dispatcher_without_a_mesh_has_no_dimensions() -> None:
    made = prepared(DataLoader(range(8), batch_size=2), put_on_device=True, device=CPU, dispatch_batches=True)
    assert (made.submesh_tp, made.submesh_dp, made.submesh_fsdp) == (None, None, None)
