"""Convert between the values of the forms and Accelerate's configuration file."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.config.config_file import ClusterConfig, load_cluster_config
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.config.settings import settings_of
from notebook_accelerate.hardware import device_table
from notebook_accelerate.launch.report.markup import Markup, element
from notebook_accelerate.widgets.forms import Form, code_of, shown_code
from notebook_accelerate.widgets.training_options import DYNAMO_KEYS, TrainingOptions

if TYPE_CHECKING:
    from notebook_accelerate.hardware import HardwareInfo
    from notebook_accelerate.launch import LaunchPlan


_IN_FILE = {entry.launch for entry in settings_of(ClusterConfig).values() if entry.launch}
"""The fields of `LaunchConfig` that a configuration file also contains."""

_ONE_PER_DEVICE = ClusterConfig.num_processes
"""The number of processes in a file that does not set it. A launch then starts one per accelerator."""


def read_settings(
    path: str | os.PathLike[str], base: LaunchConfig, before: ClusterConfig | None = None
) -> tuple[ClusterConfig, LaunchConfig]:
    """Read a configuration file.

    Args:
        path: The path of a YAML or JSON file.
        base: The settings that such files do not contain.
        before: The file that was loaded previously, whose variables are removed.

    Returns:
        The file's contents, including settings that the forms do not contain, and the launch it describes.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file contains unknown keys or values, or is for SageMaker.
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


def compile_settings(cluster: ClusterConfig) -> TorchDynamoPlugin | None:
    """Return the settings for ``torch.compile`` in a configuration file, or None if it has no such section."""
    if not cluster.dynamo_config:
        return None
    config = {"dynamo_backend": "NO", **cluster.dynamo_config}
    values: dict[str, Any] = {name: config.get(key) for name, key in DYNAMO_KEYS.items()}
    return TorchDynamoPlugin(**values)


def file_contents(
    launch: LaunchConfig, training: TrainingOptions, hardware: HardwareInfo, before: ClusterConfig | None = None
) -> ClusterConfig:
    """Return the configuration file for the values of the forms.

    Args:
        launch: The launch settings.
        training: The training options.
        hardware: This machine's hardware.
        before: The contents of the file that was loaded. Settings that the forms do not contain are kept.
    """
    local = launch.num_processes or max(hardware.count, 1)
    world = local * launch.num_nodes
    accelerator = "cpu" if launch.cpu else hardware.accelerator
    several = launch.num_nodes > 1
    same = {entry.name: getattr(launch, entry.launch) for entry in settings_of(ClusterConfig).values() if entry.launch}
    values: dict[str, Any] = {
        **same,
        "num_processes": world if launch.num_processes else _ONE_PER_DEVICE,
        "main_process_ip": launch.rendezvous_address[0] if several else None,
        "main_process_port": launch.rendezvous_address[1] if several or launch.use_port != "29500" else None,
        "dynamo_config": training.dynamo_config(),
        "distributed_type": _distributed_type(accelerator, world, before),
    }
    return replace(before or ClusterConfig.from_dict({}), **values)


def _distributed_type(accelerator: str, world: int, before: ClusterConfig | None) -> Any:
    if before is not None and (before.fsdp_config or before.deepspeed_config or before.megatron_lm_config):
        return before.distributed_type
    return device_table.row(accelerator).distributed_type if world > 1 else DistributedType.NO


def write_settings(path: str | os.PathLike[str], config: ClusterConfig) -> Path:
    """Write a configuration file, and return its path.

    Args:
        path: The path of the file, JSON if it ends in .json and otherwise YAML. The folder is created if necessary.
        config: The configuration to write.
    """
    file = Path(path).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    (config.to_json_file if file.suffix == ".json" else config.to_yaml_file)(file)
    return file


