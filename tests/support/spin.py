"""A call that waits like a thread that waits for a CUDA device: it spins in C, without the interpreter lock.

cudaDeviceScheduleAuto, CUDA's default, spins if a process has fewer contexts than the machine has cores.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_SOURCE = """
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
void spin(double seconds) { for (double end = now() + seconds; now() < end;) {} }
"""


def build(folder: Path) -> Path:
    """Compile the library into `folder` and return its path. Skip the test if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler on this machine")
    path, source = folder / "libspin.so", folder / "spin.c"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=300)
    return path


def load(library: Path, *, locked: bool = False) -> Any:
    """Return the function ``spin(seconds)`` of the library.

    Args:
        library: The path that `build` returned.
        locked: Whether the call keeps the interpreter lock.
    """
    spin = (ctypes.PyDLL if locked else ctypes.CDLL)(str(library)).spin
    spin.argtypes, spin.restype = [ctypes.c_double], None
    return spin


def on_device(wait: Any, seconds: float) -> Any:
    """Return a tensor that claims to be on a CUDA device. Each use of its value takes ``seconds``.

    Args:
        wait: The function that `load` returned.
        seconds: The duration of each use.
    """
    import torch

    class OnDevice(torch.Tensor):
        device = torch.device("cuda", 0)

        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            wait(seconds)

    return torch.ones(3).as_subclass(OnDevice)


def record_nccl(entered: int, ended: int, operation: str = "all_reduce") -> None:
    """Make this process's NCCL flight recorder contain collectives, in the format of torch 2.11.

    Args:
        entered: The number of collectives that this rank has entered.
        ended: The number of those collectives that have completed.
        operation: The operation of all collectives.
    """
    import torch

    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": each,
            "p2p_seq_id": 0,
            "op_id": each,
            "record_id": each,
            "profiling_name": f"nccl:{operation}",
            "input_sizes": [[1024]],
            "input_dtypes": ["Float"],
            "output_sizes": [[1024]],
            "output_dtypes": ["Float"],
            "time_created_ns": time.time_ns(),
            "state": "completed" if each <= ended else "started",
            "retired": each <= ended,
            "is_p2p": False,
            "timeout_ms": 600_000,
        }
        for each in range(1, entered + 1)
    ]
    dumped = json.dumps({"version": "2.10", "entries": entries}).encode()
    torch._C._distributed_c10d._dump_nccl_trace_json = lambda *_: dumped  # type: ignore[attr-defined]


__all__ = ["build", "load", "on_device", "record_nccl"]
