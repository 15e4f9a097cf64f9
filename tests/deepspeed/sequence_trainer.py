"""Train a tiny Llama with transformers' Trainer and print the results as JSON; run by test_sequence_parallel.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import accelerate  # noqa: TID251, F401 - this package, under that name
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig  # noqa: TID251
from transformers import Trainer, TrainingArguments

from tests.deepspeed.test_sequence_parallel import ROWS, Sentences, llama


def main(folder: str, more: dict[str, Any]) -> None:
    """Train on 24 sequences in order, and evaluate."""
    how = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    layout = ParallelismConfig(sp_size=2, sp_handler=how) if more.pop("split") else None
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_steps=12,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        parallelism_config=layout,
        **more,
    )
    trainer = Trainer(model=llama(), args=settings, train_dataset=Sentences(24), eval_dataset=Sentences(8))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    found = {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "evaluated": trainer.evaluate()["eval_loss"],
        "strategy": type(trainer.accelerator.strategy).__name__,
    }
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[3]))
