"""Profiles of transformers' and Lightning's Trainers: their steps, and one rank's slow loader."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.launching import ready_kernel

pytestmark = [
    pytest.mark.skipif(
        None in map(importlib.util.find_spec, ("transformers", "lightning")),
        reason="transformers and lightning are not installed: make test-clients",
    ),
    pytest.mark.timeout(900),  # This only guards against hangs: ranks import transformers or Lightning.
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

def lightning():
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        def training_step(self, batch, index):
            return self.layers(batch["x"]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    made = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        accumulate_grad_batches=2,
    )
    made.fit(Module(), torch.utils.data.DataLoader(Slow(), batch_size=4))
"""
FOUND = "[profile.missing, profile.steps, [[each.rule, each.ranks] for each in profile.findings], repr(profile)]"


@pytest.mark.parametrize("program", ["trainer", "lightning"])
def test_a_slow_loader_of_one_rank_is_named(program: str) -> None:
    with ready_kernel() as kernel:
        kernel.check(CODE)
        kernel.check(f"run = launch({program}, block=False)", 300)
        kernel.check("while run.ended is None and run._internals.store.last_step.get(0, 0) < 3: time.sleep(0.1)", 300)
        kernel.check("profile = run.profile(steps=4)", 300)
        assert kernel.value("run.error and str(run.error)") is None
        missing, steps, findings, shown = kernel.value(FOUND)
        assert (missing, steps) == ({}, 4), shown
        assert ["slow_loader", [1]] in findings, shown
        assert {rule for rule, _ in findings} <= {"slow_loader"}, shown
        linears = "sum(row.calls[0] for row in profile.ops() if row.name == 'aten::linear')"
        assert kernel.value(linears) == 4 * 2 * 2, "there are two layers, and two batches in each step"
        kernel.check("run.stop()", 60)
