from __future__ import annotations

from tests.support import ranks
from tests.support.fresh import fresh_state

# Each rank would import it anew, which takes longer than the test; where it is not installed nothing is imported.
ranks._PRELOAD += [
    f"megatron.core.{name}"
    for name in ("dist_checkpointing", "distributed", "models.T5", "models.bert", "models.gpt", "optimizer")
]

__all__ = ["fresh_state"]
