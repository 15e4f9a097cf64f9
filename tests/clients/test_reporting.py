"""Trainers of other libraries report losses, steps and progress to the run, with every start method."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import ready_kernel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no lightning: make test-clients"),
    pytest.mark.timeout(900),  # This only guards against hangs: ranks import transformers and Lightning.
]
METHODS = pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])

CODE = """
import notebook_accelerate
notebook_accelerate.as_accelerate()

def trainer():
    from tests.clients.trainer import TinyConfig, TinyModel
    from transformers import Trainer, TrainingArguments
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": index % 2} for index in range(48)]
    settings = TrainingArguments(
        output_dir="trainer", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2, report_to="none",
        save_strategy="no",
    )
    made = Trainer(model=TinyModel(TinyConfig()), args=settings, train_dataset=data)
    made.train()
    return made.args.parallel_mode.name, made.state.global_step

def lightning(devices=2):
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            loss = self.layer(batch[0]).square().mean()
            self.log("train_loss", loss)
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    made = lightning.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=2, logger=False,
        enable_checkpointing=False,
    )
    made.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
    return made.world_size, made.global_step

def writers():
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=os.getcwd(), MLFLOW_ALLOW_FILE_STORE="true")
    import mlflow, wandb
    tracked = wandb.init(project="test", dir=os.getcwd())
    for step in range(3):
        wandb.log({"wandb_loss": 1.0 / (step + 1)}, step=step)
    tracked.finish()
    mlflow.set_tracking_uri(f"file://{os.getcwd()}/mlruns-{rank()}")
    with mlflow.start_run():
        for step in range(3):
            mlflow.log_metric("mlflow_loss", 0.5, step=step)
            mlflow.log_metrics({"mlflow_rate": 0.1}, step=step)

def points(run, name):
    series = run.metrics[name]
    return sorted(zip(series.ranks.tolist(), series.steps.tolist()))
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with ready_kernel() as kernel:
        kernel.check(CODE)
        yield kernel


def progress(kernel: Kernel) -> list[list[int]]:
    """Return the last step and the total that each rank reported."""
    found: list[list[int]] = kernel.value(
        "[[bar.step, bar.total] for _, bar in sorted(run._internals.store.loops.items())]"
    )
    return found


@METHODS
def test_the_trainer_of_transformers_reports_to_the_run(kernel: Kernel, method: str) -> None:
    cell = kernel.check(f"run = launch(trainer, start_method={method!r})")
    assert kernel.value("run.results") == [["DISTRIBUTED", 12]] * 2
    assert kernel.value("points(run, 'loss')") == [[rank, step] for rank in (0, 1) for step in range(2, 13, 2)]
    assert kernel.value("[row.last_step for row in run.ranks]") == [12, 12]
    assert [12, 12] in progress(kernel)
    assert "from a fork" not in cell.plain


@METHODS
def test_the_trainer_of_lightning_reports_to_the_run(kernel: Kernel, method: str) -> None:
    cell = kernel.check(f"run = launch(lightning, start_method={method!r})")
    assert kernel.value("run.results") == [[2, 16]] * 2
    assert kernel.value("points(run, 'train_loss')") == [[rank, step] for rank in (0, 1) for step in range(1, 17)]
    assert kernel.value("[row.last_step for row in run.ranks]") == [16, 16]
    assert "from a fork" not in cell.plain


def test_a_trainer_of_lightning_that_does_not_use_the_other_ranks_is_reported(kernel: Kernel) -> None:
    kernel.check("run = launch(lightning, 1)")
    assert kernel.value("[world for world, _ in run.results]") == [1, 1]
    [warning] = kernel.value("run.warnings")
    assert "2 ranks train without a process group" in warning
    assert warning.endswith("; write Trainer(devices=2, strategy='ddp')")


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_numbers_for_wandb_and_mlflow_reach_the_run(kernel: Kernel, method: str) -> None:
    kernel.check(f"run = launch(writers, start_method={method!r}, timeout=300)")
    for name in ("wandb_loss", "mlflow_loss", "mlflow_rate"):
        assert kernel.value(f"points(run, {name!r})") == [[rank, step] for rank in (0, 1) for step in range(3)]
