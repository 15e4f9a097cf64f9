"""Finds packages and compares their versions, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import Any

from packaging.version import Version, parse

from notebook_accelerate.config.constants import STR_OPERATION_TO_FUNC
from notebook_accelerate.hardware import torch_build


def is_package(name: str, distribution: str | None = None, minimum: str | None = None) -> bool:
    """Return whether a package can be imported, without importing it.

    Args:
        name: Its import name.
        distribution: Name of its distribution; None: the import name. A folder with the package's name (such as the
            logs of wandb) does not count.
        minimum: The minimum version.

    Returns:
        Whether it is installed, in the minimum version or later.
    """
    spec = _spec(name)
    if spec is None or (spec.origin is None and distribution is None and not installed_version(name)):
        return False
    if minimum is None:
        return True
    version = installed_version(distribution or name)
    return version is not None and parse(version) >= parse(minimum)


def _spec(name: str) -> Any:
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)  # None instead of a module hides it
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None without it.

    Args:
        distribution: Its name, such as notebook-accelerate.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_torchao_available() -> bool:
    """Return whether torchao is installed, in a version with float8 training."""
    return is_package("torchao", minimum="0.6.1")


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare a package's version, or a version, with another.

    Args:
        library_or_version: Name of an installed package, or a version.
        operation: >, >=, ==, !=, <= or <.
        requirement_version: The version on the right-hand side.

    Returns:
        Whether the comparison holds.

    Raises:
        ValueError: The operation is not allowed.
        importlib.metadata.PackageNotFoundError: The package is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation={operation!r} is not allowed; pass one of {', '.join(STR_OPERATION_TO_FUNC)}")
    version = library_or_version
    if isinstance(version, str):
        version = parse(importlib.metadata.version(version))
    return bool(STR_OPERATION_TO_FUNC[operation](version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch's version, without its build suffix (+cu128), with another.

    Args:
        operation: >, >=, ==, !=, <= or <.
        version: The version on the right-hand side.

    Returns:
        Whether the comparison holds.
    """
    return compare_versions(parse(parse(torch_build.read().version or "0").public), operation, version)
