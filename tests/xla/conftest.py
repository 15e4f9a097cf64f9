from __future__ import annotations

import os

from tests.support.fresh import fresh_state

os.environ.setdefault("PJRT_DEVICE", "CPU")  # torch_xla uses this device without a TPU.

__all__ = ["fresh_state"]
