"""Accelerate's module paths for what scripts import from its command line."""

from __future__ import annotations
