"""Install a package that supports TPUs: torch_xla, or torch_tpu for newer versions of torch."""

from __future__ import annotations

import shlex
import subprocess
import sys

from packaging.version import Version

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.hardware.versions import installed_version


def install_xla(upgrade: bool = False, dry_run: bool = False) -> list[str]:
    """Install torch_xla for this Python, and the torch that it was built against.

    This prints the changes, and what to install instead if torch would be downgraded. The installation replaces torch,
    so a kernel that has imported torch must be restarted.

    Args:
        upgrade: Whether to replace an installed torch_xla with a newer one.
        dry_run: Whether to only print what would change.

    Returns:
        The pip command.

    Raises:
        LaunchError: There is no torch_xla for this Python or this system, or pip failed.
    """
    python = sys.version_info[:2]
    found = [release for release in _XLA_RELEASES if release[1] <= python <= release[2]]
    if not found or sys.platform != "linux":
        raise LaunchError(
            f"there is no torch_xla for Python {python[0]}.{python[1]} on {sys.platform}: it is built for Linux and "
            f"Python {_dotted(_XLA_RELEASES[-1][1])} to {_dotted(_XLA_RELEASES[0][2])}; use such a notebook"
        )
    version = found[0][0]
    wanted = [f"torch=={version}.*", f"torch_xla[tpu]=={version}.*"]
    kept = _installed("torch_xla").startswith(f"{version}.") and not upgrade
    notes = [] if kept else _downgrade_notes(version)
    return _install("torch_xla", wanted, notes, kept=kept, upgrade=upgrade, dry_run=dry_run)


def _downgrade_notes(version: str) -> list[str]:
    """Return notes about a downgrade of torch for torch_xla, and what to install instead."""
    present = _installed_torch()
    if present is None or present.release[:2] <= Version(version).release[:2]:
        return []
    notes = [f"This downgrades torch {present} to {version}: the newest torch_xla is built against it."]
    if sys.version_info >= _TPU_PYTHON:
        notes.append("torch_tpu supports TPUs with newer versions of torch: notebook_accelerate.utils.install_tpu()")
    else:
        notes.append(f"torch_tpu, for newer versions of torch, needs Python {_dotted(_TPU_PYTHON)} or later.")
    return notes


def install_tpu(upgrade: bool = False, dry_run: bool = False) -> list[str]:
    """Install torch_tpu, which makes TPUs a device type of torch 2.11 to 2.15.

    This prints the changes. An installed torch in that range is kept, and any other version is replaced. In both cases,
    a kernel that has imported torch must be restarted.

    Args:
        upgrade: Whether to replace an installed torch_tpu with a newer one.
        dry_run: Whether to only print what would change.

    Returns:
        The pip command.

    Raises:
        LaunchError: There is no torch_tpu for this Python or this system, or pip failed.
    """
    python = sys.version_info[:2]
    if python < _TPU_PYTHON or sys.platform != "linux":
        raise LaunchError(
            f"there is no torch_tpu for Python {_dotted(python)} on {sys.platform}: it is built for Linux and Python "
            f"{_dotted(_TPU_PYTHON)} or later; use such a notebook, or torch_xla: "
            "notebook_accelerate.utils.install_xla()"
        )
    oldest, newest = _TPU_TORCH
    present = _installed_torch()
    fits = present is not None and Version(oldest) <= Version(present.base_version) <= Version(newest)
    wanted = [f"torch=={present}" if fits else f"torch>={oldest},<={newest}", "torch_tpu>=0.2"]
    kept = fits and _installed("torch_tpu") != "not installed" and not upgrade
    notes = [] if fits else [f"This replaces torch {_installed('torch')}: torch_tpu works with {oldest} to {newest}."]
    if _installed("torch_xla") != "not installed" and not kept:
        notes.append("torch_xla is installed, too, but works only with its own version of torch.")
    return _install("torch_tpu", wanted, notes, kept=kept, upgrade=upgrade, dry_run=dry_run)


_TPU_PYTHON = (3, 12)
_TPU_TORCH = ("2.11.0", "2.15.0")
"""The oldest and the newest torch that torch_tpu 0.2.0 supports, according to the metadata of its wheel."""


def _install(
    package: str, wanted: list[str], notes: list[str], *, kept: bool, upgrade: bool, dry_run: bool
) -> list[str]:
    """Print the changes, run pip unless the package is kept or this is a dry run, and return the command."""
    command = [sys.executable, "-m", "pip", "install", *(["--upgrade"] if upgrade else []), *wanted]
    here = (
        f"Here: Python {_dotted(sys.version_info[:2])}, torch {_installed('torch')}, {package} {_installed(package)}."
    )
    _print(here, *notes, f"{package} is already installed: nothing to do." if kept else shlex.join(command))
    if kept or dry_run:
        return command
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"pip could not install {package}:\n{(done.stdout + done.stderr)[-2000:]}")
    _print(f"torch is now {_installed('torch')}; restart the kernel, which has the old torch in memory.")
    return command


def _installed_torch() -> Version | None:
    found = _installed("torch")
    return None if found == "not installed" else Version(found)


# Each version of torch_xla is built against the torch of the same version. Newest first, with the oldest and the newest
# Python for which the package index has files.
_XLA_RELEASES: tuple[tuple[str, tuple[int, int], tuple[int, int]], ...] = (
    ("2.9", (3, 10), (3, 13)),
    ("2.8", (3, 10), (3, 13)),
)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _installed(name: str) -> str:
    return installed_version(name) or "not installed"


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
