"""Detect devices, without creating a context on them, and the notebook host: Jupyter, Colab, Kaggle or VS Code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.hardware.detection import HardwareInfo as HardwareInfo, detect as detect

reexport(__name__)
