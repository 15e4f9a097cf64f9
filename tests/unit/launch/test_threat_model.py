"""SECURITY.md, line by line: who may talk to a run, and what strangers get."""

from __future__ import annotations

import ast
import os
import pickle
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accelerate import LaunchConfig
from notebook_accelerate.config.environ import KERNEL_ONLY
from notebook_accelerate.errors import AuthenticationError, ChannelClosedError
from notebook_accelerate.launch import start
from notebook_accelerate.launch.hosts.remote import listener, stream
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    AsideEvent,
    EndedEvent,
    FramesEvent,
    HelloEvent,
    OutputEvent,
)
from notebook_accelerate.launch.hosts.remote.listener import MAX_GREETINGS, MAX_REPORTS, HostListener, call
from notebook_accelerate.telemetry import Channel, MetricEvent, Stamped, encode
from notebook_accelerate.telemetry.channel import MAX_JSON_BYTES
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0
HELLO = HelloEvent(1, "worker-1", {})


class _Doorstep:
    """A door, the secret of its run, and what it has told of those it refused."""

    def __init__(self) -> None:
        self.secret = stream.new_secret()
        self.told: list[str] = []
        self.door = HostListener("127.0.0.1", self.secret, report=self.told.append)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.door.port), timeout=SECONDS)

    def wait_until_told(self, count: int = 1) -> None:
        until(lambda: len(self.told) >= count)

    def host_comes(self) -> None:
        """Have an expected host come, and see that it gets in."""
        channel = call("127.0.0.1", self.door.port, self.secret, HELLO, SECONDS)
        visitor = self.door.next_visitor(SECONDS)
        assert visitor is not None, self.told
        assert visitor.hello.host == "worker-1"
        visitor.channel.close()
        channel.close()


@pytest.fixture
def step() -> Iterator[_Doorstep]:
    made = _Doorstep()
    yield made
    made.door.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "notebook-accelerate-greeting"])


def _ended(connection: socket.socket) -> bool:
    """Whether the other end closes without another word."""
    connection.settimeout(SECONDS)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# ---- A run on one machine


def _look_around() -> tuple[list[tuple[Any, ...]], str, bool]:
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.reduce(torch.ones(1))
    inside = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    found = [(c.family, c.status, c.laddr, c.raddr) for c in psutil.Process().net_connections("inet")]
    accelerator.wait_for_everyone()
    return found, inside, any(name in os.environ for name in KERNEL_ONLY)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_run_on_one_machine_is_heard_on_loopback_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct horse battery staple"
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", secret)
    mine = {(c.laddr, c.status) for c in psutil.Process().net_connections("inet")}
    seen: list[Any] = []
    config = LaunchConfig(num_processes=2, start_method=method, use_port=0, cpu=True, panel=False, block=False)
    run = start(config, _look_around)
    while not run.wait(0.05):
        seen += [c for c in psutil.Process().net_connections("inet") if (c.laddr, c.status) not in mine]
    for connections, inside, has_secret in run.results:
        assert connections, "the process group's own"
        addresses = {address.ip for _, _, laddr, raddr in connections for address in (laddr, raddr) if address}
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        assert secret not in inside, "a process that a rank starts"
        assert not has_secret
    # The kernel may hold the process group's port until rank 0 takes it; nobody is ever connected to the kernel.
    assert {c.laddr.ip for c in seen} <= {"127.0.0.1"}
    assert not [c for c in seen if c.raddr]
    assert {c.laddr.port for c in seen} <= {run.plan.port}
    assert secret not in run.report().html + run.report().text + repr(run) + "\n".join(run.logs())


# ---- Listening for other machines


def test_the_kernel_listens_on_one_address_and_only_until_its_hosts_have_come() -> None:
    one = _Doorstep()
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == one.door.port] == ["127.0.0.1"]
    one.host_comes()
    port = one.door.port
    one.door.close()
    with pytest.raises(OSError, match=r"refused|Connection"):
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def test_who_does_not_know_the_secret_is_refused_and_told_of(step: _Doorstep) -> None:
    with pytest.raises(AuthenticationError):
        call("127.0.0.1", step.door.port, stream.new_secret(), HELLO, SECONDS)
    step.wait_until_told()
    assert step.told == ["a connection from 127.0.0.1 was refused: it does not know the run's secret"]
    step.host_comes()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200, b"\x00" * 200, os.urandom(4096), b"\x16\x03\x01" * 99]
)
def test_who_speaks_another_protocol_is_refused(step: _Doorstep, words: bytes) -> None:
    with step.stranger() as stranger:
        stranger.sendall(words)
        step.wait_until_told()
    assert "it does not speak this protocol" in step.told[0]
    step.host_comes()


