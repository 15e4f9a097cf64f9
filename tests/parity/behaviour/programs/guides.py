"""Accelerate's guides to launching, parallelism, low precision and profiling: the situations that they describe."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    ProfileKwargs,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    notebook_launcher,
    utils,
)
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState
from accelerate.utils import (
    BnbQuantizationConfig,
    DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs,
    TorchContextParallelConfig,
)
from torch import nn

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import (
    Net,
    loader,
    local_sgd,
    logged,
    model,
    optimizer,
    parts,
    raised,
    train,
    warned,
    with_variables as _with,
)

INPUTS = torch.arange(6.0).view(2, 3)
_SEQUENCES = "PARALLELISM_CONFIG_SP_"

CALLS = [
    # Context and sequence parallelism.
    "_with({_SEQUENCES + 'SEQ_LENGTH_IS_VARIABLE': 'false'}, lambda: DeepSpeedSequenceParallelConfig(sp_seq_length=8))",
    "_with({_SEQUENCES + 'ATTN_IMPLEMENTATION': 'flash_attention_2'}, DeepSpeedSequenceParallelConfig)",
    "_with({_SEQUENCES + 'ATTN_IMPLEMENTATION': 'eager'}, DeepSpeedSequenceParallelConfig)",
    "_with({_SEQUENCES + 'BACKEND': 'deepspeed', _SEQUENCES + 'SIZE': '2'}, lambda: ParallelismConfig().sp_size)",
    "_with({_SEQUENCES + 'BACKEND': 'nonsense'}, lambda: ParallelismConfig(sp_size=2).sp_backend)",
    "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)",
    "ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length=8)).sp_handler",
    "ParallelismConfig(sp_size=2, sp_handler=TorchContextParallelConfig())",
    "ParallelismConfig(cp_size=2, cp_handler=DeepSpeedSequenceParallelConfig())",
    "ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig('alltoall')).cp_handler",
    "_with({'PARALLELISM_CONFIG_CP_COMM_STRATEGY': 'alltoall'}, lambda: ParallelismConfig(cp_size=2).cp_handler)",
    "ParallelismConfig(dp_replicate_size=2, tp_size=2)",
    "ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=2).total_size",
    "ParallelismConfig(dp_replicate_size=2, dp_shard_size=1, sp_size=2).total_size",
    # Low precision.
    "FP8RecipeKwargs(backend='te', margin=1, fp8_format='HYBRID')",
    "FP8RecipeKwargs(backend='msamp', optimization_level='O2')",
    "raised(lambda: Accelerator(mixed_precision='fp8', kwarg_handlers=[]))",
    "Accelerator(mixed_precision='bf16', downcast_bf16=True)",
    "_with({'ACCELERATE_DOWNCAST_BF16': 'true'}, lambda: Accelerator(mixed_precision='bf16').state.downcast_bfloat)",
    "utils.DistributedType.TPU",
    # Quantization.
    "BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=6)",
    "BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True)",
    "BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype='bfloat16').bnb_4bit_compute_dtype",
    "BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype='nonsense')",
    "BnbQuantizationConfig(load_in_8bit=True, torch_dtype='fp32').torch_dtype",
    "BnbQuantizationConfig(load_in_8bit=True, torch_dtype='nonsense')",
    "BnbQuantizationConfig(load_in_8bit=True, skip_modules='second')",
    "BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=5)",
    "BnbQuantizationConfig(load_in_8bit='yes')",
    # Notebooks.
    "notebook_launcher(_nothing)",
    "notebook_launcher(_nothing, num_processes=2, node_rank=3, num_nodes=2)",
]
CALLS_ON_TWO_RANKS = [
    "_hooked('POWER_SGD', 'FP16')",
    "_hooked('POWER_SGD', 'BF16')",
    "_hooked('BF16', 'FP16')",
    "_hooked('NO', 'BF16')",
    "_hooked('FP16', 'POWER_SGD')",
]


def _nothing(*_: Any) -> None:
    return None


# ---- notebooks


def _written(precision: str, seed: int) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    size = [accelerator.num_processes, accelerator.process_index, seed, accelerator.mixed_precision]
    size += [accelerator.gather(torch.tensor([accelerator.process_index])).tolist()]
    Path(f"rank-{accelerator.process_index}").write_text(json.dumps(size))


def a_notebook_launches_two_processes() -> Any:
    notebook_launcher(_written, ("bf16", 42), num_processes=2)
    return [json.loads(path.read_text()) for path in sorted(Path().glob("rank-*"))]


def a_notebook_with_an_accelerator_launches_nothing() -> Any:
    Accelerator()
    return raised(lambda: notebook_launcher(_nothing, num_processes=2))


def a_notebook_shows_the_failure_of_a_process() -> Any:
    return type(raised(lambda: notebook_launcher(_fails, num_processes=2))).__mro__[-3:]


def _fails() -> None:
    raise ValueError("no")


# ---- gradient synchronization and local SGD


def _batch(accelerator: Any) -> torch.Tensor:
    return INPUTS * (1 + accelerator.process_index)


@program(ranks=2)
def gradients_are_exchanged_where_the_forward_is_outside_of_no_sync() -> Any:
    """The guide calls this use improper: only the backward pass is inside `no_sync`."""
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Linear(3, 1, bias=False))
    loss = net(_batch(accelerator)).sum()
    with accelerator.no_sync(net):
        accelerator.backward(loss)
    return accelerator.unwrap_model(net).weight.grad


@program(ranks=2)
def the_next_backward_exchanges_what_was_accumulated() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Linear(3, 1, bias=False))
    gradients = []
    with net.no_sync():
        accelerator.backward(net(_batch(accelerator)).sum())
    gradients.append(accelerator.unwrap_model(net).weight.grad.clone())
    accelerator.backward(net(_batch(accelerator)).sum())
    return [*gradients, accelerator.unwrap_model(net).weight.grad]


@program(ranks=2)
def local_sgd_that_is_switched_off() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net, opt, batches, schedule = accelerator.prepare(*parts(12))
    weights = local_sgd(accelerator, net, opt, batches, steps=2, schedule=schedule, enabled=False)
    return weights, schedule.get_last_lr()


def local_sgd_on_one_process() -> Any:
    accelerator = Accelerator()
    net, opt, batches = accelerator.prepare(model(), optimizer(), loader())
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=2) as local:
        for inputs, targets in batches:
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
            opt.step()
            opt.zero_grad()
            local.step()
    return local.enabled, net


def _hooked(hook: str, wrapper: str) -> Any:
    option = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} if hook == "POWER_SGD" else {}
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType[hook],
        comm_wrapper=DDPCommunicationHookType[wrapper],
        comm_state_option=option,
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    net = model(8)
    net, opt, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader(24))
    return train(accelerator, net, opt, batches), accelerator.unwrap_model(net).state_dict()


# ---- deferred execution


def waiting_and_going_first_alone() -> Any:
    accelerator = Accelerator()
    order = [accelerator.wait_for_everyone()]
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        order.append("inside")
    return order, accelerator.check_trigger()


@program(ranks=2)
def an_error_of_the_process_that_goes_first() -> Any:
    accelerator = Accelerator()
    path = Path("..") / "order"
    with contextlib.suppress(KeyError), accelerator.main_process_first():
        first = not path.exists()
        path.touch()
        raise KeyError("x")
    accelerator.wait_for_everyone()
    return first


@program(ranks=2)
def a_trigger_is_reset_when_it_is_read() -> Any:
    accelerator = Accelerator()
    found = [accelerator.check_trigger()]
    if not accelerator.is_main_process:
        accelerator.set_trigger()
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


# ---- big models


class Residual(nn.Module):
    """A block that device maps must not split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.linear(inputs)


