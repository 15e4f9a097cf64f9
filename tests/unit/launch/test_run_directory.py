"""The records of detached runs, with other users, other machines, many runs, and users without a home directory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from notebook_accelerate import BrokenRunError, attach, open_run, runs
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.debugging.process_stacks import ProcessStacks
from notebook_accelerate.errors import ChannelClosedError, LaunchError
from notebook_accelerate.files import guarded_files
from notebook_accelerate.hardware import process_liveness
from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch import attaching, detached_launch, run_registry
from notebook_accelerate.launch.detached import (
    control_client,
    control_protocol as protocol,
    control_service,
    run_directory,
)
from notebook_accelerate.launch.detached.control_client import ControlClient
from notebook_accelerate.launch.detached.control_service import ControlService, RecordStream
from notebook_accelerate.launch.detached.run_directory import DirectoryEntry
from notebook_accelerate.launch.kept import journal_file, journal_format, run_folder
from notebook_accelerate.telemetry import Event, LogEvent
from notebook_accelerate.telemetry.channel import Channel
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.runs_table import RunsTable
from tests.support.detached import disconnect_all
from tests.support.runs import START, make_run
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the user's detached runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield tmp_path / "state" / "notebook-accelerate"
    disconnect_all()


def _recorded(folder: Path, name: str, created: float, origin: str = "", **process: object) -> DirectoryEntry:
    """Write a kept run and record it as a detached run of this process, or of a process that differs in some fields."""
    folder.mkdir(parents=True)
    identity = replace(this_process(), **process)  # type: ignore[arg-type]
    header = run_folder.new_header(name, 1, int, (), LaunchConfig(detach=True), START) | {"process": asdict(identity)}
    records = journal_format.encode_records(make_run(started=created)._internals.journal.records)
    journal_file.JournalFile(folder / journal_format.JOURNAL_NAME).append(
        b"".join([journal_format.encode_frame(header), *records])
    )
    entry = DirectoryEntry(name, str(folder), str(run_directory.new_socket()), created, asdict(identity))
    entry = replace(entry, origin={"folder": origin} if origin else {})
    run_directory.add_entry(entry)
    return entry


def test_a_running_run_is_listed_however_many_have_finished_since(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("repository", [True, False])
def test_runs_lists_the_runs_of_this_project_and_others_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: bool
) -> None:
    here, work = tmp_path / "project", tmp_path / "project" / "notebooks"
    work.mkdir(parents=True)
    if repository:
        (here / ".git").mkdir()
    for name, folder in {"root": here, "below": work / "more", "other": tmp_path / "project-2"}.items():
        _recorded(tmp_path / name, name, time.time(), origin=str(folder), pid=2**22 - 1)
    monkeypatch.chdir(work)
    own = {"root", "below"} if repository else {"below"}
    table = RunsTable()
    assert f"{3 - len(own)} detached run" in table.text
    assert "runs(all=True)" in table.text
    table.close()
    assert {run.name for run in runs() if run.config.detach} == own
    assert {run.name for run in runs(all=True) if run.config.detach} == {"root", "below", "other"}
    assert {run.name for run in runs() if run.config.detach} == {"root", "below", "other"}, (
        "this kernel has opened them"
    )


@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_table_of_runs_adds_later_ones_even_if_it_lists_a_lost_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    _recorded(tmp_path / "lost", "lost", time.time(), origin=str(tmp_path if elsewhere else here), pid=2**22 - 1)
    table = runs(all=elsewhere)._table()
    late = make_run()
    run_registry.announce_run(late)
    assert late in table.runs
    assert "lost" in [run.name for run in table.runs]
    table.close()


def test_an_unreadable_journal_delays_nothing(tmp_path: Path) -> None:
    entry = _recorded(tmp_path / "broken", "broken", time.time(), pid=2**22 - 1)
    (Path(entry.folder) / journal_format.JOURNAL_NAME).write_bytes(b"")
    begin = time.monotonic()
    assert "broken" not in [run.name for run in runs()]
    with pytest.raises(BrokenRunError):
        attach("broken")
    assert time.monotonic() - begin < attaching.OPEN_SECONDS / 2


def test_the_sockets_of_other_containers_are_kept(tmp_path: Path) -> None:
    """Containers may share the user's home directory."""
    entries = [
        _recorded(tmp_path / "theirs", "theirs", time.time(), machine="another"),
        _recorded(tmp_path / "gone", "gone", time.time(), pid=2**22 - 1),
    ]
    for entry in entries:
        with protocol.listen(Path(entry.socket)):
            pass
    assert [entry.name for entry in run_directory.entries()] == ["theirs", "gone"]
    assert [Path(entry.socket).exists() for entry in entries] == [True, False]


