"""The process group of a world of several ranks: started, waited at, ended."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate import telemetry
from notebook_accelerate.state.gloo_threads import settle
from notebook_accelerate.state.world import World

# Whether the default group came through a fork. The child then has the group's handles, and must never call into them:
# their sockets and threads belong to the parent.
_inherited = False


def _note_fork() -> None:
    global _inherited  # noqa: PLW0603 - a fact about this process
    _inherited = dist.is_available() and dist.is_initialized()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def group_exists() -> bool:
    """Tell whether this process has a usable default process group."""
    return dist.is_available() and dist.is_initialized() and not _inherited


def start_group(backend: str, world: World, device: torch.device, **kwargs: Any) -> None:
    """Start the default process group; every rank must call this.

    Args:
        backend: gloo, nccl, xccl, ...
        world: This rank's place. The address comes from MASTER_ADDR and MASTER_PORT.
        device: The rank's device; a group on an accelerator is bound to it.
        kwargs: More arguments of `torch.distributed.init_process_group`.
    """
    if device.type == "cuda":
        kwargs.setdefault("device_id", device)
    if not {"store", "init_method"} & set(kwargs) and _is_local(world):
        kwargs["store"] = _loopback_store(world, kwargs.get("timeout") or DEFAULT_TIMEOUT)
    dist.init_process_group(backend=backend, rank=world.rank, world_size=world.size, **kwargs)
    if _is_launched() and backend != "mpi":  # which has no store
        _await_all(world)
    if telemetry.current_sink() is not None:
        _leave_timeout_to_kernel(kwargs.get("timeout") or DEFAULT_TIMEOUT)


def _is_launched() -> bool:
    """Whether one launch has started all ranks: none of them comes from another notebook, or from torchrun."""
    return telemetry.current_sink() is not None and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def _is_local(world: World) -> bool:
    """Whether this is a launched rank of a world that is on this machine altogether."""
    here = os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost") and "MASTER_PORT" in os.environ
    return _is_launched() and here and world.local_size == world.size


def _loopback_store(world: World, timeout: timedelta) -> Any:
    """Return the store that torch would make of MASTER_ADDR and MASTER_PORT, but heard on loopback alone.

    torch's own listens on all interfaces, whatever MASTER_ADDR is, and does what anybody who connects says.
    """
    port, listener = int(os.environ["MASTER_PORT"]), None
    if world.rank == 0:
        with suppress(OSError):  # a server of this process has it from the last group, and is shared
            listener = _listen("127.0.0.1", port)
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, world.size, world.rank == 0, timeout, multi_tenant=True,
        master_listen_fd=listener.detach() if listener is not None else None,
    )  # fmt: skip


def _await_all(world: World) -> None:
    """Wait until every rank has the group.

    gloo returns to a rank once its own connections stand. One whose function ends then would take them, and the store,
    from ranks that are still connecting. In the end nobody but rank 0, which has the store, needs it any more.
    """
    store, group = dist.distributed_c10d._get_default_store(), next(_groups)
    for moment in ("connected", "told"):
        key = f"notebook_accelerate/{group}/{moment}"
        if store.add(key, 1) == world.size:
            store.set(f"{key}/all", "1")
        if moment == "connected" or world.rank == 0:
            store.wait([f"{key}/all"])


_groups = itertools.count()
"""Numbers the groups of this process: those of one store have keys of their own. All ranks make the same groups."""


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def start_group_of_one(backend: str) -> None:
    """Start a default process group of this process alone, for libraries that cannot do without one.

    Args:
        backend: gloo, nccl, xccl, ...
    """
    global _of_one  # noqa: PLW0603 - a fact about this process
    # Its functions take the group that there is when they are defined as a default, and keep it and its socket open.
    import torch.distributed.nn.functional

    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group(backend=backend, store=store, rank=0, world_size=1)
    _of_one = weakref.ref(dist.group.WORLD)


_of_one: Any = None


def end_group_of_one() -> None:
    """Destroy the default group where `start_group_of_one` made it."""
    if _of_one is not None and group_exists() and dist.group.WORLD is _of_one():
        end_group()


DEFAULT_TIMEOUT = timedelta(minutes=30)
NATIVE_TIMEOUT = timedelta(days=7)
"""Time limit of collectives inside torch, in a rank that a kernel watches."""


def _leave_timeout_to_kernel(asked: timedelta) -> None:
    """Have the kernel enforce the time limit of collectives, so that it can stand still at a breakpoint.

    torch cannot extend an operation that already waits, so its own limit is put far away. Meeting the other ranks was
    still under the limit that was asked for.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(NATIVE_TIMEOUT)
    telemetry.emit(telemetry.GroupTimeoutEvent(asked.total_seconds()))