def _blocks() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*[Residual() for _ in range(3)])


def a_checkpoint_in_parts_is_dispatched() -> Any:
    Accelerator().save_model(_blocks(), "parts", max_shard_size="60B")
    with init_empty_weights():
        net = nn.Sequential(*[Residual() for _ in range(3)])
    device_map = {"0": "cpu", "1": "disk", "2": "cpu"}
    net = load_checkpoint_and_dispatch(net, "parts", device_map=device_map, offload_folder="off")
    outputs = net(INPUTS)
    devices = {name: each.device.type for name, each in net.named_parameters()}
    return outputs, outputs.requires_grad, net.hf_device_map, devices, len(list(Path("parts").iterdir()))


def blocks_stay_together_in_a_map() -> Any:
    budgets = {0: "50", 1: "100B", "cpu": "30GIB"}
    return [
        utils.infer_auto_device_map(_blocks(), budgets, no_split_module_classes=names)
        for names in (None, ["Residual"], "Residual", [Residual.__name__, "Absent"])
    ]


def a_map_for_a_model_without_memory() -> Any:
    with init_empty_weights():
        net = nn.Sequential(*[Residual() for _ in range(3)])
    return utils.infer_auto_device_map(net, {0: 50, "cpu": 50}), utils.compute_module_sizes(net)[""]


