"""Quantization with bitsandbytes' CPU kernels, and memory estimates."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from notebook_accelerate import cpu_offload, dispatch_model, init_empty_weights
from notebook_accelerate.big_modeling import estimate_memory
from notebook_accelerate.big_modeling.estimate import measure_device_map
from notebook_accelerate.big_modeling.module_tensors import name_of_scales
from notebook_accelerate.big_modeling.quantization import keep_8bit, make_offloadable_below, offloaded_modules
from notebook_accelerate.utils import (
    BnbQuantizationConfig,
    has_4bit_bnb_layers,
    load_and_quantize_model,
    load_checkpoint_in_model,
    load_offloaded_weight,
)
from notebook_accelerate.utils.bnb import quantize_and_offload_8bit, replace_with_bnb_layers
from notebook_accelerate.utils.imports import is_bnb_available
from notebook_accelerate.widgets.memory_panel import MemoryPanel
from tests.unit.big_modeling.models import Deep

needs_bitsandbytes = pytest.mark.skipif(not is_bnb_available(), reason="bitsandbytes is not installed")
EIGHT: dict[str, Any] = {"load_in_8bit": True, "torch_dtype": torch.float32}
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"}
FP4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32", "bnb_4bit_use_double_quant": True}


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 10))


@needs_bitsandbytes
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_modules_on_disk_compute_in_the_requested_dtype(tmp_path: Path, empty: bool, dtype: torch.dtype) -> None:
    x, plain, without_weights = _saved(tmp_path)
    model, location = (without_weights, tmp_path) if empty else (_network().eval(), None)
    config = BnbQuantizationConfig(**NF4, torch_dtype=dtype)
    quantized: Any = load_and_quantize_model(model, config, location, device_map=AWAY, offload_folder=tmp_path / "away")
    assert quantized[3].weight.is_meta
    assert quantized[3].weight.dtype == dtype
    with torch.no_grad():
        assert quantized[3](torch.ones(1, 512, dtype=dtype)).dtype == dtype
        assert ((quantized(x.to(dtype)).float() - plain).norm() / plain.norm()).item() < 0.2


@needs_bitsandbytes
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("how", "tolerance"), [(EIGHT, 0.02), (NF4, 0.15), (FP4, 0.18)], ids=["8", "nf4", "fp4"])
def test_outputs_are_near_the_full_model(tmp_path: Path, empty: bool, how: Any, tolerance: float) -> None:
    model, x = _network().eval(), torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    plain = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    if empty:
        with init_empty_weights():
            model = _network().eval()
    quantized = load_and_quantize_model(
        model, BnbQuantizationConfig(**how), tmp_path if empty else None, device_map={"": "cpu"}
    )
    assert type(quantized[0]).__name__ == ("Linear8bitLt" if how is EIGHT else "Linear4bit")
    assert type(quantized[4]) is nn.Linear, "the head must not be quantized"
    assert has_4bit_bnb_layers(quantized) == (how is not EIGHT)
    assert ((quantized(x) - plain).norm() / plain.norm()).item() < tolerance


@needs_bitsandbytes
def test_skipped_modules_are_not_quantized() -> None:
    config = BnbQuantizationConfig(**NF4, skip_modules=["0"], keep_in_fp32_modules=["3"])
    model = load_and_quantize_model(_network(), config, device_map={"": "cpu"})
    assert [type(layer).__name__ for layer in model] == ["Linear", "LayerNorm", "ReLU", "Linear", "Linear4bit"]


AWAY = {"0": "cpu", "1": "cpu", "2": "cpu", "3": "disk", "4": "cpu"}


def _saved(folder: Path) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Save a model's weights in a folder. Return an input, the model's output, and the model without weights."""
    model, x = _network().eval(), torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    save_file(model.state_dict(), folder / "model.safetensors")
    with init_empty_weights():
        return x, model(x).detach(), _network().eval()


def _is_near(model: nn.Module, x: torch.Tensor, plain: torch.Tensor, tolerance: float) -> None:
    with torch.no_grad():
        for _ in range(3):
            assert ((model(x) - plain).norm() / plain.norm()).item() < tolerance


@needs_bitsandbytes
def test_modules_on_disk_stay_unquantized_in_4_bits_and_the_others_are_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, plain, empty = _saved(tmp_path)
    with pytest.raises(ValueError, match="pass offload_folder="):
        load_and_quantize_model(empty, BnbQuantizationConfig(**NF4), tmp_path, device_map=AWAY)
    with caplog.at_level(logging.WARNING):
        quantized: Any = load_and_quantize_model(
            empty, BnbQuantizationConfig(**NF4), tmp_path, device_map=AWAY, offload_folder=tmp_path / "away"
        )
    assert "3 will not be quantized: they are offloaded" in caplog.text
    assert type(quantized[3]) is nn.Linear
    assert quantized[3].weight.is_meta
    assert type(quantized[0]) is not nn.Linear
    _is_near(quantized, x, plain, 0.15)


