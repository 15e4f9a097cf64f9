"""fp8 with torchao, which is emulated on the CPU, and errors for the libraries that need a GPU."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator
from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.config.low_precision import AORecipeKwargs, MSAMPRecipeKwargs
from notebook_accelerate.precision import make_precision
from notebook_accelerate.precision.fp8 import (
    convert_model,
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
    has_transformer_engine_layers,
)

pytest.importorskip("torchao")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 24), nn.Linear(24, 4))


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if isinstance(module, nn.Linear)]


def test_only_inner_linear_layers_are_converted() -> None:
    model = net()
    weights = [id(parameter) for parameter in model.parameters()]
    assert find_first_last_linear_layers(model) == ("0", "4")
    assert [filter_first_and_last_linear_layers(model, name) for name in "01234"] == [False, False, True, False, False]
    assert filter_linear_layers(nn.Linear(16, 16), "x")
    assert not filter_linear_layers(nn.Linear(16, 16), "x", last_layer_name="x")
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model)
    assert kinds(model) == ["Linear", "Float8Linear", "Linear", "Linear"]
    assert has_ao_layers(model)
    assert [id(parameter) for parameter in model.parameters()] == weights
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)


def test_a_custom_filter_selects_layers() -> None:
    model = net()
    recipe = AORecipeKwargs(module_filter_func=lambda _, name: name == "0")
    make_precision("fp8", "cpu", fp8_recipe=recipe).wrap_model(model)
    assert kinds(model) == ["Float8Linear", "Linear", "Linear", "Linear"]


def test_training_follows_full_precision() -> None:
    model, reference = net(), net()
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert accelerator.fp8_backend == FP8BackendType.AO
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    inputs, labels = torch.randn(32, 16), torch.randint(0, 4, (32,))
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(prepared(inputs), labels)
        assert loss.dtype is torch.float32
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(reference(inputs), labels)
        expected.backward()
        plain.step()
        plain.zero_grad()
        # One of the four layers computes in e4m3, whose mantissa has only three bits.
        assert loss.item() == pytest.approx(expected.item(), rel=0.01)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert kinds(accelerator.unwrap_model(prepared)).count("Float8Linear") == 1
    assert "Float8Linear" in kinds(copy.deepcopy(model))


def test_preparing_twice_converts_once() -> None:
    model = net()
    for _ in range(2):
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
        prepared = accelerator.prepare(model)
    assert kinds(prepared).count("Float8Linear") == 1
    assert prepared(torch.randn(2, 16)).shape == (2, 4)


def test_the_library_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_precision("fp8", "cpu").name == "fp8"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "nothing")
    with pytest.raises(ValueError, match=r"ACCELERATE_FP8_BACKEND='nothing' is not allowed; allowed: ao, te, msamp"):
        make_precision("fp8", "cpu")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_missing_libraries_are_named_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="MS-AMP is not installed"):
        make_precision("fp8", "cuda", fp8_recipe=MSAMPRecipeKwargs())
    with pytest.raises(ImportError, match=r"pip install 'transformer_engine\[pytorch\]'"):
        convert_model(net())
    assert not has_transformer_engine_layers(net())
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.raises(ValueError, match="this rank's device is cpu"):
        make_precision("fp8", "cpu")
