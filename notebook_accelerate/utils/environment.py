"""Functions for environment variables, GPUs and NUMA nodes."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from notebook_accelerate._lazy import reexport
from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.hardware import device_counts, device_table, nvml
from notebook_accelerate.hardware.detection import detect
from notebook_accelerate.hardware.versions import torch_build

if TYPE_CHECKING:
    from notebook_accelerate.hardware.nvml import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from notebook_accelerate.config.environ import (
        get_int_from_env as get_int_from_env,
        patch_environment as patch_environment,
        str_to_bool as str_to_bool,
    )
    from notebook_accelerate.state.process_group import override_numa_affinity as override_numa_affinity

reexport(__name__)

_LOG = accelerate_logger("utils.environment")


# ---- variables

_FORBIDDEN = frozenset(";\n<> ")
_T = TypeVar("_T", bound=Callable[..., Any])


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the environment variable `key` as a bool. See `flag`.

    Args:
        key: The name of the variable.
        default: The value if the variable is unset.
    """
    return environ.flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the environment variable `key` as a string.

    Args:
        key: The name of the variable.
        default: The value if the variable is unset.
    """
    return os.environ.get(key, str(default))


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Return environment variables as the lines ``NAME=value`` of an environment file.

    Args:
        current_env: The values by name.

    Returns:
        One line for each variable, with a newline. Variables with an empty value, or with a space, newline, semicolon,
        < or > in the name or value, are left out, with a warning.
    """
    lines = []
    for name, value in current_env.items():
        if not value or _FORBIDDEN & set(f"{name}{value}"):
            _LOG.warning("%s=%r is left out: it is empty or contains a space, newline, ';', '<' or '>'", name, value)
            continue
        lines.append(f"{name}={value}\n")
    return lines


@contextmanager
def clear_environment() -> Iterator[None]:
    """Clear the environment during a with block, and restore it afterwards. Variables set in the block are lost."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: _T) -> _T:
    """Restore the ACCELERATE_* variables after the decorated function, or after each test of the decorated class.

    Args:
        func_or_cls: A function, which may be async, or a class. The methods of a class and its subclasses whose names
            start with ``test`` are wrapped, together with ``setUp`` or ``setup_method``.

    Returns:
        The wrapped function, or the class itself.
    """
    if not inspect.isclass(func_or_cls):
        return cast("_T", _purged(func_or_cls))
    _purge_methods(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        inherited(**kwargs)
        _purge_methods(cls)

    setattr(func_or_cls, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - no typed way to replace it
    return func_or_cls


def _purge_methods(cls: type) -> None:
    """Wrap the tests that ``cls`` itself defines, and their set-up methods."""
    if "run" not in vars(cls) and callable(getattr(cls, "run", None)) and hasattr(cls, "setUp"):
        # unittest.TestCase.run calls setUp, the test and tearDown, so wrap it instead of each.
        cls.run = _purged(cls.run)  # type: ignore[attr-defined]
    for name, method in list(vars(cls).items()):
        if name.startswith("test") and inspect.isfunction(method):
            setattr(cls, name, _purged(method))
    if "setup_method" in vars(cls):
        _purge_setup(cls)


def _purge_setup(cls: Any) -> None:
    """Store the variables before pytest's ``setup_method``, and restore them after ``teardown_method``."""
    setup, teardown = cls.setup_method, getattr(cls, "teardown_method", None)

    @functools.wraps(setup)
    def setup_method(self: Any, *args: Any) -> None:
        self._variables_before = _accelerate_variables()
        setup(self, *args)

    def teardown_method(self: Any, *args: Any) -> None:
        try:
            if teardown is not None:
                teardown(self, *args)
        finally:
            _restore_accelerate_variables(self._variables_before)

    cls.setup_method, cls.teardown_method = setup_method, teardown_method


def _purged(function: Any) -> Any:
    # Do not use the context manager as a decorator: the closure would contain a generator, which cannot be pickled, so
    # the function could not be sent to ranks.
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _kept_accelerate_variables():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def wrapped_async(*args: Any, **kwargs: Any) -> Any:
        with _kept_accelerate_variables():
            return await function(*args, **kwargs)

    return wrapped_async if inspect.iscoroutinefunction(function) else wrapped


@contextmanager
def _kept_accelerate_variables() -> Iterator[None]:
    before = _accelerate_variables()
    try:
        yield
    finally:
        _restore_accelerate_variables(before)


def _accelerate_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(environ.PREFIX)}


def _restore_accelerate_variables(before: Mapping[str, str]) -> None:
    for name in _accelerate_variables().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


# ---- this process and its machine


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of the named libraries this process has imported.

    Args:
        library_names: The names that are used to import the libraries.
    """
    return [name for name in library_names if name in sys.modules]


@dataclass
class CPUInformation:
    """The rank and world size of a process on a CPU, overall and on this machine."""

    rank: int = 0
    """The index of the process among all ranks."""
    world_size: int = 1
    """The number of ranks on all machines."""
    local_rank: int = 0
    """The index of the process among the ranks of this machine."""
    local_world_size: int = 1
    """The number of ranks on this machine."""


def get_cpu_distributed_information() -> CPUInformation:
    """Read the rank and world size of this process from the variables of torchrun or MPI."""
    from notebook_accelerate.state.process_group import RANK_VARIABLES  # Import it here, because it imports torch.

    defaults = CPUInformation()
    return CPUInformation(
        **{name: environ.get_int_from_env(keys, getattr(defaults, name)) for name, keys in RANK_VARIABLES.items()}
    )


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its GPU, once per process (`override_numa_affinity` repeats it).

    Args:
        local_process_index: The index of this rank on its machine.
        verbose: Whether to print the cores. If None, they are printed only with ACCELERATE_DEBUG_MODE.
    """
    from notebook_accelerate.state import process_group  # Import it here, because it imports torch.

    process_group.override_numa_affinity(local_process_index, verbose)


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names and the number of NVIDIA GPUs of this machine."""
    names = [gpu.name for gpu in nvml.gpus()]
    return names, len(names)


def get_driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is no driver."""
    return nvml.driver_version()


def check_cuda_fp8_capability() -> bool:
    """Return whether this process's first GPU supports fp8 (compute capability 8.9, or AMD's gfx94, gfx95, gfx12)."""
    if not device_counts.count("cuda"):
        return False
    if torch_build().hip:
        properties = device_table.row("cuda").call("get_device_properties", 0)
        return str(properties.gcnArchName).startswith(("gfx94", "gfx95", "gfx12"))
    gpu = nvml.visible_gpu(0)
    return gpu is not None and gpu.capability >= (8, 9)


def get_current_device_type() -> tuple[str, str]:
    """Return the device type that training uses on this machine, and its distributed type."""
    row = device_table.row(detect().accelerator)
    name = row.distributed_type if row.distributed_type != DistributedType.NO else DistributedType.MULTI_CPU
    return row.type, name.value
