"""Detached runs whose real kernels are killed, and which are then attached to again, controlled, or lost."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest

from notebook_accelerate import LaunchError, Run, RunLostError, attach, notebook_launcher, open_run, runs, shutdown
from notebook_accelerate.errors import BrokenRunError, SerializationError
from notebook_accelerate.launch import detached_launch
from notebook_accelerate.launch.detached import run_directory
from tests.faults.test_kept_runs import check_history, train
from tests.support.connections import connections
from tests.support.detached import disconnect_all, processes_of, supervisor_of, user_folder
from tests.support.kernel import Kernel
from tests.support.waiting import until

_TRAIN = """
import time, notebook_accelerate
from notebook_accelerate import Accelerator, notebook_launcher
from tests.faults.test_kept_runs import train as train_model

def train(project, seconds, steps, fails_at=-1, stops_at=-1):
    accelerator = Accelerator(cpu=True)
    for step in range(steps if stops_at >= 0 or fails_at >= 0 else 0):
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
        print("step", step, flush=True)
        time.sleep(seconds)
        if step == stops_at and accelerator.process_index == 1:
            breakpoint()
        if step == fails_at:
            raise RuntimeError("as asked")
    if stops_at < 0 and fails_at < 0:
        return train_model(project, seconds, steps)
    return step
"""
_LAUNCH = """
run = notebook_launcher(train, {arguments}, num_processes=2, use_port=0, detach=True, name={name!r}, panel=False{more})
print(run.folder)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the user's detached runs, and stop them at the end of the test."""
    with user_folder(tmp_path / "state", monkeypatch) as folder:
        yield folder


def _launch(kernel: Kernel, name: str, arguments: str, more: str = "") -> Path:
    kernel.check(_TRAIN)
    cell = kernel.check(_LAUNCH.format(name=name, arguments=arguments, more=more))
    return Path(cell.stdout.strip().splitlines()[-1])


def test_a_detached_run_outlives_its_kernel(state: Path, tmp_path: Path) -> None:
    project = str(tmp_path / "project")
    # Leaving the block deletes the kernel's folder while the ranks run.
    with Kernel(cwd=tmp_path, detached=1) as kernel:
        folder = _launch(kernel, "train-3", f"({project!r}, 0.3, 100)")
        launched_in = kernel.cwd
        followed = attach("train-3")
        until(lambda: followed._internals.store.last_step.get(0, -1) >= 5, seconds=120)
        kernel.kill()
    with Kernel() as kernel:
        kernel.check("import notebook_accelerate\nrun = notebook_accelerate.attach('train-3')")
        assert kernel.value("[each.name for each in notebook_accelerate.runs()]") == ["train-3"]
        assert kernel.value("run.status") == "running"
        assert kernel.value("run.origin") == str(launched_in)
        kernel.check("from notebook_accelerate.widgets import RunsTable\ntable = RunsTable()")
        row = dict(zip(*kernel.value("table.rows"), strict=True))
        assert (row["state"], row["from"]) == ("running", str(launched_in))
        assert row["run"].endswith("train-3")
        assert int(row["step"]) >= 5
        kernel.check("table.close()")
        assert re.match(r"<Run \d+ 'train-3': train, running, 2 ranks, ", kernel.value("repr(run)"))
        assert kernel.value("'· train-3' in run.panel().sections.widgets['head'].value")
        assert kernel.value("list(run.ask('seconds', timeout=60).values())") == [0.3, 0.3]
        assert kernel.value("str(run.diagnose().verdict)").endswith("all are moving")
        Path(project, "hurry").touch()
        assert "succeeded" in (kernel.check("await run").result_text or "")
        assert kernel.value("run.status") == "succeeded"
        attached = kernel.value("[list(each) for each in run.results]")
    assert followed.wait(60)
    assert followed.folder == folder
    undisturbed = notebook_launcher(
        train, (str(tmp_path / "plain"), 0.0, 100), num_processes=2, use_port=0, panel=False
    )
    assert tuple(attached) == followed.results == undisturbed.results
    for rank in (0, 1):
        assert followed.metrics["loss"].rank(rank).steps.tolist() == list(range(100))
    assert attach("train-3") is followed
    (row,) = runs(folder.parent)
    assert (row.name, row.status, row.config["detach"]) == ("train-3", "succeeded", True)
    followed.delete()
    assert not folder.exists()
    with pytest.raises(ValueError, match="no detached or live run named 'train-3'; the runs are: none"):
        attach("train-3")


