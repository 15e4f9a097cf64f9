"""Re-exports: availability checks of packages and devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.hardware.feature_checks import *

reexport(__name__)
