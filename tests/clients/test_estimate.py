"""Memory estimates for transformers configurations. Run these tests with `make test-clients`."""

from __future__ import annotations

import importlib.util

import pytest

from notebook_accelerate.big_modeling import estimate_memory

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: make test-clients"
)


def test_a_configuration_and_its_model_have_the_same_estimate() -> None:
    from transformers import AutoModel, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )  # fmt: skip
    weights = sum(each.nbytes for each in AutoModel.from_config(config).parameters())
    one = estimate_memory(config, sequence_length=8, batch_size=2)
    assert one.training["weights"] == one.inference["weights"] == weights
    assert one.inference["activations"] == 2 * 2 * 8 * 64 * 4, "the activations are twice the widest output"
    assert one.training["activations"] > one.inference["activations"]
    two = estimate_memory(config, strategy="tp", num_processes=2)
    norms = 4 * 5 * 32
    assert two.training["weights"] == norms + (weights - norms) // 2, (
        "the plan of the model splits everything except norms"
    )