def end_group(group: Any = None) -> None:
    """Destroy `group`, or the default group, where this process has one; every rank must call this.

    Args:
        group: The group; None means the default one.
    """
    if not group_exists():
        return
    settle()
    followed = group is None and bool(_followers)
    while group is None and _followers:
        _followers.pop()()
    dist.destroy_process_group(group)
    if followed:
        gc.collect()  # what referred to groups is in cycles; their sockets would stay


_followers: list[Callable[[], None]] = []


def before_the_end(release: Callable[[], None]) -> None:
    """Have a library that builds on the default group let go of it, once, before it is destroyed.

    Args:
        release: Called without arguments.
    """
    _followers.append(release)


def keep_until_gone(group: Any, *owners: Any) -> None:
    """Keep torch's Python object of a process group for as long as C++ objects own the group.

    Python's object lets go of the interpreter before it ends a group, an owner in C++ does not. gloo's destructor joins
    a thread that, right after a collective, may still need the interpreter to give the collective's tensors back: where
    DDP's reducer, freed after `destroy_process_group`, is the last owner, both wait for ever (torch 2.13 and before).

    Args:
        group: The group.
        owners: The objects that may outlive everything else that refers to it.
    """
    for owner in owners:
        weakref.finalize(owner, _let_go, group).atexit = False


def _let_go(group: Any) -> None:
    """Drop the reference that came as an argument."""


def forget_group() -> None:
    """Make torch forget a default group: destroyed where it is this process's own, dropped where it was inherited.

    Destroying an inherited group would wait for threads that the fork did not copy, and shut sockets down that the
    parent still uses.
    """
    global _inherited  # noqa: PLW0603 - a fact about this process
    if _inherited and dist.is_initialized():
        _keep_alive.append(dist.group.WORLD)  # its destructor would join threads that do not exist here
        _drop_bookkeeping()
    _inherited = False
    end_group()


_keep_alive: list[Any] = []


def _drop_bookkeeping() -> None:
    """Empty the tables of torch.distributed without touching the groups in them."""
    import torch.distributed.distributed_c10d as c10d

    world = c10d._world
    for name in (
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "pg_to_tag",
        "tags_to_pg",
        "pg_coalesce_state",
    ):
        table = getattr(world, name, None)
        if table is not None:
            _keep_alive.append(dict(table))
            table.clear()
    c10d.GroupMember.WORLD = None
    if hasattr(c10d, "_update_default_pg"):
        c10d._update_default_pg(None)
    if hasattr(c10d, "_unregister_all_process_groups"):
        c10d._unregister_all_process_groups()
    world.group_count = 0


def _torch_barrier(device: torch.device) -> None:
    if device.type == "cuda":
        dist.barrier(device_ids=[device.index or 0])
    else:
        dist.barrier()


def _xla_barrier(_: torch.device) -> None:
    import torch_xla.core.xla_model as xm

    xm.rendezvous("notebook_accelerate.wait_for_everyone")


def _no_barrier(device: torch.device) -> None:
    """Wait for nobody: this process is alone."""


BARRIERS: dict[str, Callable[[torch.device], None]] = {
    "none": _no_barrier,
    "torch": _torch_barrier,
    "xla": _xla_barrier,
}
"""How ranks wait for each other, by the name of the communicator."""
