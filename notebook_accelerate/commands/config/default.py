"""Writes a configuration file for this machine's devices."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Literal

from notebook_accelerate.config.config_file import ClusterConfig, default_config_file
from notebook_accelerate.config.enums import ComputeEnvironment, DistributedType, PrecisionType
from notebook_accelerate.hardware import device_table
from notebook_accelerate.hardware.detection import HardwareInfo, detect


def write_basic_config(
    mixed_precision: str = "no", save_location: str = default_config_file, use_xpu: bool | None = None
) -> Path | Literal[False]:
    """Write a configuration file for all devices of this machine, without asking questions.

    Args:
        mixed_precision: no, fp16, bf16 or fp8.
        save_location: The path of the file, which is JSON if it ends in .json, and otherwise YAML.
        use_xpu: Deprecated, and has no effect, because Intel GPUs are used if there are any.

    Returns:
        The path, or False if the file already exists. An existing file is not changed.

    Raises:
        ValueError: The precision is not allowed.
    """
    if use_xpu is not None:
        warnings.warn("use_xpu is deprecated: omit it; Intel GPUs are used if there are any", FutureWarning, 2)
    if str(mixed_precision).lower() not in PrecisionType:
        allowed = ", ".join(PrecisionType.list())
        raise ValueError(f"`mixed_precision` should be one of {allowed}; received {mixed_precision!r}")
    path = Path(save_location)
    if path.exists():
        sys.stdout.write(f"{path} exists and was not changed; pass another save_location, or remove it\n")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    config = _basic_config(str(mixed_precision).lower(), detect())
    (config.to_json_file if path.suffix == ".json" else config.to_yaml_file)(path)
    return path


def _basic_config(mixed_precision: str, hardware: HardwareInfo) -> ClusterConfig:
    several = hardware.count > 1
    row = device_table.row(hardware.accelerator)
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=row.distributed_type if several else DistributedType.NO,
        mixed_precision=mixed_precision,
        use_cpu=not row.is_accelerator,
        debug=False,
        num_processes=max(hardware.count, 1),
    )
