"""Re-exports: batch sizes that fit in memory, and releasing memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.hardware.batch_size_search import (
        clear_device_cache as clear_device_cache,
        find_executable_batch_size as find_executable_batch_size,
        release_memory as release_memory,
        should_reduce_batch_size as should_reduce_batch_size,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
