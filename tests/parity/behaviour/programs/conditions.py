"""Error conditions of plugins, launch options and prepared objects, which `refusals.py` does not provoke."""

from __future__ import annotations

import argparse
import os
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, PartialState, notebook_launcher, utils
from accelerate.commands.launch import launch_command_parser
from accelerate.data_loader import prepare_data_loader
from accelerate.inference import pippy_forward
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    BnbQuantizationConfig,
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    bnb,
    deepspeed,
    fsdp_utils,
    modeling,
)
from torch import nn
from torch.utils.data import IterableDataset

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import (
    loader,
    model,
    on_gpus,
    optimizer,
    parts,
    raised,
    train,
    with_variables,
)

_FIELDS = {"ACCELERATE_CONFIG_DS_FIELDS": "gradient_clipping,zero_stage"}

CALLS = [
    # States.
    "_kept_partial_state().on_main_process(len)",
    "_device_of_another_type()",
    # Methods of Accelerator.
    "Accelerator().lomo_backward(torch.ones(1), learning_rate=None)",
    "Accelerator().prepare_model(_quantized({'first': 'cpu', 'second': 'disk'}))",
    "_local_sgd('DEEPSPEED')",
    "_local_sgd('MEGATRON_LM')",
    # Plugins.
    "DeepSpeedPlugin(zero_stage=3, enable_msamp=True)",
    "DeepSpeedPlugin(zero_stage=1, enable_msamp=True, msamp_opt_level='O5')",
    "_deepspeed({'train_batch_size': 'auto'}).fill_match('train_batch_size')",
    "_deepspeed({'train_batch_size': 4}).deepspeed_config_process(train_batch_size=3)",
    "_deepspeed({'bf16': {'enabled': True}}).set_mixed_precision('fp16')",
    "with_variables(_FIELDS, lambda: _deepspeed({}))",
    "_deepspeed({}).select()",
    "setattr(_deepspeed({}), 'selected', True)",
    "deepspeed.get_active_deepspeed_plugin(Accelerator().state)",
    "deepspeed.HfDeepSpeedConfig({'a': {}}).del_config_sub_tree('a.b.c', must_exist=True)",
    "FullyShardedDataParallelPlugin().set_mixed_precision(torch.int8)",
    "FullyShardedDataParallelPlugin().set_mixed_precision('nonsense')",
    "MegatronLMPlugin().set_network_size_args(_of_type('nonsense'))",
    "MegatronLMPlugin().set_optimizer_type(torch.optim.RMSprop(model().parameters(), lr=0.1))",
    "fsdp_utils.fsdp2_prepare_auto_wrap_policy(_wrapping('Absent'), model())",
    "fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer(), {})",
    "_full_weights_on_another_rank()",
    # Big models.
    "modeling.set_module_tensor_to_device(_without_module(), 'first.weight', 'cpu')",
    "modeling.get_state_dict_offloaded_model(nn.Sequential(_Exhausted(1, 1)))",
    "utils.load_and_quantize_model(model().to('meta'), BnbQuantizationConfig(load_in_8bit=True))",
    "_device_map('nonsense', load_in_8bit=True)",
    "_device_map({'first': 'disk', 'second': 0}, load_in_4bit=True, skip_modules=[], keep_in_fp32_modules=[])",
    "_quantized_with_neither()",
    # Launch options.
    "_simple('--cpu --module --no_python')",
    "_simple('--cpu', mixed_precision='nonsense')",
    "_simple('--cpu', dynamo_backend='nonsense')",
    "_simple('--cpu --mpirun_hostfile hosts')",
    "_several('--module --no_python')",
    "_several('', mixed_precision='nonsense')",
    "_several('', dynamo_backend='nonsense')",
    "_several('--use_fsdp', fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False)",
    "_several('--num_machines 2 --machine_rank 0 --main_process_ip 127.0.0.1', taken=True)",
    "_several('', taken=True)",
    "_by_deepspeed('', taken=True)",
    "_by_deepspeed('--module --no_python')",
    "_by_deepspeed('--num_machines 2 --deepspeed_multinode_launcher pdsh --module --no_python')",
    "_by_deepspeed('', mixed_precision='nonsense')",
    "_by_deepspeed('--num_machines 2 --deepspeed_multinode_launcher standard', taken=True)",
    "_on_sagemaker('a.py', profile=None)",
    "_on_sagemaker('a.sh')",
    "_on_sagemaker('a.py', '--flag --other 1')",
    "_on_sagemaker('a.py', '--flag')",
    "_on_sagemaker('a.py', mixed_precision='nonsense')",
    "_on_sagemaker('a.py', mixed_precision='no', dynamo_backend='nonsense')",
]