def settings_not_in_file(launch: LaunchConfig, training: TrainingOptions, cluster: ClusterConfig) -> list[str]:
    """Return the names of changed settings that a configuration file cannot contain."""
    names = [name for name in launch.non_default() if name not in _IN_FILE]
    kept = _variables(cluster)
    if "env" in names and not set(launch.env or {}) - set(kept):
        names.remove("env")
    changed = Form(TrainingOptions, training).changed()
    return [*names, *(name for name in changed if name not in {"batch_size", "dynamo_plugin"})]


# ---- the cell that launches a configuration

_WIDTH = 88
RUN_VARIABLE = "run"
"""The name of the variable that holds the run."""
ONLY_IN_CONFIG = tuple(entry.name for entry in settings_of(LaunchConfig).values() if not entry.parameter)
"""The fields of `LaunchConfig` that are not parameters of `notebook_launcher`."""


def launch_cell(function: str, arguments: str, config: LaunchConfig, *, hidden: bool = False) -> str:
    """Return the code of a cell that launches a function.

    Args:
        function: Name of the training function.
        arguments: The code of its arguments, such as ``(model, 3)``, or "" if there are none.
        config: The launch settings.
        hidden: Whether to hide secrets: values of environment variables, and credentials in URLs.
    """
    code = shown_code if hidden else _whole_code
    given = config.non_default()
    in_config = {name: given.pop(name) for name in ONLY_IN_CONFIG if name in given}
    names = ["LaunchConfig"] if in_config else []
    names += ["RayCluster"] if isinstance(given.get("on"), RayCluster) else []
    imports = [f"from notebook_accelerate import {', '.join([*names, 'notebook_launcher'])}", *_imports(in_config)]
    call = [function, *([arguments] if arguments and arguments != "()" else [])]
    call += [f"{name}={code(name, value)}" for name, value in given.items()]
    if in_config:
        values = [f"{name}={_multiline(name, value, code)}" for name, value in in_config.items()]
        call.append(f"config=LaunchConfig({', '.join(values)})")
    return "\n".join([*imports, "", _call(f"{RUN_VARIABLE} = notebook_launcher", call)])


def arguments_code(arguments: Sequence[Any], namespace: Mapping[str, Any]) -> str:
    """Return the code of a function's arguments, such as ``(model, 3)``, or "" without arguments or if one has no code.

    Args:
        arguments: Plain values, or values of the notebook's variables.
        namespace: The notebook's variables by name.
    """
    codes = [_argument_code(value, namespace) for value in arguments]
    if not all(codes):
        return ""
    return f"({', '.join(codes)}{',' if len(codes) == 1 else ''})" if codes else ""


def as_tuple(text: str) -> str:
    """Return the code of a function's arguments as a tuple, such as "(model,)" for "model", or "" without arguments.

    Args:
        text: The text that was entered: one argument, several separated by commas, or a tuple.
    """
    code = text.strip().rstrip(",")
    try:
        given = ast.parse(f"_({code})", mode="eval").body
    except SyntaxError:  # Return it unchanged, because evaluating it will raise the error again.
        return code
    arguments = given.args if isinstance(given, ast.Call) else []
    if len(arguments) != 1:
        return f"({code})" if code else ""
    return code if isinstance(arguments[0], ast.Tuple) else f"({code},)"


def _argument_code(value: Any, namespace: Mapping[str, Any]) -> str:
    code = repr(value)
    try:
        if len(code) <= _WIDTH and ast.literal_eval(code) == value:
            return code
    except (ValueError, SyntaxError, TypeError):
        pass
    return next((name for name, found in namespace.items() if found is value and not name.startswith("_")), "")


def _whole_code(_: str, value: object) -> str:
    return code_of(value)


def _multiline(name: str, value: Any, code: Callable[[str, Any], str]) -> str:
    """Return the code of a value, with one line for each entry of a dict."""
    if not isinstance(value, dict):
        return code(name, value)
    entries = "".join(f"        {code_of(key)}: {code(key, entry)},\n" for key, entry in value.items())
    return f"{{\n{entries}    }}"


def _call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