def test_a_file_in_place_of_a_socket_is_kept(tmp_path: Path) -> None:
    """A run's record may name any path as its socket."""
    file = tmp_path / "thesis.txt"
    file.touch()
    run_directory.add_entry(replace(_recorded(tmp_path / "odd", "odd", time.time(), pid=2**22 - 1), socket=str(file)))
    assert len(run_directory.entries()) == 2
    assert file.exists()


def test_without_a_home_the_error_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        assert run_directory.entries() == []
        with pytest.raises(LaunchError, match="set XDG_STATE_HOME"):
            run_directory.runs_folder()
    monkeypatch.delenv("HOME")  # The user database still names a home directory.
    assert guarded_files.state_folder().is_absolute()


@pytest.fixture
def unmasked() -> Iterator[None]:
    """Let other users access this process's new files, unless the code restricts their permissions."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("unmasked")
def test_the_default_folder_is_private() -> None:
    folder = run_directory.runs_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert run_directory.runs_folder() == folder, "a user may allow others to read"


_NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory that all users share, like HOME=/tmp in a container."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(folder))
    return folder


@as_root
@pytest.mark.parametrize("theirs", [".local", ".local/state", ".local/state/notebook-accelerate"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_another_user_made_is_not_used(shared: Path, tmp_path: Path, theirs: str, linked: bool) -> None:
    made = shared / theirs
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if linked:  # The link belongs to another user, but its target belongs to this user.
        (tmp_path / "mine").mkdir(mode=0o700)
        made.symlink_to(tmp_path / "mine")
    else:
        made.mkdir(mode=0o777)
    os.chown(made, _NOBODY, _NOBODY, follow_symlinks=False)
    for use in (run_directory.runs_folder, run_directory.new_socket):
        with pytest.raises(LaunchError, match=rf"{made} belongs to [^.]*\. Fix its permissions, or set XDG_STATE_HOME"):
            use()
    for use_name in (lambda: run_directory.claim_name("x"), lambda: run_directory.add_entry(_entry_of(tmp_path))):
        with pytest.raises((LaunchError, PermissionError), match=str(made)):
            use_name()
    assert run_directory.entries() == []


def _entry_of(folder: Path) -> DirectoryEntry:
    return DirectoryEntry("x", str(folder), "", START, asdict(this_process()))


@as_root
@pytest.mark.parametrize("folder", ["runs", "detached", "sockets"])
def test_each_folder_of_detached_runs_must_belong_to_the_user(shared: Path, folder: str) -> None:
    made = shared / ".local" / "state" / "notebook-accelerate" / folder
    made.mkdir(mode=0o700, parents=True)
    os.chown(made, _NOBODY, _NOBODY)
    uses = {"runs": run_directory.runs_folder, "sockets": run_directory.new_socket}
    with pytest.raises((LaunchError, PermissionError), match=f"{made} belongs to"):
        uses.get(folder, lambda: run_directory.claim_name("x"))()
    if folder == "detached":
        with pytest.raises(LaunchError, match=f"{made} belongs to"):
            attach("x")


@pytest.mark.parametrize(("mode", "allowed"), [(0o755, True), (0o1777, True), (0o777, False), (0o757, False)])
def test_others_may_not_replace_a_folder_on_the_path(tmp_path: Path, shared: Path, mode: int, allowed: bool) -> None:
    shared.chmod(mode)
    if allowed:
        assert run_directory.runs_folder().is_dir()
    else:
        with pytest.raises(LaunchError, match=f"other users can replace files in {shared}: chmod go-w"):
            run_directory.runs_folder()


def test_a_group_that_contains_only_the_user_may_write(shared: Path) -> None:
    """On some systems, each user has a separate group."""
    shared.chmod(0o770)
    os.chown(shared, -1, 54_321)  # There is no group with this number.
    with pytest.raises(LaunchError, match=rf"chmod g-w {shared}\. Fix its permissions, or set XDG_STATE_HOME"):
        run_directory.runs_folder()
    if os.getuid() == 0:
        os.chown(shared, -1, 0)
        assert run_directory.runs_folder().is_dir()


def test_a_path_that_is_not_a_file_of_the_user_is_not_a_record(tmp_path: Path, state: Path) -> None:
    entry = _recorded(tmp_path / "good", "good", time.time())
    (path,) = (state / "detached").glob("*.json")
    folder = state / "detached"
    os.mkfifo(folder / "pipe.json")  # Reading the pipe would block.
    (folder / "device.json").symlink_to("/dev/zero")
    (folder / "link.json").symlink_to(path)
    (folder / "folder.json").mkdir()
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "nested.json").write_text('{"name":' * 500 + "1" + "}" * 500)
    for number, change in enumerate(
        [{"folder": "/a\0b"}, {"folder": "here"}, {"name": "../x"}, {"created": float("inf")}, {"origin": 3}]
    ):
        (folder / f"{number}.json").write_text(json.dumps({**asdict(entry), **change}))
    (folder / "number.json").write_text('{"created": ' + "9" * 5000 + "}")
    if os.getuid() == 0:
        (folder / "theirs.json").write_bytes(path.read_bytes())
        os.chown(folder / "theirs.json", _NOBODY, _NOBODY)
    assert run_directory.entries() == [entry]


def test_without_an_identifier_of_the_machine_the_lock_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an identifier, as on macOS, which has no /proc, the name of a killed run must become free again."""
    monkeypatch.setattr(process_liveness, "_machine_identity", lambda: "")
    claimed = run_directory.claim_name("one")
    assert claimed is not None
    _recorded(tmp_path / "one", "one", time.time(), pid=2**22 - 1)
    assert [entry.lives for entry in run_directory.entries()] == [True]
    monkeypatch.setattr(detached_launch, "CLAIM_SECONDS", 0.1)
    with pytest.raises(ValueError, match="is still running"):
        detached_launch._claim("one")
    os.close(claimed)  # The exit of the run's process closes this descriptor.
    assert [entry.lives for entry in run_directory.entries()] == [False]
    again = detached_launch._claim("one")
    run_directory.release_name("one", again)


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


