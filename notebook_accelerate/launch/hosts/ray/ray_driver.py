"""The kernel's driver on a Ray cluster, a separate process that serves one attempt of a run.

A process that connects to Ray gets a handler for SIGTERM, environment variables, and threads for gRPC, which make later
forks unsafe. A separate process keeps all of this out of the kernel. When the driver ends, for whatever reason, its
actors end and their resources are released.

The ranks' resources are reserved by a placement group with one bundle per rank. Once Ray has placed the group, one
actor is started on each node, in one of the node's bundles. The actor itself requests no resources, because the ranks
use those of the bundles. Ray assigns devices to a bundle when it reserves the group, and shows them only to tasks and
actors in the bundle, so a short task in each bundle reports its devices. A second group with one bundle per node would
need no tasks, but others could take the resources while the first group is replaced by the second.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from notebook_accelerate.config.cluster import RAY_CLIENT, RayCluster
from notebook_accelerate.config.plain_values import hide_credentials
from notebook_accelerate.errors import ChannelClosedError, LaunchError
from notebook_accelerate.launch.hosts.host_facts import own_versions, version_differences
from notebook_accelerate.launch.hosts.ray import ray_backend
from notebook_accelerate.telemetry import Channel, Event
from notebook_accelerate.worker.entry import die_with_parent

POLL_SECONDS = 0.5
CONFIRM_SECONDS, NODE_SECONDS = 30.0, 3.0
"""How many seconds Ray may take to confirm that an unavailable actor has exited, and then that its node has died."""
REFUSE_SECONDS = 3.0
"""Minimum seconds to wait for resources, because those released by an earlier attempt are not free immediately."""
CONNECT_TRIES = 3
"""Number of attempts to connect. Ray's head waits only 30 s for a client's server, which a busy machine may exceed."""
NOTE_SECONDS = 10.0
"""Seconds between two notes while a launch waits for resources."""
CALLS = 16
"""Maximum number of concurrent calls to an actor. One lasts until the ranks finish, and the others are short."""
UNPLACED_STATES = ("NO_RESOURCES", "INFEASIBLE")
"""The states of a placement group that Ray could not place."""


def main(control: int, parent: int) -> NoReturn:
    """Run the driver, then exit the process.

    Args:
        control: The descriptor of the socket to the kernel.
        parent: The process id of the kernel.
    """
    die_with_parent(parent)
    channel = Channel(socket.socket(fileno=control))
    code = 0
    try:
        Driver(channel).run()
    except ChannelClosedError:
        code = 1  # The kernel has died or closed the socket.
    except LaunchError as error:
        with suppress(ChannelClosedError):
            channel.send(ray_backend.RefusedEvent(str(error)))
    except BaseException:  # noqa: BLE001 - the kernel shows the output of this process
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


class Node(NamedTuple):
    """A node that takes part in the run.

    Attributes:
        id: The node's id in the cluster.
        actor: The actor on the node.
        facts: The node's host name, address and versions.
        ranks: The number of ranks on the node.
        devices: The environment variables that list the ranks' devices.
    """

    id: str
    actor: Any
    facts: dict[str, Any]
    ranks: int
    devices: dict[str, str]

    @property
    def address(self) -> str:
        """The node's address in the cluster."""
        return str(self.facts["address"])