def test_a_detached_run_starts_with_the_settings_of_the_notebook(state: Path) -> None:
    with Kernel(cwd=state, detached=1) as kernel:
        kernel.check(
            "import logging, random, torch, warnings\nfrom notebook_accelerate import notebook_launcher\n"
            "torch.manual_seed(5); random.seed(5); torch.set_default_dtype(torch.float64)\n"
            "logging.basicConfig(level=logging.INFO, format='own %(message)s', force=True)\n"
            "warnings.filterwarnings('ignore')\n"
            "def draw():\n    logging.info('logged'); warnings.warn('hidden')\n"
            "    return torch.rand(1).item(), random.random()\n"
            "options = dict(num_processes=1, use_port=0, panel=False)\n"
            "run = notebook_launcher(draw, detach=True, **options)\nrun.wait()"
        )
        assert kernel.value("[run.logs(), run.results == notebook_launcher(draw, **options).results]") == [
            ["[rank 0] own logged"], True,
        ]  # fmt: skip


def test_a_breakpoint_waits_for_the_next_kernel(state: Path) -> None:
    with Kernel(cwd=state, detached=1) as kernel:
        _launch(kernel, "stops", "('', 0.0, 3, -1, 1)")
        followed = attach("stops")
        until(lambda: followed.prompts == (1,), seconds=120)
        kernel.kill()
    with Kernel() as kernel:
        kernel.check("import notebook_accelerate\nrun = notebook_accelerate.attach('stops')")
        kernel.types("p step * 100", "c")
        shown = kernel.check("notebook_accelerate.debug()").stdout
        assert "100" in shown
        assert re.search(r"Cell In\[\d+\]", shown), "the prompt names the cell of the killed kernel"
        assert kernel.value("run.wait(60)")
        assert kernel.value("run.results") == [2, 2]
        assert kernel.value("run.logs(rank=0)") == ["step 0", "step 1", "step 2"]


def test_the_ranks_of_a_failed_run_are_held_for_the_next_kernel(state: Path) -> None:
    with Kernel(cwd=state, detached=1) as kernel:
        _launch(kernel, "fails", "('', 0.0, 5, 3)", ", hold_on_error=True")
        followed = attach("fails")
        until(lambda: followed.status == "failed" and followed.held, seconds=120)
    failure = followed.failures[0]
    assert "as asked" in str(failure.chain[-1])
    assert re.search(r"Cell In\[\d+\], line 14", str(followed.report()))
    with Kernel() as kernel:
        kernel.check("import notebook_accelerate\nrun = notebook_accelerate.attach('fails')")
        assert kernel.value("run.held")
        kernel.types("p fails_at + 40", "q")
        assert "43" in kernel.check("notebook_accelerate.debug()").stdout
        kernel.check("run.stop()")
        assert not kernel.value("run.held")
    until(lambda: not followed.held, seconds=60)


def test_the_ranks_end_with_their_supervisor_and_the_training_can_continue(state: Path, tmp_path: Path) -> None:
    project = str(tmp_path / "project")
    options = {"num_processes": 2, "use_port": 0, "detach": True, "panel": False}
    run = notebook_launcher(train, (project, 0.05, 400), name="lost", **options)  # type: ignore[arg-type]
    until(lambda: run._internals.store.last_step.get(0, -1) >= 25, seconds=120)
    ranks = [psutil.Process(info.pid or 0) for info in run.ranks]
    supervisor_of(run).kill()
    psutil.wait_procs(ranks, timeout=30)
    assert not any(process.is_running() for process in ranks)
    assert run.wait(60)
    assert run.status == "lost"
    assert [entry.lives for entry in run_directory.entries()] == [False]
    with pytest.raises(RunLostError):
        _ = run.results
    goal = len(run.metrics["loss"].rank(0).steps) + 20
    again = notebook_launcher(train, (project, 0.0, goal), resume=run, **options)  # type: ignore[arg-type]
    assert again.name.startswith("train-"), "it has other arguments, so it is a branch of the lost run"
    assert again.wait(120)
    assert again.status == "succeeded", str(again.error)
    check_history(again, goal, missing=20)
    assert attach(again.name) is again, "attaching finds the branch by its own name"


