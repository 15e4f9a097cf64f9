"""SECURITY.md, line by line: who may connect to a run, and what unauthenticated peers receive."""

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
    EndedEvent,
    FramesEvent,
    HelloEvent,
    HostFramesEvent,
    OutputEvent,
)
from notebook_accelerate.launch.hosts.remote.listener import (
    MAX_HANDSHAKES,
    MAX_REPORTS,
    HostListener,
    connect_to_kernel,
)
from notebook_accelerate.telemetry import Channel, MetricEvent, Stamped, encode
from notebook_accelerate.telemetry.channel import MAX_JSON_BYTES
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0
HELLO = HelloEvent(1, "worker-1", {})


class _Listening:
    """A listener, the secret of its run, and its reports of refused connections."""

    def __init__(self) -> None:
        self.secret = stream.new_secret()
        self.reports: list[str] = []
        self.host_listener = HostListener("127.0.0.1", self.secret, report=self.reports.append)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.host_listener.port), timeout=SECONDS)

    def wait_for_reports(self, count: int = 1) -> None:
        until(lambda: len(self.reports) >= count)

    def connect_host(self) -> None:
        """Connect an expected host, and check that it is accepted."""
        channel = connect_to_kernel("127.0.0.1", self.host_listener.port, self.secret, HELLO)
        incoming = self.host_listener.next_host(SECONDS)
        assert incoming is not None, self.reports
        assert incoming.hello.host == "worker-1"
        incoming.channel.close()
        channel.close()


@pytest.fixture
def step() -> Iterator[_Listening]:
    made = _Listening()
    yield made
    made.host_listener.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "notebook-accelerate-handshake"])


def _ended(connection: socket.socket) -> bool:
    """Whether the other end closes without sending more."""
    connection.settimeout(SECONDS)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# ---- A run on one machine


def _inspect() -> tuple[list[tuple[Any, ...]], str, bool]:
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.reduce(torch.ones(1))
    inside = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    found = [(c.family, c.status, c.laddr, c.raddr) for c in psutil.Process().net_connections("inet")]
    accelerator.wait_for_everyone()
    return found, inside, any(name in os.environ for name in KERNEL_ONLY)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_run_on_one_machine_listens_on_loopback_only(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct horse battery staple"
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", secret)
    mine = {(c.laddr, c.status) for c in psutil.Process().net_connections("inet")}
    seen: list[Any] = []
    config = LaunchConfig(num_processes=2, start_method=method, use_port=0, cpu=True, panel=False, block=False)
    run = start(config, _inspect)
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


def test_the_kernel_listens_on_one_address_until_its_hosts_have_connected() -> None:
    one = _Listening()
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == one.host_listener.port] == ["127.0.0.1"]
    one.connect_host()
    port = one.host_listener.port
    one.host_listener.close()
    with pytest.raises(OSError, match=r"refused|Connection"):
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def test_a_peer_without_the_secret_is_refused_and_reported(step: _Listening) -> None:
    with pytest.raises(AuthenticationError):
        connect_to_kernel("127.0.0.1", step.host_listener.port, stream.new_secret(), HELLO)
    step.wait_for_reports()
    assert step.reports == ["a connection from 127.0.0.1 was refused: it does not know the run's secret"]
    step.connect_host()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200, b"\x00" * 200, os.urandom(4096), b"\x16\x03\x01" * 99]
)
def test_a_peer_of_another_protocol_is_refused(step: _Listening, data: bytes) -> None:
    with step.connect() as peer:
        peer.sendall(data)
        step.wait_for_reports()
    assert "it does not speak this protocol" in step.reports[0]
    step.connect_host()


def test_an_unauthenticated_peer_receives_no_data_to_test_guesses_on(step: _Listening) -> None:
    with step.connect() as peer:
        peer.sendall(stream._MAGIC + os.urandom(32))
        hello = _read(peer, len(stream._MAGIC) + 32)
        assert hello.startswith(stream._MAGIC)
        peer.sendall(os.urandom(32))
        assert _ended(peer), "not a byte made with the secret"


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def test_a_recorded_handshake_cannot_be_replayed(step: _Listening) -> None:
    recorder = _Recorder(step.host_listener.port)
    channel = connect_to_kernel("127.0.0.1", recorder.port, step.secret, HELLO)
    incoming = step.host_listener.next_host(SECONDS)
    assert incoming is not None
    recorder.close()
    with step.connect() as peer:
        peer.sendall(bytes(recorder.recorded))
        step.wait_for_reports()
        assert _ended_after_hello(peer)
    assert "does not know the run's secret" in step.reports[0]
    for one in (channel, incoming.channel):
        one.close()


def test_messages_of_the_kernel_sent_back_do_not_authenticate(step: _Listening) -> None:
    with step.connect() as peer:
        hello = _read(peer, len(stream._MAGIC) + 32)
        peer.sendall(hello)  # the same nonce, and whatever it would send next
        peer.shutdown(socket.SHUT_WR)
        step.wait_for_reports()
    step.connect_host()


def _ended_after_hello(connection: socket.socket) -> bool:
    _read(connection, len(stream._MAGIC) + 32)
    return _ended(connection)


