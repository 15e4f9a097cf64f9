"""Reads and writes the configuration file of Accelerate's command line, and converts it to environment variables."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import yaml

from notebook_accelerate.config import constants, environ
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin, check_launched_fields
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    PrecisionType,
    SageMakerDistributedType,
)
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.config.low_precision import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.config.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from notebook_accelerate.config.plain_values import check_one_of, short_repr
from notebook_accelerate.config.settings import (
    HARDWARE,
    MACHINES,
    MIXED_PRECISIONS,
    OTHER,
    OUTPUT,
    RDZV_BACKENDS,
    Answers,
    Setting,
    SettingsSection,
    metadata,
    setting,
    settings_of,
)


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
    mixed_precision: str = field(
        metadata=metadata(
            variable="ACCELERATE_MIXED_PRECISION",
            launch="mixed_precision",
            choices=MIXED_PRECISIONS,
            closed=True,
            ask="Which mixed precision?",
            answer="no",
            place=4,
        )
    )
    """Mixed precision: no, fp16, bf16 or fp8."""
    use_cpu: bool = field(
        metadata=metadata(
            variable="ACCELERATE_USE_CPU",
            launch="cpu",
            option="cpu",
            switch=True,
            group=HARDWARE,
            ask="Train on the CPU only?",
            answer=lambda answers: not answers["devices"],
            place=2,
        )
    )
    """Train on the CPU, and ignore the default configuration file."""
    debug: bool = field(metadata=metadata(variable="ACCELERATE_DEBUG_MODE", switch=True, group=OUTPUT))
    """Check that all ranks pass tensors of the same shapes and dtypes to collectives."""

    settings = SettingsSection(title="Machines and processes")
    distributed_types: ClassVar[type[Enum]] = DistributedType

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        self.distributed_type = type(self).distributed_types(self.distributed_type)  # type: ignore[assignment]
        # YAML reads a bare `no` as False.
        precision = str(self.mixed_precision).lower()
        self.mixed_precision = "no" if precision in {"false", "none"} else precision
        check_one_of("mixed_precision", self.mixed_precision, PrecisionType.list())

    def to_dict(self) -> dict[str, Any]:
        """Return the contents to write to a file: enums by value, without fields that are None or empty.

        num_processes=-1, which means that no number was chosen, is also left out, because Accelerate's launcher rejects
        it.
        """
        values = {name: getattr(value, "value", value) for name, value in dataclasses.asdict(self).items()}
        if values.get("num_processes") == -1:
            del values["num_processes"]
        return {name: value for name, value in values.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Add the fields that older files lack.

        Args:
            config_dict: The contents of a file.

        Returns:
            The arguments for the constructor.
        """
        defaults = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "no"}
        config = {**defaults, "use_cpu": False, "debug": False, **config_dict}
        if "fp16" in config:  # The file was written before mixed_precision existed.
            config["mixed_precision"] = "fp16" if config.pop("fp16") else "no"
        backend = config.pop("dynamo_backend", None)
        if backend not in {None, "NO"}:
            config["dynamo_config"] = {"dynamo_backend": backend, **(config.get("dynamo_config") or {})}
        return config

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], source: object = "the configuration") -> Any:
        """Create a configuration from the contents of a file.

        Args:
            config_dict: The contents of the file.
            source: Name of the file, for messages.

        Returns:
            An instance of this class.

        Raises:
            ValueError: The file has unknown keys, lacks keys, or a value is not allowed.
        """
        config = cls.process_config(config_dict)
        known = {entry.name: entry.type for entry in dataclasses.fields(cls)}
        if unknown := sorted(config.keys() - known.keys(), key=str):
            names = ", ".join(map(str, unknown))
            raise ValueError(f"{source} has unknown keys: {names}; known: {', '.join(sorted(known))}")
        required = [each.name for each in dataclasses.fields(cls) if each.default is each.default_factory is MISSING]
        if missing := [name for name in required if name not in config]:
            lines = ", ".join(f"{name}: VALUE" for name in missing)
            raise ValueError(f"{source} has no {' and no '.join(missing)}; add: {lines}")
        checked = {name: _checked(name, value, str(known[name]), source) for name, value in config.items()}
        return cls(**checked)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str] | None = None) -> Any:
        """Read a configuration from a JSON file.

        Args:
            json_file: The path of the file. If None, the default file.
        """
        return cls._from_file(default_json_config_file if json_file is None else json_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> Any:
        """Read a configuration from a YAML file.

        Args:
            yaml_file: The path of the file. If None, the default file.
        """
        return cls._from_file(default_yaml_config_file if yaml_file is None else yaml_file)

    @classmethod
    def _from_file(cls, file: str | os.PathLike[str]) -> Any:
        return cls.from_dict(file_contents(Path(file)), file)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON.

        Args:
            json_file: The path of the file to write.
        """
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the configuration as YAML.

        Args:
            yaml_file: The path of the file to write.
        """
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")


def _checked(name: str, value: Any, annotation: str, source: object) -> Any:
    """Check a value from a file, and return it. If the field is a whole number, text is converted.

    Args:
        name: The name of the field.
        value: The value to check.
        annotation: The annotation of the field.
        source: Name of the file, for messages.
    """
    example = ""
    if annotation.startswith("dict") and value is not None and not isinstance(value, Mapping):
        example = f"its settings on indented lines below {name}:"
    elif annotation.startswith("int") and value not in (None, "") and not isinstance(value, int):
        try:
            return int(str(value))
        except ValueError:
            example = f"a whole number, such as {name}: 2"
    if example:
        raise ValueError(f"{source}: {name}: {short_repr(value)} is not allowed; write {example}")
    return value


def processes_per_machine(num_processes: int, num_machines: int) -> int:
    """Divide the processes among the machines.

    Args:
        num_processes: Number of processes on all machines.
        num_machines: Number of machines.

    Raises:
        ValueError: The number of processes is not a multiple of the number of machines.
    """
    if num_processes % num_machines:
        raise ValueError(
            f"num_processes={num_processes} is not a multiple of num_machines={num_machines}; write the number of "
            f"all processes, such as num_processes: {num_machines * (num_processes // num_machines + 1)}"
        )
    return num_processes // num_machines


def _several(answers: Answers) -> bool:
    return bool(answers["num_machines"] > 1)


def _all_devices(answers: Answers) -> int:
    return int((1 if answers["cpu"] else max(answers["devices"], 1)) * answers["num_machines"])


@dataclass
class ClusterConfig(BaseConfig):
    """Configuration for training on one or several machines."""

    num_processes: int = setting(
        -1, launch="num_processes", ask="How many processes on all machines together?", answer=_all_devices, place=3
    )
    """Number of processes on all machines together. By default, one per device."""
    machine_rank: int = setting(
        0, launch="node_rank", group=MACHINES, ask="Which index does this machine have, from 0?", when=_several, place=1
    )
    """Index of this machine, from 0."""
    num_machines: int = setting(1, launch="num_nodes", ask="How many machines train together?")
    """Number of machines."""
    gpu_ids: str | None = setting(group=HARDWARE)
    """Indices of the GPUs to use, separated by commas, or all."""
    main_process_ip: str | None = setting(
        launch="master_addr",
        group=MACHINES,
        ask="What is the address of machine 0?",
        answer="127.0.0.1",
        when=_several,
        place=1,
    )
    """Address of the machine with index 0."""
    main_process_port: int | None = setting(
        launch="use_port", group=MACHINES, ask="Which port of machine 0 is free?", answer=29500, when=_several, place=1
    )
    """Port for the process group on the machine with index 0."""
    rdzv_backend: str | None = setting(
        "static",
        launch="rdzv_backend",
        choices=RDZV_BACKENDS,
        group=MACHINES,
        ask="How do the machines find each other?",
        when=_several,
        place=1,
    )
    """How machines find each other: static (by index) or c10d (in the order they join)."""
    same_network: bool | None = setting(False, switch=True, group=MACHINES)
    """Accepted for compatibility. It has no effect, because machines always connect to main_process_ip."""
    main_training_function: str = setting("main", group=OTHER)
    """Accepted for compatibility. It has no effect, because the whole script runs."""
    enable_cpu_affinity: bool = setting(False, variable=environ.AFFINITY, switch=True)
    """Bind each process to the CPU cores near its GPU."""
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = setting(False, variable="ACCELERATE_DOWNCAST_BF16", switch=True, group=OTHER)
    """On a TPU, use bfloat16 for both float and double."""
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
        for name in ("mpirun_config", *SECTIONS):
            if name and getattr(self, name) is None:
                setattr(self, name, {})
        if (self.deepspeed_config or {}).get("deepspeed_config_file") not in {None, "none"}:
            check_launched_fields(self.deepspeed_config or {})
        # YAML reads a bare `no` as False here, too.
        self.downcast_bf16 = self.downcast_bf16 not in {False, None, "no", "false"}

    def to_launch_arguments(self) -> dict[str, Any]:
        """Return these settings as arguments of ``LaunchConfig``, without those that are not set.

        Raises:
            ValueError: The number of processes is not a multiple of the number of machines.
        """
        machines = max(self.num_machines, 1)
        processes = processes_per_machine(self.num_processes, machines) if self.num_processes > 0 else None
        same = settings_of(ClusterConfig).values()
        given: dict[str, Any] = {each.launch: getattr(self, each.name) for each in same if each.launch} | {
            "num_processes": processes,
            "use_port": str(self.main_process_port) if self.main_process_port else None,
            "num_nodes": machines,
            "env": self.rank_variables() or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def rank_variables(self) -> dict[str, str]:
        """Return the environment variables of the settings that are not fields of ``LaunchConfig``."""
        in_launch = {each.variable for each in settings_of(ClusterConfig).values() if each.launch}
        variables = {name: value for name, value in self.to_environment().items() if name not in in_launch}
        if self.gpu_ids not in {None, "all"}:
            variables["CUDA_VISIBLE_DEVICES"] = str(self.gpu_ids)
        return variables

    def to_environment(self) -> dict[str, str]:
        """Return these settings as environment variables of a rank."""
        values: dict[str, Any] = {}
        for each in settings_of(ClusterConfig).values():
            if each.variable and (value := getattr(self, each.name)):
                values[each.variable] = _TRUE_TEXTS.get(each.name, value)
        for key in filter(None, SECTIONS):
            contents = getattr(self, key) or {}
            values |= _section_variables(key, _PREPARATIONS[key](contents) if key in _PREPARATIONS else contents)
        return {name: environ.as_text(value) for name, value in values.items() if value is not None}


@dataclass
class SageMakerConfig(BaseConfig):
    """Configuration for training on Amazon SageMaker."""

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
        config_file: Path of a YAML or JSON file. If None, the default file.

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
    values = file_contents(path)
    sagemaker = values.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    loaded: ClusterConfig | SageMakerConfig = (SageMakerConfig if sagemaker else ClusterConfig).from_dict(values, path)
    return loaded


def load_cluster_config(config_file: str | os.PathLike[str] | None) -> ClusterConfig:
    """Read a configuration file, which must not be for SageMaker.

    As in Accelerate, ``distributed_type: NO`` means one process, even if the file has another number of processes.

    Args:
        config_file: Path of a YAML or JSON file. If None, the default file.

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
    stated = "distributed_type" in file_contents(Path(config_file or default_config_file))
    if stated and found.distributed_type == DistributedType.NO and found.num_machines == 1:
        found.num_processes = min(found.num_processes, 1)
    return found


def file_contents(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file, by name, or an empty dict for an empty file.

    Args:
        path: The path of an existing file.

    Raises:
        ValueError: The file is not YAML, or contains something other than settings.
    """
    try:
        # JSON is a subset of YAML, so this loads both, whatever the file's name is.
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8; pass a YAML or JSON file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ValueError(f"{where}: this is not YAML: {problem}") from None
    if contents is not None and not isinstance(contents, dict):
        raise ValueError(
            f"{path} contains {'text' if isinstance(contents, str) else f'a {type(contents).__name__}'} instead of "
            "settings; write lines such as num_processes: 2, or create the file with `notebook-accelerate config`"
        )
    return contents or {}


# ---- sections, and their variables

SECTIONS: dict[str, tuple[type[Any], ...]] = {
    "": (ClusterConfig,),
    "dynamo_config": (TorchDynamoPlugin,),
    "deepspeed_config": (DeepSpeedPlugin,),
    "fsdp_config": (FullyShardedDataParallelPlugin,),
    "parallelism_config": (ParallelismConfig, TorchContextParallelConfig, DeepSpeedSequenceParallelConfig),
    "megatron_lm_config": (MegatronLMPlugin,),
    "fp8_config": (TERecipeKwargs, MSAMPRecipeKwargs, AORecipeKwargs),
}
"""The classes whose settings are in each section of a configuration file."""
_LOWER_CASE = ("fsdp_config", "deepspeed_config")
"""Accelerate writes the truth values of these sections in lower case."""
_TRUE_TEXTS = {"use_cpu": "True", "enable_cpu_affinity": "1"}
"""The strings that Accelerate writes for True at the top level, unless it writes "true"."""


def section_settings(key: str) -> list[tuple[type[Any], Setting]]:
    """Return the settings of a section of a configuration file, each with its class.

    Args:
        key: The key of the section.
    """
    entries = [(owner, each) for owner in SECTIONS[key] for each in settings_of(owner).values()]
    return [(owner, each) for owner, each in entries if each.option]


def section_of(key: str) -> SettingsSection:
    """Return the description of a section of the configuration file."""
    section: SettingsSection = SECTIONS[key][0].settings
    return section


def _section_variables(key: str, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a section. Keys that are not settings become variables with their names in capitals."""
    section = section_of(key)
    names: dict[Any, str | None] = {}
    for _, each in section_settings(key):
        names |= dict.fromkeys((each.option, each.former), each.variable)
    values = {
        names.get(name) or f"{section.prefix}{name.upper()}": _joined(value, capitalized=key not in _LOWER_CASE)
        for name, value in contents.items()
    }
    return {section.switch: True, **values} if values and section.switch else values


def _joined(value: Any, *, capitalized: bool) -> Any:
    if isinstance(value, bool) and capitalized:
        return str(value)
    return ",".join(str(item) for item in value) if isinstance(value, (list, tuple)) else value


def _dynamo_contents(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with its keys in lower case and the name of the backend in upper case."""
    named = {name.lower(): value for name, value in contents.items()}
    backend = str(named.get("dynamo_backend", "NO")).upper()
    return {**named, "dynamo_backend": DynamoBackend(backend).value} if named else {}


def _split_dimensions(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section without the settings of dimensions that are not split."""
    unused = [names for size, names in _OF_A_DIMENSION.items() if int(contents.get(size) or 1) <= 1]
    return {name: value for name, value in contents.items() if name not in {name for names in unused for name in names}}


_OF_A_DIMENSION = {
    "parallelism_config_cp_size": ("parallelism_config_cp_comm_strategy",),
    "parallelism_config_sp_size": (
        "parallelism_config_sp_seq_length",
        "parallelism_config_sp_seq_length_is_variable",
        "parallelism_config_sp_attn_implementation",
    ),
}


def _fp8_contents(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with keys named like the options, and with one flag for each kind of matrix product."""
    values = {f"fp8_{name}": value for name, value in contents.items()}
    formats = values.get("fp8_override_linear_precision")
    if isinstance(formats, (list, tuple)):
        del values["fp8_override_linear_precision"]
        values |= dict(zip(("fp8_override_fprop", "fp8_override_dgrad", "fp8_override_wgrad"), formats, strict=True))
    return values


_PREPARATIONS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "dynamo_config": _dynamo_contents,
    "parallelism_config": _split_dimensions,
    "fp8_config": _fp8_contents,
}
"""Functions that convert the contents of a section before they become variables."""