class Driver:
    """Reserves resources for the ranks of one attempt, and releases them.

    Args:
        channel: The channel to the kernel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks, self._cluster = 0, RayCluster()
        self._received: deque[Event] = deque()
        self._group: Any = None
        self._nodes: list[Node] = []

    def run(self) -> None:
        """Execute the kernel's orders until the kernel releases the resources or leaves."""
        order = self._next()
        assert isinstance(order, ray_backend.PlaceOrder)
        self._ranks, self._cluster = order.ranks, pickle.loads(order.payload)
        try:
            self._connect()
            self._reserve()
            self._place()
            serve = self._next()
            if isinstance(serve, ray_backend.ServeOrder):
                self._serve(serve)
                while not isinstance(self._next(), ray_backend.ReleaseOrder):
                    pass
        finally:
            self._release()

    def _next(self) -> Event:
        while not self._received:
            self._received += [event for _, event in self._channel.receive()]
        return self._received.popleft()

    # ---- the cluster

    def _connect(self) -> None:
        """Connect to the cluster. If its server for clients takes too long to start, try again."""
        import ray

        address = self._cluster.address
        for left in reversed(range(CONNECT_TRIES)):
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
                break
            except Exception as error:
                reason = unreachable(address, error)
                if not left or "Initialization failure from server" not in str(error):
                    raise LaunchError(reason) from error
                self._channel.send(ray_backend.ClusterNoteEvent(f"{reason}; trying again"))
        by_client = address.startswith(RAY_CLIENT)
        self._channel.send(ray_backend.ConnectedEvent("" if by_client else ray.util.get_node_ip_address()))

    def _reserve(self) -> None:
        """Reserve the ranks' resources. If the user has requested it, wait until they are available.

        Raises:
            LaunchError: The cluster does not have enough resources.
        """
        from ray.util.placement_group import placement_group_table

        nodes = self._request_placement_group()
        noted = 0.0
        deadline = time.monotonic() + max(self._cluster.seconds_to_wait, REFUSE_SECONDS)
        while not self._group.wait(POLL_SECONDS):
            self._check_still_wanted()
            alive = _alive_nodes()
            # If a node has died, request a new group, because Ray may have placed the current one on that
            # node before noticing its death, and such a group may wait forever (Ray 2.60).
            nodes = alive if nodes <= alive else self._request_placement_group()
            now = time.monotonic()
            stuck = placement_group_table(self._group)["stats"]["scheduling_state"] in UNPLACED_STATES
            if stuck and now >= deadline:
                raise LaunchError(self._too_small_text())
            if stuck and now - noted > NOTE_SECONDS:
                noted = now
                self._channel.send(
                    ray_backend.ClusterNoteEvent(f"waiting for the Ray cluster: {self._resources_text()}")
                )
        self._channel.send(ray_backend.ReservedEvent())

    def _request_placement_group(self) -> set[str]:
        """Request a placement group for all ranks, in place of any earlier one. Return the ids of the living nodes."""
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes = _alive_nodes()
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = placement_group([self._bundle] * self._ranks, strategy=self._cluster.strategy)
        return nodes

    def _check_still_wanted(self) -> None:
        if self._channel.receive(0.0):  # At this point, any message means that the kernel releases the resources.
            raise LaunchError("the kernel stopped waiting")

    @functools.cached_property
    def _bundle(self) -> dict[str, float]:
        """The amount of each resource to reserve for one rank."""
        import ray

        cluster, gpus = self._cluster, self._cluster.gpus
        if gpus is None:
            gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
        bundle = {"CPU": cluster.cpus, "GPU": float(gpus), **(cluster.resources or {})}
        return {name: amount for name, amount in bundle.items() if amount}

    def _resources_text(self) -> str:
        """Describe the requested, existing and free resources."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = list(self._bundle)
        free = ray.available_resources()
        each = ", ".join(f"{node['NodeManagerAddress']} ({amounts(node['Resources'], names)})" for node in nodes)
        count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        requested = f"{self._ranks} ranks with {amounts(self._bundle, names)} each"
        if self._cluster.strategy != "PACK":
            requested += f" placed {self._cluster.strategy}"
        return (
            f"{requested} are requested; there are {amounts(ray.cluster_resources(), names)} on {count}: {each}; "
            f"currently free: {amounts(free, names)}"
        )

    def _too_small_text(self) -> str:
        resources, wait = self._resources_text(), self._cluster.seconds_to_wait
        if wait:
            text = f"the Ray cluster did not have the resources within {wait:g} s: {resources}"
            return f"{text}. Pass fewer num_processes, a smaller RayCluster(cpus=...), or a longer wait"
        text = f"the Ray cluster is too small or too busy: {resources}"
        return f"{text}. Pass fewer num_processes, or RayCluster(when_full='wait', wait=600) to wait for resources"

    # ---- the actors

    def _place(self) -> None:
        """Start an actor on each node, compare versions, and report the nodes to the kernel.

        Raises:
            LaunchError: An actor could not be started, or the versions on its node do not match.
        """
        import ray

        actor, options = ray.remote(_actor_class()), {"num_cpus": 0, "num_gpus": 0, "max_concurrency": CALLS}
        bundles, facts = self._bundles_by_node(), list[dict[str, Any]]()
        while [fact["node"] for fact in facts] != list(bundles):
            # If Ray has moved bundles away from a dead node, read the table again. Avoid reading it without a reason,
            # because each read through Ray's client starts a process.
            if facts:
                bundles = self._bundles_by_node()
            actors = [actor.options(**options, **self._within(own[0])).remote() for own in bundles.values()]
            facts = _results(each.facts.remote() for each in actors)
            if wrong := mismatches(own_versions(), facts):
                raise LaunchError(wrong)
        devices = self._devices()
        self._nodes = [
            Node(node, actor, fact, len(own), merge_devices([devices[index] for index in own]))
            for (node, own), actor, fact in zip(bundles.items(), actors, facts, strict=True)
        ]
        self._channel.send(ray_backend.PlacedEvent([(node.address, node.ranks) for node in self._nodes]))

    def _bundles_by_node(self) -> dict[str, list[int]]:
        """Return the indices of the bundles on each node, by the node's id."""
        from ray.util.placement_group import placement_group_table

        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        found: dict[str, list[int]] = {}
        for index in range(self._ranks):
            found.setdefault(nodes[index], []).append(index)
        return found

    def _within(self, bundle: int) -> dict[str, Any]:
        """Return the options that make Ray run a task or an actor in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy, "runtime_env": self._cluster.runtime_env or None}

    def _devices(self) -> list[dict[str, str]]:
        """Return the environment variables that list the devices of each bundle, by index."""
        import ray

        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        if "GPU" not in self._bundle and not others:
            return [{}] * self._ranks
        task, cpus, gpus = ray.remote(_device_task()), self._bundle.get("CPU", 0), self._bundle.get("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": others or None}
        return _results(task.options(**options, **self._within(index)).remote() for index in range(self._ranks))

    def _serve(self, order: ray_backend.ServeOrder) -> None:
        """Make the actors connect to the kernel and run the ranks that it requests."""
        where, tunnelled = (order.address, order.port), self._cluster.address.startswith(RAY_CLIENT)
        if tunnelled:
            _results(node.actor.call.remote("open_tunnel") for node in self._nodes)
        for index, node in enumerate(self._nodes):
            if tunnelled:
                threading.Thread(target=run_tunnel, args=(node.actor, *where), daemon=True).start()
            own = (index, f"{node.facts['host']}, {node.address}", node.address, node.devices)
            serving = node.actor.call.remote("serve", *where, order.payload, *own)
            threading.Thread(target=self._watch, args=(index, serving), daemon=True).start()

    def _watch(self, index: int, serving: Any) -> None:
        """Wait until a node's actor has ended, and report the reason to the kernel."""
        import ray

        reason = ""
        try:
            ray.get(serving)
        except Exception as error:  # noqa: BLE001 - any error is the reason sent to the kernel
            reason = _end_reason(self._nodes[index], error)
        with suppress(ChannelClosedError):
            self._channel.send(ray_backend.ActorEndedEvent(index, reason))

    def _release(self) -> None:
        """Release the reserved resources, and disconnect from the cluster."""
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        with suppress(Exception):  # The cluster may be lost.
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
            ray.shutdown()


