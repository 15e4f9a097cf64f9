"""Saving and restoring the position within an epoch, with torchdata's StatefulDataLoader."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from notebook_accelerate.data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches

LENGTH, SIZE = 23, 2


def loader(ranks: int = 1, rank: int = 0, workers: int = 0, dataset: Any = None, **options: Any) -> DataLoaderShard:
    iterable = isinstance(dataset, IterableDataset)
    plain = DataLoader(
        torch.arange(LENGTH) if dataset is None else dataset,
        batch_size=SIZE,
        shuffle=None if iterable else options.pop("shuffle", False),
        num_workers=workers,
        generator=options.pop("generator", None),
    )
    made = prepare_data_loader(
        plain, num_processes=ranks, process_index=rank, use_stateful_dataloader=True, dispatch_batches=False, **options
    )
    assert isinstance(made, DataLoaderShard)
    return made


def read(dataloader: Any, count: int | None = None) -> list[list[int]]:
    got = []
    for batch in dataloader:
        got.append(batch.tolist())
        if len(got) == count:
            break
    return got


def test_it_is_torchdatas_loader() -> None:
    made = loader()
    assert isinstance(made, StatefulDataLoader)
    assert isinstance(made, DataLoaderShard)
    assert type(made).__name__ == "DataLoaderShard"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, {"shuffle": True, "use_seedable_sampler": True, "data_seed": 3}],
    ids=["in order", "shuffled", "seeded"],
)
def test_resuming_gives_exactly_the_remaining_samples(workers: int, ranks: int, options: dict[str, Any]) -> None:
    for rank in range(ranks):
        torch.manual_seed(5)
        original = loader(ranks, rank, workers, **options)
        read(original)  # Read the first epoch, so that the states are saved in the second one.
        states, second = [], []
        for batch in original:
            second.append(batch.tolist())
            states.append(pickle.dumps((original.state_dict(), torch.get_rng_state())))
        third = read(original)

        for consumed in (1, 3):
            torch.manual_seed(99)  # Nothing may depend on the new process's random numbers.
            resumed = loader(ranks, rank, workers, **options)
            state, numbers = pickle.loads(states[consumed - 1])
            resumed.load_state_dict(state)
            torch.set_rng_state(numbers)
            assert read(resumed) == second[consumed:]
            assert read(resumed) == third
            assert resumed.iteration == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_after_an_interrupted_loop_counts_yielded_batches(workers: int) -> None:
    original = loader(workers=workers)
    got = read(original, 4)
    state = original.state_dict()
    resumed = loader(workers=workers)
    resumed.load_state_dict(state)
    assert got + read(resumed) == read(loader())
    assert got == read(loader(), 4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("leaves", [False, True], ids=["the loop ends", "the loop is left"])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "use_seedable_sampler": True}])
def test_after_a_state_at_the_last_batch_the_next_epoch_is_complete(
    workers: int, leaves: bool, options: dict[str, Any]
) -> None:
    """In this case, Accelerate's checkpointing example reads the next epoch from the loader itself."""
    original = loader(workers=workers, **options)
    for number, _ in enumerate(original, 1):
        state, numbers = pickle.loads(pickle.dumps((original.state_dict(), torch.get_rng_state())))
        if leaves and number == 12:
            break
    original.set_epoch(1)
    torch.set_rng_state(numbers)
    second, third = read(original), read(original)
    resumed = loader(workers=workers, **options)
    resumed.load_state_dict(state)
    torch.set_rng_state(numbers)
    assert [read(resumed), read(resumed)] == [second, third]
    assert sorted(i for batch in second for i in batch) == list(range(LENGTH))
    assert resumed.iteration == 3


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "use_seedable_sampler": True}, {"shuffle": True}])
def test_a_state_saved_between_epochs_starts_the_next_one(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    original = loader(2, 0, **options)
    read(original)
    state, numbers = original.state_dict(), torch.get_rng_state()
    second = read(original)
    resumed = loader(2, 0, **options)
    resumed.load_state_dict(state)
    torch.set_rng_state(numbers)
    assert read(resumed) == second
    assert resumed.iteration == 2


@pytest.mark.parametrize("ahead", [False, True], ids=["within an epoch", "between epochs"])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "use_seedable_sampler": True}])
def test_training_continues_with_the_same_random_numbers(options: dict[str, Any], ahead: bool) -> None:
    torch.manual_seed(7)
    original = loader(**options)
    for step, _ in enumerate(original):
        noise = torch.rand(1)
        if step == 4 and not ahead:
            saved = original.state_dict(), torch.get_rng_state()
    if ahead:
        saved = original.state_dict(), torch.get_rng_state()
        for _ in original:
            noise = torch.rand(1)

    resumed = loader(**options)
    torch.manual_seed(0)
    resumed.load_state_dict(saved[0])
    torch.set_rng_state(saved[1])
    for _ in resumed:
        again = torch.rand(1)
    assert torch.equal(again, noise)


