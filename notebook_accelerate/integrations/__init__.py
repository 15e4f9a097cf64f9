"""Connect other training libraries to this package."""

from __future__ import annotations
