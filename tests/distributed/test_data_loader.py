"""Loaders on real ranks: batches that one rank reads for all, and synchronized random numbers."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, SubsetRandomSampler, WeightedRandomSampler

from notebook_accelerate.data_loader import (
    DataLoaderDispatcher,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_accelerate.data_loader.shard_loader import synchronize_rng_state, synchronize_rng_states
from notebook_accelerate.state import GradientState, PartialState
from notebook_accelerate.utils import set_seed
from tests.support.ranks import RankError, run_ranks, run_script


class Stream(IterableDataset[Any]):
    """A dataset that counts from 0, and may only be read on rank 0."""

    def __init__(self, length: int, fails_at: int | None = None) -> None:
        self.length = length
        self.fails_at = fails_at

    def __iter__(self) -> Any:
        assert PartialState().process_index == 0, "only rank 0 reads"
        for number in range(self.length):
            if number == self.fails_at:
                raise ZeroDivisionError("bad sample")
            yield number


def dispatched(dataset: Any, size: int = 4, drop_last: bool = False, **options: Any) -> Any:
    plain = DataLoader(dataset, batch_size=size, drop_last=drop_last, **options.pop("plain", {}))
    made = prepare_data_loader(plain, PartialState().device, put_on_device=True, dispatch_batches=True, **options)
    assert isinstance(made, DataLoaderDispatcher)
    return made


def read(dataloader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in dataloader]


# ---- the batches of each rank


def _dispatch(cases: list[Any]) -> list[Any]:
    got = []
    for length, split, drop_last, _ in cases:
        made = dispatched(Stream(length), drop_last=drop_last, split_batches=split)
        got.append([(batch.tolist(), GradientState().end_of_dataloader, made.remainder) for batch in made])
        assert not GradientState().in_dataloader
    return got


# A case has the number of samples, split_batches, drop_last, and each rank's batches of 4 with Accelerate 1.15.
DISPATCHED = {
    2: [
        (1, False, False, [[[0]], [[0]]]),
        (1, True, False, [[[0]], [[0]]]),
        (2, False, False, [[[0]], [[1]]]),
        (3, False, False, [[[0, 1]], [[2, 0]]]),
        (5, False, False, [[[0, 1, 2]], [[3, 4, 0]]]),
        (5, True, False, [[[0, 1], [4]], [[2, 3], [0]]]),
        (5, True, True, [[[0, 1]], [[2, 3]]]),
        (9, False, False, [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [0]]]),
        (9, False, True, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        (11, False, False, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10, 0]]]),
        (11, True, False, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]),
    ],
    3: [
        (8, False, False, [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 0]]]),
        (10, False, False, [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 0, 1]]]),
    ],
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_0_reads_and_every_rank_gets_its_part(world_size: int) -> None:
    cases = DISPATCHED[world_size]
    results = run_ranks(_dispatch, cases, world_size=world_size)
    for number, (length, split, drop_last, expected) in enumerate(cases):
        got = [result[number] for result in results]
        assert [[batch for batch, _, _ in share] for share in got] == expected
        for share in got:
            assert [end for _, end, _ in share] == [False] * (len(share) - 1) + [True]
            last_round = length % (4 if split else 4 * world_size) or (4 if split else 4 * world_size)
            assert share[-1][2] == (-1 if drop_last else last_round)


def _dispatch_nothing() -> list[Any]:
    return [read(dispatched(Stream(0))), read(dispatched(Stream(3), drop_last=True)), read(dispatched(range(0)))]


def test_an_empty_loader_gives_an_empty_pass() -> None:
    assert run_ranks(_dispatch_nothing) == [[[], [], []]] * 2


def _lengths() -> list[int]:
    return [len(dispatched(range(n), drop_last=drop)) for n in (0, 1, 8, 9, 16) for drop in (False, True)] + [
        len(dispatched(range(9), split_batches=True)),
        len(skip_first_batches(dispatched(range(40)), 2)),
    ]


def test_the_length_counts_rounds() -> None:
    assert run_ranks(_lengths) == [[0, 0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3]] * 2


Pair = collections.namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - without annotations, as users write them


@dataclasses.dataclass
class Example:
    values: torch.Tensor


def _collate(items: list[int]) -> dict[str, Any]:
    numbers = torch.tensor(items)
    return {
        "numbers": numbers,
        "nested": [Pair(numbers.float(), Example(numbers.half())), (numbers[:, None] * torch.ones(3),)],
        "flag": numbers % 2 == 0,
    }


def _nested() -> list[Any]:
    made = dispatched(Stream(7), 2, plain={"collate_fn": _collate})
    rank = PartialState().process_index
    got = []
    for step, batch in enumerate(made):
        numbers = batch["numbers"]
        left, right = batch["nested"][0]
        assert isinstance(batch["nested"][0], Pair)
        assert isinstance(right, Example)
        assert torch.equal(left, numbers.float())
        assert torch.equal(right.values, numbers.half())
        assert torch.equal(batch["nested"][1][0], numbers[:, None].float().expand(-1, 3))
        assert torch.equal(batch["flag"], numbers % 2 == 0)
        got.append((step, rank, numbers.tolist()))
    return got


def test_batches_with_any_nesting_are_dispatched() -> None:
    assert run_ranks(_nested) == [[(0, 0, [0, 1]), (1, 0, [4, 5])], [(0, 1, [2, 3]), (1, 1, [6, 0])]]


def _with_text(items: list[int]) -> dict[str, Any]:
    return {"numbers": torch.tensor(items), "note": f"from {items[0]}"}


def _noted() -> list[Any]:
    made = dispatched(Stream(8), 4, plain={"collate_fn": _with_text}, split_batches=True)
    return [(batch["numbers"].tolist(), batch["note"]) for batch in made]


def test_leaves_that_are_not_tensors_are_sent() -> None:
    assert run_ranks(_noted) == [
        [([0, 1], "from 0"), ([4, 5], "from 4")],
        [([2, 3], "from 0"), ([6, 7], "from 4")],
    ]


def _alone() -> list[Any]:
    return list(dispatched(Stream(3), 1, plain={"collate_fn": str}))


def test_a_single_rank_gets_batches_of_any_type() -> None:
    assert run_ranks(_alone, world_size=1) == [["[0]", "[1]", "[2]"]]


def _own_slices(tensor: Any, part: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    assert num_processes == 2
    return tensor[process_index::num_processes]


def _sliced() -> list[Any]:
    return read(dispatched(Stream(8), slice_fn_for_dispatch=_own_slices))


def test_slice_fn_selects_the_part_of_each_rank() -> None:
    assert run_ranks(_sliced) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]


def _interrupted() -> list[Any]:
    made = dispatched(Stream(32))
    got = []
    for batch in made:
        got.append(batch.tolist())
        if len(got) == 2:
            break
    assert not GradientState().in_dataloader
    return [got, read(skip_first_batches(made, 3)), read(skip_first_batches(dispatched(range(32)), 3))]


def test_a_dispatched_pass_can_be_interrupted_and_started_in_the_middle() -> None:
    first, second = run_ranks(_interrupted)
    assert first == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[24, 25, 26, 27]], [[24, 25, 26, 27]]]
    assert second == [[[4, 5, 6, 7], [12, 13, 14, 15]], [[28, 29, 30, 31]], [[28, 29, 30, 31]]]


def _failing(fails_at: int) -> str:
    try:
        read(dispatched(Stream(32, fails_at=fails_at)))
    except (ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("fails_at", [0, 20])
def test_an_error_on_rank_0_reaches_the_waiting_ranks(fails_at: int) -> None:
    first, second = run_ranks(_failing, fails_at)
    assert first == "ZeroDivisionError: bad sample"
    assert second.startswith("RuntimeError: Rank 0 could not read the next batch")
    assert "ZeroDivisionError: bad sample" in second


def _ragged(items: list[int]) -> torch.Tensor:
    return torch.zeros(len(items), items[0] + 1)


def _unjoinable() -> None:
    read(dispatched(Stream(16), 2, plain={"collate_fn": _ragged}))


def test_batches_that_cannot_be_concatenated_are_reported() -> None:
    with pytest.raises(RankError, match=r"cannot be concatenated.*dispatch_batches=False"):
        run_ranks(_unjoinable)


def _resumed(consumed: int) -> list[Any]:
    options: dict[str, Any] = {"use_stateful_dataloader": True}
    made = dispatched(range(37), **options)
    whole, state = [], None
    for number, batch in enumerate(made, 1):
        whole.append(batch.tolist())
        if number == consumed:
            state = pickle.loads(pickle.dumps(made.state_dict()))
    again = dispatched(range(37), **options)
    again.load_state_dict(state)
    return [whole[consumed:], read(again), whole, read(again), again.iteration]


@pytest.mark.parametrize("consumed", [1, 3, 4, 5])
def test_a_stateful_dispatcher_resumes(consumed: int) -> None:
    for rest, resumed, whole, after, iteration in run_ranks(_resumed, consumed):
        assert resumed == (rest or whole)  # If the state was saved after the last batch, the next pass is complete.
        assert after == whole
        assert iteration == (2 if rest else 3)


def _named(items: list[int]) -> Any:
    names = tuple(f"row {i}" for i in items)
    return {
        "numbers": torch.tensor(items),
        "padded": torch.zeros(len(items), max(items) % 5 + 1),
        "names": list(names),
        "turns": [[{"text": name}] for name in names],
        "pairs": [names, names],
        "title": "all",
        "sizes": [1] * 7,
    }


def _named_rounds(length: int, split: bool, equal: bool) -> list[Any]:
    def collate(items: list[int]) -> Any:
        batch = _named(items)
        if equal:
            batch = {name: value for name, value in batch.items() if name not in ("padded", "title", "sizes")}
        return batch

    made = dispatched(Stream(length), 4, plain={"collate_fn": collate}, split_batches=split)
    got = []
    for batch in made:
        numbers = batch["numbers"].tolist()
        names = [f"row {i}" for i in numbers]
        assert batch["names"] == names
        assert batch["turns"] == [[{"text": name}] for name in names]
        assert batch["pairs"] == [tuple(names)] * 2
        if not equal:
            assert (batch["title"], batch["sizes"]) == ("all", [1] * 7)
            assert len(batch["padded"]) == len(numbers)
        got.append((numbers, made.remainder))
    return got


@pytest.mark.parametrize(("split", "equal"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("length", [3, 8, 9, 11])
def test_lists_with_an_entry_for_each_sample_are_divided(length: int, split: bool, equal: bool) -> None:
    results = run_ranks(_named_rounds, length, split, equal)
    gathered = [[i for share in round_ for i in share[0]] for round_ in zip(*results, strict=True)]
    gathered[-1] = gathered[-1][: results[0][-1][1]]
    assert [i for round_ in gathered for i in round_] == list(range(length))


# ---- random numbers


class Draws(Sampler[int]):
    """A user-defined sampler that draws from torch's global generator."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(12).tolist())

    def __len__(self) -> int:
        return 12


