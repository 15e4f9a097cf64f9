"""The settings of a launch."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from notebook_accelerate._mistakes import reports_mistakes_of_methods
from notebook_accelerate.config import environ
from notebook_accelerate.config.cluster import RayCluster, resolve_cluster
from notebook_accelerate.config.plain_values import (
    HIDDEN,
    MAX_SECONDS,
    check_seconds,
    check_whole_number,
    names_only,
    short_repr,
    shown_repr,
    shown_value,
)
from notebook_accelerate.config.settings import (
    LIMITS,
    MACHINES,
    MIXED_PRECISIONS,
    OUTPUT,
    RDZV_BACKENDS,
    check_choices,
    setting,
)

if TYPE_CHECKING:
    from typing_extensions import Self


START_METHODS = ("auto", "inline", "fork", "zygote", "spawn")
REPORT_SOURCES = (
    "accelerate", "fastai", "lightning", "mlflow", "pytorch_accelerated", "rich", "tensorboard", "torch", "tqdm",
    "transformers", "wandb",
)  # fmt: skip


@reports_mistakes_of_methods
@dataclass(kw_only=True, frozen=True, repr=False)
class LaunchConfig:
    """The settings of ``notebook_launcher``, except the function and its arguments.

    Raises:
        ValueError: A value is not allowed. The message lists the allowed values.
    """

    form_groups = ("", LIMITS, OUTPUT, MACHINES)  # This is the order of the groups in the form.

    num_processes: int | None = setting()
    """Number of ranks that this notebook starts. If None, one per accelerator, or one if there is no accelerator."""
    mixed_precision: str = setting("no", choices=MIXED_PRECISIONS)
    """Default precision of every ``Accelerator()`` in the ranks: no, fp16, bf16 or fp8."""
    use_port: str | int = setting("29500", group=MACHINES, label="Port")
    """Port of the rendezvous, or 0 for any free port. On a single machine, another port is used if this one is busy."""
    master_addr: str = setting("127.0.0.1", group=MACHINES, label="Address of the first machine")
    """Address of the machine with rank 0."""
    node_rank: int = setting(0, group=MACHINES, label="Number of this machine")
    """Index of this notebook, from 0. With c10d, 0 means that notebooks are numbered in the order they join."""
    num_nodes: int = setting(1, group=MACHINES, label="Number of machines")
    """Number of notebooks that run this cell together, on one machine or several. Each starts its own ranks."""
    rdzv_backend: str = setting("static", choices=RDZV_BACKENDS, group=MACHINES, label="Rendezvous backend")
    """How several notebooks find each other: static (by node_rank) or c10d (in the order they join)."""
    rdzv_endpoint: str = setting("", group=MACHINES, label="Rendezvous endpoint")
    """host:port of the rendezvous. If empty, master_addr:use_port."""
    rdzv_conf: Mapping[str, Any] | None = setting(
        group=MACHINES, option="rdzv_conf", parse=environ.assignments, label="Rendezvous settings"
    )
    """Settings of the rendezvous, such as join_timeout and keep_alive_interval (in seconds), and secret.

    The names and defaults are torch's: join_timeout (600), last_call_timeout (30) and keep_alive_interval (5). A
    notebook counts as lost after keep_alive_max_attempt (3) of these intervals. secret is a string that all notebooks
    share, so that the first notebook can show the ranks of all of them. The variable NOTEBOOK_ACCELERATE_SECRET has the
    same effect.
    """
    rdzv_id: str = setting("none", group=MACHINES, label="Rendezvous ID")
    """Name of the run in the rendezvous."""
    max_restarts: int = setting(0, group=LIMITS, option="max_restarts", label="Maximum number of restarts")
    """Maximum number of times that all ranks are restarted after a failure."""
    monitor_interval: float = setting(0.1, group=LIMITS, option="monitor_interval", label="Seconds between checks")
    """Seconds between checks of the ranks. Used only on systems that do not report when processes end (Linux does)."""
    log_line_prefix_template: str | None = setting(group=OUTPUT, label="Prefix of lines")
    """Label of every output line, with ${role_name}, ${rank} and ${local_rank}. If None, "[rank N] "."""
    block: bool = setting(True, label="Wait until the run ends")
    """Whether the call waits until the run ends (True) or returns as soon as it starts (False)."""
    start_method: str = setting("auto", choices=START_METHODS)
    """How ranks start: auto, inline (this process), fork (the kernel), zygote (a clean server process) or spawn."""
    panel: bool | str = setting("auto", choices=("auto", True, False), group=OUTPUT, label="Panel below the cell")
    """Whether to show a panel below the cell: auto (in a notebook), True or False."""
    timeout: float | None = setting(group=LIMITS, label="Time limit in seconds")
    """Time limit for the whole run, in seconds. If None, there is no limit."""
    hang_timeout: float | None = setting(group=LIMITS, label="Seconds without progress")
    """Seconds without output, metrics or progress from any rank after which the run is ended. If None, no limit."""
    env: Mapping[str, str] | None = setting(group=OUTPUT, label="Environment variables")
    """Environment variables of the ranks, which override the kernel's."""
    hold_on_error: bool = setting(False, group=OUTPUT, label="Keep failed ranks for the debugger")
    """Whether the ranks of a failed run are kept, so that ``debug()`` opens at the failing line."""
    cpu: bool = setting(False, parameter=False, label="Use only the CPU")
    """Whether the ranks use only the CPU."""
    min_nodes: int | None = setting(group=MACHINES, label="Minimum number of machines")
    """Smallest number of notebooks that the run continues with if others are lost. If None, ``num_nodes``.

    The run restarts with the remaining notebooks, and once more if another notebook joins late. This needs c10d and
    ``max_restarts``.
    """
    on: str | RayCluster | None = setting(choices=("ray",), label="Run on")
    """Where the ranks run: None (this machine), ray, ray://host:port, or a RayCluster.

    ray means the notebook's own ``ray.init()``, or else the cluster that this machine belongs to. On a cluster,
    ``num_processes`` is the number of ranks on all its machines. The variable NOTEBOOK_ACCELERATE_ON is used instead
    if ``on`` is None.
    """
    accelerator: Mapping[str, Any] | None = setting(group=None, parameter=False)
    """Default arguments of every ``Accelerator()`` in the ranks: plugins, handlers, ..."""
    as_accelerate: bool = setting(False, group=OUTPUT, parameter=False, label="Import this package as accelerate")
    """Whether libraries that import ``accelerate`` in the ranks get this package; see ``as_accelerate``."""
    report_from: Sequence[str] = setting(REPORT_SOURCES, group=OUTPUT, parameter=False, label="Report from libraries")
    """Libraries whose losses, steps, progress and scalars the ranks report, in addition to the Accelerator's."""
    name: str | None = setting(group=OUTPUT, label="Name of the run")
    """Name of the run: letters, digits and any of . _ -. If None, the function's name and the run's number."""
    save: str | os.PathLike[str] | None = setting(group=OUTPUT, label="Folder for the run")
    """Folder that keeps the run, for `open_run` and `runs`. If None, the one in the variable NOTEBOOK_ACCELERATE_RUNS.

    Each run has its own subfolder, which is written during the run.
    """
    detach: bool = setting(False, label="Keep running without this kernel")
    """Whether a separate process supervises the run, so that it survives this kernel. ``block`` is then False.

    The run is saved in ``save`` or, if that is None, in a folder of the user. `attach` opens it in a later kernel.
    """
    automatic_metrics: bool = setting(True, group=OUTPUT, parameter=False, label="Collect automatic metrics")
    """Whether panels show automatic curves: the loss given to ``backward``, learning rate, memory, ..."""
    output: str = setting("cell", choices=("cell", "panel", "none"), group=OUTPUT, label="Output")
    """Where text from the ranks is shown: cell (below the launch and in the panel), panel (only there) or none.

    With none, it is in ``run.logs()`` and ``run.panel()``. Figures and other rich output always appear below the
    launch.
    """
    tags: Sequence[str] = setting((), group=OUTPUT)
    """Words for finding this run in the table of runs."""
    devices: int | str | Sequence[int | str] | None = setting(option="devices", parse=lambda text: text)
    """The run's devices, such as "0,1", or how many free ones. If None, all visible accelerators, or shared cores.

    [0, 2] means the devices that torch would call cuda:0 and cuda:2 in this kernel. The entries may also be UUIDs of
    GPUs, or one MIG slice. On the CPU, they are cores: 4 means any four cores that no other run holds. As text, "0,2"
    is a list, "2," a list with one entry, and "2" a number of devices.
    """
    queue: bool = setting(False, switch=True, option="queue", label="Wait for free devices")
    """Whether the run waits until its devices are free. If False, the launch is refused while another run holds one."""
    notify: Callable[[dict[str, str]], object] | str | None = setting(
        group=OUTPUT, option="notify", label="Address for messages"
    )
    """Receiver of messages when the run ends, fails or stalls, or a value becomes NaN: a URL, address or function.

    A URL receives a POST with a JSON object: run (its name), event (ended, failed, stalled or warning) and text. A
    function is called with the same dict, on another thread, and is not allowed with ``detach``. An address of apprise,
    such as ntfys://topic, requires the extra notify.
    """

    def __post_init__(self) -> None:
        check_choices(self, "start_method", "mixed_precision", "rdzv_backend")
        for name in _SWITCHES:
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; pass True or False")
        for name, least in _LEAST.items():
            check_whole_number(name, getattr(self, name), least)
        if self.num_processes is not None:
            check_whole_number("num_processes", self.num_processes)
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank={self.node_rank} is out of range: num_nodes={self.num_nodes}, counted from 0")
        for name in ("timeout", "hang_timeout"):
            check_seconds(name, getattr(self, name), zero=False, none="no limit")
        check_seconds("monitor_interval", self.monitor_interval, zero=False)
        _check_port(self.use_port)
        if self.rdzv_endpoint:
            _endpoint(self.rdzv_endpoint)
        _check_rendezvous(self)
        _check_cluster(self)
        if self.panel not in (True, False, "auto"):
            raise ValueError(f"panel={self.panel!r} is not allowed; pass 'auto', True or False")
        _check_label(self.log_line_prefix_template)
        _check_environment(self.env)
        _check_sources(self.report_from)
        _check_name(self.name)
        _check_detached(self)
        _check_devices(self)
        _check_notify(self)
        if self.save is not None and not (isinstance(self.save, (str, os.PathLike)) and os.fspath(self.save)):
            raise ValueError(f"save={self.save!r} is not a folder; pass the path of one, such as save='runs'")
        check_choices(self, "output")
        _check_tags(self.tags)
        if self.output == "panel" and self.panel is False:
            raise ValueError("output='panel' is not allowed with panel=False, which shows no panel; pass output='none'")
        check_accelerator_arguments(self.accelerator)
        if self.accelerator is not None and not self.accelerator:
            object.__setattr__(self, "accelerator", None)

    @property
    def cluster(self) -> RayCluster | None:
        """The cluster that ``on`` selects, or None for this machine."""
        return resolve_cluster(self.on)

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Address and port of the rendezvous: ``rdzv_endpoint``, or ``master_addr`` and ``use_port``."""
        return _endpoint(self.rdzv_endpoint) if self.rdzv_endpoint else (self.master_addr, int(self.use_port))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | None = None, **values: Any) -> Self:
        """Read a configuration file of Accelerate.

        Args:
            path: A YAML or JSON file, as ``notebook-accelerate config`` writes it. If None, the default file.
            values: Fields that override the file's. The variables in ``env`` are merged with the file's.

        Returns:
            The settings. The settings of plugins become environment variables of the ranks.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file has unknown keys or values, or is for SageMaker.
        """
        from notebook_accelerate.config.config_file import load_cluster_config

        found = load_cluster_config(path).to_launch_arguments()
        if found.get("env") or values.get("env"):
            values["env"] = {**found.get("env", {}), **(values.get("env") or {})}
        return cls(**{**found, **values})

    def __repr__(self) -> str:
        return shown_repr(self)

    def changed(self, **values: Any) -> Self:
        """Return a checked copy with ``values`` in place of the fields of those names."""
        return replace(self, **values)

    def non_default(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


_LEAST = {"node_rank": 0, "num_nodes": 1, "max_restarts": 0}
_SWITCHES = tuple(each.name for each in fields(LaunchConfig) if each.type == "bool")
LABEL_FIELDS = ("role_name", "rank", "local_rank")
"""The names that ``log_line_prefix_template`` may contain, each as ``${...}``."""


def _check_port(value: object) -> None:
    try:
        port = int(str(value))
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise ValueError(f"use_port={value!r} is not a port; pass a number from 0 (any free port) to 65535")


def _endpoint(value: str) -> tuple[str, int]:
    address, _, port = value.rpartition(":")
    if not address or not port.isdigit():
        raise ValueError(f"rdzv_endpoint={value!r} is not host:port; pass one, such as '10.0.0.1:29500'")
    return address.strip("[]"), int(port)


RDZV_SECONDS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval")
RDZV_SETTINGS = (*RDZV_SECONDS, "timeout", "read_timeout", "keep_alive_max_attempt", "is_host", "local_addr", "secret")
"""The keys of ``rdzv_conf``. All but ``secret`` are torch's."""


