from __future__ import annotations

from tests.support.fresh import fresh_state

__all__ = ["fresh_state"]
