"""DeepSpeed launched from a notebook. Run these tests with `make test-deepspeed`."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from notebook_accelerate import DeepSpeedPlugin, LaunchConfig, notebook_launcher

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"
)


def make_training() -> Any:
    """Return a function like one defined in a cell."""

    def train(plugin: Any) -> dict[str, Any]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from notebook_accelerate import Accelerator

        torch.manual_seed(0)
        given = {} if plugin is None else {"deepspeed_plugin": plugin}
        accelerator = Accelerator(cpu=True, **given)
        model = torch.nn.Linear(4, 2)
        loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        found = {"losses": losses, "type": accelerator.distributed_type.value, "ranks": accelerator.num_processes}
        accelerator.end_training()
        accelerator.free_memory()  # end_training has already deleted the engine.
        return found

    return train


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_single_argument_selects_deepspeed(ranks: int) -> None:
    before = dict(os.environ)
    plugin = DeepSpeedPlugin(zero_stage=3)
    # Launch twice from one process: pass the plugin to the function first, and then to the launch.
    for argument, accelerator in ((plugin, None), (None, {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)})):
        config = LaunchConfig(accelerator=accelerator, use_port=0)
        run = notebook_launcher(make_training(), (argument,), num_processes=ranks, config=config)
        assert [result["type"] for result in run.results] == ["DEEPSPEED"] * ranks
        assert {result["ranks"] for result in run.results} == {ranks}
        losses = run.results[0]["losses"]
        assert losses[-1] < losses[0]
        assert dict(os.environ) == before
