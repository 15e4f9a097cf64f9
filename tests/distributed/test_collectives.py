from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import UserDict
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from notebook_accelerate import collectives
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState
from notebook_accelerate.utils import operations
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
    return operations.listify(gathered)


def test_gather_joins_every_leaf() -> None:
    first, second = run_ranks(gather_all)
    assert first["floats"] == second["floats"] == [[[0.0] * 3] * 2 + [[1.0] * 3] * 2, [[10.0] * 3, [11.0] * 3]]
    assert first["pair"] == Pair([0, 1], [0, 1])
    assert first["user"]["flag"] == [False, True]
    assert first["batch"].x == [[0, 0], [1, 1]]


def reduce_all() -> Any:
    rank = PartialState().process_index
    given = nested(rank)
    total = operations.listify(collectives.reduce(given, "sum"))
    mean = operations.listify(collectives.reduce(given, "mean"))
    untouched = operations.listify(given)
    return total, mean, untouched == operations.listify(nested(rank)), collectives.reduce(given, "none") is given


def test_reduce_sums_or_averages() -> None:
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
    return operations.listify(given), operations.listify(returned), objects


def test_broadcast_writes_in_place() -> None:
    for given, returned, objects in run_ranks(broadcast_all):
        assert given == returned == operations.listify(nested(1))
        assert objects == [1, {"rank": 1}]


def pad_all() -> Any:
    rank = PartialState().process_index
    given = {"a": torch.full((rank + 1, 2), 7), "b": torch.full((1, 3 - rank), 8), "c": torch.tensor(1)}
    ends = collectives.pad_across_processes(given)
    begins = collectives.pad_across_processes(given, pad_index=-1, pad_first=True)
    second = collectives.pad_across_processes(given, dim=1)
    last = collectives.pad_across_processes(given, dim=-1)
    return [operations.listify(value) for value in (ends, begins, second, last)]


def test_tensors_are_padded_to_the_largest_rank() -> None:
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
        [value.item() for value in collectives.gather_object(torch.tensor([rank, rank + 5]))],
        collectives.gather_object(rank),
        operations.copy_tensor_to_devices(tensor).tolist(),
        operations.gather_tensor_shape(tensor),
    )


def test_objects_are_gathered_in_order_of_rank() -> None:
    for listed, single, rows, numbers, copied, shape in run_ranks(gather_objects):
        assert listed == [0, "x", 1, "x"]
        assert single == [{"rank": 0}, {"rank": 1}]
        assert rows == [0, 5, 1, 6]
        assert numbers == [0, 1]
        assert copied == [0, 1, 2]
        assert shape == (torch.Size([3]), operations.TENSOR_TYPE_TO_INT[torch.float32])


def gather_large() -> Any:
    rank = PartialState().process_index
    tensors = [torch.full((300_000,), float(rank)), torch.full((2,), rank + 5.0)]
    gathered = collectives.gather(tensors)
    reduced = collectives.reduce(tensors, "sum")
    assert gathered[1].untyped_storage().nbytes() == 16  # The small result must not keep the large one's memory alive.
    assert reduced[1].untyped_storage().nbytes() == 8
    return gathered[0].sum().item(), gathered[1].tolist(), reduced[0][0].item(), reduced[1].tolist()


def test_large_results_are_copies() -> None:
    assert run_ranks(gather_large) == [(300_000.0, [5, 5, 6, 6], 1.0, [11, 11])] * 2


def gather_mixed_shapes() -> Any:
    rank = PartialState().process_index
    data = [torch.full((2, 2), rank), torch.full((3,), rank), torch.empty(0, 4, dtype=torch.int64), torch.tensor(rank)]
    return operations.listify(collectives.gather(data)), operations.listify(collectives.reduce(data, "sum"))


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
    for method, name in {"all_gather_into": "all_gather", "broadcast_in": "broadcast"}.items():
        original = getattr(module.TorchCommunicator, method)
        setattr(module.TorchCommunicator, method, _counted(calls, name, original))
    data = {f"k{i}": torch.ones(64, 4) for i in range(50)} | {"n": torch.ones(1, dtype=torch.int64)}
    large = [torch.ones(50_000), torch.ones(1, dtype=torch.int64)]
    found = []
    for operation in (collectives.gather, collectives.reduce, collectives.broadcast, collectives.pad_across_processes):
        for given in (data, data, large):
            calls.clear()
            operation(given)
            found.append(list(calls))
    return found


def _counted(calls: list[str], name: str, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    return call


def test_one_collective_suffices_for_small_data_and_one_per_dtype_for_large_data() -> None:
    asked, sent = "all_gather", "broadcast"
    wanted = [
        # The ranks learn the size in the first exchange.
        [asked, asked, asked], [asked], [asked, asked, asked],
        [asked], [asked], [asked, "all_reduce", "all_reduce"],
        [sent], [sent], [sent, sent, sent],
        [asked], [asked], [asked],
    ]  # fmt: skip
    assert run_ranks(count_collectives) == [wanted] * 2


SIZES = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["float32", "int64", "bool", "float16"]), st.lists(st.integers(0, 40), max_size=3)),
        max_size=6,
    ),
    max_size=5,
)


