"""Machines with NVIDIA GPUs, emulated by stub libraries for the driver and NVML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fake_gpu

ROOT = Path(__file__).resolve().parents[2]
# The package looks for files of the driver, which this machine lacks.
DRIVER_FILES = "from notebook_accelerate.hardware import device_counts; device_counts._nvidia_driver = lambda: True\n"


class Machine:
    """A machine that runs Python with torch's build for CUDA.

    Args:
        folder: The folder for the libraries and their log.
    """

    def __init__(self, folder: Path) -> None:
        for name in (fake_gpu.NVML, fake_gpu.CUDA):
            fake_gpu.build(folder, name)
        self.folder, self._log = folder, folder / "driver.log"

    def run(self, code: str, **variables: str) -> str:
        """Run a program on this machine with additional environment variables, and return its output."""
        emulated = {
            "LD_LIBRARY_PATH": str(self.folder),
            "FAKE_NVML_COUNT": "1",
            "FAKE_NVML_NAME": "NVIDIA H100 80GB HBM3",
            "FAKE_NVML_DRIVER": "580.159.04",
            "FAKE_CUDA_LOG": str(self._log),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        restricted = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
        own = {name: value for name, value in os.environ.items() if name not in restricted}
        script = self.folder / "program.py"  # Put the code into a file, because newly started ranks import it.
        script.write_text(DRIVER_FILES + code)
        self._log.write_text("")
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=self.folder,
            env={**own, **emulated, **variables},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def initialised(self) -> list[int]:
        """Return the ids of the processes that initialized the driver when the last program ran."""
        return [int(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder if torch was not built for CUDA."""
    import torch

    if torch.version.cuda is None:
        reason = "torch is not built for CUDA here: make test-cuda"
        for item in items:
            if "tests/cuda/" in item.nodeid or Path(item.path).parent.name == "cuda":
                item.add_marker(pytest.mark.skip(reason=reason))
