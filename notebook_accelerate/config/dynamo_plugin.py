"""Settings of ``torch.compile`` for prepared models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config.enums import DynamoBackend
from notebook_accelerate.config.kwargs_handlers import KwargsHandler
from notebook_accelerate.config.settings import SettingsSection, check_choices, fill_unset, from_environment, setting

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _switch(name: str, **known: Any) -> Any:
    """Create the setting for a switch. As in Accelerate, its option and variable have ``use_`` in their names."""
    variable = f"ACCELERATE_DYNAMO_USE_{name.upper()}"
    return setting(option=f"dynamo_use_{name}", variable=variable, switch=True, preset=False, **known)


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile``.

    Raises:
        ValueError: The backend or the mode is unknown.
    """

    settings = SettingsSection("dynamo_config", "dynamo_", "ACCELERATE_DYNAMO_", title="torch.compile")

    backend: DynamoBackend | None = setting(
        unset="NO",
        choices=tuple(DynamoBackend),
        closed=True,
        preset="no",
        ask="Which backend?",
        answer="inductor",
        answers=(),
    )
    """Name of the compiler, or NO if models are not compiled."""
    mode: str | None = setting(unset="default", choices=_MODES, closed=True)
    """Mode of the compiler: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs."""
    fullgraph: bool | None = _switch("fullgraph", unset=False)
    """Whether a graph break is an error."""
    dynamic: bool | None = _switch("dynamic")
    """Whether to compile for dynamic shapes. If None, torch decides."""
    options: Any = None
    """Options that torch passes on to the backend."""
    disable: bool = False
    """Whether ``torch.compile`` does nothing."""
    use_regional_compilation: bool | None = _switch("regional_compilation", unset=False)
    """Whether repeated blocks are compiled once, instead of the whole model."""

    def __post_init__(self) -> None:
        self.backend = _backend(self.backend or from_environment(type(self), "backend"))
        fill_unset(self)
        check_choices(self, "mode")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name, with the backend in lower case, as torch spells it."""
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
