"""GPUs that pynvml finds in a stub library, which has NVML's interface and two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_accelerate.hardware import nvml
from notebook_accelerate.utils.environment import check_cuda_fp8_capability, get_gpu_info
from tests.support import fake_gpu


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build(tmp_path_factory.mktemp("nvml"))


def _run(library: Path, code: str, **variables: str) -> str:
    """Return the output of ``code`` in a process that loads ``library`` as NVML."""
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
    assert "memory_bytes=0" in second, "NVML reports no size for shared memory"


def test_names_and_driver_determine_peer_to_peer_access(library: Path) -> None:
    code = (
        "from notebook_accelerate.utils import get_gpu_info, check_cuda_p2p_ib_support as peers\n"
        "from notebook_accelerate.utils.environment import get_driver_version\n"
        "print(get_gpu_info(), get_driver_version(), peers())"
    )
    names = ["NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4090"]
    assert _run(library, code) == f"{(names, 2)} 535.104.05 False"


def test_a_model_on_several_gpus_with_such_a_driver_is_dispatched_with_a_warning(library: Path) -> None:
    code = (
        "import logging, torch, sys\n"
        "from notebook_accelerate import dispatch_model\n"
        "logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
        "try: dispatch_model(model, MAP)\n"
        "except Exception: pass  # torch has no CUDA here.\n"
    )
    found = _run(library, code.replace("MAP", "{'0': 0, '1': 1}"))
    assert found.startswith("accelerate.big_modeling The driver 535.104.05 of these GPUs")
    assert _run(library, code.replace("MAP", "{'0': 'cpu', '1': 0}")) == ""


def test_utilization_is_read_per_gpu(library: Path) -> None:
    code = (
        "from notebook_accelerate.hardware.nvml import GpuReader\n"
        "reader = GpuReader(); print(*reader.read(), sep='\\n'); reader.close(); print(reader.read())"
    )
    assert _run(library, code).splitlines() == [
        str(nvml.GpuUse(uuid="0abc", percent=40.0, used_bytes=3 << 30, total_bytes=24 << 30)),
        str(nvml.GpuUse(uuid="1abc", percent=41.0, used_bytes=0, total_bytes=0)),
        "[]",
    ]


def test_a_call_that_does_not_return_does_not_delay_a_fork(library: Path) -> None:
    code = (
        "import os, threading, time\n"
        "from notebook_accelerate.hardware import nvml\n"
        "import pynvml\n"
        "pynvml.nvmlSystemGetDriverVersion = lambda: time.sleep(600)\n"
        "threading.Thread(target=nvml.driver_version, daemon=True).start(); time.sleep(0.5)\n"
        "nvml.LOCK_SECONDS = 0.3\n"
        "if (child := os.fork()) == 0: os._exit(0 if nvml.gpus() == [] else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), nvml.count())"
    )
    assert _run(library, code) == "0 None"


@pytest.mark.parametrize("uuid", ["GPU-0ABC", "0abc", "MIG-0abc", "GPU-0abc"])
def test_identities_of_nvml_and_of_torch_compare_equal(uuid: str) -> None:
    assert nvml.bare_uuid(uuid) == "0abc"


def test_the_package_imports_no_pynvml(library: Path) -> None:
    code = (
        "import sys, notebook_accelerate\n"
        "from notebook_accelerate.hardware import nvml\n"
        "from notebook_accelerate.utils import imports\n"
        "print('pynvml' in sys.modules, nvml.count(), 'pynvml' in sys.modules)"
    )
    assert _run(library, code) == "False 2 True"


@pytest.mark.parametrize(("visible", "index"), [("1,0", "1"), ("GPU-1", "1"), ("0", "0"), ("7", "None"), ("", "None")])
def test_the_first_visible_gpu_is_found(library: Path, visible: str, index: str) -> None:
    code = "from notebook_accelerate.hardware.nvml import visible_gpu\ng = visible_gpu(0)\nprint(g and g.index)"
    assert _run(library, code, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID") == index


@pytest.mark.parametrize(("models", "index"), [({}, "None"), ({"FAKE_NVML_NAME": "Tesla T4"}, "1")])
def test_cudas_order_of_different_gpus_is_not_guessed(library: Path, models: dict[str, str], index: str) -> None:
    code = "from notebook_accelerate.hardware.nvml import visible_gpu\ng = visible_gpu(0)\nprint(g and g.index)"
    assert _run(library, code, CUDA_VISIBLE_DEVICES="1", **models) == index


def test_a_slice_has_its_own_memory_and_the_capability_of_its_gpu(library: Path) -> None:
    code = (
        "from notebook_accelerate.hardware.nvml import visible_gpu\n"
        "g = visible_gpu(0)\nprint(g.index, g.memory_bytes >> 30, g.capability, g.uuid, g.pci_bus_id)"
    )
    for visible in ({"CUDA_VISIBLE_DEVICES": "MIG-slice"}, {"CUDA_VISIBLE_DEVICES": "1", "FAKE_NVML_MIG": "yes"}):
        found = _run(library, code, FAKE_NVML_NAME="NVIDIA H100 80GB HBM3", **visible)
        assert found == "1 10 (9, 0) MIG-slice 00000000:51:00.0"
    unknown = "from notebook_accelerate.hardware.nvml import visible_gpu; print(visible_gpu(0))"
    assert _run(library, unknown, CUDA_VISIBLE_DEVICES="MIG-unknown") == "None"


def test_uuids_restrict_the_visible_gpus(library: Path) -> None:
    code = "from notebook_accelerate.hardware.device_counts import _visible_cuda as v; print(v('GPU-1,GPU-0,GPU-9', 2))"
    assert _run(library, code) == "2"


@pytest.mark.skipif(nvml.count() is not None, reason="this machine has an NVIDIA driver")
def test_without_a_driver_there_are_no_gpus() -> None:
    assert (nvml.gpus(), nvml.driver_version()) == ([], None)
    assert get_gpu_info() == ([], 0)
    assert nvml.check_cuda_p2p_ib_support() is True
    assert check_cuda_fp8_capability() is False