def _check_rendezvous(config: LaunchConfig) -> None:
    conf = config.rdzv_conf
    if conf is not None and not isinstance(conf, Mapping):
        raise ValueError(f"rdzv_conf={names_only(conf)!r} is not allowed; pass a dict, such as {{'join_timeout': 600}}")
    for name, value in (conf or {}).items():
        if name not in RDZV_SETTINGS:
            raise ValueError(
                f"rdzv_conf={{{name!r}: ...}} is not known; pass one or more of {', '.join(RDZV_SETTINGS)}"
            )
        if name == "secret":
            if not isinstance(value, str) or not value:
                raise ValueError("rdzv_conf={'secret': ...} must be a non-empty string")
        elif name in (*RDZV_SECONDS, "timeout", "read_timeout", "keep_alive_max_attempt"):
            _check_above_zero(name, value)
    if config.num_nodes > 1 and config.rendezvous_address[1] == 0:
        raise ValueError(
            f"use_port={config.use_port!r} is not allowed with num_nodes={config.num_nodes}, because every node must "
            "know the port; pass a port that is free on the first node, such as use_port=29500"
        )
    if config.min_nodes is None:
        return
    check_whole_number("min_nodes", config.min_nodes)
    if config.min_nodes > config.num_nodes:
        raise ValueError(f"min_nodes={config.min_nodes} is more than num_nodes={config.num_nodes}; pass fewer nodes")
    if config.min_nodes < config.num_nodes and config.rdzv_backend != "c10d":
        raise ValueError(
            f"min_nodes={config.min_nodes} is not allowed with rdzv_backend={config.rdzv_backend!r}, whose number of "
            "nodes is fixed; pass rdzv_backend='c10d'"
        )


