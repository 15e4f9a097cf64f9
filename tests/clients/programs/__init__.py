"""Training code of libraries on top of Accelerate, and for torchrun: each program trains and returns numbers.

They run unchanged on the real Accelerate and on this package; the numbers are equal.

denoising-diffusion-pytorch is not among them: it needs torchvision, of which there is no CPU build for this torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.clients.programs import hugging_face, other_trainers


@dataclass(frozen=True)
class Program:
    """A program, and what its run is to show.

    Args:
        train: Trains in each rank; "steps" of its result counts the optimizer's steps.
        curve: Name of the metric with the losses; "" where the code neither logs nor writes them.
        bar: Whether rank 0 has a progress bar.
    """

    train: Callable[[], dict[str, Any]]
    curve: str = ""
    bar: bool = True


PROGRAMS = {
    program.train.__name__: program
    for program in (
        Program(hugging_face.trainer, "loss"),
        Program(hugging_face.trainer_accumulation, "loss"),
        Program(hugging_face.trainer_bf16, "loss"),
        Program(hugging_face.trainer_workers, "loss"),
        Program(hugging_face.trainer_group_by_length, "loss"),
        Program(hugging_face.trainer_sharded_stream, "loss"),
        Program(hugging_face.sft_lora, "loss"),
        Program(hugging_face.dpo, "loss"),
        Program(hugging_face.peft_loop, "loss", bar=False),
        Program(hugging_face.ddpm, "loss"),
        Program(hugging_face.device_maps, bar=False),
        Program(other_trainers.pytorch_accelerated_trainer, "train_loss_epoch"),
        Program(other_trainers.lightning_ddp, "train_loss"),
        Program(other_trainers.lightning_auto, "train_loss"),
        Program(other_trainers.lightning_fsdp, "train_loss"),
        Program(other_trainers.torchrun_ddp, bar=False),
        Program(other_trainers.torchrun_fsdp1, bar=False),
        Program(other_trainers.torchrun_fsdp2, bar=False),
    )
}


def run_several(names: Sequence[str]) -> dict[str, Any]:
    """Run programs one after the other in this rank; return their results, or the text of what they raised."""
    from accelerate.state import AcceleratorState, GradientState

    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = PROGRAMS[name].train()
        except Exception:  # noqa: BLE001 - the program's test shows it
            found[name] = traceback.format_exc()
        AcceleratorState._reset_state(True)  # the process group stays
        GradientState._reset_state()
    return found
