"""Re-export the functions that compare versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
    from notebook_accelerate.hardware.versions import (
        compare_versions as compare_versions,
        is_torch_version as is_torch_version,
    )

reexport(__name__)
