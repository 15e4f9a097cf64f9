"""Re-export the functions that offload weights to disk and load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.offload_folder import (
        OffloadedWeightsLoader as OffloadedWeightsLoader,
        PrefixedDataset as PrefixedDataset,
        extract_submodules_state_dict as extract_submodules_state_dict,
        load_offloaded_weight as load_offloaded_weight,
        offload_state_dict as offload_state_dict,
        offload_weight as offload_weight,
        save_offload_index as save_offload_index,
    )

reexport(__name__)
