"""The file with the trace of a rank's profile."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware import temporary_folders
from notebook_accelerate.telemetry.debug_protocol import ProfileReply, ProfileRequest
from notebook_accelerate.telemetry.trace_names import KEY

if TYPE_CHECKING:
    from torch.profiler import profile

_END = 4096
"""Bytes at the end of a trace that contain its last brace."""


class Recorded:
    """A trace that torch's profiler has written.

    torch holds the interpreter lock while it writes: on another thread it would delay the training's as long, and each
    operation of the training hands the lock over.

    Args:
        profiler: torch's profiler, which has been stopped.
        request: What was asked for.
        facts: What torch's profiler does not record.
    """

    def __init__(self, profiler: profile, request: ProfileRequest, facts: dict[str, Any]) -> None:
        self.facts, self._number = facts, request.number
        self._own: Path | None = None
        folder = Path(request.folder)
        if not (folder / request.token).exists():
            folder = self._own = temporary_folders.make_for(self)
        self._path = folder / f"rank{facts['rank']}.{request.number}.pt.trace.json"
        profiler.export_chrome_trace(str(self._path))

    def complete(self) -> ProfileReply:
        """Add the facts, on any thread; where the kernel's folder is not on this machine, the reply has the trace."""
        append(self._path, self.facts)
        facts = self.facts
        reply = ProfileReply(self._number, "", "", facts["steps"], facts["seconds"], facts["clock"])
        if self._own is None:
            reply.path = str(self._path)
        else:
            reply.payload = gzip.compress(self._path.read_bytes(), 1)
            temporary_folders.remove(self._own)
        return reply


def append(path: Path, facts: Mapping[str, Any]) -> None:
    """Add the facts to a trace's file, without reading the file.

    Raises:
        ValueError: It does not end as a JSON object.
    """
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _END)
        file.seek(start)
        end = file.read().rstrip()
        if not end.endswith(b"}"):
            raise ValueError(f"{path} does not end as a trace")
        file.seek(start + len(end) - 1)
        file.write(f',\n"{KEY}": {json.dumps(facts)}}}\n'.encode())


__all__ = ["Recorded", "append"]
