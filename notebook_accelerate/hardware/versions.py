"""Compares versions of packages, read from their metadata without importing them."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version, parse

from notebook_accelerate.config.constants import STR_OPERATION_TO_FUNC
from notebook_accelerate.hardware import torch_build


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None without it.

    Args:
        distribution: Its name, such as notebook-accelerate.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