def _check_cluster(config: LaunchConfig) -> None:
    if config.cluster is None:
        return
    on = shown_value("on", config.on)
    if config.num_nodes > 1:
        raise ValueError(
            f"num_nodes={config.num_nodes} is for several notebooks, but with on={on!r} the nodes belong to the "
            "cluster; pass num_processes, the total number of ranks"
        )
    if config.start_method != "auto":
        raise ValueError(f"start_method={config.start_method!r} is for this machine; with on={on!r}, pass 'auto'")


def _check_above_zero(name: str, value: Any) -> None:
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
    try:
        check_seconds(name, number, zero=False)
    except ValueError:
        raise ValueError(
            f"rdzv_conf={{{name!r}: {short_repr(value)}}} is not allowed; "
            f"pass a number above 0, at most {MAX_SECONDS:,}"
        ) from None


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _check_name(name: object) -> None:
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(
            f"name={name!r} is not allowed; pass at most 100 letters, digits or . _ -, starting with a letter or "
            "digit, such as 'train-3'"
        )


def _check_detached(config: LaunchConfig) -> None:
    """Check that a detached run uses only this machine and no part of the kernel, and set its ``block`` to False."""
    if not config.detach:
        return
    if config.num_nodes > 1 or config.on is not None:
        other = f"num_nodes={config.num_nodes}" if config.num_nodes > 1 else f"on={config.on!r}"
        raise ValueError(f"detach=True is not allowed with {other}, because detached runs use this machine only")
    if config.start_method in ("inline", "fork"):
        raise ValueError(
            f"detach=True is not allowed with start_method={config.start_method!r}, whose ranks come from the kernel; "
            "pass 'auto', 'zygote' or 'spawn'"
        )
    object.__setattr__(config, "block", False)


