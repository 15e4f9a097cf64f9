"""Writes the trace of a rank's profile, on a thread beside the one that trains."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate.telemetry.debug_protocol import ProfileReply, ProfileRequest

KEY = "notebook_accelerate"
"""The key of the trace's file that holds what torch's profiler does not record."""
_END = 4096
"""Bytes at the end of a trace that contain its last brace."""


@dataclass
class Recorded:
    """What a rank has recorded: torch's profiler, which has been stopped, and the facts that it does not know."""

    profiler: Any
    facts: dict[str, Any]


def write(recorded: Recorded, request: ProfileRequest) -> ProfileReply:
    """Write the trace and return the reply; where the kernel's folder is not on this machine, the reply carries it."""
    facts, folder = recorded.facts, Path(request.folder)
    reply = ProfileReply(request.number, "", "", facts["steps"], facts["seconds"], facts["clock"])
    if (folder / request.token).exists():
        path = folder / f"rank{facts['rank']}.{request.number}.pt.trace.json"
        _export(recorded, path)
        reply.path = str(path)
        return reply
    with tempfile.TemporaryDirectory() as own:
        path = Path(own) / "trace.json"
        _export(recorded, path)
        reply.payload = gzip.compress(path.read_bytes(), 1)
    return reply


def _export(recorded: Recorded, path: Path) -> None:
    recorded.profiler.export_chrome_trace(str(path))
    append(path, recorded.facts)


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


__all__ = ["KEY", "Recorded", "append", "write"]