CALLS_ON_TWO_RANKS = [
    "Accelerator().prepare_model(_quantized({'first': 0, 'second': 1}))",
    "Accelerator().prepare_model(_sharded())",
    "_dispatched_on_a_mesh()",
    "raised(lambda: pippy_forward(lambda *_: 1, 2, False, 'text'))",
    "Accelerator(parallelism_config=ParallelismConfig(tp_size=4))",
    "_tensor_parallel(None)",
    "_tensor_parallel(4)",
    # States that Accelerate treats as those of GPUs.
    "on_gpus(parallelism_config=ParallelismConfig(tp_size=2)).prepare_model(model())",
    "on_gpus(parallelism_config=ParallelismConfig(tp_size=2)).prepare_model(_split_across(4))",
    "on_gpus().prepare_model(_sharded())",
    "on_gpus(fsdp_plugin=_fsdp2()).prepare_model(model())",
    "on_gpus(fsdp_plugin=_fsdp2()).prepare(model())",
    "on_gpus(fsdp_plugin=_fsdp2()).prepare(model(), model(), optimizer())",
    "on_gpus(fsdp_plugin=_fsdp2(), parallelism_config=ParallelismConfig(tp_size=2))",
    "_context_parallel('false')",
    "_context_parallel('true')",
    "_context_parallel('false', fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))",
    "_trained_without_degrees(cpu=True)",
    "_trained_without_degrees(fsdp_plugin=_fsdp2())",
]


def _nothing() -> None:
    """Do nothing in each rank."""


def a_launch_without_a_known_precision() -> Any:
    return raised(lambda: notebook_launcher(_nothing, num_processes=1, mixed_precision="nonsense"))


@program(needs="bitsandbytes")
def a_launch_after_bitsandbytes() -> Any:
    import bitsandbytes

    return raised(lambda: notebook_launcher(_nothing, num_processes=2))


def a_launch_on_a_port_that_is_taken() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["ACCELERATE_DEBUG_MODE"] = "true"
        return raised(lambda: notebook_launcher(_nothing, num_processes=2, use_port=str(server.getsockname()[1])))


@program(ranks=2)
def a_group_with_an_unknown_backend() -> Any:
    return raised(lambda: PartialState(cpu=True, backend="nonsense"))


@program(ranks=2)
def dispatched_batches_of_several_sizes() -> Any:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from (torch.zeros(size) for size in (1, 2))

    batches = Accelerator().prepare(torch.utils.data.DataLoader(Rows(), batch_size=1))
    found = raised(lambda: list(batches))
    return found if PartialState().is_main_process else None


@program(ranks=2)
def padding_of_tensors_with_other_dimensions() -> Any:
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    accelerator = Accelerator()
    shape = (2,) if accelerator.is_main_process else (2, 2)
    return accelerator.pad_across_processes(torch.ones(shape))


@program(ranks=2)
def a_full_state_without_a_weight() -> Any:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator()
    net = fully_shard(nn.Linear(2, 2))
    found = raised(lambda: fsdp_utils.fsdp2_load_full_state_dict(accelerator, net, {}))
    return found if accelerator.is_main_process else None


def _kept_partial_state() -> Any:
    kept = PartialState()
    AcceleratorState._reset_state(True)
    return kept


def _device_of_another_type() -> Any:
    state = PartialState()
    state.device, state.distributed_type = None, DistributedType.MEGATRON_LM
    state.set_device()


def _quantized(device_map: Any) -> nn.Module:
    net: Any = model()
    net.is_loaded_in_8bit, net.hf_device_map = True, device_map
    return net


def _local_sgd(kind: str) -> Any:
    accelerator = Accelerator()
    accelerator.state.distributed_type = DistributedType[kind]
    return LocalSGD(accelerator, model(), 2)


def _deepspeed(config: Any) -> Any:
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1, **config})


def _of_type(name: str) -> nn.Module:
    net: Any = model()
    net.config = SimpleNamespace(model_type=name)
    return net


def _wrapping(name: str) -> Any:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[name]
    )