def exchange_many(trees: list[list[list[tuple[str, list[int]]]]]) -> None:
    rank = PartialState().process_index
    for tree in itertools.chain.from_iterable(trees):
        both = [_values(tree, each) for each in range(2)]
        given = both[rank]
        gathered = collectives.gather(given)
        wanted = [
            torch.cat([a[None], b[None]]) if not a.ndim else torch.cat([a, b]) for a, b in zip(*both, strict=True)
        ]
        _check(gathered, wanted)
        total = [(a.long() if a.dtype == torch.bool else a) + b for a, b in zip(*both, strict=True)]
        _check(collectives.reduce(given, "sum"), total)
        _check(collectives.reduce(given, "mean"), [tensor / 2 for tensor in total])
        _check(gathered, wanted)  # The memory of earlier results must not be reused.
        _check(collectives.broadcast([tensor.clone() for tensor in given], 1), both[1])


def _values(tree: list[tuple[str, list[int]]], rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 2, shape, generator=generator).to(getattr(torch, dtype)) for dtype, shape in tree]


def _check(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# The first of the examples is always the simplest one, which consists of empty lists.
@hypothesis.settings(max_examples=3, deadline=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(trees=st.lists(SIZES, min_size=20, max_size=20))
def test_structures_are_gathered_in_any_order(trees: list[Any]) -> None:
    run_ranks(exchange_many, trees)


def different_lengths(operation: str, length: int) -> str:
    rank = PartialState().process_index
    collectives.gather(torch.ones(3))
    text = "no error"
    try:
        getattr(collectives, operation)({"x": torch.ones(length + rank), "y": torch.ones(1)})
    except DistributedOperationException as error:
        text = str(error)
    PartialState().wait_for_everyone()
    return text


@pytest.mark.parametrize("length", [2, 100_000])
@pytest.mark.parametrize("operation", ["gather", "reduce"])
def test_different_sizes_raise_even_without_debug_mode(operation: str, length: int) -> None:
    for text in run_ranks(different_lengths, operation, length):
        assert f"{{'x': float32[{length}], 'y': float32[1]}}" in text
        assert f"{{'x': float32[{length + 1}], 'y': float32[1]}}" in text
        assert "getattr(collectives, operation)" in text


def test_a_rank_that_receives_different_sizes_raises() -> None:
    first, second = run_ranks(different_lengths, "broadcast", 2)
    assert first == "no error"
    assert "'broadcast' got {'x': float32[3], 'y': float32[1]} on rank 1" in second


def equal_amounts() -> str:
    rank = PartialState().process_index
    try:
        collectives.gather([torch.ones(2, 3) if rank else torch.ones(3, 2)])
    except DistributedOperationException as error:
        return str(error)
    return "no error"


def test_other_shapes_of_the_same_size_raise() -> None:
    for text in run_ranks(equal_amounts):
        assert "[float32[3, 2]]" in text
        assert "[float32[2, 3]]" in text


def nothing_on_one_rank() -> str:
    with pytest.raises(DistributedOperationException) as caught:
        collectives.gather({"x": torch.ones(1)} if PartialState().is_main_process else {})
    assert collectives.gather(torch.ones(1)).tolist() == [1, 1]  # The ranks are still in step.
    return str(caught.value)


def test_a_rank_without_tensors_is_reported() -> None:
    assert all("rank 1  gather     {} " in text for text in run_ranks(nothing_on_one_rank))


def other_operations() -> str:
    with pytest.raises(DistributedOperationException) as caught:
        (collectives.gather if PartialState().is_main_process else collectives.reduce)(torch.ones(1))
    return str(caught.value)


def test_other_operations_are_reported() -> None:
    assert all("rank 0  gather" in text and "rank 1  reduce" in text for text in run_ranks(other_operations))


CHANGING = (
    [],
    [("float32", [64, 4])] * 50,
    [("float32", [61, 4])] * 50,
    [("int64", [3]), ("float32", [3]), ("bool", [])],
    [("float32", [3]), ("int64", [3]), ("bool", [])],
    [("float32", [0, 4]), ("float16", [5])],
    [("float32", [40_000]), ("int64", [1])],  # This tensor is larger than a block.
    [("float32", [2, 3])],
)


def change_structures(seed: int) -> list[str]:
    """Return the outcome of each call. In about half of the calls, the ranks' structures or operations may differ."""
    chance, rank = random.Random(seed), PartialState().process_index
    outcomes = []
    for _ in range(60):
        trees = chance.choices(CHANGING, k=2)
        names = chance.choices(["gather", "reduce"], k=2)
        if chance.random() < 0.5:
            trees, names = [trees[0]] * 2, [names[0]] * 2
        given = [_values(tree, each) for each, tree in enumerate(trees)]
        try:
            found = getattr(collectives, names[rank])(given[rank])
        except DistributedOperationException:
            outcomes.append("raised")
            continue
        assert (trees[0], names[0]) == (trees[1], names[1])
        if names[0] == "gather":
            _check(found, [torch.cat([torch.atleast_1d(a), torch.atleast_1d(b)]) for a, b in zip(*given, strict=True)])
        else:
            _check(
                found,
                [
                    (a + 0.0 + b) / 2 if a.dtype.is_floating_point else (a.long() + b) / 2
                    for a, b in zip(*given, strict=True)
                ],
            )
        outcomes.append("equal")
    assert collectives.gather(torch.tensor([rank])).tolist() == [0, 1]
    return outcomes


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_change_structures_differently_raise_together_and_stay_in_step(seed: int) -> None:
    first, second = run_ranks(change_structures, seed)
    assert first == second
    assert {"raised", "equal"} == set(first)


def pad_changing_ranks() -> list[Any]:
    rank = PartialState().process_index
    found = []
    for given in (
        [torch.ones(2, 2)] * (2 + rank),  # The ranks pass different numbers of tensors.
        [torch.ones(2 + rank), torch.ones(2 + rank)],
        [torch.ones(2, 1 + rank), torch.ones(2, 3 - rank)],  # The sizes differ within a rank as well.
        [torch.ones([2] * rank), torch.ones([2] * rank)],  # One rank's tensors have no dimensions.
        [torch.ones(2, 2, dtype=torch.int64 if rank else torch.float32), torch.ones(1 + rank, 1)],
    ):
        try:
            padded = collectives.pad_across_processes(given, dim=len(found) == 2)
        except DistributedOperationException:
            found.append("raised")
        else:
            found.append([list(tensor.shape) for tensor in padded])
    return found


def test_padding_accepts_ranks_that_differ_in_other_ways() -> None:
    first, second = run_ranks(pad_changing_ranks)
    assert first == ["raised", [[3], [3]], [[2, 2], [2, 3]], [[], []], [[2, 2], [2, 1]]]
    assert second == ["raised", [[3], [3]], [[2, 2], [2, 3]], [[2], [2]], [[2, 2], [2, 1]]]


def evaluate_then_train() -> None:
    rank = PartialState().process_index
    with torch.inference_mode():
        for size in (1, 3000, 3000):  # The block has to grow.
            values = [torch.full((size,), float(rank)), torch.tensor([rank])]
            assert collectives.gather(values)[0].is_inference()
            collectives.broadcast(values)
    parameters = [torch.nn.Parameter(torch.full((3000,), float(rank))), torch.tensor([rank])]
    gathered = collectives.gather(parameters)
    gathered[0].add_(1)
    assert not gathered[0].is_inference()
    assert gathered[0].unique().tolist() == [1, 2]
    collectives.broadcast(parameters, 1)
    assert parameters[0].unique().tolist() == [1]
    assert parameters[0].requires_grad


def test_collectives_in_inference_mode_do_not_affect_later_ones() -> None:
    run_ranks(evaluate_then_train)


def no_such_rank() -> None:
    with pytest.raises(ValueError, match="from_process=2 is not a rank; pass one from 0 to 1"):
        collectives.broadcast(torch.ones(1), from_process=2)
    with pytest.raises(ValueError, match="from_process='1' is not a rank"):
        collectives.broadcast(torch.ones(1), from_process="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from_process=-1 is not a rank"):
        collectives.broadcast_object_list([1], from_process=-1)
    with pytest.raises(ValueError, match="overwrites a list in place; got tuple"):
        collectives.broadcast_object_list((1,))  # type: ignore[arg-type]
    # Stay until all ranks have arrived, because this rank holds the store that they need.
    PartialState().wait_for_everyone()


def test_wrong_broadcasts_are_refused_on_every_rank() -> None:
    run_ranks(no_such_rank)


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
    assert text.count("test_collectives.py, line ") == 2


def agree_in_debug_mode() -> Any:
    rank = PartialState().process_index
    assert PartialState().debug
    padded = collectives.pad_across_processes(torch.ones(1 + rank, 2))
    return collectives.gather(padded).shape


def test_debug_mode_lets_equal_shapes_and_padding_pass() -> None:
    assert run_ranks(agree_in_debug_mode, env={"ACCELERATE_DEBUG_MODE": "1"}) == [torch.Size([4, 2])] * 2


def verified() -> None:
    @operations.chained_operation
    @operations.verify_operation
    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    mine(torch.ones(1 + PartialState().process_index))


def test_user_operations_can_be_verified() -> None:
    with pytest.raises(RankError, match=r"while calling 'tests\.distributed\.test_collectives\.mine'"):
        run_ranks(verified, env={"ACCELERATE_DEBUG_MODE": "1"})
    assert run_ranks(verified) == [None, None]


def measure() -> dict[str, float]:
    size = PartialState().num_processes
    data = {f"k{i}": torch.randn(64, 4) for i in range(50)}
    leaves = list(data.values())

    def fused() -> list[torch.Tensor]:
        """Pack and split the data by hand, so that one collective suffices."""
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
        rows = COMMUNICATORS[PartialState().communicator].all_gather(flat, size)
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
        assert seconds < 3 * measured["fused"], (
            f"{name} takes more than three times as long as one collective, which allows for a busy machine"
        )
