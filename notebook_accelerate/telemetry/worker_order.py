"""The order from which a rank starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import inherited_state

CHANNEL_BYTES = 1 << 20
"""Larger return values travel in files beside the channel."""


@dataclass
class WorkerOrder:
    """The order from which one rank starts.

    Attributes:
        rank: Global index.
        environment: Variables that replace those of the process.
        threads: CPU threads of torch's operators; None keeps torch's number.
        inherited: The kernel's random state, and its torch and numpy settings.
        base_environment: The kernel's whole environment; None when the process inherited it.
        cwd: Working directory; None when inherited.
        sys_path: Import path; None when inherited.
        sources: Sources of notebook cells by file name; empty when inherited.
        hold: Whether the rank keeps the frames of a failure for inspection until the kernel releases it.
        accelerator: Arguments of every `Accelerator()` that passes none; pickled where the process inherits nothing.
        as_accelerate: Whether the rank serves this package under the name ``accelerate``.
        report_from: Libraries whose numbers, steps and progress the rank reports.
        automatic_metrics: Whether the rank samples its loss, learning rate and speed.
        time_offset: What gives the rank the kernel's clock; None when inherited, or on another machine.
        result_bytes: Pickled return values of more bytes travel in files beside the channel; None: none do.
        notebook_settings: What ``capture_notebook_settings`` returned; b"" when inherited.
        mark: Marks the rank's process and all that it starts, see ``worker.exit_handlers.set_mark``; 0: nothing does.
    """

    rank: int
    environment: dict[str, str]
    threads: int | None
    inherited: inherited_state.InheritedState
    base_environment: dict[str, str] | None = None
    cwd: str | None = None
    sys_path: list[str] | None = None
    sources: dict[str, str] = field(default_factory=dict)
    hold: bool = False
    accelerator: Mapping[str, Any] | bytes | None = None
    as_accelerate: bool = False
    report_from: Sequence[str] = ()
    automatic_metrics: bool = True
    time_offset: float | None = None
    result_bytes: int | None = CHANNEL_BYTES
    mark: int = 0
    notebook_settings: bytes = b""
