"""The configuration file, under the paths Accelerate has it."""

from __future__ import annotations

from notebook_accelerate._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {}, submodules=("config_args", "default"))