# ---- FSDP


def settings_that_fsdp2_has_no_more() -> Any:
    removed = {
        "sharding_strategy": "FULL_SHARD",
        "backward_prefetch": "BACKWARD_PRE",
        "sync_module_states": True,
        "use_orig_params": True,
        "forward_prefetch": True,
        "state_dict_type": "FULL_STATE_DICT",
    }
    found = {}
    for name, value in removed.items():
        kinds, plugin = warned(lambda: raised(lambda: FullyShardedDataParallelPlugin(fsdp_version=2, **{name: value})))  # noqa: B023
        found[name] = sorted(set(kinds)), plugin if isinstance(plugin, Exception) else str(getattr(plugin, name))
    return found, logged(lambda: FullyShardedDataParallelPlugin(fsdp_version=2))


# ---- profiler


def _profiled(**settings: Any) -> Any:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], **settings)])
    net = accelerator.prepare(nn.Linear(3, 4))
    with accelerator.profile() as profile:
        net(INPUTS)
    return profile


def times_by_the_shapes_of_inputs() -> Any:
    rows = _profiled(record_shapes=True).key_averages(group_by_input_shape=True)
    return sorted([row.key, row.input_shapes, row.count] for row in rows if "addmm" in row.key)


def memory_of_operators() -> Any:
    rows = _profiled(profile_memory=True, record_shapes=True).key_averages()
    return {row.key: row.cpu_memory_usage for row in rows if row.key == "aten::addmm"}


def operations_of_a_product() -> Any:
    return {row.key: row.flops for row in _profiled(with_flops=True).key_averages() if row.flops}


@program(ranks=2)
def traces_of_two_ranks() -> Any:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir="../a/b")])
    with accelerator.profile():
        torch.ones(2).sum()
    accelerator.wait_for_everyone()
    return sorted(path.name for path in Path("../a/b").iterdir())


def a_schedule_records_some_steps() -> Any:
    steps: list[int] = []
    schedule = {"wait": 5, "warmup": 1, "active": 3, "repeat": 2, "skip_first": 1}
    handler = ProfileKwargs(
        activities=["cpu"], schedule_option=schedule, on_trace_ready=lambda p: steps.append(p.step_num)
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    net = accelerator.prepare(nn.Linear(3, 4))
    with accelerator.profile() as profile:
        for _ in range(22):
            net(INPUTS)
            profile.step()
    return steps, handler.to_kwargs().keys()


def a_profile_with_settings_of_its_own() -> Any:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], with_flops=True)])
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir="own")) as profile:
        torch.ones(2, 2) @ torch.ones(2, 2)
    return [path.name for path in Path("own").iterdir()], {row.flops for row in profile.key_averages()}