@needs_bitsandbytes
@pytest.mark.parametrize("empty", [False, True])
def test_modules_on_disk_are_kept_in_8_bits(tmp_path: Path, empty: bool, caplog: pytest.LogCaptureFixture) -> None:
    x, plain, hollow = _saved(tmp_path)
    model, weights = (hollow, tmp_path) if empty else (_network().eval(), None)
    away = tmp_path / "away"
    quantized: Any = load_and_quantize_model(
        model, BnbQuantizationConfig(**EIGHT), weights, device_map=AWAY, offload_folder=away
    )
    assert "will not be quantized" not in caplog.text
    assert isinstance(quantized[3], type(quantized[0]))
    assert quantized[3].weight.is_meta
    assert quantized[3].SCB.is_meta
    assert (away / "3.weight.dat").stat().st_size == 256 * 512, "each number takes one byte"
    assert (away / "3.SCB.dat").stat().st_size == 256 * 4
    whole = load_and_quantize_model(_network().eval(), BnbQuantizationConfig(**EIGHT), device_map={"": "cpu"})
    with torch.no_grad():
        expected = whole(x)
    _is_near(quantized, x, plain, 0.02)
    _is_near(quantized, x, expected, 1e-6)
    x.requires_grad_(True)
    quantized(x).sum().backward()
    assert x.grad is not None
    assert x.grad.norm() > 0


@needs_bitsandbytes
def test_a_checkpoint_is_loaded_into_offloaded_layers_of_8_bits(tmp_path: Path) -> None:
    x, plain, model = _saved(tmp_path)
    replace_with_bnb_layers(model, BnbQuantizationConfig(**EIGHT), modules_to_not_convert=["0", "4"])
    away = tmp_path / "away"
    load_checkpoint_in_model(model, tmp_path, AWAY, offload_folder=away, offload_8bit_bnb=True, strict=True)
    assert json.loads((away / "index.json").read_text())["3.weight"] == {"dtype": "int8", "shape": [256, 512]}
    _is_near(dispatch_model(model, AWAY, offload_dir=away), x, plain, 0.02)


@needs_bitsandbytes
def test_layers_of_8_bits_are_loaded_from_main_memory(tmp_path: Path) -> None:
    x, plain, empty = _saved(tmp_path)
    replace_with_bnb_layers(empty, BnbQuantizationConfig(**EIGHT), modules_to_not_convert=["0", "4"])
    on_gpu = {"0": 0, "1": 0, "2": 0, "3": "cpu", "4": 0}
    assert offloaded_modules(on_gpu) == ["3"]
    assert offloaded_modules({**on_gpu, "0": "disk"}) == ["0", "3"]
    assert offloaded_modules(dict.fromkeys(on_gpu, "cpu")) == []
    make_offloadable_below(empty, ["3"])
    state = load_file(tmp_path / "model.safetensors")
    keep_8bit(empty, "3.weight", state.pop("3.weight"), None, {})
    assert empty[3].weight.dtype == torch.int8  # type: ignore[index]
    empty.load_state_dict(state, strict=False, assign=True)
    cpu_offload(empty, torch.device("cpu"))
    assert empty[3].SCB.is_meta  # type: ignore[index]
    _is_near(empty, x, plain, 0.02)


@needs_bitsandbytes
def test_a_checkpoint_in_8_bits_is_loaded_into_offloaded_layers(tmp_path: Path) -> None:
    x, plain, empty = _saved(tmp_path)
    from notebook_accelerate.big_modeling.eight_bit import quantize_8bit  # This module needs bitsandbytes.

    state = load_file(tmp_path / "model.safetensors")
    state["3.weight"], state["3.SCB"] = quantize_8bit(state["3.weight"])
    (tmp_path / "eight").mkdir()
    save_file(state, tmp_path / "eight" / "model.safetensors")
    replace_with_bnb_layers(empty, BnbQuantizationConfig(**EIGHT), modules_to_not_convert=["0", "4"])
    load_checkpoint_in_model(
        empty, tmp_path / "eight", AWAY, tmp_path / "away", "float32", offload_8bit_bnb=True, strict=True
    )
    assert empty[3].SCB.dtype == torch.float32  # type: ignore[index]
    _is_near(dispatch_model(empty, AWAY, offload_dir=tmp_path / "away"), x, plain, 0.02)


