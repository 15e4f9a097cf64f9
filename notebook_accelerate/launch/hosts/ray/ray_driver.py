"""The kernel's driver on a Ray cluster: a separate process, which lives as long as an attempt of a run.

Ray's driver installs a handler for SIGTERM, sets environment variables, and keeps threads for gRPC, after which forking
that process is not safe. A separate process leaves the kernel unchanged, and its end, for whatever reason, ends the
actors and releases their resources.
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any, NoReturn

from notebook_accelerate.errors import ChannelClosedError, LaunchError
from notebook_accelerate.launch.hosts.ray import ray_protocol as say
from notebook_accelerate.launch.hosts.ray.ray_errors import amounts, cause, mismatches, unreachable
from notebook_accelerate.launch.processes.pickled_start import die_with_parent
from notebook_accelerate.telemetry import Channel, Event

LOOK_SECONDS = 0.5
KNOWN_SECONDS, NODE_SECONDS = 30.0, 3.0
"""Seconds for Ray to confirm that an unavailable actor has ended, and then that its node has died."""
REFUSE_SECONDS = 3.0
"""Seconds until resources released by an earlier attempt are available again."""
REACH_TRIES = 3
"""Attempts to connect: Ray's head waits 30 seconds for a client's server, too short on a busy machine."""
TELL_SECONDS = 10.0
"""Seconds between two notes of a launch that waits for resources."""
CALLS = 16
"""Concurrent calls of an actor: one that lasts as long as its rank, the others short."""
NO_ROOM = ("NO_RESOURCES", "INFEASIBLE")
"""Ray's states of a placement group that it could not place."""


def main(control: int, payload: int, parent: int) -> NoReturn:
    """Run the driver; never returns.

    Args:
        control: Descriptor of the socket to the kernel.
        payload: Descriptor of the file with the function and its arguments.
        parent: Process id of the kernel.
    """
    die_with_parent(parent)
    channel = Channel(socket.socket(fileno=control))
    code = 0
    try:
        Driver(channel, payload).run()
    except ChannelClosedError:
        code = 1  # the kernel is lost
    except LaunchError as error:
        with suppress(ChannelClosedError):
            channel.send(say.RefusedEvent(str(error)))
    except BaseException:  # noqa: BLE001 - the kernel shows the output of this process
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)


