"""Shrink the wheel of bitsandbytes: of its CUDA libraries (43 MB), keep only those for CUDA 13.0 and the CPU.

``python -m tests.gpu.day.wheels FOLDER`` is part of `make gpu-day-wheels`. It needs only the standard library.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

KEPT = ("_cpu.so", "_cuda130.so")


def repack(path: Path) -> None:
    """Rewrite a bitsandbytes wheel without the other libraries.

    Args:
        path: The wheel, which is replaced.
    """
    part = path.with_suffix(".part")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        dropped = {name for name in names if "libbitsandbytes_" in name and not name.endswith(KEPT)}
        for name in names:
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if line.partition(",")[0] not in dropped).encode()
            if name not in dropped:
                new.writestr(name, data)
    part.replace(path)


if __name__ == "__main__":
    for wheel in Path(sys.argv[1]).glob("bitsandbytes-*.whl"):
        repack(wheel)
