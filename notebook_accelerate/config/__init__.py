"""Configuration dataclasses and enums, without torch; ``environ`` alone reads and writes ACCELERATE_* variables."""

from __future__ import annotations
