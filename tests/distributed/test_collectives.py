from __future__ import annotations

import statistics
import time
from collections import UserDict
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from notebook_accelerate import collectives
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState
from tests.support.ranks import RankError, run_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Batch:
    x: torch.Tensor


def nested(rank: int) -> dict[str, Any]:
    return {
        "floats": [torch.full((2, 3), float(rank)), torch.full((1, 3), rank + 10.0)],
        "pair": Pair(torch.tensor([rank]), torch.tensor(rank, dtype=torch.int64)),
        "user": UserDict(flag=torch.tensor([rank == 1])),
        "batch": Batch(torch.full((1, 2), rank, dtype=torch.bfloat16)),
    }


def gather_all() -> Any:
    rank = PartialState().process_index
    given = nested(rank)
    gathered = collectives.gather(given)
    assert isinstance(gathered["pair"], Pair)
    assert isinstance(gathered["user"], UserDict)
    assert isinstance(gathered["batch"], Batch)
    return collectives.listify(gathered)


def test_gather_joins_every_leaf() -> None:
    first, second = run_ranks(gather_all)
    assert first["floats"] == second["floats"] == [[[0.0] * 3] * 2 + [[1.0] * 3] * 2, [[10.0] * 3, [11.0] * 3]]
    assert first["pair"] == Pair([0, 1], [0, 1])
    assert first["user"]["flag"] == [False, True]
    assert first["batch"].x == [[0, 0], [1, 1]]


def reduce_all() -> Any:
    rank = PartialState().process_index
    given = nested(rank)
    total = collectives.listify(collectives.reduce(given, "sum"))
    mean = collectives.listify(collectives.reduce(given, "mean"))
    untouched = collectives.listify(given)
    return total, mean, untouched == collectives.listify(nested(rank)), collectives.reduce(given, "none") is given


def test_reduce_adds_up_or_averages() -> None:
    for total, mean, untouched, same in run_ranks(reduce_all):
        assert total["floats"] == [[[1.0] * 3] * 2, [[21.0] * 3]]
        assert total["pair"] == Pair([1], 1)
        assert total["user"]["flag"] == [1]
        assert mean["floats"] == [[[0.5] * 3] * 2, [[10.5] * 3]]
        assert mean["pair"] == Pair([0.5], 0.5)
        assert untouched
        assert same


def broadcast_all() -> Any:
    rank = PartialState().process_index
    given = nested(rank)
    returned = collectives.broadcast(given, from_process=1)
    objects = [rank, {"rank": rank}]
    collectives.broadcast_object_list(objects, from_process=1)
    return collectives.listify(given), collectives.listify(returned), objects


def test_broadcast_writes_in_place() -> None:
    for given, returned, objects in run_ranks(broadcast_all):
        assert given == returned == collectives.listify(nested(1))
        assert objects == [1, {"rank": 1}]


def pad_all() -> Any:
    rank = PartialState().process_index
    given = {"a": torch.full((rank + 1, 2), 7), "b": torch.full((1, 3 - rank), 8), "c": torch.tensor(1)}
    ends = collectives.pad_across_processes(given)
    begins = collectives.pad_across_processes(given, pad_index=-1, pad_first=True)
    second = collectives.pad_across_processes(given, dim=1)
    last = collectives.pad_across_processes(given, dim=-1)
    return [collectives.listify(value) for value in (ends, begins, second, last)]


def test_padding_to_the_largest_rank() -> None:
    (ends, begins, second, last), other = run_ranks(pad_all)
    assert ends["a"] == [[7, 7], [0, 0]]
    assert begins["a"] == [[-1, -1], [7, 7]]
    assert ends["b"] == [[8, 8, 8]]
    assert ends["c"] == 1
    assert other[2]["b"] == [[8, 8, 0]] == other[3]["b"]
    assert second["a"] == last["a"] == [[7, 7]]


def gather_objects() -> Any:
    rank = PartialState().process_index
    tensor = torch.arange(3.0) if rank == 1 else None
    return (
        collectives.gather_object([rank, "x"]),
        collectives.gather_object({"rank": rank}),
        collectives.copy_tensor_to_devices(tensor).tolist(),
        collectives.gather_tensor_shape(tensor),
    )


def test_objects() -> None:
    for listed, single, copied, shape in run_ranks(gather_objects):
        assert listed == [0, "x", 1, "x"]
        assert single == [{"rank": 0}, {"rank": 1}]
        assert copied == [0, 1, 2]
        assert shape == (torch.Size([3]), collectives.TENSOR_TYPE_TO_INT[torch.float32])


def gather_large() -> Any:
    rank = PartialState().process_index
    tensors = [torch.full((300_000,), float(rank)), torch.full((2,), rank + 5.0)]
    gathered = collectives.gather(tensors)
    reduced = collectives.reduce(tensors, "sum")
    assert gathered[1].untyped_storage().nbytes() == 16  # a small result does not hold the large one
    assert reduced[1].untyped_storage().nbytes() == 8
    return gathered[0].sum().item(), gathered[1].tolist(), reduced[0][0].item(), reduced[1].tolist()


def test_large_results_are_copies() -> None:
    assert run_ranks(gather_large) == [(300_000.0, [5, 5, 6, 6], 1.0, [11, 11])] * 2


