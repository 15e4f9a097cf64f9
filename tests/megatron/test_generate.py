"""Text generation with a GPT on megatron-core, on one rank and split across several ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from notebook_accelerate.strategies.megatron.megatron_generation import Sampling, choose_tokens
from tests.megatron.trainings import WORDS, Case, place, prepared, steps
from tests.support.ranks import RankError, run_ranks

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)
PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


def generated(case: Case, calls: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Train or load a GPT, and return its output for each of several calls."""
    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        if case.start:
            accelerator.load_state(case.start, elastic=True)
        elif case.kind == "gpt":
            steps(case, accelerator, model, optimizer, loader)
        model.train()
        found = [model.megatron_generate(call.pop("inputs", PROMPTS), **call).tolist() for call in calls]
        assert all(chunk.training for chunk in model.module)
        accelerator.end_training()
    return found


def calls() -> list[dict[str, Any]]:
    both = {"attention_mask": MASK}
    return [
        {**both, "max_new_tokens": 6, "top_k": 1},
        {**both, "max_length": 9, "top_k": 5, "temperature": 0.9, "random_seed": 7},
        {**both, "max_new_tokens": 4, "top_p": 0.8, "top_p_decay": 0.5, "top_p_bound": 0.1, "random_seed": 7},
        {"inputs": PROMPTS[:1], "max_new_tokens": 5, "num_beams": 3, "length_penalty": 1.5, "eos_token_id": 9},
        {**both, "max_new_tokens": 3, "top_k": 1, "add_BOS": True, "bos_token_id": 2},
    ]


@needs_megatron
def test_a_split_model_generates_the_same_text(tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    case = Case(save_after=5, save_to=folder)
    (expected,) = run_ranks(generated, case, calls(), world_size=1)
    greedy, drawn, nucleus, beam, begun = expected
    for rows, length in ((greedy, 11), (drawn, 9), (nucleus, 9), (begun, 9)):
        assert [len(row) for row in rows] == [length, length]
        assert all(0 <= token < WORDS for row in rows for token in row)
    assert greedy[0][:5] == PROMPTS[0].tolist()
    assert greedy[1][:2] == PROMPTS[1, :2].tolist()
    assert [row[0] for row in begun] == [2, 2]
    assert beam[0][:5] == PROMPTS[0].tolist()
    assert run_ranks(generated, Case(tp=2, pp=2, start=folder), calls(), world_size=4) == [expected] * 4


def beside_the_logits(case: Case) -> tuple[list[int], list[int], float, float]:
    """Return greedy tokens, the tokens that the model's logits imply, and the scores of one beam and of several."""
    from notebook_accelerate.strategies.megatron.megatron_checkpoint import unwrap_chunk
    from notebook_accelerate.strategies.megatron.megatron_generation import next_logits

    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        steps(case, accelerator, model, optimizer, loader)
        found = model.megatron_generate(PROMPTS[:1], max_new_tokens=6, top_k=1)
        whole, row = unwrap_chunk(model.module[0]).eval(), PROMPTS[:1]
        for _ in range(6):
            length = row.shape[1]
            masked = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
            logits = whole(row, torch.arange(length)[None], masked)[:, -1, :WORDS]
            row = torch.cat([row, logits.argmax(-1)[:, None]], 1)

        def score(tokens: torch.Tensor) -> float:
            total = 0.0
            for at in range(5, tokens.shape[1]):
                logits = next_logits(model, tokens[:, :at])
                assert logits is not None
                total += logits.float().log_softmax(-1)[0, tokens[0, at]].item()
            return total

        several = model.megatron_generate(PROMPTS[:1], max_new_tokens=6, num_beams=8)
        result = found[0].tolist(), row[0].tolist(), score(found), score(several)
        accelerator.end_training()
        return result


@needs_megatron
def test_greedy_follows_the_logits_and_beam_search_is_at_least_as_good() -> None:
    ((found, expected, one, several),) = run_ranks(beside_the_logits, Case(), world_size=1)
    assert found == expected
    assert several >= one - 1e-5


def ended(case: Case) -> tuple[list[list[int]], int]:
    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        steps(case, accelerator, model, optimizer, loader)
        end = model.megatron_generate(PROMPTS, MASK, max_new_tokens=1, top_k=1)[0, 5].item()
        found = model.megatron_generate(PROMPTS, MASK, max_new_tokens=8, top_k=1, eos_token_id=end)
        accelerator.end_training()
        return found.tolist(), end


@needs_megatron
def test_the_end_token_repeats() -> None:
    ((rows, end),) = run_ranks(ended, Case(), world_size=1)
    for row, prompt in zip(rows, (5, 2), strict=True):
        new = row[prompt:]
        if end in new:
            assert set(new[new.index(end) :]) == {end}
    assert rows[0][5] == end


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "needs either max_length"),
    ({"max_length": 9, "max_new_tokens": 2}, "needs either max_length"),
    ({"max_length": 5}, "nothing to generate"),
    ({"max_new_tokens": 2, "num_beams": 2, "attention_mask": MASK}, "one prompt without padding"),
    ({"max_new_tokens": 2, "attention_mask": 1 - MASK}, "padded on the right"),
    ({"max_new_tokens": 2, "top_q": 3}, "does not accept top_q"),
    ({"max_new_tokens": 2, "add_BOS": True}, "bos_token_id="),
]


def refused(case: Case) -> list[str]:
    with place() as cpu:
        accelerator, model, _, _ = prepared(case, cpu)
        said = []
        for call, expected in MISTAKES:
            with pytest.raises(ValueError, match=expected) as caught:
                model.megatron_generate(PROMPTS, **call)
            said.append(str(caught.value))
        accelerator.end_training()
        return said


@needs_megatron
def test_wrong_arguments_are_refused() -> None:
    (found,) = run_ranks(refused, Case(), world_size=1)
    assert len(set(found)) == len(MISTAKES) - 1


@needs_megatron
def test_other_models_are_refused() -> None:
    with pytest.raises(RankError, match="needs a GPT, but BertTrainStep"):
        run_ranks(generated, Case(kind="bert"), [{"max_new_tokens": 2}], world_size=1)


def test_top_k_and_top_p_limit_the_sampled_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(500, 1)
    generator = torch.Generator().manual_seed(1)
    assert set(choose_tokens(logits, Sampling(top_k=2), generator).tolist()) == {1, 2}
    assert set(choose_tokens(logits, Sampling(top_p=0.6), generator).tolist()) == {1}
    assert set(choose_tokens(logits, Sampling(top_p=0.7), generator).tolist()) == {1, 2}
    assert set(choose_tokens(logits, Sampling(top_p=0.9, top_p_decay=0.1), generator, done=1).tolist()) == {1}
    assert set(choose_tokens(logits, Sampling(), generator).tolist()) == {0, 1, 2, 3}
    assert set(choose_tokens(logits, Sampling(top_k=1), None).tolist()) == {1}


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 1.5}, {"top_k": 2, "top_p": 0.5}], ids=str
)
def test_wrong_sampling_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
