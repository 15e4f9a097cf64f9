"""Conversion between the forms and Accelerate's configuration file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.config_file import ClusterConfig, load_cluster_config
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.hardware import device_table
from notebook_accelerate.widgets.form_draft import FormDraft
from notebook_accelerate.widgets.training_options import DYNAMO_KEYS, TrainingOptions

if TYPE_CHECKING:
    from notebook_accelerate.hardware import HardwareInfo

# Fields of a LaunchConfig that a configuration file contains, too.
_IN_FILE = {
    "num_processes", "mixed_precision", "use_port", "master_addr", "node_rank", "num_nodes", "rdzv_backend", "cpu",
}  # fmt: skip

_ONE_PER_DEVICE = ClusterConfig.num_processes
"""A file's number of processes that was not chosen: a launch from a notebook starts one per accelerator."""


def load(
    path: str | os.PathLike[str], base: LaunchConfig, before: ClusterConfig | None = None
) -> tuple[ClusterConfig, LaunchConfig]:
    """Read a configuration file.

    Args:
        path: YAML or JSON.
        base: The settings that such files do not contain.
        before: The file that was loaded before; its variables are removed.

    Returns:
        The file's contents, including settings that the forms do not contain, and the launch it describes.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It contains unknown keys or values, or is for SageMaker.
    """
    found = load_cluster_config(path)
    arguments = found.to_launch_arguments()
    defaults = LaunchConfig()
    values = {name: arguments.get(name, getattr(defaults, name)) for name in _IN_FILE}
    values["env"] = {**_without(base.env or {}, before), **_variables(found)} or None
    return found, base.changed(**values)


def _variables(found: ClusterConfig) -> dict[str, str]:
    """Return the environment variables of the settings that the forms do not contain."""
    return {name: value for name, value in found.rank_variables().items() if not name.startswith("ACCELERATE_DYNAMO_")}


def _without(env: Mapping[str, str], before: ClusterConfig | None) -> dict[str, str]:
    given = _variables(before) if before is not None else {}
    return {name: value for name, value in env.items() if given.get(name) != value}


def dynamo_plugin(cluster: ClusterConfig) -> TorchDynamoPlugin | None:
    """Return the settings for ``torch.compile`` in a configuration file; None without any."""
    if not cluster.dynamo_config:
        return None
    config = {"dynamo_backend": "NO", **cluster.dynamo_config}
    values: dict[str, Any] = {name: config.get(key) for name, key in DYNAMO_KEYS.items()}
    return TorchDynamoPlugin(**values)


def to_cluster(
    launch: LaunchConfig, training: TrainingOptions, hardware: HardwareInfo, before: ClusterConfig | None = None
) -> ClusterConfig:
    """Return the configuration file for the values of the forms.

    Args:
        launch: The launch.
        training: Options of the training.
        hardware: This machine.
        before: The file that was loaded; its settings that the forms do not contain are kept.
    """
    local = launch.num_processes or max(hardware.count, 1)
    world = local * launch.num_nodes
    accelerator = "cpu" if launch.cpu else hardware.accelerator
    several = launch.num_nodes > 1
    values: dict[str, Any] = {
        "mixed_precision": launch.mixed_precision,
        "use_cpu": launch.cpu,
        "num_processes": world if launch.num_processes else _ONE_PER_DEVICE,
        "machine_rank": launch.node_rank,
        "num_machines": launch.num_nodes,
        "main_process_ip": launch.rendezvous_address[0] if several else None,
        "main_process_port": launch.rendezvous_address[1] if several or launch.use_port != "29500" else None,
        "rdzv_backend": launch.rdzv_backend,
        "dynamo_config": training.dynamo_config(),
        "distributed_type": _distributed_type(accelerator, world, before),
    }
    return replace(before or ClusterConfig.from_dict({}), **values)


def _distributed_type(accelerator: str, world: int, before: ClusterConfig | None) -> Any:
    if before is not None and (before.fsdp_config or before.deepspeed_config or before.megatron_lm_config):
        return before.distributed_type
    return device_table.row(accelerator).distributed_type if world > 1 else DistributedType.NO


def save(path: str | os.PathLike[str], config: ClusterConfig) -> Path:
    """Write a configuration file, YAML or (.json) JSON, and return its path.

    Args:
        path: The file; its folder is created.
        config: The configuration.
    """
    file = Path(path).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    (config.to_json_file if file.suffix == ".json" else config.to_yaml_file)(file)
    return file


def not_in_file(launch: LaunchConfig, training: TrainingOptions, cluster: ClusterConfig) -> list[str]:
    """Return the names of changed settings that such a file cannot contain."""
    names = [name for name in launch.non_default() if name not in _IN_FILE]
    kept = _variables(cluster)
    if "env" in names and not set(launch.env or {}) - set(kept):
        names.remove("env")
    changed = FormDraft(TrainingOptions, training).changed()
    return [*names, *(name for name in changed if name not in {"batch_size", "dynamo_plugin"})]
