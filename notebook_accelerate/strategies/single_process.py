"""The strategy of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.strategy import Strategy


class SingleStrategy(Strategy):
    """One process: models, optimizers and loaders behave as in torch."""

    name: ClassVar[str] = "single"

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context that does nothing; passing even_batches warns."""
        if even_batches is not None:
            warn_once("join_uneven_inputs(even_batches=...) has no effect in a world of one process")
        return super().join_uneven_inputs(joinables, even_batches)
