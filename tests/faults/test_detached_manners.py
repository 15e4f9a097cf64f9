"""Detached runs that are launched with the same name, end without a kernel, lose their folder, or are stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accelerate import Accelerator, LaunchError, Run, attach, notebook_launcher, open_run, shutdown
from notebook_accelerate.errors import SerializationError
from notebook_accelerate.launch import detached_launch
from notebook_accelerate.launch.detached import run_directory
from tests.support.detached import disconnect_all, processes_of, supervisor_of, user_folder
from tests.support.waiting import until

_OPTIONS: dict[str, Any] = {"num_processes": 1, "use_port": 0, "detach": True, "panel": False}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the user's detached runs, and stop them at the end of the test."""
    with user_folder(tmp_path / "state", monkeypatch) as folder:
        yield folder


def _launch(function: Any, *arguments: Any, **options: Any) -> Run:
    return notebook_launcher(function, arguments, **{**_OPTIONS, **options})


# ---- names

_AT_ONCE = """
import sys, time
from pathlib import Path
from notebook_accelerate import notebook_launcher

folder, me, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None
(folder / f"ready-{me}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
try:
    run = notebook_launcher(time.sleep, (600,), num_processes=1, detach=True, name=name, panel=False)
    print("launched", run.name)
except ValueError as error:
    print("refused", error)
"""


def _both_launch(folder: Path, name: str) -> list[str]:
    """Launch from two processes at the same moment. Return the line that says how each launch ended."""
    command = [sys.executable, "-c", _AT_ONCE, str(folder)]
    both = [subprocess.Popen([*command, me, name], stdout=subprocess.PIPE, text=True) for me in "ab"]
    until(lambda: all((folder / f"ready-{me}").exists() for me in "ab"))
    (folder / "go").touch()
    lines = [process.communicate(timeout=300)[0].strip().splitlines() for process in both]
    return [next(line for line in each if line.startswith(("launched", "refused"))) for each in lines]


def test_of_two_launches_with_one_name_one_wins(state: Path, tmp_path: Path) -> None:
    refused, launched = sorted(_both_launch(tmp_path, "one"), key=lambda line: line.startswith("launched"))
    assert launched == "launched one"
    assert "name='one' is the name of a detached run that is still running: pass another name" in refused
    assert "notebook_accelerate.attach('one')" in refused
    assert [entry.name for entry in run_directory.entries()] == ["one"]


def test_two_launches_without_a_name_get_two_names(state: Path, tmp_path: Path) -> None:
    lines = _both_launch(tmp_path, "")
    assert len({entry.name for entry in run_directory.entries()}) == 2
    assert sorted(lines) == sorted(f"launched {entry.name}" for entry in run_directory.entries())


def test_a_name_is_free_when_its_run_has_finished(state: Path) -> None:
    for _ in range(3):
        run = _launch(int, name="again")
        assert run.wait(120)  # The run has finished once its process has written the last file and exited.
    run = _launch(time.sleep, 600, name="again")
    until(lambda: run.status == "running")
    supervisor_of(run).kill()
    assert run.wait(60)
    assert _launch(int, name="again").wait(120), "the name of a killed process is free, too"


# ---- ends without an attached kernel


def _fails() -> None:
    raise RuntimeError("as asked")


def test_ranks_of_a_failed_run_without_an_attached_kernel_end(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_HELD_SECONDS", "2")
    run = _launch(_fails, hold_on_error=True)
    until(lambda: run.held)
    time.sleep(4.0)
    assert processes_of(state), "the ranks stay while this kernel is attached"
    disconnect_all()
    until(lambda: not processes_of(state), seconds=60)
    ended = attach(run.name)
    until(lambda: not ended.held, seconds=20)
    assert ended.status == "failed"


def test_a_limit_that_is_not_a_number_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_HELD_SECONDS", "soon")
    with pytest.raises(ValueError, match="NOTEBOOK_ACCELERATE_HELD_SECONDS='soon' is not a whole number"):
        _launch(int)
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_HELD_SECONDS", "-1")
    with pytest.raises(ValueError, match="=-1 must be at least 0 seconds, such as 3600"):
        _launch(int)


def test_a_start_that_takes_too_long_is_aborted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached_launch, "START_SECONDS", 0.0)
    with pytest.raises(LaunchError, match="did not start"):
        _launch(time.sleep, 600, name="late")
    until(lambda: not processes_of(state), seconds=120)
    assert [attach(entry.name).status for entry in run_directory.entries()] == ["stopped"]


# ---- deleted folders


def test_a_run_whose_folder_is_deleted_can_be_stopped(state: Path) -> None:
    run = _launch(time.sleep, 600, name="homeless")
    until(lambda: run.status == "running")
    assert run.folder is not None
    shutil.rmtree(run.folder)
    until(lambda: any("Cannot save the run to" in text for text in run._internals.journal.state.warnings), seconds=60)
    assert run.status == "running", "the run's process still sends events"
    with pytest.raises(ValueError, match="is still running"):
        _launch(int, name="homeless")
    run.stop(grace=1.0)
    assert run.status == "stopped"
    until(lambda: not processes_of(state), seconds=60)


