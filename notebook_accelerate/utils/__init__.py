"""The names and submodules of Accelerate's ``utils``, imported on first use from the modules that define them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.parallelism_config import ParallelismConfig as ParallelismConfig
    from notebook_accelerate.commands.config.default import write_basic_config as write_basic_config
    from notebook_accelerate.utils import rich as rich
    from notebook_accelerate.utils.ao import *
    from notebook_accelerate.utils.bnb import *
    from notebook_accelerate.utils.constants import *
    from notebook_accelerate.utils.dataclasses import *
    from notebook_accelerate.utils.deepspeed import *
    from notebook_accelerate.utils.environment import *
    from notebook_accelerate.utils.fsdp_utils import *
    from notebook_accelerate.utils.imports import *
    from notebook_accelerate.utils.launch import *
    from notebook_accelerate.utils.megatron_lm import *
    from notebook_accelerate.utils.memory import *
    from notebook_accelerate.utils.modeling import *
    from notebook_accelerate.utils.offload import *
    from notebook_accelerate.utils.operations import *
    from notebook_accelerate.utils.other import *
    from notebook_accelerate.utils.random import *
    from notebook_accelerate.utils.torch_xla import *
    from notebook_accelerate.utils.tqdm import *
    from notebook_accelerate.utils.transformer_engine import *
    from notebook_accelerate.utils.versions import *

reexport(__name__)
