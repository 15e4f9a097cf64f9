"""How ``torch.compile`` compiles prepared models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DynamoBackend
from notebook_accelerate.config.kwargs_handlers import KwargsHandler
from notebook_accelerate.config.plain_values import check_one_of

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile``; fields that are None are read from ACCELERATE_DYNAMO_* variables.

    Raises:
        ValueError: The backend or the mode is not known.
    """

    backend: DynamoBackend | None = None
    """The compiler (ACCELERATE_DYNAMO_BACKEND); default: NO, no compilation."""
    mode: str | None = None
    """default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs (ACCELERATE_DYNAMO_MODE).

    None and no variable: default.
    """
    fullgraph: bool | None = None
    """Whether a graph break is an error (ACCELERATE_DYNAMO_USE_FULLGRAPH); default: False."""
    dynamic: bool | None = None
    """Whether shapes are dynamic (ACCELERATE_DYNAMO_USE_DYNAMIC); default: torch decides."""
    options: Any = None
    """Options of the backend."""
    disable: bool = False
    """Whether ``torch.compile`` does nothing."""
    use_regional_compilation: bool | None = None
    """Whether repeated blocks are compiled once instead of the whole model; default: False.

    Read from ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION.
    """

    def __post_init__(self) -> None:
        self.backend = _backend(self.backend or environ.text("ACCELERATE_DYNAMO_BACKEND", "NO") or "NO")
        environ.fill_unset(self, "ACCELERATE_DYNAMO_", environ.text, mode="default")
        check_one_of("mode", self.mode, _MODES)
        if self.fullgraph is None:
            self.fullgraph = environ.flag("ACCELERATE_DYNAMO_USE_FULLGRAPH")
        environ.fill_unset(self, "ACCELERATE_DYNAMO_", environ.flag, use_regional_compilation=False)
        if self.dynamic is None and environ.text("ACCELERATE_DYNAMO_USE_DYNAMIC"):
            self.dynamic = environ.flag("ACCELERATE_DYNAMO_USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name, with the backend in torch's spelling."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that differ from its defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs


def _backend(value: DynamoBackend | str) -> DynamoBackend:
    name = str(value).upper()
    if name not in DynamoBackend.list():
        raise ValueError(f"backend={value!r} is not a valid DynamoBackend; allowed: {', '.join(DynamoBackend.list())}")
    if name == "IPEX":
        warnings.warn("DynamoBackend.IPEX is deprecated: write INDUCTOR, which has its optimisations", FutureWarning, 4)
    return DynamoBackend(name)