DISPATCHED_ORDERS: dict[str, Any] = {
    "stream": lambda: {"dataset": Stream(12)},
    "in order": lambda: {"dataset": range(12)},
    "shuffled": lambda: {"dataset": range(12), "shuffle": True},
    "subset": lambda: {"dataset": range(20), "sampler": SubsetRandomSampler(range(12))},
    "weighted": lambda: {"dataset": range(12), "sampler": WeightedRandomSampler([1.0] * 12, 12)},
    "own sampler": lambda: {"dataset": range(12), "sampler": Draws()},
    "own generator": lambda: {"dataset": range(12), "shuffle": True, "generator": torch.Generator().manual_seed(3)},
}


def _drawn_with_batches(stateful: bool) -> list[Any]:
    got = []
    for arguments in DISPATCHED_ORDERS.values():
        torch.manual_seed(1)
        made = prepare_data_loader(
            DataLoader(batch_size=2, **arguments()),
            put_on_device=True, dispatch_batches=True, use_stateful_dataloader=stateful,
        )  # fmt: skip
        numbers = [torch.rand(1).item()]
        numbers += [torch.rand(1).item() for _ in made]
        for _ in made:  # Leave this pass unfinished.
            break
        numbers += [torch.rand(1).item() for _ in made]
        rest = skip_first_batches(made, 1)
        got.append(numbers + [torch.rand(1).item() for _ in rest])
        if stateful:
            resumed: Any = made
            for number, _ in enumerate(resumed):
                if number == 0:
                    state = resumed.state_dict()
            resumed.load_state_dict(state)
            got[-1] += [torch.rand(1).item() for _ in resumed] + [torch.rand(1).item() for _ in resumed]
    return got


