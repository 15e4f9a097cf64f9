"""Errors of the Megatron-LM strategy, each of which contains the line to type."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accelerate import Accelerator
from notebook_accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin
from tests.megatron.trainings import Case, gpt, place, prepared, samples
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def _misuse() -> dict[str, str]:
    found = {}
    with place() as cpu:
        accelerator = Accelerator(cpu=cpu, megatron_lm_plugin=MegatronLMPlugin())
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters())
        found["alone"] = _refused(lambda: accelerator.prepare(model))
        found["optimizer"] = _refused(lambda: accelerator.prepare(optimizer))
        plain = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        found["schedule"] = _refused(lambda: accelerator.prepare(model, optimizer, plain))
        stand_in = MegatronLMDummyScheduler(optimizer)
        found["length"] = _refused(lambda: accelerator.prepare(model, optimizer, stand_in))
        found["kind"] = _refused(lambda: accelerator.prepare(torch.nn.Linear(2, 2), optimizer))
        rare = torch.optim.Rprop(model.parameters())
        found["rare"] = _refused(lambda: accelerator.prepare(model, rare))
        loader: Any = DataLoader(samples(), batch_size=None)  # type: ignore[arg-type]
        found["loader"] = _refused(lambda: accelerator.prepare(loader))
        engine, _ = accelerator.prepare(model, optimizer)
        found["twice"] = _refused(lambda: accelerator.prepare(model, torch.optim.AdamW(model.parameters())))
        found["names"] = _refused(lambda: engine(torch.zeros(2, 16)))
        found["value"] = _refused(lambda: accelerator.clip_grad_value_(engine.parameters(), 1.0))
        accelerator.end_training()
    return found


def test_objects_that_make_no_engine_are_refused_with_the_line_to_type() -> None:
    (found,) = run_ranks(_misuse, world_size=1)
    line = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    assert line in found["alone"]
    assert line in found["optimizer"]
    assert "pass MegatronLMDummyScheduler(optimizer, total_num_steps=" in found["schedule"]
    assert "total_num_steps=..." in found["length"]
    assert "@add_model_config_to_megatron_parser" in found["kind"]
    assert "gpt2, llama, megatron-bert, t5" in found["kind"]
    assert "Megatron-LM has no Rprop" in found["rare"]
    assert "DataLoader(dataset, batch_size=...)" in found["loader"]
    assert "accelerator.free_memory()" in found["twice"]
    assert "model(**batch)" in found["names"]
    assert "clip_grad_norm_" in found["value"]


def _schedule() -> list[tuple[float, float]]:
    with place() as cpu:
        accelerator, *_ = prepared(Case(), cpu)
        accelerator.free_memory()
        model = gpt()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1.0)
        stand_in: Any = MegatronLMDummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
        loader: Any = DataLoader(samples(), batch_size=4)  # type: ignore[arg-type]
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, stand_in)
        found = []
        for batch in loader:
            accelerator.backward(model(**batch))
            optimizer.step()
            schedule.step()
            found.append((schedule.get_last_lr()[0], optimizer.param_groups[0]["lr"]))
        with torch.no_grad():
            model.eval()
            before = [parameter.clone() for parameter in model.parameters()]
            assert model(**batch).item() > 0
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        accelerator.end_training()
    return found


def test_the_engine_steps_the_schedule_and_evaluation_does_not() -> None:
    (found,) = run_ranks(_schedule, world_size=1)
    assert [rate for rate, _ in found] == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    assert all(told == used for told, used in found)
