"""A transformers model that is split by its own plan, either in `prepare` or while transformers loads it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import notebook_accelerate
from notebook_accelerate import Accelerator, ParallelismConfig
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed: make test-deepspeed"
    ),
    pytest.mark.timeout(700),  # This only guards against hangs: each rank imports transformers.
]
IDS = torch.arange(16).reshape(2, 8)


def _train(model: Any, optimizer: Any, accelerator: Accelerator | None = None) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        (accelerator.backward if accelerator else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _split(folder: str) -> dict[str, Any]:
    """Train three copies of a Llama: whole, split by `prepare`, and split by transformers during loading."""
    # transformers splits models only if it can import a package named `accelerate`.
    notebook_accelerate.as_accelerate()
    from transformers import DistributedConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    if accelerator.is_main_process:
        whole.save_pretrained(f"{folder}/model")
    accelerator.wait_for_everyone()
    found: dict[str, Any] = {"whole": _train(whole, _optimizer(whole))}
    for how in ("prepared", "loaded"):
        mesh = accelerator.torch_device_mesh["tp"]
        more = {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto"), "device_mesh": mesh}
        raw = LlamaForCausalLM.from_pretrained(f"{folder}/model", **(more if how == "loaded" else {}))
        split_before = hasattr(raw.model.layers[0].mlp.up_proj.weight, "device_mesh")
        model, optimizer = accelerator.prepare(raw, _optimizer(raw))
        weight = model.model.layers[0].mlp.up_proj.weight
        losses = _train(model, optimizer, accelerator)
        found[how] = {"split before": split_before, "shape": list(weight.to_local().shape), "losses": losses}
        accelerator.free_memory()
    return found


def test_a_model_split_by_its_plan_trains_like_the_whole(tmp_path: Path) -> None:
    results = run_ranks(_split, str(tmp_path), env={"HF_HUB_OFFLINE": "1"}, timeout=600)
    for found in results:
        for how in ("prepared", "loaded"):
            assert found[how]["split before"] == (how == "loaded")
            assert found[how]["shape"] == [32, 32], "each rank has half of the columns"
            assert found[how]["losses"] == pytest.approx(found["whole"], rel=1e-5)
        assert found["whole"][-1] < found["whole"][0]
