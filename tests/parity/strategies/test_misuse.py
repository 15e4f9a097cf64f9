"""Unsupported training raises an error whose message says in one sentence what to write instead."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accelerate.utils import MegatronLMPlugin
from tests.parity.strategies.cells import assert_notices_saving_alone, patient
from tests.parity.strategies.scripts import accelerator_of, parts
from tests.parity.strategies.table import case_of
from tests.support.ranks import RankError, run_ranks

ONCE_A_NIGHT = ["fsdp1, gradients and optimizer", "tp", "fsdp2, compiled regions", "tp, compiled regions"]


@patient
@pytest.mark.parametrize(
    "name", ["fsdp1", "fsdp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ONCE_A_NIGHT)]
)
def test_saving_on_the_main_rank_alone_is_detected(name: str, tmp_path: Path) -> None:
    assert_notices_saving_alone(case_of(name, 2), tmp_path)


def arranged(**degrees: int) -> None:
    Accelerator(parallelism_config=ParallelismConfig(**degrees))


@pytest.mark.parametrize(
    ("degrees", "equation"),
    [
        ({"dp_shard_size": 2, "tp_size": 2}, r"dp_shard_size=2 \* tp_size=2 = 4, but there are 2 ranks"),
        ({"dp_replicate_size": 3}, r"dp_replicate_size=3 = 3, but there are 2 ranks"),
        ({"tp_size": 4}, r"tp_size=4 = 4, but there are 2 ranks"),
        ({"cp_size": 3}, r"cp_size=3 = 3, but there are 2 ranks"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_world_size_are_refused(degrees: dict[str, int], equation: str) -> None:
    with pytest.raises(RankError, match=equation) as caught:
        run_ranks(arranged_by, degrees)
    assert isinstance(caught.value.__cause__, ValueError)


def arranged_by(degrees: dict[str, int]) -> None:
    arranged(**degrees)


MISSING = {
    "deepspeed": (lambda: Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin()), r"pip install 'deepspeed>=0\.16'"),
    "megatron": (lambda: Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()), r"pip install 'megatron-core"),
}


@pytest.mark.parametrize("library", MISSING)
def test_a_missing_library_is_named(library: str) -> None:
    if find_spec(library) is not None:
        pytest.skip(f"{library} is installed")
    make, line = MISSING[library]
    with pytest.raises(ImportError, match=line):
        make()


PAIRS: dict[str, dict[str, Any]] = {
    "deepspeed_plugin and fsdp_plugin": {
        "deepspeed_plugin": DeepSpeedPlugin,
        "fsdp_plugin": FullyShardedDataParallelPlugin,
    },
    "fsdp_plugin and megatron_lm_plugin": {
        "fsdp_plugin": FullyShardedDataParallelPlugin,
        "megatron_lm_plugin": MegatronLMPlugin,
    },
    "deepspeed_plugin and megatron_lm_plugin": {
        "deepspeed_plugin": DeepSpeedPlugin,
        "megatron_lm_plugin": MegatronLMPlugin,
    },
}


@pytest.mark.parametrize("pair", PAIRS)
def test_plugins_that_contradict_each_other_are_refused(pair: str) -> None:
    with pytest.raises(ValueError, match=f"{pair} contradict each other: a model is trained by one of them"):
        Accelerator(cpu=True, **{name: make() for name, make in PAIRS[pair].items()})


def arranged_beside(plugin: str) -> None:
    given = {"deepspeed_plugin": DeepSpeedPlugin, "megatron_lm_plugin": MegatronLMPlugin}[plugin]()
    Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2), **{plugin: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("plugin", ["deepspeed_plugin", "megatron_lm_plugin"])
def test_degrees_combined_with_an_engine_are_refused(plugin: str) -> None:
    with pytest.raises(RankError, match=rf"dp_shard_size=2.* and {plugin} contradict each other: .* omit {plugin} or"):
        run_ranks(arranged_beside, plugin)


def made_too_early(name: str) -> None:
    accelerator = accelerator_of(case_of(name, 2))
    model, optimizer = parts()
    stale = torch.optim.SGD([parameter.detach().clone().requires_grad_() for parameter in model.parameters()], lr=0.1)
    accelerator.prepare(model, optimizer)
    accelerator.prepare(stale)


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "tp"])
def test_an_optimizer_of_unsharded_weights_is_refused(name: str) -> None:
    with pytest.raises(RankError, match="SGD has no parameter of a prepared model: it was created before the model"):
        run_ranks(made_too_early, name)
