"""The part of the kernel's state that every rank starts with, whichever way it is started.

A rank starts as a function called in the cell would: with the state of the kernel's random number generators, and with
the torch and numpy settings of the process and of the cell's thread. All ranks start from the same random state, so a
model built in the function is the same on every rank, and a run in a seeded kernel can be repeated. A launch does not
advance the kernel's own generators.

Two settings are not inherited: the number of threads, which the launch plan decides, and the index of the default
device, which would put all ranks on one device.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from notebook_accelerate.hardware import device_table
from notebook_accelerate.torch_internals import cuda_seed, default_device

_SETTINGS: dict[str, str] = {
    "set_warn_always": "is_warn_always_enabled",
    "backends.cuda.enable_flash_sdp": "backends.cuda.flash_sdp_enabled",
    "backends.cuda.enable_mem_efficient_sdp": "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.enable_math_sdp": "backends.cuda.math_sdp_enabled",
    "backends.cuda.enable_cudnn_sdp": "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "",
    "backends.cudnn.enabled": "",
    "backends.cudnn.benchmark": "",
    "backends.cudnn.deterministic": "",
    "set_float32_matmul_precision": "get_float32_matmul_precision",
    "backends.cudnn.allow_tf32": "",
    # Set this after the two older settings, which change it too.
    "backends.cuda.matmul.fp32_precision": "",
    "backends.mkldnn.matmul.fp32_precision": "",
    "backends.cudnn.conv.fp32_precision": "",
    "backends.cudnn.rnn.fp32_precision": "",
    "multiprocessing.set_sharing_strategy": "multiprocessing.get_sharing_strategy",
}
"""Torch's process-wide settings that a rank would lack if it is not forked from the kernel, by name.

The names are functions that set a value, each with the function that returns it, and attributes.
"""

_PYTHON_SETTINGS: dict[str, str] = {
    "sys.setrecursionlimit": "sys.getrecursionlimit",
    "sys.setswitchinterval": "sys.getswitchinterval",
    "sys.set_int_max_str_digits": "sys.get_int_max_str_digits",
    "socket.setdefaulttimeout": "socket.getdefaulttimeout",
}
"""Functions of the standard library that change a setting, each with the function that returns the setting."""

_entered: list[AbstractContextManager[Any]] = []
"""Contexts that this rank never leaves. They are kept, because inference mode ends when its guard is collected."""


@dataclass
class InheritedState:
    """The state of a kernel and of one of its threads. Fields are None or empty if their library is not loaded.

    Attributes:
        python_rng: The state of ``random``.
        python: Python's process-wide settings, by name.
        umask: The permission mask for new files, or None if it cannot be read.
        numpy_rng: The state of ``numpy.random``.
        numpy_errors: The result of ``numpy.geterr`` on the thread.
        torch_rng: The state of torch's CPU generator.
        device_seed: The seed of the CUDA devices' generators, or None if the kernel has not seeded them.
        settings: Torch's process-wide settings, by name.
        thread: Torch's settings for the thread, by name.
    """

    python_rng: Any = None
    python: dict[str, Any] = field(default_factory=dict)
    umask: int | None = None
    numpy_rng: Any = None
    numpy_errors: dict[str, Any] = field(default_factory=dict)
    torch_rng: bytes | None = None
    device_seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    thread: dict[str, Any] = field(default_factory=dict)


def capture_inherited_state() -> InheritedState:
    """Return the state of this process and of the calling thread. Call this on the cell's thread.

    This neither imports a module nor starts an accelerator.
    """
    state = InheritedState(random.getstate(), _python_settings(), _umask())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state.numpy_rng, state.numpy_errors = numpy.random.get_state(), numpy.geterr()
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_default_device"):
        state.torch_rng = torch.get_rng_state().numpy().tobytes()
        state.device_seed = cuda_seed()
        state.settings = _process_settings(torch)
        state.thread = _thread_settings(torch)
    return state


def apply_inherited_state(state: InheritedState) -> None:
    """Apply the captured state to this process and the calling thread."""
    random.setstate(state.python_rng)
    for name, value in state.python.items():
        module, _, setting = name.partition(".")
        getattr(import_module(module), setting)(value)
    if state.umask is not None:
        os.umask(state.umask)
    if state.numpy_rng is not None:
        import numpy as np

        np.random.set_state(state.numpy_rng)  # noqa: NPY002 - users share the legacy generator
        np.seterr(**state.numpy_errors)
    if state.torch_rng is not None:
        torch: Any = import_module("torch")
        numbers = torch.frombuffer(bytearray(state.torch_rng), dtype=torch.uint8)
        torch.set_rng_state(numbers)
        if state.device_seed is not None:
            torch.manual_seed(state.device_seed)  # The seed is used once a device is initialised.
            torch.set_rng_state(numbers)
        _apply_process_settings(torch, state.settings)
        _apply_thread_settings(torch, state.thread)


def _python_settings() -> dict[str, Any]:
    found = {}
    for name, source in _PYTHON_SETTINGS.items():
        module, _, getter = source.partition(".")
        if hasattr(sys.modules.get(module), getter):  # Python 3.10.6 does not limit the digits of integers.
            found[name] = getattr(sys.modules[module], getter)()
    return found


def _umask() -> int | None:
    """Return this process's mask, or None if the system returns it only when a new one is set for all threads."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/self/status").read_text()
        return int(text.partition("Umask:")[2].split()[0], 8)
    return None


