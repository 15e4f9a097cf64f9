from __future__ import annotations

import os

from tests.support.fresh import fresh_state

os.environ.setdefault("PJRT_DEVICE", "CPU")  # Without a TPU, torch_xla uses this device.

__all__ = ["fresh_state"]
