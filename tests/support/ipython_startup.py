"""What the kernels of a test execute before the first cell."""

from __future__ import annotations

from pathlib import Path

_NO_SERVER = """
from notebook_accelerate.launch.processes import zygote
zygote.warm_up = lambda: None
del zygote
"""


def start_no_server(ipython: Path) -> None:
    """Have kernels start the process that the zygote method forks from with the first launch that needs it, not before.

    Where ranks are forked from the kernel, it takes half of the kernel's processor time to import torch for nothing.

    Args:
        ipython: The kernels' folder of IPython, ``IPYTHONDIR``.
    """
    startup = ipython / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-no-server.py").write_text(_NO_SERVER)
