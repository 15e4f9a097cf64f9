"""`ParallelismConfig` under Accelerate's name for its module."""

from __future__ import annotations

from notebook_accelerate.config.parallelism_config import ParallelismConfig

__all__ = ["ParallelismConfig"]
