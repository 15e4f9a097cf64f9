"""Which part a notebook has in a run on several machines, and what runs that part."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.errors import LaunchError, PortInUseError
from notebook_accelerate.launch.hosts.host_group import HostGroup, keep_alive
from notebook_accelerate.launch.hosts.join_instructions import alone_lines
from notebook_accelerate.launch.hosts.joined_run import JoinedRun
from notebook_accelerate.launch.hosts.joining import interface_to
from notebook_accelerate.launch.hosts.remote.listener import HostListener
from notebook_accelerate.launch.hosts.run_secret import SECRET_VARIABLE, shared_secret
from notebook_accelerate.launch.processes import ports
from notebook_accelerate.launch.state.run_events import NoteAdded
from notebook_accelerate.launch.supervisor.run_thread import Launch, RunThread
from notebook_accelerate.launch.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.supervisor.run_context import RunContext


def runner_of_several(launch: Launch, prepare: Callable[[Callable[[LaunchPlan], LaunchPlan]], LaunchPlan]) -> RunThread:
    """Return what runs this notebook's part of a run on several machines.

    Args:
        launch: This notebook's launch; its ``prepare`` is replaced.
        prepare: Completes this notebook's plan with a function and appends it to the journal; called on the run's
            thread.

    Raises:
        PortInUseError: See `part_of`.
        LaunchError: See `part_of`.
    """
    context = launch.context
    secret, listener = part_of(context)
    if not secret:
        return Supervisor(replace(launch, prepare=partial(_prepare_alone, context, prepare)))
    launch = replace(launch, prepare=partial(prepare, lambda plan: plan))
    if listener is None:
        return JoinedRun(launch, secret)
    shown = "" if shared_secret(context.config) else secret
    release = launch.release

    def release_all() -> None:
        listener.close()
        listener.wait_until_free()
        release()

    launch = replace(launch, release=release_all)
    return Supervisor(launch, lambda plan: HostGroup(context, plan, listener, shown))


def _prepare_alone(
    context: RunContext, prepare: Callable[[Callable[[LaunchPlan], LaunchPlan]], LaunchPlan]
) -> LaunchPlan:
    """Prepare a notebook that does not talk to the others, and tell the user so."""
    plan = prepare(partial(_alone, context))
    for line in alone_lines(context.config, context.function_name):
        context.journal.append(NoteAdded(line))
        context.show(f"  {line}")
    return plan


def _alone(context: RunContext, plan: LaunchPlan) -> LaunchPlan:
    ports.reserve(context.id, plan.port, fixed=True, here=plan.node == 0)
    return replace(plan, run_name=context.config.rdzv_id, interface=interface_to(plan.master_addr))


def part_of(context: RunContext) -> tuple[str, HostListener | None]:
    """Return the run's secret, and the listener if this is the first notebook, which supervises all ranks.

    Another notebook runs its ranks for the first one. Without a secret, "", notebooks do not talk: each runs its own
    ranks, as one of several torchrun commands would.

    With ``rdzv_backend="c10d"`` the first notebook is the one that can listen at the address.

    Raises:
        PortInUseError: This is the first notebook, and its port is taken.
        LaunchError: This notebook needs the secret of the first one.
    """
    config, secret = context.config, shared_secret(context.config)
    static, is_host = config.rdzv_backend == "static", (config.rdzv_conf or {}).get("is_host")
    if static and not secret:
        return "", None
    must = is_host or (static and config.node_rank == 0)
    if not must and (static or is_host is False):
        return _needed(secret), None
    made = secret or secrets.token_urlsafe(16)
    address, port = config.rendezvous_address
    try:
        return made, _listener(context, address, port, made, must=bool(must))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and must:
            raise PortInUseError(f"port {port} is taken on this machine; pass another everywhere") from None
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or must:
            raise
        return _needed(secret), None


def _listener(context: RunContext, address: str, port: int, secret: str, *, must: bool) -> HostListener:
    alive = keep_alive(context.config)

    def report(text: str) -> None:  # on the listener's thread: only the run's thread may use the publisher
        context.commands.post(lambda _: context.note(text, shown_as=f"⚠ {text}"))

    try:
        return HostListener(address, secret.encode(), port, report=report, keep_alive=alive)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or not must:
            raise
        return HostListener("0.0.0.0", secret.encode(), port, report=report, keep_alive=alive)  # noqa: S104 - NAT


def _needed(secret: str) -> str:
    if secret:
        return secret
    raise LaunchError(
        "another notebook of this run listens already, and shows the run's secret; pass it here too: "
        f"rdzv_conf={{'secret': '...'}}, or set {SECRET_VARIABLE}"
    )
