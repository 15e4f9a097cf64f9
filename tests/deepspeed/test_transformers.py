"""transformers and DeepSpeed: models that are sharded while they are built, and the Trainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import Accelerator, DeepSpeedPlugin
from tests.clients.test_trainer import train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or importlib.util.find_spec("transformers") is None,
    reason="DeepSpeed and transformers are not installed: make test-deepspeed",
)
CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def born_in_pieces() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    plugin = accelerator.deepspeed_plugin
    shape = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    found: dict[str, Any] = {
        "on": is_deepspeed_zero3_enabled(),
        "stage": deepspeed_config()["zero_optimization"]["stage"],
    }
    found["resting"] = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    with plugin.zero3_init_context_manager(enable=False):
        found["off"] = is_deepspeed_zero3_enabled()
        found["whole"] = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    found["on again"] = is_deepspeed_zero3_enabled()
    return found


def test_models_are_sharded_while_they_are_built() -> None:
    found = run_ranks(born_in_pieces, timeout=400)[0]
    assert found["on"]
    assert found["stage"] == 3
    assert not found["off"]
    assert found["on again"]
    assert found["resting"] == 0 < found["whole"]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_the_trainer_trains_like_one_process(stage: int, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 1, {})[0]
    (tmp_path / "alone").rename(tmp_path / "before")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    first, second = train(tmp_path, 2, {"deepspeed": {**CONFIG, "zero_optimization": zero}})
    assert first["strategy"] == second["strategy"] == "deepspeed"
    assert first["steps"] == first["resumed_steps"] == 6
    assert first["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    assert first["resumed"] == pytest.approx(first["weights"], rel=1e-6)
