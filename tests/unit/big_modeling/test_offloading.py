"""Models that are offloaded to disk or to the CPU give bitwise equal results, and prefetch only a small window."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._inductor import config as inductor_config
from torch.overrides import TorchFunctionMode

from notebook_accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    hooks,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from notebook_accelerate.big_modeling import offloaded_gradients
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files import tensor_sources
from notebook_accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from notebook_accelerate.utils.modeling import get_state_dict_offloaded_model
from tests.support.waiting import until
from tests.unit.big_modeling.models import Deep, devices

TOKENS = torch.arange(12).reshape(3, 4)
MAP = {"emb": "cpu", "h.0": "disk", "h.1": "cpu", "h.2": "disk", "h.3": "disk", "ln": "cpu", "head": "disk"}


def _prefetcher(model: nn.Module) -> Any:
    return next(hook._prefetcher for module in model.modules() if (hook := getattr(module, "_hf_hook", None))
                and getattr(hook, "_prefetcher", None))  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_offloading_to_disk_gives_bitwise_equal_results(tmp_path: Path, own: bool, tied: bool) -> None:
    model = Deep(width=32, own=own, tied=tied).eval()
    plain = model(TOKENS)
    disk_offload(model, tmp_path)
    assert set(devices(model).values()) == {"meta"}
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(TOKENS), plain)
    assert set(devices(model).values()) == {"meta"}


def test_weights_are_prefetched_within_a_window(tmp_path: Path) -> None:
    model = Deep(blocks=10, width=64).eval()
    block = sum(each.nbytes for each in model.h[0].parameters())
    disk_offload(model, tmp_path)
    held: list[int] = []
    with torch.no_grad():
        _run(model, 2)
        prefetcher = _prefetcher(model)
        for each in model.h:
            each.a.register_forward_hook(lambda *_: held.append(prefetcher._held))
        read = prefetcher.reads_ahead
        _run(model, 3)
        assert prefetcher.reads_ahead > read
        assert max(held) <= prefetcher._window == 2 * block


def test_other_orders_than_the_first_give_correct_results(tmp_path: Path) -> None:
    model = Deep(blocks=6, width=32).eval()
    parts = [(model.h[i], torch.randn(2, 32)) for i in (4, 1, 5, 0, 0, 3)]
    plain, expected = model(TOKENS), [part(x) for part, x in parts]
    disk_offload(model, tmp_path)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), plain)
            for (part, x), value in zip(parts, expected, strict=True):
                assert torch.equal(part(x), value)
        model.h = nn.ModuleList(reversed(model.h))
        backwards = model(TOKENS)
        for _ in range(3):
            assert torch.equal(model(TOKENS), backwards)


def test_another_unit_does_not_wait_for_a_slow_read(tmp_path: Path) -> None:
    model = Deep(blocks=6, width=32).eval()
    weight = model.h[4].a.weight.detach().clone()
    disk_offload(model, tmp_path)
    with torch.no_grad():
        _run(model, 2)
        prefetcher = _prefetcher(model)
        until(lambda: prefetcher._thread is None)  # Wait until the next pass has been prefetched.
        first, other = (cast("Any", module)._hf_hook._unit for module in (model.h[0].a, model.h[4].a))
        read, begun, go = prefetcher._transfer.read, threading.Event(), threading.Event()

        def read_late(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                go.wait(60.0)
            return read(*arguments)

        prefetcher._transfer.read = read_late
        prefetcher.release(first, prefetcher.fetch(first))
        assert begun.wait(60.0)
        assert torch.equal(prefetcher.fetch(other)[0], weight)
        go.set()
        until(lambda: prefetcher._thread is None)
        assert prefetcher._held == other.nbytes + sum(each.unit.nbytes for each in prefetcher._ready.values())
        assert all(step >= prefetcher._next_use for step in prefetcher._ready), "the late read must be dropped"


def test_a_forward_may_delete_its_weight() -> None:
    class Once(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            weight = self.weight
            del self.weight
            return value @ weight.T + self.bias

    model = Once(2, 2)
    batch = torch.ones(1, 2)
    expected = nn.functional.linear(batch, model.weight, model.bias)
    cpu_offload(model, torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(model(batch), expected)
        assert torch.equal(model(batch), expected)


def test_an_error_in_a_forward_does_not_stop_the_next(tmp_path: Path) -> None:
    model = Deep(blocks=4, width=32, own=True).eval()
    plain = model(TOKENS)
    disk_offload(model, tmp_path)
    with torch.no_grad():
        model(TOKENS)
        for _ in range(2):
            with pytest.raises(IndexError):
                model(TOKENS + 100)
            assert torch.equal(model(TOKENS), plain)


def test_a_new_order_is_learned(tmp_path: Path) -> None:
    model = Deep(blocks=6, width=32).eval()
    disk_offload(model, tmp_path)
    with torch.no_grad():
        _run(model, 3)
        model.h = nn.ModuleList(reversed(model.h))
        _run(model, 4)
        prefetcher = _prefetcher(model)
        before = prefetcher._next_use
        _run(model, 1)
        assert prefetcher._next_use - before == len(prefetcher._plan), "no prefetched weight was skipped in this pass"


@pytest.mark.parametrize("width", [32, 1024], ids=["copied", "mapped"])
def test_gradient_modes_may_alternate(tmp_path: Path, width: int) -> None:
    model = Deep(width=width).eval()
    plain = model(TOKENS)
    disk_offload(model, tmp_path)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            for _ in range(3):
                assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_copies_of_offloaded_models_compute_independently(tmp_path: Path, where: str) -> None:
    model = Deep(width=32).eval()
    plain = model(TOKENS)
    disk_offload(model, tmp_path) if where == "disk" else cpu_offload(model)
    with torch.no_grad():
        _run(model, 3)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for _ in range(3):
                assert torch.equal(other(TOKENS), plain)
                assert torch.equal(model(TOKENS), plain)


def _mapped_bytes(folder: Path) -> int:
    """Return how many bytes of the folder's files are mapped by this process and resident in memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(not tensor_sources.can_read_ahead(), reason="the system cannot prefetch mappings: needs Linux 5.14")
