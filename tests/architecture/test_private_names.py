"""Only one file uses torch's private names. Other libraries' private names are limited to the files listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from notebook_accelerate import torch_internals
from tests.architecture.test_structure import DEFINED, MODULES, PACKAGE, TREES, is_self

OF_TORCH = f"{PACKAGE}.torch_internals"
OF_PYTHON = frozenset({"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"})
"""Names that are documented even though they look private."""
OF_THIS_PACKAGE = frozenset(
    {"_hf_hook", "_is_accelerate_prepared", "_of_dispatch", "_old_forward", "_original_forward", "_prepared_for"}
)
"""Names that this package sets on users' objects. Libraries that use Accelerate read some of them."""
_OF_OTHERS = {
    # Transformers' models.
    "big_modeling.module_tree": {"_no_split_modules"},
    "big_modeling.module_tensors": {"_tie_weights"},
    "config.fsdp_plugin": {"_no_split_modules"},
    "inference": {"_no_split_modules"},
    # Python's own unpickler and multiprocessing, fsspec, numpy (names in pickled arrays), Lightning, rich, IPython and
    # Habana.
    "files.untrusted_files": {"_Unpickler"},
    "files.remote_paths": {"_strip_protocol"},
    "files.weight_files": {"_core", "_reconstruct"},
    "integrations.reporting": {"_LoggerConnector", "_tasks"},
    "telemetry.tracebacks": {"_filename_map"},
    # These identify the classes that cloudpickle has pickled.
    "telemetry.cells": {
        "_DYNAMIC_CLASS_TRACKER_BY_ID", "_DYNAMIC_CLASS_TRACKER_LOCK", "_get_or_create_tracker_id",
    },
    "utils.imports": {"_get_device_type"},
    "worker.plain_process": {"_IS_INTERACTIVE", "_console", "_default_context"},
    # torch_xla.
    "hardware.device_table": {"_xla_runtime_is_initialized"},
    "launch.processes.fork_probe": {"_signal", "_xla_runtime_is_initialized"},
    "strategies.xla_strategy": {"_average_gradients"},
    # Optuna's frozen trials, which have no public way to become trials again.
    "launch.sweeps": {"_trial_id"},
    # DeepSpeed and Megatron-LM, whose supported versions are pinned to one minor version.
    "strategies.deepspeed.deepspeed_engine": {"_release_process_group_references"},
    "strategies.deepspeed.deepspeed_strategy": {"_global_grad_norm", "_zero3_consolidated_16bit_state_dict"},
    "strategies.deepspeed.ulysses": {
        "_SEQUENCE_DATA_PARALLEL_GROUP", "_SEQUENCE_PARALLEL_GROUP", "_all_to_all_groups", "_attn_implementation",
    },
    "strategies.megatron.megatron_checkpoint": {"_core", "_reconstruct", "_replace_state_dict_keys_with_sharded_keys"},
    # Python's standard library: parsers that Accelerate's functions accept, names of levels, an interpreter's exit.
    "commands.launch_settings": {"_ActionsContainer"},
    "commands.parsers": {"_MutuallyExclusiveGroup"},
    "config.plain_values": {"_typeshed"},
    "integrations.import_hooks": {"_initializing"},
    "telemetry.notebook_settings": {"_levelToName"},
    "worker.entry": {"_daemonic", "_signal"},
    "worker.exit_handlers": {
        "_IOBase", "_afterfork_registry", "_exit_function", "_finalizer_registry", "_handlerList", "_io", "_popen",
        "_registered_with_atexit", "_registry", "_run_after_forkers", "_run_exitfuncs", "_threading_atexits",
    },
}  # fmt: skip
OF_OTHERS = {f"{PACKAGE}.{module}": names for module, names in _OF_OTHERS.items()}
"""Private names of other libraries, by module."""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the private names that a module imports or reads from objects, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(PACKAGE):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and not is_self(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
            names = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__"))


_BY_TEXT = ("getattr", "hasattr", "setattr", "delattr")
FOUND = {name: sorted(set(private_names(tree))) for name, tree in TREES.items()}


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    allowed = OF_PYTHON | OF_THIS_PACKAGE | DEFINED | set(torch_internals.MODULE_TABLES)
    strangers = [
        f"{module}:{line} {name}"
        for module, names in FOUND.items()
        for line, name in names
        if module != OF_TORCH and name not in allowed | OF_OTHERS.get(module, set())
    ]
    assert strangers == [], "names of torch belong in torch_internals.py, other libraries' names in OF_OTHERS"


def test_no_other_file_imports_a_private_module_of_torch() -> None:
    found = [
        f"{module}:{node.lineno} {node.module}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.") and "._" in str(node.module)
    ]
    assert [place for place in found if not place.startswith(OF_TORCH)] == []


@pytest.mark.parametrize("module", OF_OTHERS)
def test_the_list_has_no_unused_name(module: str) -> None:
    assert module in MODULES
    assert OF_OTHERS[module] - {name for _, name in FOUND[module]} == set()
