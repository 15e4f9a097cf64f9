"""Checks for packages, devices and precisions, which do not import large packages.

The package itself uses `hardware.versions` and `hardware.device_counts` instead.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from packaging.version import parse

from notebook_accelerate._lazy import reexport
from notebook_accelerate.config import environ
from notebook_accelerate.hardware import device_counts, device_table, nvml
from notebook_accelerate.hardware.versions import (
    installed_version,
    is_package,
    is_torch_version,
    is_torchao_available as is_torchao_available,
    torch_build,
)

reexport(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


# ---- packages


def _package(name: str, distribution: str | None = None, minimum: str | None = None) -> Callable[[], bool]:
    """Return a function that checks for a package with the arguments of `is_package`."""

    def check() -> bool:
        return is_package(name, distribution, minimum)

    check.__doc__ = f"Return whether {distribution or name}{f' {minimum} or later' if minimum else ''} is installed."
    return check


is_aim_available = _package("aim")
is_amdsmi_available = _package("amdsmi")
is_boto3_available = _package("boto3")
is_clearml_available = _package("clearml")
is_comet_ml_available = _package("comet_ml")
is_datasets_available = _package("datasets")
is_deepspeed_available = _package("deepspeed")
is_dvclive_available = _package("dvclive")
is_import_timer_available = _package("import_timer")
is_lomo_available = _package("lomo_optim")
is_matplotlib_available = _package("matplotlib")
is_mlflow_available = _package("mlflow")
is_msamp_available = _package("msamp", "ms-amp")
is_pandas_available = _package("pandas")
is_peft_available = _package("peft")
is_pynvml_available = _package("pynvml")
is_pytest_available = _package("pytest")
is_sagemaker_available = _package("sagemaker")
is_schedulefree_available = _package("schedulefree")
is_swanlab_available = _package("swanlab")
is_timm_available = _package("timm")
is_torchdata_available = _package("torchdata")
is_torchdata_stateful_dataloader_available = _package("torchdata", minimum="0.8.0")
is_torchvision_available = _package("torchvision")
is_tqdm_available = _package("tqdm")
is_trackio_available = _package("trackio")
is_transformers_available = _package("transformers")
is_triton_available = _package("triton")
is_wandb_available = _package("wandb")

# The checks are named like plain functions, so that functions that refer to them can be pickled.
for _name, _check in list(globals().items()):
    if _name.startswith("is_") and _check.__module__ == __name__:
        _check.__name__ = _check.__qualname__ = _name


def is_transformer_engine_available() -> bool:
    """Return whether Transformer Engine is installed (on Gaudi, Intel's version of it)."""
    return is_package("intel_transformer_engine" if is_hpu_available() else "transformer_engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether Transformer Engine is installed and the GPU supports MXFP8 (compute capability 10.0)."""
    return is_transformer_engine_available() and any(gpu.capability >= (10, 0) for gpu in nvml.gpus())


def is_pippy_available() -> bool:
    """Return whether torch has pipeline parallelism, which is always True."""
    return True


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed.

    Args:
        min_version: The minimum version that counts as available.
    """
    return is_package("bitsandbytes", minimum=min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether a version of bitsandbytes that supports 4-bit weights is installed."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether a version of bitsandbytes that can store 8-bit weights on disk is installed."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes supports devices other than NVIDIA GPUs."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is installed and requested (ACCELERATE_USE_MEGATRON_LM)."""
    return environ.flag("ACCELERATE_USE_MEGATRON_LM") and is_package("megatron", "megatron-core")


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard or tensorboardX is installed."""
    return is_package("tensorboard") or is_package("tensorboardX")


def is_rich_available() -> bool:
    """Return whether rich is installed and requested (ACCELERATE_ENABLE_RICH)."""
    return is_package("rich") and environ.flag("ACCELERATE_ENABLE_RICH")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy is installed.

    Args:
        min_version: The minimum version that counts as available.
    """
    return is_package("numpy", minimum=min_version)


def is_weights_only_available() -> bool:
    """Return whether ``torch.load(weights_only=True)`` accepts a list of safe classes, which is always True."""
    return True


# ---- devices


def _usable(device_type: str, check_device: bool = False) -> bool:
    """Return whether there is a device of this type. If ``check_device``, also ask torch, which may initialise it."""
    if not device_counts.count(device_type):
        return False
    return not check_device or bool(device_table.row(device_type).call("is_available"))


def is_cuda_available() -> bool:
    """Return whether there is a CUDA (or ROCm) GPU, without initialising CUDA."""
    return _usable("cuda")


def is_rocm_available() -> bool:
    """Return whether torch is built for ROCm and there is an AMD GPU."""
    return bool(torch_build().hip) and _usable("cuda")


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an Apple GPU.

    Args:
        min_version: The minimum version of torch.
    """
    return is_torch_version(">=", min_version) and _usable("mps")


def is_mlu_available(check_device: bool = False) -> bool:
    """Return whether torch_mlu is installed and there is an MLU.

    Args:
        check_device: Whether to also call torch, which may initialise the device.
    """
    return _usable("mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Return whether torch_musa is installed and there is a MUSA GPU.

    Args:
        check_device: Whether to also call torch, which may initialise the device.
    """
    return _usable("musa", check_device)


def is_npu_available(check_device: bool = False) -> bool:
    """Return whether torch_npu is installed and there is an NPU.

    Args:
        check_device: Whether to also call torch, which may initialise the device.
    """
    return _usable("npu", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Return whether torch_sdaa is installed and there is an SDAA device.

    Args:
        check_device: Whether to also call torch, which may initialise the device.
    """
    return _usable("sdaa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Return whether torch_neuronx is installed and there is a Neuron core.

    Args:
        check_device: Whether to also call torch, which may initialise the device.
    """
    return _usable("neuron", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Habana's torch bridge is installed and there is an HPU.

    Args:
        init_hccl: Whether to also import the bridge's backend for process groups.
    """
    if not _usable("hpu"):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Return whether the HPU is a first-generation Gaudi."""
    if not is_hpu_available():
        return False
    device_type: Any = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(device_type._get_device_type() == device_type.synDeviceType.synDeviceGaudi)


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether torch is built for Intel GPUs and there is one.

    Args:
        check_device: Whether to also call torch, which may initialise the device.
    """
    return _usable("xpu", check_device)


def is_xccl_available() -> bool:
    """Return whether torch has the backend for process groups of Intel GPUs."""
    return bool(torch_build().xpu) and bool(importlib.import_module("torch.distributed").is_xccl_available())


def is_torch_distributed_available() -> bool:
    """Return whether torch has process groups."""
    return bool(importlib.import_module("torch.distributed").is_available())


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and not disabled (USE_TORCH_XLA=false).

    Args:
        check_is_tpu: Whether to also require a TPU.
        check_is_gpu: Whether to also require a GPU.

    Raises:
        ValueError: Both arguments are True.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu cannot both be True; pass one of them")
    if not environ.flag("USE_TORCH_XLA", default=True) or not is_package("torch_xla"):
        return False
    runtime = (environ.text("PJRT_DEVICE") or "").upper()
    if check_is_gpu:
        return runtime in {"CUDA", "GPU", "ROCM"}
    if check_is_tpu:
        return runtime == "TPU" or (not runtime and device_counts.count("xla") > 0)
    return True


def is_torch_tpu_available() -> bool:
    """Return whether torch_tpu is installed and there is a TPU, without starting its runtime."""
    return _usable("tpu")


# ---- precisions


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this machine's device supports bf16. NVIDIA GPUs before Ampere compute it in fp32.

    Args:
        ignore_tpu: Whether to ignore the machine's TPU.
    """
    if is_torch_tpu_available() or is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return True


def is_fp16_available() -> bool:
    """Return whether this machine's device supports fp16."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Return whether a library for fp8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


# ---- older names


def is_ipex_available() -> bool:
    """Deprecated: return whether Intel's extension for PyTorch is installed, in the version torch needs."""
    _deprecated("is_ipex_available", "is_xpu_available(): torch itself drives Intel GPUs")
    installed, torch_version = installed_version("intel_extension_for_pytorch"), torch_build().version
    if installed is None or torch_version is None:
        return False
    return parse(installed).release[:2] == parse(torch_version).release[:2]


def is_tpu_available(check_device: bool = True) -> bool:
    """Deprecated: return whether torch_xla is installed and there is a TPU.

    Args:
        check_device: Whether to require a TPU. Otherwise an installed torch_xla suffices.
    """
    _deprecated("is_tpu_available", "is_torch_xla_available(check_is_tpu=True)")
    return is_torch_xla_available(check_is_tpu=check_device)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated: write {instead}", FutureWarning, stacklevel=3)


# ---- decorators


def torchao_required(func: _F) -> _F:
    """Make a function raise ImportError if torchao is not installed.

    Args:
        func: The function to wrap.
    """
    return _required(func, is_torchao_available, "torchao", "pip install 'torchao>=0.6.1'")


def deepspeed_required(func: _F) -> _F:
    """Make a function raise ImportError if DeepSpeed is not installed.

    Args:
        func: The function to wrap.
    """
    return _required(func, is_deepspeed_available, "DeepSpeed", "pip install deepspeed")


def _required(func: _F, available: Callable[[], bool], name: str, install: str) -> _F:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not available():
            raise ImportError(f"{func.__name__} needs {name}, which is not installed: {install}")
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
