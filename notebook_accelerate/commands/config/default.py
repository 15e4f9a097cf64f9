"""Re-exports: ``write_basic_config``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.config_file import (
        ClusterConfig as ClusterConfig,
        default_json_config_file as default_json_config_file,
    )
    from notebook_accelerate.hardware.basic_config import write_basic_config as write_basic_config

reexport(__name__)
