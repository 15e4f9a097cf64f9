"""``notebook_launcher`` and ``debug_launcher``, with Accelerate's parameters."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from notebook_accelerate import launch
from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch import Run
from notebook_accelerate.launch.output.rank_lines import running_kernel
from notebook_accelerate.launch.processes.zygote import warm_up

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _defaults_from_config(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a launcher take the arguments that the caller leaves out from ``config``.

    An argument that the caller passes wins, also where it equals the parameter's default.

    Args:
        launcher: A function with a keyword argument ``config``.

    Returns:
        The function with the same signature.

    Raises:
        ValueError: ``config`` is not a LaunchConfig.
    """
    names = list(inspect.signature(launcher).parameters)

    @functools.wraps(launcher)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        config = kwargs.get("config")
        if config is None:
            return launcher(*args, **kwargs)
        if not isinstance(config, LaunchConfig):
            raise ValueError(f"config={config!r} is not allowed; pass a LaunchConfig")
        omitted = set(names[len(args) :]).intersection(LaunchConfig.__dataclass_fields__) - kwargs.keys()
        kwargs.update({name: getattr(config, name) for name in omitted})
        return launcher(*args, **kwargs)

    return wrapped


@_defaults_from_config
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
    name: str | None = None,
    save: str | os.PathLike[str] | None = None,
    detach: bool = False,
    resume: Run | None = None,
    output: str = "cell",
    tags: Sequence[str] = (),
    config: LaunchConfig | None = None,
) -> Run:
    """Run ``function(*args)`` in ``num_processes`` processes started from this notebook.

    Args:
        function: The function that every rank runs; it may be defined in a cell.
        args: Its positional arguments.
        num_processes: Ranks on this machine; None: one per accelerator, or one where there is none.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for every ``Accelerator()`` that sets no precision of its own.
        use_port: Port of the process group; if it is taken, another free one is used; 0: any free port.
        master_addr: Address of the machine with rank 0.
        node_rank: Index of this notebook among the notebooks of the run.
        num_nodes: Notebooks that run this cell together, on one machine or several; each starts its own ranks.
        rdzv_backend: "static" (each notebook passes its ``node_rank``) or "c10d" (numbered in the order they join).
        rdzv_endpoint: host:port of the rendezvous; empty means master_addr:use_port.
        rdzv_conf: Settings of the rendezvous by torch's names, in seconds: "join_timeout" (600), "last_call_timeout"
            (30), "keep_alive_interval" (5; a notebook is lost after "keep_alive_max_attempt" (3) of them), ...; and
            "secret": a text that all notebooks share (or the variable NOTEBOOK_ACCELERATE_SECRET), which lets the
            first notebook show the ranks of all.
        rdzv_id: Name of the run in the rendezvous.
        max_restarts: How often the whole group is restarted after a failure.
        monitor_interval: Seconds between two checks of the ranks on systems that do not report the end of a process.
        log_line_prefix_template: Label of every line; ${role_name}, ${rank} and ${local_rank} are filled in.
        block: Whether to return when the run has ended, or as soon as it has started.
        start_method: "auto", "inline", "fork", "zygote" or "spawn".
        panel: Whether the launch shows a panel in the cell: "auto", True or False.
        timeout: Seconds for the whole run.
        hang_timeout: Seconds without output, metric or progress from any rank before the run is ended.
        env: Environment variables for the ranks, over the kernel's.
        debug: Whether the ranks of a failed run are kept, so that ``debug()`` opens at the failing line.
        min_nodes: Smallest number of notebooks that continue: when others are lost, the group restarts with the
            remaining ones (needs "c10d" and ``max_restarts``), and again when one joins late; None: ``num_nodes``.
        on: Where the ranks run: None (this machine), "ray" (the cluster that this machine belongs to, or the notebook's
            own ``ray.init()``), "ray://host:port", or a ``RayCluster``; the variable NOTEBOOK_ACCELERATE_ON replaces
            None. ``num_processes`` then counts the ranks on the whole cluster.
        name: Name of the run; None: the function's name and the run's number.
        save: Folder of runs in which the run is kept, as "runs": in a folder of its own, written while the run goes on,
            for `open_run` and `runs`; None: the folder of the variable NOTEBOOK_ACCELERATE_RUNS, if it is set.
        detach: Whether the run goes on without this kernel: it has a process of its own, is kept in a folder (that of
            ``save``, else one of the user's), and `attach` opens it in any later kernel; ``block`` is then False.
        resume: A run that has ended: go on with its training from its newest complete checkpoint, as one history. The
            function must load it: ``if notebook_accelerate.resumed_checkpoint(): accelerator.load_state(...)``.
        output: Where the text that ranks write is shown: "cell" (under the launch, and in the panel) or "panel" (there
            only); figures and other displays stay under the launch.
        tags: Words by which the table of runs finds this run.
        config: All of the above, except ``resume``, in one object; an argument passed here wins over its field.

    Returns:
        The run, with ``results`` (one value per rank), ``metrics``, ``logs()`` and ``report()``.

    Raises:
        ValueError: An argument is not allowed, or does not fit this machine.
        LaunchError: No rank could be started, or (DeviceBusyError, PortInUseError) devices or the port are taken.
        SerializationError: The function or an argument cannot be sent to the ranks.
        WorkerError: A blocking run failed, was stopped (RunStoppedError) or reached a time limit (RunTimeoutError);
            ``.run`` is the run, ``.__cause__`` the original exception.
        KeyboardInterrupt: The blocking cell was interrupted; every rank has ended.
    """
    arguments = dict(locals())
    values = {name: arguments[name] for name in LaunchConfig.__dataclass_fields__ if name in arguments}
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        name = getattr(function, "__name__", "train")
        raise ValueError(f"args={args!r} is not a tuple; pass notebook_launcher({name}, ({args!r},))")
    return launch.start((config or LaunchConfig()).changed(**values), function, tuple(args), resume)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> Run:
    """Run ``function(*args)`` in ``num_processes`` processes on the CPU, also where there are accelerators.

    Args:
        function: The function that every rank runs.
        args: Its positional arguments.
        num_processes: Number of ranks.

    Returns:
        The run, which has ended, as ``notebook_launcher`` returns it.

    Raises:
        ValueError: An argument is not allowed.
        LaunchError: No rank could be started.
        WorkerError: The run failed.
    """
    return notebook_launcher(function, args, num_processes, config=LaunchConfig(cpu=True, use_port=0))


def test_launch() -> None:
    """Check, in a rank, that the process group works: every rank contributes to one sum.

    Every rank must call this.

    Raises:
        RuntimeError: The sum is wrong.
    """
    import torch

    from notebook_accelerate.state import PartialState  # here, because the kernel's side must not load it

    state = PartialState()
    if state.num_processes == 1:
        return
    count = torch.ones(1, device=state.device)
    torch.distributed.all_reduce(count)
    if int(count) != state.num_processes:
        raise RuntimeError(f"{state.num_processes} ranks added up to {int(count)}")


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it from test files that import it


def _warm_up_after_cell() -> None:
    """Start the server process of the zygote method when the kernel has run the current cell.

    Importing torch in that process takes longer than a launch. Scripts and ranks run no cells, so they start nothing.
    """
    kernel = running_kernel()
    if kernel is None:
        return
    events = kernel.shell.events

    def start_server(*_: object) -> None:
        events.unregister("post_run_cell", start_server)
        warm_up()

    events.register("post_run_cell", start_server)


_warm_up_after_cell()