class Driver:
    """Reserves resources for the ranks of one attempt, and releases them.

    Args:
        channel: The stream to the kernel.
        payload: Descriptor of the file with the function and its arguments.
    """

    def __init__(self, channel: Channel, payload: int) -> None:
        self._channel, self._payload = channel, payload
        self._order: say.PlaceOrder
        self._come: deque[Event] = deque()
        self._group: Any = None
        self._actors: list[Any] = []
        self._places: list[dict[str, Any]] = []

    def run(self) -> None:
        """Carry out the kernel's orders until it leaves."""
        order = self._next()
        assert isinstance(order, say.PlaceOrder)
        self._order = order
        try:
            self._reach()
            self._take_room()
            self._place()
            serve = self._next()
            if isinstance(serve, say.ServeOrder):
                self._serve(serve)
                while not isinstance(self._next(), say.LeaveOrder):
                    pass
        finally:
            self._leave()

    def _next(self) -> Event:
        while not self._come:
            self._come += [event for _, event in self._channel.receive()]
        return self._come.popleft()

    # ---- the cluster

    def _reach(self) -> None:
        """Connect to the cluster."""
        import ray

        address = self._order.address
        for left in reversed(range(REACH_TRIES)):
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
                break
            except Exception as error:
                reason = unreachable(address, error)
                if not left or "Initialization failure from server" not in str(error):
                    raise LaunchError(reason) from error
                self._channel.send(say.NoteEvent(f"{reason}; trying again"))
        by_client = address.startswith("ray://")
        self._channel.send(say.ReachedEvent("" if by_client else ray.util.get_node_ip_address()))

    def _take_room(self) -> None:
        """Reserve the ranks' resources, and wait for them if requested.

        Raises:
            LaunchError: The cluster has not enough resources.
        """
        from ray.util.placement_group import placement_group_table

        order = self._order
        nodes = self._ask_for_room()
        told = 0.0
        deadline = time.monotonic() + max(order.wait, REFUSE_SECONDS)
        while not self._group.wait(LOOK_SECONDS):
            self._see_whether_wanted()
            living = living_nodes()
            # A group placed on a node whose death Ray had not yet noticed may wait forever (Ray 2.60).
            nodes = living if nodes <= living else self._ask_for_room()
            now = time.monotonic()
            stuck = placement_group_table(self._group)["stats"]["scheduling_state"] in NO_ROOM
            if stuck and now >= deadline:
                raise LaunchError(self._too_small())
            if stuck and now - told > TELL_SECONDS:
                told = now
                self._channel.send(say.NoteEvent(f"waiting for the Ray cluster: {self._room()}"))
        self._channel.send(say.TakenEvent())

    def _ask_for_room(self) -> set[str]:
        """Replace the placement group with a new one for all ranks; return the living nodes."""
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes = living_nodes()
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = placement_group([self._bundle()] * self._order.ranks, strategy=self._order.strategy)
        return nodes

    def _see_whether_wanted(self) -> None:
        self._come += [event for _, event in self._channel.receive(0.0)]
        if any(isinstance(event, say.LeaveOrder) for event in self._come):
            raise LaunchError("the kernel no longer waits")

    def _bundle(self) -> dict[str, float]:
        """Return the resources of one rank."""
        import ray

        order = self._order
        if order.gpus is None:
            order.gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
        bundle = {"CPU": order.cpus, "GPU": float(order.gpus), **order.resources}
        return {name: amount for name, amount in bundle.items() if amount}

    def _room(self) -> str:
        """Return a text with the requested, existing and free resources."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = list(self._bundle())
        free = ray.available_resources()
        each = ", ".join(f"{node['NodeManagerAddress']} ({amounts(node['Resources'], names)})" for node in nodes)
        count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        asked = f"{self._order.ranks} ranks with {amounts(self._bundle(), names)} each"
        if self._order.strategy != "PACK":
            asked += f" placed {self._order.strategy}"
        return (
            f"{asked} are asked for; there are {amounts(ray.cluster_resources(), names)} on {count}: {each}; "
            f"free now are {amounts(free, names)}"
        )

    def _too_small(self) -> str:
        room, order = self._room(), self._order
        if order.wait:
            text = f"the Ray cluster had no room within {order.wait:g} s: {room}"
            return f"{text}. Pass fewer num_processes, a smaller RayCluster(cpus=...), or a longer wait"
        text = f"the Ray cluster is too small or too busy: {room}"
        return f"{text}. Pass fewer num_processes, or RayCluster(when_full='wait', wait=600) to wait for room"

    # ---- the actors

    def _place(self) -> None:
        """Start an actor for each rank, compare versions, and report the placement of the ranks."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        order = self._order
        options = {
            "num_cpus": order.cpus,
            "num_gpus": order.gpus,
            "resources": order.resources or None,
            "max_concurrency": CALLS,
            "runtime_env": order.runtime_env or None,
        }
        actor = ray.remote(actor_class())
        actors = []
        for index in range(order.ranks):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actors.append(actor.options(scheduling_strategy=strategy, **options).remote())
        facts = self._asked(actors, "facts")
        if wrong := mismatches(order.versions, facts):
            raise LaunchError(wrong)
        self._order_by_node(actors, facts)
        port = self._asked(self._actors[:1], "do", "hold_port")[0]
        self._channel.send(say.PlacedEvent(self._places, port))

    def _order_by_node(self, actors: list[Any], facts: list[dict[str, Any]]) -> None:
        """Number the ranks so that those of a node are consecutive."""
        nodes = list(dict.fromkeys(fact["node"] for fact in facts))
        by_node = {node: [index for index, fact in enumerate(facts) if fact["node"] == node] for node in nodes}
        placed = [index for node in nodes for index in by_node[node]]
        self._actors = [actors[index] for index in placed]
        around = self._asked(self._actors, "surroundings", "")
        for rank, index in enumerate(placed):
            mates = by_node[facts[index]["node"]]
            devices = [around[placed.index(mate)]["devices"] for mate in mates]
            self._places.append(
                {
                    "id": facts[index]["node"],
                    "node": nodes.index(facts[index]["node"]),
                    "host": f"{facts[index]['host']}, {facts[index]['address']}",
                    "address": facts[index]["address"],
                    "local_rank": mates.index(index),
                    "local_size": len(mates),
                    "environment": {**around[rank]["network"], **joined(devices)},
                }
            )

    def _asked(self, actors: list[Any], method: str, *arguments: Any) -> list[Any]:
        """Call a method of actors and return their results.

        Raises:
            LaunchError: An actor could not be started, or has ended.
        """
        import ray

        try:
            return list(ray.get([getattr(actor, method).remote(*arguments) for actor in actors]))
        except Exception as error:
            raise LaunchError(f"Ray could not start the ranks: {cause(error)}") from error

    # ---- the ranks

    def _serve(self, order: say.ServeOrder) -> None:
        self._hand_out_payload()
        secret, orders = pickle.loads(order.payload)
        for rank, (actor, place, told) in enumerate(zip(self._actors, self._places, orders, strict=True)):
            if self._order.address.startswith("ray://"):
                self._asked([actor], "do", "open_tunnel")
                threading.Thread(target=dig, args=(actor, order.address, order.port), daemon=True).start()
            serving = actor.do.remote("serve", order.address, order.port, secret, place["node"], place["host"], told)
            threading.Thread(target=self._watch, args=(rank, serving), daemon=True).start()

    def _hand_out_payload(self) -> None:
        """Send the payload to each node once: through the object store to one actor, as a file to the others."""
        import numpy as np
        import ray

        with os.fdopen(self._payload, "rb") as file:
            stored = ray.put(np.memmap(file, dtype=np.uint8, mode="r"))
        first = [rank for rank, place in enumerate(self._places) if place["local_rank"] == 0]
        files = dict(
            zip(
                (self._places[rank]["node"] for rank in first),
                self._asked([self._actors[rank] for rank in first], "do", "receive", stored),
                strict=True,
            )
        )
        for rank, place in enumerate(self._places):
            if rank not in first and not self._asked([self._actors[rank]], "do", "share", *files[place["node"]])[0]:
                self._asked([self._actors[rank]], "do", "receive", stored)

    def _watch(self, rank: int, serving: Any) -> None:
        """Report to the kernel why a rank's actor has ended."""
        import ray

        reason = ""
        try:
            ray.get(serving)
        except Exception as error:  # noqa: BLE001 - any error is reported to the kernel as the reason
            reason = self._why(rank, error)
        with suppress(ChannelClosedError):
            self._channel.send(say.ActorEndedEvent(rank, reason))

    def _why(self, rank: int, error: Exception) -> str:
        """Return why a rank's actor has ended; poll Ray while it reports the actor as unavailable only."""
        import ray

        deadline = time.monotonic() + KNOWN_SECONDS
        while isinstance(error, ray.exceptions.ActorUnavailableError) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            try:
                ray.get(self._actors[rank].facts.remote(), timeout=max(LOOK_SECONDS, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                continue  # not confirmed yet
            except Exception as later:  # noqa: BLE001 - as above
                error = later
        return self._death_of_node(rank) or cause(error)

    def _death_of_node(self, rank: int) -> str:
        """Return a text if a rank's node has died; the cluster reports the node's death after the actor's."""
        place = self._places[rank]
        deadline = time.monotonic() + NODE_SECONDS
        with suppress(Exception):  # a lost cluster does not answer
            while time.monotonic() < deadline:
                if place["id"] not in living_nodes():
                    return f"the Ray node at {place['address']} has died"
                time.sleep(LOOK_SECONDS / 5)
        return ""

    def _leave(self) -> None:
        """Release all resources."""
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        with suppress(Exception):  # a lost cluster cannot release them
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
            ray.shutdown()


def living_nodes() -> set[str]:
    """Return the ids of the nodes that the cluster reports as alive."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def actor_class() -> type[Any]:
    """Return the class of the actors.

    It is pickled by value, and imports this package only after the comparison of versions, so that a node without the
    package can report that.
    """

    class Rank:
        """One rank's actor."""

        def facts(self) -> dict[str, Any]:
            """Return the machine's versions, host name, address and node id."""
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

        def surroundings(self, address: str) -> dict[str, Any]:
            """Return devices and network interface; see ``ray_actor.surroundings``."""
            import ray

            from notebook_accelerate.launch.hosts.ray import ray_actor

            return ray_actor.surroundings(address or ray.util.get_node_ip_address())

        def do(self, method: str, *arguments: Any) -> Any:
            """Call a method of the rank's slot; see ``ray_actor.RankSlot``."""
            from notebook_accelerate.launch.hosts.ray import ray_actor

            if not hasattr(self, "_place"):
                self._place = ray_actor.RankSlot()
            return getattr(self._place, method)(*arguments)

    return Rank


def versions() -> dict[str, str]:
    """Return the versions that must match between the kernel and the nodes."""
    import importlib.metadata

    found = {"python": platform.python_version()}
    for name, package in (("torch", "torch"), ("notebook_accelerate", "notebook-accelerate")):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found


def joined(devices: list[dict[str, str]]) -> dict[str, str]:
    """Return the variables that show a rank all devices of its node's ranks, its own at the index of its local rank.

    Ray shows an actor only its own device, which would be number 0 on every rank; frameworks use the device whose
    number is the local rank, and NCCL accesses a neighbour's memory only if its device is visible.
    """
    names = dict.fromkeys(name for each in devices for name in each)
    found = {}
    for name in names:
        lists = [each[name].split(",") for each in devices if each.get(name)]
        rest = [device for own in lists for device in own[1:]]
        found[name] = ",".join(dict.fromkeys([own[0] for own in lists] + rest))
    return found


def dig(actor: Any, address: str, port: int) -> None:
    """Carry the stream between an actor that cannot reach the kernel and the kernel's listener."""
    import ray

    with socket.create_connection((address, port)) as connection:

        def down() -> None:
            with suppress(Exception):  # either end is lost
                while True:
                    data = connection.recv(1 << 20)
                    ray.get(actor.do.remote("push", data))
                    if not data:
                        return

        threading.Thread(target=down, daemon=True).start()
        with suppress(Exception):  # the actor is lost: the kernel sees the connection close
            while (data := ray.get(actor.do.remote("pull"))) != b"":
                if data:
                    connection.sendall(data)
        with suppress(OSError):  # close() is not enough: the other thread still blocks on it
            connection.shutdown(socket.SHUT_RDWR)


__all__ = ["Driver", "joined", "main", "versions"]