_ADDRESS = re.compile(
    r"https?://([\w.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?([/?#][!-~]*)?|(?!https?:)(?P<other>[a-z][a-z0-9+.-]*)://[^\s/?#]\S*",
    re.IGNORECASE,
)


@contextmanager
def without_apprise_logs() -> Iterator[None]:
    """Disable apprise's logger for a while, because its warnings contain parts of addresses, which are secrets."""
    logger = logging.getLogger("apprise")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_notify(config: LaunchConfig) -> None:
    """Check the receiver of messages. Never put its address into an error, because it may contain a token."""
    given = config.notify
    if callable(given) and config.detach:
        raise ValueError("detach=True is not allowed with notify=<function>, which ends with this kernel; pass a URL")
    if given is None or callable(given):
        return
    address = _ADDRESS.fullmatch(given) if isinstance(given, str) else None
    if address is None:
        shown = HIDDEN if isinstance(given, str) else short_repr(given)
        raise ValueError(
            f"notify={shown} is not allowed; pass a URL such as 'https://example.org/hook', without user and password, "
            "an address of apprise such as 'ntfys://topic', or a function, which is called with a dict"
        )
    if other := address["other"]:
        if importlib.util.find_spec("apprise") is None:
            raise ValueError(f"notify='{other}://...' needs apprise: pip install 'notebook-accelerate[notify]'")
        with without_apprise_logs():
            known = importlib.import_module("apprise").Apprise().add(given)
        if not known:
            raise ValueError(f"notify='{other}://...' is not an address of apprise; see https://appriseit.com/services")


