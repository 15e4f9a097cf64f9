"""Full precision, and bf16 and fp16 with torch's autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from notebook_accelerate.collectives import ConvertOutputsToFp32, convert_to_fp32
from notebook_accelerate.config.kwargs_handlers import AutocastKwargs, GradScalerKwargs


class Precision:
    """Full precision, and the base class of other precisions, which use torch's autocast to `compute_dtype`.

    Args:
        device_type: The type of the computing device: cpu, cuda, ...
        autocast_handler: The settings for autocast (`AutocastKwargs`). None means torch's defaults.
        scaler_handler: The settings for the loss scaler (`GradScalerKwargs`). None means torch's defaults.
        fp8_recipe: The recipe for the fp8 library, or None for other precisions.

    Attributes:
        native_amp: Whether models and `autocast` use torch's autocast. If this precision has no `compute_dtype`,
            torch's default dtype for the device is used.
    """

    name: ClassVar[str] = "no"
    compute_dtype: ClassVar[torch.dtype | None] = None
    """The dtype that models compute in. None means the dtype of their parameters."""

    def __init__(
        self, device_type: str, autocast_handler: Any = None, scaler_handler: Any = None, fp8_recipe: Any = None
    ) -> None:
        self.device_type = device_type
        self.autocast_handler: AutocastKwargs | None = autocast_handler
        self.scaler_handler: GradScalerKwargs | None = scaler_handler
        self.fp8_recipe = fp8_recipe
        self.native_amp = self.compute_dtype is not None

    def join(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Replace models and optimizers that can only be replaced together. `prepare` calls this first.

        Args:
            models: The models of a `prepare` call.
            optimizers: The optimizers of the same call.

        Returns:
            The replacements, in the same order.
        """
        return models, optimizers

    def convert_layers(self, model: torch.nn.Module) -> None:
        """Make a model's layers compute in this precision, in place, for an engine that itself casts all other tensors.

        Args:
            model: The model before it is passed to the engine. Its parameters stay the same objects.
        """

    def wrap_model(self, model: torch.nn.Module, sharded: bool = False) -> torch.nn.Module:
        """Make a model compute in this precision, in place, after undoing the changes of another precision.

        With autocast, outputs are converted to float32, and `_original_forward` is the model's own forward method.

        Args:
            model: The model before it is wrapped for several ranks.
            sharded: Whether FSDP 2 will shard the model's parameters. If so, this method may replace them.

        Returns:
            The same model.
        """
        restore_forward(model)
        if self.native_amp:
            model._original_forward = model.forward  # type: ignore[assignment]
            model.forward = AutocastForward(model.forward, self._settings(None))
        return model

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context manager that makes code outside of a prepared model compute in this precision.

        Args:
            handler: The `AutocastKwargs` for this block. None means the ones that were passed to the constructor.
        """
        return torch.autocast(**self._settings(handler)) if self.native_amp else nullcontext()

    def _settings(self, handler: Any) -> dict[str, Any]:
        chosen = handler or self.autocast_handler
        options = chosen.to_kwargs() if chosen is not None else {}
        return {"device_type": self.device_type, "dtype": self.compute_dtype, **options}

    def after_step(self, model: torch.nn.Module) -> None:
        """Update the state of this precision after an optimizer step of a sharded model; every rank must call this.

        Args:
            model: The sharded model that the optimizer has stepped.
        """

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return a new loss scaler, or None if this precision does not need one."""
        return None


class Bf16Precision(Precision):
    """bfloat16, which has the exponent range of float32, and therefore needs no loss scaling."""

    name: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.bfloat16


class Fp16Precision(Precision):
    """float16. Losses are scaled up and gradients down again, because small gradients would otherwise underflow."""

    name: ClassVar[str] = "fp16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.float16

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return torch's `GradScaler` for the device, with the settings of `GradScalerKwargs`."""
        options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        return torch.amp.GradScaler(self.device_type, **options)


def require_cuda(library: str, device_type: str) -> None:
    """Check that the device is an NVIDIA GPU, which an fp8 library needs.

    Args:
        library: The name of the library, for the error message.
        device_type: The type of the computing device.

    Raises:
        ValueError: The device is not an NVIDIA GPU.
    """
    if device_type != "cuda":
        raise ValueError(
            f"{library} computes in fp8 on NVIDIA GPUs, but this rank's device is {device_type}; pass "
            "kwargs_handlers=[AORecipeKwargs()], which emulates fp8 on other devices, or mixed_precision='bf16'"
        )


# ---- forward methods under autocast


class AutocastForward(ConvertOutputsToFp32):
    """A forward method that runs under autocast and returns float32.

    Args:
        model_forward: The original forward method.
        settings: The arguments of `torch.autocast`.
    """

    def __init__(self, model_forward: Callable[..., Any], settings: dict[str, Any]) -> None:
        super().__init__(model_forward)
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original method under autocast, and convert its result to float32."""
        with torch.autocast(**self.settings):
            outputs = self.model_forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastForward:
        return AutocastForward(copy.deepcopy(self.model_forward, memo), dict(self.settings))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the original method instead, so that a process without this package can load the model. copy.copy
        # returns a function unchanged. Bound methods are looked up in the class of the unpickled object.
        return copy.copy, (self.model_forward,)


def restore_forward(model: torch.nn.Module) -> None:
    """Restore the forward method that a precision has replaced. A model that is not wrapped is not changed.

    Args:
        model: The model to restore.
    """
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original
