"""Find out which packages are installed, and what torch was built for, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version, parse

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.config.constants import STR_OPERATION_TO_FUNC


def is_package(name: str, distribution: str | None = None, minimum: str | None = None) -> bool:
    """Return whether a package can be imported, without importing it.

    Args:
        name: The import name of the package.
        distribution: Name of its distribution. If None, it is the import name. A folder with the package's name (such
            as the logs of wandb) does not count.
        minimum: The minimum version that counts as available.

    Returns:
        Whether the package is installed, in the minimum version or later.
    """
    spec = _spec(name)
    if spec is None or (spec.origin is None and distribution is None and not installed_version(name)):
        return False
    if minimum is None:
        return True
    version = installed_version(distribution or name)
    return version is not None and parse(version) >= parse(minimum)


def _spec(name: str) -> Any:
    if name in sys.modules:
        # An import may have been blocked by None in place of the module. The package then counts as missing.
        return getattr(sys.modules[name], "__spec__", None)
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed.

    Args:
        distribution: The name of the distribution, such as notebook-accelerate.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_torchao_available() -> bool:
    """Return whether torchao is installed, in a version with float8 training."""
    return is_package("torchao", minimum="0.6.1")


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of a package, or a given version, with another version.

    Args:
        library_or_version: Name of an installed package, or a version.
        operation: >, >=, ==, !=, <= or <.
        requirement_version: The version on the right-hand side.

    Returns:
        Whether the comparison holds.

    Raises:
        ValueError: The operation is not allowed.
        importlib.metadata.PackageNotFoundError: The package is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation={operation!r} is not allowed; pass one of {', '.join(STR_OPERATION_TO_FUNC)}")
    version = library_or_version
    if isinstance(version, str):
        version = parse(importlib.metadata.version(version))
    return bool(STR_OPERATION_TO_FUNC[operation](version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch's version, without its build suffix (+cu128), with another.

    Args:
        operation: >, >=, ==, !=, <= or <.
        version: The version on the right-hand side.

    Returns:
        Whether the comparison holds.
    """
    return compare_versions(parse(parse(torch_build().version or "0").public), operation, version)


# ---- torch's version file, which is read because importing torch takes a second


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The version of torch, and the versions of the platforms that it was built for. Other platforms are None."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None

    @property
    def installed(self) -> bool:
        """Whether torch is installed."""
        return self.version is not None


def torch_build() -> TorchBuild:
    """Return the versions of the installed torch and of its platforms, without importing torch."""
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


# On older kernels, waiting for a child with several ranks hangs: https://github.com/huggingface/accelerate/issues/1929
_MIN_KERNEL = "5.5.0"


def check_os_kernel() -> None:
    """Log a warning if the Linux kernel is older than 5.5, because several ranks may hang on it."""
    if platform.system() != "Linux":
        return
    found = re.match(r"\d+\.\d+(\.\d+)?", platform.release())
    if found is not None and parse(found[0]) < parse(_MIN_KERNEL):
        accelerate_logger("utils.other").warning(
            "This Linux kernel is %s, and several ranks may hang on kernels before %s: update it", found[0], _MIN_KERNEL
        )
