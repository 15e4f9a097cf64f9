"""The mesh of ranks that a `ParallelismConfig` creates."""

from __future__ import annotations

import math
import warnings
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accelerate.utils import TorchTensorParallelConfig
from tests.support.ranks import RankError, run_ranks


def arranged(**degrees: Any) -> dict[str, Any]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**degrees))
    mesh = accelerator.torch_device_mesh
    return {
        "names": mesh.mesh_dim_names,
        "coordinate": tuple(mesh.get_coordinate()),
        "dp": accelerator.state.parallelism_config.device_mesh["dp"].mesh.tolist(),
        "replica": accelerator.data_parallel_rank,
        "shard": accelerator.data_parallel_shard_rank,
        "type": accelerator.distributed_type.value,
    }


def two_shards() -> dict[str, Any]:
    return arranged(dp_shard_size=2)


def two_replicas() -> dict[str, Any]:
    return arranged(dp_replicate_size=2)


def without_degrees() -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = arranged(tp_handler=TorchTensorParallelConfig())
    texts = [str(each.message) for each in caught]
    return found, [text for text in texts if "ParallelismConfig" in text]


def replicas_of_shards() -> dict[str, Any]:
    return arranged(dp_replicate_size=2, dp_shard_size=2)


def test_two_ranks_are_shards_or_replicas() -> None:
    for rank, found in enumerate(run_ranks(two_shards)):
        assert found["names"] == ("dp_shard",)
        assert (found["shard"], found["replica"], found["type"]) == (rank, 0, "FSDP")
    for rank, found in enumerate(run_ranks(two_replicas)):
        assert (found["replica"], found["shard"], found["type"]) == (rank, 0, "MULTI_CPU")


def test_a_layout_without_degrees_means_replicas() -> None:
    first, second = run_ranks(without_degrees)
    assert first[0]["names"] == second[0]["names"] == ("dp_replicate",)
    assert first[1] == ["ParallelismConfig ignores its tp_handler, because tp_size is 1"]
    assert second[1] == []


def test_four_ranks_are_replicas_of_shards() -> None:
    for rank, found in enumerate(run_ranks(replicas_of_shards, world_size=4)):
        assert found["names"] == ("dp_replicate", "dp_shard")
        assert found["coordinate"] == (found["replica"], found["shard"]) == divmod(rank, 2)
        assert found["dp"] == [0, 1, 2, 3]


def shards_of_split_tensors() -> dict[str, Any]:
    return {**arranged(dp_shard_size=2, tp_size=2), **places()}


def shards_and_split_sequences() -> dict[str, Any]:
    return {**arranged(dp_shard_size=2, cp_size=2), **places()}


def places() -> dict[str, Any]:
    accelerator = Accelerator()
    mesh = accelerator.torch_device_mesh
    return {
        "tensors": accelerator.tensor_parallel_rank,
        "sequences": accelerator.context_parallel_rank,
        "shards": mesh["dp_shard_cp"].mesh.tolist(),
        "composable": accelerator.is_composable_parallelism_enabled,
    }


def test_four_ranks_combine_shards_with_split_tensors_or_sequences() -> None:
    for rank, found in enumerate(run_ranks(shards_of_split_tensors, world_size=4)):
        assert found["names"] == ("dp_shard", "tp")
        assert found["coordinate"] == (found["shard"], found["tensors"]) == divmod(rank, 2)
        assert found["dp"] == found["shards"] == [rank % 2, rank % 2 + 2]
        assert found["composable"]
    for rank, found in enumerate(run_ranks(shards_and_split_sequences, world_size=4)):
        assert found["names"] == ("dp_shard", "cp")
        assert found["coordinate"] == (found["shard"], found["sequences"]) == divmod(rank, 2)
        assert found["dp"] == [rank % 2, rank % 2 + 2]
        assert found["shards"] == [0, 1, 2, 3]


def too_many() -> None:
    arranged(dp_shard_size=2, dp_replicate_size=2)


def test_a_layout_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(RankError, match=r"dp_replicate_size=2 \* dp_shard_size=2 = 4, but there are 2 ranks"):
        run_ranks(too_many)


def with_the_first_version() -> None:
    Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2), fsdp_plugin=FullyShardedDataParallelPlugin())


def with_nothing_to_shard() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2), fsdp_plugin=plugin)


def with_split_sequences(**more: Any) -> None:
    Accelerator(parallelism_config=ParallelismConfig(sp_size=2), **more)


def with_split_sequences_and_shards() -> None:
    with_split_sequences(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def with_split_sequences_and_tensors() -> None:
    Accelerator(parallelism_config=ParallelismConfig(sp_size=2, tp_size=2))


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_splitting_sequences_requires_deepspeed() -> None:
    with pytest.raises(RankError, match=r"DeepSpeed, which is not installed: pip install 'deepspeed>=0\.16'"):
        run_ranks(with_split_sequences)


def test_plugins_that_contradict_the_layout_are_refused() -> None:
    with pytest.raises(RankError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2\)"):
        run_ranks(with_the_first_version)
    with pytest.raises(RankError, match="pass dp_shard_size above 1"):
        run_ranks(with_nothing_to_shard)
    with pytest.raises(RankError, match=r"sp_size=2 needs DeepSpeed, and fsdp_plugin .*\(cp_size=2\)"):
        run_ranks(with_split_sequences_and_shards)
    with pytest.raises(RankError, match=r"sp_size=2 with tp_size=2 is not allowed: .*; pass tp_size=1"):
        run_ranks(with_split_sequences_and_tensors, world_size=4)


SAMPLES = 8


class Net(nn.Module):
    """Two layers that tensor parallelism splits."""

    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


def scheduled(degrees: dict[str, int]) -> tuple[int, int, float]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**degrees))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=SAMPLES)
    loader = DataLoader(TensorDataset(torch.ones(SAMPLES, 4)), batch_size=1)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    steps = 0
    for (x,) in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
    return steps, schedule.scheduler.last_epoch, schedule.get_last_lr()[0]


@pytest.mark.parametrize(
    ("degrees", "readers"),
    [
        ({"tp_size": 2}, 1),
        ({"cp_size": 2}, 1),
        ({"dp_replicate_size": 2}, 2),
        ({"dp_shard_size": 2, "tp_size": 2}, 2),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, 4),
    ],
    ids=str,
)
def test_a_schedule_ends_with_the_data(degrees: dict[str, int], readers: int) -> None:
    found = run_ranks(scheduled, degrees, world_size=math.prod(degrees.values()))
    assert found == [(SAMPLES // readers, SAMPLES, 0.5)] * len(found)