def _imports(values: dict[str, Any]) -> list[str]:
    classes = _classes(values)
    lines = ["from datetime import timedelta"] if timedelta in classes else []
    names = sorted(cls.__name__ for cls in classes if cls is not timedelta)
    return lines + ([f"from notebook_accelerate.utils import {', '.join(names)}"] if names else [])


def _classes(value: Any) -> set[type[Any]]:
    """Return the classes that the code of ``value`` names."""
    if isinstance(value, dict):
        return {cls for entry in value.values() for cls in _classes(entry)}
    if isinstance(value, list | tuple):
        return {cls for entry in value for cls in _classes(entry)}
    if isinstance(value, timedelta):
        return {timedelta}
    if is_dataclass(value) and not isinstance(value, type | Enum):
        return {type(value)} | _classes(Form(type(value), value).changed())
    return set()


def name_of(function: Any) -> str:
    """Return the name of a function in code, or "train" if its name is not an identifier."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "train"


def training_functions(namespace: dict[str, Any]) -> list[str]:
    """Return the names of the functions that the notebook itself defines, latest first."""
    own = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == namespace.get("__name__")
    ]
    return own[::-1]


# ---- a plan, and its machine, as short text

_HOSTS = {"jupyter": "Jupyter", "colab": "Colab", "kaggle": "Kaggle", "vscode": "VS Code", "terminal": "terminal"}


def plan_sentence(plan: LaunchPlan, config: LaunchConfig, training: TrainingOptions) -> str:
    """Return the plan in a sentence, such as "2 processes on cpu, fork, gloo, bf16; effective batch: 64".

    Args:
        plan: The plan of the launch.
        config: The launch settings that the plan was made from.
        training: The training options, for the strategy and the effective batch size.
    """
    processes = "1 process" if plan.num_processes == 1 else f"{plan.num_processes} processes"
    if plan.world_size != plan.num_processes:
        processes += f" of {plan.world_size}"
    precision = "fp32" if config.mixed_precision == "no" else config.mixed_precision
    parts = [
        f"{processes} on {plan.where or plan.accelerator}",
        plan.start_method,
        plan.backend,
        training.strategy,
        precision,
    ]
    return f"{', '.join(part for part in parts if part)}; {training.effective_batch(plan.world_size)}"


def machine_summary(machine: HardwareInfo) -> str:
    """Return the hardware of a machine in one line.

    Args:
        machine: The machine's hardware.
    """
    return " · ".join(_facts_of(machine))


def _facts_of(machine: HardwareInfo) -> list[str]:
    devices = f"{machine.count} × {machine.accelerator}" if machine.count else "no accelerator"
    cores = f"{machine.cpu_count} CPU core{'s' * (machine.cpu_count != 1)}"
    return [devices, cores, f"{size_text(machine.memory_bytes)} memory", _HOSTS.get(machine.host, machine.host)]


def chips(machine: HardwareInfo) -> Markup:
    """Return the hardware of a machine as a row of labels."""
    items = [element("li", fact) for fact in _facts_of(machine)]
    return element("ul", *items, class_="na-facts", aria_label="This machine")


def too_many_ranks(plan: LaunchPlan, machine: HardwareInfo) -> str:
    """Return a caution if more processes than CPU cores would train on the CPU, or "" otherwise."""
    if plan.accelerator != "cpu" or plan.num_processes <= machine.cpu_count:
        return ""
    cores = "1 CPU core" if machine.cpu_count == 1 else f"{machine.cpu_count} CPU cores"
    return f"{plan.num_processes} processes share {cores}, so each one trains more slowly."


def details(plan: LaunchPlan, training: TrainingOptions) -> list[str]:
    """Return the notes below the sentence: the reason for the start method, the batch size and the threads.

    Args:
        plan: The plan of the launch.
        training: The training options.
    """
    found = [f"{plan.start_method}: {plan.reason}"]
    if total := training.batch_sum(plan.world_size):
        found.append(total)
    if plan.threads is not None:
        found.append(f"{plan.threads} CPU thread{'s' * (plan.threads != 1)} per process")
    return found
