"""Native stacks of a rank that cannot reply, read by py-spy where it is installed and has permission."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

SECONDS = 5.0
"""Time limit of py-spy, which stops the process while it runs: it reads the symbols of torch's libraries, which takes
0.8 s with a build for CUDA, and more if the main thread is inside them."""
_FRAME = re.compile(r"^\s+.+ \(.*\)$")


def command() -> str | None:
    """Return the path of py-spy; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def stack(pid: int) -> tuple[str, ...]:
    """Return the frames of a process's main thread as "name (file:line)", with native ones, outermost first.

    Args:
        pid: The process.

    Returns:
        The frames; empty where py-spy is missing or lacks permission (many containers forbid ptrace).
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
    """Return the frames of the main thread in the output of py-spy, outermost first."""
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
