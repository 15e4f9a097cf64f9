"""The commands, and Accelerate's module paths for the names that scripts import from its command line."""

from __future__ import annotations
