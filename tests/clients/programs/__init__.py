"""Training code of libraries built on Accelerate, and for torchrun. Each program trains and returns numbers.

The programs run unchanged on the real Accelerate and on this package, with equal numbers.

denoising-diffusion-pytorch is not among them: it needs torchvision, which has no CPU build for this torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.clients.programs import hugging_face, other_trainers, unsloth_training


@dataclass(frozen=True)
class Program:
    """A program, and the content that its run must show.

    Args:
        train: The function that trains in each rank. "steps" in its result is the number of optimizer steps.
        curve: The name of the metric with the losses, or "" if the code neither logs nor writes them.
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
        Program(hugging_face.sft, "loss"),
        Program(hugging_face.dpo, "loss"),
        Program(hugging_face.reward, "loss"),
        Program(hugging_face.kto, "loss"),
        Program(hugging_face.tied_weights, bar=False),
        Program(hugging_face.peft_loop, "loss", bar=False),
        Program(hugging_face.ddpm, "loss"),
        Program(hugging_face.device_maps, bar=False),
        Program(other_trainers.pytorch_accelerated_trainer, "train_loss_epoch"),
        Program(other_trainers.fastai_learner, "loss"),
        Program(other_trainers.lightning_ddp, "train_loss"),
        Program(other_trainers.lightning_auto, "train_loss"),
        Program(other_trainers.lightning_fsdp, "train_loss"),
        Program(other_trainers.torchrun_ddp, bar=False),
        Program(other_trainers.torchrun_fsdp1, bar=False),
        Program(other_trainers.torchrun_fsdp2, bar=False),
    )
}
WITH_UNSLOTH = {"unsloth_lora": Program(unsloth_training.unsloth_lora, "loss")}
"""Programs that need a folder with unsloth and the versions that it requires on the path."""
IN_ONE_PROCESS = ("trainer", "sft", "dpo", "reward", "kto", "tied_weights")
"""Programs that are also run in one process, where nothing is padded or gathered."""
WITH_OTHER_TRANSFORMERS = (
    "trainer@1", "trainer_accumulation", "trainer_workers", "trainer_sharded_stream", "tied_weights", "tied_weights@1",
)  # fmt: skip
"""Programs that are also run with other versions of transformers, on two ranks or, with "@1", in one process.

Their Trainer cannot resume on several CPU ranks of the real Accelerate: torch cannot load to the device "cpu:0".
"""


def run_several(names: Sequence[str]) -> dict[str, Any]:
    """Run programs one after the other in this rank. Return each one's result, or the text of its exception."""
    from accelerate.state import AcceleratorState, GradientState

    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = PROGRAMS[name].train()
        except Exception:  # noqa: BLE001 - the program's test shows it
            found[name] = traceback.format_exc()
        AcceleratorState._reset_state(True)  # Reset everything except the process group.
        GradientState._reset_state()
    return found