def _process_settings(torch: Any) -> dict[str, Any]:
    # Store names, not torch's objects, because a spawned rank reads this state before its environment is complete.
    found: dict[str, Any] = {
        "default_dtype": _name(torch.get_default_dtype()),
        "determinism": torch.get_deterministic_debug_mode(),
        "anomalies": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    }
    return found | {name: value for name in _SETTINGS if (value := _read(torch, name)) is not None}


def _apply_process_settings(torch: Any, settings: dict[str, Any]) -> None:
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    if (mode := settings["determinism"]) != torch.get_deterministic_debug_mode():
        # This imports the compiler, which takes a second.
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    if settings["anomalies"] != (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()):
        torch.autograd.set_detect_anomaly(*settings["anomalies"])
    for name in _SETTINGS:
        if name in settings and settings[name] != _read(torch, name):
            _write(torch, name, settings[name])


def _read(torch: Any, name: str) -> Any:
    """Return a setting, or None if this torch lacks it, or if its value cannot be read by the older of two APIs."""
    with suppress(AttributeError, RuntimeError):
        value = attrgetter(_SETTINGS[name] or name)(torch)
        return value() if _SETTINGS[name] else value
    return None


def _write(torch: Any, name: str, value: Any) -> None:
    if _SETTINGS[name]:
        attrgetter(name)(torch)(value)
        return
    owner, _, attribute = name.rpartition(".")
    setattr(attrgetter(owner)(torch), attribute, value)


def _thread_settings(torch: Any) -> dict[str, Any]:
    return {
        "device": default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": _autocast(torch),
        "autocast_cache": torch.is_autocast_cache_enabled(),
    }


def _apply_thread_settings(torch: Any, thread: dict[str, Any]) -> None:
    if thread["device"]:
        torch.set_default_device(thread["device"])
    torch.set_grad_enabled(thread["grad"])
    contexts = [torch.inference_mode()] if thread["inference"] else []
    for kind, dtype in thread["autocast"].items():
        contexts.append(torch.autocast(kind, getattr(torch, dtype), cache_enabled=thread["autocast_cache"]))
    for context in contexts:
        context.__enter__()
    _entered.extend(contexts)


def _autocast(torch: Any) -> dict[str, str]:
    """Return the autocast data type of each device type with autocast enabled."""
    found = {}
    for row in device_table.ROWS:
        with suppress(RuntimeError):  # Torch may not know the device type until its extension is imported.
            if torch.is_autocast_enabled(row.type):
                found[row.type] = _name(torch.get_autocast_dtype(row.type))
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the shared state of `Accelerator`s, which a rank must not inherit. Its module is looked up by name, because this
# package must not import a higher one.

_STATE = "notebook_accelerate.state"


def reset_inherited_state() -> None:
    """Reset the shared state that this process has inherited from its parent."""
    _call_if_loaded("reset_shared_state")


def isolated_state() -> AbstractContextManager[object]:
    """Give an inline run its own shared state, and restore the kernel's shared state afterwards."""
    stack = ExitStack()
    if _STATE in sys.modules:
        stack.enter_context(sys.modules[_STATE].isolated_shared_state())
    else:  # The run may be the first to load the module.
        stack.callback(_call_if_loaded, "start_afresh")
    return stack


def _call_if_loaded(name: str) -> None:
    if _STATE in sys.modules:
        getattr(sys.modules[_STATE], name)()
