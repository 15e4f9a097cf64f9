"""Training code that uses no Accelerator reports to its run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import WARM_OPTIMIZER, ready_kernel

CODE = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

def loader():
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)

def train(pause=0.0, after=None):
    group()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(loader(), 1):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(pause)
        if after is not None:
            after(step, loss.item())
    return step

def lone():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in loader():
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()

def with_bars():
    from tqdm.auto import tqdm
    from rich.progress import Progress
    for _ in tqdm(range(12), desc="batches", mininterval=0):
        pass
    if rank() == 1:
        with Progress() as progress:
            task = progress.add_task("files", total=7)
            for _ in range(7):
                progress.advance(task)

def with_writer(**options):
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(f"board-{rank()}")
    train(after=lambda step, loss: writer.add_scalar("loss", loss, step))
    writer.close()

def with_accelerator():
    from notebook_accelerate import Accelerator
    accelerator = Accelerator(log_with="tensorboard", project_dir="project", gradient_accumulation_steps=2)
    accelerator.init_trackers("test")
    model = torch.nn.Linear(4, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    for step, (inputs, targets) in enumerate(data, 1):
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()

def points(run, name="loss"):
    series = run.metrics[name]
    return sorted(zip(series.ranks.tolist(), series.steps.tolist()))

"""
METHODS = pytest.mark.parametrize("method", ["fork", "zygote"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with ready_kernel() as kernel:
        kernel.check(WARM_OPTIMIZER)
        kernel.check(CODE)
        yield kernel


@METHODS
def test_a_plain_loop_has_steps_and_the_parts_of_their_time(kernel: Kernel, method: str) -> None:
    kernel.check(f"run = launch(train, 0.1, start_method={method!r})")
    assert kernel.value("run.results") == [24, 24]
    text = kernel.check("print(run.report())").stdout
    assert text.count("succeeded  24") == 2
    assert "ms per step" in text
    assert "waiting for data" in text


def test_ranks_that_train_apart_cause_a_warning(kernel: Kernel) -> None:
    cell = kernel.check("launch(lone)")
    assert cell.plain.count("2 ranks train without a process group") == 1
    assert "process group" not in kernel.check("launch(train)").plain
    assert "process group" not in kernel.check("launch(lone, num_processes=1, start_method='fork')").plain


def test_progress_bars_are_the_progress_of_the_run(kernel: Kernel) -> None:
    kernel.check("run = launch(with_bars)")
    found = kernel.value("[[bar.label, bar.step, bar.total] for _, bar in sorted(run._internals.store.loops.items())]")
    assert found == [["batches", 12, 12], ["files", 7, 7]]


def test_bars_of_a_kernel_that_draws_widgets_are_the_progress_of_its_ranks(kernel: Kernel) -> None:
    cell = kernel.check("from tqdm.auto import tqdm\nfor _ in tqdm(range(2)): pass")
    assert cell.comms, "the bar in the kernel is a widget"
    cell = kernel.check("run = launch(with_bars, start_method='fork', panel=False)")
    assert cell.comms == []
    assert cell.plain.count("batches: 100%") == 2
    found = kernel.value("[[bar.label, bar.step, bar.total] for _, bar in sorted(run._internals.store.loops.items())]")
    assert found == [["batches", 12, 12], ["files", 7, 7]]


@METHODS
def test_scalars_for_tensorboard_are_copied(kernel: Kernel, method: str) -> None:
    kernel.check(f"run = launch(with_writer, start_method={method!r})")
    assert kernel.value("points(run)") == [[rank, step] for rank in (0, 1) for step in range(1, 25)]


def test_values_that_an_accelerator_logs_are_not_copied_again(kernel: Kernel) -> None:
    kernel.check("run = launch(with_accelerator)")
    assert kernel.value("points(run)") == [[rank, step] for rank in (0, 1) for step in range(1, 13)]


def test_sources_can_be_switched_off(kernel: Kernel) -> None:
    kernel.check("from notebook_accelerate import LaunchConfig")
    kernel.check("run = launch(with_writer, config=LaunchConfig(report_from=('tqdm',)))")
    assert kernel.value("list(run.metrics)") == []
    error = kernel.run("LaunchConfig(report_from='tqdm')").error
    assert error is not None
    assert "such as ('transformers', 'tqdm')" in error.evalue


def test_a_run_in_the_kernel_reports_too(kernel: Kernel) -> None:
    kernel.check(
        "def one():\n    from torch.utils.tensorboard import SummaryWriter\n"
        "    writer = SummaryWriter('inline')\n    writer.add_scalar('loss', 0.5, 3)\n    writer.close()"
    )
    kernel.check("run = launch(one, num_processes=1, start_method='inline')")
    assert kernel.value("points(run)") == [[0, 3]]


def test_each_run_in_the_kernel_counts_its_own_steps(kernel: Kernel) -> None:
    for _ in range(2):
        kernel.check("run = launch(lone, num_processes=1, start_method='inline')")
        assert kernel.value("[row.last_step for row in run.ranks]") == [24]
