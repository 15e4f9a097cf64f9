"""Train a tiny model with transformers' Trainer and print the results as JSON; run by test_trainer.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import accelerate  # noqa: TID251 - this package, under that name
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


class TinyConfig(PretrainedConfig):
    """A configuration without any settings."""

    model_type = "tiny"


class TinyModel(PreTrainedModel):
    """A model of two layers that computes its own loss."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the scores."""
        scores = self.head(torch.tanh(self.body(x)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def trainer_of(folder: str, batch: int, more: dict[str, Any]) -> Trainer:
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": index % 2} for index in range(48)]
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        save_strategy="epoch",
        eval_strategy="epoch",
        logging_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        **more,
    )
    return Trainer(model=TinyModel(TinyConfig()), args=settings, train_dataset=data, eval_dataset=data[:16])


def main(folder: str, batch: int, more: dict[str, Any]) -> None:
    """Train, evaluate, and then train again from the first epoch's checkpoint."""
    trainer = trainer_of(folder, batch, more)
    trained = trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    found = {
        "served": accelerate.Accelerator.__module__,
        "strategy": trainer.accelerator.strategy.name,
        "steps": trained.global_step,
        "evaluated": trainer.evaluate()["eval_loss"],
        "weights": {name: weight.double().sum().item() for name, weight in weights.items()},
    }
    again = trainer_of(folder, batch, more)
    resumed = again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    weights = again.accelerator.get_state_dict(again.model_wrapped)
    found["resumed_steps"] = resumed.global_step
    found["resumed"] = {name: weight.double().sum().item() for name, weight in weights.items()}
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
