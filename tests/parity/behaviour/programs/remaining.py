"""Functions and classes that are rarely used: checks of packages, launch environments, hooks, internals of loaders."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from accelerate import hooks, utils
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accelerate.optimizer import patch_optimizer_step
from torch import nn

from tests.parity.behaviour.programs._parts import model, raised

INPUTS = torch.arange(6.0).view(2, 3)
_PROBES = """
is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available is_bitsandbytes_multi_backend_available
is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available is_datasets_available
is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
is_import_timer_available is_ipex_available is_lomo_available is_matplotlib_available is_megatron_lm_available
is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available is_neuron_available
is_pandas_available is_peft_available is_pippy_available is_pynvml_available is_pytest_available is_rocm_available
is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available is_tensorboard_available
is_timm_available is_torchao_available is_torchdata_available is_torchdata_stateful_dataloader_available
is_torchvision_available is_tpu_available is_trackio_available is_transformer_engine_available
is_transformer_engine_mxfp8_available is_transformers_available is_triton_available is_wandb_available
is_weights_only_available is_xccl_available
"""

CALLS = [
    *(f"bool(utils.{name}())" for name in _PROBES.split() if name not in ("is_ipex_available", "is_tpu_available")),
    "utils.calculate_maximum_sizes(model())",
    "utils.calculate_maximum_sizes(nn.Linear(2, 2))",
    "issubclass(utils.CannotPadNestedTensorWarning, UserWarning)",
    "utils.load_offloaded_weights(model(), {}, 'absent')",
    "raised(lambda: utils.load_offloaded_weights(model(), {'first.weight': {}}, 'absent')) is not None",
    "list(inspect.signature(utils.prepare_simple_launcher_cmd_env).parameters)",
    "list(inspect.signature(utils.prepare_multi_gpu_env).parameters)",
    "list(inspect.signature(utils.prepare_deepspeed_cmd_env).parameters)",
    "raised(lambda: utils.prepare_multi_gpu_env(argparse.Namespace())) is not None",
    # Hooks.
    "ModelHook().no_grad, ModelHook().init_hook(model()).extra(), ModelHook().detach_hook(model()).extra()",
    "ModelHook().pre_forward(model(), 1, a=2), ModelHook().post_forward(model(), 3)",
    "_sequence()",
    "_aligned(execution_device='cpu')",
    "_aligned(execution_device='cpu', io_same_device=True, skip_keys=['a'])",
    "_aligned(execution_device='cpu', offload=True, place_submodules=True)",
    "_cast()",
    "_offloaded()",
    "[hooks.CpuOffload.__name__, hooks.UserCpuOffloadHook.__name__]",
    "_on_blocks()",
    "_on_blocks(offload={'first': True, 'second': False})",
    "_executed()",
    # Loaders.
    "[issubclass(each, DataLoaderStateMixin) for each in (DataLoaderShard, DataLoaderDispatcher)]",
    "issubclass(DataLoaderDispatcher, DataLoaderAdapter)",
    "_state_of_a_loader()",
    "_sampler_of_a_loader()",
    "_adapter()",
    "raised(lambda: patch_optimizer_step(None, None)) is not None",
]


def _sequence() -> Any:
    class Added(ModelHook):
        def __init__(self, amount: float) -> None:
            self.amount = amount

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + self.amount,), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * self.amount

    net = nn.Identity()
    sequence = SequentialHook(Added(1.0), Added(2.0))
    found = [sequence.pre_forward(net, 1.0), sequence.post_forward(net, 1.0), sequence.init_hook(net) is net]
    return [*found, sequence.detach_hook(net) is net]


def _aligned(**settings: Any) -> Any:
    hook = AlignDevicesHook(**settings)
    net = nn.Linear(3, 2)
    torch.nn.init.ones_(net.weight)
    torch.nn.init.ones_(net.bias)
    add_hook_to_module(net, hook)
    outputs = net(INPUTS)
    devices = [each.device.type for each in net.parameters()]
    hooks.remove_hook_from_module(net)
    return outputs, devices, [each.device.type for each in net.parameters()]


def _cast() -> Any:
    net = nn.Linear(3, 2)
    add_hook_to_module(net, LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False))
    return net(INPUTS).dtype, net.weight.dtype


def _offloaded() -> Any:
    net = model()
    hook = CpuOffload("cpu")
    user = UserCpuOffloadHook(net, hook)
    add_hook_to_module(net, hook)
    found = net.eval()(INPUTS).shape
    user.offload()
    user.remove()
    return found, hasattr(net, "_hf_hook")


def _on_blocks(**settings: Any) -> Any:
    net = model()
    places = {"first": "cpu", "norm": "cpu", "second": "cpu"}
    weights = {name: each.detach().clone() for name, each in net.state_dict().items()}
    attach_align_device_hook_on_blocks(net, execution_device=places, weights_map=weights, **settings)
    return net.eval()(INPUTS), [name for name, each in net.named_modules() if hasattr(each, "_hf_hook")]


def _executed() -> Any:
    net = model()
    attach_execution_device_hook(net, "cpu")
    return net.eval()(INPUTS), [name for name, each in net.named_modules() if hasattr(each, "_hf_hook")]


def _state_of_a_loader() -> Any:
    batches = DataLoaderShard(torch.arange(5), batch_size=2)
    batches.begin()
    inside = batches.gradient_state.in_dataloader
    batches.end()
    batches.reset()
    return inside, batches.gradient_state.in_dataloader, batches.end_of_dataloader, batches.remainder


def _sampler_of_a_loader() -> Any:
    batches = DataLoaderShard(torch.arange(5), batch_size=2)
    batches.set_sampler(torch.utils.data.SequentialSampler(range(3)))
    return list(batches)


def _adapter() -> Any:
    adapter = DataLoaderAdapter(torch.arange(5), batch_size=2)
    return list(adapter.base_dataloader), adapter.batch_size, isinstance(adapter, torch.utils.data.DataLoader)
