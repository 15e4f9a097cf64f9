"""The table of device types, with their backends and the functions to use them.

The rows are data. Methods that need torch import it when they are called.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """A type of device."""

    type: str
    """The name in ``torch.device(type)``."""
    backend: str
    """The backend of process groups for such devices."""
    distributed_type: DistributedType
    """The distributed type of several ranks on such devices, or NO if only one process can use them."""
    communicator: str = "torch"
    """The implementation of collectives: torch (process groups), xla, or none."""
    functions: str = ""
    """The torch module with the functions for such devices. If "", it is ``torch.<type>``."""
    extension: str = ""
    """The module to import before torch knows the type, or "" if torch itself knows it."""
    visible_variables: tuple[str, ...] = ()
    """The environment variables that restrict the devices of a process."""

    def load(self) -> Any:
        """Import the extension of this type, and return torch's module with its functions.

        Returns:
            The module (``torch.cuda``, ``torch.npu``, ...), or None for types without one (xla).

        Raises:
            ImportError: The extension is not installed.
        """
        torch = importlib.import_module("torch")
        if self.extension:
            importlib.import_module(self.extension)
        return getattr(torch, self.functions or self.type, None)

    def device(self, index: int = 0) -> torch.device:
        """Return the device of this type with ``index``. Types with one device per process ignore the index.

        Raises:
            ImportError: The extension is not installed.
            RuntimeError: torch_tpu is installed but found no TPU.
        """
        torch = importlib.import_module("torch")
        self.load()
        if self.type == "xla":
            return xla_device()
        if self.type == "tpu":
            return _tpu_device()
        if self.type in _ONE_PER_PROCESS:
            return torch.device(self.type)  # type: ignore[no-any-return]
        return torch.device(self.type, index)  # type: ignore[no-any-return]

    def select(self, index: int) -> torch.device:
        """Make the device with ``index`` the current device of this process, and return it."""
        device = self.device(index)
        module = self.load()
        _selected[self.type] = index
        if self.type not in _ONE_PER_PROCESS and hasattr(module, "set_device"):
            module.set_device(device)
        return device

    def is_initialized(self) -> bool:
        """Return whether this process uses devices of this type. This imports nothing and starts no driver."""
        if self.functions:
            return self.type in _selected
        function = getattr(getattr(sys.modules.get("torch"), self.type, None), "is_initialized", None)
        return self.type in _selected if function is None else bool(function())

    def call(self, name: str, *args: Any) -> Any:
        """Call the function ``name`` of the module that `load` returns, if it exists.

        Args:
            name: The name of the function: empty_cache, synchronize, device_count, get_rng_state_all, ...
            args: The arguments of the function.

        Returns:
            The function's result, or None if the type has no such function.
        """
        function = getattr(self.load(), name, None)
        return None if function is None else function(*args)

    @property
    def is_numbered(self) -> bool:
        """Whether a process selects its devices by their numbers."""
        return self.type not in _ONE_PER_PROCESS

    @property
    def is_accelerator(self) -> bool:
        """Whether the type is not the CPU."""
        return self.type != "cpu"


def _tpu_device() -> torch.device:
    """Return this process's TPU device, which torch_tpu selects by LOCAL_RANK."""
    torch = importlib.import_module("torch")
    try:
        return torch.device("tpu")  # type: ignore[no-any-return]
    except RuntimeError as error:  # torch_tpu registers the type only if it finds a TPU.
        raise RuntimeError(
            "torch_tpu is installed but found no TPU: it looks for Google's devices in /sys/bus/pci/devices and "
            "for their groups in /dev/vfio; to train on the CPU, pass cpu=True to the launch or to the Accelerator"
        ) from error


def xla_device() -> torch.device:
    """Return this process's XLA device. The first call determines how the machine's devices are divided.

    If there are several ranks on this machine, each has one device. A single rank has all devices, as one virtual
    device (SPMD). The division cannot be changed after torch_xla's runtime has started.
    """
    from notebook_accelerate.hardware import (
        device_counts,
    )  # Import it here, because that module imports this one.

    torch_xla: Any = importlib.import_module("torch_xla")
    runtime: Any = importlib.import_module("torch_xla.runtime")
    ranks = environ.integer("LOCAL_WORLD_SIZE", 1) or 1
    started = importlib.import_module("_XLAC")._xla_runtime_is_initialized()
    if ranks > 1 and not started:
        pjrt: Any = importlib.import_module("torch_xla._internal.pjrt")
        pjrt.initialize_multiprocess(environ.integer("LOCAL_RANK", 0), ranks)
        _check_world(runtime.world_size())
    elif ranks == 1 and not started and device_counts.count("xla") > 1:
        runtime.use_spmd()
    return torch_xla.device()  # type: ignore[no-any-return]


