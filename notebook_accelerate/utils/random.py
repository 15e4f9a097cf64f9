"""Re-exports: random number generators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.data_loader.shard_loader import (
        synchronize_rng_state as synchronize_rng_state,
        synchronize_rng_states as synchronize_rng_states,
    )
    from notebook_accelerate.state.seeding import set_seed as set_seed

reexport(__name__)
