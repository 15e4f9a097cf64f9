"""Errors in Accelerate that no other program provokes; `condition_tables.py` lists all of them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, PartialState, big_modeling, utils
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, filter_trackers, register_tracker_class
from accelerate.utils import (
    AutocastKwargs,
    BnbQuantizationConfig,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProfileKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    modeling,
    operations,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.parity.behaviour.programs._parts import loader, model, optimizer

CALLS = [
    # Arguments of Accelerator.
    "Accelerator(mixed_precision='fp12')",
    "Accelerator(dynamo_plugin=TorchDynamoPlugin(), dynamo_backend='eager')",
    "Accelerator(deepspeed_plugin=1, deepspeed_plugins=2)",
    "Accelerator(deepspeed_plugin=3)",
    "Accelerator(fsdp_plugin=3)",
    "Accelerator(megatron_lm_plugin=3)",
    "Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])",
    "Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3))",
    # Methods of Accelerator.
    "Accelerator().tensor_parallel_rank",
    "Accelerator().pipeline_parallel_rank",
    "Accelerator().context_parallel_rank",
    "Accelerator().data_parallel_rank",
    "Accelerator().data_parallel_shard_rank",
    "Accelerator.on_main_process(len)",
    "Accelerator.on_local_main_process(len)",
    "Accelerator.on_last_process(len, None)",
    "Accelerator.on_process(len)",
    "Accelerator.on_local_process(len)",
    "Accelerator().prepare(model(), optimizer(), device_placement=[True])",
    "Accelerator().prepare(model(), device_placement=True)",
    "Accelerator().save_model(nn.Linear(1, 1, device='meta'), 'folder')",
    "_saved_twice()",
    "Accelerator().load_state('absent')",
    "Accelerator().load_state()",
    "Accelerator().register_for_checkpointing(3)",
    "Accelerator().lomo_backward(torch.ones(1), 0.1)",
    "_custom_objects_missing()",
    # Loaders.
    "BatchSamplerShard(_batches(3), 2, split_batches=True)",
    "IterableDatasetShard([1], batch_size=3, num_processes=2, split_batches=True)",
    "prepare_data_loader(loader(), num_processes=2, dispatch_batches=True)",
    "prepare_data_loader(loader(batch_size=3), num_processes=2, process_index=0, split_batches=True)",
    "prepare_data_loader(DataLoader([1], batch_size=None), num_processes=2, process_index=0, split_batches=True)",
    "Accelerator().prepare(loader()).absent",
    # States.
    "_with(_TWO_MACHINES, lambda: PartialState(cpu=True))",
    "PartialState().absent",
    "_after_reset(PartialState).device",
    "Accelerator().state.absent",
    "_after_reset(AcceleratorState, _from_accelerator=True).mixed_precision",
    "_again(mixed_precision='bf16')",
    # Settings.
    "utils.TERecipeKwargs()",
    "utils.MSAMPRecipeKwargs(opt_level='O3')",
    "utils.FP8RecipeKwargs(backend='nonsense')",
    "ProfileKwargs(activities=['nonsense']).build()",
    "DeepSpeedPlugin(hf_ds_config={})",
    "FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward='FULL_SHARD')",
    "FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward=True)",
    "FullyShardedDataParallelPlugin(auto_wrap_policy='nonsense')",
    "FullyShardedDataParallelPlugin(auto_wrap_policy='size_based_wrap', min_num_params='many')",
    "FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=True)",
    "FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing_offload=True)",
    "FullyShardedDataParallelPlugin(fsdp_version=1, activation_checkpointing=True, activation_checkpointing_offload=True)",
    "FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type='LOCAL_STATE_DICT')",
    "_wrapping('Absent')",
    "FullyShardedDataParallelPlugin(mixed_precision_policy='nonsense')",
    "FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy='nonsense')",
    "FullyShardedDataParallelPlugin(mixed_precision_policy={'nonsense': 1})",
    "FullyShardedDataParallelPlugin(mixed_precision_policy=3)",
    "FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=3)",
    "FullyShardedDataParallelPlugin(fsdp_version=1, cpu_offload=3)",
    "TorchContextParallelConfig('nonsense')",
    "utils.DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)",
    "utils.DeepSpeedSequenceParallelConfig(sp_attn_implementation='eager')",
    "utils.DeepSpeedSequenceParallelConfig(sp_attn_implementation='nonsense')",
    *(
        f"BnbQuantizationConfig({arguments})"
        for arguments in (
            "load_in_8bit=3",
            "load_in_4bit=3",
            "load_in_4bit=True, load_in_8bit=True",
            "",
            "load_in_8bit=True, llm_int8_threshold='six'",
            "load_in_4bit=True, bnb_4bit_quant_type=3",
            "load_in_4bit=True, bnb_4bit_quant_type='fp5'",
            "load_in_4bit=True, bnb_4bit_use_double_quant=3",
            "load_in_4bit=True, bnb_4bit_compute_dtype='fp5'",
            "load_in_4bit=True, bnb_4bit_compute_dtype=3",
            "load_in_8bit=True, skip_modules='head'",
            "load_in_8bit=True, keep_in_fp32_modules='head'",
            "load_in_8bit=True, torch_dtype='fp5'",
            "load_in_8bit=True, torch_dtype=3",
        )
    ),
    # Layouts.
    "ParallelismConfig(dp_shard_size=2).get_device_mesh()",
    "ParallelismConfig(cp_size=2, cp_handler=3)",
    *(f"ParallelismConfig({name}_size=0)" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
    "ParallelismConfig(cp_backend='nonsense')",
    "ParallelismConfig(sp_backend='nonsense')",
    "ParallelismConfig(cp_size=2, sp_size=2)",
    "ParallelismConfig(tp_size=2, dp_replicate_size=2)",
    "Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))",
    "_mesh_of_another_device()",
    "_context_parallel(sliding_window=8)",
    "_context_parallel(layer_types=['full_attention', 'chunked_attention'])",
    # Operations.
    "operations.recursively_apply(lambda item: item, object(), error_on_other_type=True)",
    "operations.find_batch_size([])",
    "operations.find_batch_size([object()])",
    "operations.concatenate([object(), object()])",
    "pickle.dumps(operations.ConvertOutputsToFp32(len))",
    # Big models.
    "modeling.convert_file_size_to_int('nonsense')",
    "modeling.convert_file_size_to_int('-1GB')",
    "modeling.dtype_byte_size(str)",
    "modeling.set_module_tensor_to_device(model(), 'absent.weight', 'cpu')",
    "modeling.set_module_tensor_to_device(model(), 'absent', 'cpu')",
    "modeling.set_module_tensor_to_device(nn.Linear(1, 1, device='meta'), 'weight', 'cpu')",
    "modeling.set_module_tensor_to_device(nn.Linear(1, 1), 'weight', 'cpu', torch.ones(3))",
    "modeling.set_module_tensor_to_device(nn.Linear(1, 1), 'weight', 'xpu')",
    "modeling.check_tied_parameters_on_same_device([['a.b', 'c']], {'a': 0})",
    "modeling.get_max_memory({'nonsense': 1})",
    "modeling.check_device_map(model(), {'first': 'cpu'})",
    "_loaded_with_format('nonsense')",
    "_loaded_with_format('tf')",
    "modeling.load_checkpoint_in_model(model(), 'absent', {'': 'disk'})",
    "modeling.load_checkpoint_in_model(model(), 'absent')",
    "modeling.load_checkpoint_in_model(model(), _folder())",
    "modeling.load_checkpoint_in_model(model(), _folder('a.index.json', 'b.index.json'))",
    "modeling.load_checkpoint_in_model(model(), _weights(), {'first': 'cpu'})",
    "utils.OffloadedWeightsLoader()",
    "big_modeling.dispatch_model(model(), {'first': 'cpu', 'norm': 'disk', 'second': 'cpu'})",
    "big_modeling.load_checkpoint_and_dispatch(model(), 'absent', 'nonsense')",
    # Trackers.
    "register_tracker_class(3)",
    "register_tracker_class(type('T', (GeneralTracker,), {'name': ''}))",
    "register_tracker_class(type('T', (GeneralTracker,), {'name': 't'}))",
    "type('T', (GeneralTracker,), {})()",
    "filter_trackers(['nonsense'])",
    "filter_trackers(['tensorboard'])",
    "_registered_tracker_without_folder()",
    # Other functions.
    "utils.compare_versions('torch', '~', '1')",
    "utils.find_executable_batch_size(lambda batch_size: None)(3)",
    "utils.find_executable_batch_size(_exhausting, starting_batch_size=2)()",
    "utils.tqdm(True, [1])",
    "Accelerator().prepare(optimizer()).optimizer and utils.deepspeed_required(print)()",
    "_zero_grad()",
]

CALLS_ON_TWO_RANKS = [
    "_split({'a': [1, 2, 3], 'b': [1, 2]})",
    "Accelerator().prepare(_mapped())",
    "Accelerator().prepare_model(_mapped())",
]

_TWO_MACHINES = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ""}


def _with(variables: dict[str, str], call: Callable[[], Any]) -> Any:
    os.environ.update(variables)
    return call()


def _batches(size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(6)), size, drop_last=False)


def _saved() -> str:
    Accelerator().save_state("saved")
    return "saved"


def _saved_twice() -> None:
    for _ in range(2):
        accelerator = Accelerator(
            project_config=utils.ProjectConfiguration("project", automatic_checkpoint_naming=True)
        )
        accelerator.save_state()


def _custom_objects_missing() -> None:
    folder = _saved()
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer(), 1))
    accelerator.load_state(folder)


def _mapped() -> nn.Module:
    net = model()
    net.hf_device_map = {"first": 0, "second": 1}  # type: ignore[assignment]
    return net


def _mesh_of_another_device() -> Any:
    layout = ParallelismConfig(dp_shard_size=2)
    layout.device_mesh = SimpleNamespace(device_type="cpu")
    return layout.get_device_mesh("cuda")


def _context_parallel(**config: Any) -> Any:
    """Prepare a model for context parallelism, with a stand-in for an Accelerator of several ranks."""
    net = model()
    net.config = SimpleNamespace(**config)  # type: ignore[assignment]
    layout = ParallelismConfig(cp_size=2)
    return Accelerator._prepare_cp(SimpleNamespace(parallelism_config=layout, torch_device_mesh={"cp": None}), net)


def _split(values: Any) -> Any:
    with PartialState().split_between_processes(values) as share:
        return share


def _after_reset(state: Any, **settings: Any) -> Any:
    Accelerator()
    kept = state(**settings)
    AcceleratorState._reset_state(True)
    return kept


def _again(**settings: Any) -> Any:
    Accelerator(mixed_precision="no")
    return AcceleratorState(**settings).mixed_precision


def _wrapping(name: str) -> None:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[name]
    )
    plugin.set_auto_wrap_policy(model())


def _weights() -> str:
    torch.save(model().state_dict(), "pytorch_model.bin")
    return "pytorch_model.bin"


def _folder(*names: str) -> str:
    Path("folder").mkdir()
    for name in names:
        (Path("folder") / name).write_text(json.dumps({"weight_map": {}}))
    return "folder"


def _loaded_with_format(name: str | None) -> Any:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, "x.safetensors", metadata=None if name is None else {"format": name})
    return modeling.load_state_dict("x.safetensors")


def _registered_tracker_without_folder() -> Any:
    class Tracker(GeneralTracker):
        name = "in_a_folder"
        requires_logging_directory = True

    register_tracker_class(Tracker)
    return filter_trackers(["in_a_folder"])


def _exhausting(batch_size: int) -> None:
    raise RuntimeError(f"CUDA out of memory. {batch_size}")


class _WithoutArguments(torch.optim.SGD):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()


def _zero_grad() -> None:
    Accelerator().prepare(_WithoutArguments(model().parameters(), lr=0.1)).zero_grad(set_to_none=False)
