"""Reads what the installed torch was built for from its version file: importing torch takes a second."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """Versions of torch and of the platforms it was built for; None for others."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @property
    def installed(self) -> bool:
        """Whether torch is installed."""
        return self.version is not None


def read() -> TorchBuild:
    """Return what the installed torch was built for, without importing it."""
    if (module := sys.modules.get("torch.version")) is not None:
        return TorchBuild(
            version=str(getattr(module, "__version__", "0")),
            cuda=getattr(module, "cuda", None),
            hip=getattr(module, "hip", None),
            xpu=getattr(module, "xpu", None),
        )
    return _read_file()


@lru_cache(maxsize=1)
def _read_file() -> TorchBuild:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    file = Path(spec.origin).with_name("version.py")
    source = file.read_text(encoding="utf-8") if file.exists() else ""
    # Lines such as: cuda: Optional[str] = '12.8'
    found = dict(re.findall(r"^(\w+)\s*(?::[^=\n]*)?=\s*'([^'\n]*)'", source, re.MULTILINE))
    return TorchBuild(
        version=found.get("__version__", "0"), cuda=found.get("cuda"), hip=found.get("hip"), xpu=found.get("xpu")
    )


FLIGHT_RECORDER_ENTRIES = "2000"
"""Operations that each of torch's flight recorders keeps, torch's own default for NCCL.

A host queues NCCL's operations ahead of its device: hundreds may follow the one in which the device waits.
"""


def watched_rank_variables() -> dict[str, str]:
    """Return the torch environment variables for a supervised rank.

    They turn the flight recorders on, and NCCL's own watch of its threads off: that would abort a rank which was
    suspended for eight minutes, with its machine or by Ctrl-Z.
    """
    if read().version is None:
        return {}
    return {"TORCH_FR_BUFFER_SIZE": FLIGHT_RECORDER_ENTRIES, "TORCH_NCCL_ENABLE_MONITORING": "0"}