@needs_bitsandbytes
def test_weights_in_8_bits_are_written_with_their_scales(tmp_path: Path) -> None:
    model, index = _network(), {}  # type: ignore[var-annotated]
    weight = model[0].weight.detach().clone()
    config = BnbQuantizationConfig(**EIGHT)
    model = replace_with_bnb_layers(model, config, modules_to_not_convert=["3", "4"])
    quantize_and_offload_8bit(model, weight, "0.weight", torch.float32, tmp_path, index, None)
    assert index["0.weight"] == {"dtype": "int8", "shape": [512, 256]}
    whole = load_offloaded_weight(tmp_path / "0.weight.dat", index["0.weight"]).float()
    scales = load_offloaded_weight(tmp_path / "0.SCB.dat", index["0.SCB"])
    assert model[0].weight.is_meta
    torch.testing.assert_close(whole * scales[:, None] / 127, weight, atol=scales.max().item() / 127, rtol=0)


def test_without_bitsandbytes_the_error_names_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # Python treats a module as missing if its entry is None.
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        load_and_quantize_model(_network(), BnbQuantizationConfig(load_in_8bit=True))


def test_the_parts_of_training_are_estimated() -> None:
    model = nn.Linear(100, 50)
    one = estimate_memory(model, inputs=torch.zeros(8, 100))
    size = (100 * 50 + 50) * 4
    assert one.training["weights"] == one.training["gradients"] == size
    assert one.training["optimizer"] == 2 * size
    assert one.training["activations"] == 8 * 100 * 4, "a linear layer keeps its input"
    assert one.training_total == 4 * size + 3200
    half = estimate_memory(model, dtype="bfloat16", optimizer="sgd", strategy="fsdp", num_processes=2)
    assert half.training["weights"] == size // 4
    assert half.training["optimizer"] == 0
    assert estimate_memory(model, strategy="ddp", num_processes=2).training["strategy"] == size
    assert next(model.parameters()).device.type == "cpu"


class Scaled(nn.Parameter):
    """A parameter whose constructor takes a second argument, like those of DTensor and quantized tensors."""

    def __new__(cls, data: torch.Tensor, scale: float) -> Scaled:
        made: Scaled = super().__new__(cls, data)  # type: ignore[assignment]
        made.scale = scale
        return made


def test_parameters_of_another_class_are_estimated() -> None:
    plain, scaled = nn.Linear(4, 4), nn.Linear(4, 4)
    scaled.weight = Scaled(torch.ones(4, 4), 2.0)
    assert estimate_memory(scaled).training == estimate_memory(plain).training


def test_inference_is_estimated() -> None:
    model = nn.Linear(100, 50)
    size = (100 * 50 + 50) * 4
    one = estimate_memory(model, inputs=torch.zeros(8, 100))
    assert one.inference == {"weights": size, "activations": 2 * 8 * 50 * 4, "buffers": 0, "strategy": 0}
    sharded = estimate_memory(lambda: Deep(width=32), strategy="fsdp", num_processes=4, sequence_length=4)
    whole = estimate_memory(lambda: Deep(width=32), sequence_length=4)
    assert sharded.inference["weights"] == whole.inference["weights"] // 4
    assert sharded.inference["activations"] == whole.inference["activations"]
    assert sharded.inference["strategy"] == 2 * _bytes(Deep(width=32).h[0]), "two blocks are gathered"
    halved = estimate_memory(lambda: Deep(width=32), strategy="ddp", num_processes=4, degrees={"cp": 2}, **TOKENS)
    assert halved.inference["activations"] == whole.inference["activations"] // 2


TOKENS: dict[str, Any] = {"sequence_length": 4}


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def test_replicas_of_shards_divide_by_the_shards_only() -> None:
    kinds = {"strategy": "fsdp", "num_processes": 8}
    model = nn.Linear(100, 50)
    hybrid = estimate_memory(model, **kinds, degrees={"dp_replicate": 2, "dp_shard": 4}).training
    assert hybrid == estimate_memory(model, strategy="fsdp", num_processes=4).training
    with_sequences = estimate_memory(model, **kinds, degrees={"dp_shard": 2, "cp": 4}).training
    assert with_sequences == estimate_memory(model, **kinds).training, "cp also shards weights"


