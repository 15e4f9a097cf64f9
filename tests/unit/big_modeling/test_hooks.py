"""Hooks, and functions for single tensors. The expected values were observed with Accelerate 1.15."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import dispatch_model, hooks
from notebook_accelerate.big_modeling import attach_layerwise_casting_hooks, cpu_offload_with_hook
from notebook_accelerate.utils import align_module_device, has_offloaded_params, set_module_tensor_to_device
from tests.unit.big_modeling.models import ThreeLayers, devices

CPU = torch.device("cpu")


class PlusOne(hooks.ModelHook):
    """Adds one to the input before the forward pass, and to the output after it."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1,), kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return output + 1


def _hooked(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def test_hooks_are_called_replaced_appended_and_removed() -> None:
    model, x = ThreeLayers().eval(), torch.randn(2, 3)
    plain, once, twice = model(x), model(x + 1) + 1, model(x + 2) + 2
    hooks.add_hook_to_module(model, PlusOne())
    assert torch.equal(model(x), once)
    assert model.forward.__name__ == "forward"
    hooks.add_hook_to_module(model, PlusOne())
    assert torch.equal(model(x), once)
    hooks.add_hook_to_module(model, PlusOne(), append=True)
    assert isinstance(model._hf_hook, hooks.SequentialHook)
    torch.testing.assert_close(model(x), twice)
    hooks.remove_hook_from_module(model)
    assert torch.equal(model(x), plain)
    assert not {"_hf_hook", "_old_forward"} & set(vars(model))


def test_a_copy_has_its_own_hook_and_hooked_models_are_pickled() -> None:
    model = hooks.add_hook_to_module(nn.Linear(2, 2), PlusOne())
    other: Any = copy.deepcopy(model)
    other.weight.data.zero_()
    x = torch.ones(1, 2)
    assert not torch.equal(model(x), other(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_a_hook_can_disable_gradients() -> None:
    class Frozen(hooks.ModelHook):
        no_grad = True

    model = hooks.add_hook_to_module(nn.Linear(2, 2), Frozen())
    assert not model(torch.ones(1, 2)).requires_grad


def test_hooks_are_attached_to_the_expected_modules() -> None:
    model = ThreeLayers()
    hooks.attach_execution_device_hook(model, "cpu")
    assert _hooked(model) == {"", "linear1", "batchnorm", "linear2"}
    model = ThreeLayers()
    hooks.attach_align_device_hook(model, execution_device=CPU)
    assert _hooked(model) == {"linear1", "batchnorm", "linear2"}
    model = ThreeLayers()
    hooks.attach_align_device_hook_on_blocks(model, execution_device=CPU)
    assert _hooked(model) == {""}
    model = ThreeLayers()
    hooks.attach_align_device_hook_on_blocks(
        model, execution_device={"linear1": CPU, "linear2": CPU}, offload={"linear1": True, "linear2": False}
    )
    assert _hooked(model) == {"", "linear1", "linear2"}
    assert has_offloaded_params(model.linear1)
    assert not has_offloaded_params(model.linear2)
    hooks.remove_hook_from_submodules(model)
    assert _hooked(model) == set()


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloading_hooks_keep_the_results_and_can_be_removed(offload_buffers: bool) -> None:
    model, x = ThreeLayers().eval(), torch.randn(2, 3)
    plain, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks.attach_align_device_hook(model, execution_device=CPU, offload=True, offload_buffers=offload_buffers)
    where = devices(model)
    assert where["linear1.weight"] == "meta"
    assert where["batchnorm.running_mean"] == ("meta" if offload_buffers else "cpu")
    for _ in range(2):
        assert torch.equal(model(x), plain)
        assert devices(model) == where
    with align_module_device(model.linear1):
        assert torch.equal(model.linear1.weight, state["linear1.weight"])
    hooks.remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_layerwise_casting_changes_storage_and_computes_in_another_dtype() -> None:
    model, x = ThreeLayers().eval(), torch.randn(2, 3)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["linear1.weight"] == torch.bfloat16
    assert dtypes["batchnorm.weight"] == torch.float32
    assert model(x).dtype == torch.float32
    assert model.linear1.weight.dtype == torch.bfloat16
    other = nn.Sequential(nn.Linear(3, 3), nn.Embedding(3, 3))
    attach_layerwise_casting_hooks(
        other, torch.bfloat16, torch.float32, skip_modules_pattern="^0", skip_modules_classes=(nn.Embedding,)
    )
    assert _hooked(other) == set()


class Masked(nn.Module):
    """Records the devices of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: dict[str, str] = {}

    def forward(self, x: Any, mask: Any = None, cache: Any = None) -> None:
        self.seen = {"x": str(x.device), "mask": str(mask.device), "cache": str(cache[0].device)}


@pytest.mark.parametrize("skipped", [None, "cache", ["mask", "cache"]])
@pytest.mark.parametrize("how", ["hook", "dispatch"])
def test_skipped_keys_stay_on_their_device(skipped: Any, how: str) -> None:
    inner = Masked()
    if how == "hook":
        model: nn.Module = hooks.add_hook_to_module(
            inner, hooks.AlignDevicesHook(execution_device="meta", skip_keys=skipped)
        )
    else:
        model = dispatch_model(inner, {"": "meta"}, skip_keys=skipped, force_hooks=True)
    model(torch.ones(2), mask=torch.ones(2), cache=[torch.ones(2)])
    stays = {"cache"} if skipped == "cache" else set(skipped or [])
    assert inner.seen == {key: "cpu" if key in stays else "meta" for key in ("x", "mask", "cache")}


class Told(nn.Linear):
    """A linear layer that logs its moves to devices and its forward passes."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(2, 2)
        self.name, self.log = name, log

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"{self.name} to {args[0]}")
        return super().to(*args, **kwargs)

    def forward(self, x: Any) -> Any:
        self.log.append(f"{self.name} computes")
        return super().forward(x)


def test_the_previous_model_is_offloaded_first() -> None:
    log: list[str] = []
    first, first_hook = cpu_offload_with_hook(Told("first", log), CPU)
    second, second_hook = cpu_offload_with_hook(Told("second", log), CPU, prev_module_hook=first_hook)
    assert log == ["first to cpu", "second to cpu"]
    log.clear()
    second(first(torch.ones(1, 2)))
    assert log == ["first to cpu", "first computes", "first to cpu", "second to cpu", "second computes"]
    assert second_hook.hook.prev_module_hook is first_hook
    other, _ = cpu_offload_with_hook(Told("other", log), "meta", prev_module_hook=first_hook)
    log.clear()
    other(torch.ones(1, 2))
    assert log == ["other to meta", "other computes"], "the first model is not on that device, so nothing is offloaded"


def test_models_can_be_offloaded_by_hand() -> None:
    first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), CPU)
    second, hook = cpu_offload_with_hook(nn.Linear(2, 2), CPU, prev_module_hook=first_hook)
    second(first(torch.ones(1, 2)))
    hook.offload()
    hook.remove()
    assert _hooked(second) == set()


def test_a_module_tensor_can_be_set() -> None:
    model = ThreeLayers()
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named foo"):
        set_module_tensor_to_device(model, "linear1.foo", "cpu")
    with pytest.raises(AttributeError, match="zip"):
        set_module_tensor_to_device(model, "zip.weight", "cpu")
    set_module_tensor_to_device(model, "linear1.weight", "meta")
    with pytest.raises(ValueError, match="is on the meta device, we need a `value`"):
        set_module_tensor_to_device(model, "linear1.weight", "cpu")
    with pytest.raises(ValueError, match="this looks incorrect"):
        set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(5, 5))
    set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(4, 3, dtype=torch.float16))
    assert model.linear1.weight.dtype == torch.float32
    assert model.linear1.weight.requires_grad
    set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(4, 3), dtype=torch.bfloat16)
    assert model.linear1.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(model, "batchnorm.num_batches_tracked", "cpu", value=torch.tensor(3.5))
    assert model.batchnorm.num_batches_tracked.item() == 3
