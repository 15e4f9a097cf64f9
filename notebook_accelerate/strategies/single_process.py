"""The strategy of one process."""

from __future__ import annotations

from typing import ClassVar

from notebook_accelerate.strategies.strategy import Strategy


class SingleStrategy(Strategy):
    """One process: models, optimizers and loaders behave as in torch."""

    name: ClassVar[str] = "single"
