"""Live runs of a kernel, which other processes of the user can find, follow and control."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from notebook_accelerate import Run, attach, open_run, shutdown
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import NotebookAccelerateError, ResultsFreedError
from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch.detached import control_protocol, run_directory
from notebook_accelerate.launch.detached.run_directory import DirectoryEntry
from notebook_accelerate.launch.starting import start
from notebook_accelerate.telemetry import current_sink
from notebook_accelerate.telemetry.events import MetricEvent
from tests.support.detached import disconnect_all
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the user's runs. At the end, check that no entry and no socket is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = tmp_path / "state" / "notebook-accelerate"
    yield folder
    disconnect_all()
    shutdown()
    assert [*folder.glob("live/*"), *folder.glob("sockets/*")] == []


def _launch(function: object, *arguments: object, ranks: int = 2, **options: object) -> Run:
    config = LaunchConfig(num_processes=ranks, cpu=True, panel=False, block=False)
    return start(config.changed(**options), function, arguments)  # type: ignore[arg-type]


def _until_released(folder: Path) -> int:
    """Log a metric and a line, and wait until the test creates a file."""
    sink = current_sink()
    assert sink is not None
    sink.emit(MetricEvent({"loss": 0.5}, 3))
    print(f"rank {os.environ['RANK']} has started", flush=True)
    while not (folder / "released").exists():
        time.sleep(0.01)
    return 5


def _started(run: Run) -> None:
    until(lambda: len(run.logs()) >= len(run.ranks) > 0, seconds=60)


_ATTACHES = """
import sys
from notebook_accelerate import attach
run = attach(sys.argv[1])
print(run.status, [rank.state for rank in run.ranks], run.metrics["loss"].values.tolist(), sorted(run.logs()))
print(run.ask("folder.name"), "waits in a collective" in run.diagnose().verdict)
run.stop()
print(run.status, run.error)
"""


def test_another_process_reads_and_stops_a_live_run(tmp_path: Path) -> None:
    run = _launch(_until_released, tmp_path, name="mine", start_method="fork")
    _started(run)
    (entry,) = run_directory.live_entries()
    assert (entry.name, entry.label, entry.ranks, entry.lives) == ("mine", f"mine@{os.getpid()}", 2, True)
    command = [sys.executable, "-c", _ATTACHES, "mine"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout.splitlines()
    written = [f"[rank {rank}] rank {rank} has started" for rank in (0, 1)]
    assert lines[0] == f"running ['running', 'running'] [0.5, 0.5] {written}"
    assert lines[1] == f"{{0: '{tmp_path.name}', 1: '{tmp_path.name}'}} True"
    assert re.fullmatch(r"stopped run \d+ ended after .*: it was stopped", lines[2])
    assert run.wait(60)
    assert run.status == "stopped"


def test_a_run_starts_no_thread_and_gives_no_descriptor_to_its_ranks_until_a_process_attaches(tmp_path: Path) -> None:
    run = _launch(_until_released, tmp_path, start_method="fork", max_restarts=1)
    _started(run)
    names = {thread.name for thread in threading.enumerate()}
    assert "notebook-accelerate-control" not in names
    attached = attach(run.name)
    assert "notebook-accelerate-control" in {thread.name for thread in threading.enumerate()}
    os.kill(run.ranks[0].pid or 0, signal.SIGKILL)
    until(lambda: len(attached.attempts) == 2 and all(rank.state == "running" for rank in attached.ranks), seconds=60)
    sockets = _sockets(os.getpid())
    for rank in run.ranks:
        assert rank.pid is not None
        assert not _sockets(rank.pid) & sockets, "a forked rank closes the listener and the connections"
    (tmp_path / "released").touch()
    assert attached.wait(60)
    assert (attached.status, run.wait(60)) == ("succeeded", True)
    with pytest.raises(ResultsFreedError, match="save='runs'"):
        attached.results  # noqa: B018


def _sockets(pid: int) -> set[str]:
    found = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists() or link.is_symlink()}
    return {target for target in found if target.startswith("socket:")}


def test_a_kept_run_is_controlled_through_its_folder(tmp_path: Path) -> None:
    run = _launch(_until_released, tmp_path, ranks=1, save=tmp_path / "runs")
    _started(run)
    assert run.folder is not None
    opened = open_run(run.folder)
    assert opened.pause(timeout=0.1)
    opened.stop()
    assert (opened.status, run.wait(60)) == ("stopped", True)


def test_held_ranks_stay_reachable() -> None:
    run = _launch(lambda: 1 / 0, ranks=1, hold_on_error=True, name="held")
    until(lambda: run.held, seconds=60)
    attached = attach("held")
    assert attached.held
    assert attached.ask("1 + 1") == {0: 2}
    attached.stop()
    assert not run.held
    until(lambda: not run_directory.live_entries())


def test_an_inline_run_is_reachable() -> None:
    seen: list[object] = []

    def function() -> None:
        print("inside")
        attached = attach("inline")
        seen.extend([attached.status, attached.logs(0)])

    _launch(function, ranks=1, start_method="inline", name="inline", block=True)
    assert seen == ["running", ["inside"]]
    disconnect_all()
    with pytest.raises(ValueError, match="there is no detached or live run named 'inline'"):
        attach("inline")


def test_the_variable_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SERVE", "no")
    run = _launch(_until_released, tmp_path, ranks=1)
    assert run_directory.live_entries() == []
    (tmp_path / "released").touch()
    assert run.wait(60)
    assert run.notes == []


def test_a_run_starts_even_if_it_cannot_be_served(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "live").touch()
    run = _launch(int, ranks=1)
    assert run.wait(60)
    assert run.status == "succeeded"
    (note,) = run.notes
    assert note.startswith("other processes cannot attach to the run: ")
    assert note.endswith("; NOTEBOOK_ACCELERATE_SERVE=no hides this note")
    (state / "live").unlink()


def test_runs_of_several_processes_with_one_name_are_told_apart(tmp_path: Path) -> None:
    run = _launch(_until_released, tmp_path, ranks=1, name="same")
    (entry,) = run_directory.live_entries()
    other = replace(entry, process={**entry.process, "pid": os.getppid(), "started": 0})
    path = run_directory.add_entry(other)
    with pytest.raises(ValueError, match=rf"runs of several processes are named 'same'; pass one of .*{entry.label}"):
        attach("same")
    assert attach(entry.label).name == "same"
    path.unlink()
    (tmp_path / "released").touch()
    assert run.wait(60)


def test_the_files_of_a_killed_kernel_are_removed(state: Path) -> None:
    socket = run_directory.new_socket()
    run = DirectoryEntry("killed", "", str(socket), time.time(), {"machine": "", "pid": 1}, detached=False)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone = {**asdict(this_process()), "pid": process.pid}
    run_directory.add_entry(replace(run, process=gone))
    listener = control_protocol.listen(socket)
    assert run_directory.live_entries() == []
    assert not socket.exists()
    control_protocol.stop_listening(listener, socket)


def test_a_suspended_process_is_named(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        identity = {**asdict(this_process()), "pid": process.pid, "started": 0}
        entry = DirectoryEntry("still", "", str(tmp_path / "s"), time.time(), identity, detached=False)
        path = run_directory.add_entry(entry)
        try:
            with pytest.raises(NotebookAccelerateError, match=f"process {process.pid} .*is suspended"):
                attach("still")
        finally:
            path.unlink()
            process.kill()
