"""The configuration file, under the paths Accelerate has it: re-exports."""

from __future__ import annotations

from notebook_accelerate._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "config.config_file": (
            "ClusterConfig",
            "SageMakerConfig",
            "default_config_file",
            "default_json_config_file",
            "default_yaml_config_file",
            "load_config_from_file",
        )
    },
    submodules=("config_args", "default"),
)