def _check_devices(config: LaunchConfig) -> None:
    """Check the devices, and replace text and lists with a number or a tuple."""
    given = config.devices
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        entries = tuple(int(part) if part.isdigit() else part for part in parts if part)
        given = entries[0] if len(parts) == 1 and entries and isinstance(entries[0], int) else entries
    elif isinstance(given, Sequence):
        given = tuple(given)
    elsewhere = f"num_nodes={config.num_nodes}" if config.num_nodes > 1 else f"on={shown_value('on', config.on)!r}"
    if (given is not None or config.queue) and (config.num_nodes > 1 or config.on is not None):
        name = "queue=True" if given is None else f"devices={config.devices!r}"
        raise ValueError(f"{name} is for devices of this machine only; leave it out, or {elsewhere}")
    if given is not None and not _are_devices(given):
        raise ValueError(
            f"devices={config.devices!r} is not allowed; pass a list of different devices, such as [0, 1] or "
            "['GPU-8932f937'], or a number of devices of at least 1"
        )
    slices = [entry for entry in given if str(entry).startswith("MIG-")] if isinstance(given, tuple) else []
    if slices and given != (slices[0],):
        raise ValueError(
            f"devices={config.devices!r} has more than one MIG slice, but a process can use only one: CUDA shows it no "
            f"other. Launch one run for each slice, such as devices=[{slices[0]!r}]"
        )
    object.__setattr__(config, "devices", given)


def _are_devices(given: object) -> bool:
    if not isinstance(given, tuple):
        return type(given) is int and given > 0
    numbers = all(type(entry) is int and entry >= 0 for entry in given)
    texts = all(isinstance(entry, str) and entry for entry in given)
    return bool(given) and len(set(given)) == len(given) and (numbers or texts)


def _check_sources(sources: object) -> None:
    if isinstance(sources, str) or not isinstance(sources, Sequence) or not set(sources) <= set(REPORT_SOURCES):
        raise ValueError(
            f"report_from={sources!r} is not allowed; pass one or more of {', '.join(REPORT_SOURCES)}, such as "
            "('transformers', 'tqdm'), or () for none"
        )


def _check_tags(tags: object) -> None:
    words = isinstance(tags, Sequence) and not isinstance(tags, str) and all(isinstance(tag, str) for tag in tags)
    if not words or "" in tags:  # type: ignore[operator]
        raise ValueError(f"tags={tags!r} is not allowed; pass non-empty strings, such as ('baseline', 'lr sweep')")


def _check_label(template: str | None) -> None:
    if template is None:
        return
    known = ", ".join(f"${{{name}}}" for name in LABEL_FIELDS)
    allowed = f"pass a string with one or more of {known}, such as '[${{rank}}] ', or None for '[rank N] '"
    if not isinstance(template, str):
        raise ValueError(f"log_line_prefix_template={template!r} is not allowed; {allowed}")
    for found in string.Template.pattern.finditer(template):
        name = found.group("named") or found.group("braced")
        if name is not None and name not in LABEL_FIELDS:
            raise ValueError(f"log_line_prefix_template={template!r} has the unknown field {name!r}; {allowed}")


