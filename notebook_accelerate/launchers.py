"""``notebook_launcher`` and ``debug_launcher``, with Accelerate's parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from notebook_accelerate import hardware, launch
from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch import Run
from notebook_accelerate.launch.processes.zygote import warm_up


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    block: bool = True,
    start_method: str = "auto",
    panel: bool | str = "auto",
    timeout: float | None = None,
    hang_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    debug: bool = False,
    min_nodes: int | None = None,
    on: str | RayCluster | None = None,
    config: LaunchConfig | None = None,
) -> Run:
    """Run ``function(*args)`` in ``num_processes`` processes started from this notebook.

    Args:
        function: What every rank runs; it may be defined in a cell.
        args: Its positional arguments.
        num_processes: Ranks on this machine; None means one per accelerator, or one.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for every ``Accelerator()`` that does not ask for its own.
        use_port: Port of the process group; another free one is found when it is taken; 0 means any.
        master_addr: Address of the machine with rank 0.
        node_rank: Index of this notebook among those that run this cell together.
        num_nodes: Notebooks that run this cell together, on one machine or several; each starts its own ranks.
        rdzv_backend: "static" (each notebook says which it is, with ``node_rank``) or "c10d" (in the order they come).
        rdzv_endpoint: host:port where the notebooks meet; empty means master_addr:use_port.
        rdzv_conf: Settings of the rendezvous by torch's names, in seconds: "join_timeout" (600), "last_call_timeout"
            (30), "keep_alive_interval" (5; a notebook is lost after "keep_alive_max_attempt" (3) of them), ...; and
            "secret": a text that all notebooks share (or the variable NOTEBOOK_ACCELERATE_SECRET), with which the first
            one shows the ranks of all.
        rdzv_id: Name of the run in the rendezvous.
        max_restarts: How often the whole group is started again after a failure.
        monitor_interval: Seconds between two looks at ranks where the system cannot tell when a process ends.
        log_line_prefix_template: Label of every line; ${role_name}, ${rank} and ${local_rank} are filled in.
        block: Whether to return when the run has ended, or as soon as it has started.
        start_method: "auto", "inline", "fork", "zygote" or "spawn".
        panel: Whether the launch shows itself in the cell: "auto", True or False.
        timeout: Seconds for the whole run.
        hang_timeout: Seconds without a sign of life from any rank before the run is ended.
        env: Environment variables for the ranks, over the kernel's.
        debug: Whether the ranks of a run that failed are kept, so that ``run.debug()`` opens at the failing line.
        min_nodes: Notebooks that are enough to go on with: where others are lost, the group starts again with those
            that are left (needs "c10d" and ``max_restarts``), and again with one that comes late; None means all of
            ``num_nodes``.
        on: Where the ranks run: None (this machine), "ray" (the cluster that this machine belongs to, or the notebook's
            own ``ray.init()``), "ray://host:port", or a ``RayCluster``; the variable NOTEBOOK_ACCELERATE_ON stands in
            for None. ``num_processes`` counts the ranks on the whole cluster then.
        config: All of the above in one object; arguments that differ from their defaults win.

    Returns:
        The run, with ``results`` (one value per rank), ``metrics``, ``logs()`` and ``report()``.

    Raises:
        ValueError: An argument is not allowed, or does not fit this machine.
        LaunchError: Nothing could be started.
        WorkerError: A blocking run did not succeed; ``.run`` is the run, ``.__cause__`` the original exception.
        KeyboardInterrupt: The blocking cell was interrupted; every rank has ended.
    """
    given = dict(locals())
    values = {name: given[name] for name in LaunchConfig.__dataclass_fields__ if name in given}
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise ValueError(f"args={args!r} is not a tuple; pass notebook_launcher({_name(function)}, ({args!r},))")
    return launch.start(_merged(config, values), function, tuple(args))


def _name(function: object) -> str:
    return getattr(function, "__name__", "train")


def _merged(config: LaunchConfig | None, values: dict[str, Any]) -> LaunchConfig:
    """Return ``config`` with the explicit arguments over it: those that differ from the defaults."""
    if config is None:
        return LaunchConfig(**values)
    if not isinstance(config, LaunchConfig):
        raise ValueError(f"config={config!r} is not allowed; pass a LaunchConfig")
    defaults = LaunchConfig()
    return config.changed(**{name: value for name, value in values.items() if value != getattr(defaults, name)})


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> Run:
    """Run ``function(*args)`` in ``num_processes`` processes on the CPU, whatever accelerators there are.

    Args:
        function: What every rank runs.
        args: Its positional arguments.
        num_processes: Ranks.

    Returns:
        The run, as ``notebook_launcher`` returns it.

    Raises:
        WorkerError: The run did not succeed.
    """
    return notebook_launcher(function, args, num_processes, config=LaunchConfig(cpu=True, use_port=0))


def test_launch() -> None:
    """Check, in a rank, that the process group works: every rank contributes to one sum.

    Every rank must call this.

    Raises:
        RuntimeError: The sum is wrong.
    """
    import torch

    # By dotted name: this body runs in a rank, and the kernel's side imports nothing of the worker's side.
    state = import_module("notebook_accelerate.state").PartialState()
    if state.num_processes == 1:
        return
    count = torch.ones(1, device=state.device)
    torch.distributed.all_reduce(count)
    if int(count) != state.num_processes:
        raise RuntimeError(f"{state.num_processes} ranks added up to {int(count)}")


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it from whoever imports it


def _warm_up_in_kernel() -> None:
    """Start the server process of the zygote method early: importing torch there takes longer than a launch."""
    if hardware.detect().host != "terminal":
        threading.Thread(target=warm_up, name="notebook-accelerate-warm-up", daemon=True).start()


_warm_up_in_kernel()
