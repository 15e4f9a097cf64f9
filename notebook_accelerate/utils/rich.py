"""Make rich format the tracebacks of this process, as soon as this module is imported."""

from __future__ import annotations

from notebook_accelerate.utils.imports import is_rich_available

if not is_rich_available():
    raise ModuleNotFoundError("notebook_accelerate.utils.rich needs rich, which is not installed: pip install rich")

from rich.traceback import install

install(show_locals=False)
