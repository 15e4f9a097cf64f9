"""The supervisor that starts a run's ranks, watches and restarts them, and decides how the run ended."""

from __future__ import annotations

import itertools
import selectors
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.hardware.addresses import loopback_problem
from notebook_accelerate.launch.plan.planner import placed
from notebook_accelerate.launch.processes import ports, process_backend
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, dispatch
from notebook_accelerate.launch.processes.fork_probe import plan_from_here
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    AttemptStarted,
    FailuresRecorded,
    NoteAdded,
    RunEnded,
    RunPlanned,
    RunQueued,
)
from notebook_accelerate.launch.supervisor.command_queue import WaitingTarget
from notebook_accelerate.launch.supervisor.rank_group import RankGroup
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason
from notebook_accelerate.launch.supervisor.supervisor import Supervisor
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.sampler import ResourceSampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.telemetry import RankFailure

QUEUE_SECONDS = 0.3
"""Seconds between two checks of whether the devices of a queued run are free."""


class RankSupervisor(Supervisor):
    """Supervises one run: starts the ranks of each attempt, watches them, and restarts them after a failure.

    The subclass `launch.hosts.first_notebook.FirstNotebook` adds ranks on other machines.
    """

    _backend: ProcessBackend | None = None

    def _main(self, plan: LaunchPlan) -> None:
        super()._main(plan)
        # Drop the backend, because it refers to this object and would keep the run's results alive.
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.prepare_next()

    # ---- resources for the ranks of this machine

    def reserve(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan with a port and a private folder if this machine has several ranks.

        Raises:
            LaunchError: The ranks cannot reach each other, which torch would report only after minutes.
        """
        if plan.accelerator == "tpu" and plan.variables:
            plan = replace(plan, variables={**plan.variables, **_tpu_addresses(plan.num_processes)})
        if plan.world_size == 1 or plan.where:
            return plan
        if problem := loopback_problem():
            raise LaunchError(
                f"ranks cannot reach each other: connections to 127.0.0.1 fail ({problem}); "
                "enable the loopback interface: ip link set lo up"
            )
        store = ports.make_store_folder(self.id)
        port, note = ports.reserve(self.id, plan.port, fixed=False)
        # A changed default port is not worth a note: only code that creates the process group itself uses the port.
        if note and plan.port != ports.DEFAULT:
            self.journal.append(NoteAdded(note))
        return replace(plan, port=port, store=store)

    def _release(self) -> None:
        ports.release(self.id)
        ports.remove_store_folder(self.id)

    # ---- the queue for devices

    def _await_devices(self, plan: LaunchPlan) -> LaunchPlan | StopReason:
        """Wait until the run has its devices. Return its plan, or why the run was stopped before that."""
        assert self.claim is not None, "only a claim makes a run wait"
        self.started.set()  # Don't block the cell: the runs ahead may take days.
        self.clock.pause(self.claim)
        target = WaitingTarget(self.publisher)
        with DispatchSelector() as selector:
            selector.register(self.commands.wake, selectors.EVENT_READ, partial(self.commands.carry_out, target))
            while (ahead := self.claim.acquire(in_turn=True)) is not None:
                if ahead.name != self.state.behind:
                    self.journal.append(RunQueued(ahead.name))
                dispatch(selector, QUEUE_SECONDS)
                self.publisher.flush()
                if target.stop_reason is not None:
                    return target.stop_reason
        self.clock.resume(self.claim)
        # By now, the kernel may no longer be safe to fork.
        method = plan_from_here(self.config)
        plan = placed(replace(plan, start_method=method.start_method, reason=method.reason), self.claim.devices)
        plan = self.reserve(plan)
        self.journal.append(RunPlanned(plan, plan.first_rank, plan.num_processes))
        return plan

    # ---- attempts

    def _run(self, plan: LaunchPlan) -> RunEnded:
        if self.state.status == "queued":
            waited = self._await_devices(plan)
            if isinstance(waited, StopReason):
                text = f"{self._ended_text()}, before its devices were free: {waited.text}"
                return RunEnded("stopped", waited.error.__name__, text)
            plan = waited
        for number in itertools.count():
            gathered = self._await_hosts(plan, number)
            if isinstance(gathered, StopReason):
                text = f"{self._ended_text()}, before all nodes had joined: {gathered.text}"
                return RunEnded("stopped", gathered.error.__name__, text)
            group = self._supervise_attempt(gathered, number)
            if self.state.ended is not None:  # The run ended when its ranks were held, and they are released now.
                return RunEnded(self.state.status, self.state.error, self.state.message)
            if not self._restarts(group, number):
                return self._verdict(group)
        raise AssertionError("every run has a last attempt")

    def _supervise_attempt(self, plan: LaunchPlan, number: int) -> RankGroup:
        """Start the ranks of an attempt and supervise them until they end."""
        self.journal.append(AttemptStarted(number))
        self.journal.free_old_results()
        group = self._start_group(plan, number)
        sampler = ResourceSampler(group.pids(), self.journal.add)
        sampler.start()
        try:
            group.supervise()
        finally:
            group.abandon()
            sampler.stop()
            self.journal.free_old_results()
        return group

    def _start_group(self, plan: LaunchPlan, number: int) -> RankGroup:
        assert self._call is not None, "the call is dropped only when no attempt can follow"
        assert self._inherited is not None, "the inherited state is set together with the call"
        self._backend = process_backend(plan.start_method)(*self._call)
        if number >= self.config.max_restarts:
            self._call = None  # No other attempt needs the arguments, which may be large.
        group = RankGroup(self, plan)
        backend = self._with_hosts(self._backend, group)
        backend.configure(self.config, self.note, self.commands.stopping)
        group.start(backend, number, self._inherited)
        self.started.set()
        return group

    # ---- the end of an attempt

    def _restarts(self, group: RankGroup, number: int) -> bool:
        """Record how an attempt ended. Return whether another attempt follows."""
        found, reason = group.verdicts(), group.stops.reason
        again = self._can_restart(group, found) and number < self.config.max_restarts
        makes_room = again and reason is not None
        self.journal.append(FailuresRecorded(() if makes_room else found))
        if again:
            headline = reason.text if makes_room and reason is not None else failures.headline(found)
            how = "ended" if makes_room else "failed"
            self.journal.append(AttemptEnded(headline, restarts=True))
            self.show(f"attempt {number + 1} {how} ({headline}); starting again", "stderr")
        return again

    def _verdict(self, group: RankGroup) -> RunEnded:
        """Record how the last attempt ended, and return how the run ends."""
        found, reason = self.state.failures, group.stops.reason
        ended = self._local_outcome(found, reason)
        outcome = failures.headline(found) if ended.status == "failed" and found else ended.status
        if ended.status == "failed" and not found:
            outcome = ended.message
        self.journal.append(AttemptEnded(outcome))
        return ended

    def _local_outcome(self, found: tuple[RankFailure, ...], reason: StopReason | None) -> RunEnded:
        if found:
            return failures.failed(self.id, self.state)
        if reason is not None:
            return RunEnded("stopped", reason.error.__name__, f"{self._ended_text()}: {reason.text}")
        return RunEnded("succeeded")

    def _ended_text(self) -> str:
        return f"run {self.id} ended after {steady_time.now() - self.state.started:.1f} s"

    # ---- other machines

    def _await_hosts(self, plan: LaunchPlan, number: int) -> LaunchPlan | StopReason:
        """Wait for the run's hosts. Return the plan of attempt ``number``, or why the run was stopped before that."""
        return plan

    def _with_hosts(self, own: ProcessBackend, group: RankGroup) -> ProcessBackend:
        """Return ``own``, or a backend that also starts the ranks of other hosts."""
        return own

    def _can_restart(self, group: RankGroup, found: Sequence[RankFailure]) -> bool:
        """Return whether another attempt may follow one that ended with the failures ``found``."""
        return bool(found) and group.stops.reason is None


def _tpu_addresses(ranks: int) -> dict[str, str]:
    """Return the variables that the ranks' TPU runtimes must share: one address per rank, and a profiling session.

    In torch_tpu 0.2.0, ``torch.tpu.distributed.set_tpu_launch_env`` sets the same variables.
    """
    return {
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{port}" for port in ports.unused(ranks)),
        "TORCH_TPU_XPROF_SESSION_ID": str(time.time_ns()),
    }