def _end_reason(node: Node, error: Exception) -> str:
    """Return why a node's actor has exited. Ask again while Ray only reports that the actor is unavailable."""
    import ray

    deadline = time.monotonic() + CONFIRM_SECONDS
    while isinstance(error, ray.exceptions.ActorUnavailableError) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        try:
            ray.get(node.actor.facts.remote(), timeout=max(POLL_SECONDS, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            continue  # Ray has not confirmed the exit yet.
        except Exception as later:  # noqa: BLE001 - any error is the reason
            error = later
    return _node_death(node) or cause(error)


def _node_death(node: Node) -> str:
    """Return a message if a node has died, or "" otherwise. Ray reports a node's death later than its actor's."""
    deadline = time.monotonic() + NODE_SECONDS
    with suppress(Exception):  # If the cluster is lost, it does not answer.
        while time.monotonic() < deadline:
            if node.id not in _alive_nodes():
                return f"the Ray node at {node.address} has died"
            time.sleep(POLL_SECONDS / 5)
    return ""


def _alive_nodes() -> set[str]:
    """Return the ids of the nodes that the cluster reports as alive."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _results(references: Iterable[Any]) -> list[Any]:
    """Wait for actor calls and tasks, and return their results.

    Raises:
        LaunchError: An actor or task could not be started, or has died.
    """
    import ray

    try:
        return list(ray.get(list(references)))
    except Exception as error:
        raise LaunchError(f"Ray could not start the ranks: {cause(error)}") from error


def _device_task() -> Callable[[], dict[str, str]]:
    """Return the function for the tasks that report devices. Like the actors' class, it is pickled by value."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")

    def devices() -> dict[str, str]:
        import os

        return {name: os.environ[name] for name in names if os.environ.get(name)}

    return devices


def _actor_class() -> type[Any]:
    """Return the class of the actors.

    The class is pickled by value, and imports this package only after the versions have been compared, so that a node
    without the package can report that.
    """

    class NodeActor:
        """An actor that reports facts about its node and calls the methods of the node's host."""

        def facts(self) -> dict[str, Any]:
            """Return this node's versions of Python and packages, host name, address and id."""
            import importlib.metadata
            import platform
            import socket

            import ray

            versions = {"python": platform.python_version()}
            for name, package in (("torch", "torch"), ("notebook_accelerate", "notebook-accelerate")):
                try:
                    versions[name] = importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    versions[name] = ""
            return {
                "versions": versions,
                "host": socket.gethostname(),
                "address": ray.util.get_node_ip_address(),
                "node": ray.get_runtime_context().get_node_id(),
            }

        def call(self, method: str, *arguments: Any) -> Any:
            """Call a method of the node's host; see ``ray_actor.NodeHost``."""
            from notebook_accelerate.launch.hosts.ray import ray_actor

            if not hasattr(self, "_host"):
                self._host = ray_actor.NodeHost()
            return getattr(self._host, method)(*arguments)

    return NodeActor


def merge_devices(devices: list[dict[str, str]]) -> dict[str, str]:
    """Return the environment variables that show each rank the devices of all ranks on its node.

    Each rank's own device is at the index of its local rank. If a rank saw only the device of its bundle, that device
    would have number 0 in every rank. However, frameworks use the device whose number is the local rank, and NCCL
    accesses a neighbour's memory only if the neighbour's device is visible.
    """
    names = dict.fromkeys(name for each in devices for name in each)
    found = {}
    for name in names:
        lists = [each[name].split(",") for each in devices if each.get(name)]
        rest = [device for own in lists for device in own[1:]]
        found[name] = ",".join(dict.fromkeys([own[0] for own in lists] + rest))
    return found


def run_tunnel(actor: Any, address: str, port: int) -> None:
    """Forward the stream between the kernel's listener and an actor that cannot reach the listener."""
    import ray

    with socket.create_connection((address, port)) as connection:

        def down() -> None:
            with suppress(Exception):  # The kernel or the actor may be lost.
                while True:
                    data = connection.recv(1 << 20)
                    ray.get(actor.call.remote("push", data))
                    if not data:
                        return

        threading.Thread(target=down, daemon=True).start()
        with suppress(Exception):  # If the actor is lost, closing the connection notifies the kernel.
            while (data := ray.get(actor.call.remote("pull"))) != b"":
                if data:
                    connection.sendall(data)
        with suppress(OSError):  # close() would not be enough, because the other thread is blocked in recv().
            connection.shutdown(socket.SHUT_RDWR)


# ---- messages for errors of Ray and its nodes


def mismatches(ours: dict[str, str], facts: list[dict[str, Any]]) -> str:
    """Return a message about nodes whose versions do not match the kernel's, or "" if all versions match."""
    lines: list[str] = []
    for fact in facts:
        lines += version_differences(f"node {fact['host']} ({fact['address']})", fact["versions"], ours, "the notebook")
    if not lines:
        return ""
    return (
        f"the versions on the nodes differ from the notebook's, so the function was not sent: {'; '.join(lines)}. "
        "Install the same versions there, or pass RayCluster(runtime_env={'pip': [...]})"
    )


def unreachable(address: str, error: Exception) -> str:
    """Return a message about why a cluster could not be reached, with advice."""
    text = str(error).strip()
    if "Version mismatch" in text or "version mismatch" in text:
        return f"the notebook's Ray or Python does not match the cluster's: {' '.join(text.split())}"
    if address == "auto":
        return (
            "no Ray cluster was found. Start one with `ray start --head` (or ray.init() in the notebook), set the "
            "variable RAY_ADDRESS, or pass on='ray://host:10001'"
        )
    lines = text.splitlines() or [""]
    # The first line has the error, and the last one the end of the error's traceback.
    summary = " ".join(dict.fromkeys([lines[0].strip(), lines[-1].strip()]))
    hint = "; on a machine that is not one of its nodes, pass on='ray://host:10001'"
    if address.startswith("ray://"):
        hint = ""
    return (
        f"the Ray cluster at {hide_credentials(address)} could not be reached: {type(error).__name__}: {summary}{hint}"
    )


_ADDRESS = re.compile(r"address: ([\w.:]+)")


def cause(error: BaseException) -> str:
    """Return a phrase about why an actor has ended or could not start."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "node has died" in text or "marked dead" in text or "node was terminated" in text or "node died" in text:
        found = _ADDRESS.search(text)
        return f"the Ray node{' at ' + found.group(1) if found else ''} has died"
    if "RuntimeEnvSetupError" in type(error).__name__:
        return f"the runtime environment could not be set up: {' '.join(lines)[:500]}"
    if "ray.kill" in text:
        return "its actor was killed by ray.kill"
    if "worker process has died" in text or "is unavailable" in text:
        return "its actor's process has died: killed, or ended by Ray (out of memory, preempted)"
    relevant = [line for line in lines if not line.startswith(("class_name", "actor_id", "pid:", "namespace", "ip:"))]
    return " ".join(relevant)[:500] or type(error).__name__


def amounts(resources: Mapping[str, float], names: list[str]) -> str:
    """List the amounts of resources, as in "CPU 4, GPU 1"."""
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)
