"""Write the traces of torch's profiler atomically, and report them to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.config.constants import PROFILE_PATTERN_NAME
from notebook_accelerate.config.kwargs_handlers import ProfileKwargs
from notebook_accelerate.state.warn_once import warn_once


@contextmanager
def profiled(settings: ProfileKwargs, rank: int, wait: Callable[[], None]) -> Iterator[Any]:
    """Profile the block; every rank must enter it.

    Args:
        settings: The settings of the profiler, including the folder of the traces.
        rank: The number of this rank.
        wait: A function that waits for all ranks.

    Yields:
        The profiler. With `output_trace_dir`, each rank writes its trace there at the end and waits for the others. If
        the block raises, the rank writes its trace but does not wait.
    """
    profiler = settings.build()
    if settings.output_trace_dir is None:
        with profiler:
            yield profiler
        return
    target = Path(settings.output_trace_dir).absolute() / PROFILE_PATTERN_NAME.format(suffix=rank)
    try:
        with profiler:
            yield profiler
    except BaseException:
        _write_after_failure(profiler, target)
        raise
    _write_trace(profiler, target)
    wait()


def _write_trace(profiler: Any, target: Path) -> None:
    """Write a trace to a temporary file and rename it, so that a rank that is killed leaves no partial trace."""
    if getattr(profiler, "profiler", None) is None:
        warn_once(
            f"profile() recorded nothing for {target.name}: its schedule never reached an active step. Call "
            "profiler.step() once per step, or leave out schedule_option"
        )
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        profiler.export_chrome_trace(str(part))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    telemetry.emit(telemetry.TraceEvent(str(target), target.stat().st_size))


def _write_after_failure(profiler: Any, target: Path) -> None:
    """Write the trace of a block that raised an error. If writing fails, only issue a warning."""
    try:
        _write_trace(profiler, target)
    except Exception as error:  # noqa: BLE001 - it must not replace the block's own error
        warn_once(f"cannot write the profiler's trace {target} ({type(error).__name__}: {error})")
