"""References to the weights of offloaded models stay valid, however they were obtained."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from notebook_accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model
from notebook_accelerate.big_modeling import offloaded_gradients
from notebook_accelerate.hooks import ModelHook, add_hook_to_module, attach_align_device_hook
from notebook_accelerate.utils import (
    OffloadedWeightsLoader,
    align_module_device,
    extract_model_from_parallel,
    get_state_dict_from_offload,
    has_offloaded_params,
    offload_state_dict,
)
from notebook_accelerate.utils.modeling import get_state_dict_offloaded_model, named_module_tensors
from tests.support.waiting import until

WIDTHS = {"copied": 16, "mapped": 1024}
"""Small weights are copied from their file, and large ones (from 2 MB on) are mapped."""
GRADIENT_MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


class Part(nn.Module):
    """A layer whose forward pass calls `keep`, if it is set, with the layer, so that tests can keep its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.bias = nn.Parameter(torch.randn(width))
        self.keep: Any = None

    def forward(self, x: Any) -> Any:
        if self.keep is not None:
            self.keep(self)
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


class Parts(nn.Module):
    """Several layers in a row, with a parameter and a buffer on the model itself."""

    def __init__(self, width: int = 16, count: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(width) for _ in range(count)])
        self.scale = nn.Parameter(torch.rand(width))
        self.register_buffer("shift", torch.rand(width))
        if tied:
            self.parts[-1].weight = self.parts[0].weight

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x * self.scale + self.shift


def _offloaded(model: Any, how: str, folder: Path, **options: Any) -> nn.Module:
    cpu = torch.device("cpu")
    if how == "disk":
        return disk_offload(model, folder, execution_device=cpu, **options)
    if how == "cpu":
        return cpu_offload(model, execution_device=cpu, **options)
    names = [name for name, _ in model.named_children()] + [name for name, _ in named_module_tensors(model)]
    blocks = {name: "disk" for name in names if name != "parts"}
    if "parts" in names:
        blocks |= {f"parts.{number}": "cpu" if number == 1 else "disk" for number in range(len(model.parts))}
    device_map = dict(sorted(blocks.items()))
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True, **options)


KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight[1:3],
    "a view of a view": lambda weight: weight[1:].t()[2:].flatten(),
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "an array": lambda weight: weight.detach().numpy(),
    "a view of an array": lambda weight: weight.detach().numpy()[1:].T,
    "a buffer": lambda weight: memoryview(weight.detach().numpy()),
    "through dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "its storage": lambda weight: weight.untyped_storage(),
    "a parameter": lambda weight: nn.Parameter(weight.data, requires_grad=False),
    "a copied object": copy.copy,
    "an object": lambda weight: types.SimpleNamespace(inner=[{"weight": weight[:2]}]),
    "a closure": lambda weight: lambda: weight[:2],
    "a generator": lambda weight: (row for row in [weight[0], weight[1]]),
}


def _values(kept: Any) -> torch.Tensor:
    """Return a copy of the numbers in a kept object."""
    if isinstance(kept, types.SimpleNamespace):
        kept = kept.inner[0]["weight"]
    elif isinstance(kept, types.FunctionType):
        kept = kept()
    elif isinstance(kept, types.GeneratorType):
        kept = next(kept)
    elif isinstance(kept, torch.UntypedStorage):
        kept = torch.frombuffer(bytearray(kept.tolist()), dtype=torch.float32)
    elif isinstance(kept, memoryview):
        kept = np.asarray(kept)
    return torch.as_tensor(kept).detach().clone()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("mode", GRADIENT_MODES)