@pytest.mark.parametrize("stateful", [False, True])
def test_dispatching_keeps_the_random_numbers_of_ranks_equal(stateful: bool) -> None:
    first, second = run_ranks(_drawn_with_batches, stateful)
    for kind, here, there in zip(DISPATCHED_ORDERS, first, second, strict=True):
        assert here == there, kind


def _seeded_apart(by_hand: bool) -> list[Any]:
    if by_hand:
        torch.manual_seed(42 + PartialState().process_index)
    else:
        set_seed(42, device_specific=True)
    made: Any = prepare_data_loader(DataLoader(range(16), batch_size=2, shuffle=True), use_seedable_sampler=True)
    return [get_sampler(made).initial_seed, read(made), read(made), get_sampler(made).initial_seed]


@pytest.mark.parametrize("by_hand", [False, True])
def test_ranks_with_different_seeds_read_every_sample_once(by_hand: bool) -> None:
    first, second = run_ranks(_seeded_apart, by_hand)
    assert (first[0], second[0]) == (42, 43)
    assert (first[3], second[3]) == (42, 42)
    for epoch in (1, 2):
        assert sorted(i for share in (first[epoch], second[epoch]) for batch in share for i in batch) == list(range(16))


def _shuffled(seedable: bool, rng_types: list[str] | None) -> list[Any]:
    torch.manual_seed(100 + PartialState().process_index)  # Give each rank a different seed.
    made: Any = prepare_data_loader(
        DataLoader(range(16), batch_size=2, shuffle=True),
        rng_types=rng_types,
        use_seedable_sampler=seedable,
        data_seed=1 if seedable else None,
    )
    return [read(made), read(made)]


