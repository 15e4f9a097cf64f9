"""Re-exports: the packages for TPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.commands.tpu_packages import (
        install_tpu as install_tpu,
        install_xla as install_xla,
    )

reexport(__name__)
