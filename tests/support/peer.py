"""The real Accelerate, in an interpreter of its own: installed beside this project, never into its environment."""

from __future__ import annotations

import functools
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

_VARIABLE = "NOTEBOOK_ACCELERATE_PARITY_PYTHON"
_DEFAULT = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"


def interpreter() -> str:
    """Return an interpreter that has Accelerate and torch; skips the test, with the reason, where there is none.

    It is the one that NOTEBOOK_ACCELERATE_PARITY_PYTHON names, or that of the benchmark environment.
    """
    path = os.environ.get(_VARIABLE) or (str(_DEFAULT) if _DEFAULT.exists() else "")
    if not path:
        pytest.skip(f"no interpreter with accelerate: run `make bench` once, or set {_VARIABLE}")
    if (version := _version(path)) is None:
        pytest.skip(f"{path} has no accelerate: pip install accelerate there")
    assert version.startswith("1."), f"{path} has accelerate {version}"
    return path


@functools.cache
def _version(path: str) -> str | None:
    code = "import accelerate, torch; print(accelerate.__version__)"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or None


def run(code: str, *arguments: str, cwd: Path | None = None, world_size: int = 1) -> str:
    """Run a script with the real Accelerate.

    Args:
        code: The script.
        arguments: Its command line.
        cwd: Its working directory.
        world_size: How many ranks run it.

    Returns:
        What rank 0 printed.
    """
    from tests.support.ranks import reserved_port

    command = [interpreter(), "-c", textwrap.dedent(code), *arguments]
    with reserved_port() as port:
        ranks = [
            subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **_environment(rank, world_size, port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        outputs = [rank.communicate(timeout=150) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return outputs[0][0]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    common = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": ""}
    if world_size == 1:
        return common
    return {
        **common,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