def test_only_the_user_of_the_run_can_attach_and_stop(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_processes": 1, "detach": True, "panel": False}
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_RUNS", f" {tmp_path / 'all'} ")
    run = notebook_launcher(time.sleep, (600,), name="one", **options)  # type: ignore[arg-type]
    assert run.folder is not None
    assert run.folder.parent == tmp_path / "all"
    (entry,) = run_directory.entries()
    found = Path(entry.socket).stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    for folder in (Path(entry.socket).parent, state / "notebook-accelerate" / "detached"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert entry.origin["folder"] == str(Path.cwd())
    until(lambda: run.status == "running", seconds=120)
    assert not [each for each in connections(pid=supervisor_of(run).pid) if each.status == psutil.CONN_LISTEN]
    with pytest.raises(ValueError, match="name='one' is the name of a detached run that is still running"):
        notebook_launcher(time.sleep, (600,), name="one", **options)  # type: ignore[arg-type]
    again = open_run(entry.folder)
    again.stop(grace=1.0)
    assert (again.status, run.wait(60), run.status) == ("stopped", True, "stopped")
    (state / "notebook-accelerate" / "sockets").chmod(0o755)
    with pytest.raises(LaunchError, match=r"other users can enter .*: chmod 700"):
        notebook_launcher(int, (), **options)  # type: ignore[arg-type]
    (state / "notebook-accelerate" / "sockets").chmod(0o700)


def test_a_function_that_cannot_be_launched_detached_raises_an_error(state: Path, tmp_path: Path) -> None:
    with pytest.raises(SerializationError, match="the function or its arguments"):
        notebook_launcher(print, ((number for number in range(1)),), num_processes=1, detach=True, panel=False)
    with pytest.raises(ValueError, match="because detached runs use this machine only"):
        notebook_launcher(int, (), num_processes=1, detach=True, num_nodes=2)
    with pytest.raises(ValueError, match="start_method='inline'"):
        notebook_launcher(int, (), num_processes=1, detach=True, start_method="inline")
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be kept in .*file"):
        notebook_launcher(int, (), num_processes=1, detach=True, save=tmp_path / "file", panel=False)
    plain = notebook_launcher(int, (), num_processes=1, panel=False)
    with pytest.raises(LaunchError, match="is not kept in a folder"):
        notebook_launcher(int, (), num_processes=1, detach=True, resume=plain, panel=False)
    assert run_directory.entries() == []


_FAILS_TO_SERVE = """
import sys
if any("detached_process" in word for word in sys.orig_argv):
    from notebook_accelerate.errors import BrokenRunError
    from notebook_accelerate.launch.detached import run_directory

    def fail(_):
        raise BrokenRunError("the entry cannot be written")

    run_directory.add_entry = fail
"""


def test_a_run_whose_service_cannot_start_is_not_launched(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_FAILS_TO_SERVE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with pytest.raises(BrokenRunError, match="the entry cannot be written"):
        notebook_launcher(time.sleep, (600,), num_processes=1, detach=True, save=tmp_path / "runs", panel=False)
    until(lambda: not processes_of(state), seconds=60)
    assert [row.status for row in runs(tmp_path / "runs")] == ["failed"]


def test_an_interrupted_launch_is_stopped(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_connection: object) -> None:
        until(lambda: bool(run_directory.entries()), seconds=120)
        raise KeyboardInterrupt

    monkeypatch.setattr(detached_launch, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(time.sleep, (600,), num_processes=1, detach=True, name="interrupted", panel=False)
    run = attach("interrupted")
    assert run.wait(120)
    assert run.status == "stopped"


def test_a_wait_that_ends_does_not_stop_the_run(state: Path) -> None:
    """The wait ends with an interrupt, or with the kernel, whose end cancels the cell that awaits the run."""
    with Kernel(detached=1) as kernel:
        kernel.check(_TRAIN)
        kernel.check(
            "run = notebook_launcher(time.sleep, (600,), num_processes=1, detach=True, name='waits', panel=False)"
        )
        kernel.until("run.status == 'running'", 120)
        for code in ("await run", "run.wait()"):
            cell = kernel.submit(code)
            kernel.wait_for(lambda cell=cell: cell.busy)  # type: ignore[misc]
            kernel.pump(1.0)
            kernel.interrupt()
            error = kernel.finish(cell, 60).error
            assert error is not None
            assert error.ename in ("KeyboardInterrupt", "CancelledError")
        cell = kernel.submit("await run")
        kernel.wait_for(lambda: cell.busy)
        kernel.pump(1.0)
        kernel.client.shutdown()
        until(lambda: not kernel.alive(), seconds=60)
    run = attach("waits")
    time.sleep(1.0)
    assert run.status == "running"
    run.stop(grace=1.0)
    assert run.status == "stopped"


def _prints(lines: int) -> int:
    for line in range(lines):
        print("line", line, "é" * (line % 300))
    breakpoint()  # noqa: T100 - what is tested
    return lines


def test_two_kernels_can_share_a_breakpoint_after_much_output(state: Path) -> None:
    options = {"num_processes": 2, "use_port": 0, "detach": True, "panel": False}
    run = notebook_launcher(_prints, (20_000,), name="two", **options)  # type: ignore[arg-type]
    assert run.folder is not None
    until(lambda: run.prompts == (0, 1), seconds=300)
    others = [open_run(run.folder), open_run(run.folder)]
    assert [each._internals.commands.prompts.debugged() for each in others] == [[0, 1], [0, 1]]

    def go_on(each: Run) -> None:
        for rank in (0, 1):
            if (prompt := each._internals.commands.prompts.claim_next(5.0, rank=rank)) is not None:
                prompt.answer("c")

    threads = [Thread(target=go_on, args=(each,)) for each in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in (run, *others):
        assert each.wait(120)
        assert each.status == "succeeded"
        assert each.results == each.results == (20_000, 20_000)
        for rank in (0, 1):
            assert each.logs(rank)[0] == "line 0 "
            assert each.logs(rank)[-1] == "line 19999 " + "é" * 199


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of a few megabytes and yield its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def _waits_for(path: str) -> bytes:
    while not Path(path).exists():
        time.sleep(0.05)
    print("goes on")
    return b"result" * 1000


def test_a_full_disk_loses_neither_results_nor_the_end(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_processes": 2, "use_port": 0, "detach": True, "panel": False}
    filler = small_disk / "filler"
    with user_folder(small_disk / "state", monkeypatch):
        run = notebook_launcher(_waits_for, (str(tmp_path / "go"),), **options)  # type: ignore[arg-type]
        until(lambda: run.status == "running", seconds=120)
        pids = [info.pid or 0 for info in run.ranks]
        _fill(filler)
        with pytest.raises(LaunchError):
            notebook_launcher(int, (), name="another", **options)  # type: ignore[arg-type]
        (tmp_path / "go").touch()
        until(lambda: not any(map(psutil.pid_exists, pids)), seconds=120)
        assert run.wait(60), "the run's end is known even though the file could not be written"
        assert run.status == "succeeded"
        assert any(f"Cannot save the run to {run.folder}" in text for text in run._internals.journal.state.warnings)
        with pytest.raises(SerializationError, match=r"not saved: .*No space left on device"):
            run.results  # noqa: B018 - the test is about reading
        filler.unlink()
        until(lambda: not processes_of(small_disk / "state"), seconds=120)
        until(lambda: run.logs(1) == ["goes on"], seconds=20)
        assert run.results == (b"result" * 1000,) * 2
        assert [entry.name for entry in run_directory.entries()] == [run.name]


def test_a_run_can_be_stopped_while_its_disk_is_full(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with user_folder(small_disk / "state", monkeypatch):
        run = notebook_launcher(_waits_for, (str(tmp_path / "go"),), num_processes=2, use_port=0, detach=True)  # type: ignore[arg-type]
        until(lambda: run.status == "running", seconds=120)
        _fill(small_disk / "filler")
        run.stop(grace=2.0)
        assert run.status == "stopped"
        until(lambda: not processes_of(small_disk / "state"), seconds=60)


@pytest.mark.parametrize("how", ["stop", "shutdown", "another kernel"])
def test_a_run_that_ended_on_a_full_disk_can_be_stopped_and_frees_its_name(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    options = {"num_processes": 1, "use_port": 0, "detach": True, "panel": False, "name": "full"}
    with user_folder(tmp_path / "state", monkeypatch):
        run = notebook_launcher(_waits_for, (str(tmp_path / "go"),), save=small_disk / "runs", **options)  # type: ignore[arg-type]
        until(lambda: run.status == "running")
        _fill(small_disk / "filler")
        (tmp_path / "go").touch()
        assert run.wait(60)
        assert run.status == "succeeded"
        assert processes_of(tmp_path / "state"), "the run waits for the disk"
        if how == "another kernel":
            disconnect_all()
            run = attach("full")
            assert run.wait(60)
        shutdown(all=True) if how == "shutdown" else run.stop()
        until(lambda: not processes_of(tmp_path / "state"), seconds=60)
        again = notebook_launcher(int, (), save=tmp_path / "runs", **options)  # type: ignore[arg-type]
        assert again.wait(120)
        assert again.status == "succeeded"


def test_a_run_whose_disk_is_full_from_the_start_can_be_launched_and_stopped(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this disk, there is room only for the run's folder and the journal's header."""
    with user_folder(tmp_path / "state", monkeypatch):
        _fill(small_disk / "filler")
        os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - (2 << 12))
        run = notebook_launcher(
            _waits_for,
            (str(tmp_path / "go"),),
            num_processes=1,
            use_port=0,
            detach=True,
            save=small_disk / "runs",
            panel=False,
        )  # type: ignore[arg-type]
        _fill(small_disk / "filler-2")
        until(lambda: run.status == "running", seconds=60)
        (tmp_path / "go").touch()
        assert run.wait(60)
        assert run.status == "succeeded"
        (small_disk / "filler").unlink()
        until(lambda: not processes_of(tmp_path / "state"), seconds=60)
        until(lambda: run._internals.journal.state.unsaved == "" or run.results == (b"result" * 1000,), seconds=20)
        assert open_run(run.folder or "").status == "succeeded"


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
