"""Sizes and device maps. The expected values were observed with Accelerate 1.15, unless a comment says otherwise."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accelerate import (
    big_modeling,
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from notebook_accelerate.big_modeling.device_map import get_balanced_memory, get_max_memory
from notebook_accelerate.utils import CustomDtype
from notebook_accelerate.utils.modeling import (
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    named_module_tensors,
    retie_parameters,
)
from tests.unit.big_modeling.models import Deep, ThreeLayers, devices


@pytest.mark.parametrize("include_buffers", [None, False, True])
def test_models_are_created_without_memory(include_buffers: bool | None) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        model = ThreeLayers()
        other = torch.zeros(2)
    where = devices(model)
    assert where["linear1.weight"] == "meta"
    assert where["batchnorm.running_mean"] == ("meta" if include_buffers else "cpu")
    assert other.device.type == ("meta" if include_buffers else "cpu")
    assert devices(ThreeLayers())["linear1.weight"] == "cpu"


def test_weights_tied_in_init_stay_tied_and_flags_are_kept() -> None:
    with init_empty_weights():
        model = Deep(tied=True)
        model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    assert find_tied_parameters(model) == [["emb.weight", "head.weight"]]
    assert not model.frozen.requires_grad


def test_init_contexts_end_if_the_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), init_on_device(torch.device("meta")):
        1 / 0  # noqa: B018
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_empty_models_hold_no_memory_and_a_parameter_of_two_modules_stays_one() -> None:
    with init_empty_weights():
        made = nn.Parameter(torch.ones(2))
        watched = weakref.ref(made)
        first, second = nn.Module(), nn.Module()
        first.w, second.w = made, made
        assert first.w is second.w
        del made
        assert watched() is None


class Rotary(nn.Module):
    """A layer with a non-persistent buffer, like rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.angles + self.kept


def test_named_module_tensors_are_listed() -> None:
    model = Rotary()
    named = named_module_tensors
    assert [name for name, _ in named(model)] == ["kept", "angles"]
    assert [name for name, _ in named(model.layer)] == ["weight", "bias"]
    assert [name for name, _ in named(model, include_buffers=False)] == []
    everything = ["layer.weight", "layer.bias", "kept", "angles"]
    assert [name for name, _ in named(model, recurse=True)] == everything
    assert [name for name, _ in named(model, recurse=True, include_buffers=False)] == everything[:2]
    outer = nn.Sequential(model)
    found = dict(named(outer, recurse=True, remove_non_persistent=True))
    assert list(found) == ["0.layer.weight", "0.layer.bias", "0.kept"]
    assert found["0.layer.weight"] is model.layer.weight


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk", "checkpoint"])
def test_non_persistent_buffers_keep_their_values(tmp_path: Path, where: str, offload_buffers: bool) -> None:
    with init_empty_weights():
        empty = Rotary()
    assert empty.layer.weight.is_meta
    assert torch.equal(empty.angles, torch.arange(4.0))
    with init_empty_weights(include_buffers=True):
        assert Rotary().angles.is_meta
    model, x = Rotary(), torch.ones(2, 4)
    plain = model(x)
    if where == "checkpoint":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        load_checkpoint_and_dispatch(
            empty, tmp_path, {"": "disk"}, offload_folder=tmp_path / "away", offload_buffers=offload_buffers
        )
        model = empty
    elif where == "cpu":
        cpu_offload(model, offload_buffers=offload_buffers)
    else:
        disk_offload(model, tmp_path, offload_buffers=offload_buffers)
    assert model.kept.is_meta == offload_buffers
    assert not model.angles.is_meta
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain)


def test_dtypes_of_single_tensors_change_the_map() -> None:
    assert infer_auto_device_map(ThreeLayers(), {0: 100, 1: 200}, special_dtypes={"linear1.weight": torch.float64}) == {
        "linear1": 1, "batchnorm": 1,  "linear2": "disk",
    }  # fmt: skip
    halved = {"linear1.weight": torch.float16, "linear1.bias": torch.float16}
    assert infer_auto_device_map(ThreeLayers(), {0: 132, 1: 200}, dtype=torch.float32, special_dtypes=halved) == {
        "linear1": 0, "batchnorm": 1, "linear2": 1,
    }  # fmt: skip
    sizes = compute_module_sizes(ThreeLayers(), special_dtypes=halved)
    assert sizes["linear1"] == 32
    assert sizes["linear2"] == 100


def test_module_sizes_are_summed_by_module() -> None:
    sizes = compute_module_sizes(ThreeLayers())
    assert {name: sizes[name] for name in ("", "linear1", "batchnorm", "linear2", "batchnorm.num_batches_tracked")} == {
        "": 236, "linear1": 64, "batchnorm": 72, "linear2": 100, "batchnorm.num_batches_tracked": 8,
    }  # fmt: skip
    assert compute_module_sizes(ThreeLayers(), dtype="float16")["batchnorm"] == 40
    special = compute_module_sizes(ThreeLayers(), dtype=torch.float16, special_dtypes={"linear1.weight": torch.float32})
    assert special["linear1"] == 56
    assert compute_module_sizes(ThreeLayers(), buffers_only=True)[""] == 40


