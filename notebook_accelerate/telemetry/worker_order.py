"""The order that a rank receives when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import inherited_state

CHANNEL_BYTES = 1 << 20
"""Return values with more bytes than this are sent in files alongside the channel."""

OPTIMIZER_MODULE = "torch._dynamo"
"""The module that a process's first optimizer imports, with 800 others, which takes a second of CPU time."""


@dataclass
class WorkerOrder:
    """The settings that a rank receives when it starts.

    Attributes:
        rank: The rank's global index.
        environment: Variables that override the process's variables.
        threads: The number of CPU threads for torch's operators, or None to keep torch's default.
        inherited: The kernel's random state, and its torch and numpy settings.
        base_environment: The kernel's whole environment, or None if the process inherited it.
        cwd: The working directory, or None if the process inherited it.
        sys_path: The import path, or None if the process inherited it.
        sources: The sources of notebook cells by file name. Empty if the process inherited them.
        hold: Whether the rank keeps the frames of a failure for inspection until the kernel releases it.
        accelerator: Arguments for each `Accelerator()` that is created without any. Pickled if the process inherits
            nothing.
        as_accelerate: Whether the rank provides this package under the name ``accelerate``.
        report_from: Libraries whose numbers, steps and progress the rank reports.
        automatic_metrics: Whether the rank samples its loss, learning rate and speed.
        time_offset: The offset that makes the rank's clock equal to the kernel's, or None if the process inherited it
            or is on another machine.
        result_bytes: Pickled return values with more bytes than this are sent in files alongside the channel. If None,
            files are never used.
        notebook_settings: The result of ``capture_notebook_settings``, or b"" if the process inherited the settings.
        mark: The mark for the rank's process and all processes that it starts, or 0; see
            ``worker.exit_handlers.set_mark``.
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
