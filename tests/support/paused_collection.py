"""Turns garbage collection off, for a server process that imports this module first and then only forks."""

from __future__ import annotations

import gc

gc.disable()
