"""Re-exports: helpers for models, files and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.checkpointing import (
        clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
        load as load,
        save as save,
    )
    from notebook_accelerate.config.plain_values import (
        convert_bytes as convert_bytes,
        get_pretty_name as get_pretty_name,
        merge_dicts as merge_dicts,
        recursive_getattr as recursive_getattr,
    )
    from notebook_accelerate.hardware.addresses import (
        check_os_kernel as check_os_kernel,
        get_free_port as get_free_port,
        is_port_in_use as is_port_in_use,
    )
    from notebook_accelerate.state.seeding import wait_for_everyone as wait_for_everyone
    from notebook_accelerate.strategies.module_queries import (
        compile_regions as compile_regions,
        compile_regions_deepspeed as compile_regions_deepspeed,
        compile_regions_fsdp2 as compile_regions_fsdp2,
        get_model_tp_size as get_model_tp_size,
        get_module_children_bottom_up as get_module_children_bottom_up,
        has_compiled_regions as has_compiled_regions,
        has_repeated_blocks as has_repeated_blocks,
        is_repeated_blocks as is_repeated_blocks,
        model_has_dtensor as model_has_dtensor,
    )
    from notebook_accelerate.strategies.module_queries import (
        extract_model_from_parallel as extract_model_from_parallel,
        is_compiled_module as is_compiled_module,
    )

reexport(__name__)
