"""Degrees of parallelism: variables, products, names of dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate.config.parallelism import TorchContextParallelConfig
from notebook_accelerate.config.parallelism_config import ParallelismConfig


def test_without_anything_every_degree_is_one() -> None:
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


def test_names_of_dimensions() -> None:
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


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"dp_shard_size": 0}, "dp_shard_size=0 is not allowed"),
        ({"tp_size": True}, "whole number"),
        ({"cp_size": 2, "sp_size": 2}, "both split sequences"),
        ({"dp_replicate_size": 2, "tp_size": 2}, r"ParallelismConfig\(dp_shard_size=2, tp_size=2\)"),
        ({"cp_backend": "ring"}, "cp_backend='ring' is not allowed; allowed: torch"),
    ],
)
def test_what_is_not_allowed_is_said(degrees: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ParallelismConfig(**degrees)


def test_a_product_that_is_not_the_world_is_shown_as_an_equation() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)
    with pytest.raises(
        ValueError, match=r"dp_replicate_size=2 \* dp_shard_size=3 = 6, but there are 4 ranks; set dp_sh"
    ):
        config.check_world_size(4)
    with pytest.raises(ValueError, match=r"= 6, but there are 3 ranks; start 6 ranks"):
        config.check_world_size(3)
