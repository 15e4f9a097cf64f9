"""The function of warm ranks, for the kernel's side: only this package imports the worker's room."""

from __future__ import annotations

from notebook_accelerate.worker.warm_cells import warm_rank

__all__ = ["warm_rank"]
