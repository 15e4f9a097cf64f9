"""Create, measure, load, dispatch, offload and quantize models that do not fit on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.device_map import (
        check_device_map as check_device_map,
    )
    from notebook_accelerate.big_modeling.checkpoint_loading import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from notebook_accelerate.big_modeling.dispatching import (
        cpu_offload as cpu_offload,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
    )
    from notebook_accelerate.big_modeling.empty_init import (
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
    )
    from notebook_accelerate.big_modeling.estimate import (
        estimate_memory as estimate_memory,
        measure_device_map as measure_device_map,
    )
    from notebook_accelerate.big_modeling.module_hooks import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
        cpu_offload_with_hook as cpu_offload_with_hook,
        offloaded_gradients as offloaded_gradients,
    )

reexport(__name__)
