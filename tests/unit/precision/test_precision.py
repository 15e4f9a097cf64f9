from __future__ import annotations

import pytest
import torch
from torch import nn

from notebook_accelerate.config.kwargs_handlers import AutocastKwargs, GradScalerKwargs
from notebook_accelerate.precision import PRECISIONS, Precision, make_precision, register_precision, restore_forward


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> dict[str, object]:
        out = self.layer(inputs)
        self.seen = out.dtype
        return {"out": out * scale, "list": [out], "note": "text", "whole": torch.arange(2)}


@pytest.mark.parametrize(("name", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_models_compute_in_their_precision_and_return_float32(name: str, dtype: torch.dtype) -> None:
    model = make_precision(name, "cpu").wrap_model(Model())
    outputs = model(torch.ones(1, 2), scale=2.0)
    assert model.seen == dtype
    assert outputs["out"].dtype == outputs["list"][0].dtype == torch.float32
    assert outputs["whole"].dtype == torch.int64
    assert outputs["note"] == "text"


def test_the_signature_of_forward_is_kept() -> None:
    import inspect

    model = make_precision("bf16", "cpu").wrap_model(Model())
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "scale"]


def test_wrapping_again_changes_the_precision() -> None:
    model = Model()
    make_precision("bf16", "cpu").wrap_model(model)
    make_precision("fp16", "cpu").wrap_model(model)
    model(torch.ones(1, 2))
    assert model.seen == torch.float16
    restore_forward(model)
    restore_forward(model)
    assert "forward" not in model.__dict__


def test_a_forward_set_on_the_instance_is_restored() -> None:
    model = Model()
    own = model.forward.__func__.__get__(model)
    model.forward = lambda inputs: own(inputs, 3.0)  # type: ignore[method-assign]
    kept = model.forward
    make_precision("bf16", "cpu").wrap_model(model)
    assert model(torch.ones(1, 2))["out"].dtype == torch.float32
    restore_forward(model)
    assert model.forward is kept


def test_handlers_reach_torch() -> None:
    precision = make_precision("fp16", "cpu", AutocastKwargs(enabled=False), GradScalerKwargs(init_scale=16.0))
    model = precision.wrap_model(Model())
    model(torch.ones(1, 2))
    assert model.seen == torch.float32
    scaler = precision.make_scaler()
    assert scaler is not None
    assert scaler.get_scale() == 16.0
    assert make_precision("bf16", "cpu").make_scaler() is None
    assert make_precision("no", "cpu").make_scaler() is None


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'int3' is not known; pass one of 'no', 'bf16', 'fp16', 'fp8'"):
        make_precision("int3", "cpu")


def test_precisions_can_be_registered() -> None:
    class Mine(Precision):
        name = "mine"

    register_precision("mine", Mine)
    try:
        assert make_precision("mine", "cpu").name == "mine"
    finally:
        del PRECISIONS["mine"]


def test_nested_calls_of_one_model_keep_autocast() -> None:
    """When a model calls itself, each call restores the autocast state that it found."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, inputs: torch.Tensor, depth: int = 2) -> torch.Tensor:
            out = self.layer(inputs)
            return self(out, depth - 1) if depth else out

    model = make_precision("bf16", "cpu").wrap_model(Recursive())
    assert model(torch.ones(1, 1)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