@pytest.mark.parametrize("how", ["disk", "cpu", "map"])
def test_weights_kept_by_a_forward_stay_unchanged(tmp_path: Path, how: str, mode: Any, width: int) -> None:
    torch.manual_seed(0)
    model, x = Parts(width).eval(), torch.randn(2, width)
    plain, weights = model(x).detach(), [part.weight.detach().clone() for part in model.parts]
    _offloaded(model, how, tmp_path)
    # Comparing large storages takes too long.
    names = [name for name in KEEP if width < 100 or name != "its storage"]
    kept: list[tuple[str, int, Any]] = []
    for number, part in enumerate(model.parts):
        part.keep = lambda own, number=number: kept.extend((name, number, KEEP[name](own.weight)) for name in names)
    with mode():
        for _ in range(4):
            assert torch.equal(model(x), plain)
    expected = {name: [_values(KEEP[name](weight)) for weight in weights] for name in names}
    wrong = {name for name, number, each in kept if not torch.equal(_values(each), expected[name][number])}
    assert len(kept) == 4 * 8 * len(names)
    assert not wrong


@pytest.mark.parametrize("how", ["disk", "map"])
def test_weights_that_a_module_returns_passes_on_or_stores_stay_unchanged(tmp_path: Path, how: str) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))
            self.last: Any = None

        def forward(self, count: int, store: dict[str, Any], listed: list[Any]) -> Any:
            rows = self.last = store["rows"] = self.weight[:count]
            listed.append(rows)
            return rows, {"rows": rows}, types.SimpleNamespace(rows=rows), iter([rows]), lambda: rows

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Positions() for _ in range(8)])

        def forward(self) -> list[list[torch.Tensor]]:
            found: list[list[torch.Tensor]] = []
            for part in self.parts:
                store: dict[str, Any] = {}
                listed: list[Any] = []
                rows, by_name, holder, each, called = part(3, store, listed)
                found.append([rows, by_name["rows"], holder.rows, next(each), called(), store["rows"], *listed])
            return [*found, [part.last for part in self.parts]]

    model = Model().eval()
    plain = [[rows.detach().clone() for rows in group] for group in model()]
    _offloaded(model, how, tmp_path)
    with torch.no_grad():
        passes = [model() for _ in range(4)]
    for found in passes:
        for group, expected in zip(found, plain, strict=True):
            assert all(torch.equal(*pair) for pair in zip(group, expected, strict=True))


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_graph_around_prefetched_weights_has_correct_gradients(tmp_path: Path, width: int) -> None:
    torch.manual_seed(0)
    model, x = Parts(width).eval(), torch.randn(2, width)
    inputs = [torch.randn(2, width, requires_grad=True) for _ in model.parts]
    products = [each @ part.weight for each, part in zip(inputs, model.parts, strict=True)]
    expected = torch.autograd.grad(sum(each.square().sum() for each in products), inputs)  # type: ignore[arg-type]
    _offloaded(model, "disk", tmp_path)
    built: list[torch.Tensor] = []

    def product(number: int) -> Callable[[Any], None]:
        def build(part: Any) -> None:
            with torch.enable_grad():  # Here, autograd keeps the weight even in a pass without gradients.
                built.append(inputs[number] @ part.weight.detach())

        return build

    with torch.no_grad():
        for _ in range(3):
            model(x)
        for number, part in enumerate(model.parts):
            part.keep = product(number)
        model(x)
        for part in model.parts:
            part.keep = None
        for _ in range(3):
            model(x)
    found = torch.autograd.grad(sum(each.square().sum() for each in built), inputs)  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_weights_held_by_another_thread_stay_unchanged(tmp_path: Path) -> None:
    model, x = Parts(count=12).eval(), torch.randn(2, 16)
    weights = [part.weight.detach().clone() for part in model.parts]
    _offloaded(model, "disk", tmp_path)
    held: list[tuple[int, Any]] = []
    wrong: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            wrong.extend(number for number, weight in list(held)[-40:] if not torch.equal(weight, weights[number]))

    for number, part in enumerate(model.parts):
        part.keep = lambda own, number=number: held.append((number, own.weight))
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(30):
                model(x)
    finally:
        over.set()
        thread.join()
    assert not wrong
    assert all(torch.equal(weight, weights[number]) for number, weight in held)