def _check_environment(env: object) -> None:
    if env is None:
        return
    wrong = type(env).__name__ if not isinstance(env, Mapping) else ""
    for name, value in env.items() if isinstance(env, Mapping) else ():
        if not isinstance(name, str) or not isinstance(value, str):
            wrong = f"{{{name!r}: ...}} with a value of type {type(value).__name__}"
        elif not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env={{{name!r}: ...}} is not allowed; no environment variable can have this name or value"
            )
    if wrong:
        raise ValueError(f"env={wrong} is not allowed; pass a dict of strings, such as {{'NAME': 'value'}}")


# Arguments that a launch passes to every `Accelerator()` of its ranks. The function's own arguments override them.

ACCELERATOR_ARGUMENTS = (
    "device_placement",
    "split_batches",
    "gradient_accumulation_steps",
    "dataloader_config",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "rng_types",
    "log_with",
    "project_dir",
    "project_config",
    "gradient_accumulation_plugin",
    "step_scheduler_with_optimizer",
    "kwargs_handlers",
    "dynamo_backend",
    "dynamo_plugin",
    "deepspeed_plugins",
    "parallelism_config",
)
"""Arguments of `Accelerator` that a launch can pass; `mixed_precision` and `cpu` are settings of the launch itself."""
_STRATEGIES = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin")
# The arguments in a group set the same thing. If the function passes one of them, the launch passes none of them.
_ALTERNATIVES = (
    {"gradient_accumulation_steps", "gradient_accumulation_plugin"},
    {"dynamo_backend", "dynamo_plugin"},
    {"split_batches", "dataloader_config"},
    {"project_dir", "project_config"},
    {*_STRATEGIES, "torch_tp_plugin", "parallelism_config"},
)
_from_launch: dict[str, Any] = {}
_Init = TypeVar("_Init", bound=Callable[..., None])


def check_accelerator_arguments(given: Any) -> None:
    """Check the arguments that a launch passes to every `Accelerator()`.

    Args:
        given: Arguments by name. If None, there are no arguments.

    Raises:
        ValueError: ``given`` is not a mapping, has a name that `Accelerator` does not know, or selects two strategies.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ValueError(
            f"accelerator={given!r} is not allowed; pass the arguments of Accelerator by name, as in "
            'LaunchConfig(accelerator={"fsdp_plugin": FullyShardedDataParallelPlugin()})'
        )
    for name in given:
        if name in ("mixed_precision", "cpu"):
            raise ValueError(f"accelerator={{{name!r}: ...}}: write LaunchConfig({name}={given[name]!r}) instead")
        if name not in ACCELERATOR_ARGUMENTS:
            known = ", ".join(ACCELERATOR_ARGUMENTS)
            raise ValueError(f"accelerator={{{name!r}: ...}}: Accelerator has no such argument; it has {known}")
    chosen = [name for name in _STRATEGIES if given.get(name) is not None]
    if len(chosen) > 1:
        raise ValueError(f"accelerator has {' and '.join(chosen)}, which cannot be combined; pass only one of them")


def set_launch_arguments(given: Mapping[str, Any] | None) -> None:
    """Set the default arguments of every `Accelerator()` in this process.

    Args:
        given: Arguments by name. If None, there are no arguments.
    """
    _from_launch.clear()
    _from_launch.update(given or {})


@contextmanager
def launch_arguments_set(given: Mapping[str, Any] | None) -> Iterator[None]:
    """Set the arguments as `set_launch_arguments` does, inside a with block.

    Args:
        given: Arguments by name. If None, there are no arguments.

    Yields:
        Nothing.
    """
    before = dict(_from_launch)
    set_launch_arguments(given)
    try:
        yield
    finally:
        set_launch_arguments(before)


def takes_launch_arguments(init: _Init) -> _Init:
    """Make a constructor use the launch's arguments for those that the caller does not pass.

    Args:
        init: The constructor of `Accelerator`.

    Returns:
        The constructor with the same signature.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if _from_launch:
            passed = {*names[: len(args)], *kwargs}
            settled = passed.union(*(group for group in _ALTERNATIVES if group & passed))
            kwargs = {**{name: value for name, value in _from_launch.items() if name not in settled}, **kwargs}
        init(self, *args, **kwargs)

    return cast("_Init", wrapped)
