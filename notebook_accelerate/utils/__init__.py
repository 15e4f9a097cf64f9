"""Accelerate's ``utils``, names and submodules: the code lives in the rooms, and is loaded when it is asked for."""

from __future__ import annotations

from notebook_accelerate._lazy import attach
from notebook_accelerate.utils._homes import HOMES, all_homes

__getattr__, __dir__, __all__ = attach(__name__, all_homes(), submodules=(*HOMES, "rich"))