def test_tied_tensors_count_once() -> None:
    sizes = compute_module_sizes(Deep(tied=True))
    assert sizes["head"] == 0
    assert calculate_maximum_sizes(Deep(tied=True)) == (sizes[""], (800, ["emb"]))


def test_the_largest_layer_respects_unsplit_classes() -> None:
    model = Deep()
    named, sizes = list(model.named_children()), compute_module_sizes(model)
    assert get_max_layer_size(named[1:3], sizes, []) == (440, [f"h.{i}.{name}" for i in range(4) for name in "ab"])
    assert get_max_layer_size(named[1:3], sizes, ["Block"]) == (880, [f"h.{i}" for i in range(4)])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 4), (torch.bool, 1 / 8), (torch.bfloat16, 2), (torch.float8_e4m3fn, 1), (CustomDtype.INT4, 0.5),
     ("float16", 2)],
)  # fmt: skip
def test_dtypes_have_byte_sizes(dtype: Any, size: float) -> None:
    assert dtype_byte_size(dtype) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [(10, 10), ("10GB", 10**10), ("10Gb", 125 * 10**7), ("5MiB", 5 * 2**20), ("1.5GB", 15 * 10**8), ("0GB", 0)],
)
def test_file_sizes_are_parsed(text: Any, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["x", "5", "-5GB"])
def test_invalid_file_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not in a valid format"):
        convert_file_size_to_int(text)


def test_memory_limits_are_ordered_and_checked() -> None:
    assert list(get_max_memory({"disk": 100, "cpu": "1GB", 1: 5, 0: 7}).items()) == [
        (0, 7), (1, 5), ("cpu", 10**9), ("disk", 100),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Device foo is not recognized"):
        get_max_memory({"foo": 1})


@pytest.mark.parametrize("integrated", [0, 1])
def test_memory_that_the_gpu_shares_with_the_cpu_counts_once(monkeypatch: pytest.MonkeyPatch, integrated: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 200))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(is_integrated=integrated))
    limits = get_max_memory()
    assert (limits[0], "cpu" in limits) == (100, not integrated)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # Each layer takes 80 bytes, and another 80 are reserved.
    assert infer_auto_device_map(model) == {"": "disk" if integrated else "cpu"}
    assert ("cpu" in get_balanced_memory(model)) is not integrated


def test_strings_in_a_dict_of_memory_limits_become_numbers() -> None:
    limits: dict[Any, Any] = {"cpu": "30KB", 0: 7}
    get_max_memory(limits)
    assert limits == {"cpu": 30_000, 0: 7}


