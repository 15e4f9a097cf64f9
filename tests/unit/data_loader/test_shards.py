"""The division of samples among ranks."""

from __future__ import annotations

import itertools
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from notebook_accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler

SHARES = json.loads((Path(__file__).parent / "shares.json").read_text())


class Numbers(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(range(self.length))


class Batches:
    """A user-defined batch sampler that yields a fixed list of batches."""

    def __init__(self, batches: list[list[int]], **attributes: Any) -> None:
        self.batches = batches
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def shards(length: int, ranks: int, size: int, drop_last: bool, split: bool, even: bool) -> list[BatchSamplerShard]:
    sampler = BatchSampler(SequentialSampler(range(length)), size, drop_last)
    return [BatchSamplerShard(sampler, ranks, rank, split, even) for rank in range(ranks)]


@pytest.mark.parametrize("case", SHARES["batches"], ids=lambda case: "-".join(map(str, case[:6])))
def test_batches_are_divided_like_by_accelerate(case: list[Any]) -> None:
    ranks, length, size, drop_last, split, even, expected = case
    assert [list(shard) for shard in shards(length, ranks, size, drop_last, split, even)] == expected


@pytest.mark.parametrize("case", SHARES["iterable"], ids=lambda case: "-".join(map(str, case[:5])))
def test_iterable_datasets_are_divided_like_by_accelerate(case: list[Any]) -> None:
    ranks, length, size, drop_last, split, expected = case
    got = [list(IterableDatasetShard(Numbers(length), size, drop_last, ranks, rank, split)) for rank in range(ranks)]
    assert got == expected


settings_of_a_shard = {
    "ranks": st.integers(1, 8),
    "length": st.integers(0, 200),
    "size": st.integers(1, 16),
    "drop_last": st.booleans(),
    "split": st.booleans(),
    "even": st.booleans(),
}


@settings(max_examples=400, deadline=None)
@given(**settings_of_a_shard)
def test_no_sample_is_lost_and_only_padding_is_repeated(
    ranks: int, length: int, size: int, drop_last: bool, split: bool, even: bool
) -> None:
    size = size * ranks if split else size
    shares = shards(length, ranks, size, drop_last, split, even)
    got = [list(share) for share in shares]
    # A round is one batch from every rank, in the order of ranks. Gathered samples are in their original order.
    samples = [i for round_ in itertools.zip_longest(*got, fillvalue=[]) for batch in round_ for i in batch]
    whole = size if split else size * ranks

    if drop_last:
        assert samples == list(range(length // whole * whole))
    elif not even:
        assert samples == list(range(length))
    else:
        assert samples[:length] == list(range(length))
        padding = samples[length:]
        assert len(padding) == (-length % whole)
        assert padding == [i % length for i in range(len(padding))]
        assert {len(batch) for share in got for batch in share} <= {whole // ranks}
    if drop_last or even:
        assert len({len(share) for share in got}) == 1


@settings(max_examples=300, deadline=None)
@given(**settings_of_a_shard)
def test_a_shard_reports_its_length_and_its_last_round(
    ranks: int, length: int, size: int, drop_last: bool, split: bool, even: bool
) -> None:
    size = size * ranks if split else size
    whole = size if split else size * ranks
    for share in shards(length, ranks, size, drop_last, split, even):
        batches = list(share)
        assert len(share) == len(batches)
        if length and not drop_last:
            assert share.last_round == length % whole


@pytest.mark.parametrize("read", [1, 2])
def test_an_interrupted_pass_does_not_read_the_sampler_to_its_end(read: int) -> None:
    """At its end, torch's RandomSampler draws another permutation, which changes the order of the next pass."""
    taken = []

    def sampler() -> Any:
        for index in range(12):
            taken.append(index)
            yield index

    share = BatchSamplerShard(BatchSampler(sampler(), 2, False), 2, 0, even_batches=False)
    list(itertools.islice(share, read))
    assert len(taken) == 4 * read


@settings(max_examples=300, deadline=None)
@given(skipped=st.integers(0, 30), twice=st.integers(0, 3), **settings_of_a_shard)
def test_skipping_does_not_change_the_remaining_batches(
    skipped: int, twice: int, ranks: int, length: int, size: int, drop_last: bool, split: bool, even: bool
) -> None:
    size = size * ranks if split else size
    for share in shards(length, ranks, size, drop_last, split, even):
        expected = list(share)[skipped + twice :]
        skipping = SkipBatchSampler(SkipBatchSampler(share, skipped), twice)
        assert list(skipping) == expected
        assert len(skipping) == len(expected)


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.integers(1, 8),
    length=st.integers(0, 200),
    size=st.integers(1, 16),
    drop_last=st.booleans(),
    split=st.booleans(),
)
def test_an_iterable_dataset_loses_nothing_and_repeats_only_padding(
    ranks: int, length: int, size: int, drop_last: bool, split: bool
) -> None:
    size = size * ranks if split else size
    shares = [IterableDatasetShard(Numbers(length), size, drop_last, ranks, rank, split) for rank in range(ranks)]
    got = [list(share) for share in shares]
    part = size // ranks if split else size
    samples = list(itertools.chain.from_iterable(_join_rounds(got, part)))
    whole = part * ranks
    kept = length // whole * whole if drop_last else length
    assert samples[:kept] == list(range(kept))
    assert samples[kept:] == ([] if drop_last else [i % min(whole, length) for i in range(-length % whole)])
    assert all(len(share) == len(samples_of) for share, samples_of in zip(shares, got, strict=True))
    assert all(share.last_round == length % whole for share in shares)


def _join_rounds(shares: list[list[int]], part: int) -> list[list[int]]:
    count = len(shares[0]) // part
    return [[i for share in shares for i in share[r * part : (r + 1) * part]] for r in range(count)]


@pytest.mark.parametrize(
    ("batches", "attributes", "even", "expected"),
    [  # These were observed with Accelerate 1.15 on two ranks.
        ([[1, 2], [3], [4, 5, 6]], {}, True, [[[1, 2], [4, 5, 6]], [[3], [1, 2]]]),
        ([[1, 2], [3], [4, 5, 6]], {}, False, [[[1, 2], [4, 5, 6]], [[3]]]),
        ([[1, 2], [3], [4, 5, 6]], {"drop_last": True}, True, [[[1, 2]], [[3]]]),
        ([[1, 2], [3, 4], [5, 6], [7]], {"batch_size": 2}, True, [[[1, 2], [5, 6]], [[3, 4], [7, 1]]]),
        ([[1]], {"batch_size": 2}, True, [[[1, 1]], [[1, 1]]]),
        ([[1]], {}, True, [[[1]], [[1]]]),
        ([], {"batch_size": 2}, True, [[], []]),
    ],
)
def test_batch_samplers_of_any_kind_are_divided(
    batches: list[list[int]], attributes: dict[str, Any], even: bool, expected: Any
) -> None:
    assert [list(BatchSamplerShard(Batches(batches, **attributes), 2, r, False, even)) for r in (0, 1)] == expected


def test_a_short_batch_in_the_middle_is_not_lost() -> None:
    batches = Batches([[1, 2], [3], [4, 5], [6, 7]], batch_size=2)
    assert [list(BatchSamplerShard(batches, 2, rank)) for rank in (0, 1)] == [[[1, 2], [4, 5]], [[3], [6, 7]]]


def test_padding_does_not_change_the_batches_of_the_user() -> None:
    batches = [[1, 2], [3, 4], [5]]
    assert list(BatchSamplerShard(Batches(batches, batch_size=2), 2, 0)) == [[1, 2], [5, 1]]
    assert batches == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("size", [1, 3])
def test_batches_that_cannot_be_divided_equally_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"num_processes=2 .* batch size is {size}"):
        BatchSamplerShard(BatchSampler(range(9), size, False), 2, 0, split_batches=True)
    with pytest.raises(ValueError, match=rf"num_processes=2 .* batch size is {size}"):
        IterableDatasetShard(Numbers(9), size, False, 2, 0, split_batches=True)


def test_a_shard_of_a_stream_does_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        shard = IterableDatasetShard([1, 2, 3], 2)  # type: ignore[arg-type]
    assert shard.last_round is None


def test_a_copy_in_a_spawned_worker_does_not_share_its_last_round() -> None:
    shard = IterableDatasetShard(Numbers(5), 2)
    copied = ForkingPickler.loads(ForkingPickler.dumps(shard))
    list(copied)
    assert (copied.last_round, shard.last_round) == (1, None)
