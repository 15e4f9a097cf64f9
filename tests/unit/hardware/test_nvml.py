"""GPUs read through pynvml, from a library with the interface of NVIDIA's NVML and two GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_accelerate.hardware import gpu_properties, nvml


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler on this machine")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=300)
    return path


def _run(library: Path, code: str, **variables: str) -> str:
    """Return what ``code`` prints in a process that loads ``library`` as NVML."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent), **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_gpus_are_described_in_full(library: Path) -> None:
    code = "from notebook_accelerate.hardware import nvml; print(nvml.count(), *nvml.gpus(), sep='\\n')"
    count, first, second = _run(library, code).splitlines()
    assert count == "2"
    assert first == str(
        nvml.Gpu(
            index=0,
            name="NVIDIA GeForce RTX 4080",
            uuid="GPU-0abc",
            memory_bytes=24 << 30,
            capability=(8, 9),
            pci_bus_id="00000000:41:00.0",
        )
    )
    assert "RTX 4090" in second
    assert "memory_bytes=0" in second, "NVML reports no size for memory that a GPU shares"


def test_names_and_driver_decide_on_peer_to_peer(library: Path) -> None:
    code = (
        "from notebook_accelerate.utils import get_gpu_info, check_cuda_p2p_ib_support as peers\n"
        "from notebook_accelerate.utils.environment import get_driver_version\n"
        "print(get_gpu_info(), get_driver_version(), peers())"
    )
    names = ["NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4090"]
    assert _run(library, code) == f"{(names, 2)} 535.104.05 False"


def test_utilisation_and_memory_are_read_per_process(library: Path) -> None:
    code = (
        "from notebook_accelerate.telemetry.sampler import GpuReader\n"
        "reader = GpuReader(); print(reader.read()); reader.close()"
    )
    assert _run(library, code) == str({100: (40.0, 1 << 30), 101: (41.0, 1 << 30)})


def test_the_package_imports_no_pynvml(library: Path) -> None:
    code = (
        "import sys, notebook_accelerate\n"
        "from notebook_accelerate.hardware import feature_checks, gpu_properties, nvml\n"
        "print('pynvml' in sys.modules, nvml.count(), 'pynvml' in sys.modules)"
    )
    assert _run(library, code) == "False 2 True"


@pytest.mark.parametrize(("visible", "index"), [("1,0", "1"), ("GPU-1", "1"), ("0", "0"), ("7", "None")])
def test_the_first_visible_gpu_is_found(library: Path, visible: str, index: str) -> None:
    code = "from notebook_accelerate.hardware.nvml import visible_gpu\ng = visible_gpu(0)\nprint(g and g.index)"
    assert _run(library, code, CUDA_VISIBLE_DEVICES=visible) == index


def test_uuids_restrict_what_is_visible(library: Path) -> None:
    code = "from notebook_accelerate.hardware.device_counts import _visible_cuda as v; print(v('GPU-1,GPU-0,GPU-9', 2))"
    assert _run(library, code) == "2"


@pytest.mark.skipif(nvml.count() is not None, reason="this machine has an NVIDIA driver")
def test_without_a_driver_there_are_no_gpus() -> None:
    assert (nvml.gpus(), nvml.driver_version()) == ([], None)
    assert gpu_properties.get_gpu_info() == ([], 0)
    assert gpu_properties.check_cuda_p2p_ib_support() is True
    assert gpu_properties.check_cuda_fp8_capability() is False
