"""The part of the kernel's state that every rank starts with, whichever way it is started.

A rank starts as a function called in the cell would: with the torch and numpy settings of the process and of the cell's
thread. If the user has seeded one of the kernel's random number generators, all ranks start from the states of all
generators, so that a run can be repeated. A launch does not advance the kernel's own generators. If nothing was seeded,
each rank of each launch seeds its generators from the system, as processes started by torchrun do. Otherwise, all ranks
would train on the same random numbers, and every launch would repeat the one before.

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
"""Torch's process-wide settings that a rank would lack if it were not forked from the kernel, by name.

The names are functions that set a value, each with the function that returns it, and attributes.
"""

_PYTHON_SETTINGS: dict[str, str] = {
    "sys.setrecursionlimit": "sys.getrecursionlimit",
    "sys.setswitchinterval": "sys.getswitchinterval",
    "sys.set_int_max_str_digits": "sys.get_int_max_str_digits",
    "socket.setdefaulttimeout": "socket.getdefaulttimeout",
}
"""Functions of the standard library that change a setting, each with the function that returns the setting."""

_LARGEST_SEED, _LARGEST_DEVICE_SEED = 1 << 48, 1 << 32
"""Seeds below these count as chosen by the user. Torch draws its own from 64 random bits, and for CUDA from 53."""
_REFILLS = 100
"""Number of blocks of 624 draws from ``random`` to follow. After more draws, the generator counts as seeded."""

_torch_seed_at_import: int | None = sys.modules["torch"].initial_seed() if "torch" in sys.modules else None
_python_at_start: Any = None
"""The state of ``random`` when this module was imported, or when this process was forked later."""


def _note_python_state() -> None:
    global _python_at_start  # noqa: PLW0603 - a process has one
    _python_at_start = random.getstate()


_note_python_state()
os.register_at_fork(after_in_child=_note_python_state)  # Python seeds `random` again in a forked process.

_entered: list[AbstractContextManager[Any]] = []
"""Contexts that this rank never leaves. They are kept, because inference mode ends when its guard is collected."""


@dataclass
class InheritedState:
    """The state of a kernel and of one of its threads. Fields are None or empty if their library is not loaded.

    The states of random number generators are also None if the user has seeded none of them.

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
    state = InheritedState(python=_python_settings(), umask=_umask())
    numpy, torch = _loaded("numpy", "geterr"), _loaded_torch()
    if numpy is not None:
        state.numpy_errors = numpy.geterr()
    if torch is not None:
        state.settings = _process_settings(torch)
        state.thread = _thread_settings(torch)
    if _is_seeded(_loaded_numpy_random(), torch):
        state.python_rng = random.getstate()
        state.numpy_rng = None if numpy is None else numpy.random.get_state()
        if torch is not None:
            state.torch_rng = torch.get_rng_state().numpy().tobytes()
            state.device_seed = cuda_seed()
    return state


def _loaded(name: str, attribute: str) -> Any:
    """Return a module, or None if it is not loaded, or is still being imported and lacks the attribute."""
    module = sys.modules.get(name)
    return module if hasattr(module, attribute) else None


def _loaded_torch() -> Any:
    return _loaded("torch", "get_default_device")


def _loaded_numpy_random() -> Any:
    return _loaded("numpy.random", "get_bit_generator")


def apply_inherited_state(state: InheritedState) -> None:
    """Apply the captured state to this process and the calling thread."""
    _apply_random_state(state)
    for name, value in state.python.items():
        module, _, setting = name.partition(".")
        getattr(import_module(module), setting)(value)
    if state.umask is not None:
        os.umask(state.umask)
    if state.numpy_errors:
        import_module("numpy").seterr(**state.numpy_errors)
    if state.settings:
        torch = import_module("torch")
        _apply_process_settings(torch, state.settings)
        _apply_thread_settings(torch, state.thread)


# ---- random numbers


def _is_seeded(numpy_random: Any, torch: Any) -> bool:
    """Return whether the user has seeded a random number generator of this process.

    Args:
        numpy_random: The module, or None if it is not loaded.
        torch: The module, or None if it is not loaded.
    """
    return (
        (torch is not None and _is_torch_seeded(torch))
        or (numpy_random is not None and _is_numpy_seeded(numpy_random))
        or not _has_only_drawn(_python_at_start, random.getstate())
    )


def _is_torch_seeded(torch: Any) -> bool:
    seed = torch.initial_seed()
    if _torch_seed_at_import is not None and seed != _torch_seed_at_import:
        return True
    device = cuda_seed()
    if device is not None and (device < _LARGEST_DEVICE_SEED or not torch.cuda.is_initialized()):
        return True
    return bool(min(seed, (1 << 64) - seed) < _LARGEST_SEED)  # Torch adds 2**64 to a negative seed.


def _is_numpy_seeded(numpy_random: Any) -> bool:
    # A generator that numpy has seeded from the system at its import has a seed sequence, until the user seeds it.
    # numpy 1.24 does not show the sequence.
    generator = numpy_random.get_bit_generator()
    return type(generator) is not numpy_random.MT19937 or getattr(generator, "seed_seq", None) is None


def _has_only_drawn(before: Any, now: Any) -> bool:
    """Return whether drawing at most `_REFILLS` blocks of numbers from ``random`` leads from one state to another."""
    walk = random.Random()  # noqa: S311 - it only repeats the numbers of another generator
    walk.setstate(before)
    for _ in range(_REFILLS):
        *block, position = walk.getstate()[1]
        if tuple(block) == now[1][:-1]:
            return bool(position <= now[1][-1])
        # Draw the rest of the block and the first number of the next one, which makes ``random`` compute that block.
        walk.getrandbits(32 * (len(block) - position + 1))
    return False


def _apply_random_state(state: InheritedState) -> None:
    """Set the random number generators to the captured states, or seed the loaded ones from the system."""
    if state.python_rng is None:
        _seed_from_system(_loaded_numpy_random(), _loaded_torch())
        return
    random.setstate(state.python_rng)
    if state.numpy_rng is not None:
        import_module("numpy").random.set_state(state.numpy_rng)
    if state.torch_rng is not None:
        torch = import_module("torch")
        numbers = torch.frombuffer(bytearray(state.torch_rng), dtype=torch.uint8)
        torch.set_rng_state(numbers)
        if state.device_seed is not None:
            torch.manual_seed(state.device_seed)  # The seed is used once a device is initialised.
            torch.set_rng_state(numbers)


def _seed_from_system(numpy_random: Any, torch: Any) -> None:
    random.seed()
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        # Devices that were not seeded in the kernel are seeded from the system on their first use in this process.
        torch.default_generator.seed()


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
    """Return a setting, or None if this torch lacks it, or if its value cannot be read with the older of two APIs."""
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
