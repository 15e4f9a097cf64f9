"""When a kernel is killed during a kept run, another process opens the run and resumes its training."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from notebook_accelerate import notebook_launcher, open_run, runs
from notebook_accelerate.errors import RunLostError
from tests.support.kernel import Kernel
from tests.support.trainings import Counter
from tests.support.waiting import until

_CELL = """
import notebook_accelerate
from notebook_accelerate import Accelerator, notebook_launcher
from tests.faults.test_kept_runs import train

run = notebook_launcher(
    train, ({project!r}, 0.05, 400), num_processes=2, use_port=0, block=False, save={runs!r}, name="kept", panel=False
)
print(run.folder)
"""


def train(project: str, seconds: float, steps: int, fails_at: int = -1, stops_at: int = -1) -> list[float]:
    """Train, save every ten steps, and continue from a checkpoint if the launch requests it.

    Args:
        project: The folder for the checkpoints.
        seconds: The minimum duration of a step, until the folder contains a file "hurry".
        steps: The number of steps.
        fails_at: The step after which the function fails, unless it has continued from a checkpoint.
        stops_at: The step after which rank 1 stops at a breakpoint.
    """
    import notebook_accelerate
    from notebook_accelerate import Accelerator
    from notebook_accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    progress = Counter()
    accelerator.register_for_checkpointing(progress)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    checkpoint = notebook_accelerate.resumed_checkpoint()
    if checkpoint:
        accelerator.load_state(checkpoint)
    while progress.count < steps:
        generator = torch.Generator().manual_seed(progress.count * 2 + accelerator.process_index)
        loss = prepared(torch.randn(8, 4, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": float(loss.detach())}, step=progress.count)
        print("step", progress.count)
        progress.count += 1
        if progress.count == stops_at and accelerator.process_index == 1:
            breakpoint()  # noqa: T100 - what is tested
        time.sleep(0.0 if Path(project, "hurry").exists() else seconds)
        if progress.count % 10 == 0:
            accelerator.save_state()
        if progress.count == fails_at and not checkpoint:
            raise RuntimeError("as asked")
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def test_the_run_of_a_killed_kernel_can_be_followed_is_lost_and_can_be_resumed(tmp_path: Path) -> None:
    with Kernel() as kernel:
        cell = kernel.check(_CELL.format(project=str(tmp_path / "killed"), runs=str(tmp_path / "runs")))
        folder = Path(cell.stdout.strip().splitlines()[-1])
        until((folder / "journal.nbac").exists)
        until(lambda: open_run(folder).status == "running", seconds=120)
        followed = open_run(folder)
        until(lambda: runs(tmp_path / "runs")[0].status == "running", seconds=120)
        until(lambda: followed._internals.store.last_step.get(0, -1) >= 25, seconds=120)
        kernel.kill()
        killed = time.time()
    assert followed.wait(60)
    opened = open_run(folder)
    for run in (followed, opened):
        assert run.status == "lost"
        assert isinstance(run.error, RunLostError)
        assert killed - 1.5 < (run.ended or 0.0) < killed + 1.5, "at most the last second is missing"
        steps = run.metrics["loss"].rank(0).steps.tolist()
        assert steps == list(range(len(steps)))
    (row,) = runs(tmp_path / "runs")
    assert (row.name, row.status, row.arguments["steps"]) == ("kept", "lost", 400)

    number = len(opened.metrics["loss"].rank(0).steps)
    goal = number + 20
    resumed = notebook_launcher(
        train, (str(tmp_path / "killed"), 0.0, goal), config=opened.config.changed(block=True), resume=opened
    )
    check_history(resumed, goal, missing=20)  # The missing steps are those of the second before the kernel was killed.
    assert (resumed.resume_points[0].name, resumed.resume_points[0].status) == ("kept", "lost")
    undisturbed = notebook_launcher(
        train, (str(tmp_path / "plain"), 0.0, goal), num_processes=2, use_port=0, panel=False
    )
    assert resumed.results == undisturbed.results
    again = open_run(resumed.folder or "")
    check_history(again, goal, missing=20)
    assert again.resume_points == resumed.resume_points
    assert [each.name for each in runs(tmp_path / "runs")] == ["kept", "kept"]
    assert runs(tmp_path / "runs")[1].continues == ("kept",)


def check_history(run: object, goal: int, missing: int = 0) -> None:
    """Check that each rank's curve lacks at most ``missing`` steps, and that the resume point is marked."""
    series = run.metrics["loss"]  # type: ignore[attr-defined]
    for rank in (0, 1):
        steps = series.rank(rank).steps.tolist()
        assert steps == sorted(set(steps))
        assert goal - missing <= len(steps) <= goal
        assert steps[-1] == goal - 1
    (found,) = run.resume_points  # type: ignore[attr-defined]
    assert found.step is not None
    assert found.step % 10 == 9
    assert any("continues run" in note for note in run.notes)  # type: ignore[attr-defined]
    assert "continues run" in str(run.report())  # type: ignore[attr-defined]


def test_a_failed_run_resumes_with_its_configuration(tmp_path: Path) -> None:
    options = {"num_processes": 2, "use_port": 0, "start_method": "fork", "panel": False}
    run = notebook_launcher(train, (str(tmp_path / "a"), 0.0, 40, 25), block=False, **options)  # type: ignore[arg-type]
    assert run.wait(120)
    assert run.status == "failed"
    resumed = notebook_launcher(train, (str(tmp_path / "a"), 0.0, 40, 25), config=run.config, resume=run)
    assert resumed.wait(120)
    assert resumed.status == "succeeded", str(resumed.error)
    check_history(resumed, 40)
    assert (resumed.resume_points[0].status, resumed.resume_points[0].step) == ("failed", 19)
    undisturbed = notebook_launcher(train, (str(tmp_path / "b"), 0.0, 40), **options)  # type: ignore[arg-type]
    assert resumed.results == undisturbed.results
    assert resumed.name == run.name
    assert "ms per step" in str(undisturbed.report()), "even a run of less than a second reports its time per step"
