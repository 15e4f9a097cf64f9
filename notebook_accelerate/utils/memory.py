"""Re-export the functions that find a batch size that fits in memory, and those that release memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.batch_size_search import *

reexport(__name__)
