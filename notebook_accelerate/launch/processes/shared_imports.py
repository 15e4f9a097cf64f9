"""Import once in the kernel what every forked rank would otherwise import in its first training step.

The first optimizer of a process imports ``torch._dynamo``, which loads 800 modules in about a second of CPU time. Ranks
share these modules if the kernel has loaded them before it forks. With 2 ranks on 2 busy processors, this reduced the
time from the call to the end of the first step from 2.3 s to 0.3 s.

The import must not change what a rank does. It is therefore left to the ranks if the launch or the function sets
environment variables that are read during the import, or if the import would load a module from the user's folders.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from notebook_accelerate._collection import gc_paused
from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.processes.pickled import PickledFunction
from notebook_accelerate.telemetry.tracebacks import describe_error
from notebook_accelerate.telemetry.worker_order import OPTIMIZER_MODULE as MODULE

NOTE_SECONDS = 0.5
"""Seconds after which a note about the import is shown."""
SLICE_SECONDS = 0.05
"""Seconds between two checks, during the import, of whether the user has stopped the run."""


# ---- the import


class _Import(threading.Thread):
    """Imports the module on a separate thread, where an interrupt of the cell cannot end the import halfway.

    The thread that forks the ranks must not import the module, because an OpenMP team created on that thread would
    break the ranks.

    Args:
        accelerator: Whether to import the module of `Accelerator` as well.

    Attributes:
        variables: The environment variables that the import reads, as they were when it started.
        error: The error that the import raised, or None.
    """

    error: BaseException | None = None

    def __init__(self, *, accelerator: bool) -> None:
        super().__init__(name="notebook-accelerate-import", daemon=True)
        self._modules = (MODULE, "notebook_accelerate.accelerator") if accelerator else (MODULE,)
        self.variables = import_variables(os.environ)

    def run(self) -> None:
        had_folder = _CACHE_FOLDER in os.environ
        try:
            with gc_paused():
                for module in self._modules:
                    importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - ranks of another process try again, and report the error
            self.error = error
        finally:
            if not had_folder:  # Torch sets the variable again when it needs it.
                os.environ.pop(_CACHE_FOLDER, None)


_import: _Import | None = None
"""The import for this launch or an earlier one, or None. It is tried only once."""


def load_for_training(
    function: Callable[..., Any],
    arguments: Sequence[object],
    variables: Mapping[str, str],
    note: Callable[[str], None],
    stopping: Callable[[], bool],
) -> bool:
    """Load into this process what ranks need for training, before they are forked.

    Args:
        function: The function that the ranks will run.
        arguments: The function's positional arguments.
        variables: The environment variables that the launch sets.
        note: A function that shows the user a line, for a slow import.
        stopping: A function that returns whether the user has stopped the run.

    Returns:
        Whether the import may have made this process unsafe to fork; see `failure`.

    Raises:
        RunStoppedError: The user stopped the run during the import. The import continues.
    """
    global _import  # noqa: PLW0603 - one import per process
    if _import is None:
        # Read the user's folders last, because most launches end at one of the other checks.
        if not (_would_help(variables) and trains(function, arguments)) or _shadowed_by_user():
            return False
        _import = _Import(accelerator=_uses_accelerator(function, arguments))
        _import.start()
    elif not _import.is_alive():
        return _import.error is not None and trains(function, arguments)
    # Even if an earlier run started the import, wait for it, because a rank forked now could never take the locks of
    # modules that are being imported.
    _wait_for(_import, note, stopping)
    return True


def failure() -> str:
    """Return how the import failed, as a phrase, or "" if it has not failed.

    After a failure, forked ranks cannot import the module either.
    """
    error = None if _import is None else _import.error
    return f"importing {MODULE} failed there ({describe_error(error)})" if error is not None else ""


def _would_help(variables: Mapping[str, str]) -> bool:
    """Return whether importing the module in the kernel saves time, and variables do not change its result in ranks."""
    return (
        "torch" in sys.modules
        and MODULE not in sys.modules
        and launch_variables(variables) == import_variables(os.environ)
        and {*os.environ, *variables}.isdisjoint(_DEBUGGING)
    )


def _wait_for(thread: threading.Thread, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
    note_at = time.monotonic() + NOTE_SECONDS
    while thread.is_alive():
        thread.join(SLICE_SECONDS)
        if stopping():
            raise RunStoppedError("the run was stopped while its ranks were starting")
        if time.monotonic() > note_at and thread.is_alive():
            note_at = float("inf")
            note(f"importing {MODULE} for all ranks that train, once per kernel")


# ---- the environment variables that the import reads

_CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""A variable that the import sets to its default value, and that torch reads again whenever it needs the folder."""
_DEBUGGING = frozenset({"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_CPROFILE"})
"""Variables that make the module write a summary when the process that has imported it exits."""
_READ = (
    "AOT", "INDUCTOR_", "MPMATH_", "PARTITIONER_", "SYMPY_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_CACHING_",
    "TORCH_COMPILE", "TORCH_DYNAMO_", "TORCH_FAKE_", "TORCH_STRICT_",
)  # fmt: skip
"""The prefixes of the variables that the import reads."""


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``environment`` that the import may read."""
    return {name: value for name, value in environment.items() if _is_read(name)}


def launch_variables(variables: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables that the import may read in the ranks of a launch that sets ``variables``."""
    return import_variables({**os.environ, **(variables or {})})


