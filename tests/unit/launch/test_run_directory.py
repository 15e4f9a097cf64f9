"""Where detached runs are recorded: other users, other machines, many runs, users without a home."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from notebook_accelerate import BrokenRunError, attach, runs
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import LaunchError
from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch import attaching
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_client import ControlClient
from notebook_accelerate.launch.detached.control_service import ControlService
from notebook_accelerate.launch.detached.run_directory import DetachedEntry
from notebook_accelerate.launch.kept import journal_file, journal_format, run_folder
from tests.support.runs import START, make_run


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder of detached runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield tmp_path / "state" / "notebook-accelerate"
    attaching.leave()


def _recorded(folder: Path, name: str, created: float, **process: object) -> DetachedEntry:
    """Write a kept run and record it as a detached one, of this process or of one with other attributes."""
    folder.mkdir(parents=True)
    identity = replace(this_process(), **process)  # type: ignore[arg-type]
    header = run_folder.header(name, 1, int, (), LaunchConfig(detach=True), START) | {"process": asdict(identity)}
    records = journal_format.encode_records(make_run(started=created).journal.records)
    journal_file.JournalFile(folder / journal_file.JOURNAL_NAME).append(
        b"".join([journal_format.encode_frame(header), *records])
    )
    entry = DetachedEntry(name, str(folder), str(run_directory.new_socket()), created, asdict(identity), {})
    run_directory.add(entry)
    return entry


def test_a_run_that_goes_on_is_listed_whatever_ended_since(tmp_path: Path) -> None:
    now = time.time()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    _recorded(tmp_path / "lives", "lives", now - 40 * 86400)
    for number in range(attaching.LISTED_RUNS + 5):
        _recorded(tmp_path / str(number), f"ended-{number}", now + number, pid=ended.pid)
    found = [run.name for run in runs() if run.config.detach]
    assert found[0] == "lives"
    assert found[1:] == [f"ended-{number}" for number in range(5, attaching.LISTED_RUNS + 5)]
    assert attach("lives").status == "running"
    assert attach("ended-3").status == "lost"


def test_a_journal_that_cannot_be_read_delays_nothing(tmp_path: Path) -> None:
    entry = _recorded(tmp_path / "broken", "broken", time.time(), pid=2**22 - 1)
    (Path(entry.folder) / journal_file.JOURNAL_NAME).write_bytes(b"")
    begin = time.monotonic()
    assert "broken" not in [run.name for run in runs()]
    with pytest.raises(BrokenRunError):
        attach("broken")
    assert time.monotonic() - begin < attaching.OPEN_SECONDS / 2


def test_the_sockets_of_other_containers_stay(tmp_path: Path) -> None:
    """They may share the user's home."""
    entries = [
        _recorded(tmp_path / "theirs", "theirs", time.time(), machine="another"),
        _recorded(tmp_path / "gone", "gone", time.time(), pid=2**22 - 1),
    ]
    for entry in entries:
        Path(entry.socket).touch()
    assert [entry.name for entry in run_directory.entries()] == ["theirs", "gone"]
    assert [Path(entry.socket).exists() for entry in entries] == [True, False]


def test_without_a_home_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        assert run_directory.entries() == []
        with pytest.raises(LaunchError, match="set XDG_STATE_HOME"):
            run_directory.runs_folder()
    monkeypatch.delenv("HOME")  # the user database has it
    assert run_directory.state_folder().is_absolute()


def test_the_default_folder_is_private(state: Path) -> None:
    before = os.umask(0)
    try:
        folder = run_directory.runs_folder()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert run_directory.runs_folder() == folder, "a user may let others read"


_ANOTHER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
    connection.settimeout(20)
    print("received", len(connection.recv(100)))
except ConnectionResetError:
    print("received 0")
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as runtime:  # not in pytest's: addresses of sockets are short
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        path = run_directory.new_socket()
        service = ControlService(make_run(), path)

        def another() -> str:
            command = [sys.executable, "-c", _ANOTHER, str(path)]
            return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()

        try:
            assert another() == "refused"
            for each in (path, path.parent, Path(runtime)):
                each.chmod(0o777)
            assert another() == "received 0", "the service looks who has connected"
            folder = run_directory.new_socket().parent
            assert "sockets" in str(folder), "what others can enter is not used"
        finally:
            service.close()
        assert not path.exists()


def test_a_process_that_is_stopped_does_not_block_who_attaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accelerate.launch.detached.control_client.STATE_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        client = ControlClient(tmp_path / "s")
        assert client.requests.open_ranks() == []
        client.close()
