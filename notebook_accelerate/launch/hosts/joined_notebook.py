"""Decide which part a notebook plays in a run on several machines, and supervise the ranks of one that has joined."""

from __future__ import annotations

import errno
import pickle
import re
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.errors import ChannelClosedError, LaunchError, PortInUseError, RunStoppedError
from notebook_accelerate.launch.hosts.first_notebook import FirstNotebook, join_seconds, keep_alive
from notebook_accelerate.launch.hosts.host_facts import (
    SECRET_VARIABLE,
    notebook_hello,
    own_cells,
    shared_secret,
    with_own_cells,
)
from notebook_accelerate.launch.hosts.joining import adapt_orders, alone_lines, connect, interface_to
from notebook_accelerate.launch.hosts.remote import host_protocol as protocol
from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_protocol import node_name
from notebook_accelerate.launch.output.publisher import line_label
from notebook_accelerate.launch.output.rank_output import RankOutput
from notebook_accelerate.launch.processes import ports, process_backend
from notebook_accelerate.launch.state import failures, rank_result, run_events
from notebook_accelerate.launch.state.run_events import NoteAdded
from notebook_accelerate.launch.supervisor.command_queue import WaitingTarget
from notebook_accelerate.launch.supervisor.rank_supervisor import RankSupervisor
from notebook_accelerate.launch.supervisor.supervisor import Supervisor
from notebook_accelerate.telemetry import Decoder, DisplayEvent, LogEvent, ResultEvent, steady_time
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.remote.stream import Stream
    from notebook_accelerate.launch.output.publisher import Publisher
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
    from notebook_accelerate.telemetry import Event
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


def supervisor_of_several(run: Run, commands: CommandQueue, publisher: Publisher) -> Supervisor:
    """Create the supervisor of this notebook's part of a run on several machines.

    The first notebook supervises all ranks, and the others run their ranks on its behalf. Without a secret, notebooks
    do not communicate, and each runs its own ranks, like one of several torchrun commands. With
    ``rdzv_backend="c10d"``, the first notebook is the one that can listen on the given address.

    Args:
        run: The run to supervise; see `Supervisor`.
        commands: The user's commands.
        publisher: Shows output in the notebook.

    Raises:
        PortInUseError: This is the first notebook, and the port is taken.
        LaunchError: Another notebook is the first one, and this notebook does not have the secret.
    """
    config, secret = run.config, shared_secret(run.config)
    static, is_host = config.rdzv_backend == "static", (config.rdzv_conf or {}).get("is_host")
    if static and not secret:
        return LoneNotebook(run, commands, publisher)
    must = bool(is_host or (static and config.node_rank == 0))
    if must or (not static and is_host is not False):
        made = secret or secrets.token_urlsafe(16)
        first = FirstNotebook(run, commands, publisher, "" if secret else made)
        address, port = config.rendezvous_address
        try:
            first.listen(address, port, made, must=must)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and must:
                raise PortInUseError(f"port {port} is taken on this machine; pass another port on every node") from None
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or must:
                raise
        else:
            return first
    if not secret:
        raise LaunchError(
            "another notebook of this run is already listening and shows the run's secret; pass it here too: "
            f"rdzv_conf={{'secret': '...'}}, or set {SECRET_VARIABLE}"
        )
    return JoinedNotebook(run, commands, publisher, secret)


