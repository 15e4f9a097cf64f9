from __future__ import annotations

import os

import pytest

from tests.support.fresh import fresh_state

os.environ.setdefault("PJRT_DEVICE", "CPU")  # what torch_xla computes on without a TPU
pytest.importorskip("torch_xla", reason="torch_xla is not installed: make test-xla", exc_type=ImportError)

__all__ = ["fresh_state"]
