"""Models larger than a device: made empty, measured, placed, loaded, offloaded, quantized."""

from __future__ import annotations

from notebook_accelerate._lazy import attach

_HOMES = {
    "big_modeling.attach": ("attach_layerwise_casting_hooks",),
    "big_modeling.dispatching": ("cpu_offload", "disk_offload", "dispatch_model"),
    "big_modeling.empty_init": ("init_empty_weights", "init_on_device"),
    "big_modeling.checkpoint_loading": ("load_checkpoint_and_dispatch",),
    "big_modeling.user_offload": ("cpu_offload_with_hook",),
    "big_modeling.estimate": ("estimate_memory",),
    "big_modeling.gradients": ("offloaded_gradients",),
}

__getattr__, __dir__, __all__ = attach(__name__, _HOMES)
