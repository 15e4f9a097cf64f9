"""`gather_for_metrics` on one rank: padding of the last batch is cut, and values without rows are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accelerate import Accelerator


def test_padding_samples_are_cut_in_a_world_of_one() -> None:
    # transformers repeats a batch's loss to the full batch size, and lets gather_for_metrics cut the result.
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(10)), batch_size=8))  # type: ignore[arg-type]
    lengths = [
        (len(accelerator.gather_for_metrics(torch.ones(8))), len(accelerator.gather_for_metrics(batch)))
        for batch in loader
    ]
    assert lengths == [(8, 8), (2, 2)]


class Unsliceable:
    """An object that raises an unusual error when it is sliced."""

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError(f"no {key}")


LOSS = torch.tensor(3.0)


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize(
    "value",
    [LOSS, {"loss": LOSS}, [LOSS, torch.ones(3)], (torch.ones(3), {"a": LOSS}), 3, 2.5, None, {1}, {"a": "x"},
     {"a": torch.ones(2), "b": "x"}, Unsliceable(), len],
    ids=repr,
)  # fmt: skip
def test_values_without_rows_are_returned_unchanged(value: Any, as_objects: bool) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(5)), batch_size=2))  # type: ignore[arg-type]
    found = [accelerator.gather_for_metrics(value, use_gather_object=as_objects) for _ in loader]
    expected = value[:1] if isinstance(value, (list, tuple)) and as_objects else value  # Only a list of objects is cut.
    assert repr(found) == repr([value, value, expected])


def test_a_list_of_objects_is_cut() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(5)), batch_size=2))  # type: ignore[arg-type]
    assert [accelerator.gather_for_metrics(["a", "b"]) for _ in loader] == [["a", "b"], ["a", "b"], ["a"]]
