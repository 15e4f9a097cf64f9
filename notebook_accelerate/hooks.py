"""Accelerate's ``hooks``: re-exports, nothing else."""

from __future__ import annotations

from notebook_accelerate._lazy import attach

_HOMES = {
    "big_modeling.module_hooks": (
        "LayerwiseCastingHook",
        "ModelHook",
        "SequentialHook",
        "add_hook_to_module",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    ),
    "big_modeling.align_hook": ("AlignDevicesHook",),
    "big_modeling.attach": (
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook",
    ),
    "big_modeling.user_offload": ("CpuOffload", "UserCpuOffloadHook"),
}

__getattr__, __dir__, __all__ = attach(__name__, _HOMES)