class LoneNotebook(RankSupervisor):
    """Supervises the ranks of a notebook that does not communicate with the others, and notes that in the notebook."""

    def reserve(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan with the network interface to rank 0. If rank 0 is on this machine, reserve the port."""
        ports.reserve(self.id, plan.port, fixed=True, here=plan.node == 0)
        return replace(plan, run_name=self.config.rdzv_id, interface=interface_to(plan.master_addr))

    def _run(self, plan: LaunchPlan) -> run_events.RunEnded:
        for line in alone_lines(self.config, self.function_name):
            self.journal.append(NoteAdded(line))
            self.show(f"  {line}")
        return super()._run(plan)


# ---- the part of the other notebooks, which run and show their ranks on behalf of the first one


class JoinedNotebook(Supervisor):
    """The supervisor in a notebook that joins a run. It runs this notebook's ranks on behalf of the first one.

    Args:
        run: The run to supervise; see `Supervisor`.
        commands: The user's commands.
        publisher: Shows output in the notebook.
        secret: The secret of the run to join.
    """

    def __init__(self, run: Run, commands: CommandQueue, publisher: Publisher, secret: str) -> None:
        super().__init__(run, commands, publisher)
        self._secret = secret
        self._host: NotebookHost | None = None
        self._target = WaitingTarget(publisher, self._send_stop)
        self._stops = 0

    def _disconnect(self, ended: run_events.RunEnded) -> None:
        if self._host is not None:
            self._host.close()

    def _record_end(self, ended: run_events.RunEnded) -> None:
        if self.state.attempt_status == "running":
            self._record_lost_ranks()
        super()._record_end(ended)

    def _record_lost_ranks(self) -> None:
        """Record that the ranks have ended, because the first notebook is lost and cannot report it."""
        for info in self.state.ranks:
            if not info.exited:
                state = info.state if info.state in ("succeeded", "failed") else "stopped"
                self.journal.append(run_events.RankExited(info.rank, state, "SIGKILL" if info.pid else ""))

    # ---- on the run's thread

    def _run(self, plan: LaunchPlan) -> run_events.RunEnded:
        config = self.config
        hello = notebook_hello(config.node_rank if config.rdzv_backend == "static" else -1, plan, config)
        where = config.rendezvous_address
        if not config.block:
            self.started.set()  # Don't block the cell, because the other hosts may take minutes to join.
        stopping = self.commands.stopping
        self.show(f"joining the run at {where[0]}:{where[1]}")
        stream = connect(where, self._secret, hello, join_seconds(config), keep_alive(config), stopping)
        self._host = host = NotebookHost(stream, self, plan)
        self.commands.watch(host.watch, self._target)
        self.commands.carry_out(self._target)
        while (message := host.next_message()) is not None:
            if isinstance(message, protocol.RunOverEvent) and not message.held:
                return host.verdict(message)
            if isinstance(message, protocol.HostPlanEvent):
                self.started.set()
            if isinstance(message, protocol.StartOrder):
                self._start(message)
            else:
                host.handle_message(message)
        return self._verdict_without_first(host)

    def _start(self, message: protocol.StartOrder) -> None:
        """Run this notebook's ranks of an attempt, and return when they have finished."""
        assert self._call is not None, "the call is dropped only at the end of the run"
        assert self._inherited is not None, "the inherited state is given together with the call"
        assert self._host is not None, "the host exists, because it has received the message"
        config, plan = self.config, self._host.plan
        orders: list[WorkerOrder] = pickle.loads(message.payload)
        adapt_orders(orders, config.rendezvous_address[0], plan.threads or 1)
        for order in orders:
            order.inherited, order.accelerator = self._inherited, config.accelerator
            order.environment.update(config.env or {})
        backend = process_backend(plan.start_method)(*self._call)
        backend.configure(config, self.note, self.commands.stopping)
        self._host.run_ranks(backend, orders)

    def _verdict_without_first(self, host: NotebookHost) -> run_events.RunEnded:
        if self._stops > 1 or (self.commands.stopping() and not self.state.attempts):
            raise RunStoppedError(f"run {self.id} was stopped")
        text = host.refused or f"{host.first} was lost: {host.lost or 'it has left'}"
        if not self.state.attempts:
            raise LaunchError(text)
        return run_events.RunEnded("failed", "WorkerDiedError", f"run {self.id} failed: {text}")

    def _send_stop(self, grace: float) -> None:
        """Ask the first notebook to stop the run. When called again, leave the run."""
        self._stops += 1
        assert self._host is not None, "commands are carried out only once there is a host"
        if self._stops > 1:
            self._host.disconnect("it was stopped", stopped=True)
        else:
            self._host.send(protocol.StopRequest(grace))


class NotebookHost(Host):
    """The host in a notebook that has joined a run. It relays what the ranks send, and also shows their output.

    Args:
        stream: The stream to the first notebook.
        supervisor: This notebook's supervisor.
        plan: The plan that this notebook made before all hosts had joined.

    Attributes:
        plan: The plan that was passed. Its start method and number of threads still apply after the hosts have joined.
    """

    def __init__(self, stream: Stream, supervisor: Supervisor, plan: LaunchPlan) -> None:
        self._supervisor, self.plan = supervisor, plan
        self._journal, self._publisher = supervisor.journal, supervisor.publisher
        self._label = partial(line_label, supervisor.config.log_line_prefix_template)
        self._outputs: dict[int, RankOutput] = {}
        self._decoders: dict[int, Decoder] = {}
        self._results: dict[int, rank_result.RankResult] = {}
        self._own, self._node = range(0), 0
        self.first, self._clock_offset = node_name(0, ""), 0.0
        super().__init__(stream)

    # ---- messages from the first notebook

    def seconds_until_due(self) -> float | None:
        return self._publisher.seconds_until_due()

    def handle_urgent(self) -> None:
        self._publisher.flush()
        super().handle_urgent()

    def handle_message(self, message: Event) -> None:
        if isinstance(message, protocol.WaitingEvent):
            self._supervisor.show(message.text)
        elif isinstance(message, protocol.HostPlanEvent):
            self.first, self._clock_offset = node_name(0, message.first), message.clock_offset
            self._supervisor.show("the first notebook has all ranks: stop, ask and debug them there")
            self._supervisor.commands.requests.elsewhere = (
                f"run {self._supervisor.id} is controlled by the notebook of {self.first}, which has all ranks: "
                "ask and debug them there"
            )
            self._adopt_plan(pickle.loads(message.payload))
        elif isinstance(message, protocol.RunOverEvent):  # The ranks are held for the first notebook's debugger.
            self._journal.append(self.verdict(message))
        elif isinstance(message, protocol.JournalEvent):
            for record in pickle.loads(message.payload):
                record.event.shift(-self._clock_offset)
                self._follow(record._replace(time=record.time - self._clock_offset))

    def _adopt_plan(self, plan: LaunchPlan) -> None:
        own = replace(plan, start_method=self.plan.start_method, reason=self.plan.reason, threads=self.plan.threads)
        self._own, self._node = range(own.first_rank, own.first_rank + own.num_processes), own.node
        self._results.clear()
        self._journal.free_old_results()
        self._journal.append(run_events.RunPlanned(own, own.first_rank, own.num_processes))
        self.send(protocol.CellsEvent(own_cells()))

    def verdict(self, over: protocol.RunOverEvent) -> run_events.RunEnded:
        """Return how the run ended. Locations of failures refer to this notebook's cells."""
        state, number = self._supervisor.state, self._supervisor.id
        # Use the recorded failures, unless they belong to an earlier attempt.
        if over.status == "failed" and state.failures and state.status != "starting":
            return failures.failed(number, state)
        return run_events.RunEnded(over.status, over.error, re.sub(r"^run \d+ ", f"run {number} ", over.message))

    def _follow(self, record: Record) -> None:
        """Append an event from the first notebook's journal if it concerns the whole run or this notebook's ranks."""
        event = with_own_cells(record.event, f" of node {self._node}")
        rank = event.failure.rank if isinstance(event, run_events.RankFailed) else getattr(event, "rank", None)
        # Ignore events of other notebooks' ranks, and of attempts before this notebook joined.
        if not self._own or (rank is not None and rank not in self._own):
            return
        if isinstance(event, run_events.RankExited) and event.state == "succeeded" and rank in self._results:
            self._journal.append(run_events.RankReturned(event.rank, self._results[event.rank]), record.time)
        if isinstance(event, run_events.RankStarted):
            event = replace(event, host="")
        assert isinstance(event, run_events.RunEvent)
        self._journal.append(event, record.time)
        if isinstance(event, run_events.PromptOpened):
            what = "a line of input" if event.kind == "input" else "its debugger"
            self._supervisor.show(f"rank {event.rank} waits for {what} in the first notebook", "stderr")
        elif isinstance(event, run_events.StopAdvanced) and event.phase == "interrupting" and event.reason:
            self._supervisor.show(event.reason)
        elif isinstance(event, run_events.AttemptEnded) and event.restarts:
            number = self._supervisor.state.attempts[-1].number + 1
            how = "failed" if self._supervisor.state.failures else "ended"
            self._supervisor.show(f"attempt {number} {how} ({event.outcome}); starting again", "stderr")

    # ---- messages from the ranks

    def started(self, process: RankProcess) -> None:
        rank = process.rank
        label = self._label(rank, process.local_rank)
        self._decoders[rank] = Decoder()
        self._outputs[rank] = RankOutput(rank, label, self._keep_lines, self._publisher)
        super().started(process)

    def _keep_lines(self, rank: int, stream: str, text: str) -> None:
        self._journal.add([Record(rank, steady_time.now(), LogEvent(stream, text))])

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        super().on_output(rank, stream, data)
        if data:
            self._outputs[rank].feed(stream, data)
        else:
            self._outputs[rank].finish(stream)

    def on_frames(self, rank: int, data: bytes) -> None:
        super().on_frames(rank, data)
        try:
            messages = self._decoders[rank].feed(data)
        except ChannelClosedError:  # The first notebook will report the error.
            return
        self._journal.add([Record(rank, stamp, event) for stamp, event in messages])
        for _, event in messages:
            if isinstance(event, DisplayEvent):
                self._outputs[rank].display(event)
            elif isinstance(event, ResultEvent):
                self._results[rank] = rank_result.received(event, (), rank)

    def sampled(self, records: list[Record]) -> None:
        super().sampled(records)
        self._journal.add(records)

    def release(self, process: RankProcess) -> None:
        super().release(process)
        self._outputs[process.rank].finish()
        self._publisher.flush(force=True)