def test_large_weights_are_mapped_and_the_window_holds(tmp_path: Path) -> None:
    model = Deep(blocks=20, width=1024).eval()
    size = sum(each.nbytes for each in model.parameters())
    x = torch.randn(1, 1024)
    plain = model(TOKENS), [block(x) for block in model.h]
    disk_offload(model, tmp_path)
    mapped: list[int] = []

    class Sampling(TorchFunctionMode):
        """Records the mapped memory after each large layer, while the layer's weights are still in use."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is nn.functional.linear and args[1].nbytes >= tensor_sources.MIN_BYTES:
                mapped.append(_mapped_bytes(tmp_path))
            return result

    with torch.no_grad():
        for _ in range(4):
            with Sampling():
                assert torch.equal(model(TOKENS), plain[0])
        assert len(mapped) == 4 * 40
        assert min(mapped) >= model.h[0].a.weight.nbytes
        assert max(mapped) < size / 4
        for block, expected in zip(model.h, plain[1], strict=True):
            assert torch.equal(block(x), expected), "the rounding of a single row depends on the address of the weights"
    units = {id(unit): unit for unit in _prefetcher(model)._plan}.values()
    assert sum(slot.source.mappable for unit in units for slot in unit.slots) == 40


@pytest.mark.skipif(not tensor_sources.can_read_ahead(), reason="the system cannot prefetch mappings: needs Linux 5.14")
def test_writes_to_mapped_weights_do_not_reach_the_file(tmp_path: Path) -> None:
    class Writing(nn.Linear):
        def forward(self, x: Any) -> Any:
            self.weight.mul_(2)
            return super().forward(x)

    model, x = nn.Sequential(*[Writing(1024, 1024, bias=False) for _ in range(4)]), torch.ones(1, 1024)
    with torch.no_grad():
        disk_offload(model, tmp_path)
        first = model(x)
        for _ in range(4):
            assert torch.equal(model(x), first)


@pytest.mark.parametrize("where", ["disk", "cpu", "map"])
def test_gradients_through_offloaded_weights_are_equal(tmp_path: Path, where: str) -> None:
    model = Deep(width=16)
    x = torch.randn(2, 16, requires_grad=True)

    def gradient() -> torch.Tensor:
        y = x
        for block in model.h:
            y = block(y)
        (found,) = torch.autograd.grad(model.ln(y).sin().sum(), x)
        return found

    plain = gradient()
    if where == "disk":
        disk_offload(model, tmp_path)
    elif where == "cpu":
        cpu_offload(model)
    else:
        dispatch_model(model, MAP, offload_dir=tmp_path)
    for _ in range(2):
        assert torch.equal(gradient(), plain)


def _offloaded(model: Any, where: str, folder: Path) -> None:
    if where == "disk":
        disk_offload(model, folder)
    elif where == "cpu":
        cpu_offload(model)
    else:
        dispatch_model(model, MAP, offload_dir=folder)


@pytest.mark.parametrize("where", ["disk", "cpu", "map"])
def test_gradients_of_the_offloaded_weights_are_equal(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Deep(width=16)
    for _ in range(2):
        model(TOKENS).sin().sum().backward()
    plain = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    _offloaded(model, where, tmp_path)
    with offloaded_gradients(model) as gradients, caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(TOKENS).sin().sum().backward()
    assert "dropped" not in caplog.text
    stayed = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert not stayed.keys() & gradients.keys()
    found = {**stayed, **gradients}
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    model(TOKENS).sin().sum().backward()
    assert "is dropped" in caplog.text
    assert all(torch.equal(gradients[name], plain[name]) for name in gradients), "the dropped pass changes nothing"


def test_adapters_around_frozen_offloaded_weights_train_like_without_offloading(tmp_path: Path) -> None:
    def train(model: Any) -> list[float]:
        torch.manual_seed(1)
        adapter = nn.Linear(20, 20)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = adapter(model(TOKENS)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = Deep(width=16).requires_grad_(requires_grad=False)
    plain = train(model)
    disk_offload(model, tmp_path)
    assert train(model) == plain
    assert plain[-1] < plain[0]


def test_a_model_can_be_dispatched_and_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Deep(width=16).eval()
    plain, state = model(TOKENS), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"We need an `offload_dir`.*h\.0, h\.2, h\.3, head"):
        dispatch_model(model, MAP)
    with caplog.at_level(logging.WARNING):
        dispatch_model(model, MAP, offload_dir=tmp_path)
    assert "offloaded to the disk" in caplog.text
    assert model.hf_device_map == MAP
    assert devices(model)["h.1.a.weight"] == "cpu"
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), plain)
    with pytest.raises(RuntimeError, match="can't move a model that has some modules offloaded"):
        model.to("cpu")
    whole = get_state_dict_offloaded_model(model)
    assert all(torch.equal(whole[name], state[name]) for name in state)
    hooks.remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert torch.equal(model(TOKENS), plain)


class Shifted(nn.Module):
    """A model that has a parameter, a buffer and a tied weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.full((3,), 2.0))
        self.tied = self.inner.weight
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.scale + self.shift


