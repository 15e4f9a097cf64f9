"""Re-export the classes and paths of the configuration file, as Accelerate's package of this name does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.commands.config import config_args as config_args, default as default
    from notebook_accelerate.config.config_file import (
        ClusterConfig as ClusterConfig,
        SageMakerConfig as SageMakerConfig,
        default_config_file as default_config_file,
        default_json_config_file as default_json_config_file,
        default_yaml_config_file as default_yaml_config_file,
        load_config_from_file as load_config_from_file,
    )

reexport(__name__)