def gather_mixed_shapes() -> Any:
    rank = PartialState().process_index
    data = [torch.full((2, 2), rank), torch.full((3,), rank), torch.empty(0, 4, dtype=torch.int64), torch.tensor(rank)]
    return collectives.listify(collectives.gather(data)), collectives.listify(collectives.reduce(data, "sum"))


def test_shapes_in_one_buffer_may_differ() -> None:
    for gathered, reduced in run_ranks(gather_mixed_shapes):
        assert gathered == [[[0, 0], [0, 0], [1, 1], [1, 1]], [0, 0, 0, 1, 1, 1], [], [0, 1]]
        assert reduced == [[[1, 1], [1, 1]], [1, 1, 1], [], 1]


def gather_with_grad() -> Any:
    parameter = torch.ones(2, requires_grad=True)
    gathered = collectives.gather(parameter * 2)
    return gathered.requires_grad, gathered.tolist(), collectives.gather([parameter, parameter])[0].requires_grad


def test_results_have_no_graph() -> None:
    assert run_ranks(gather_with_grad) == [(False, [2, 2, 2, 2], False)] * 2


def count_collectives() -> Any:
    PartialState()
    calls: list[str] = []
    for name in ("all_gather_single", "all_gather_into_tensor", "all_reduce", "broadcast"):
        if original := getattr(dist, name, None):
            setattr(dist, name, _counted(calls, name, original))
    module = import_module("notebook_accelerate.collectives.communicator")
    module._all_gather = _counted(calls, "all_gather", module._all_gather)
    data = {f"k{i}": torch.ones(64, 4) for i in range(50)} | {"n": torch.ones(1, dtype=torch.int64)}
    collectives.gather(data)
    collectives.reduce(data)
    collectives.broadcast(data)
    collectives.pad_across_processes(data)
    return sorted(calls)


def _counted(calls: list[str], name: str, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    return call


def test_one_collective_per_dtype() -> None:
    wanted = ["all_gather"] * 2 + ["all_reduce"] * 3 + ["broadcast"] * 2  # padding compares sizes in one reduction
    assert run_ranks(count_collectives) == [wanted] * 2


def mismatch() -> None:
    rank = PartialState().process_index
    collectives.gather({"x": torch.ones(2 + rank), "y": torch.ones(1)})


def other_operation() -> None:
    if PartialState().is_main_process:
        collectives.gather(torch.ones(1))
    else:
        collectives.reduce(torch.ones(1))


@pytest.mark.parametrize("function", [mismatch, other_operation])
def test_debug_mode_shows_what_each_rank_passed(function: Any) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(function, env={"ACCELERATE_DEBUG_MODE": "yes"})
    error = caught.value.__cause__
    assert isinstance(error, DistributedOperationException)
    text = str(error)
    if function is mismatch:
        assert "{'x': float32[2], 'y': float32[1]}" in text
        assert "{'x': float32[3], 'y': float32[1]}" in text
        assert 'collectives.gather({"x": torch.ones(2 + rank)' in text
    else:
        assert "rank 0  gather" in text
        assert "rank 1  reduce" in text
    assert text.count("test_collectives.py:") == 2


def agree_in_debug_mode() -> Any:
    rank = PartialState().process_index
    assert PartialState().debug
    padded = collectives.pad_across_processes(torch.ones(1 + rank, 2))
    return collectives.gather(padded).shape


def test_debug_mode_lets_equal_shapes_and_padding_pass() -> None:
    assert run_ranks(agree_in_debug_mode, env={"ACCELERATE_DEBUG_MODE": "1"}) == [torch.Size([4, 2])] * 2


def verified() -> None:
    @collectives.chained_operation
    @collectives.verify_operation
    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    mine(torch.ones(1 + PartialState().process_index))


def test_own_operations_can_be_verified() -> None:
    with pytest.raises(RankError, match=r"while calling 'tests\.distributed\.test_collectives\.mine'"):
        run_ranks(verified, env={"ACCELERATE_DEBUG_MODE": "1"})
    assert run_ranks(verified) == [None, None]


def measure() -> dict[str, float]:
    size = PartialState().num_processes
    data = {f"k{i}": torch.randn(64, 4) for i in range(50)}
    leaves = list(data.values())

    def fused() -> list[torch.Tensor]:
        """One collective, packed and cut as one would by hand."""
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
        rows = collectives.communicator().all_gather(flat, size)
        return [part.reshape(128, 4) for part in rows.split(256, dim=1)]

    def median(work: Any) -> float:
        dist.barrier()
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    measured = {"fused": median(fused)}
    for name in ("gather", "reduce", "broadcast", "pad_across_processes"):
        operation = getattr(collectives, name)
        measured[name] = median(lambda operation=operation: operation(data))
    return measured


@pytest.mark.benchmark
def test_fifty_small_tensors_cost_little_more_than_one() -> None:
    measured = run_ranks(measure)[0]
    print({name: f"{seconds * 1e6:.0f} us" for name, seconds in measured.items()})
    for name, seconds in measured.items():
        assert seconds < 3 * measured["fused"], f"{name}: the goal is 1.5; twice that allows for a busy machine"
