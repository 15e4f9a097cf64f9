"""Models, data and measurements that the programs share. Nothing is downloaded."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]


def tokenizer() -> Any:
    """Return a tokenizer with a vocabulary of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )


def language_model(layers: int = 2) -> Any:
    """Return a tiny GPT-2, identical in each process."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(_gpt2(layers))


def sequence_classifier() -> Any:
    """Return a tiny GPT-2 that gives a sequence one score, identical in each process."""
    from transformers import GPT2ForSequenceClassification

    torch.manual_seed(0)
    return GPT2ForSequenceClassification(_gpt2(2, num_labels=1))


def _gpt2(layers: int, **options: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=len(WORDS), n_embd=16, n_layer=layers, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
    )  # fmt: skip


TIED_MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "t5": ("T5ForConditionalGeneration", "T5EncoderModel"),
}
"""For each architecture, the model that ties its head's weights to the embedding, and the model without the head."""


def tied_config(name: str) -> Any:
    """Return the configuration of a small model from `TIED_MODELS`."""
    from transformers import LlamaConfig, T5Config

    if name == "gpt2":
        return _gpt2(1)
    if name == "llama":
        return LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=True,
        )  # fmt: skip
    return T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)


def sentence(number: int, length: int = 8) -> str:
    """Return a sentence that depends on the number."""
    return " ".join(WORDS[3 + (number * 7 + place * (1 + number % 3)) % 40] for place in range(length))


def regression() -> tuple[torch.nn.Module, torch.utils.data.TensorDataset]:
    """Return a small network and its training data, identical in each process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return model, torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def shared_folder() -> str:
    """Return an empty folder shared by all ranks of a run. This call joins the process group through Accelerate."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    PartialState(cpu=True)
    return str(
        broadcast_object_list([tempfile.mkdtemp(dir=Path.cwd()) if os.environ.get("RANK", "0") == "0" else None])[0]
    )


def logged_losses(trainer: Any) -> list[float]:
    """Return the losses that a transformers Trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weight_sums(model: Any) -> list[float]:
    """Return the sum of the absolute values of each parameter. Sharded parameters are gathered first."""
    found = []
    for value in model.parameters():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.append(whole.detach().double().abs().sum().item())
    return found
