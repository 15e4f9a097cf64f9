"""Devices are detected without torch and without a device context, for each setting of the environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from notebook_accelerate.hardware import detect, detection, device_counts, device_table, versions
from notebook_accelerate.hardware.versions import TorchBuild


def _run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_detection_does_not_import_torch() -> None:
    code = """
        import sys
        from notebook_accelerate.hardware import detect
        detect()
        print("torch" in sys.modules)
    """
    assert _run(code) == "False"


def test_the_machine_has_cores_memory_and_a_loopback() -> None:
    found = detect()
    assert 1 <= found.cpu_count <= (os.cpu_count() or 1)
    assert found.memory_bytes > 2**28
    assert found.loopback is not None
    assert (found.count == 0) == (found.accelerator == "cpu")


def test_only_usable_cores_count() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this platform has no affinity")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert detection.cpu_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_memory_of_this_machine_is_plausible() -> None:
    total, available = detection.machine_memory()
    assert 0 < available <= total
    assert total >= 1 << 28


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the root of the control groups. This process is in slice/service (v2) and in jobs/one (v1)."""
    (tmp_path / "own").write_text("4:cpu,memory:/jobs/one\n0::/slice/service\n")
    monkeypatch.setattr(detection, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(detection, "_GROUPS", tmp_path / "groups")
    for folder in ("slice/service", "memory/jobs/one"):
        (tmp_path / "groups" / folder).mkdir(parents=True)
    return tmp_path / "groups"


def _write_files(folder: Path, **values: object) -> None:
    for name, value in values.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_the_cores_are_limited_by_the_nearest_control_group(groups: Path) -> None:
    _write_files(groups / "slice", cpu_max="150000 100000")
    assert detection._container_cores() == 2
    _write_files(groups / "slice", cpu_max="max 100000")
    assert detection._container_cores() is None


def test_the_memory_is_the_remainder_of_all_control_groups(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "system_memory", lambda: (1000, 600))
    service = groups / "slice" / "service"
    _write_files(service, memory_max=800, memory_current=700, memory_stat="file 500\ninactive_file 400")
    assert detection.machine_memory() == (800, 500), "the page cache counts as free"
    _write_files(groups / "slice", memory_max=500, memory_current=450)
    assert detection.machine_memory() == (500, 50), "the smaller limit of the parent applies"
    _write_files(groups / "slice", memory_max="max", memory_current=900)
    assert detection.machine_memory() == (800, 500)
    _write_files(service, memory_max=800, memory_current=900)
    assert detection.machine_memory() == (800, 300)


def test_groups_of_version_1_limit_the_memory_too(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "system_memory", lambda: (1000, 600))
    _write_files(groups / "memory" / "jobs" / "one", memory_limit_in_bytes=2**62, memory_usage_in_bytes=40)
    assert detection.machine_memory() == (1000, 600)
    _write_files(groups / "memory", memory_limit_in_bytes=300, memory_usage_in_bytes=40)
    assert detection.machine_memory() == (300, 260)


def test_without_control_groups_the_memory_is_the_machines(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "system_memory", lambda: (1000, 600))
    monkeypatch.setattr(detection, "_OWN_GROUPS", groups / "absent")
    assert detection.machine_memory() == (1000, 600)


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"COLAB_RELEASE_TAG": "release"}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "kaggle"),
        ({"VSCODE_PID": "1"}, "terminal"),
        ({}, "terminal"),
    ],
)
def test_the_host_is_detected_from_variables(variables: dict[str, str], host: str) -> None:
    assert _run("from notebook_accelerate.hardware import detect; print(detect().host)", **variables) == host


def test_a_kernel_is_detected_by_its_shell() -> None:
    code = """
        import types
        import IPython
        shell = types.SimpleNamespace(kernel=object(), user_ns={})
        IPython.get_ipython = lambda: shell
        from notebook_accelerate.hardware import detect
        print(detect().host, end=" ")
        shell.user_ns["__vsc_ipynb_file__"] = "a.ipynb"
        print(detect().host)
    """
    assert _run(code) == "jupyter vscode"