@as_root
def test_another_user_cannot_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's folder has a long path, and the addresses of sockets must be short.
    with tempfile.TemporaryDirectory() as runtime:
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
            assert another() == "received 0", "the service checks which user has connected"
            folder = run_directory.new_socket().parent
            assert "sockets" in str(folder), "a folder that others can enter is not used"
        finally:
            service.close()
        assert not path.exists()


def test_a_stopped_process_does_not_block_attaching_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accelerate.launch.detached.control_client.STATE_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        client = ControlClient(tmp_path / "s")
        assert client.requests.open_ranks() == []
        client.close()


@as_root
def test_a_kernel_does_not_talk_to_a_service_of_another_user() -> None:
    listens = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", listens, f"{folder}/s"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            with pytest.raises(PermissionError, match="another user listens"):
                ControlClient(Path(folder) / "s")
            process.communicate()


def test_a_kernel_whose_connection_was_closed_connects_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a kernel is suspended and reads nothing for seconds, its connection is closed, but the run continues."""
    run = make_run()
    service = ControlService(run, tmp_path / "s")
    client = ControlClient(tmp_path / "s")
    try:
        stopped: list[float] = []
        run._internals.commands.stop = stopped.append  # type: ignore[method-assign]
        until(lambda: service._kernels)
        (first,) = service._kernels
        first.channel.shut()
        until(lambda: service._kernels and first not in service._kernels, seconds=20)
        client.stop(3.0)
        until(lambda: stopped == [3.0], seconds=20)
    finally:
        client.close()
        service.close()
    until(lambda: client._over, seconds=20)
    monkeypatch.setattr(control_client, "SEND_SECONDS", 1e6)
    client.stop(1.0)  # A command to a run that has finished must not block.


def _connect(path: Path) -> Channel:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return Channel(connection)


def _followed(path: Path) -> tuple[ControlService, Channel]:
    """Serve a run whose ranks have written 8000 long lines. Return the service, and a channel that nothing reads."""
    run = make_run()
    run._internals.journal.add(
        [Record(0, START + number, LogEvent("stdout", f"{number:1000}")) for number in range(8000)]
    )
    service, channel = ControlService(run, path), _connect(path)
    channel.send(protocol.FollowCommand(0))
    until(lambda: any(kernel.has_unread for kernel in service._kernels))
    return service, channel


def test_a_kernel_receives_its_queued_messages_at_the_end(tmp_path: Path) -> None:
    service, channel = _followed(tmp_path / "s")
    ending = threading.Thread(target=service.close)
    ending.start()
    until(lambda: service._over)
    found: list[Event] = []
    with suppress(ChannelClosedError):
        while True:
            found += [event for _, event in channel.receive()]
    ending.join()
    channel.close()
    history = [event for event in found if isinstance(event, protocol.HistoryEvent)]
    assert b"".join(event.payload for event in history).count(b"LogEvent") == 8000
    assert [event.position > 0 for event in history] == [False] * (len(history) - 1) + [True]


def test_a_kernel_that_does_not_read_delays_the_end_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "DRAIN_SECONDS", 0.2)
    service, channel = _followed(tmp_path / "s")
    service.close()
    channel.close()


def test_captures_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture takes seconds if its rank is suspended, and any number of kernels may ask for one."""
    run, resumed, limit = make_run(), threading.Event(), control_service.MAX_CAPTURES
    monkeypatch.setattr(
        run._internals.commands.requests, "capture_stacks", lambda _: resumed.wait() and ProcessStacks("seen")
    )
    service = ControlService(run, tmp_path / "s")
    channel = _connect(tmp_path / "s")

    def replies(count: int) -> list[tuple[int, str, str]]:
        found: list[Event] = []
        while len(found) < count:
            found += [event for _, event in channel.receive(60.0) if isinstance(event, protocol.CapturedEvent)]
        return [(each.number, each.dump, each.problem) for each in found]  # type: ignore[attr-defined]

    try:
        channel.send(*[protocol.CaptureCommand(0, number) for number in range(limit + 3)])
        problem = f"its stacks were not read: {limit} captures are in progress; try again in a few seconds"
        assert replies(3) == [(number, "", problem) for number in range(limit, limit + 3)]
        resumed.set()
        assert replies(limit) == [(number, "seen", "") for number in range(limit)]
        channel.send(protocol.CaptureCommand(0, 99))
        assert replies(1) == [(99, "seen", "")]
    finally:
        resumed.set()
        service.close()
        channel.close()


