"""transformers' mixtures of experts, split across ranks. Run these tests with `make test-clients`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator, ParallelismConfig
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed: make test-clients"
    ),
    pytest.mark.timeout(700),  # This only guards against hangs: each rank imports transformers.
]
IDS = torch.arange(32).reshape(4, 8)
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_experts_per_tok": 2}  # fmt: skip
MODELS = {
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 4, "output_router_logits": True},
    "Qwen2Moe": {"intermediate_size": 24, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
                 "num_experts": 4},
    "GptOss": {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8},
}  # fmt: skip


def _train(model: Any, ids: torch.Tensor, accelerator: Accelerator | None = None) -> dict[str, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        (accelerator.backward if accelerator else torch.Tensor.backward)(loss)
        clip: Any = accelerator.clip_grad_norm_ if accelerator else torch.nn.utils.clip_grad_norm_
        found["norms"].append(clip(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean") if accelerator else loss
        found["losses"].append(mean.item())
    return found


def _split(name: str, implementation: str, degrees: dict[str, Any]) -> dict[str, Any]:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    torch.manual_seed(0)
    whole = getattr(transformers, f"{name}ForCausalLM")(config)
    raw = getattr(transformers, f"{name}ForCausalLM")(config)
    raw.load_state_dict(whole.state_dict())
    for model in (whole, raw):
        model.set_experts_implementation(implementation)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
    rank, shards = accelerator.process_index // 2, degrees.get("dp_shard_size", 1)
    model = accelerator.prepare(raw)
    up = model.model.layers[0].mlp.experts.gate_up_proj
    found = {"whole": _train(whole, IDS), "split": _train(model, IDS.chunk(shards)[rank], accelerator)}
    state = accelerator.get_state_dict(model)
    same = all(torch.allclose(state[key], value, atol=1e-5) for key, value in whole.state_dict().items() if state)
    return {**found, "placements": str(up.placements), "same": same}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_split_experts_of_transformers_train_like_whole_ones(name: str, implementation: str) -> None:
    for found in run_ranks(_split, name, implementation, {"ep_size": 2}, env={"HF_HUB_OFFLINE": "1"}, timeout=600):
        assert found["split"]["losses"] == pytest.approx(found["whole"]["losses"], rel=1e-5)
        assert found["split"]["norms"] == pytest.approx(found["whole"]["norms"], rel=1e-4)
        assert found["placements"] == "(Shard(dim=0),)"
        assert found["same"]


def test_sharded_experts_of_transformers_train_like_whole_ones() -> None:
    degrees = {"dp_shard_size": 2, "ep_size": 2}
    # Leave out Mixtral: its router's balancing loss over a batch is not the mean of the losses over its halves.
    for found in run_ranks(_split, "Qwen2Moe", "eager", degrees, world_size=4, env={"HF_HUB_OFFLINE": "1"}):
        assert found["split"]["losses"] == pytest.approx(found["whole"]["losses"], rel=1e-5)
        assert found["same"]
