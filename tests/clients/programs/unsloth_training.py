"""Training with unsloth, which must be imported before transformers, trl and peft."""

from __future__ import annotations

from typing import Any

import torch

from tests.clients.programs.tiny import WORDS, logged_losses, sentence, shared_folder, tokenizer, weight_sums


def _saved_model(folder: str) -> str:
    """Save a tiny Llama and its tokenizer, identical in each process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def unsloth_lora() -> dict[str, Any]:
    """Fine-tune a low-rank adaptation of a tiny model with unsloth and trl, which unsloth has patched."""
    from unsloth import FastLanguageModel  # isort: skip - before the libraries that it patches

    from accelerate import PartialState
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    folder = shared_folder()
    with PartialState().main_process_first():
        saved = _saved_model(f"{folder}/model")  # In a group, transformers writes on rank 0 only.
    model, words = FastLanguageModel.from_pretrained(saved, 32, dtype=torch.float32, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    settings = SFTConfig(
        output_dir=folder, per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2, logging_steps=1,
        report_to="none", save_strategy="no", bf16=False, fp16=False, seed=1, max_length=16,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": [sentence(number) for number in range(32)]})
    made = SFTTrainer(model, settings, train_dataset=rows, processing_class=words)
    made.train()
    return {"losses": logged_losses(made), "weights": weight_sums(made.model), "steps": made.state.global_step}