def test_a_supervisor_that_does_not_answer_is_killed_when_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"STATE_SECONDS": 0.2, "PING_SECONDS": 0.1, "ANSWER_SECONDS": 0.5}.items():
        monkeypatch.setattr(control_client, name, seconds)
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with socket.socket(socket.AF_UNIX) as listener, subprocess.Popen(sleeps) as supervisor:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = ControlClient(tmp_path / "s", replace(this_process(), pid=supervisor.pid, started=0))
        client.report = lambda _: None
        client.stop(0.0)
        try:
            supervisor.wait(60)
        finally:
            client.close()
            supervisor.kill()
            until(lambda: not client._stop_watched)


def test_a_run_is_followed_even_if_its_supervisor_sends_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _recorded(tmp_path / "followed", "followed", time.time())
    monkeypatch.setattr(RecordStream, "history", lambda _: (1, iter([b"garbage" * 100])))
    service = ControlService(make_run(), Path(entry.socket))
    try:
        run = open_run(entry.folder)
        assert isinstance(run._internals.commands, ControlClient)
        (written,) = journal_format.encode_records([Record(0, time.time(), LogEvent("stdout", "written later"))])
        with (Path(entry.folder) / journal_format.JOURNAL_NAME).open("ab") as file:
            file.write(written)
        until(lambda: run.logs(0) == ["written later"])
    finally:
        service.close()


