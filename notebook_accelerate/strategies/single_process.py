"""One process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.strategy import Strategy


class SingleStrategy(Strategy):
    """One process: models, optimizers and loaders do what torch's do."""

    name: ClassVar[str] = "single"

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context that does nothing: one process has nobody to wait for.

        Args:
            joinables: Not used.
            even_batches: Not used; passing it warns.

        Returns:
            A context manager.
        """
        if even_batches is not None:
            warn_once("join_uneven_inputs(even_batches=...) has no effect in a world of one process")
        return super().join_uneven_inputs(joinables, even_batches)