def _check_world(found: int) -> None:
    """Check that torch_xla has connected the ranks. Otherwise, they would train independently, without collectives."""
    world = environ.integer("WORLD_SIZE", 1) or 1
    if found != world:
        kind = environ.text("PJRT_DEVICE") or "XLA"
        raise RuntimeError(
            f"{world} ranks were started, but torch_xla's runtime (PJRT_DEVICE={kind}) has connected {found}. It "
            "connects one process for each chip of a TPU, and none on the CPU. Start one rank, which has all devices "
            "of this machine (SPMD): num_processes=1"
        )


# The types with exactly one device per process, which has no index.
_ONE_PER_PROCESS = frozenset(("cpu", "mps", "tpu", "xla", "hpu", "neuron"))

_selected: dict[str, int] = {}
"""The device of each type that this process has selected. torch.mps and torch.accelerator do not record this."""

# The rows are in order of preference on a machine with several types: specialised devices first, the CPU last.
ROWS: tuple[DeviceRow, ...] = (
    # torch_tpu 0.2 allows only torch itself to call most functions of torch.tpu, and refers others to
    # torch.accelerator.
    DeviceRow(
        type="tpu",
        backend="tpu_dist",
        distributed_type=DistributedType.MULTI_TPU,
        functions="accelerator",
        extension="torch_tpu",
        visible_variables=("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
    ),
    DeviceRow(
        type="xla",
        backend="xla",
        distributed_type=DistributedType.XLA,
        communicator="xla",
        extension="torch_xla",
        visible_variables=("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
    ),
    DeviceRow(
        type="mlu",
        backend="cncl",
        distributed_type=DistributedType.MULTI_MLU,
        extension="torch_mlu",
        visible_variables=("MLU_VISIBLE_DEVICES",),
    ),
    DeviceRow(
        type="sdaa",
        backend="tccl",
        distributed_type=DistributedType.MULTI_SDAA,
        extension="torch_sdaa",
        visible_variables=("SDAA_VISIBLE_DEVICES",),
    ),
    DeviceRow(
        type="musa",
        backend="mccl",
        distributed_type=DistributedType.MULTI_MUSA,
        extension="torch_musa",
        visible_variables=("MUSA_VISIBLE_DEVICES",),
    ),
    DeviceRow(
        type="npu",
        backend="hccl",
        distributed_type=DistributedType.MULTI_NPU,
        extension="torch_npu",
        visible_variables=("ASCEND_RT_VISIBLE_DEVICES",),
    ),
    DeviceRow(
        type="hpu",
        backend="hccl",
        distributed_type=DistributedType.MULTI_HPU,
        extension="habana_frameworks.torch",
        visible_variables=("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
    ),
    DeviceRow(
        type="neuron",
        backend="neuron",
        distributed_type=DistributedType.MULTI_NEURON,
        extension="torch_neuronx",
        visible_variables=("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"),
    ),
    DeviceRow(
        type="cuda",
        backend="nccl",
        distributed_type=DistributedType.MULTI_GPU,
        visible_variables=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    ),
    DeviceRow(
        type="xpu",
        backend="xccl",
        distributed_type=DistributedType.MULTI_XPU,
        visible_variables=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    ),
    DeviceRow(
        type="mps",
        backend="gloo",
        distributed_type=DistributedType.NO,
        communicator="none",
    ),
    DeviceRow(type="cpu", backend="gloo", distributed_type=DistributedType.MULTI_CPU),
)
_BY_TYPE = {entry.type: entry for entry in ROWS}


def select_again() -> None:
    """Make the devices that this process has selected the current devices of the calling thread.

    The current device is a property of a thread, and a new thread starts with the first device. Without this call, a
    thread of rank 1 would create its streams, and a context of half a gigabyte, on the device of rank 0.
    """
    for name, index in list(_selected.items()):
        entry = _BY_TYPE[name]
        if name not in _ONE_PER_PROCESS and entry.is_initialized():
            entry.select(index)


def accelerator_in_use() -> bool:
    """Return whether this process uses an accelerator. This imports nothing and starts no driver."""
    return any(entry.is_accelerator and entry.is_initialized() for entry in ROWS)


def row(device_type: str) -> DeviceRow:
    """Return the row of a device type.

    Args:
        device_type: The name of the type, as in ``torch.device(...).type``.

    Raises:
        ValueError: The type is unknown. The message lists all types.
    """
    if device_type not in _BY_TYPE:
        raise ValueError(f"device type {device_type!r} is not known; pass one of {', '.join(_BY_TYPE)}")
    return _BY_TYPE[device_type]
