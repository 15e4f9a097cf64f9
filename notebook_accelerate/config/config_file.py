"""The configuration file of Accelerate's command line: YAML or JSON, read, written, and translated to variables."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import yaml

from notebook_accelerate.config import constants, environ
from notebook_accelerate.config.deepspeed_config import check_launched_fields
from notebook_accelerate.config.enums import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    PrecisionType,
    SageMakerDistributedType,
)
from notebook_accelerate.config.plain_values import check_one_of
from notebook_accelerate.config.settings import metadata, setting, settings_of


def cache_folder() -> Path:
    """Return the folder of the default configuration file: ``$HF_HOME/accelerate``, or below ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME") or str(Path(cache) / "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "accelerate"


cache_dir = str(cache_folder())
default_json_config_file = str(Path(cache_dir) / "default_config.yaml")
default_yaml_config_file = str(Path(cache_dir) / "default_config.yaml")
default_config_file = default_yaml_config_file


@dataclass
class BaseConfig:
    """The fields of every configuration file."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str = field(metadata=metadata(launch="mixed_precision"))
    use_cpu: bool = field(metadata=metadata(launch="cpu"))
    debug: bool

    distributed_types: ClassVar[type[Enum]] = DistributedType

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        self.distributed_type = type(self).distributed_types(self.distributed_type)  # type: ignore[assignment]
        # YAML reads a bare `no` as False.
        precision = str(self.mixed_precision).lower()
        self.mixed_precision = "no" if precision in {"false", "none"} else precision
        check_one_of("mixed_precision", self.mixed_precision, PrecisionType.list())

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a file: enums by value, without fields that are None or empty.

        A number of processes that was not chosen, -1, is left out too: Accelerate's launcher refuses it in a file.
        """
        values = {name: getattr(value, "value", value) for name, value in dataclasses.asdict(self).items()}
        if values.get("num_processes") == -1:
            del values["num_processes"]
        return {name: value for name, value in values.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the fields that older files do not have.

        Args:
            config_dict: Contents of a file.

        Returns:
            Arguments of the class.
        """
        defaults = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "no"}
        config = {**defaults, "use_cpu": False, "debug": False, **config_dict}
        if "fp16" in config:  # before mixed_precision existed
            config["mixed_precision"] = "fp16" if config.pop("fp16") else "no"
        backend = config.pop("dynamo_backend", None)
        if backend not in {None, "NO"}:
            config["dynamo_config"] = {"dynamo_backend": backend, **(config.get("dynamo_config") or {})}
        return config

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], source: object = "the configuration") -> Any:
        """Create a configuration from the contents of a file.

        Args:
            config_dict: The contents.
            source: Name of the file, for messages.

        Returns:
            The configuration.

        Raises:
            ValueError: Unknown or missing keys.
        """
        config = cls.process_config(config_dict)
        known = {entry.name for entry in dataclasses.fields(cls)}
        if unknown := sorted(config.keys() - known):
            raise ValueError(f"{source} has unknown keys: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**config)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str] | None = None) -> Any:
        """Read a configuration from a JSON file.

        Args:
            json_file: Its path; None: the default file.
        """
        return cls._from_file(default_json_config_file if json_file is None else json_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> Any:
        """Read a configuration from a YAML file.

        Args:
            yaml_file: Its path; None: the default file.
        """
        return cls._from_file(default_yaml_config_file if yaml_file is None else yaml_file)

    @classmethod
    def _from_file(cls, file: str | os.PathLike[str]) -> Any:
        return cls.from_dict(_contents(Path(file)), file)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON.

        Args:
            json_file: The path.
        """
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the configuration as YAML.

        Args:
            yaml_file: The path.
        """
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")


# Sections of a cluster's configuration; empty where a file does not have them.
_SECTIONS = (
    "fp8_config",
    "deepspeed_config",
    "fsdp_config",
    "parallelism_config",
    "megatron_lm_config",
    "mpirun_config",
    "dynamo_config",
)


@dataclass
class ClusterConfig(BaseConfig):
    """Configuration of a training on one or several machines."""

    num_processes: int = setting(-1, launch="num_processes")
    """Total number of ranks on all machines."""
    machine_rank: int = setting(0, launch="node_rank")
    num_machines: int = setting(1, launch="num_nodes")
    gpu_ids: str | None = None
    main_process_ip: str | None = setting(launch="master_addr")
    main_process_port: int | None = setting(launch="use_port")
    rdzv_backend: str | None = setting("static", launch="rdzv_backend")
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _SECTIONS:
            if getattr(self, name) is None:
                setattr(self, name, {})
        if (self.deepspeed_config or {}).get("deepspeed_config_file") not in {None, "none"}:
            check_launched_fields(self.deepspeed_config or {})
        # YAML reads a bare `no` as False here too.
        self.downcast_bf16 = self.downcast_bf16 not in {False, None, "no", "false"}

    def to_launch_arguments(self) -> dict[str, Any]:
        """Return these settings as arguments of ``LaunchConfig``, without those that keep its default.

        Raises:
            ValueError: The number of processes is not a multiple of the number of machines.
        """
        machines = max(self.num_machines, 1)
        if self.num_processes > 0 and self.num_processes % machines:
            raise ValueError(
                f"num_processes={self.num_processes} is not a multiple of num_machines={machines}; write the number of "
                f"all processes, such as num_processes: {machines * (self.num_processes // machines + 1)}"
            )
        same = settings_of(ClusterConfig).values()
        given: dict[str, Any] = {each.launch: getattr(self, each.name) for each in same if each.launch} | {
            "num_processes": self.num_processes // machines if self.num_processes > 0 else None,
            "use_port": str(self.main_process_port) if self.main_process_port else None,
            "num_nodes": machines,
            "env": self.rank_variables() or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def rank_variables(self) -> dict[str, str]:
        """Return the environment variables of the settings that ``LaunchConfig`` has no field for."""
        variables = self.to_environment()
        for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
            variables.pop(name, None)
        if self.gpu_ids not in {None, "all"}:
            variables["CUDA_VISIBLE_DEVICES"] = str(self.gpu_ids)
        return variables

    def to_environment(self) -> dict[str, str]:
        """Return these settings as environment variables of a rank."""
        values: dict[str, Any] = {
            "ACCELERATE_MIXED_PRECISION": self.mixed_precision,
            "ACCELERATE_USE_CPU": "True" if self.use_cpu else None,
            "ACCELERATE_DEBUG_MODE": self.debug or None,
            "ACCELERATE_CPU_AFFINITY": "1" if self.enable_cpu_affinity else None,
            "ACCELERATE_DOWNCAST_BF16": self.downcast_bf16 or None,
            **_dynamo_variables(self.dynamo_config),
            **_fsdp_variables(self.fsdp_config),
            **_deepspeed_variables(self.deepspeed_config),
            **_with_switch("ACCELERATE_USE_PARALLELISM_CONFIG", _parallelism_variables(self.parallelism_config)),
            **_with_switch("ACCELERATE_USE_MEGATRON_LM", _capitalized(_upper(self.megatron_lm_config))),
            **_capitalized(_fp8_variables(self.fp8_config)),
        }
        return {name: environ.as_text(value) for name, value in values.items() if value is not None}


@dataclass
class SageMakerConfig(BaseConfig):
    """Configuration of a training on Amazon SageMaker."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = constants.SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = constants.SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = constants.SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False

    distributed_types: ClassVar[type[Enum]] = SageMakerDistributedType


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> ClusterConfig | SageMakerConfig:
    """Read a configuration file.

    Args:
        config_file: Path of a YAML or JSON file; None: the default file.

    Returns:
        The configuration.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has unknown keys or values.
    """
    path = Path(default_config_file if config_file is None else config_file)
    if not path.is_file():
        raise FileNotFoundError(
            f"the configuration file {path} does not exist; write one with `notebook-accelerate config`, or "
            "write_basic_config(save_location=...)"
        )
    values = _contents(path)
    sagemaker = values.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    loaded: ClusterConfig | SageMakerConfig = (SageMakerConfig if sagemaker else ClusterConfig).from_dict(values, path)
    return loaded


def load_cluster_config(config_file: str | os.PathLike[str] | None) -> ClusterConfig:
    """Read a configuration file of machines.

    ``distributed_type: NO`` means one process, whatever the file's number of processes is, as it does for Accelerate.

    Args:
        config_file: Path of a YAML or JSON file; None: the default file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has unknown keys or values, or is for SageMaker.
    """
    found = load_config_from_file(config_file)
    if not isinstance(found, ClusterConfig):
        raise ValueError(
            f"{config_file or default_config_file} configures Amazon SageMaker, which is not launched from a notebook; "
            "load a file with compute_environment: LOCAL_MACHINE"
        )
    stated = "distributed_type" in _contents(Path(config_file or default_config_file))
    if stated and found.distributed_type == DistributedType.NO and found.num_machines == 1:
        found.num_processes = min(found.num_processes, 1)
    return found


def _contents(path: Path) -> dict[str, Any]:
    # JSON is a subset of YAML, so both load, independent of the file's name.
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def _upper(config: Mapping[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{name.upper()}": _joined(value) for name, value in (config or {}).items()}


def _joined(value: Any) -> Any:
    return ",".join(str(item) for item in value) if isinstance(value, (list, tuple)) else value


def _capitalized(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with booleans as "True" and "False"; Accelerate writes other sections in lower case."""
    return {name: str(value) if isinstance(value, bool) else value for name, value in values.items()}


def _with_switch(switch: str, values: dict[str, Any]) -> dict[str, Any]:
    return {switch: True, **values} if values else {}


def _dynamo_variables(config: Mapping[str, Any] | None) -> dict[str, Any]:
    values = _capitalized(_upper(config, "ACCELERATE_"))
    backend = str(values.get("ACCELERATE_DYNAMO_BACKEND", "NO")).upper()
    return values | {"ACCELERATE_DYNAMO_BACKEND": DynamoBackend(backend).value} if values else {}


def _fsdp_variables(config: Mapping[str, Any] | None) -> dict[str, Any]:
    renamed = {
        "FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "FSDP_BACKWARD_PREFETCH_POLICY": "FSDP_BACKWARD_PREFETCH",
    }
    values = {renamed.get(name, name): value for name, value in _upper(config).items()}
    return _with_switch("ACCELERATE_USE_FSDP", values)


def _deepspeed_variables(config: Mapping[str, Any] | None) -> dict[str, Any]:
    renamed = {
        "GRADIENT_ACCUMULATION_STEPS": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "GRADIENT_CLIPPING": "ACCELERATE_GRADIENT_CLIPPING",
        "ZERO3_INIT_FLAG": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "DEEPSPEED_CONFIG_FILE": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "DEEPSPEED_MOE_LAYER_CLS_NAMES": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    }
    values = {renamed.get(name, f"ACCELERATE_DEEPSPEED_{name}"): value for name, value in _upper(config).items()}
    return _with_switch("ACCELERATE_USE_DEEPSPEED", values)


def _parallelism_variables(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of the section, without settings of dimensions that are not split."""
    values = _capitalized(_upper(config))
    for size, settings in _OF_A_DIMENSION.items():
        if int(values.get(size) or 1) <= 1:
            values = {name: value for name, value in values.items() if name not in settings}
    return values


_OF_A_DIMENSION = {
    "PARALLELISM_CONFIG_CP_SIZE": ("PARALLELISM_CONFIG_CP_COMM_STRATEGY",),
    "PARALLELISM_CONFIG_SP_SIZE": (
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
    ),
}


def _fp8_variables(config: Mapping[str, Any] | None) -> dict[str, Any]:
    values = _upper(config, "ACCELERATE_FP8_")
    if "ACCELERATE_FP8_AMAX_HISTORY_LENGTH" in values:
        values["ACCELERATE_FP8_AMAX_HISTORY_LEN"] = values.pop("ACCELERATE_FP8_AMAX_HISTORY_LENGTH")
    formats = (config or {}).get("override_linear_precision")
    if isinstance(formats, (list, tuple)):
        del values["ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION"]
        values |= {
            f"ACCELERATE_FP8_OVERRIDE_{name}": str(value)
            for name, value in zip(("FPROP", "DGRAD", "WGRAD"), formats, strict=True)
        }
    return values
