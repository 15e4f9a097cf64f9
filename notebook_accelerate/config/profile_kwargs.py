"""Settings of ``Accelerator.profile``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from notebook_accelerate.config.kwargs_handlers import KwargsHandler

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``, and the folder of its traces."""

    activities: list[ProfilerActivity] | None = None
    """Recorded activities: cpu, xpu, mtia, cuda, hpu; None: all that torch supports here."""
    schedule_option: dict[str, int] | None = None
    """Arguments of ``torch.profiler.schedule``: wait, warmup, active, repeat, skip_first; None: record every step."""
    on_trace_ready: Callable[..., Any] | None = None
    """Called with the profiler at the end of each cycle of the schedule."""
    record_shapes: bool = False
    """Whether the shapes of inputs are kept."""
    profile_memory: bool = False
    """Whether allocations are tracked."""
    with_stack: bool = False
    """Whether file and line of each operation are kept."""
    with_flops: bool = False
    """Whether the floating point operations of matrix products and convolutions are estimated."""
    with_modules: bool = False
    """Whether the hierarchy of modules is kept (TorchScript only)."""
    output_trace_dir: str | None = None
    """Folder in which each rank writes a Chrome trace when profiling ends; None: no trace."""

    def build(self) -> Any:
        """Return the ``torch.profiler.profile`` with these arguments, not started.

        Raises:
            ValueError: torch does not support an activity here.
        """
        from torch import profiler

        schedule = profiler.schedule(**self.schedule_option) if self.schedule_option is not None else None
        return profiler.profile(
            activities=self._activities(),
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _activities(self) -> list[Any] | None:
        from torch.profiler import ProfilerActivity as Activity

        if self.activities is None:
            return None
        known = {name.lower(): member for name, member in Activity.__members__.items()}
        for name in self.activities:
            if name not in known:
                raise ValueError(f"profiler activity {name!r} is not supported here; supported: {', '.join(known)}")
        return [known[name] for name in self.activities]