def test_a_stranger_gets_nothing_to_try_guesses_of_the_secret_on(step: _Doorstep) -> None:
    with step.stranger() as stranger:
        stranger.sendall(stream._MAGIC + os.urandom(32))
        hello = _read(stranger, len(stream._MAGIC) + 32)
        assert hello.startswith(stream._MAGIC)
        stranger.sendall(os.urandom(32))
        assert _ended(stranger), "not a byte made with the secret"


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def test_a_greeting_that_was_overheard_cannot_be_said_again(step: _Doorstep) -> None:
    overheard = _Overhearing(step.door.port)
    channel = call("127.0.0.1", overheard.port, step.secret, HELLO, SECONDS)
    visitor = step.door.next_visitor(SECONDS)
    assert visitor is not None
    overheard.close()
    with step.stranger() as stranger:
        stranger.sendall(bytes(overheard.said))
        step.wait_until_told()
        assert _ended_after_hello(stranger)
    assert "does not know the run's secret" in step.told[0]
    for one in (channel, visitor.channel):
        one.close()


def test_its_own_words_do_not_open_the_door(step: _Doorstep) -> None:
    with step.stranger() as stranger:
        hello = _read(stranger, len(stream._MAGIC) + 32)
        stranger.sendall(hello)  # the same nonce, and whatever it would say next
        stranger.shutdown(socket.SHUT_WR)
        step.wait_until_told()
    step.host_comes()


def _ended_after_hello(connection: socket.socket) -> bool:
    _read(connection, len(stream._MAGIC) + 32)
    return _ended(connection)