class _Recorder:
    """Forwards one connection, and records what the caller sends."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.recorded = bytearray()
        self._to = port
        self._threads = [threading.Thread(target=self._forward)]
        self._threads[0].start()

    def _forward(self) -> None:
        caller, _ = self._listener.accept()
        called = socket.create_connection(("127.0.0.1", self._to))
        self._ends = (caller, called)
        back = threading.Thread(target=self._copy, args=(called, caller, bytearray()))
        self._threads.append(back)
        back.start()
        self._copy(caller, called, self.recorded)

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


def test_silent_connections_do_not_delay_a_launch(step: _Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 600.0)
    peers = [step.connect() for _ in range(2 * MAX_HANDSHAKES)]
    began = time.monotonic()
    step.connect_host()
    step.host_listener.close()
    assert time.monotonic() - began < SECONDS
    for peer in peers:
        peer.close()


def test_many_refused_connections_do_not_fill_the_notebook() -> None:
    one = _Listening()
    for _ in range(MAX_REPORTS + 30):
        with one.connect() as peer:
            peer.sendall(b"x" * 200)
            _ended_after_hello(peer)
    until(lambda: one.host_listener._refused >= MAX_REPORTS + 30 and len(one.reports) >= MAX_REPORTS)
    one.host_listener.close()
    assert len(one.reports) == MAX_REPORTS + 1
    assert one.reports[-1] == "30 more connections were refused"


# ---- Records of an authenticated stream


def _authenticated_pair() -> tuple[
    stream.AuthenticatedStream, stream.AuthenticatedStream, socket.socket, socket.socket
]:
    """Return two authenticated ends and the wire between them, from which a test reads and to which it writes."""
    here, wire_here = socket.socketpair()
    there, wire_there = socket.socketpair()
    ends: dict[bool, stream.AuthenticatedStream] = {}
    secret = stream.new_secret()

    def authenticate(end: socket.socket, *, listens: bool) -> None:
        ends[listens] = stream.authenticate(end, secret, listens=listens, timeout=SECONDS)

    roles = ((here, True), (there, False))
    threads = [threading.Thread(target=authenticate, args=(end,), kwargs={"listens": role}) for end, role in roles]
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
def test_a_tampered_record_ends_the_stream_and_is_not_read(tampering: str) -> None:
    ours, theirs, wire_ours, wire_theirs = _authenticated_pair()
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


def test_the_two_directions_have_different_keys() -> None:
    ours, theirs, wire_ours, wire_theirs = _authenticated_pair()
    (sent,) = _records(1, ours, wire_ours)
    wire_ours.sendall(sent)  # back to who sent it
    with pytest.raises(ConnectionError):
        ours.recv(1 << 16, 0)
    for end in (ours, theirs, wire_ours, wire_theirs):
        end.close()


def test_a_length_above_the_maximum_is_refused_at_once() -> None:
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


def test_data_of_an_unauthenticated_peer_is_not_unpickled(step: _Listening, tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    bomb = pickle.dumps(_Bomb(str(trace)))
    for begin in (b"", stream._MAGIC, stream._MAGIC + os.urandom(32), stream._MAGIC + os.urandom(64)):
        with step.connect() as peer:
            peer.sendall(begin + bomb * 20)
            _ended_after_hello(peer)
    step.wait_for_reports(4)
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists(), "the bomb would have worked"


def test_modules_that_read_from_the_network_do_not_import_pickle() -> None:
    package = ROOT / "notebook_accelerate"
    sources = [*(package / "launch/hosts/remote").glob("*.py"), package / "telemetry/channel.py"]
    assert len(sources) > 4
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}", *(f"{a.name}" for a in node.names)] if isinstance(node, ast.ImportFrom) else []
            bad = [n for n in names if n.split(".")[-1] in ("pickle", "marshal", "shelve", "cloudpickle", "load_bytes")]
            assert not bad, f"{source}: {bad}"


class _Events:
    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        self.received.append(("output", rank))

    def take_frames(self, rank: int, data: bytes) -> None:
        self.received.append(("frames", rank))

    def take_host_frames(self, rank: int, data: bytes) -> None:
        self.received.append(("host frames", rank))

    def take_end(self, rank: int) -> None:
        self.received.append(("end", rank))


def test_a_host_sends_events_of_its_own_ranks_only() -> None:
    kernel, peer = Channel.pair()
    connection, events = HostConnection(kernel, 1, "worker-1"), _Events()
    from notebook_accelerate.launch.hosts.remote.host_connection import RemoteRank

    RemoteRank(connection, 8, 1234, 0)
    for rank in (0, 8, 99):
        for event in (OutputEvent(rank, "stdout", b"x"), FramesEvent(rank, b"x"), HostFramesEvent(rank, b"x")):
            connection.handle(event, events)
        connection.handle(EndedEvent(rank, 0, None, 0), events)
    assert events.received == [("output", 8), ("frames", 8), ("host frames", 8), ("end", 8)]
    kernel.close()
    peer.close()


# ---- Where the secret is


def test_the_secret_is_in_no_command_line_environment_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_line_of_the_threat_model_names_an_existing_test() -> None:
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("- ")]
    named = [re.findall(r"`(test_\w+)`$", line) for line in lines]
    assert len(lines) >= 10
    assert [len(names) for names in named] == [1] * len(lines)
    there = {name for name in globals() if name.startswith("test_") and "threat_model" not in name}
    assert {name for names in named for name in names} == there
