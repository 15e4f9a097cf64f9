"""`from_pretrained` of transformers finds weights written by `save_model` and `save_state`, even tied ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import notebook_accelerate
from notebook_accelerate import Accelerator
from tests.support.ranks import run_ranks

if importlib.util.find_spec("transformers") is None:
    pytest.skip("no transformers: make test-clients", allow_module_level=True)

SMALL = {"vocab_size": 40}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM", "LlamaModel",
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}),
    "t5": (
        "T5ForConditionalGeneration", "T5EncoderModel",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    ),
    "bart": (
        "BartForConditionalGeneration", "BartModel",
        {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16},
    ),
    "bert": (
        "BertForMaskedLM", "BertModel",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    ),
}  # fmt: skip
"""By architecture: the model with a head that shares the embedding, the one without a head, and the configuration."""


def loaded(kind: str, folder: str) -> dict[str, bool]:
    """Return, for each size of shards, whether models loaded from the files of `save_model` have the saved weights."""
    notebook_accelerate.as_accelerate()
    import transformers

    with_head, without_head = (getattr(transformers, name) for name in KINDS[kind][:2])
    torch.manual_seed(0)
    model = with_head(with_head.config_class(**SMALL, **KINDS[kind][2]))
    found, accelerator = {}, Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    for max_shard_size in ("10GB", 4000):
        target = f"{folder}/{max_shard_size}"
        accelerator.save_model(prepared, target, max_shard_size=max_shard_size)
        if accelerator.is_main_process:
            model.config.save_pretrained(target)
        accelerator.wait_for_everyone()
        whole, bare = with_head.from_pretrained(target), without_head.from_pretrained(target)
        weights = whole.state_dict()
        found[f"whole, {max_shard_size}"] = all(torch.equal(weights[name], w) for name, w in model.state_dict().items())
        embeddings = (each.get_input_embeddings().weight for each in (bare, model))
        found[f"without head, {max_shard_size}"] = torch.equal(*embeddings)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_models_with_and_without_their_head_load(kind: str, world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(loaded, kind, str(tmp_path), world_size=world_size, env={"HF_HUB_OFFLINE": "1"}, timeout=600)
    for found in ranks:
        assert len(found) == 4
        assert all(found.values()), found
