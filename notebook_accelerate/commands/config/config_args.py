"""Re-export the classes and paths of the configuration file, as Accelerate's module of this name does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.config_file import (
        BaseConfig as BaseConfig,
        ClusterConfig as ClusterConfig,
        SageMakerConfig as SageMakerConfig,
        cache_dir as cache_dir,
        default_config_file as default_config_file,
        default_json_config_file as default_json_config_file,
        default_yaml_config_file as default_yaml_config_file,
        load_config_from_file as load_config_from_file,
    )

reexport(__name__)
