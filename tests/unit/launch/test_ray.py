"""Launches on Ray, as far as they can be tested without Ray. `make test-ray` tests the rest."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from notebook_accelerate import LaunchConfig, LaunchError, RayCluster, notebook_launcher
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.hardware.addresses import interface_of
from notebook_accelerate.launch import KernelFacts, make_plan
from notebook_accelerate.launch.hosts.host_backend import take_ranks
from notebook_accelerate.launch.hosts.placed_ranks import adapt_to_machine
from notebook_accelerate.launch.hosts.ray import ray_actor
from notebook_accelerate.launch.hosts.ray.ray_actor import NodeHost
from notebook_accelerate.launch.hosts.ray.ray_backend import RayHostConnection
from notebook_accelerate.launch.hosts.ray.ray_driver import cause, merge_devices, mismatches, run_tunnel, unreachable
from notebook_accelerate.launch.hosts.remote.host_protocol import FramesEvent, HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener, connect_to_kernel
from notebook_accelerate.launch.hosts.remote.stream import new_secret
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, dispatch
from notebook_accelerate.launch.processes.interpreters import isolated_path
from notebook_accelerate.launch.processes.rank_process import RankProcess
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from notebook_accelerate.widgets.config_file_form import launch_cell
from notebook_accelerate.widgets.config_panel import ConfigPanel
from tests.support.simulated import Received

MACHINE = HardwareInfo(
    accelerator="cpu", count=0, cpu_count=4, memory_bytes=1 << 30, host="jupyter", loopback="lo"
)  # fmt: skip


def test_the_plan_names_the_cluster_and_is_never_inline() -> None:
    facts = KernelFacts(fork_hazard=lambda: "something", environment={"OMP_NUM_THREADS": "3"})
    planned = make_plan(LaunchConfig(num_processes=8, on="ray"), MACHINE, facts)
    assert planned.start_method == "ray"
    assert planned.sentence().startswith("8 processes on a Ray cluster · ray (as asked: on='ray')")
    assert (planned.world_size, planned.loopback, planned.port) == (8, "", 0)
    one = make_plan(LaunchConfig(on=RayCluster(cpus=4, gpus=0)), MACHINE, facts)
    assert (one.start_method, one.num_processes, one.threads, one.accelerator) == ("ray", 1, 4, "cpu")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_has_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"on='ray' needs Ray; install it: pip install 'notebook-accelerate\[ray\]'"
    with pytest.raises(LaunchError, match=words):
        notebook_launcher(print, num_processes=2, on="ray")
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_ON", "ray://head:10001")
    with pytest.raises(LaunchError, match=words):
        notebook_launcher(print)
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_ON", "mars")
    with pytest.raises(ValueError, match="on='mars' is not allowed"):
        notebook_launcher(print)


def test_a_cell_of_a_launch_on_a_cluster_can_be_generated() -> None:
    assert launch_cell("train", "", LaunchConfig(num_processes=8, on="ray")) == (
        'from notebook_accelerate import notebook_launcher\n\nrun = notebook_launcher(train, num_processes=8, on="ray")'
    )
    config = LaunchConfig(on=RayCluster(cpus=2, strategy="SPREAD"), cpu=True)
    cell = launch_cell("train", "", config)
    assert cell.startswith("from notebook_accelerate import LaunchConfig, RayCluster, notebook_launcher\n")
    assert 'on=RayCluster(cpus=2.0, strategy="SPREAD")' in cell
    compile(cell, "cell", "exec")


def test_the_config_panel_accepts_a_cluster() -> None:
    panel = ConfigPanel(machine=MACHINE, facts=lambda: KernelFacts(environment={}))
    panel.change(on="ray", num_processes=4)
    assert panel.sentence.startswith("4 processes on a Ray cluster, ray, ")
    assert 'on="ray"' in panel.code
    on = RayCluster(address="head:6379", gpus=1)
    panel.change(on=on)
    assert panel.config.on == on
    assert panel.sentence.startswith("4 processes on the Ray cluster at head:6379")
    assert "import RayCluster, notebook_launcher" in panel.code
    assert "RayCluster" in panel.launch_form.html
    panel.change(on=None)
    assert panel.plan.start_method != "ray"
    panel.close()


def facts(node: str, **versions: str) -> dict[str, object]:
    return {"host": "host", "address": node, "versions": versions}


def test_versions_must_match() -> None:
    ours = {"python": "3.11.7", "torch": "2.13.0+cpu", "notebook_accelerate": "0.1.0"}
    same = facts("10.0.0.1", python="3.11.9", torch="2.13.0+cu128", notebook_accelerate="0.1.0")
    assert mismatches(ours, [same, same]) == ""
    other = facts("10.0.0.2", python="3.12.1", torch="2.12.0", notebook_accelerate="")
    text = mismatches(ours, [same, other])
    assert text.count("10.0.0.2") == 3
    assert "10.0.0.1)" not in text
    for part in ("has python 3.12.1; the notebook has 3.11.7", "has torch 2.12.0", "has no notebook_accelerate"):
        assert part in text


def test_each_rank_sees_its_own_device_at_its_local_rank() -> None:
    one = [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert merge_devices(one) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    two = [{"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "1,3"}]
    assert merge_devices(two) == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert merge_devices([{}, {}]) == {}


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.7") == "lo"
    assert interface_of("203.0.113.77") == ""


def test_an_order_is_adapted_to_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.setenv("ONLY_HERE", "1")
    order = WorkerOrder(
        0, {}, 1, capture_inherited_state(), cwd="/nowhere", sys_path=["/nowhere", str(tmp_path), *sys.path]
    )
    adapt_to_machine(order)
    assert order.base_environment is not None
    assert "PYTHONBREAKPOINT" not in order.base_environment
    assert order.base_environment["ONLY_HERE"] == "1"
    assert order.cwd is None
    assert order.sys_path == [*sys.path, str(tmp_path)]


def test_packages_that_ray_has_copied_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", ["/site-packages/ray/thirdparty_files", *before])
    order = WorkerOrder(0, {}, 1, capture_inherited_state(), cwd=None, sys_path=[])
    adapt_to_machine(order)
    assert order.sys_path == before
    assert sorted(isolated_path(sys.path)) == sorted(before)


def _tunnel() -> tuple[NodeHost, socket.socket]:
    """Return a node's host with a tunnel, and the rank's end of that tunnel."""
    node = NodeHost()
    node.open_tunnel()
    assert node._tunnel is not None
    return node, socket.create_connection(node._tunnel.getsockname())


def _close(node: NodeHost, rank_end: socket.socket) -> None:
    rank_end.close()
    assert node._connection is not None
    node._connection.close()


def test_a_tunnel_carries_data_both_ways_and_closes() -> None:
    node, rank_end = _tunnel()
    node.push(b"down")
    assert rank_end.recv(10) == b"down"
    rank_end.sendall(b"up")
    assert node.pull() == b"up"
    node.push(b"")
    assert rank_end.recv(10) == b""
    rank_end.close()
    assert node.pull() == b""
    _close(node, rank_end)


def test_a_push_waits_for_the_connection_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "TUNNEL_SECONDS", 0.1)
    node = NodeHost()
    node.open_tunnel()
    assert node._tunnel is not None
    address = node._tunnel.getsockname()
    assert node.pull() is None
    pushing = threading.Thread(target=node.push, args=(b"early",))
    pushing.start()
    rank_end = socket.create_connection(address)
    assert rank_end.recv(10) == b"early"
    pushing.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    _close(node, rank_end)


def test_a_blocked_push_is_not_truncated_by_a_concurrent_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "TUNNEL_SECONDS", 0.1)
    node, rank_end = _tunnel()
    assert node.pull() is None
    sent = os.urandom(32 << 20)  # This is more than the buffers of a loopback connection hold.
    pushing = threading.Thread(target=node.push, args=(sent,))
    pushing.start()
    for _ in range(5):  # The rank is not reading yet.
        assert node.pull() is None
    assert pushing.is_alive()
    received = bytearray()
    while len(received) < len(sent) and (part := rank_end.recv(1 << 20)):
        received += part
    pushing.join()
    assert received == sent
    _close(node, rank_end)


class _CalledHere:
    """An actor whose methods are called directly, without Ray."""

    def __init__(self, node: NodeHost) -> None:
        self._node = node
        self.call = self

    def remote(self, method: str, *arguments: object) -> object:
        return getattr(self._node, method)(*arguments)

    def get(self, result: object) -> object:
        """Stand in for ``ray.get``."""
        return result


def test_a_host_connects_to_the_kernel_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "TUNNEL_SECONDS", 0.1)
    secret, node = new_secret(), NodeHost()
    listener = HostListener("127.0.0.1", secret)
    actor = _CalledHere(node)
    monkeypatch.setitem(sys.modules, "ray", actor)  # type: ignore[arg-type]
    node.open_tunnel()
    assert node._tunnel is not None
    tunnel = threading.Thread(target=run_tunnel, args=(actor, "127.0.0.1", listener.port))
    tunnel.start()
    host = connect_to_kernel(*node._tunnel.getsockname(), secret, HelloEvent(1, "c3-n07"))
    incoming = listener.next_host(60)
    assert incoming is not None
    sent = [FramesEvent(0, os.urandom(1 << 20)) for _ in range(8)]
    incoming.stream.send(FramesEvent(1, b"down"))
    assert [event for _, event in host.receive(60)] == [FramesEvent(1, b"down")]
    sending = threading.Thread(target=host.send, args=sent)
    sending.start()
    received: list[object] = []
    while len(received) < len(sent):
        received += [event for _, event in incoming.stream.receive(60)]
    assert received == sent
    sending.join()
    host.close()
    with pytest.raises(ChannelClosedError):
        incoming.stream.receive(60)
    incoming.stream.close()
    listener.close()
    tunnel.join(60)
    assert not tunnel.is_alive()
    assert node._connection is not None
    node._connection.close()


class _Actor:
    """An actor that serves its tunnel until it dies."""

    def __init__(self) -> None:
        self.dies = threading.Event()
        self.call = self

    def remote(self, method: str, *_: object) -> str:
        return method

    def get(self, method: str) -> None:
        """Stand in for ``ray.get``."""
        if method == "pull":
            self.dies.wait(60)
        raise RuntimeError("the actor has died")


def test_the_kernel_sees_that_an_actor_behind_a_tunnel_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = _Actor()
    monkeypatch.setitem(sys.modules, "ray", actor)  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tunnel = threading.Thread(target=run_tunnel, args=(actor, "127.0.0.1", listener.getsockname()[1]))
        tunnel.start()
        connection, _ = listener.accept()
        with connection:
            actor.dies.set()
            connection.settimeout(60)
            assert connection.recv(1) == b""
        tunnel.join()


class _Driver:
    """The part of the driver's process that a connection uses."""

    def __init__(self) -> None:
        self.connected: set[int] = set()
        self.ended = False

    def end(self) -> None:
        self.ended = True

    def end_reason(self, node: int) -> str:
        return "its actor's process has died" if node == 2 else ""


