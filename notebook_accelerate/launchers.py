"""``notebook_launcher`` and ``debug_launcher``, with Accelerate's parameters.

Importing this module in a notebook starts the server process for the start method "zygote" as soon as the cell has
finished.
"""

from __future__ import annotations

import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from notebook_accelerate import launch
from notebook_accelerate._mistakes import reports_mistakes
from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.settings import help_texts
from notebook_accelerate.launch import Run
from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.launch.processes.zygote import warm_up

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _defaults_from_config(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a launcher take from ``config`` all arguments that the caller leaves out.

    An argument that the caller passes takes precedence, even if it is equal to the parameter's default.

    Args:
        launcher: A function with a keyword argument ``config``.

    Returns:
        The function with the same signature.

    Raises:
        ValueError: ``config`` is not a LaunchConfig, or the caller asks a detached run to block.
    """
    names = list(inspect.signature(launcher).parameters)

    @functools.wraps(launcher)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True  # This frame is part of the boundary; see `_mistakes`.
        config = kwargs.get("config")
        if kwargs.get("detach") and kwargs.get("block"):
            raise ValueError(
                "block=True is not allowed with detach=True, which returns when the run has started; leave out block, "
                "and call run.wait()"
            )
        if config is None:
            return launcher(*args, **kwargs)
        if not isinstance(config, LaunchConfig):
            raise ValueError(f"config={config!r} is not allowed; pass a LaunchConfig")
        omitted = set(names[len(args) :]).intersection(LaunchConfig.__dataclass_fields__) - kwargs.keys()
        kwargs.update({name: getattr(config, name) for name in omitted})
        return launcher(*args, **kwargs)

    return wrapped


def _documented(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add the texts of LaunchConfig's fields to a launcher's docstring, in the order of its parameters.

    The parameters after ``config`` are only documented in `LaunchConfig`.
    """
    texts = help_texts(LaunchConfig)
    names = list(inspect.signature(launcher).parameters)
    position = names.index("config") + 1
    lines = [
        textwrap.fill(f"{name}: {texts[name]}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name in names[:position]
        if name in texts
    ]
    rare = f"    {', '.join(names[position:])}: The fields of `LaunchConfig` with these names."
    text = inspect.cleandoc(launcher.__doc__ or "")  # Python 3.13 and later remove the indentation anyway.
    text = text.replace("    resume:", "\n".join([*lines, "    resume:"]))
    launcher.__doc__ = text.replace("\n\nReturns:", f"\n{rare}\n\nReturns:")
    return launcher


@reports_mistakes
@_documented
@_defaults_from_config
def notebook_launcher(  # noqa: D417 - `_documented` adds the texts of the settings
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
    env: Mapping[str, str] | None = None,
    hold_on_error: bool = False,
    save: str | os.PathLike[str] | None = None,
    detach: bool = False,
    resume: Run | None = None,
    config: LaunchConfig | None = None,
    timeout: float | None = None,
    hang_timeout: float | None = None,
    min_nodes: int | None = None,
    on: str | RayCluster | None = None,
    name: str | None = None,
    output: str = "cell",
    tags: Sequence[str] = (),
    devices: int | str | Sequence[int | str] | None = None,
    queue: bool = False,
    notify: Callable[[dict[str, str]], object] | str | None = None,
) -> Run:
    """Run ``function(*args)`` in ``num_processes`` processes that are started from this notebook.

    Args:
        function: The function that every rank runs. It may be defined in a cell.
        args: The function's positional arguments.
        resume: A run that has ended. Its training continues from the newest complete checkpoint, with its history. The
            function must load the checkpoint:
            ``if notebook_accelerate.resumed_checkpoint(): accelerator.load_state(...)``.
        config: All settings in one object. An argument that is passed to this function overrides the field of the same
            name.

    Returns:
        The run, with ``results`` (one value per rank), ``metrics``, ``logs()`` and ``report()``.

    Raises:
        ValueError: An argument is invalid, or does not fit this machine.
        LaunchError: No rank could be started, or the devices (DeviceBusyError) or the port (PortInUseError) are in use.
        SerializationError: The function or an argument cannot be sent to the ranks.
        WorkerError: A blocking run failed, was stopped (RunStoppedError) or reached a time limit (RunTimeoutError).
            ``.run`` is the run, and ``.__cause__`` the original exception.
        KeyboardInterrupt: The blocking cell was interrupted. All ranks have ended.
    """
    arguments = dict(locals())
    values = {name: arguments[name] for name in LaunchConfig.__dataclass_fields__ if name in arguments}
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        name = getattr(function, "__name__", "train")
        raise ValueError(f"args={args!r} is not a tuple; pass notebook_launcher({name}, ({args!r},))")
    return launch.start((config or LaunchConfig()).changed(**values), function, tuple(args), resume)


@reports_mistakes
def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> Run:
    """Run ``function(*args)`` in ``num_processes`` processes on the CPU, even if there are accelerators.

    Args:
        function: The function that every rank runs.
        args: The function's positional arguments.
        num_processes: The number of ranks.

    Returns:
        The finished run.

    Raises:
        ValueError: An argument is invalid.
        LaunchError: No rank could be started.
        WorkerError: The run failed.
    """
    return notebook_launcher(function, args, num_processes, config=LaunchConfig(cpu=True, use_port=0))


def test_launch() -> None:
    """Check that the process group works, by adding up a number from each rank; every rank must call this.

    Raises:
        RuntimeError: The sum is not the number of ranks.
    """
    import torch

    from notebook_accelerate.state import PartialState  # Import this here, because the kernel must not load it.

    state = PartialState()
    if state.num_processes == 1:
        return
    count = torch.ones(1, device=state.device)
    torch.distributed.all_reduce(count)
    if int(count) != state.num_processes:
        raise RuntimeError(f"{state.num_processes} ranks added up to {int(count)}")


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it from test files that import it


def _warm_up_after_cell() -> None:
    """Start the server process of the zygote method once the kernel has run the current cell.

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
