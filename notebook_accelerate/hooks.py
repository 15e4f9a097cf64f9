"""Re-exports the module hooks under Accelerate's module name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.align_hook import (
        AlignDevicesHook as AlignDevicesHook,
        attach_align_device_hook as attach_align_device_hook,
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
        attach_execution_device_hook as attach_execution_device_hook,
    )
    from notebook_accelerate.big_modeling.dispatching import (
        _accelerate_added_attributes as _accelerate_added_attributes,
    )
    from notebook_accelerate.big_modeling.module_hooks import (
        CpuOffload as CpuOffload,
        LayerwiseCastingHook as LayerwiseCastingHook,
        ModelHook as ModelHook,
        SequentialHook as SequentialHook,
        UserCpuOffloadHook as UserCpuOffloadHook,
        add_hook_to_module as add_hook_to_module,
        remove_hook_from_module as remove_hook_from_module,
        remove_hook_from_submodules as remove_hook_from_submodules,
    )

reexport(__name__, without=["_accelerate_added_attributes"])
