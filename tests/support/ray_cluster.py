"""A real Ray cluster on this machine, where each node has its own loopback address.

The cluster runs in a process that is not a child of the test's process, so that its workers do not count as leaked. It
ends with the process that created it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.ports import free_port

SHADOW = Path(__file__).resolve().parents[1] / "ray" / "shadow"
"""The folder of stub modules that make `import ray` fast."""
STORE_BYTES = 150 << 20
START_SECONDS = 600.0
TRIES = 6
"""The number of attempts to start a node. Ray allows 30 seconds for each, which may not be enough on a busy machine."""
PATIENCE = {
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "100",  # Like TRIES, this gives a busy machine more time.
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # Otherwise, the fork for the client's server may crash before its exec.
    "RAY_worker_register_timeout_seconds": "600",  # This limit applies to actors' processes.
    "RAY_health_check_timeout_ms": "120000",  # A slow node is not dead, and dead nodes refuse connections immediately.
    "RAY_memory_monitor_refresh_ms": "0",  # Don't kill actors when other programs fill the memory.
}
"""Settings that make Ray tolerate a busy machine."""


class LocalCluster:
    """A cluster of several nodes.

    Args:
        cpus: The number of CPUs of each node. The first node is the head.
        client: Whether to start a server for Ray's client.

    Attributes:
        address: The address that nodes connect to.
        client: The address that Ray's client connects to, or "" if there is no server for it.
        nodes: The initial nodes.
    """

    def __init__(self, *cpus: int, client: bool = False) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        command = [sys.executable, "-m", "tests.support.ray_cluster", str(requests), str(answers)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SHADOW), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "RAY_USAGE_STATS_ENABLED": "0",
            **PATIENCE,
        }
        root = Path(__file__).resolve().parents[2]
        subprocess.run(command, pass_fds=[requests, answers], env=environment, cwd=root, check=True)
        os.close(requests)
        os.close(answers)
        self._text = b""
        self.address = str(self.ask("head", cpus=cpus[0], client=client))
        self.client = str(self.ask("client_address"))
        self.nodes = ["127.0.0.2", *(self.add_node(count) for count in cpus[1:])]

    def add_node(self, cpus: int, gpus: int = 0, **resources: float) -> str:
        """Start another node, which may claim to have GPUs. Return its address."""
        return str(self.ask("add", cpus=cpus, gpus=gpus, resources=resources))

    def kill_node(self, address: str, *, known: bool = True) -> None:
        """Kill a node's raylet, and with it the node. With ``known``, return once the cluster has noticed.

        Ray takes seconds to notice, and until then places ranks on the dead node.
        """
        self.ask("kill", address=address)
        deadline = time.monotonic() + START_SECONDS
        while known and not self.ask("is_dead", address=address):
            assert time.monotonic() < deadline, f"the cluster still considers {address} alive"
            time.sleep(0.1)

    def wait_until_free(self, seconds: float = 120.0) -> None:
        """Wait until Ray has released all CPUs, which takes a moment after a run.

        Args:
            seconds: The maximum time to wait. The function returns even if some CPUs are still in use.
        """
        deadline = time.monotonic() + seconds
        while not self.ask("is_free") and time.monotonic() < deadline:
            time.sleep(0.1)

    def close(self) -> None:
        """End the cluster and its process."""
        with suppress(AssertionError, OSError):
            self.ask("close")
        os.close(self._requests)
        os.close(self._answers)

    def ask(self, what: str, **values: Any) -> object:
        """Send a request to the cluster's process, and return the answer."""
        os.write(self._requests, json.dumps([what, values]).encode() + b"\n")
        deadline = time.monotonic() + START_SECONDS
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the Ray cluster did not answer {what!r} within {START_SECONDS:g} s"
            data = os.read(self._answers, 1 << 16)
            assert data, "the process of the Ray cluster exited"
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        kind, answer = json.loads(line)
        assert kind == "done", f"the Ray cluster failed at {what!r}: {answer}"
        return answer


class _Server:
    """The process that runs the cluster."""

    def __init__(self) -> None:
        self.cluster: Any = None
        self.nodes: dict[str, Any] = {}
        self._client_port = 0

    def head(self, cpus: int, client: bool) -> str:
        from ray.cluster_utils import Cluster

        arguments = {**_node(2, cpus, {}), "include_dashboard": False}

        def start() -> Any:
            if client:
                self._client_port = arguments["ray_client_server_port"] = free_port()
            return Cluster(initialize_head=True, head_node_args=arguments)

        self.cluster = _tried(start)
        return str(self.cluster.address)

    def client_address(self) -> str:
        return f"ray://127.0.0.2:{self._client_port}" if self._client_port else ""

    def is_free(self) -> bool:
        state = self.cluster.global_state
        free = state.available_resources_per_node()
        return all(
            free.get(node, {}).get(name, 0.0) == amount
            for node, resources in state.total_resources_per_node().items()
            for name, amount in resources.items()
            if name == "CPU"
        )

    def add(self, cpus: int, gpus: int, resources: dict[str, float]) -> str:
        arguments = {**_node(len(self.nodes) + 3, cpus, resources), **({"num_gpus": gpus} if gpus else {})}
        self.nodes[arguments["node_ip_address"]] = _tried(lambda: self.cluster.add_node(**arguments))
        return str(arguments["node_ip_address"])

    def kill(self, address: str) -> None:
        self.cluster.remove_node(self.nodes[address], allow_graceful=False)

    def is_dead(self, address: str) -> bool:
        table = self.cluster.global_state.node_table()
        return not any(node["Alive"] for node in table if node["NodeManagerAddress"] == address)

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.shutdown()


def _node(number: int, cpus: int, resources: dict[str, float]) -> dict[str, Any]:
    return {
        "num_cpus": cpus,
        "resources": resources,
        "node_ip_address": f"127.0.0.{number}",
        "object_store_memory": STORE_BYTES,
        "include_log_monitor": False,
    }


def _tried(start: Callable[[], Any]) -> Any:
    for left in reversed(range(TRIES)):
        before = set(psutil.Process().children(recursive=True))
        try:
            return start()
        except Exception:
            for late in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):  # A node that survived would be an additional node of the cluster.
                    late.kill()
            if not left:
                raise
    raise AssertionError("the last try raises")


def serve(requests: int, answers: int) -> None:
    """Serve requests until the connection is closed."""
    server = _Server()
    try:
        with os.fdopen(requests) as lines:
            for line in lines:
                what, values = json.loads(line)
                try:
                    answer = ["done", getattr(server, what)(**values)]
                except Exception as error:  # noqa: BLE001 - sent to the caller
                    answer = ["failed", f"{type(error).__name__}: {error}"]
                os.write(answers, json.dumps(answer).encode() + b"\n")
    finally:
        server.close()


if __name__ == "__main__":
    if os.fork() == 0:
        os.setsid()
        log = os.open(Path(__file__).resolve().parents[2] / ".build" / "ray-cluster.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        serve(int(sys.argv[1]), int(sys.argv[2]))