class _Overhearing:
    """Passes one connection on, and keeps what the caller said."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.said = bytearray()
        self._to = port
        self._threads = [threading.Thread(target=self._pass_on)]
        self._threads[0].start()

    def _pass_on(self) -> None:
        caller, _ = self._listener.accept()
        called = socket.create_connection(("127.0.0.1", self._to))
        self._ends = (caller, called)
        back = threading.Thread(target=self._copy, args=(called, caller, bytearray()))
        self._threads.append(back)
        back.start()
        self._copy(caller, called, self.said)

    def _copy(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(4096):
                kept += data
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        for end in self._ends:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
        for end in (*self._ends, self._listener):
            end.close()


def test_silent_strangers_keep_nobody_waiting(step: _Doorstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 600.0)  # so long each of them may be silent
    strangers = [step.stranger() for _ in range(2 * MAX_GREETINGS)]
    began = time.monotonic()
    step.host_comes()
    step.door.close()
    assert time.monotonic() - began < SECONDS
    for stranger in strangers:
        stranger.close()


def test_a_crowd_of_strangers_does_not_fill_the_notebook() -> None:
    one = _Doorstep()
    for _ in range(MAX_REPORTS + 30):
        with one.stranger() as stranger:
            stranger.sendall(b"x" * 200)
            _ended_after_hello(stranger)
    until(lambda: one.door._refused >= MAX_REPORTS + 30 and len(one.told) >= MAX_REPORTS)
    one.door.close()
    assert len(one.told) == MAX_REPORTS + 1
    assert one.told[-1] == "30 more connections were refused"


# ---- What comes over a link


def _sealed_pair() -> tuple[stream.AuthenticatedStream, stream.AuthenticatedStream, socket.socket, socket.socket]:
    """Return two greeted ends, and the wire between them: what either sends is read from and put on the wire."""
    here, wire_here = socket.socketpair()
    there, wire_there = socket.socketpair()
    ends: dict[bool, stream.AuthenticatedStream] = {}
    secret = stream.new_secret()

    def greet(end: socket.socket, *, listens: bool) -> None:
        ends[listens] = stream.greet(end, secret, listens=listens, timeout=SECONDS)

    roles = ((here, True), (there, False))
    threads = [threading.Thread(target=greet, args=(end,), kwargs={"listens": role}) for end, role in roles]
    for thread in threads:
        thread.start()
    size = len(stream._MAGIC) + 32
    wire_here.sendall(_read(wire_there, size))
    wire_there.sendall(_read(wire_here, size))
    wire_here.sendall(_read(wire_there, 32))
    wire_there.sendall(_read(wire_here, 32))
    for thread in threads:
        thread.join(SECONDS)
    return ends[True], ends[False], wire_here, wire_there


def _records(count: int, sender: stream.AuthenticatedStream, wire: socket.socket) -> list[bytes]:
    found = []
    for number in range(count):
        data = encode([Stamped(0.0, MetricEvent({"loss": 1.0}, number))])
        sender.sendall(data)
        found.append(_read(wire, stream._RECORD.size + len(data)))
    return found


def _flip(record: bytes, place: int) -> bytes:
    return record[:place] + bytes([record[place] ^ 1]) + record[place + 1 :]


TAMPERINGS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "changed": lambda r: [r[0], _flip(r[1], len(r[1]) - 3)],
    "its code changed": lambda r: [r[0], _flip(r[1], 6)],
    "repeated": lambda r: [r[0], r[0]],
    "left out": lambda r: [r[0], r[2]],
    "in another order": lambda r: [r[0], r[2], r[1]],
    "made up": lambda r: [r[0], struct.pack("!I16s", 5, b"\0" * 16) + b"hello"],
    "longer than allowed": lambda r: [r[0], struct.pack("!I16s", stream.MAX_RECORD + 1, b"\0" * 16)],
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_what_was_tampered_with_ends_the_stream_and_is_not_taken_in(tampering: str) -> None:
    ours, theirs, wire_ours, wire_theirs = _sealed_pair()
    channel = Channel(ours)
    given = TAMPERINGS[tampering](_records(3, theirs, wire_theirs))
    wire_ours.sendall(given[0])
    assert [event.step for _, event in channel.receive(SECONDS)] == [0]  # type: ignore[attr-defined]
    wire_ours.sendall(b"".join(given[1:]))
    with pytest.raises(ChannelClosedError, match=r"did not send|are allowed"):
        channel.receive(SECONDS)
    with pytest.raises(ChannelClosedError):
        channel.receive(0.0)
    for end in (channel, theirs, wire_ours, wire_theirs):
        end.close()


def test_the_two_directions_have_keys_of_their_own() -> None:
    ours, theirs, wire_ours, wire_theirs = _sealed_pair()
    (sent,) = _records(1, ours, wire_ours)
    wire_ours.sendall(sent)  # back to who sent it
    with pytest.raises(ConnectionError):
        ours.recv(1 << 16, 0)
    for end in (ours, theirs, wire_ours, wire_theirs):
        end.close()


def test_a_length_that_is_too_long_is_refused_before_it_is_waited_for() -> None:
    kernel, peer = Channel.pair()
    peer.sendall(struct.pack("!IQ", MAX_JSON_BYTES + 1, 0))
    with pytest.raises(ChannelClosedError, match="are allowed"):
        kernel.receive(SECONDS)
    kernel.close()
    peer.close()


class _Bomb:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._path),)


def test_nothing_a_stranger_sends_is_unpickled(step: _Doorstep, tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    bomb = pickle.dumps(_Bomb(str(trace)))
    for begin in (b"", stream._MAGIC, stream._MAGIC + os.urandom(32), stream._MAGIC + os.urandom(64)):
        with step.stranger() as stranger:
            stranger.sendall(begin + bomb * 20)
            _ended_after_hello(stranger)
    step.wait_until_told(4)
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists(), "the bomb would have worked"


def test_the_remote_channel_and_what_reads_it_know_no_pickle() -> None:
    package = ROOT / "notebook_accelerate"
    sources = [*(package / "launch/hosts/remote").glob("*.py"), package / "telemetry/channel.py"]
    assert len(sources) > 4
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}", *(f"{a.name}" for a in node.names)] if isinstance(node, ast.ImportFrom) else []
            bad = [n for n in names if n.split(".")[-1] in ("pickle", "marshal", "shelve", "cloudpickle", "load_bytes")]
            assert not bad, f"{source}: {bad}"


class _Hearing:
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        self.heard.append(("output", rank))

    def take_frames(self, rank: int, data: bytes) -> None:
        self.heard.append(("frames", rank))

    def take_aside(self, rank: int, data: bytes) -> None:
        self.heard.append(("aside", rank))

    def take_end(self, rank: int) -> None:
        self.heard.append(("end", rank))


def test_a_host_speaks_for_its_own_ranks_alone() -> None:
    kernel, peer = Channel.pair()
    link, hearing = HostConnection(kernel, 1, "worker-1"), _Hearing()
    from notebook_accelerate.launch.hosts.remote.host_connection import RemoteRank

    RemoteRank(link, 8, 1234, 0)
    for rank in (0, 8, 99):
        for event in (OutputEvent(rank, "stdout", b"x"), FramesEvent(rank, b"x"), AsideEvent(rank, b"x")):
            link.take(event, hearing)
        link.take(EndedEvent(rank, 0, None, 0), hearing)
    assert hearing.heard == [("output", 8), ("frames", 8), ("aside", 8), ("end", 8)]
    kernel.close()
    peer.close()


# ---- Where the secret is


def test_the_secret_is_in_no_command_line_no_environment_and_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a secret that nobody else should see"
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", secret)
    config = LaunchConfig(
        num_processes=2, start_method="spawn", use_port=0, cpu=True, panel=False, block=False,
        rdzv_conf={"secret": secret},
    )  # fmt: skip
    run = start(config, _sleep)
    until(lambda: len(run.logs()) == 2)
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 2
    for child in children:
        assert secret not in " ".join(child.cmdline())
        assert secret not in "".join(child.environ().values()), child.cmdline()
    run.stop()
    report = run.report()
    assert secret not in report.html + report.text + repr(run) + repr(report) + "\n".join(run.logs() + run.notes)
    from notebook_accelerate.widgets.run_panel import RunPanel

    panel = RunPanel(run)
    assert secret not in panel._setup.value + panel.html
    panel.close()


def _sleep() -> None:
    print("asleep", flush=True)
    time.sleep(600)


def test_every_line_of_the_threat_model_names_a_test_that_there_is() -> None:
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("- ")]
    named = [re.findall(r"`(test_\w+)`$", line) for line in lines]
    assert len(lines) >= 10
    assert [len(names) for names in named] == [1] * len(lines)
    there = {name for name in globals() if name.startswith("test_") and "threat_model" not in name}
    assert {name for names in named for name in names} == there
