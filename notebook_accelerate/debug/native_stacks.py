"""Native stacks of a rank that cannot answer, by py-spy where it is installed and allowed to look."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

SECONDS = 1.0
"""How long py-spy may take: it stops the process for that long."""
_FRAME = re.compile(r"^\s+(?P<name>.+?) \((?P<file>.*)\)$")


def command() -> str | None:
    """Return the path of py-spy; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def stack(pid: int) -> tuple[str, ...]:
    """Return the frames of a process's main thread as "name (file:line)", native ones too, outermost first.

    Args:
        pid: The process.

    Returns:
        The frames; empty where py-spy is missing or may not look (ptrace is forbidden in many containers).
    """
    spy = command()
    if spy is None:
        return ()
    try:
        done = subprocess.run(
            [spy, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse(done.stdout) if done.returncode == 0 else ()


def parse(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread in what py-spy printed, outermost first."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            inside = "MainThread" in line or not frames
            if inside:
                frames.clear()
        elif inside and _FRAME.match(line):
            frames.append(line.strip())
    return tuple(reversed(frames))
