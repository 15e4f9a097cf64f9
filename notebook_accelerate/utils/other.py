"""Helper functions for models, files and the machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

from notebook_accelerate._lazy import reexport
from notebook_accelerate.config import environ
from notebook_accelerate.state import PartialState
from notebook_accelerate.strategies.module_queries import (
    compile_regions as compile_regions,
    is_compiled_module as is_compiled_module,
)
from notebook_accelerate.torch_internals import is_compiled_in_place

if TYPE_CHECKING:
    import torch

if TYPE_CHECKING:
    from notebook_accelerate.checkpointing import (
        clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
        load as load,
        save as save,
    )
    from notebook_accelerate.config.plain_values import (
        convert_bytes as convert_bytes,
        merge_dicts as merge_dicts,
    )
    from notebook_accelerate.hardware.addresses import (
        get_free_port as get_free_port,
    )
    from notebook_accelerate.hardware.versions import (
        check_os_kernel as check_os_kernel,
    )
    from notebook_accelerate.strategies.module_queries import (
        extract_model_from_parallel as extract_model_from_parallel,
        get_model_tp_size as get_model_tp_size,
        has_repeated_blocks as has_repeated_blocks,
        is_repeated_blocks as is_repeated_blocks,
        model_has_dtensor as model_has_dtensor,
    )

reexport(__name__)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function, or of an object's class.

    Args:
        obj: The class, the function, or any other object.
    """
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = type(obj)
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at a dotted path.

    Args:
        obj: The object where the path starts.
        attr: The path, such as ``model.layers.0``.

    Raises:
        AttributeError: A part of the path does not exist.
    """
    return reduce(getattr, attr.split("."), obj)


_DEFAULT_PORT = 29500


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a process listens on a port of this machine.

    Args:
        port: The port to check. If None, it is MASTER_PORT or, if that is not set, 29500.
    """
    number = int(port) if port is not None else environ.integer("MASTER_PORT", _DEFAULT_PORT)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", number)) == 0


compile_regions_deepspeed = compile_regions
compile_regions_fsdp2 = compile_regions


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether a model or a submodule was compiled with ``torch.compile``.

    Args:
        module: The model to check.
    """
    return any(is_compiled_module(child) or is_compiled_in_place(child) for child in module.modules())


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, with children before their parents and the model last.

    Args:
        model: The model that contains the modules.
        return_fqns: Whether to return pairs of full name and module.

    Returns:
        The modules or pairs. A shared module appears once.
    """
    named = list(_bottom_up(model, "", set()))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(module: torch.nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module's descendants in the order of registration, and then the module, each once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def wait_for_everyone() -> None:
    """Wait until all ranks reach this call; every rank must call this."""
    PartialState().wait_for_everyone()
