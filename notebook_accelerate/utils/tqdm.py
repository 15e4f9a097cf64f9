"""Re-exports: the progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.logging import tqdm as tqdm
else:
    __getattr__, __dir__, __all__ = reexport(__name__)
