"""Importing this module makes rich format the tracebacks of this process."""

from __future__ import annotations

from notebook_accelerate.hardware.feature_checks import is_rich_available

if not is_rich_available():
    raise ModuleNotFoundError("to use the rich extension, install rich: pip install rich")

from rich.traceback import install

install(show_locals=False)