def test_memory_is_balanced_over_devices() -> None:
    model = ThreeLayers()
    limits = {0: 1000, 1: 1000, "cpu": 10000}
    assert get_balanced_memory(model, limits) == {0: 236 // 2 + int(1.25 * int(236 / 3)), 1: 1000, "cpu": 10000}
    assert get_balanced_memory(model, {0: 300, 1: 200, "cpu": 10}, low_zero=True) == {0: 36, 1: 200, "cpu": 10}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 88, 1: 200}, {"linear1": 1, "batchnorm": 1, "linear2": "disk"}),
        ({0: 200, "cpu": 1000}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
        ({0: 164, 1: 200, "cpu": 500}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 100, "cpu": 100}, {"": "disk"}),
        ({0: 300}, {"": 0}),
        ({0: 240, 1: 100}, {"": 0}),
        ({"cpu": 50}, {"": "disk"}),
        ({0: 63, "cpu": 500}, {"": "cpu"}),
        ({0: 64, 1: 72, 2: 100}, {"linear1": 1, "batchnorm": 2, "linear2": "disk"}),
        ({0: 70, 1: 70, 2: 200}, {"linear1": 1, "batchnorm": 2, "linear2": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore:Current model requires")
def test_three_layers_are_placed_within_the_limits(limits: Any, expected: Any) -> None:
    assert infer_auto_device_map(ThreeLayers(), limits) == expected


@pytest.mark.parametrize(
    ("limits", "classes", "tied", "expected"),
    [
        ({0: 3000, 1: 3000}, [], False,
         {"emb": 0, "h.0": 0, "h.1.a": 0, "h.1.b": 1, "h.2": 1, "h.3": 1, "ln": 1, "head": "disk"}),
        ({0: 3000, 1: 3000}, ["Block"], False,
         {"emb": 0, "h.0": 0, "h.1": 1, "h.2": 1, "h.3": 1, "ln": 1, "head": "disk"}),
        ({0: 1700, "cpu": 10000}, ["Block"], False, {"emb": 0, "ln": "cpu", "head": "cpu", "h": "cpu"}),
        ({0: 2000, 1: 2000, "cpu": 5000}, [], True,
         {"emb": 0, "head": 0, "h.0.a": 0, "h.0.b": 1, "h.1": 1, "h.2.a": 1, "h.2.b": "cpu", "h.3": "cpu",
          "ln": "cpu"}),
        ({0: 2000, 1: 900, "cpu": 900}, ["Block"], True,
         {"emb": 0, "head": 0, "h.0": 1, "h.1": "disk", "h.2": "disk", "h.3": "disk", "ln": "disk"}),
        ({0: 5000, 1: 5000}, [], True, {"": 0}),
    ],
)  # fmt: skip
def test_blocks_are_placed_within_the_limits(limits: Any, classes: list[str], tied: bool, expected: Any) -> None:
    assert infer_auto_device_map(Deep(tied=tied), limits, no_split_module_classes=classes) == expected


def test_dtypes_change_the_map() -> None:
    assert infer_auto_device_map(ThreeLayers(), {0: 100, 1: 200}, dtype="float16") == {
        "linear1": 0, "batchnorm": 1, "linear2": 1,
    }  # fmt: skip
    assert infer_auto_device_map(ThreeLayers(), {0: 200, 1: 200}, clean_result=False).keys() == {
        "linear1", "batchnorm", "linear2",
    }  # fmt: skip


def test_buffers_that_fit_no_accelerator_cause_a_warning() -> None:
    with pytest.warns(UserWarning, match="requires 40 bytes of buffer"):
        infer_auto_device_map(ThreeLayers(), {0: 200, "cpu": 1000})
    infer_auto_device_map(ThreeLayers(), {0: 200, "cpu": 1000}, offload_buffers=True)


def test_buffers_of_a_split_module_have_a_place() -> None:
    """Accelerate leaves such buffers out of the map, and its own check then rejects the map."""
    model = nn.Module()
    inner = nn.Module()
    inner.a, inner.b = nn.Linear(4, 4), nn.Linear(4, 4)
    inner.register_buffer("offset", torch.zeros(5))
    model.inner = inner
    device_map = infer_auto_device_map(model, {0: 170, 1: 500})
    assert device_map == {"inner.a": 0, "inner.b": 0, "inner.offset": 1}
    check_device_map(model, {key: value for key, value in device_map.items() if key != "inner.offset"} | {"inner": 0})


def test_fallback_fills_a_device_that_would_otherwise_stay_empty() -> None:
    model = Deep(blocks=2)
    usual = infer_auto_device_map(model, {0: 1300, 1: 5000})
    assert 0 not in usual.values()
    assert 0 in infer_auto_device_map(model, {0: 1300, 1: 5000}, fallback_allocation=True).values()


def test_verbose_prints_every_decision(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(ThreeLayers(), {0: 200, 1: 200}, verbose=True)
    said = capsys.readouterr().out
    assert "batchnorm (72 B): 36 B left on 0" in said
    assert "linear2 is placed on 1" in said


def test_incomplete_device_maps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not give any device .*: batchnorm.weight"):
        check_device_map(ThreeLayers(), {"linear1": 0, "linear2": 0})
    with pytest.warns(UserWarning, match="do not match any submodules"):
        check_device_map(ThreeLayers(), {"": 0, "zip": 1})


def test_device_maps_are_simplified() -> None:
    assert clean_device_map({"a.0": 0, "a.1": 0, "b": 1}) == {"a": 0, "b": 1}
    assert clean_device_map({"a.0": 0, "a.1": 0, "b": 0}) == {"": 0}
    assert clean_device_map({"a.0": 0, "a.1": 1, "a.1.x": 1}) == {"a.0": 0, "a.1": 1}  # Accelerate keeps a.1.x.


def test_parameters_are_tied_again() -> None:
    model = Deep(tied=True)
    tied = find_tied_parameters(model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    retie_parameters(model, tied)
    assert model.head.weight is model.emb.weight


def test_time_is_linear_in_the_number_of_modules() -> None:
    def seconds(count: int) -> float:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(count)])
        total = 16 * count
        times = []
        for _ in range(3):
            begin = time.process_time()
            infer_auto_device_map(model, dict.fromkeys(range(8), total // 9) | {"cpu": 2 * total})
            times.append(time.process_time() - begin)
        return min(times)

    seconds(1000)
    assert seconds(16000) < 10 * seconds(4000)  # A quadratic algorithm would take 16 times as long.


def test_dispatching_calls_a_replaced_check(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers replaces the check while it loads models whose maps omit parameters on purpose.
    monkeypatch.setattr(big_modeling, "check_device_map", lambda *_: None)
    dispatch_model(ThreeLayers(), {"linear1": "cpu"})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="does not give any device"):
        dispatch_model(ThreeLayers(), {"linear1": "cpu"})
