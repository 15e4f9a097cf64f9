"""Accelerate's module paths for its command line: doors to what scripts import from there."""

from __future__ import annotations
