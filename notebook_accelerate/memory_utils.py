"""Re-exports `utils.memory` under the former name of that module in Accelerate."""

from __future__ import annotations

import warnings

warnings.warn(
    "memory_utils has moved to utils.memory; write `from notebook_accelerate import find_executable_batch_size`",
    FutureWarning,
    stacklevel=2,
)
