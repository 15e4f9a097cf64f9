"""A profile of transformers' Trainer: its steps, and a slow loader of one rank."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.launching import ready_kernel

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed: make test-clients"
    ),
    pytest.mark.timeout(900),  # against hangs only: ranks import transformers
]
CODE = """
import notebook_accelerate
notebook_accelerate.as_accelerate()

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.02 if rank() == 1 else 0.0)
        return {"x": torch.randn(4), "labels": index % 2}

def trainer():
    from tests.clients.trainer import TinyConfig, TinyModel
    from transformers import Trainer, TrainingArguments
    settings = TrainingArguments(
        output_dir="trainer", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1_000_000,
        logging_steps=2, report_to="none", save_strategy="no",
    )
    Trainer(model=TinyModel(TinyConfig()), args=settings, train_dataset=Slow()).train()
"""
FOUND = "[profile.missing, profile.steps, [[each.rule, each.ranks] for each in profile.findings], repr(profile)]"


def test_a_slow_loader_of_one_rank_is_named() -> None:
    with ready_kernel() as kernel:
        kernel.check(CODE)
        kernel.check("run = launch(trainer, block=False)", 300)
        kernel.check("while run.ended is None and run.store.last_step.get(0, 0) < 3: time.sleep(0.1)", 300)
        kernel.check("profile = run.profile(steps=4)", 300)
        assert kernel.value("run.error and str(run.error)") is None
        missing, steps, findings, shown = kernel.value(FOUND)
        assert (missing, steps) == ({}, 4), shown
        assert ["slow_loader", [1]] in findings, shown
        assert {rule for rule, _ in findings} <= {"slow_loader"}, shown
        linears = "sum(row.calls[0] for row in profile.ops() if row.name == 'aten::linear')"
        assert kernel.value(linears) == 4 * 2 * 2, "two layers, and two batches in each of the steps"
        kernel.check("run.stop()", 60)