@pytest.mark.parametrize("preload", [None, ["Shifted"], ["Linear"]])
@pytest.mark.parametrize("buffers", [False, True])
def test_all_weights_of_a_model_loaded_as_a_whole_are_found(
    tmp_path: Path, buffers: bool, preload: list[str] | None
) -> None:
    model = Shifted()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disk_offload(model, tmp_path, offload_buffers=buffers, preload_module_classes=preload)
    whole = get_state_dict_offloaded_model(model)
    assert state.keys() - whole.keys() <= {"inner.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.items())


def test_weights_that_no_hook_loads_are_reported() -> None:
    with pytest.raises(ValueError, match=r"meta device and no hook loads them: weight, bias; load a checkpoint"):
        get_state_dict_offloaded_model(nn.Linear(2, 2, device="meta"))


def test_dispatching_to_one_device_needs_no_hooks() -> None:
    model: Any = dispatch_model(Deep(), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert hasattr(dispatch_model(model, {"": "cpu"}, force_hooks=True), "_hf_hook")


class Borrowing(nn.Module):
    """Computes with the weights of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


@pytest.mark.parametrize("where", ["cpu", "disk", "map", "checkpoint"])
def test_preloaded_classes_load_their_submodules(tmp_path: Path, where: str) -> None:
    def offloaded(classes: Any, model: nn.Module) -> nn.Module:
        known: Any = {"preload_module_classes": classes}
        if where == "cpu":
            return cpu_offload(model, **known)
        if where == "disk":
            return disk_offload(model, tmp_path / "away", **known)
        map_: Any = {"0": "disk", "1": "cpu"}
        if where == "map":
            return dispatch_model(model, map_, offload_dir=tmp_path / "away", **known)
        with init_empty_weights():
            model = nn.Sequential(Borrowing(), nn.Linear(4, 4))
        return load_checkpoint_and_dispatch(model, tmp_path, map_, offload_folder=tmp_path / "away", **known)

    model, x = nn.Sequential(Borrowing(), nn.Linear(4, 4)), torch.ones(2, 4)
    plain = model(x).detach()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="meta"), torch.no_grad():
        offloaded(None, copy.deepcopy(model))(x)
    whole = offloaded(["Borrowing"], model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(whole(x), plain)
    assert whole[0].inner.weight.is_meta  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=pytest.mark.leaks_ok("torch's progress bars keep the thread of tqdm"))],
)
def test_a_compiled_model_on_memory_and_disk_gives_the_same_results(tmp_path: Path, backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    x = torch.ones(2, 4)
    plain = model(x)
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    # Compile in this process, because compile workers would outlive the test.
    with torch.no_grad(), inductor_config.patch(compile_threads=1):
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), plain, rtol=0 if backend == "eager" else 1e-5, atol=1e-6)
    assert model[1].weight.is_meta


def test_a_compiled_model_gives_the_same_results(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = Deep(width=16, blocks=2).eval()
    plain = model(TOKENS)
    disk_offload(model, tmp_path)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(TOKENS), plain)


def test_the_offload_folder_has_the_documented_files(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(2, 3, dtype=torch.bfloat16), "a.b", tmp_path, {})
    index = offload_weight(torch.tensor(4.0), "scalar", tmp_path, index)
    assert index == {"a.b": {"dtype": "bfloat16", "shape": [2, 3]}, "scalar": {"dtype": "float32", "shape": []}}
    save_offload_index(index, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == index
    assert torch.equal(load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"]), torch.ones(2, 3).bfloat16())
    assert load_offloaded_weight(tmp_path / "scalar.dat", index["scalar"]).shape == ()
    offload_state_dict(tmp_path / "new", {"w": torch.ones(2)})
    loader = OffloadedWeightsLoader({"z": torch.zeros(1)}, tmp_path / "new")
    assert list(loader) == ["z", "w"]
    assert torch.equal(loader["w"], torch.ones(2))
    with pytest.raises(ValueError, match="Need either"):
        OffloadedWeightsLoader()
    view = PrefixedDataset({"a.b": 1, "c": 2}, "a.")
    assert (view["b"], list(view), len(view)) == (1, ["a.b"], 2)
    assert extract_submodules_state_dict({"a.x": 1, "ab": 3, "a": 4}, ["a"]) == {"a.x": 1, "a": 4}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "dtype", ["uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_rare_dtypes_of_safetensors_files_are_read(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    written = torch.arange(8 * kind.itemsize, dtype=torch.uint8).view(kind)
    save_file({"weight": written}, tmp_path / "model.safetensors")
    weights = OffloadedWeightsLoader(index={"weight": {"safetensors_file": str(tmp_path / "model.safetensors")}})
    assert weights["weight"].dtype == kind
    assert torch.equal(weights["weight"].view(torch.uint8), written.view(torch.uint8))


def test_broken_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    disk_offload(Deep(width=16), tmp_path)
    with pytest.raises(ValueError, match="belongs to another model"):
        disk_offload(Deep(width=8), tmp_path)
    with pytest.raises(ValueError, match=r"lack h\.4"):
        disk_offload(Deep(width=16, blocks=5), tmp_path)
    (tmp_path / "h.0.a.weight.dat").write_bytes(b"short")
    with pytest.raises(BrokenCheckpointError, match=r"h\.0\.a\.weight\.dat has 5 bytes instead of 1,024"):
        disk_offload(Deep(width=16), tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({"../../secret": index["emb.weight"]}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        OffloadedWeightsLoader(save_folder=tmp_path)["../../secret"]


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "w.dat.partial").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"w \(4,000,000 bytes\) could not be offloaded .*: No space left"):
        offload_weight(torch.ones(1_000_000), "w", tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_shrinks_during_use_is_reported(tmp_path: Path) -> None:
    model = Deep(width=16).eval()
    disk_offload(model, tmp_path)
    with torch.no_grad():
        model(TOKENS)
        (tmp_path / "h.2.a.weight.dat").write_bytes(b"short")
        with pytest.raises(BrokenCheckpointError, match="ends too early"):
            _run(model, 3)


@pytest.mark.skipif(not tensor_sources.can_read_ahead(), reason="the system cannot prefetch mappings: needs Linux 5.14")
def test_a_mapped_file_that_shrinks_is_reported(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    disk_offload(model, tmp_path)
    with torch.no_grad():
        _run(model, 2, torch.ones(1, 1024))
        os.truncate(tmp_path / "6.weight.dat", 4096)
        with pytest.raises(BrokenCheckpointError, match=r"6\.weight\.dat ends too early"):
            _run(model, 3, torch.ones(1, 1024))


def _run(model: nn.Module, times: int, x: torch.Tensor = TOKENS) -> None:
    for _ in range(times):
        model(x)