@pytest.mark.parametrize(
    ("seedable", "rng_types"), [(True, None), (False, ["generator"]), (False, ["torch", "generator"])]
)
def test_ranks_agree_on_the_order(seedable: bool, rng_types: list[str] | None) -> None:
    first, second = run_ranks(_shuffled, seedable, rng_types)
    for epoch in (0, 1):
        samples = [i for share in (first[epoch], second[epoch]) for batch in share for i in batch]
        assert sorted(samples) == list(range(16))
    assert first[0] != first[1]


_SAVED_ON_RANK_0 = """
import sys, torch
from torch.utils.data import DataLoader, RandomSampler
from notebook_accelerate import Accelerator
from notebook_accelerate.utils import DataLoaderConfiguration, gather_object

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
sampler = RandomSampler(range(16), generator=torch.Generator().manual_seed(5))
loader = accelerator.prepare(DataLoader(range(16), sampler=sampler, num_workers=int(sys.argv[1])))
for epoch in range(2):
    if accelerator.is_main_process:
        loader.state_dict()
    samples = gather_object([batch.item() for batch in loader])
    assert sorted(samples) == list(range(16)), samples
accelerator.end_training()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_saving_before_a_pass_does_not_change_the_order_of_any_rank(workers: int) -> None:
    assert [code for code, errors in run_script(_SAVED_ON_RANK_0, str(workers))] == [0, 0]


def _synchronised() -> list[Any]:
    rank = PartialState().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(10 + rank)
    synchronize_rng_states(["torch", "generator"], generator)
    return [torch.rand(1).item(), torch.rand(1, generator=generator).item()]


def test_all_ranks_draw_the_random_numbers_of_rank_0() -> None:
    torch.manual_seed(0)
    expected = [torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(10)).item()]
    assert run_ranks(_synchronised) == [expected, expected]


def test_unknown_random_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="rng_type='dice' is not allowed; pass one of"):
        synchronize_rng_state("dice")
    with pytest.raises(ValueError, match="needs a generator"):
        synchronize_rng_state("generator")


# ---- shares


def _shared() -> list[Any]:
    made: Any = prepare_data_loader(DataLoader(range(11), batch_size=2))
    ends = [(batch.tolist(), GradientState().end_of_dataloader, GradientState().remainder) for batch in made]
    assert get_sampler(made) is not None
    return ends


def test_every_rank_reads_its_own_share() -> None:
    first, second = run_ranks(_shared)
    assert first == [([0, 1], False, 3), ([4, 5], False, 3), ([8, 9], True, 3)]
    assert second == [([2, 3], False, 3), ([6, 7], False, 3), ([10, 0], True, 3)]
