"""What a rank is told before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import inherited_state


@dataclass
class WorkerOrder:
    """What one rank is told before it starts.

    Attributes:
        rank: Global index.
        environment: Variables to set over what the process has.
        threads: CPU threads of torch's operators; None leaves them alone.
        ambient: The kernel's random numbers and torch settings.
        base_environment: The kernel's whole environment; None when the process inherited it.
        cwd: Working directory; None when inherited.
        sys_path: Import path; None when inherited.
        sources: Sources of notebook cells by file name; empty when inherited.
        hold: Whether the frames of a failure are kept for inspection until the kernel lets go.
        accelerator: Arguments of every `Accelerator()` that passes none; pickled where the process inherits nothing.
    """

    rank: int
    environment: dict[str, str]
    threads: int | None
    ambient: inherited_state.InheritedState
    base_environment: dict[str, str] | None = None
    cwd: str | None = None
    sys_path: list[str] | None = None
    sources: dict[str, str] = field(default_factory=dict)
    hold: bool = False
    accelerator: Mapping[str, Any] | bytes | None = None
