"""Models whose experts are split across ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, ParallelismConfig
from notebook_accelerate.hardware.versions import is_torch_version
from notebook_accelerate.strategies.expert_parallel import MINIMUM
from tests.parity.strategies.scripts import held
from tests.support.experts import EXPERTS, STEPS, Experts, ExpertTraining, make, plain
from tests.support.nightly import rest_nightly
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.skipif(is_torch_version("<", MINIMUM), reason=f"expert parallelism needs torch {MINIMUM}")

HALF = STEPS // 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"ep_size": 2},
    "one expert for each rank": {"ep_size": 4},
    "shards": {"dp_shard_size": 2, "ep_size": 2},
    "shards, one expert for each rank": {"dp_shard_size": 2, "ep_size": 4},
    "replicas of shards": {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2},
}


def ranks_of(degrees: dict[str, Any]) -> int:
    return ParallelismConfig(**degrees).total_size


def attributes_of(model: Any) -> tuple[list[str], int]:
    """Return the attributes that hide parameters in a layer of experts, and the layer's number of experts."""
    layer = model.blocks[0].experts
    return sorted(layer.__dict__.keys() & dict(layer.named_parameters()).keys()), layer.num_experts


def trained(degrees: dict[str, Any], folder: str) -> dict[str, Any]:
    training = ExpertTraining(degrees)
    accelerator, model = training.accelerator, training.model
    training.train()
    accelerator.save_model(model, folder)
    return {
        "losses": training.losses,
        "norms": training.norms,
        "router": training.router_gradients,
        "held": held(model.blocks[0].experts.up),
        "names": [name for name, _ in model.named_parameters()],
        "state": accelerator.get_state_dict(model),
        "strategy": accelerator.strategy.name,
        "attributes": attributes_of(model),
        "sharded": accelerator.strategy.sharding().held["parameters"].sharded,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_plain_torch(layout: str, tmp_path: Path) -> None:
    degrees = LAYOUTS[layout]
    losses, norms, weights = plain()
    results = run_ranks(trained, degrees, str(tmp_path), world_size=ranks_of(degrees))
    for found in results:
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        assert found["router"] == results[0]["router"]
        assert found["names"] == [name for name, _ in make()[0].named_parameters()]
        assert found["attributes"] == ([], EXPERTS)
        assert "ep" in found["sharded"]
        assert found["strategy"] == ("fsdp2" if "dp_shard_size" in degrees else "ep")
    whole, parts = weights["blocks.0.experts.up"].numel(), sum(found["held"] for found in results)
    assert parts == whole * degrees.get("dp_replicate_size", 1)
    for name, weight in weights.items():
        torch.testing.assert_close(results[0]["state"][name], weight, rtol=1e-4, atol=1e-5)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == weights.keys()
    torch.testing.assert_close(saved["blocks.0.experts.down"], results[0]["state"]["blocks.0.experts.down"])


def trained_in_units(fsdp: dict[str, Any]) -> tuple[list[float], list[float]]:
    training = ExpertTraining(LAYOUTS["shards"], fsdp)
    training.train()
    return training.losses, training.norms


@pytest.mark.parametrize(
    ("units", "more"),
    rest_nightly(
        product(
            ["Mixture", "Mixture,Experts"],
            [
                {},
                {"activation_checkpointing": True},
                {"cpu_ram_efficient_loading": True},
                {"reshard_after_forward": False},
            ],
        ),
        daily=lambda units, more: not more or "Experts" in units,
    ),
    ids=str,
)
def test_experts_may_be_units_of_fsdp(units: str, more: dict[str, Any]) -> None:
    fsdp = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": units.split(","), **more}
    losses, norms, _ = plain()
    for found in run_ranks(trained_in_units, fsdp, world_size=4):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)


def saved(degrees: dict[str, Any], folder: str) -> None:
    training = ExpertTraining(degrees)
    training.train(0, HALF)
    training.accelerator.save_state(folder)


def resumed(degrees: dict[str, Any], folder: str) -> list[float]:
    training = ExpertTraining(degrees)
    training.accelerator.load_state(folder, elastic=True)
    training.train(HALF)
    return training.losses


@pytest.mark.parametrize(
    ("first", "second"), [("ep", "ep"), ("shards", "shards"), ("ep", "one expert for each rank"), ("shards", "ep")]
)
def test_checkpoints_resume_with_other_layouts(first: str, second: str, tmp_path: Path) -> None:
    losses = plain()[0][HALF:]
    run_ranks(saved, LAYOUTS[first], str(tmp_path), world_size=ranks_of(LAYOUTS[first]))
    for found in run_ranks(resumed, LAYOUTS[second], str(tmp_path), world_size=ranks_of(LAYOUTS[second])):
        assert found == pytest.approx(losses, rel=1e-5)


def attributes_after_an_error() -> tuple[list[str], Any]:
    model = ExpertTraining({"ep_size": 2}).model
    experts = model.blocks[0].experts
    index = torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(RuntimeError):
        experts(torch.zeros(3, 5), index, torch.ones(3, 1))  # The hidden states have the wrong size.
    return attributes_of(model)


def test_a_failed_forward_restores_the_layer() -> None:
    assert run_ranks(attributes_after_an_error) == [([], EXPERTS)] * 2


def refused(reason: str) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(ep_size=2))
    model: Any = make()[0]
    if reason == "none":
        model = nn.Linear(2, 2)
    elif reason == "list":
        model.blocks[0].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    elif reason == "odd":
        model.blocks[0].experts = Experts(3)
    elif reason == "dropout":
        model.blocks[0].experts.dropout = nn.Dropout(0.1)
    elif reason == "others":
        model.blocks[0].experts.scale = nn.Parameter(torch.ones(2))
    model = accelerator.prepare(model)
    if reason == "call":
        model.blocks[0].experts(torch.zeros(3, 8))


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("none", "Linear has no module named 'experts', which ep_size would split"),
        ("list", r"blocks.0.experts \(ModuleList\) cannot be split by ep_size: .* nn.ModuleList .* not supported"),
        ("others", r"blocks.0.experts \(Experts\) cannot be split by ep_size"),
        ("odd", "blocks.0.experts has 3 experts, which is not a multiple of ep_size=2"),
        ("dropout", "blocks.0.experts uses dropout"),
        ("call", r"call it as experts\(hidden_states, top_k_index, top_k_weights\)"),
    ],
)
def test_models_that_cannot_be_split_are_refused(reason: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, reason)