def test_tensor_parallelism_divides_the_modules_of_the_plan() -> None:
    model: Any = nn.Sequential(nn.Linear(16, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 16, bias=False))
    matrix, norm = 16 * 64 * 4, 2 * 64 * 4
    every = estimate_memory(model, strategy="tp", num_processes=4)
    assert every.training["weights"] == every.training["gradients"] == 2 * matrix // 4 + norm
    assert every.training["optimizer"] == 2 * every.training["weights"]
    model.tp_plan = {"0": "colwise"}
    assert estimate_memory(model, strategy="tp", num_processes=4).inference["weights"] == matrix // 4 + matrix + norm
    both = estimate_memory(model, strategy="fsdp", num_processes=4, degrees={"tp": 2, "dp_shard": 2})
    assert both.training["weights"] == (matrix // 2 + matrix + norm) // 2


def test_expert_parallelism_divides_experts() -> None:
    experts, norm = 4 * 8 * 16 * 4, 2 * 8 * 4
    model = nn.Sequential(nn.LayerNorm(8), nn.Module())
    model[1].experts = nn.Module()
    model[1].experts.up = nn.Parameter(torch.zeros(4, 8, 16))
    assert estimate_memory(model, strategy="ep", num_processes=4).training["weights"] == experts // 4 + norm
    both = estimate_memory(model, strategy="fsdp", num_processes=4, degrees={"ep": 2, "dp_shard": 2})
    assert both.training["weights"] == (experts // 2 + norm) // 2


def test_the_largest_pipeline_stage_determines_the_estimate() -> None:
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(5)], nn.Linear(10, 100, bias=False))
    layer = 400
    two = estimate_memory(model, strategy="pp", num_processes=2, inputs=torch.zeros(6, 10))
    assert two.training["weights"] == 10 * layer, "the largest stage has only the large layer"
    three = estimate_memory(model[:5], strategy="pp", num_processes=3, inputs=torch.zeros(6, 10))
    assert three.training["weights"] == three.inference["weights"] == 2 * layer
    assert three.training["activations"] == 5 * 6 * 10 * 4 // 3
    replicas = estimate_memory(model, strategy="megatron_distributed_optimizer", num_processes=8, degrees={"pp": 2})
    assert replicas.training["optimizer"] == 2 * 10 * layer // 4
    assert replicas.training["strategy"] == 0


def test_offloaded_parts_are_in_main_memory() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    everything = dict.fromkeys(("weights", "gradients", "optimizer"), "cpu")
    found = estimate_memory(model, strategy="fsdp", num_processes=2, offload=everything)
    assert found.main_memory == {"weights": 400, "gradients": 400, "optimizer": 800}
    assert found.main_memory_total == 1600
    assert found.training_total == found.training["strategy"] == 2 * 400
    assert found.inference["weights"] == 0
    assert "in this machine's memory: weights 400" in str(found)
    assert "in this machine" in MemoryPanel(found).html()
    on_disk = estimate_memory(model, strategy="zero2", num_processes=2, offload={"optimizer": "disk"})
    assert on_disk.main_memory == {}
    assert on_disk.training["optimizer"] == 0
    assert on_disk.training["weights"] == 800


def test_estimated_activations_equal_those_saved_by_autograd() -> None:
    model = Deep(width=32)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    kept: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens)
    estimated = estimate_memory(lambda: Deep(width=32), batch_size=4, sequence_length=8).training["activations"]
    assert estimated == pytest.approx(sum(kept.values()), rel=0.02), output.shape


@pytest.mark.parametrize(
    ("wrong", "message"), [({"optimizer": "adma"}, "adamw"), ({"strategy": "x"}, "fsdp"), ({"num_processes": 0}, "1"),
     ({"degrees": {"dp": 2}}, "dp_replicate"), ({"degrees": {"tp": 3}, "num_processes": 4}, "tp=3 = 3"),
     ({"offload": {"buffers": "cpu"}}, "weights, gradients"), ({"offload": {"weights": "tape"}}, "'cpu' or 'disk'")]
)  # fmt: skip
def test_unknown_arguments_of_estimates_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(nn.Linear(2, 2), **wrong)


def test_the_panel_shows_parts_devices_and_offloaded_tensors() -> None:
    with init_empty_weights():
        model = Deep()
    drawing = measure_device_map(model, {"emb": 0, "h": "cpu", "ln": 0, "head": "disk"}, max_memory={0: 500})
    assert drawing.moves == 4 * 880 + 800
    assert drawing.overfull() == ["0"]
    panel = MemoryPanel(estimate_memory(model, sequence_length=4), drawing, available=10_000)
    assert "does not fit" in panel.html()
    assert "more than it holds" in panel.html()
    assert "4.32 kB move" in panel.html()
    assert "device 0 exceeds its limit" in panel.text()
    assert panel.widget.value == panel.html()


def test_scales_are_named_after_the_last_part_of_their_weights_name() -> None:
    assert name_of_scales("weight_net.fc.weight") == "weight_net.fc.SCB"
    assert name_of_scales("weight") == "SCB"
    assert name_of_scales("weight_net.fc.bias") == "weight_net.fc.bias"
