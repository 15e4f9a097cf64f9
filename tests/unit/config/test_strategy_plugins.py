"""Plugins for parallel training: environment variables, defaults and checks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler
from notebook_accelerate.config.enums import CustomDtype
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin, get_module_class_from_name
from notebook_accelerate.config.low_precision import BnbQuantizationConfig
from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.config.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)


def test_fsdp_reads_its_variables_and_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B")
    before = dict(os.environ)
    with pytest.warns(UserWarning, match="sync_module_states is set to True"):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.sync_module_states is True
    assert plugin.transformer_cls_names_to_wrap == ["A", "B"]
    assert dict(os.environ) == before


def test_fsdp_2_shards_its_checkpoints_and_has_no_strategy() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.sharding_strategy is None
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"fsdp_version": 3}, "pass one of 1, 2"),
        ({"sharding_strategy": "HALF"}, "FULL_SHARD"),
        ({"reshard_after_forward": False}, 'sharding_strategy="SHARD_GRAD_OP"'),
        ({"cpu_offload": "yes"}, "cpu_offload is a str"),
        ({"mixed_precision_policy": "nonsense"}, "is not a dtype"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "SHARDED_STATE_DICT"),
    ],
)
def test_fsdp_errors_name_the_allowed_values(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FullyShardedDataParallelPlugin(**values)


def test_a_class_is_found_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.GELU()))
    assert get_module_class_from_name(model, "GELU") is torch.nn.GELU
    assert FullyShardedDataParallelPlugin.get_module_class_from_name(model, "Linear") is None


def test_deepspeed_reads_its_variables_and_checks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeepSpeedPlugin().zero_stage == 2
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "1")
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.zero3_init_flag, plugin.offload_param_device) == (3, True, "none")
    with pytest.raises(ValueError, match="zero_stage=4"):
        DeepSpeedPlugin(zero_stage=4)
    with pytest.raises(
        ValueError, match="offload_param_device='gpu' is not allowed; pass one of 'none', 'cpu', 'nvme'"
    ):
        DeepSpeedPlugin(offload_param_device="gpu")


def test_placeholders_keep_their_arguments() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer = DummyOptim(parameters, lr=0.1, betas=(0.9, 0.99))
    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    assert (optimizer.params, optimizer.lr, optimizer.kwargs) == (parameters, 0.1, {"betas": (0.9, 0.99)})
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.warmup_num_steps) == (optimizer, 10, 2)


def test_degrees_of_parallelism_are_whole_numbers() -> None:
    assert MegatronLMPlugin(tp_degree=2).tp_degree == 2
    with pytest.raises(ValueError, match="tp_degree=0"):
        MegatronLMPlugin(tp_degree=0)
    with pytest.raises(ValueError, match="tp_size='2'"):
        TorchTensorParallelPlugin(tp_size="2")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="enable_async_tp=True has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)


def test_context_parallelism_has_two_ways_to_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchContextParallelConfig().cp_comm_strategy == "allgather"
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    with pytest.raises(ValueError, match="pass one of 'allgather', 'alltoall'"):
        TorchContextParallelConfig(cp_comm_strategy="ring")


def test_sequence_parallelism_of_a_fixed_length_needs_the_length() -> None:
    assert DeepSpeedSequenceParallelConfig().sp_seq_length_is_variable is True
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation="kernels-community/flash-attn2")
    with pytest.raises(ValueError, match="pass sp_seq_length"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    with pytest.raises(ValueError, match="sp_attn_implementation='eager'"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")


def test_quantization_has_one_width_and_torch_dtypes() -> None:
    eight = BnbQuantizationConfig(load_in_8bit=True)
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16", bnb_4bit_quant_type="nf4")
    assert (eight.torch_dtype, eight.target_dtype) == (torch.float16, torch.int8)
    assert (four.torch_dtype, four.target_dtype) == (torch.bfloat16, CustomDtype.INT4)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "can't both be False"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "can't both be True"),
        ({"load_in_8bit": "yes"}, "must be a boolean"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "pass one of 'fp4', 'nf4'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"}, "pass one of 'fp32', 'fp16', 'bf16'"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "list of module names"),
    ],
)
def test_quantization_settings_are_checked(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        BnbQuantizationConfig(**values)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_refuses_settings_without_effect(version: int) -> None:
    with pytest.raises(ValueError, match="has no effect alone; pass activation_checkpointing=True, too"):
        FullyShardedDataParallelPlugin(fsdp_version=version, activation_checkpointing_offload=True)
    FullyShardedDataParallelPlugin(
        fsdp_version=version, activation_checkpointing=True, activation_checkpointing_offload=True
    )
    with pytest.raises(ValueError, match="min_num_params='many' is not allowed; pass a whole number"):
        FullyShardedDataParallelPlugin(fsdp_version=version, min_num_params="many")  # type: ignore[arg-type]
