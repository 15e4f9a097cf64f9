"""Join a run as a host, by connecting to the first notebook and running the ranks that it requests."""

from __future__ import annotations

import ipaddress
import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from notebook_accelerate import hardware
from notebook_accelerate.errors import AuthenticationError, LaunchError, RunStoppedError, WorkerError
from notebook_accelerate.hardware.addresses import interface_of, own_address
from notebook_accelerate.hardware.detection import cpu_count
from notebook_accelerate.launch.hosts.host_facts import SECRET_VARIABLE, own_hello
from notebook_accelerate.launch.hosts.placed_ranks import PlacedFork, PlacedSpawn, adapt_to_machine, can_fork_ranks
from notebook_accelerate.launch.hosts.remote import host_protocol as protocol
from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_protocol import COMMAND, FunctionEvent, HelloEvent, StartOrder
from notebook_accelerate.launch.hosts.remote.listener import connect_to_kernel
from notebook_accelerate.launch.hosts.remote.stream import KEEP_ALIVE
from notebook_accelerate.launch.processes.event_loop import dispatch
from notebook_accelerate.launch.processes.pickled import PickledFunction
from notebook_accelerate.launch.processes.zygote import close_zygote, warm_up
from notebook_accelerate.telemetry.pickling import anonymous_file
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.hosts.remote.stream import Stream
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.telemetry import Event
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


RETRY_SECONDS = 0.3
"""Seconds between two attempts to reach the first notebook, which may not be listening yet."""
SURE_SECONDS = 2.0
"""Seconds after which a wrong secret or an unknown name is final, if two attempts in a row have had the same error.

An earlier run on the same port, which has another secret, may cause such an error until that run ends. A first notebook
that is killed causes one only once.
"""
UNKNOWN_NAME = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}
"""The errors of the name resolver that are permanent, unlike `EAI_AGAIN`."""
HOST_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def connect(
    where: tuple[str, int],
    secret: str,
    hello: HelloEvent,
    seconds: float,
    keep_alive: tuple[float, float],
    stopping: Callable[[], bool] = lambda: False,
) -> Stream:
    """Connect to the first notebook. Try again until it listens.

    Args:
        where: The address and port on which the first notebook listens.
        secret: The run's secret.
        hello: The first message of this host.
        seconds: How many seconds to try.
        keep_alive: The keep-alive interval, and how long the other end may be silent before it counts as lost, in
            seconds.
        stopping: A function that returns whether the user has stopped the run.

    Raises:
        LaunchError: The first notebook has another secret, does not listen, or has an unknown address.
        RunStoppedError: The user has stopped the run.
    """
    address, port = where
    begin = time.monotonic()
    deadline = begin + seconds
    final = ""
    while True:
        problem: Exception = ConnectionResetError("the connection was closed")
        try:
            stream = connect_to_kernel(address, port, secret.encode(), hello, keep_alive, stopping)
            if _answers(stream, deadline, stopping):
                return stream
        # A UnicodeError means that the address is not a valid name.
        except (AuthenticationError, OSError, UnicodeError) as error:
            before, final = final, _final_text(error, where, hello)
            if final and final == before and time.monotonic() > begin + SURE_SECONDS:
                raise LaunchError(final) from None
            problem = error
        if stopping():
            raise RunStoppedError("the run was stopped before all nodes had joined")
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 did not join within {seconds:g} s: no run answers at {address}:{port} ({problem})"
            )
        time.sleep(RETRY_SECONDS)


def _final_text(error: Exception, where: tuple[str, int], hello: HelloEvent) -> str:
    """Return the message for an error that another attempt would probably repeat, or "" for other errors."""
    address, port = where
    if isinstance(error, AuthenticationError):
        return f"no run with this secret listens on {address}:{port}; pass the secret of the first notebook"
    if isinstance(error, UnicodeError) or (isinstance(error, socket.gaierror) and error.errno in UNKNOWN_NAME):
        example = f"10.0.0.1:{port}" if hello.kind == COMMAND else "master_addr='10.0.0.1' (or rdzv_endpoint)"
        return (
            f"this machine cannot resolve {address!r}, where the first notebook should listen ({error}); "
            f"pass its address, for example {example}"
        )
    return ""