def _full_weights_on_another_rank() -> Any:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    plugin.fsdp_version, plugin.sync_module_states = 1, False
    rank = SimpleNamespace(wait_for_everyone=lambda: None, num_processes=2, process_index=1, is_fsdp2=False)
    return fsdp_utils.load_fsdp_model(plugin, rank, model(), ".")


def _without_module() -> nn.Module:
    net: Any = model()
    net.first = None
    return net


class _Exhausted(nn.Linear):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise MemoryError


def _device_map(device_map: Any, **settings: Any) -> Any:
    return bnb.get_quantized_model_device_map(model(), BnbQuantizationConfig(**settings), device_map)


def _quantized_with_neither() -> Any:
    config = BnbQuantizationConfig(load_in_8bit=True)
    config.load_in_8bit = False
    return bnb.replace_with_bnb_layers(model(), config)


def _options(line: str, changes: dict[str, Any]) -> argparse.Namespace:
    given = [*["--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1"], *line.split(), "train.py"]
    args = launch_command_parser().parse_args(given)
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def _simple(line: str, **changes: Any) -> Any:
    return utils.prepare_simple_launcher_cmd_env(_options(line, changes))


def _with_port(call: Any, line: str, taken: bool, changes: dict[str, Any]) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if taken else 0
        return call(_options(f"--num_processes 2 --main_process_port {port} {line}", changes))


def _several(line: str, *, taken: bool = False, **changes: Any) -> Any:
    return _with_port(utils.prepare_multi_gpu_env, f"--multi_gpu {line}", taken, changes)


def _by_deepspeed(line: str, *, taken: bool = False, **changes: Any) -> Any:
    machine = "--use_deepspeed --machine_rank 0 --main_process_ip 127.0.0.1 --deepspeed_hostfile hosts"
    return _with_port(utils.prepare_deepspeed_cmd_env, f"{machine} {line}", taken, changes)


def _on_sagemaker(script: str, arguments: str = "", profile: Any = "me", **changes: Any) -> Any:
    config = SimpleNamespace(
        profile=profile, region="eu-west-1", distributed_type=SimpleNamespace(value="NO"), image_uri=None,
        sagemaker_metrics_file=None, sagemaker_inputs_file=None, additional_args={}, iam_role_name="role",
        ec2_instance_type="ml.c5.xlarge", transformers_version=None, pytorch_version=None, py_version=None,
        base_job_name="job", num_machines=1,
    )  # fmt: skip
    args = _options("", {"training_script": script, "training_script_args": arguments.split(), **changes})
    args.aws_access_key_id = args.aws_secret_access_key = None
    return utils.prepare_sagemager_args_inputs(config, args)


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(model(), init_device_mesh("cpu", (2,)))


def _dispatched_on_a_mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return prepare_data_loader(
        loader(), num_processes=2, process_index=0, dispatch_batches=True, put_on_device=True, torch_device_mesh=mesh,
        device=torch.device("cpu"),
    )  # fmt: skip


def _split_across(size: int) -> nn.Module:
    net: Any = model()
    net.tp_size = size
    return net


def _fsdp2() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2)


def _context_parallel(standalone: str, **settings: Any) -> Any:
    """Create ranks with context parallelism, as axolotl does: it replaces the check of the layout and sets a variable."""
    os.environ["ACCELERATE_ALLOW_CP_STANDALONE"] = standalone
    with patch.object(ParallelismConfig, "_validate_accelerator", create=True, new=lambda layout, accelerator: None):
        accelerator = on_gpus(parallelism_config=ParallelismConfig(cp_size=2), **settings)
    return accelerator.distributed_type, accelerator.parallelism_config.cp_size


def _trained_without_degrees(**settings: Any) -> Any:
    accelerator = (on_gpus if "fsdp_plugin" in settings else Accelerator)(
        parallelism_config=ParallelismConfig(), **settings
    )
    net, opt, batches, schedule = accelerator.prepare(*parts())
    losses = train(accelerator, net, opt, batches, schedule)
    return losses, schedule.get_last_lr(), accelerator.get_state_dict(net)


def _tensor_parallel(size: int | None) -> Any:
    AcceleratorState._reset_state(True)
    net: Any = model()
    if size is not None:
        net.tp_size = size
    return Accelerator(parallelism_config=ParallelismConfig(tp_size=2)).prepare(net)
