"""Keyword handlers, plugins and configurations: values, defaults, environment variables and errors."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProfileKwargs,
    utils,
)
from accelerate.utils import (
    AORecipeKwargs,
    DeepSpeedSequenceParallelConfig,
    DynamoBackend,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    KwargsHandler,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from torch import nn

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import (
    logged,
    model,
    optimizer,
    parts,
    raised,
    train,
    warned,
    with_variables as _with,
)

HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
_FSDP_ENVIRONMENT = {
    "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_MIN_NUM_PARAMS": "100",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_USE_ORIG_PARAMS": "false",
    "FSDP_FORWARD_PREFETCH": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
}

CALLS = [
    "[each() for each in HANDLERS]",
    "[each().to_kwargs() for each in HANDLERS]",
    "[sorted(each().to_dict()) for each in HANDLERS]",
    "KwargsHandler().to_kwargs(), KwargsHandler().to_dict()",
    "AutocastKwargs(enabled=False, cache_enabled=False).to_kwargs()",
    "AutocastKwargs(nonsense=1)",
    "AutocastKwargs(cache_enabled=None)",
    "DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=5, static_graph=True).to_kwargs()",
    "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)",
    "DistributedDataParallelKwargs(comm_hook='bf16')",
    "DistributedDataParallelKwargs(comm_wrapper='bf16', comm_state_option={'matrix_approximation_rank': 2})",
    "DistributedDataParallelKwargs(comm_hook='nonsense')",
    "list(DDPCommunicationHookType)",
    "DDPCommunicationHookType('power_sgd')",
    "raised(lambda: DDPCommunicationHookType('nonsense'))",
    "GradScalerKwargs(init_scale=512.0, growth_interval=5).to_kwargs()",
    "GradScalerKwargs(enabled=False)",
    "InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs()",
    "InitProcessGroupKwargs(backend='gloo', init_method='env://')",
    "InitProcessGroupKwargs().timeout",
    "InitProcessGroupKwargs(backend='nccl').timeout",
    "ProfileKwargs(activities=['cpu'], record_shapes=True, profile_memory=True).to_kwargs()",
    "type(ProfileKwargs(activities=['cpu']).build()).__name__",
    "ProfileKwargs(activities=['nonsense']).build()",
    "ProfileKwargs(schedule_option={'wait': 1}).build()",
    "type(ProfileKwargs(schedule_option={'wait': 1, 'warmup': 1, 'active': 2}).build()).__name__",
    "ProfileKwargs(schedule_option={'active': 1, 'skip_first': 1, 'repeat': 2}, with_stack=True, with_flops=True).to_kwargs()",
    "GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False, sync_with_dataloader=False, sync_each_batch=True)",
    "GradientAccumulationPlugin(num_steps=3).to_kwargs()",
    "GradientAccumulationPlugin(num_steps=0)",
    "_with({'ACCELERATE_GRADIENT_ACCUMULATION_STEPS': '4'}, lambda: Accelerator().gradient_accumulation_steps)",
    "_with({'ACCELERATE_GRADIENT_ACCUMULATION_STEPS': '4'}, lambda: GradientAccumulationPlugin())",
    "_with({'ACCELERATE_GRADIENT_ACCUMULATION_STEPS': '4'}, lambda: Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps)",
    "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)).gradient_accumulation_steps",
    "Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3), gradient_accumulation_steps=2)",
    "Accelerator(kwargs_handlers=[AutocastKwargs(enabled=True)]).autocast_handler",
    "Accelerator(kwargs_handlers=[GradScalerKwargs()]).scaler_handler",
    "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs()]).ddp_handler",
    "Accelerator(kwargs_handlers=[InitProcessGroupKwargs()]).init_handler",
    "Accelerator(kwargs_handlers=[ProfileKwargs()]).profile_handler",
    "Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])",
    "Accelerator(kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()])",
    "Accelerator(kwargs_handlers=AutocastKwargs())",
    "Accelerator(kwargs_handlers=[AutocastKwargs])",
    "Accelerator(kwargs_handlers=[None])",
    "Accelerator(kwargs_handlers=[]).autocast_handler",
    "Accelerator(kwargs_handlers=[GradientAccumulationPlugin()])",
    # Dynamo.
    "TorchDynamoPlugin(backend='eager', mode='reduce-overhead', fullgraph=True, dynamic=False, options={'a': 1})",
    "TorchDynamoPlugin(backend='INDUCTOR').to_kwargs()",
    "TorchDynamoPlugin(backend='nonsense')",
    "TorchDynamoPlugin(mode='nonsense')",
    "TorchDynamoPlugin(use_regional_compilation=True).to_dict()",
    "[each for each in DynamoBackend if each.name != 'IPEX']",
    "_with({'ACCELERATE_DYNAMO_BACKEND': 'EAGER', 'ACCELERATE_DYNAMO_MODE': 'default'}, TorchDynamoPlugin)",
    "_with({'ACCELERATE_DYNAMO_BACKEND': 'eager', 'ACCELERATE_DYNAMO_USE_FULLGRAPH': 'true', 'ACCELERATE_DYNAMO_USE_DYNAMIC': '1'}, TorchDynamoPlugin)",
    "_with({'ACCELERATE_DYNAMO_BACKEND': 'eager', 'ACCELERATE_DYNAMO_USE_DYNAMIC': 'maybe'}, TorchDynamoPlugin)",
    "Accelerator(dynamo_plugin=TorchDynamoPlugin(backend='eager')).state.dynamo_plugin",
    "Accelerator(dynamo_plugin=TorchDynamoPlugin(backend='eager'), dynamo_backend='eager')",
    # Projects.
    "ProjectConfiguration()",
    "ProjectConfiguration('here')",
    "ProjectConfiguration('here', logging_dir='logs', total_limit=3, automatic_checkpoint_naming=True, iteration=2, save_on_each_node=True)",
    "_directories()",
    "Accelerator(project_dir='here').project_dir, Accelerator(project_dir='here').logging_dir",
    "Accelerator(project_config=ProjectConfiguration('here')).project_dir",
    "Accelerator(project_config=ProjectConfiguration('here'), project_dir='there').project_configuration",
    "Accelerator(project_config=ProjectConfiguration(logging_dir='logs')).logging_dir",
    # Loaders.
    "DataLoaderConfiguration()",
    "DataLoaderConfiguration(split_batches=True, even_batches=False, data_seed=3, non_blocking=True)",
    "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)).split_batches",
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).dispatch_batches",
    "Accelerator(dataloader_config=DataLoaderConfiguration(), split_batches=True)",
    # FP8.
    "TERecipeKwargs()",
    "TERecipeKwargs(fp8_format='E4M3', margin=2, amax_history_len=16, amax_compute_algo='max', interval=3)",
    "TERecipeKwargs(fp8_format='nonsense')",
    "TERecipeKwargs(amax_compute_algo='nonsense')",
    "TERecipeKwargs(override_linear_precision=(True, False, True))",
    "_with({'ACCELERATE_FP8_FORMAT': 'E4M3', 'ACCELERATE_FP8_MARGIN': '3', 'ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL': 'true'}, TERecipeKwargs)",
    "_with({'ACCELERATE_FP8_INTERVAL': '3', 'ACCELERATE_FP8_AMAX_COMPUTE_ALGO': 'max', 'ACCELERATE_FP8_AMAX_HISTORY_LEN': '5'}, TERecipeKwargs)",
    "_with({'ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION': 'true,false,true'}, lambda: TERecipeKwargs().override_linear_precision)",
    "MSAMPRecipeKwargs()",
    "MSAMPRecipeKwargs(opt_level='O1')",
    "MSAMPRecipeKwargs(opt_level='nonsense')",
    "AORecipeKwargs().to_kwargs().keys()",
    "AORecipeKwargs(module_filter_func=len).module_filter_func",
    "FP8RecipeKwargs()",
    "FP8RecipeKwargs(backend='TE')",
    "FP8RecipeKwargs(backend='MSAMP')",
    "FP8RecipeKwargs(backend='nonsense')",
    "type(FP8RecipeKwargs(backend='te')).__mro__[1].__name__",
    "Accelerator(mixed_precision='fp8', kwargs_handlers=[MSAMPRecipeKwargs()])",
    "Accelerator(mixed_precision='fp8', kwargs_handlers=[TERecipeKwargs()])",
    "Accelerator(mixed_precision='bf16', kwargs_handlers=[AORecipeKwargs()]).fp8_backend",
    "Accelerator().fp8_backend",
    # FSDP.
    "_fsdp()",
    "_fsdp(fsdp_version=2)",
    "_fsdp(sharding_strategy='SHARD_GRAD_OP')",
    "_fsdp(sharding_strategy='shard_grad_op')",
    "_fsdp(sharding_strategy=3)",
    "_fsdp(sharding_strategy='nonsense')",
    "_fsdp(backward_prefetch='BACKWARD_POST')",
    "_fsdp(backward_prefetch='nonsense')",
    "_fsdp(backward_prefetch='NO_PREFETCH')",
    "_fsdp(cpu_offload=True)",
    "_fsdp(cpu_offload=True, fsdp_version=2)",
    "_fsdp(mixed_precision_policy='bf16')",
    "_fsdp(mixed_precision_policy='fp16', fsdp_version=2)",
    "_fsdp(mixed_precision_policy={'param_dtype': torch.bfloat16, 'reduce_dtype': torch.float32})",
    "_fsdp(mixed_precision_policy='nonsense')",
    "_fsdp(state_dict_type='FULL_STATE_DICT')",
    "_fsdp(state_dict_type='local_state_dict')",
    "_fsdp(state_dict_type='nonsense')",
    "_fsdp(state_dict_type='LOCAL_STATE_DICT', fsdp_version=2)",
    "_fsdp(state_dict_type='FULL_STATE_DICT', fsdp_version=2)",
    "_fsdp(auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Linear'])",
    "_fsdp(auto_wrap_policy='size_based_wrap', min_num_params=100)",
    "_fsdp(auto_wrap_policy='no_wrap')",
    "_fsdp(auto_wrap_policy='nonsense')",
    "_fsdp(auto_wrap_policy='transformer_based_wrap', min_num_params=5)",
    "_fsdp(transformer_cls_names_to_wrap='A,B')",
    "_fsdp(transformer_cls_names_to_wrap=['A'])",
    "_fsdp(use_orig_params=False)",
    "_fsdp(use_orig_params=True, fsdp_version=2)",
    "_fsdp(reshard_after_forward=False)",
    "_fsdp(reshard_after_forward=False, fsdp_version=2)",
    "_fsdp(reshard_after_forward='SHARD_GRAD_OP', fsdp_version=2)",
    "_fsdp(sharding_strategy='SHARD_GRAD_OP', fsdp_version=2)",
    "_fsdp(sync_module_states=False, cpu_ram_efficient_loading=True)",
    "_fsdp(sync_module_states=True)",
    "_fsdp(activation_checkpointing=True, limit_all_gathers=False, forward_prefetch=True)",
    "_fsdp(ignored_modules=['a'])",
    "_fsdp(ignored_modules='.*norm.*')",
    "_fsdp(ignored_modules='.*norm.*', fsdp_version=2)",
    "_fsdp(fsdp_version=3)",
    "_fsdp(fsdp_version='2')",
    "_with(_FSDP_ENVIRONMENT, _fsdp)",
    "_with({'FSDP_VERSION': '2', 'FSDP_RESHARD_AFTER_FORWARD': 'false'}, _fsdp)",
    "_with({'FSDP_VERSION': '2', 'FSDP_OFFLOAD_PARAMS': 'true'}, _fsdp)",
    "_with({'FSDP_TRANSFORMER_CLS_TO_WRAP': 'A, B', 'FSDP_AUTO_WRAP_POLICY': 'TRANSFORMER_BASED_WRAP'}, _fsdp)",
    "_with({'FSDP_SHARDING_STRATEGY': '2'}, _fsdp)",
    "_with({'FSDP_SHARDING_STRATEGY': 'nonsense'}, _fsdp)",
    "_with({'FSDP_BACKWARD_PREFETCH': 'NO_PREFETCH'}, _fsdp)",
    "_with({'FSDP_ACTIVATION_CHECKPOINTING': 'maybe'}, _fsdp)",
    "_policy('transformer_based_wrap', transformer_cls_names_to_wrap=['Linear'])",
    "_policy('transformer_based_wrap', transformer_cls_names_to_wrap=['Absent'])",
    "_policy('transformer_based_wrap')",
    "_policy('size_based_wrap', min_num_params=7)",
    "_policy('no_wrap')",
    "_set_precision('bf16')",
    "_set_precision('bf16', buffer_autocast=True)",
    "_set_precision('fp16', override=True)",
    "_set_precision(torch.float16)",
    "_set_precision('nonsense')",
    "_set_state_dict_type('FULL_STATE_DICT')",
    "_set_state_dict_type('nonsense')",
    "raised(lambda: FullyShardedDataParallelPlugin(cpu_offload='nonsense'))",
    "FullyShardedDataParallelPlugin(cpu_offload=True).set_cpu_offload()",
    "FullyShardedDataParallelPlugin().validate_mixed_precision_policy()",
    "FullyShardedDataParallelPlugin(fsdp_version=2).validate_cpu_offload()",
    "utils.enable_fsdp_ram_efficient_loading(), os.environ.get('FSDP_CPU_RAM_EFFICIENT_LOADING')",
    "utils.disable_fsdp_ram_efficient_loading(), os.environ.get('FSDP_CPU_RAM_EFFICIENT_LOADING')",
    # Parallelism.
    "_parallel()",
    "_parallel(dp_replicate_size=2, dp_shard_size=2)",
    "_parallel(tp_size=2, dp_shard_size=2, cp_size=2)",
    "_parallel(tp_size=4)",
    "_parallel(cp_size=2)",
    "_parallel(sp_size=2, sp_backend='deepspeed')",
    "_parallel(sp_size=2, sp_backend='nonsense')",
    "_parallel(cp_size=2, sp_size=2)",
    "_parallel(cp_size=2, cp_backend='nonsense')",
    "_parallel(tp_size=0)",
    "_parallel(dp_shard_size=-1)",
    "_parallel(tp_size='2')",
    "_with({'PARALLELISM_CONFIG_TP_SIZE': '2', 'PARALLELISM_CONFIG_DP_SHARD_SIZE': '4'}, _parallel)",
    "_with({'PARALLELISM_CONFIG_CP_SIZE': '2', 'PARALLELISM_CONFIG_CP_COMM_STRATEGY': 'allgather'}, lambda: _parallel(cp_size=2))",
    "ParallelismConfig(tp_size=2).to_json()",
    "'tp_size=2' in repr(ParallelismConfig(tp_size=2, dp_shard_size=3))",
    "ParallelismConfig(tp_size=2).get_device_mesh()",
    "raised(lambda: ParallelismConfig(tp_size=2).build_device_mesh('cpu'))",
    "Accelerator(parallelism_config=ParallelismConfig(tp_size=2))",
    "Accelerator(parallelism_config=ParallelismConfig()).parallelism_config.total_size",
    "[raised(lambda name=name: getattr(Accelerator(), name)) for name in _RANKS]",
    "raised(lambda: Accelerator().torch_device_mesh)",
    "TorchContextParallelConfig()",
    "TorchContextParallelConfig(cp_comm_strategy='alltoall')",
    "TorchContextParallelConfig(cp_comm_strategy='nonsense')",
    "TorchTensorParallelConfig()",
    "TorchTensorParallelConfig(enable_async_tp=True)",
    "TorchTensorParallelPlugin(tp_size=1)",
    "TorchTensorParallelPlugin(tp_size=0)",
    "DeepSpeedSequenceParallelConfig()",
    "DeepSpeedSequenceParallelConfig(sp_seq_length=8, sp_seq_length_is_variable=True, sp_attn_implementation='sdpa')",
    "DeepSpeedSequenceParallelConfig(sp_attn_implementation='nonsense')",
    "_with({'PARALLELISM_CONFIG_SP_SEQ_LENGTH': '16'}, DeepSpeedSequenceParallelConfig)",
    # Plugins for other launchers, whose packages are not installed.
    "_deepspeed()",
    "_deepspeed(zero_stage=3, offload_optimizer_device='cpu', gradient_clipping=1.0)",
    "_deepspeed(zero_stage=2, gradient_accumulation_steps=4, zero3_init_flag=False)",
    "_deepspeed(hf_ds_config={'train_batch_size': 8, 'zero_optimization': {'stage': 1}, 'gradient_clipping': 0.5})",
    "_deepspeed(hf_ds_config={'train_batch_size': 'auto', 'zero_optimization': {'stage': 3}})",
    "_deepspeed(zero_stage=4)",
    "_deepspeed(hf_ds_config='absent.json')",
    "_deepspeed(zero_stage=3, moe_layer_cls_names='A')",
    "_deepspeed(msamp_opt_level='O1', enable_msamp=True)",
    "_with({'ACCELERATE_DEEPSPEED_ZERO_STAGE': '3', 'ACCELERATE_GRADIENT_CLIPPING': '0.5'}, _deepspeed)",
    "_with({'ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE': 'cpu', 'ACCELERATE_DEEPSPEED_ZERO_STAGE': '3'}, _deepspeed)",
    "_megatron()",
    "_megatron(tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=0.5)",
    "_with({'MEGATRON_LM_TP_DEGREE': '2', 'MEGATRON_LM_PP_DEGREE': '4', 'MEGATRON_LM_GRADIENT_CLIPPING': '0.5'}, _megatron)",
    "_with({'MEGATRON_LM_SEQUENCE_PARALLELISM': 'true', 'MEGATRON_LM_RECOMPUTE_ACTIVATIONS': '1'}, _megatron)",
    "_with({'MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER': 'yes', 'MEGATRON_LM_NUM_MICRO_BATCHES': '3'}, _megatron)",
    "raised(lambda: Accelerator(megatron_lm_plugin=MegatronLMPlugin()))",
    "raised(lambda: Accelerator(fsdp_plugin=5))",
    "raised(lambda: Accelerator(dataloader_config=5))",
    "raised(lambda: Accelerator(parallelism_config=5))",
    "raised(lambda: Accelerator(dynamo_plugin=5))",
    "raised(lambda: utils.BnbQuantizationConfig())",
]
_RANKS = ("context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "pipeline_parallel_rank")
_RANKS += ("tensor_parallel_rank", "should_save_model", "deepspeed_plugin", "parallelism_config")
_PARALLEL = """
dp_replicate_size dp_shard_size tp_size cp_size sp_size dp_dim_names non_dp_dim_names dp_shard_cp_dim_names dp_cp_dim_names
fsdp_dim_names total_size non_data_parallel_size data_parallel_size dp_replicate_enabled dp_shard_enabled tp_enabled
cp_enabled sp_enabled active_mesh_dims sp_backend
"""


def _fsdp(**settings: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin(**settings)
    found = {name: getattr(plugin, name, "absent") for name in FullyShardedDataParallelPlugin.__dataclass_fields__}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return ["partial", value.func.__name__, value.keywords]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return value


def _policy(name: str, **settings: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=name, **settings)
    plugin.set_auto_wrap_policy(model())
    return _plain(plugin.auto_wrap_policy)


def _set_precision(precision: Any, **settings: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(precision, **settings)
    return plugin.mixed_precision_policy


def _set_state_dict_type(kind: str) -> Any:
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_state_dict_type(kind)
    return plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config


def _parallel(**settings: Any) -> Any:
    config = ParallelismConfig(**settings)
    return {name: getattr(config, name) for name in _PARALLEL.split()}


def _deepspeed(**settings: Any) -> Any:
    plugin = DeepSpeedPlugin(**settings)
    zero = plugin.deepspeed_config["zero_optimization"]
    offload = [zero.get(name, {}).get("device") for name in ("offload_optimizer", "offload_param")]
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    found = {name: plugin.deepspeed_config.get(name) for name in names}
    selected = [plugin.selected, plugin.is_zero3_init_enabled(), plugin.is_auto("train_batch_size")]
    return found, zero["stage"], offload, selected, plugin.zero_stage, plugin.zero3_init_flag


def _megatron(**settings: Any) -> Any:
    plugin = MegatronLMPlugin(**settings)
    names = "tp_degree pp_degree num_micro_batches gradient_clipping sequence_parallelism recompute_activations"
    names += (
        " use_distributed_optimizer set_all_logging_options eval_iters eval_interval consumed_samples no_wd_decay_cond"
    )
    return {name: getattr(plugin, name) for name in names.split()}


def _directories() -> Any:
    settings = ProjectConfiguration()
    settings.set_directories("here")
    first = settings.project_dir, settings.logging_dir
    settings.set_directories("there")
    return first, settings.project_dir, settings.logging_dir


def _trained(handler: Any, **settings: Any) -> Any:
    accelerator = Accelerator(kwargs_handlers=[handler], **settings)
    net, opt, batches, schedule = accelerator.prepare(*parts())
    losses = train(accelerator, net, opt, batches, schedule)
    return losses, type(net), net.state_dict()


@program(ranks=2)
def ddp_settings() -> Any:
    handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=3
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    net = accelerator.prepare(model())
    return net.find_unused_parameters, net.gradient_as_bucket_view, net.broadcast_buffers, net.bucket_bytes_cap


@program(ranks=2)
def ddp_static_graph() -> Any:
    return _trained(DistributedDataParallelKwargs(static_graph=True))


@program(ranks=2)
def ddp_hook_bf16() -> Any:
    return _trained(DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16))


@program(ranks=2)
def ddp_hook_fp16() -> Any:
    return _trained(DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16))


@program(ranks=2)
def ddp_hook_power_sgd() -> Any:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    return _trained(
        DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option=options)
    )


@program(ranks=2)
def ddp_hook_batched_power_sgd_wrapped() -> Any:
    return _trained(
        DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType.BATCHED_POWER_SGD,
            comm_wrapper=DDPCommunicationHookType.BF16,
            comm_state_option={"start_powerSGD_iter": 2},
        )
    )


@program(ranks=2)
def ddp_hook_registered_by_hand() -> Any:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    net = nn.parallel.DistributedDataParallel(_with_group(model()))
    handler.register_comm_hook(net)
    return raised(lambda: handler.register_comm_hook(net))


def _with_group(net: nn.Module) -> nn.Module:
    Accelerator()
    return net


@program(ranks=2)
def process_group_settings() -> Any:
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=77), backend="gloo")
    accelerator = Accelerator(kwargs_handlers=[handler])
    return torch.distributed.get_backend(), accelerator.state.backend, accelerator.num_processes


def autocast_disabled() -> Any:
    return _trained(AutocastKwargs(enabled=False), mixed_precision="bf16")


def autocast_without_cache() -> Any:
    return _trained(AutocastKwargs(cache_enabled=False), mixed_precision="bf16")


def autocast_as_a_context() -> Any:
    accelerator = Accelerator(mixed_precision="bf16")
    left, right = torch.ones(2, 2), torch.ones(2, 2)
    found = []
    with accelerator.autocast():
        found.append((left @ right).dtype)
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        found.append((left @ right).dtype)
    with accelerator.autocast(), accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
        found.append((left @ right).dtype)
    return found, (left @ right).dtype


def autocast_without_precision() -> Any:
    accelerator = Accelerator()
    left = torch.ones(2, 2)
    with accelerator.autocast(), torch.autocast("cpu", torch.bfloat16), accelerator.autocast():
        return (left @ left).dtype


def profile_with_a_handler() -> Any:
    seen: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1, "skip_first": 0},
        on_trace_ready=lambda done: seen.append(len(done.key_averages()) > 0),
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    net = accelerator.prepare(model())
    with accelerator.profile() as profiler:
        for _ in range(4):
            net(torch.ones(2, 3))
            profiler.step()
    return seen


def profile_into_a_folder() -> Any:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir="traces")])
    with accelerator.profile() as profiler:
        torch.ones(2) + 1
    return sorted(path.name for path in Path("traces").iterdir()), len(profiler.key_averages()) > 0


def profile_with_an_argument() -> Any:
    accelerator = Accelerator()
    with accelerator.profile(ProfileKwargs(activities=["cpu"], profile_memory=True)) as profiler:
        torch.ones(2) @ torch.ones(2)
    return [each.key for each in profiler.key_averages() if each.key == "aten::dot"]


def parameters_of_the_scaler() -> Any:
    handler = GradScalerKwargs(init_scale=512.0, growth_factor=3.0, enabled=True)
    scaler = utils.get_grad_scaler(**handler.to_kwargs())
    return type(scaler).__name__, inspect.signature(utils.get_grad_scaler)


def mixed_precision_contexts() -> Any:
    found = []
    for native, handler in (
        (True, None),
        (False, None),
        (True, AutocastKwargs(enabled=False)),
        (False, AutocastKwargs()),
    ):
        Accelerator(mixed_precision="bf16")
        with utils.get_mixed_precision_context_manager(native, handler):
            found.append((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
    return found


def compiled_in_regions() -> Any:
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
    layers = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 1))
    net = accelerator.prepare_model(layers)
    regions = utils.compile_regions(nn.Sequential(nn.Linear(3, 3)), backend="eager")
    outputs = net.eval()(torch.ones(1, 3))
    return outputs, utils.has_compiled_regions(net), utils.has_compiled_regions(regions)


def type_of_compiled_regions() -> Any:
    return type(utils.compile_regions(nn.Sequential(nn.Linear(3, 3)), backend="eager"))


def dynamo_from_the_environment() -> Any:
    os.environ.update(ACCELERATE_DYNAMO_BACKEND="eager", ACCELERATE_DYNAMO_MODE="default")
    accelerator = Accelerator()
    return accelerator.state.dynamo_plugin, type(accelerator.prepare(model()))


def variables_stay_as_they_were() -> Any:
    before = dict(os.environ)
    FullyShardedDataParallelPlugin(fsdp_version=2)
    ParallelismConfig(tp_size=2)
    TorchDynamoPlugin(backend="eager")
    return sorted(name for name in os.environ if os.environ[name] != before.get(name))


def warnings_of_handlers() -> Any:
    with warnings.catch_warnings():
        return [
            warned(lambda: FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="FULL_SHARD"))[0],
            warned(lambda: FP8RecipeKwargs(backend="MSAMP"))[0],
            warned(lambda: InitProcessGroupKwargs())[0],
            logged(lambda: FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=True)),
            logged(lambda: FullyShardedDataParallelPlugin(use_orig_params=False, sync_module_states=False)),
        ]


def optimizers_of_libraries() -> Any:
    return raised(lambda: Accelerator().lomo_backward(torch.ones(1), 0.1)), type(optimizer()), accelerate.__name__
