"""Degrees of parallelism: variables, products, and names of dimensions."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.config.config_file import ClusterConfig, load_config_from_file
from notebook_accelerate.config.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)


def test_all_degrees_are_one_by_default() -> None:
    config = ParallelismConfig()
    assert config.total_size == config.data_parallel_size == config.non_data_parallel_size == 1
    assert config.active_mesh_dims == config.dp_dim_names == config.dp_cp_dim_names == []
    assert config.build_device_mesh("cpu") is None
    assert config.get_device_mesh() is None


def test_degrees_come_from_arguments_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    config = ParallelismConfig(dp_replicate_size=2)
    assert (config.dp_replicate_size, config.dp_shard_size) == (2, 4)
    assert config.total_size == config.data_parallel_size == 8


DEGREES = {
    "data": {"dp_replicate": 2, "dp_shard": 3, "tp": 5, "cp": 7},
    "sequences": {"dp_replicate": 2, "sp": 3},
    "layers": {"dp_replicate": 2, "pp": 3},
    "experts": {"dp_replicate": 2, "dp_shard": 3, "ep": 5},
}


@pytest.mark.parametrize("which", DEGREES)
def test_every_degree_is_read_from_variables(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in DEGREES[which].items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", str(size))
    config = ParallelismConfig()
    assert {name: getattr(config, f"{name}_size") for name in DEGREES[which]} == DEGREES[which]
    assert set(config.active_mesh_dims) == DEGREES[which].keys()
    assert config.total_size == math.prod(DEGREES[which].values())
    assert config.total_size == config.data_parallel_size * config.non_data_parallel_size
    assert config == ParallelismConfig(**{f"{name}_size": size for name, size in DEGREES[which].items()})


def test_sequence_parallelism_is_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"SIZE": "2", "BACKEND": "deepspeed", "SEQ_LENGTH": "64", "ATTN_IMPLEMENTATION": "sdpa"}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_SP_{name}", text)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    config = ParallelismConfig()
    assert (config.sp_size, config.sp_backend, config.sp_enabled) == (2, "deepspeed", True)
    assert config.sp_handler == DeepSpeedSequenceParallelConfig(64, False, "sdpa")


FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: DEEPSPEED
mixed_precision: 'no'
num_processes: 4
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 1
  parallelism_config_sp_size: 2
  parallelism_config_pp_size: 1
  parallelism_config_ep_size: 1
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length_is_variable: true
  parallelism_config_sp_attn_implementation: sdpa
use_cpu: true
"""


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ParallelismConfig(2, sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(None, True, "sdpa"))),
        ({"sp": 1, "dp_shard": 2, "tp": 3, "cp": 5}, ParallelismConfig(2, 2, 3, 5)),
        ({"sp": 1, "dp_shard": 2, "ep": 3}, ParallelismConfig(2, 2, ep_size=3)),
        ({"sp": 1, "pp": 2}, ParallelismConfig(dp_replicate_size=2, pp_size=2)),
    ],
)
def test_every_degree_is_read_from_a_file(
    changed: dict[str, int], expected: ParallelismConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILE
    for name, size in changed.items():
        text = re.sub(f"(config_{name}_size:) .*", rf"\1 {size}", text)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    for name, value in config.to_environment().items():
        monkeypatch.setenv(name, value)
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert ParallelismConfig() == expected


def test_dimensions_have_names() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.non_dp_dim_names == ["cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "cp"]
    assert (config.data_parallel_size, config.non_data_parallel_size) == (4, 2)
    assert isinstance(config.cp_handler, TorchContextParallelConfig)
    assert config.to_json()["cp_handler"] == {"cp_comm_strategy": "allgather"}


def test_ranks_that_share_experts_read_the_same_data() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, ep_size=3)
    assert config.ep_enabled
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "ep"]
    assert config.non_dp_dim_names == ["ep"]
    assert "ep" not in {*config.fsdp_dim_names, *config.dp_shard_cp_dim_names, *config.dp_cp_dim_names}
    assert (config.data_parallel_size, config.non_data_parallel_size) == (4, 3)


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"ep_size": 2, "tp_size": 2}, "ep_size=2 with tp_size=2 is not supported; combine ep_size with dp_shard_size"),
        ({"ep_size": 2, "cp_size": 2, "tp_size": 3}, "ep_size=2 with cp_size=2 and tp_size=3 is not supported"),
        ({"ep_size": 2, "pp_size": 2}, "ep_size=2 with pp_size=2 is not supported"),
        ({"ep_size": 2, "sp_size": 2}, "ep_size=2 with sp_size=2 is not supported"),
        ({"dp_replicate_size": 2, "ep_size": 2}, r"ParallelismConfig\(dp_shard_size=2, ep_size=2\)"),
        ({"dp_shard_size": 0}, "dp_shard_size=0 is not allowed"),
        ({"tp_size": True}, "whole number"),
        ({"cp_size": 2, "sp_size": 2}, "both split sequences"),
        ({"pp_size": 2, "dp_shard_size": 2, "tp_size": 2}, "pp_size=2 .* dp_shard_size=2 and tp_size=2 would split"),
        ({"dp_replicate_size": 2, "tp_size": 2}, r"ParallelismConfig\(dp_shard_size=2, tp_size=2\)"),
        ({"cp_backend": "ring"}, "cp_backend='ring' is not allowed; pass one of 'torch'"),
    ],
)
def test_wrong_degrees_are_refused(degrees: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ParallelismConfig(**degrees)


def test_a_product_that_differs_from_the_world_is_shown_as_an_equation() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)
    with pytest.raises(
        ValueError, match=r"dp_replicate_size=2 \* dp_shard_size=3 = 6, but there are 4 ranks; set dp_sh"
    ):
        config.check_world_size(4)
    with pytest.raises(ValueError, match=r"= 6, but there are 3 ranks; start 6 ranks"):
        config.check_world_size(3)
