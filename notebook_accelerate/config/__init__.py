"""What can be configured: dataclasses and enums without torch; ``environ`` alone reads and writes ACCELERATE_*."""

from __future__ import annotations