def test_copies_compute_in_several_threads(tmp_path: Path) -> None:
    model, x = Parts(count=12).eval(), torch.randn(2, 16)
    plain = model(x).detach()
    _offloaded(model, "disk", tmp_path)
    wrong: list[Any] = []

    def compute(own: nn.Module) -> None:
        with torch.no_grad():
            wrong.extend(result for _ in range(30) if not torch.equal(result := own(x), plain))

    threads = [threading.Thread(target=compute, args=(copy.deepcopy(model),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", GRADIENT_MODES)
@pytest.mark.parametrize("how", ["disk", "cpu", "map"])
def test_states_are_complete_after_any_number_of_passes(tmp_path: Path, how: str, mode: Any, tied: bool) -> None:
    model, x = Parts(tied=tied).eval(), torch.randn(2, 16)
    plain, state = model(x).detach(), {name: each.clone() for name, each in model.state_dict().items()}
    _offloaded(model, how, tmp_path / "offloaded", offload_buffers=True)
    accelerator, states = Accelerator(cpu=True), []
    for count in range(4):
        with mode():
            states.append(get_state_dict_offloaded_model(model))
            accelerator.save_model(model, str(tmp_path / f"{count}"))
        with torch.no_grad():
            assert torch.equal(model(x), plain)
    for count, found in enumerate(states):
        saved = load_file(tmp_path / f"{count}" / "model.safetensors")
        assert list(found) == list(state)
        assert all(torch.equal(found[name], each) for name, each in state.items())
        assert not any(each.is_inference() for each in found.values())
        assert set(state) - set(saved) <= ({"parts.0.weight", "parts.7.weight"} if tied else set())
        assert all(torch.equal(each, state[name]) for name, each in saved.items())


@pytest.mark.parametrize("mode", GRADIENT_MODES)
@pytest.mark.parametrize("how", ["disk", "cpu", "map"])
def test_aligned_modules_and_states_filled_from_them_stay_unchanged(tmp_path: Path, how: str, mode: Any) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    plain, state = model(x).detach(), {name: each.clone() for name, each in model.state_dict().items()}
    _offloaded(model, how, tmp_path)
    kept: list[tuple[str, torch.Tensor]] = []
    filled: dict[str, Any] = dict.fromkeys(state)
    with mode():
        for _ in range(3):
            assert torch.equal(model(x), plain)
            for name, module in model.named_modules():
                with align_module_device(module, torch.device("cpu")):
                    own = dict(named_module_tensors(module))
                    kept += [(f"{name}.{key}".lstrip("."), each) for key, each in own.items()]
                for key in own:
                    get_state_dict_from_offload(module, f"{name}.{key}".lstrip("."), filled)
        assert torch.equal(model(x), plain)
    assert {name for name, _ in kept} == set(state)
    assert all(torch.equal(each, state[name]) for name, each in kept)
    assert all(torch.equal(filled[name], each) for name, each in state.items())


def test_aligning_does_not_disturb_prefetching(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    _offloaded(model, "disk", tmp_path)
    prefetcher: Any = next(iter(model.parts[0]._hf_hook.weights_map.dataset.prefetchers.values()))
    with torch.no_grad():
        for _ in range(3):
            model(x)
        before = prefetcher._next_use
        get_state_dict_offloaded_model(model)
        assert prefetcher._next_use == before
        with align_module_device(model.parts[0], torch.device("meta")):
            assert model.parts[0].weight.device.type == "meta", "the weight is on the requested device"


def test_gradients_and_modes_may_be_mixed_in_one_pass(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    model.requires_grad_(requires_grad=True)
    model(x).sum().backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    plain = model(x).detach()
    _offloaded(model, "disk", tmp_path)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), plain)
        with offloaded_gradients(model) as gradients:
            output = model(x)
            with torch.no_grad():
                assert torch.equal(model(x), plain)
            output.sum().backward()
        assert all(torch.equal(gradients[name], grad) for name, grad in expected.items() if grad is not None)


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.int64]


def test_every_dtype_shape_and_layout_can_be_offloaded(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            data = torch.randint(0, 2, (6, 4)).to(dtype)
            self.weight = nn.Parameter(data, requires_grad=False)
            self.turned = nn.Parameter(data.t(), requires_grad=False)
            self.part = nn.Parameter(data[1:4, 1:], requires_grad=False)
            self.number = nn.Parameter(data[1, 1].clone(), requires_grad=False)
            self.nothing = nn.Parameter(torch.empty(0, 3, dtype=dtype), requires_grad=False)

        def forward(self) -> list[torch.Tensor]:
            return list(self.parameters())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Holder(dtype) for dtype in DTYPES])

        def forward(self) -> list[torch.Tensor]:
            return [each for part in self.parts for each in part()]

    model = Model()
    plain = [each.detach().clone() for each in model()]
    _offloaded(model, "disk", tmp_path)
    with torch.no_grad():
        passes = [model() for _ in range(4)]
    for found in passes:
        for each, expected in zip(found, plain, strict=True):
            assert (each.dtype, each.shape) == (expected.dtype, expected.shape)
            assert each.double().equal(expected.double()) if not each.is_complex() else each.equal(expected)


def test_a_weight_on_the_model_itself_is_offloaded_whatever_hooks_it_has(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    plain, state = model(x).detach(), {name: each.clone() for name, each in model.state_dict().items()}
    _offloaded(model, "disk", tmp_path)
    for _ in range(2):  # Add more hooks around the existing ones.
        add_hook_to_module(model, ModelHook(), append=True)
        assert has_offloaded_params(model)
        assert torch.equal(model(x), plain)
        found = get_state_dict_offloaded_model(model)
        assert all(torch.equal(found[name], each) for name, each in state.items())
    with offloaded_gradients(model) as gradients:
        model(x).sum().backward()
    assert "scale" in gradients
    assert not has_offloaded_params(nn.Linear(1, 1))


def test_an_extracted_model_computes_with_its_weights(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    plain = model(x).detach()
    _offloaded(model, "disk", tmp_path)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), plain)
            assert torch.equal(extract_model_from_parallel(model)(x), plain)


def test_replaced_weights_are_used(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    _offloaded(model, "disk", tmp_path)
    part: Any = model.parts[2]
    with torch.no_grad():
        for _ in range(3):
            before = model(x)
        hook = part._hf_hook
        hook.pre_forward(part)  # peft makes this call when it merges an adapter into an offloaded layer.
        part.weight.data += 1
        hook.weights_map = {name: each.to("cpu") for name, each in named_module_tensors(part)}
        hook.post_forward(part, torch.tensor([]))
        after = [model(x) for _ in range(3)]
        state = get_state_dict_offloaded_model(model)
        fresh = Parts().eval()
        fresh.load_state_dict(state)
        assert not torch.equal(after[0], before)
        assert all(torch.equal(each, fresh(x)) for each in after)


def test_weights_in_memory_that_change_after_prefetching_are_updated(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    memory = {name: each for name, each in state.items() if "weight" in name}
    offload_state_dict(tmp_path, {name: each for name, each in state.items() if "weight" not in name})
    weights = OffloadedWeightsLoader(state_dict=memory, save_folder=tmp_path)
    attach_align_device_hook(model, torch.device("cpu"), offload=True, weights_map=weights)
    fresh = Parts().eval()
    with torch.no_grad():
        for step in range(4):
            until(lambda: not weights.prefetchers[torch.device("cpu")]._thread)
            if step % 2:
                memory["parts.0.weight"] = memory["parts.0.weight"] + 1
            else:
                memory["parts.0.weight"] += 1
            fresh.load_state_dict({**state, **memory})
            assert torch.equal(model(x), fresh(x))


def test_memory_is_freed_with_the_last_reference(tmp_path: Path) -> None:
    model, x = Parts(count=12).eval(), torch.randn(2, 16)
    _offloaded(model, "disk", tmp_path)
    alive: list[Any] = []
    with torch.no_grad():
        for _ in range(3):
            model(x)
        for part in model.parts:
            part.keep = lambda own: alive.append(weakref.ref(own.weight))
        for _ in range(5):
            model(x)
    gc.collect()
    assert sum(each() is not None for each in alive) <= 2, "at most two weights may still be in memory"


def test_random_uses_in_random_orders_are_correct(tmp_path: Path) -> None:
    source = random.Random(7)
    model, x = Parts(count=10).eval(), torch.randn(2, 16)
    weights = [part.weight.detach().clone() for part in model.parts]
    plain = [part(x).detach() for part in model.parts]
    _offloaded(model, "disk", tmp_path)
    kept: list[tuple[int, Any]] = []
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad]
    for _ in range(150):
        number = source.randrange(10)
        part = model.parts[number]
        part.keep = None if source.random() < 0.5 else lambda own, at=number: kept.append((at, own.weight[1:]))
        with source.choices(modes, weights=[4, 2, 1])[0]():
            what = source.random()
            if what < 0.3:
                model(x)
            elif what < 0.8:
                assert torch.equal(part(x), plain[number])
            elif what < 0.9:
                with align_module_device(part):
                    kept.append((number, part.weight[1:]))
            else:
                assert torch.equal(get_state_dict_offloaded_model(model)["parts.3.weight"], weights[3])
        if source.random() < 0.1:
            del kept[::2]
    assert all(torch.equal(view, weights[number][1:]) for number, view in kept)


class _Device:
    """A transfer to a device that lags behind its host: events complete only when something waits for them."""

    def __init__(self) -> None:
        self.bytes = self.most = 0

    def prepare(self, order: Any) -> None:
        """Do nothing."""

    def read(self, unit: Any, after: Any) -> tuple[list[Any], None]:
        """Wait for the given events, and allocate memory."""
        for event in after:
            event.synchronize()
        self.bytes += unit.nbytes
        self.most = max(self.most, self.bytes)
        return [slot.as_held(slot.source.read()) for slot in unit.slots], None

    def before_use(self, tensors: Any, done: Any) -> None:
        """Do nothing."""

    def after_use(self, tensors: list[Any]) -> Any:
        """Return an event that frees the memory when something waits for it."""
        nbytes = sum(each.nbytes for each in tensors)

        class Event:
            def synchronize(_) -> None:  # noqa: N805
                self.bytes -= nbytes

        return Event()


def test_the_window_holds_if_the_device_lags_behind(tmp_path: Path) -> None:
    model, x = Parts(count=12).eval(), torch.randn(2, 16)
    plain = model(x).detach()
    _offloaded(model, "disk", tmp_path)
    prefetcher: Any = next(iter(model.parts[0]._hf_hook.weights_map.dataset.prefetchers.values()))
    device = prefetcher._transfer = _Device()
    with torch.no_grad():
        for _ in range(6):
            assert torch.equal(model(x), plain)
    assert prefetcher.reads_ahead > 0
    assert device.most <= prefetcher._window


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    signal.alarm(seconds)
    yield
    signal.alarm(0)


def test_a_fork_does_not_use_the_prefetcher_of_its_parent(tmp_path: Path) -> None:
    model, x = Parts().eval(), torch.randn(2, 16)
    plain = model(x).detach()
    _offloaded(model, "disk", tmp_path)
    prefetcher: Any = next(iter(model.parts[0]._hf_hook.weights_map.dataset.prefetchers.values()))
    with torch.no_grad():
        for _ in range(3):
            model(x)
        read, begun, go = prefetcher._transfer.read, threading.Event(), threading.Event()

        def read_late(*arguments: Any) -> Any:
            begun.set()
            go.wait(60.0)
            return read(*arguments)

        unit = model.parts[0]._hf_hook._unit
        held = prefetcher.fetch(unit)
        until(lambda: prefetcher._thread is None)
        prefetcher._transfer.read = read_late
        prefetcher.release(unit, held)
        assert begun.wait(60.0)
        child = os.fork()
        if not child:
            with _deadline(60):
                os._exit(0 if all(torch.equal(model(x), plain) for _ in range(3)) else 1)
        go.set()
        assert os.waitpid(child, 0)[1] == 0
