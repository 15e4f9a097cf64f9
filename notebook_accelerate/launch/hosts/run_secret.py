"""The secret that the notebooks and commands of one run share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig

SECRET_VARIABLE = "NOTEBOOK_ACCELERATE_SECRET"  # noqa: S105 - the name of a variable


def shared_secret(config: LaunchConfig) -> str:
    """Return the secret that a launch was given; "" without one."""
    return str((config.rdzv_conf or {}).get("secret") or os.environ.get(SECRET_VARIABLE, ""))


def secret_for_command(file: str | None) -> str:
    """Return the secret of a command: from a file, or from the environment.

    Raises:
        ValueError: There is none, or the file cannot be read.
    """
    if file is not None:
        try:
            found = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--secret_file {file}: {error}") from None
        if not found:
            raise ValueError(f"--secret_file {file} is empty; write the run's secret into it")
        return found
    if found := os.environ.get(SECRET_VARIABLE, ""):
        return found
    raise ValueError(
        f"a host needs the run's secret: set {SECRET_VARIABLE}, or pass --secret_file with a file that contains it"
    )