def _answers(stream: Stream, deadline: float, stopping: Callable[[], bool]) -> bool:
    """Return whether a first message arrives. If an earlier run on the same port has just finished, none does."""
    while time.monotonic() < deadline and not stopping():
        if stream.wait(RETRY_SECONDS):
            return True
        if stream.ended and not stream.wait(0.0):
            break
    stream.close()
    return False


def adapt_orders(orders: Sequence[WorkerOrder], address: str, threads: int) -> None:
    """Adapt the orders for this host's ranks to this machine.

    Args:
        orders: The orders that the first notebook has sent.
        address: The first notebook's address. The ranks use the network interface on the route to this address.
        threads: The maximum number of CPU threads of each rank.
    """
    interface = interface_to(address)
    for order in orders:
        order.environment.update(dict.fromkeys(HOST_INTERFACE_VARIABLES, interface) if interface else {})
        order.threads = min(order.threads or threads, threads)
        order.environment["OMP_NUM_THREADS"] = str(order.threads)


def interface_to(address: str) -> str:
    """Return the network interface on the route to an address, or "" to leave the choice to the backend."""
    own = own_address(address, 9)
    return interface_of(own.partition("%")[0]) if own and HOST_INTERFACE_VARIABLES[0] not in os.environ else ""


class FunctionHost(Host):
    """A host without a notebook, which receives the function. It is a command, or an actor on a node of a Ray cluster.

    Args:
        stream: The stream to the kernel.
        environment: This machine's environment variables for ranks. The variables in an order override these.
        show: A function that shows a line to the user of this host.
    """

    def __init__(
        self,
        stream: Stream,
        environment: Mapping[str, str] | None = None,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._function, self._environment, self._show = anonymous_file(), environment or {}, show
        super().__init__(stream)
        self._can_fork = can_fork_ranks()
        if self._can_fork:  # Start importing torch while the host waits for its orders.
            warm_up()

    def handle_message(self, message: Event) -> None:
        """Handle a message that is not for a rank. If the message starts ranks, return when they have finished."""
        if isinstance(message, FunctionEvent):
            os.write(self._function, message.payload)
        elif isinstance(message, StartOrder):
            self.run_function(pickle.loads(message.payload), message)

    def run_function(self, orders: Sequence[WorkerOrder], start: StartOrder) -> None:
        """Run ranks with the function that was received, until they have finished; see `run_ranks`."""
        for order in orders:
            order.environment = {**self._environment, **order.environment}
            adapt_to_machine(order)
        payload, self._function = self._function, anonymous_file()
        try:
            function = PickledFunction("", payload, {}, b"", trains=start.trains)
            if self._can_fork and not start.spawn:
                # The variables are equal on all ranks, except for those that the import of torch does not read.
                backend: ProcessBackend = PlacedFork(function, orders[0].environment, self._show, self._has_left)
            else:
                backend = PlacedSpawn(function, ())
        finally:
            os.close(payload)
        with suppress(RunStoppedError):  # The kernel left while the ranks were starting.
            self.run_ranks(backend, orders)

    def _has_left(self) -> bool:
        """Handle the messages that have arrived, and return whether the kernel has left or was lost."""
        dispatch(self._selector, 0.0)
        return self._left

    def close(self) -> None:
        try:
            super().close()
        finally:
            close_zygote()
            os.close(self._function)


# ---- the command ``join``, a host without a notebook


def join(
    where: tuple[str, int], secret: str, processes: int = 0, *, seconds: float, show: Callable[[str], None]
) -> None:
    """Run ranks on this machine for a run in a notebook elsewhere, until the run is over.

    Args:
        where: The address and port on which the run's first notebook listens.
        secret: The run's secret.
        processes: The number of ranks to start, or 0 to start as many as the first notebook.
        seconds: How many seconds to wait for the first notebook to listen.
        show: A function that shows a line to the user.

    Raises:
        LaunchError: The first notebook refused this host, could not be reached, or was lost.
        RunStoppedError: The run was stopped by a user.
        WorkerError: The run failed.
    """
    hello = own_hello(processes=processes, accelerator=hardware.detect().accelerator)
    show(f"joining the run at {where[0]}:{where[1]}")
    host = CommandHost(connect(where, secret, hello, seconds, KEEP_ALIVE), where[0], show)
    try:
        while (message := host.next_message()) is not None:
            if isinstance(message, protocol.RunOverEvent) and not message.held:
                return _end(message, show)
            host.handle_message(message)
    except (KeyboardInterrupt, SystemExit):
        host.disconnect("its command was interrupted")
        raise
    finally:
        host.close()
    raise LaunchError(host.refused or f"the first notebook was lost: {host.lost or 'it has left'}")


def _end(over: protocol.RunOverEvent, show: Callable[[str], None]) -> None:
    if over.status == "succeeded":
        show("the run succeeded")
        return
    raise (RunStoppedError if over.status == "stopped" else WorkerError)(over.message or f"the run {over.status}")


class CommandHost(FunctionHost):
    """The host that the command ``join`` runs.

    Args:
        stream: The stream to the first notebook.
        address: The address of the first notebook.
        show: A function that shows a line to the user.
    """

    def __init__(self, stream: Stream, address: str, show: Callable[[str], None]) -> None:
        self._address = address
        super().__init__(stream, show=show)

    def handle_message(self, message: Event) -> None:
        if isinstance(message, protocol.WaitingEvent):
            self._show(message.text)
        elif isinstance(message, protocol.RunOverEvent):
            self._show(
                f"{message.message or 'the run failed'}; its ranks are held for the debugger of the first notebook"
            )
        else:
            super().handle_message(message)

    def run_function(self, orders: Sequence[WorkerOrder], start: StartOrder) -> None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdigit() else cpu_count() // len(orders)
        adapt_orders(orders, self._address, max(1, threads))
        attempt = int(orders[0].environment["TORCHELASTIC_RESTART_COUNT"]) + 1
        names = rank_names([order.rank for order in orders])
        self._show(f"attempt {attempt} starts here with {names}" if attempt > 1 else f"starting {names}")
        super().run_function(orders, start)
        self._show("the ranks of this host have ended")


# ---- the first notebook's lines about what to type elsewhere so that other hosts join the run

WARM = "warm_rank"
"""The name of the function that warm ranks run."""
SCRIPTS = ("run_script", "run_module")
"""The names of the functions that run in ranks started from the command line."""
_PASSED_ON = ("mixed_precision", "rdzv_endpoint", "rdzv_id", "max_restarts", "min_nodes")


def instruction_lines(config: LaunchConfig, function: str, secret: str = "") -> list[str]:
    """Return the lines with the cell and the command for joining the run, and with notes about them.

    Args:
        config: This node's launch configuration.
        function: Name of the training function.
        secret: The run's secret to show, or "" if the user provided the secret, and therefore knows it.
    """
    in_config = bool((config.rdzv_conf or {}).get("secret"))
    variable = "" if in_config else f"{SECRET_VARIABLE}={secret}" if secret else f"the same {SECRET_VARIABLE}"
    if function in SCRIPTS:
        lines = [_script_line(config, variable)]
    else:
        given = f", with the same {SECRET_VARIABLE}" if variable and not secret else ""
        if variable and secret and function == WARM:  # The line magic has no option for the secret.
            given = f", after %env {variable}"
        lines = [f"in another notebook{given}: {cell_line(config, function, secret)}"]
        if config.rdzv_backend == "static" and config.num_nodes > 2:
            others = "2" if config.num_nodes == 3 else f"2 to {config.num_nodes - 1}"
            lines[0] += f" (and node_rank={others})"
    lines.append(f"or on any machine: {command_line(config, secret)}")
    setting = "--main_process_ip" if function in SCRIPTS else "rdzv_endpoint" if config.rdzv_endpoint else "master_addr"
    return lines + _address_lines(config, setting)


def alone_lines(config: LaunchConfig, function: str) -> list[str]:
    """Return the lines for a run without a secret, where each notebook runs only its own ranks, as torchrun does."""
    if config.node_rank:
        return [
            "this node has no secret, and meets the others in torch only; if node 0 shows how to join, pass its secret"
        ]
    if function in SCRIPTS:
        return [
            _script_line(config),
            f"each runs and shows its own ranks; to show all here, set {SECRET_VARIABLE} to the same text everywhere",
            *_address_lines(config, "--main_process_ip"),
        ]
    why = (
        "every notebook runs and shows its own ranks, as torchrun would; for one console for all of them, pass the "
        f"same rdzv_conf={{'secret': '...'}} everywhere (or set {SECRET_VARIABLE}), or rdzv_backend='c10d'"
    )
    return [f"in the other notebooks: {cell_line(config, function)}", why, *_address_lines(config, "master_addr")]


def _script_line(config: LaunchConfig, secret: str = "") -> str:
    ranks = "=1" if config.num_nodes == 2 else f"=1 to {config.num_nodes - 1}"
    parts = [f"--machine_rank{ranks}" if config.rdzv_backend == "static" else "", secret]
    more = " and ".join(filter(None, parts))
    return f"on the other machines: the same command{more and f' with {more}'}"


def command_line(config: LaunchConfig, secret: str = "") -> str:
    """Return the command with which a machine without a notebook joins. If ``secret`` is given, it is included."""
    address, port = config.rendezvous_address
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{SECRET_VARIABLE}={secret or '<the same>'} python -m notebook_accelerate join {where}"


def _address_lines(config: LaunchConfig, setting: str) -> list[str]:
    """Return a note if other machines cannot reach the address of the rendezvous."""
    address = config.rendezvous_address[0]
    if not _is_loopback(address):
        return []
    # This address is reserved for documentation (RFC 5737), so the default route leads to it. No packet is sent.
    own = own_address("192.0.2.1", 9)
    example = f": {setting}={own if setting.startswith('-') else repr(own)}" if own else ""
    return [f"{address} is this machine itself; other machines need its address{example}"]


def cell_line(config: LaunchConfig, function: str, secret: str = "") -> str:
    """Return the call to run in another notebook. If ``secret`` is given, it is included."""
    given = config.non_default()
    if function == WARM:
        return _start_line(config)
    address, port = config.rendezvous_address
    values = {"num_processes": config.num_processes, "num_nodes": config.num_nodes}
    call = [function, "args", *(f"{name}={value}" for name, value in values.items() if value is not None)]
    if config.rdzv_backend == "static":
        call.append("node_rank=1")
    else:
        call.append(f"rdzv_backend={config.rdzv_backend!r}")
    if not config.rdzv_endpoint:
        call += [f"master_addr={address!r}", f"use_port={port}"]
    call += [f"{name}={given[name]!r}" for name in _PASSED_ON if name in given]
    settings = [f"{name!r}: {value!r}" for name, value in (config.rdzv_conf or {}).items() if name != "secret"]
    if secret or (config.rdzv_conf or {}).get("secret"):
        settings.append(f"'secret': {secret!r}" if secret else "'secret': <the same>")
    if settings:
        call.append(f"rdzv_conf={{{', '.join(settings)}}}")
    return f"notebook_launcher({', '.join(call)})"


def _start_line(config: LaunchConfig) -> str:
    """Return the line magic to run in another notebook, which starts warm ranks there."""
    node_option = " --node-rank 1" if config.rdzv_backend == "static" else ""
    if config.non_default().keys() & {"rdzv_conf", "rdzv_endpoint", "rdzv_id", "max_restarts", "min_nodes"}:
        return f"%rank_start -c config{node_option}, where config is the same LaunchConfig"
    address, port = config.rendezvous_address
    ranks = "" if config.num_processes is None else f" -n {config.num_processes}"
    backend = "" if node_option else f" --rdzv-backend {config.rdzv_backend}"
    precision = "" if config.mixed_precision == "no" else f" -p {config.mixed_precision}"
    address_option = f" --master-addr {address} --port {port}"
    return f"%rank_start{ranks}{precision} --num-nodes {config.num_nodes}{node_option}{backend}{address_option}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
