"""Startup code for the kernels that tests run."""

from __future__ import annotations

from pathlib import Path

_NO_SERVER = """
from notebook_accelerate.launch.processes import zygote
zygote.warm_up = lambda: None
del zygote
"""


def start_no_server(ipython: Path) -> None:
    """Keep kernels from starting the zygote before the first launch that needs it.

    If ranks are forked from the kernel, importing torch in the zygote wastes half of the kernel's CPU time.

    Args:
        ipython: The IPython folder of the kernels, ``IPYTHONDIR``.
    """
    startup = ipython / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-no-server.py").write_text(_NO_SERVER)