def test_an_actor_that_dies_after_connecting_is_reported_with_the_reason() -> None:
    secret = new_secret()
    listener = HostListener("127.0.0.1", secret)
    actor = connect_to_kernel("127.0.0.1", listener.port, secret, HelloEvent(2, "c3-n07", port=29500))
    incoming = listener.next_host(60)
    assert incoming is not None
    listener.close()
    driver = _Driver()
    connection = RayHostConnection(incoming, driver)  # type: ignore[arg-type]
    actor.close()
    orders = [WorkerOrder(rank, {"LOCAL_RANK": str(rank - 4)}, 1, capture_inherited_state()) for rank in (4, 5)]
    ranks: list[RankProcess] = []
    take_ranks(connection, orders, ranks.append, 60.0, lambda: False)
    assert [(rank.rank, rank.local_rank, rank.node) for rank in ranks] == [(4, 0, 2), (5, 1, 2)]
    received = Received()
    with DispatchSelector() as selector:
        for rank in ranks:
            rank.connect(selector, received)
        dispatch(selector, 60.0)
    assert received.calls == [(4, "end"), (5, "end")]
    for rank in ranks:
        end = rank.poll()
        assert end is not None
        assert end.lost == "node 2 (c3-n07) was lost: its actor's process has died"
        assert not driver.ended
    for rank in ranks:
        rank.close()
    assert driver.ended


def test_errors_of_ray_are_reported_in_one_sentence() -> None:
    died = RuntimeError("The actor died unexpectedly.\n\tclass_name: Rank\n\tThe node has died: address: 10.0.0.7, x")
    assert cause(died) == "the Ray node at 10.0.0.7 has died"
    crashed = RuntimeError("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR")
    assert cause(crashed).startswith("its actor's process has died")
    assert "ray start --head" in unreachable("auto", ConnectionError("Could not find any running Ray instance"))
    text = unreachable("a:1", ConnectionError("no route\nTraceback:\n  File x\nOSError: down"))
    assert "could not be reached: ConnectionError: no route OSError: down" in text
    assert "ConnectionError: no route; on a machine" in unreachable("a:1", ConnectionError("no route"))
    assert unreachable("a:1", RuntimeError("Version mismatch: The cluster\n was")).startswith("the notebook's Ray")
