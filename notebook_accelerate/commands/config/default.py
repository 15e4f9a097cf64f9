"""``write_basic_config``: a re-export."""

from __future__ import annotations

from notebook_accelerate._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "config.config_file": ("ClusterConfig", "default_json_config_file"),
        "hardware.basic_config": ("write_basic_config",),
    },
)
