"""Re-export the progress bar that the first rank on each machine shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.logging import tqdm as tqdm

reexport(__name__)
