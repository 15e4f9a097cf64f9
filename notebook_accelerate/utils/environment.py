"""Re-exports: environment variables, GPUs, NUMA nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.environ import (
        clear_environment as clear_environment,
        convert_dict_to_env_variables as convert_dict_to_env_variables,
        get_int_from_env as get_int_from_env,
        parse_choice_from_env as parse_choice_from_env,
        parse_flag_from_env as parse_flag_from_env,
        patch_environment as patch_environment,
        purge_accelerate_environment as purge_accelerate_environment,
        str_to_bool as str_to_bool,
    )
    from notebook_accelerate.hardware.gpu_properties import *
    from notebook_accelerate.state.world import (
        CPUInformation as CPUInformation,
        get_cpu_distributed_information as get_cpu_distributed_information,
        override_numa_affinity as override_numa_affinity,
        set_numa_affinity as set_numa_affinity,
    )
    from notebook_accelerate.hardware.addresses import are_libraries_initialized as are_libraries_initialized

reexport(__name__)
