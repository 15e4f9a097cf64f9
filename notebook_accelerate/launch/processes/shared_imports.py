"""Import in the kernel, once, what every rank forked from it would otherwise import in its first training step.

The first optimizer of a process imports ``torch._dynamo``, which loads 800 modules in about a second of CPU time. Ranks
share these modules if the kernel has loaded them before it forks. Measured from the call to the end of the first step,
with 2 ranks on 2 busy processors: 2.3 s before, and 0.3 s after.

The import must not change what a rank does. It is left to the ranks if the launch or the function sets variables that
are read during the import, or if it would load a module from the user's folders into the kernel.
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
from notebook_accelerate.telemetry.tracebacks import describe_error

MODULE = "torch._dynamo"
NOTE_SECONDS = 0.5
"""Show a note if the import takes longer than this."""
SLICE_SECONDS = 0.05
"""Seconds between two checks of whether the run is to be stopped during the import."""


# ---- the import


class _Import(threading.Thread):
    """Imports the module on a thread of its own, which an interrupt of the cell cannot end halfway.

    The thread that forks the ranks must not import, because an OpenMP team created there would break the ranks.

    Attributes:
        variables: The variables that the import reads, at its start.
        error: The error of the import, if it failed.
    """

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__(name="notebook-accelerate-import", daemon=True)
        self.variables = import_variables(os.environ)

    def run(self) -> None:
        had_folder = _CACHE_FOLDER in os.environ
        try:
            with gc_paused():
                importlib.import_module(MODULE)
        except BaseException as error:  # noqa: BLE001 - ranks of another process try again, and report the error
            self.error = error
        finally:
            if not had_folder:  # Torch sets the variable again when it needs it.
                os.environ.pop(_CACHE_FOLDER, None)


_import: _Import | None = None
"""The import for an earlier launch, or for this one. It is tried once."""


def load_for_training(
    function: Callable[..., Any],
    arguments: Sequence[object],
    variables: Mapping[str, str],
    note: Callable[[str], None],
    stopping: Callable[[], bool],
) -> bool:
    """Load what ranks that train need into this process, before they are forked.

    Args:
        function: The function that the ranks will run.
        arguments: Its positional arguments.
        variables: The environment variables that the launch sets.
        note: Shows the user a line if the import is slow.
        stopping: Returns whether the run is to be stopped.

    Returns:
        Whether the import may have made this process unsafe to fork; see `failure`.

    Raises:
        RunStoppedError: The run was stopped during the import, which continues.
    """
    global _import  # noqa: PLW0603 - one import per process
    if _import is None:
        if not (_would_help(variables) and trains(function, arguments)):
            return False
        _import = _Import()
        _import.start()
    if not _import.is_alive():
        return _import.error is not None and trains(function, arguments)
    # Wait for the import of an earlier run, too: a rank forked now could never take the locks of its modules.
    _wait_for(_import, note, stopping)
    return True


def failure() -> str:
    """Return how the import failed, as a phrase, or "". Afterwards, forked ranks cannot import the module either."""
    error = None if _import is None else _import.error
    return f"importing {MODULE} failed there ({describe_error(error)})" if error is not None else ""


def _would_help(variables: Mapping[str, str]) -> bool:
    """Return whether the kernel can import the module just as the ranks of the launch would."""
    launch = {**os.environ, **variables}
    return (
        "torch" in sys.modules
        and MODULE not in sys.modules
        and import_variables(launch) == import_variables(os.environ)
        and launch.keys().isdisjoint(_DEBUGGING)
        and not _shadowed_by_user()
    )


def _wait_for(thread: threading.Thread, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
    note_at = time.monotonic() + NOTE_SECONDS
    while thread.is_alive():
        thread.join(SLICE_SECONDS)
        if stopping():
            raise RunStoppedError("the run was stopped while its ranks were started")
        if time.monotonic() > note_at and thread.is_alive():
            note_at = float("inf")
            note(f"importing {MODULE} for all ranks that train, once per kernel")


# ---- the variables that the import reads

_CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Set by the import to its default value, and read again whenever it is needed."""
_DEBUGGING = frozenset({"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_CPROFILE"})
"""With these variables, the module writes a summary at the end of the process that has imported it."""
_READ = (
    "AOT", "INDUCTOR_", "MPMATH_", "PARTITIONER_", "SYMPY_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_CACHING_",
    "TORCH_COMPILE", "TORCH_DYNAMO_", "TORCH_FAKE_", "TORCH_STRICT_",
)  # fmt: skip
"""What the names of the variables start with."""


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``environment`` that the import may read."""
    return {name: value for name, value in environment.items() if _is_read(name)}


def _is_read(name: str) -> bool:
    return name.startswith(_READ) and name != _CACHE_FOLDER


def hazard(environment: Mapping[str, str]) -> str:
    """Return why ranks with this environment cannot share what the kernel has imported for an earlier launch, or ""."""
    if _import is None or MODULE not in sys.modules:
        return ""
    now, before = import_variables(environment), _import.variables
    changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    return f"{changed[0]} has changed since the kernel imported {MODULE} for an earlier launch" if changed else ""


# ---- modules of the user

OPTIONAL = frozenset({
    "colorama", "flint", "fx2trt_oss", "gmpy", "gmpy2", "hypothesis", "mpmath", "networkx", "numpy", "onnx", "onnx_tf",
    "onnxruntime", "pandas", "sklearn", "sympy", "tabulate", "tensorflow", "tensorrt", "torch", "torch2trt",
    "torchdistx", "tree", "triton", "tvm", "xarray",
})  # fmt: skip
"""The packages outside the standard library that the import loads or looks for."""


def _shadowed_by_user() -> bool:
    """Return whether a folder outside the installation has a module with the name of one that the import may load."""
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
    with suppress(OSError):  # The folder may not exist, or may be an archive.
        for entry in os.scandir(folder):
            if entry.name.endswith((".py", ".pyc", ".so")) or Path(entry, "__init__.py").exists():
                yield entry.name.partition(".")[0]


# ---- whether a function trains

_TRAINING = frozenset({"backward", "fit", "optim", "prepare"})
"""A function that uses one of these names probably creates an optimizer, or wraps a model for training."""
MAX_FUNCTIONS = 300
"""The number of the user's functions that are searched."""


def trains(function: Callable[..., Any], arguments: Sequence[object] = ()) -> bool:
    """Return whether a function, or a function of the user that it refers to, probably trains a model.

    Return False if one of them names a variable that the import reads, because it may set it.
    """
    codes = list(_codes([function, *arguments]))
    return any(map(_names_training, codes)) and not any(map(_names_variable, codes))


def _names_training(code: CodeType) -> bool:
    return any(name in _TRAINING or name.endswith("Trainer") for name in code.co_names)


def _names_variable(code: CodeType) -> bool:
    """Return whether one of the code's constants is the name of a variable that the import reads."""
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
    """Yield the values that ``code``, a part of ``function``, refers to, as far as they can be known."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (vars(value).get(attribute) for attribute in code.co_names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # The cell is empty.
            yield cell.cell_contents


def _functions_of(value: object) -> Iterator[FunctionType]:
    """Yield the Python functions that a call of ``value``, or of its methods, may run."""
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
