"""Models may be compiled, as a whole or in parts, when their states are saved or loaded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from notebook_accelerate import Accelerator, load_checkpoint_and_dispatch, load_checkpoint_in_model
from notebook_accelerate.utils import extract_model_from_parallel

HOW = ["plain", "whole", "in parts", "in place"]


class Net(nn.Module):
    """A model whose head shares its weight with the encoder's first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.encoder[0].weight

    def forward(self, x: Any) -> Any:
        return self.head(torch.relu(self.encoder(x)))


def _net(how: str) -> Any:
    net: Any = Net()
    if how == "in parts":
        net.encoder[1] = torch.compile(net.encoder[1], backend="eager")
    elif how == "in place":
        net.compile(backend="eager")
    return torch.compile(net, backend="eager") if how == "whole" else net


def _weights(net: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in net.parameters()]


def _same(net: Any, weights: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(net.parameters(), weights, strict=True))


@pytest.mark.parametrize(("saved", "loaded"), itertools.product(HOW, HOW))
@pytest.mark.parametrize("safe", [True, False])
def test_states_load_into_compiled_and_plain_models(tmp_path: Path, saved: str, loaded: str, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    source = _net(saved)
    averaged = AveragedModel(source)
    prepared = accelerator.prepare(source)
    accelerator.register_for_checkpointing(averaged)
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    accelerator.save_model(prepared, str(tmp_path / "model"), safe_serialization=safe)
    weights = _weights(source)

    again = Accelerator(cpu=True)
    target, other = _net(loaded), _net(loaded)
    copy = AveragedModel(_net(loaded))
    again.prepare(target)
    again.register_for_checkpointing(copy)
    again.load_state(str(tmp_path / "state"))
    assert _same(target, weights)
    assert _same(copy, weights)
    load_checkpoint_in_model(other, tmp_path / "model", strict=True)
    assert _same(other, weights)


def test_the_names_in_files_match_accelerate(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(_net("whole"))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(prepared, str(tmp_path / "model"))
    plain = {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "head.bias"}
    assert set(load_file(tmp_path / "state" / "model.safetensors")) == {f"_orig_mod.{name}" for name in plain}
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == plain, (
        "models that are not compiled have the same names"
    )
    assert set(accelerator.get_state_dict(prepared)) == {*plain, "head.weight"}


@pytest.mark.parametrize("how", ["plain", "in parts"])
def test_weights_of_a_compiled_model_are_offloaded(tmp_path: Path, how: str) -> None:
    source, x = Net(), torch.randn(2, 4)
    names = {f"_orig_mod.{name}": each for name, each in source.state_dict().items()}
    torch.save(names, tmp_path / "pytorch_model.bin")
    model = load_checkpoint_and_dispatch(
        _net(how), tmp_path, {"encoder": "disk", "head": "disk"}, offload_folder=tmp_path / "off", strict=True
    )
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(torch.compile(source, backend="eager"), str(tmp_path / "safe"))
    other = load_checkpoint_and_dispatch(
        _net(how), tmp_path / "safe", {"encoder": "disk", "head": "disk"}, offload_folder=tmp_path / "other"
    )
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), source(x))
            assert torch.equal(other(x), source(x))


def test_a_compiled_module_inside_other_wrappers_is_found() -> None:
    inner = Net()
    compiled = torch.compile(inner, backend="eager")
    wrapped = nn.DataParallel(compiled)
    assert extract_model_from_parallel(wrapped) is compiled
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is inner
    outer = extract_model_from_parallel(torch.compile(nn.DataParallel(inner), backend="eager"))
    assert outer._orig_mod is inner
