"""The mesh of ranks that a `ParallelismConfig` makes."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.support.ranks import RankError, run_ranks


def arranged(**degrees: int) -> dict[str, Any]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**degrees))
    mesh = accelerator.torch_device_mesh
    return {
        "names": mesh.mesh_dim_names,
        "coordinate": tuple(mesh.get_coordinate()),
        "dp": accelerator.state.parallelism_config._mesh["dp"].mesh.tolist(),
        "replica": accelerator.data_parallel_rank,
        "shard": accelerator.data_parallel_shard_rank,
        "type": accelerator.distributed_type.value,
    }


def two_shards() -> dict[str, Any]:
    return arranged(dp_shard_size=2)


def two_replicas() -> dict[str, Any]:
    return arranged(dp_replicate_size=2)


def replicas_of_shards() -> dict[str, Any]:
    return arranged(dp_replicate_size=2, dp_shard_size=2)


def test_two_ranks() -> None:
    for rank, found in enumerate(run_ranks(two_shards)):
        assert found["names"] == ("dp_shard",)
        assert (found["shard"], found["replica"], found["type"]) == (rank, 0, "FSDP")
    for rank, found in enumerate(run_ranks(two_replicas)):
        assert (found["replica"], found["shard"], found["type"]) == (rank, 0, "MULTI_CPU")


def test_four_ranks() -> None:
    for rank, found in enumerate(run_ranks(replicas_of_shards, world_size=4)):
        assert found["names"] == ("dp_replicate", "dp_shard")
        assert found["coordinate"] == (found["replica"], found["shard"]) == divmod(rank, 2)
        assert found["dp"] == [0, 1, 2, 3]


def too_many() -> None:
    arranged(dp_shard_size=2, dp_replicate_size=2)


def test_a_product_that_is_not_the_world() -> None:
    with pytest.raises(RankError, match=r"dp_replicate_size=2 \* dp_shard_size=2 = 4, but there are 2 ranks"):
        run_ranks(too_many)


def with_the_first_version() -> None:
    Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2), fsdp_plugin=FullyShardedDataParallelPlugin())


def with_nothing_to_shard() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2), fsdp_plugin=plugin)


def with_split_sequences() -> None:
    Accelerator(parallelism_config=ParallelismConfig(sp_size=2))


def test_sequences_that_deepspeed_would_split() -> None:
    with pytest.raises(RankError, match=r"sp_size=2: .* is not available .*ParallelismConfig\(cp_size=2\)"):
        run_ranks(with_split_sequences)


def test_plugins_that_contradict_the_layout() -> None:
    with pytest.raises(RankError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2\)"):
        run_ranks(with_the_first_version)
    with pytest.raises(RankError, match="set dp_shard_size above 1"):
        run_ranks(with_nothing_to_shard)