# ---- entries


def test_records_of_unknown_versions_are_kept(tmp_path: Path, state: Path) -> None:
    entry = _recorded(tmp_path / "newer", "newer", time.time())
    (path,) = (state / "detached").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "priority": 3}))
    (state / "detached" / "other.json").write_text("[]")
    (state / "detached" / "torn.json").write_text('{"name"')
    assert run_directory.entries() == [entry]
    assert len(list((state / "detached").glob("*.json"))) == 3


def test_only_finished_runs_are_forgotten_with_their_folders(tmp_path: Path) -> None:
    for name, process in {"lives": {}, "ended": {"pid": 2**22 - 1}}.items():
        entry = _recorded(tmp_path / name, name, time.time(), **process)
        shutil.rmtree(entry.folder)
    assert [entry.name for entry in run_directory.entries()] == ["lives"]
    with pytest.raises(FileNotFoundError):
        attach("lives")
    # This name is too long, which raises an error, as a disk that does not respond does.
    run_directory.add_entry(replace(entry, name="away", folder=f"/{'x' * 300}"))
    assert [entry.name for entry in run_directory.entries()] == ["lives", "away"]
    assert [run.name for run in runs() if run.config.detach] == []


# ---- folders


@pytest.mark.usefixtures("unmasked")
def test_the_folder_of_all_runs_is_private(tmp_path: Path, state: Path) -> None:
    _recorded(tmp_path / "a", "a", time.time())
    assert state.stat().st_mode & 0o777 == 0o700, "others must not be able to replace the folders in it"


def test_a_runtime_folder_of_another_user_is_not_used(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert run_directory.new_socket().parent == state / "sockets"
    assert not (tmp_path / "missing").exists()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "shared"))
    assert run_directory.new_socket().parent == state / "sockets"
    (tmp_path / "shared").chmod(0o700)
    assert run_directory.new_socket().parent == tmp_path / "shared" / "notebook-accelerate"
    if os.getuid() == 0:  # With sudo, which keeps the variable, the folder may belong to another user.
        os.chown(tmp_path / "shared", 65534, 65534)
        assert run_directory.new_socket().parent == state / "sockets"


def test_the_error_about_a_folder_says_how_to_fix_it(state: Path) -> None:
    run_directory.new_socket()
    (state / "sockets").chmod(0o750)
    with pytest.raises(LaunchError, match=f"chmod 700 {state}/sockets"):
        run_directory.new_socket()


# ---- names

_CLAIMS = """
import sys
from notebook_accelerate.launch.detached import run_directory
print(run_directory.claim_name("one") is not None, flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_holds_a_name(state: Path) -> None:
    claimed = run_directory.claim_name("one")
    assert claimed is not None
    assert run_directory.claim_name("one") is None
    other = run_directory.claim_name("other")
    assert other is not None
    run_directory.release_name("one", claimed)
    run_directory.release_name("other", other)
    assert not list((state / "detached").glob("*.lock"))
    command = [sys.executable, "-c", _CLAIMS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert run_directory.claim_name("one") is None
        process.kill()
    claimed = run_directory.claim_name("one")
    assert claimed is not None, "the name belonged to a killed process"
    copy = os.dup(claimed)  # A process that was forked during the run may have such a copy.
    run_directory.release_name("one", claimed)
    again = run_directory.claim_name("one")
    assert again is not None
    os.close(copy)
    assert run_directory.claim_name("one") is None
    run_directory.release_name("one", again)


# ---- launches


def test_the_first_answer_of_a_process_counts() -> None:
    """After a run has got its folder, it may fail before the kernel has read the first answer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"folder": "/runs/1"}\n{"error": "LaunchError", "message": "later"}\n')
        assert detached_launch._answer(ours) == {"folder": "/runs/1"}
        theirs.close()
        ours.setblocking(True)
        assert detached_launch._answer(ours) is None