def test_the_build_of_torch_is_read_from_its_file() -> None:
    import torch

    outside = _run("from notebook_accelerate.hardware import versions; print(versions.torch_build())")
    assert outside == str(versions.torch_build())
    assert versions.torch_build().version == str(torch.__version__)
    assert versions.torch_build().cuda == torch.version.cuda


@pytest.mark.parametrize(
    ("variable", "physical", "count"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("-1", 4, 0),
        ("0,2", 4, 2),
        ("3,9,1", 4, 1),  # The list ends at the first invalid entry.
        ("1,-1,2", 4, 1),
        ("0,0", 4, 0),  # The driver refuses a list that names a device twice.
        ("abc", 4, 0),
        ("MIG-1234", 1, 1),
    ],
)
def test_visible_gpus_are_counted_like_by_the_driver(variable: str | None, physical: int, count: int) -> None:
    assert device_counts._visible_cuda(variable, physical) == count


@pytest.mark.parametrize(("value", "count"), [(None, 8), ("all", 8), ("0,1", 2), ("0-3,6", 5), ("", 0), ("9", 0)])
def test_lists_of_other_vendors_have_ranges(value: str | None, count: int) -> None:
    assert device_counts._count_listed(value, 8) == count


def test_an_accelerator_that_torch_was_not_built_for_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_counts, "_nvidia_driver", lambda: True)
    monkeypatch.setattr(device_counts.nvml, "count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(versions, "torch_build", lambda: TorchBuild(version="2.9.0"))
    assert device_counts.COUNTERS["cuda"]({}) == 0
    monkeypatch.setattr(versions, "torch_build", lambda: TorchBuild(version="2.9.0", cuda="12.8"))
    assert device_counts.COUNTERS["cuda"]({}) == 2


def test_a_child_process_counts_devices() -> None:
    assert device_counts._probe("print('noise'); print(3)", {}) == 3
    assert device_counts._probe("raise SystemExit(1)", {}) == 0
    assert device_counts._probe("print('nothing')", {}) == 0


def test_xla_on_the_cpu_counts_its_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_counts, "_installed", lambda name: name == "torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    device_counts._cached_count.cache_clear()
    assert device_counts.count("xla") == 4
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    assert device_counts.count("xla") == 2  # After a variable has changed, devices are counted again.
    device_counts._cached_count.cache_clear()


@pytest.mark.parametrize(
    ("variables", "chips"),
    [
        ({"COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, 1),
        ({"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v5e-8"}, 8),
        ({"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}, 8),
        ({"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v5litepod-64"}, 8),
        ({"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v6e-4"}, 4),
        ({"TPU_ACCELERATOR_TYPE": "v3-8"}, 4),
        ({"TPU_ACCELERATOR_TYPE": "v4-32"}, 4),
        ({"TPU_ACCELERATOR_TYPE": "v5p-8"}, 4),
        ({"TPU_ACCELERATOR_TYPE": "v5e-8", "TPU_VISIBLE_CHIPS": "0,1"}, 2),
        ({"COLAB_TPU_1VM": ""}, 0),
        ({"TPU_ACCELERATOR_TYPE": "none"}, 0),
    ],
    ids=str,
)
def test_chips_are_counted_from_the_variables_of_colab_and_kaggle(
    variables: dict[str, str], chips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_counts, "_installed", lambda name: name == "torch_xla")
    monkeypatch.setattr(device_counts, "_paths", lambda _pattern: [])
    for name in ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    device_counts._cached_count.cache_clear()
    assert device_counts.count("xla") == chips
    device_counts._cached_count.cache_clear()


def test_every_type_of_device_has_a_row_and_a_counter() -> None:
    types = [row.type for row in device_table.ROWS]
    assert sorted(types) == sorted([*device_counts.COUNTERS, "cpu"])
    assert types[-1] == "cpu"
    with pytest.raises(ValueError, match=r"device type 'gpu' is not known; pass one of .*cuda.*cpu"):
        device_table.row("gpu")


def test_the_row_of_the_cpu_creates_its_device() -> None:
    import torch

    row = device_table.row("cpu")
    assert row.select(3) == torch.device("cpu")
    assert row.call("device_count") == torch.cpu.device_count()
    assert row.call("no_such_function") is None
    assert (row.backend, row.communicator, row.is_accelerator) == ("gloo", "torch", False)
