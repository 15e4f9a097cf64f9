"""TPUs for torch_tpu, counted without its runtime: on emulated buses, and with Colab's and Kaggle's variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accelerate import hardware
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.hardware import device_counts, device_table, tpu_environment
from notebook_accelerate.strategies import STRATEGIES
from notebook_accelerate.strategies.ddp_strategy import DDPStrategy
from notebook_accelerate.utils import imports

COLAB = {"COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
KAGGLE = {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v5e-8", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"}


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that emulates the empty PCI bus of a machine on which torch_tpu is installed."""
    for name in ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_counts, "_installed", lambda name: name == "torch_tpu")
    for constant, name in (("_BUS", "devices"), ("_EXPOSED", "vfio")):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(tpu_environment, constant, tmp_path / name)
    device_counts._cached_count.cache_clear()
    yield tmp_path
    device_counts._cached_count.cache_clear()


def _add(bus: Path, number: int, vendor: str = "0x1ae0", device: str = "0x0063", *, exposed: bool = True) -> None:
    folder, group = bus / "devices" / f"0000:00:{number:02x}.0", bus / "groups" / str(number)
    folder.mkdir()
    group.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")
    (folder / "iommu_group").symlink_to(group)
    if exposed:
        (bus / "vfio" / str(number)).touch()


def test_devices_on_the_bus_are_counted_like_by_torch_tpu(bus: Path) -> None:
    for number in range(4):
        _add(bus, number, device="0x006f")
    _add(bus, 4, device="0x006f", exposed=False)
    _add(bus, 5, vendor="0x10de")
    _add(bus, 6, device="0x1234")
    assert tpu_environment.pci_generations() == ["v6e"] * 4
    assert device_counts.count("tpu") == 4
    found = hardware.detect()
    assert (found.accelerator, found.count, found.tpu) == ("tpu", 4, "v6e")


@pytest.mark.parametrize(("variables", "count", "host"), [(COLAB, 1, "colab"), (KAGGLE, 8, "kaggle")])
def test_variables_of_colab_and_kaggle_are_recognised(
    variables: dict[str, str], count: int, host: str, bus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = hardware.detect()
    assert (found.accelerator, found.count, found.tpu, found.host) == ("tpu", count, "v5e", host)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    assert device_counts.count("tpu") == 1


def test_without_torch_tpu_a_tpu_is_not_counted(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(bus, 0)
    monkeypatch.setattr(device_counts, "_installed", lambda _: False)
    assert device_counts.count("tpu") == 0
    assert hardware.detect().tpu == ""


def test_torch_tpu_takes_precedence_over_torch_xla(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_counts, "_installed", lambda name: name in {"torch_tpu", "torch_xla"})
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")
    assert hardware.detect().accelerator == "tpu"


@pytest.mark.parametrize(
    ("generation", "devices", "counts"),
    [
        ("v5e", 1, [1]),
        ("v5e", 8, [1, 4, 8]),
        ("v6e", 7, [1, 4]),
        ("v4", 4, [1, 2, 4]),
        ("v7", 8, [2, 4, 8]),
        ("", 8, []),
    ],
)
def test_only_some_numbers_of_processes_form_a_mesh(generation: str, devices: int, counts: list[int]) -> None:
    assert tpu_environment.process_counts(generation, devices) == counts


@pytest.mark.parametrize(
    ("text", "name"), [("v5litepod-8", "v5e"), ("v5p-8", "v5p"), ("v6e-4", "v6e"), ("", ""), ("none", "")]
)
def test_the_generation_is_part_of_the_type(text: str, name: str) -> None:
    assert tpu_environment.generation({"TPU_ACCELERATOR_TYPE": text}) == name
    assert tpu_environment.generation({"TPU_ACCELERATOR_TYPE": text}, ["v7"]) == "v7"


def test_tpus_have_a_row_and_a_strategy() -> None:
    row = device_table.row("tpu")
    assert (row.backend, row.communicator, row.distributed_type) == ("tpu_dist", "torch", DistributedType.MULTI_TPU)
    assert STRATEGIES[DistributedType.MULTI_TPU.value] is DDPStrategy
    assert not row.is_initialized()


def test_tpus_compute_in_bf16(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not imports.is_torch_tpu_available()
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    assert imports.is_torch_tpu_available()
    assert imports.is_bf16_available()
    assert not imports.is_bf16_available(ignore_tpu=True)
