"""Re-exports: PyTorch/XLA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.commands.launch_environments import install_xla as install_xla
else:
    __getattr__, __dir__, __all__ = attach(__name__)