class Counting(IterableDataset[int]):
    """An iterable dataset that saves its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < LENGTH:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Plain(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(LENGTH))


@pytest.mark.parametrize("kind", [Counting, Plain])
@pytest.mark.parametrize("consumed", [1, 5, 11, 12])
def test_iterable_datasets_resume_too(kind: Any, consumed: int) -> None:
    original = loader(dataset=kind())
    got = read(original, consumed)
    state = pickle.loads(pickle.dumps(original.state_dict()))
    resumed = loader(dataset=kind())
    resumed.load_state_dict(state)
    whole = [list(range(i, min(i + SIZE, LENGTH))) for i in range(0, LENGTH, SIZE)]
    # If the state was saved after the last batch, the next pass is complete.
    assert read(resumed) == (whole[consumed:] or whole)
    assert got == whole[:consumed]


@pytest.mark.parametrize("kind", [Counting, Plain])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("before_pass", [False, True])
def test_a_stream_resumes_any_number_of_times(kind: Any, workers: int, before_pass: bool) -> None:
    """To resume a stream, torchdata reads its batches again from the start, and counts these batches twice."""
    read_so_far: list[list[int]] = []
    state = None
    for consumed in (2, 1, 2, None):
        resumed = loader(dataset=kind(), workers=workers)
        if state is not None:
            resumed.load_state_dict(state)
        if before_pass:
            resumed.state_dict()
        read_so_far += read(resumed, consumed)
        state = pickle.loads(pickle.dumps(resumed.state_dict()))
    whole = [list(range(i, min(i + SIZE, LENGTH))) for i in range(0, LENGTH, SIZE)]
    assert read_so_far == whole
    after = loader(dataset=kind(), workers=workers)
    after.load_state_dict(state)
    assert read(after) == whole  # A state saved at the end of a pass resumes at the start of the next one.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_without_a_sampler_position_resumes(ranks: int) -> None:
    """Accelerate 1.15 writes torchdata's own state if the loader has no worker processes."""
    state = {
        "_index_sampler_state": None,
        "_sampler_iter_state": None,
        "_sampler_iter_yielded": 2,
        "_num_yielded": 2,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
    }
    resumed = loader(ranks)
    resumed.load_state_dict(state)
    assert read(resumed) == read(loader(ranks))[2:]


def test_skipping_starts_a_stateful_loader_in_the_middle() -> None:
    assert read(skip_first_batches(loader(2, 1), 3)) == read(loader(2, 1))[3:]


def test_a_loader_without_a_position_raises() -> None:
    made: Any = prepare_data_loader(DataLoader(range(4)), num_processes=1, process_index=0)
    with pytest.raises(AttributeError, match="use_stateful_dataloader=True"):
        made.state_dict()
    with pytest.raises(AttributeError, match="use_stateful_dataloader=True"):
        made.load_state_dict({})


@pytest.mark.parametrize("skipped", [0, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loaded_state_count_as_skipped(workers: int, skipped: int) -> None:
    first = loader(workers=workers, shuffle=True)
    rounds = iter(first)
    for _ in range(3):
        next(rounds)
    state, numbers = first.state_dict(), torch.get_rng_state()
    rest = [batch.tolist() for batch in rounds]
    resumed = loader(workers=workers, shuffle=True)
    torch.set_rng_state(numbers)
    resumed.load_state_dict(state)
    assert read(skip_first_batches(resumed, skipped)) == rest
    assert len(read(resumed)) == len(rest) + 3  # The next epoch must be complete.


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_reading_the_state_before_the_first_pass_changes_no_order(
    generator: torch.Generator | None, workers: int
) -> None:
    orders = []
    for reads in (False, True):
        torch.manual_seed(5)
        if generator is not None:
            generator.manual_seed(5)
        one = loader(shuffle=True, generator=generator, workers=workers)
        if reads:
            one.state_dict()
        orders.append((read(one), torch.rand(1), read(one)))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaded_state_that_is_saved_again_still_resumes(workers: int) -> None:
    one = loader(workers=workers, shuffle=True)
    rounds = iter(one)
    next(rounds)
    state = one.state_dict()
    rest = [batch.tolist() for batch in rounds]
    again = loader(workers=workers, shuffle=True)
    again.load_state_dict(state)
    copied = pickle.loads(pickle.dumps(again.state_dict()))
    assert read(again) == rest
    third = loader(workers=workers, shuffle=True)
    third.load_state_dict(copied)
    assert read(third) == rest


@pytest.mark.parametrize("workers", [0, 1])
def test_creating_a_loader_draws_the_numbers_of_its_first_pass(workers: int) -> None:
    """When Accelerate prepares a stateful loader, it starts the first pass, which determines the order of workers."""

    def drawn() -> int:
        return int(torch.empty((), dtype=torch.int64).random_())

    torch.manual_seed(5)
    drawn()  # This is the seed of the workers.
    early = drawn() if workers else None
    numbers = torch.get_rng_state()
    torch.manual_seed(5)
    made = loader(shuffle=True, workers=workers)
    assert torch.equal(torch.get_rng_state(), numbers)
    torch.manual_seed(6)
    first = read(made)
    numbers = torch.get_rng_state()
    torch.manual_seed(6)
    order = torch.Generator().manual_seed(drawn() if early is None else early)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert [i for batch in first for i in batch] == torch.randperm(LENGTH, generator=order).tolist()


def test_a_pass_from_the_state_before_the_first_one_draws_the_same_numbers() -> None:
    one = loader(shuffle=False)
    state, numbers = one.state_dict(), torch.get_rng_state()
    read(one)
    after = torch.get_rng_state()
    again = loader(shuffle=False)
    torch.set_rng_state(numbers)
    again.load_state_dict(state)
    read(again)
    assert torch.equal(torch.get_rng_state(), after)
