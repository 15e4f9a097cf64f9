"""The search for batch sizes that fit in memory, and the release of memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from notebook_accelerate.batch_size_search import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)


def _out_of_memory() -> RuntimeError:
    return RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def test_sizes_shrink_by_a_tenth_until_one_fits_and_it_is_kept() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int, factor: int) -> int:
        tried.append(batch_size)
        if batch_size > 6:
            raise _out_of_memory()
        return batch_size * factor

    assert train(2) == 12
    assert tried == [10, 9, 8, 7, 6]
    assert train(factor=3) == 18
    assert tried[5:] == [6]
    assert train.__name__ == "train"


def test_the_next_size_may_be_chosen() -> None:
    sizes = iter([64, 8])

    @find_executable_batch_size(reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        if batch_size > 8:
            raise _out_of_memory()
        return batch_size

    assert train() == 8


def test_an_error_is_raised_if_no_size_fits() -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        raise _out_of_memory()

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero: train\(\)"):
            train()


def test_other_errors_are_raised_immediately() -> None:
    tried: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        train()
    assert tried == [128]


def test_a_batch_size_in_the_call_is_refused_with_the_line_to_write() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"write `train\(model='m'\)`"):
        train(4, "m")
    with pytest.raises(ValueError, match="starting_batch_size=-1"):
        find_executable_batch_size(starting_batch_size=-1)(lambda batch_size: batch_size)


def test_the_error_of_mps_reduces_the_batch_size() -> None:
    text = "MPS backend out of memory (MPS allocated: 17.5 GB, other allocations: 1.2 GB, max allowed: 18.1 GB)"
    assert should_reduce_batch_size(RuntimeError(text))


def test_memory_of_a_failed_attempt_is_freed_before_the_next() -> None:
    alive: list[Any] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> list[bool]:
        held = torch.ones(batch_size)
        if batch_size == 2:
            alive.append(weakref.ref(held))
            raise _out_of_memory()
        return [reference() is not None for reference in alive]

    assert train() == [False]


@pytest.mark.parametrize(
    ("error", "reduce"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (torch.OutOfMemoryError("whatever it says"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, reduce: bool) -> None:
    assert should_reduce_batch_size(error) is reduce


def test_release_memory_deletes_objects() -> None:
    model, data = torch.nn.Linear(1, 1), torch.ones(1)
    references = weakref.ref(model), weakref.ref(data)
    model, data = release_memory(model, data)  # type: ignore[assignment]
    assert (model, data) == (None, None)
    assert [reference() for reference in references] == [None, None]
    assert release_memory() == []


def test_an_unused_device_stays_unused() -> None:
    clear_device_cache(garbage_collection=True)
    assert not torch.cuda.is_initialized()