def test_a_run_whose_folder_is_deleted_can_be_stopped_by_a_kernel_that_cannot_read_it(state: Path) -> None:
    run = _launch(time.sleep, 600, name="homeless")
    until(lambda: run.status == "running")
    assert run.folder is not None
    disconnect_all()
    shutil.rmtree(run.folder)
    assert processes_of(state)
    shutdown(all=True)
    until(lambda: not processes_of(state), seconds=60)


def _logs_until(path: str) -> str:
    accelerator = Accelerator(cpu=True)
    step = 0
    while not Path(path).exists():
        accelerator.log({"loss": 1.0 / (step + 1)}, step=step)
        print("step", step, flush=True)
        step += 1
        time.sleep(0.05)
    return "the result"


@pytest.mark.parametrize("damage", ["deleted", "emptied"])
def test_a_deleted_journal_is_rewritten(state: Path, tmp_path: Path, damage: str) -> None:
    run = _launch(_logs_until, str(tmp_path / "go"), name="robbed")
    until(lambda: run._internals.store.last_step.get(0, -1) >= 20, seconds=60)
    assert run.folder is not None
    journal = run.folder / "journal.nbac"
    before = run._internals.store.last_step[0]
    journal.unlink() if damage == "deleted" else os.truncate(journal, 0)
    until(lambda: run._internals.store.last_step[0] > before + 20, seconds=60)
    assert open_run(run.folder)._internals.store.last_step[0] >= before
    (tmp_path / "go").touch()
    assert run.wait(60)
    assert (run.status, run.results) == ("succeeded", ("the result",))
    again = open_run(run.folder)
    assert (again.status, again.results) == ("succeeded", ("the result",))
    for each in (run, again):
        steps = each.metrics["loss"].rank(0).steps.tolist()
        assert sorted(set(steps)) == list(range(steps[-1] + 1))
        assert each.logs(0)[0] == "step 0"
        assert each.logs(0)[-1] == f"step {steps[-1]}"


def test_a_run_whose_folder_is_deleted_shows_its_end(state: Path, tmp_path: Path) -> None:
    run = _launch(_logs_until, str(tmp_path / "go"), name="homeless")
    until(lambda: run.status == "running")
    assert run.folder is not None
    shutil.rmtree(run.folder)
    (tmp_path / "go").touch()
    assert run.wait(60)
    assert run.status == "succeeded"
    with pytest.raises(SerializationError, match="the result of rank 0 was not saved: FileNotFoundError"):
        run.results  # noqa: B018 - the test is about reading


def test_a_run_deleted_at_its_end_leaves_no_process(state: Path) -> None:
    for _ in range(3):
        run = _launch(int)
        assert run.wait(120)
        run.delete()
        assert run.folder is not None
        assert not run.folder.exists()
    until(lambda: not processes_of(state), seconds=60)


# ---- stopping


def _saves_when_stopped(path: str) -> None:
    try:
        Path(f"{path}-began").touch()
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(0.3)
        Path(path).touch()
        raise


def test_shutdown_lets_ranks_save_and_end_by_themselves(state: Path, tmp_path: Path) -> None:
    run = _launch(_saves_when_stopped, str(tmp_path / "saved"))
    until((tmp_path / "saved-began").exists)
    shutdown(all=True)
    assert run.status == "stopped"
    assert (tmp_path / "saved").exists()


def test_shutdown_leaves_runs_of_other_machines_alone(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may share a home directory, and runs on other machines cannot be stopped from this one."""
    theirs, ours = (_launch(time.sleep, 600, name=name) for name in ("theirs", "ours"))
    until(lambda: theirs.status == ours.status == "running")
    (entry,) = (entry for entry in run_directory.entries() if entry.name == "theirs")
    disconnect_all()
    hidden = Path(entry.socket).with_suffix(".away")
    Path(entry.socket).rename(hidden)
    try:
        shutdown(all=True)
    finally:
        hidden.rename(entry.socket)
    assert attach("ours").status == "stopped"
    # This run was opened without a socket, so its status comes from the file, which follows the events a moment later.
    until(lambda: attach("theirs").status == "running")
    disconnect_all()  # A run that was opened without a socket is read-only, so it could not be stopped.


# ---- output without a reader


def _prints() -> None:
    for _ in range(20):
        print("x" * 100_000, flush=True)
        os.write(1, b"y" * 10_000 + b"\n")
    time.sleep(600)


def test_output_fills_no_deleted_file(state: Path) -> None:
    run = _launch(_prints)
    until(lambda: len(run.logs(0)) >= 40)
    for process in processes_of(state):
        for descriptor in (1, 2):
            found = Path(f"/proc/{process.pid}/fd/{descriptor}")
            if found.exists() and found.readlink() != Path(os.devnull):
                assert found.stat().st_size < 10_000, psutil.Process(process.pid).cmdline()
