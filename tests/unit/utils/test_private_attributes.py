"""Private attributes and variables of Accelerate that other libraries use."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, PartialState, hooks
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.state import reset_shared_state
from notebook_accelerate.strategies.context_parallel import make_attention_causal
from notebook_accelerate.strategies.ddp_strategy import DDPStrategy
from notebook_accelerate.tracking.vendors import ClearMLTracker
from notebook_accelerate.utils import modeling


@pytest.fixture(autouse=True)
def new_state() -> Iterator[None]:
    reset_shared_state()
    yield
    reset_shared_state()


def test_names_of_modules() -> None:
    names = hooks._accelerate_added_attributes
    assert names == ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]
    assert "_accelerate_added_attributes" not in hooks.__all__
    assert modeling.logger is logging.getLogger("accelerate.utils.modeling")
    assert modeling._get_proper_dtype("torch.float16") is modeling._get_proper_dtype(torch.float16) is torch.float16


def test_the_backend_of_the_environments_ranks_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PartialState(cpu=True)
    assert state._prepare_backend(cpu=True) == (None, DistributedType.NO)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert state._prepare_backend(cpu=True) == ("gloo", DistributedType.MULTI_CPU)
    assert state._prepare_backend(True, False, "mpi") == ("mpi", DistributedType.MULTI_CPU)


def test_values_of_an_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    assert (accelerator.native_amp, accelerator.fp8_enabled, accelerator.has_fp8_handler) == (False, False, False)
    assert accelerator.delayed_fp8_autocast is False
    for name in ("ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler"):
        assert getattr(accelerator, name) is None
    reset_shared_state()
    assert Accelerator(cpu=True, mixed_precision="bf16").native_amp


class Attention(nn.Module):
    """A model whose attention is named as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Identity()


def test_models_are_prepared_for_context_parallelism_by_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, models = Accelerator(cpu=True), [Attention(), Attention()]
    monkeypatch.setattr(accelerator.state, "parallelism_config", SimpleNamespace(cp_enabled=True))
    accelerator.prepare(models[0])
    assert len(models[0].self_attn._forward_pre_hooks) == 1
    # Axolotl replaces the method with one that leaves the model as it is.
    monkeypatch.setattr(Accelerator, "_prepare_cp", lambda _, *args: args)
    for prepare in (accelerator.prepare, accelerator.prepare_model):
        prepare(models[1])
    assert not models[1].self_attn._forward_pre_hooks


@pytest.mark.parametrize(
    ("config", "kind"),
    [({"sliding_window": 8}, "sliding_attention"), ({"layer_types": ["full_attention", "linear_attention"]}, "linear")],
)
def test_masks_that_context_parallelism_would_drop_are_refused(config: dict[str, Any], kind: str) -> None:
    model = Attention()
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=f"has layers of the kind {kind}"):
        make_attention_causal(model)


def test_the_check_of_device_maps_can_be_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    model.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    strategy = Accelerator(cpu=True).strategy
    with pytest.raises(ValueError, match="set ACCELERATE_BYPASS_DEVICE_MAP=true"):
        DDPStrategy.wrap_model(strategy, model)  # type: ignore[arg-type]
    monkeypatch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    assert DDPStrategy.wrap_model(strategy, model) is model  # type: ignore[arg-type]


def test_variables_name_the_project_and_the_task_of_clearml(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        """A stand-in for ClearML, which need not be installed."""

        current_task = staticmethod(lambda: None)
        init = staticmethod(lambda **settings: settings)

    clearml = ModuleType("clearml")
    clearml.Task = Task  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "clearml", clearml)
    assert ClearMLTracker("run")._open() == {"project_name": "run", "task_name": "run"}
    monkeypatch.setenv("CLEARML_PROJECT", "p")
    monkeypatch.setenv("CLEARML_TASK", "t")
    assert ClearMLTracker("run")._open() == {"project_name": "p", "task_name": "t"}
    assert ClearMLTracker("run", task_name="mine")._open() == {"project_name": "p", "task_name": "mine"}