def _is_read(name: str) -> bool:
    return name.startswith(_READ) and name != _CACHE_FOLDER


def hazard(variables: Mapping[str, str] | None) -> str:
    """Return why the ranks of a launch that sets ``variables`` cannot share what the kernel has already imported.

    Return "" if they can, or if the kernel has not imported anything.
    """
    if _import is None or MODULE not in sys.modules:
        return ""
    now, before = launch_variables(variables), _import.variables
    changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    return f"{changed[0]} has changed since the kernel imported {MODULE} for an earlier launch" if changed else ""


# ---- modules in the user's folders

OPTIONAL = frozenset({
    "colorama", "flint", "fx2trt_oss", "gmpy", "gmpy2", "hypothesis", "mpmath", "networkx", "numpy", "onnx", "onnx_tf",
    "onnxruntime", "pandas", "sklearn", "sympy", "tabulate", "tensorflow", "tensorrt", "torch", "torch2trt",
    "torchdistx", "tree", "triton", "tvm", "xarray",
})  # fmt: skip
"""Packages outside the standard library that the import loads or searches for."""


def _shadowed_by_user() -> bool:
    """Return whether a folder of the user contains a module with the same name as one that the import may load."""
    wanted = (sys.stdlib_module_names | OPTIONAL) - sys.modules.keys()
    return any(not wanted.isdisjoint(_modules_in(Path(entry))) for entry in sys.path if not _is_installed(entry))


def _is_installed(entry: object) -> bool:
    """Return whether an entry of ``sys.path`` belongs to Python or its installed packages, or is ignored by Python."""
    if not isinstance(entry, str):
        return True
    return entry.startswith(_STANDARD_LIBRARY) or not _INSTALLED.isdisjoint(Path(entry).parts)


_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def _modules_in(folder: Path) -> Iterator[str]:
    """Yield the names of the modules and packages in a folder."""
    with suppress(OSError), os.scandir(folder) as entries:  # The folder may not exist, or may be an archive.
        for entry in entries:
            if entry.name.endswith((".py", ".pyc", ".so")) or Path(entry, "__init__.py").exists():
                yield entry.name.partition(".")[0]


# ---- whether a function trains

_TRAINING = frozenset({"backward", "fit", "optim", "prepare"})
"""Names that suggest that a function creates an optimizer, or wraps a model for training."""
MAX_FUNCTIONS = 300
"""Maximum number of the user's functions to search."""
_learned: set[str] = set()


def learn(name: str) -> None:
    """Record that ranks that ran a function with this name have imported the module."""
    _learned.add(name)


def trains(function: Callable[..., Any], arguments: Sequence[object] = ()) -> bool:
    """Return whether a function, or a function of the user that it refers to, probably trains a model.

    The answer is also True if ranks of an earlier launch of the function have imported the module. Return False if one
    of these functions contains the name of an environment variable that the import reads, because the function may set
    that variable.
    """
    if isinstance(function, PickledFunction):
        return function.trains
    codes = list(_codes([function, *arguments]))
    learned = getattr(function, "__name__", type(function).__name__) in _learned
    return (learned or any(map(_names_training, codes))) and not any(map(_names_variable, codes))


def _uses_accelerator(function: Callable[..., Any], arguments: Sequence[object]) -> bool:
    return any("Accelerator" in code.co_names for code in _codes([function, *arguments]))


def _names_training(code: CodeType) -> bool:
    return any(name in _TRAINING or name.endswith("Trainer") for name in code.co_names)


def _names_variable(code: CodeType) -> bool:
    """Return whether one of the code's constants is the name of an environment variable that the import reads."""
    for constant in code.co_consts:
        names = constant if isinstance(constant, tuple) else (constant,)  # The keys of a dictionary are a tuple.
        if any(isinstance(name, str) and name.isidentifier() and _is_read(name) for name in names):
            return True
    return False


def _codes(values: list[object]) -> Iterator[CodeType]:
    """Yield the code of the functions in ``values``, and of the user's functions that they refer to."""
    pending = [found for value in values for found in _functions_of(value)]
    seen: set[int] = set()
    while pending and len(seen) < MAX_FUNCTIONS:
        function = pending.pop(0)
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for code in _nested(function.__code__):
            yield code
            pending += [
                found
                for value in _values(function, code)
                for found in _functions_of(value)
                if _is_of_user(found.__code__.co_filename)
            ]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _values(function: FunctionType, code: CodeType) -> Iterator[object]:
    """Yield the values to which ``code``, a part of ``function``, refers, as far as they are known."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (vars(value).get(attribute) for attribute in code.co_names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # The cell may be empty.
            yield cell.cell_contents


def _functions_of(value: object) -> Iterator[FunctionType]:
    """Yield the Python functions that calling ``value`` or its methods may run."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        yield value
        return
    members = value if isinstance(value, type) else type(value)
    for member in vars(members).values():
        found = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if isinstance(found, FunctionType):
            yield found


_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


def _is_of_user(file: str) -> bool:
    return not (_is_installed(file) or file.startswith(_PACKAGE))
