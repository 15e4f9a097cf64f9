"""Detects devices, without creating a context, and notebook hosts: Jupyter, Colab, Kaggle and VS Code."""

from __future__ import annotations

from notebook_accelerate.hardware.detection import HardwareInfo, detect

__all__ = ["HardwareInfo", "detect"]
