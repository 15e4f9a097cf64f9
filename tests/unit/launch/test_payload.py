"""Pickling of functions, arguments and values that are passed between processes."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accelerate.errors import SerializationError
from notebook_accelerate.telemetry.pickling import dump, dump_bytes, load_bytes, load_file
from notebook_accelerate.telemetry.tracebacks import cell_sources, install_sources, is_cell


def _through_file(value: Any) -> Any:
    return load_file(dump(value, "the value").to_file())


def _through_bytes(value: Any) -> Any:
    return load_bytes(dump_bytes(value, "the value"))


WAYS = pytest.mark.parametrize("travel", [_through_file, _through_bytes])


@WAYS
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.empty(0),
        torch.empty(3, 0),
        torch.tensor(4.0),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(10)[3:7],
        torch.ones(2).expand(5, 2),
        torch.eye(3).to_sparse(),
        torch.ones(4, dtype=torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensors_keep_their_value_type_and_shape(travel: Any, tensor: torch.Tensor) -> None:
    found = travel(tensor)
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    plain, back = tensor.to_dense(), found.to_dense()
    assert torch.equal(plain.to(torch.complex64), back.to(torch.complex64))


@WAYS
def test_views_stay_views_of_one_storage(travel: Any) -> None:
    base = torch.arange(10.0)
    found, view = travel((base, base[2:5]))
    view.fill_(-1)
    assert found.tolist() == [0, 1, -1, -1, -1, 5, 6, 7, 8, 9]
    assert base[2] == 2.0


@WAYS
def test_tied_parameters_stay_tied_and_keep_grad_flags(travel: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    found = travel(model)
    assert found[0].weight is found[1].weight
    assert isinstance(found[0].weight, torch.nn.Parameter)
    assert (found[0].bias.requires_grad, found[1].bias.requires_grad) == (True, False)
    optimizer = torch.optim.SGD(found.parameters(), 0.1)
    found(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_model_and_its_optimizer_stay_connected() -> None:
    model = torch.nn.Linear(2, 2)
    found, optimizer = _through_file((model, torch.optim.Adam(model.parameters())))
    assert optimizer.param_groups[0]["params"][0] is found.weight


@WAYS
def test_a_parameters_gradient_and_attributes_are_transferred(travel: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "mine"  # type: ignore[attr-defined]
    assert travel(parameter).tag == "mine"
    leaf = torch.ones(2, requires_grad=True)
    assert travel(leaf).requires_grad


def test_ranks_map_files_privately() -> None:
    tensor, array = torch.zeros(1000), np.zeros(1000)
    descriptor = dump((tensor, array), "x").to_file()
    other = os.dup(descriptor)
    first, second = load_file(descriptor), load_file(other)
    first[0].fill_(1)
    first[1].fill(2)
    assert (second[0].sum(), second[1].sum(), tensor.sum(), array.sum()) == (0, 0, 0, 0)


@WAYS
def test_arrays_are_writable_and_keep_their_order(travel: Any) -> None:
    for array in (np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array(["a", None], dtype=object)):
        found = travel(array)
        assert np.array_equal(found, array)
        assert found.dtype == array.dtype
        found[...] = found[::-1]


@WAYS
def test_a_read_only_array_is_transferred(travel: Any) -> None:
    array = np.arange(4)
    array.flags.writeable = False
    assert np.array_equal(travel(array), array)
    assert np.array_equal(travel(b"bytes"), b"bytes")


@WAYS
def test_closures_lambdas_and_local_classes_are_transferred(travel: Any) -> None:
    offset = 3

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def add(self) -> int:
            return self.value + offset

    def outer(n: int) -> Any:
        return lambda: Local(n).add()

    assert travel(outer(4))() == 7
    assert travel((Local, Local(1)))[1].add() == 4
    assert isinstance(*reversed(travel((Local, Local(1)))))


@WAYS
def test_functions_keep_the_name_of_their_file(travel: Any) -> None:
    names: dict[str, Any] = {}
    source = "def outer():\n    def inner():\n        raise KeyError('bad batch')\n    return inner\n"
    exec(compile(source, "/tmp/ipykernel_1/123.py", "exec"), names)
    outer = travel(names["outer"])
    assert outer is not names["outer"]
    assert [code.co_filename for code in (outer.__code__, outer().__code__)] == ["/tmp/ipykernel_1/123.py"] * 2
    assert outer().__code__.co_firstlineno == 2


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (i for i in ()), {"deep": [threading.Lock()]}],
)
def test_an_object_that_cannot_be_pickled_is_named_with_the_reason(value: Any) -> None:
    with pytest.raises(SerializationError, match=r"the arguments cannot be pickled: TypeError: .*pickle"):
        dump(value, "the arguments")


def test_a_hostile_reduce_raises_a_serialization_error() -> None:
    class Hostile:
        def __reduce__(self) -> str:
            raise ZeroDivisionError("in __reduce__")

    with pytest.raises(SerializationError, match="ZeroDivisionError: in __reduce__"):
        dump(Hostile(), "it")


def test_an_endless_structure_raises_a_serialization_error() -> None:
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(SerializationError, match=r"(?i)recursion"):
        dump(deep, "it")
    while deep:
        deep = deep[0]


def test_the_error_for_a_tensor_with_a_graph_suggests_detach() -> None:
    with pytest.raises(SerializationError, match=r"tensor\.detach\(\)"):
        dump({"loss": torch.ones(2, requires_grad=True).sum()}, "x")


def test_descriptors_are_closed() -> None:
    gc.collect()  # Collect first, so that descriptors of earlier tests are not closed during this one.
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        _through_file(torch.ones(10))
    with pytest.raises(SerializationError):
        dump(threading.Lock(), "x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_400_megabytes_are_transferred_quickly() -> None:
    tensor = torch.ones(100_000_000)
    begin = time.thread_time()  # Measure CPU time, because test machines are busy.
    found = _through_file(tensor)
    assert found[-1] == 1.0
    assert time.thread_time() - begin < 30


def test_cells_are_identified_by_name() -> None:
    assert is_cell("/tmp/ipykernel_123/456.py")
    assert is_cell("<ipython-input-3-abc>")
    assert not is_cell("/home/me/train.py")


def test_sources_of_cells_are_transferred() -> None:
    import linecache

    name = "/tmp/ipykernel_1/99.py"
    install_sources({name: "a = 1\nb = 2\n"})
    try:
        assert linecache.getline(name, 2) == "b = 2\n"
        linecache.checkcache()
        assert cell_sources()[name] == "a = 1\nb = 2\n"
    finally:
        linecache.cache.pop(name)


def test_a_value_whose_class_raises_is_refused_like_any_other() -> None:
    class Odd:
        @property
        def __class__(self) -> Any:
            raise KeyError("class")

        def __reduce__(self) -> Any:
            raise TypeError("the reason")

    for value in (Odd(), (Odd(), ())):
        with pytest.raises(SerializationError, match="the value cannot be pickled"):
            dump(value, "the value")


@pytest.mark.parametrize("name", ["torch.backends.cudnn", "torch._dynamo.config"])
def test_modules_of_unusual_classes_are_sent_by_name(name: str) -> None:
    module = importlib.import_module(name)
    assert type(module) is not ModuleType
    assert _through_bytes(module) is module
