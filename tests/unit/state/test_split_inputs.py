from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from notebook_accelerate.state.rank_execution import share_bounds, split_share

CPU = torch.device("cpu")


def split(inputs: Any, size: int, padding: bool = False) -> list[Any]:
    return [split_share(inputs, rank, size, padding=padding, device=CPU) for rank in range(size)]


@given(length=st.integers(0, 200), size=st.integers(1, 8))
def test_shares_are_contiguous_and_complete(length: int, size: int) -> None:
    bounds = [share_bounds(length, rank, size) for rank in range(size)]
    assert [i for begin, end in bounds for i in range(begin, end)] == list(range(length))
    lengths = [end - begin for begin, end in bounds]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(length=st.integers(1, 50), size=st.integers(1, 8), kind=st.sampled_from([list, tuple, torch.tensor]))
def test_padding_repeats_the_last_item_and_nothing_else(length: int, size: int, kind: Any) -> None:
    shares = split(kind(list(range(length))), size, padding=True)
    assert {len(share) for share in shares} == {-(-length // size)}
    for rank, share in enumerate(shares):
        begin, end = share_bounds(length, rank, size)
        values = [int(value) for value in share]
        assert values[: end - begin] == list(range(begin, end))
        assert set(values[end - begin :]) <= {length - 1}


def test_documented_examples_hold() -> None:
    assert split(["A", "B", "C"], 2) == [["A", "B"], ["C"]]
    assert split(["A", "B", "C"], 2, padding=True) == [["A", "B"], ["C", "C"]]
    assert split(("A",), 2) == [("A",), ()]
    assert split([], 2, padding=False) == [[], []]


def test_dicts_are_split_value_by_value() -> None:
    first, second = split({"a": [1, 2, 3], "b": torch.arange(3)}, 2, padding=True)
    assert first["a"] == [1, 2]
    assert second["a"] == [3, 3]
    assert second["b"].tolist() == [2, 2]


def test_dict_values_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \{'a': 1, 'b': 2\}; pass values of the same length"):
        split({"a": [1], "b": [1, 2]}, 2)


def test_tensors_keep_their_other_dimensions() -> None:
    first, second = split(torch.arange(6).view(3, 2), 2, padding=True)
    assert first.shape == second.shape == (2, 2)
    assert second.tolist() == [[4, 5], [4, 5]]


def test_a_tensor_without_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        split(torch.tensor(1.0), 2)


@pytest.mark.parametrize("inputs", [5, "text", {1, 2}])
def test_a_value_that_is_not_a_sequence_is_returned_whole(inputs: Any) -> None:
    assert split(inputs, 2) == [inputs, inputs]


def test_datasets_are_split_by_select() -> None:
    class Dataset:
        """The part of datasets.Dataset that this package uses."""

        column_names = ("x",)

        def __init__(self, rows: list[str]):
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def select(self, indices: list[int]) -> Dataset:
            return Dataset([self.rows[i] for i in indices])

    shares = split(Dataset(list("abc")), 2, padding=True)
    assert [share.rows for share in shares] == [["a", "b"], ["c", "c"]]
