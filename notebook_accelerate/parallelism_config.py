"""Re-exports `ParallelismConfig` under Accelerate's module name."""

from __future__ import annotations

from notebook_accelerate.config.parallelism_config import ParallelismConfig

__all__ = ["ParallelismConfig"]
