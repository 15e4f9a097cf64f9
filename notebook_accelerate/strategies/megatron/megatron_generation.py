"""Text generation with a Megatron-LM decoder that is split across ranks: sampling, greedy decoding and beam search.

The schedule for training computes each new token from all earlier tokens, without a cache of keys and values.
Generation therefore works with every training configuration, but its time grows with the square of the length.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_accelerate.strategies.megatron import megatron_setup
from notebook_accelerate.strategies.megatron.forward_steps import GPTTrainStep, causal_mask, whole_vocabulary

if TYPE_CHECKING:
    from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine


@dataclass(kw_only=True)
class Sampling:
    """The settings that determine how the next token is chosen."""

    temperature: float = 1.0
    """The number that divides the logits."""
    top_k: int = 0
    """The number of most probable tokens to sample from: 1 for greedy decoding, or 0 for all tokens."""
    top_p: float = 0.0
    """The total probability of the most probable tokens to sample from, or 0 for all tokens."""
    top_p_decay: float = 0.0
    """The factor that multiplies `top_p` after each token, or 0 to keep `top_p` constant."""
    top_p_bound: float = 0.0
    """The lower bound of `top_p`."""
    random_seed: int | None = None
    """The seed for sampling, or None to use torch's global random number generator."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} must be above 0; for greedy decoding pass top_k=1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be between 0 and 1")
        if self.top_k and self.top_p:
            raise ValueError(f"top_k={self.top_k} and top_p={self.top_p} contradict each other; leave one of them out")

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the random number generator for sampling, or None for torch's global one.

        Args:
            device: The device that tokens are sampled on.
        """
        return None if self.random_seed is None else torch.Generator(device).manual_seed(self.random_seed)

    def top_p_after(self, tokens: int) -> float:
        """Return the value of `top_p` after some tokens have been generated.

        Args:
            tokens: The number of tokens that have been generated.
        """
        return max(self.top_p * self.top_p_decay**tokens, self.top_p_bound) if self.top_p_decay else self.top_p


def choose_tokens(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None, done: int = 0
) -> torch.Tensor:
    """Choose a token for each sample.

    Args:
        logits: Logits of shape `[samples, vocabulary]`.
        sampling: The settings that determine how a token is chosen.
        generator: The random number generator, or None for torch's global one.
        done: The number of tokens that have already been generated.

    Returns:
        Tokens of shape `[samples]`.
    """
    if sampling.top_k == 1:
        return logits.argmax(-1)
    scores = logits.float() / sampling.temperature
    if sampling.top_k:
        least = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    elif 0 < (top_p := sampling.top_p_after(done)) < 1:
        ordered, order = scores.sort(descending=True)
        shares = ordered.softmax(-1)
        # Keep the token that makes the total exceed the limit, so that at least one token remains.
        ordered = ordered.masked_fill(shares.cumsum(-1) - shares > top_p, -torch.inf)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, order, ordered)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


def generate(
    engine: MegatronEngine,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    length: int,
    sampling: Sampling,
    end: int | None,
) -> torch.Tensor:
    """Generate samples token by token; every rank must call this.

    Args:
        engine: The engine whose model is a decoder.
        inputs: Tokens of shape `[samples, tokens]`, padded on the right.
        attention_mask: A mask of the same shape, with 1 for a token and 0 for padding. If None, there is no padding.
        length: The maximum number of tokens in a sample, including the prompt.
        sampling: The settings that determine how a token is chosen.
        end: The token that ends a sample, or None if there is no such token.

    Returns:
        The prompts and the generated tokens, of shape `[samples, tokens]`. Samples that end early are padded with
        `end`.
    """
    tokens, lengths = _token_buffer(engine, inputs, attention_mask, length, end)
    ended = torch.zeros_like(lengths, dtype=torch.bool)
    first, generator = int(lengths.min()), sampling.generator(tokens.device)
    for at in range(first, length):
        logits = next_logits(engine, tokens[:, :at])
        new = None if logits is None else choose_tokens(logits, sampling, generator, at - first)
        new = _broadcast_from_last_stage(new, tokens[:, 0])
        in_prompt = at < lengths
        fill = tokens[:, at] if end is None else torch.full_like(new, end)
        tokens[:, at] = torch.where(in_prompt, tokens[:, at], torch.where(ended, fill, new))
        if end is not None:
            ended |= ~in_prompt & (new == end)
            if bool(ended.all()):
                return tokens[:, : at + 1]
    return tokens


def beam_search(
    engine: MegatronEngine, inputs: torch.Tensor, length: int, beams: int, penalty: float, end: int | None
) -> torch.Tensor:
    """Find the most probable continuation of one sample by beam search; every rank must call this.

    Args:
        engine: The engine whose model is a decoder.
        inputs: Tokens without padding, of shape `[1, tokens]`.
        length: The maximum number of tokens in the sample, including the prompt.
        beams: The number of candidates that are kept.
        penalty: A candidate's log probability is divided by its length to this power.
        end: The token that ends a sample, or None if there is no such token.

    Returns:
        The best candidate, of shape `[1, tokens]`.
    """
    tokens, _ = _token_buffer(engine, inputs, None, length, end)
    prompt = inputs.shape[1]
    tokens = tokens.repeat(beams, 1)
    scores = torch.full((beams,), -torch.inf, device=tokens.device)
    scores[0] = 0.0  # All candidates are the same at the start, so only one of them may continue.
    finished: list[tuple[float, torch.Tensor]] = []
    for at in range(prompt, length):
        logits = next_logits(engine, tokens[:, :at])
        found = None if logits is None else _best_continuations(scores, logits, 2 * beams)
        totals, indices = _broadcast_from_last_stage(found, tokens.new_zeros(2, 2 * beams).double())
        kept: list[tuple[float, int, int]] = []
        size = engine.vocabulary_size
        for total, index in zip(totals.tolist(), indices.long().tolist(), strict=True):
            beam, token = divmod(index, size)
            if token == end:
                finished.append(
                    (total / (at + 1 - prompt) ** penalty, torch.cat([tokens[beam, :at], tokens.new_tensor([token])]))
                )
            elif len(kept) < beams:
                kept.append((total, beam, token))
        if not kept or (
            len(finished) >= beams and max(finished, key=_score)[0] >= kept[0][0] / (at + 1 - prompt) ** penalty
        ):
            break
        tokens = torch.stack([tokens[beam] for _, beam, _ in kept])
        tokens[:, at] = tokens.new_tensor([token for _, _, token in kept])
        scores = scores.new_tensor([total for total, _, _ in kept])
    else:
        finished += [
            (total / (length - prompt) ** penalty, row) for total, row in zip(scores.tolist(), tokens, strict=True)
        ]
    return max(finished, key=_score)[1][None]


def _score(candidate: tuple[float, torch.Tensor]) -> float:
    return candidate[0]


def _best_continuations(scores: torch.Tensor, logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the log probabilities and the indices of the best continuations, as two rows.

    A continuation's index is the number of its beam times the size of the vocabulary, plus the token.
    """
    totals = (scores[:, None] + logits.float().log_softmax(-1)).flatten()
    best = totals.topk(min(count, totals.numel()))
    return torch.stack([best.values.double(), best.indices.double()])


def _token_buffer(
    engine: MegatronEngine, inputs: torch.Tensor, attention_mask: torch.Tensor | None, length: int, end: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor that has room for all tokens and starts with the prompts, and the length of each prompt."""
    inputs = inputs.to(engine.device).long()
    samples, given = inputs.shape
    mask = torch.ones_like(inputs) if attention_mask is None else attention_mask.to(engine.device)
    if not bool((mask[:, :-1] >= mask[:, 1:]).all()):
        raise ValueError(
            "megatron_generate takes prompts that are padded on the right: set tokenizer.padding_side = 'right'"
        )
    tokens = inputs.new_full((samples, length), 0 if end is None else end)
    tokens[:, :given] = inputs
    return tokens, mask.sum(1).long()


@torch.no_grad()
def next_logits(engine: MegatronEngine, tokens: torch.Tensor) -> torch.Tensor | None:
    """Compute the logits of the next token of each sample; every rank must call this.

    Args:
        engine: The engine whose model is a decoder.
        tokens: Tokens of shape `[samples, tokens]`.

    Returns:
        Logits of shape `[samples, vocabulary]` on the last stage, and None on the others.
    """

    def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        inputs = next(data)
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        masked = causal_mask(inputs.shape[1], inputs.device)
        return model(inputs, positions, masked), partial(_last_logits, tokens.shape[1], engine.vocabulary_size)

    # Norms that are split along the sequence need a length that is a multiple of the number of ranks. Padding at the
    # end does not affect other tokens.
    padding = -tokens.shape[1] % megatron_setup.import_parallel_state().get_tensor_model_parallel_world_size()
    padded = torch.nn.functional.pad(tokens, (0, padding))
    outputs = engine.run_schedule(
        forward_step,
        lambda: iter([padded]),
        num_microbatches=1,
        seq_length=padded.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return outputs[0] if outputs else None


def _last_logits(length: int, size: int, logits: torch.Tensor, **_: Any) -> torch.Tensor:
    return whole_vocabulary(logits[:, length - 1], size)


def _broadcast_from_last_stage(found: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Broadcast a tensor from the first rank of the last stage to all ranks that share a model."""
    groups = megatron_setup.import_parallel_state()
    group = groups.get_model_parallel_group()
    if dist.get_world_size(group) == 1:
        assert found is not None
        return found
    last_stage = dist.get_world_size(group) - groups.get_tensor_model_parallel_world_size()
    source = dist.get_global_rank(group, last_stage)
    shared = torch.empty_like(like) if found is None else found.to(like.dtype).contiguous()
    dist.broadcast(shared, src=source, group=group)
    return shared


def megatron_generate(
    engine: MegatronEngine,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Generate tokens as described in `MegatronEngine.megatron_generate`.

    Args:
        engine: The engine whose model is a decoder.
        inputs: Tokens of shape `[samples, tokens]`, padded on the right.
        attention_mask: A mask of the same shape, with 1 for a token and 0 for padding. If None, there is no padding.
        max_length: The maximum number of tokens in a sample, including the prompt.
        max_new_tokens: The maximum number of tokens after the longest prompt. Pass either this or `max_length`.
        num_beams: The number of candidates in a beam search, which takes one prompt. If None, tokens are sampled.
        length_penalty: A candidate's log probability is divided by its length to this power. If None, the power is 1.
        options: `add_BOS`, `bos_token_id`, `eos_token_id`, and the fields of `Sampling`.
    """
    if not isinstance(engine.train_step_handler, GPTTrainStep):
        raise ValueError(
            f"megatron_generate needs a GPT, but {engine.train_step_handler.name} trains another type of model"
        )
    end, first = _special_token(engine, options, "eos_token_id"), _special_token(engine, options, "bos_token_id")
    if options.pop("add_BOS", False):
        inputs, attention_mask = _prepend_bos(inputs, attention_mask, first)
    length = _output_length(engine, inputs, max_length, max_new_tokens)
    modes = [chunk.training for chunk in engine.module]
    engine.module.eval()
    try:
        if num_beams is None:
            sampling = _sampling(options)
            return generate(engine, inputs, attention_mask, length, sampling, end)
        if options:
            raise ValueError(f"beam search does not accept {', '.join(options)}; leave num_beams out to sample tokens")
        _check_beams(inputs, attention_mask, num_beams)
        return beam_search(engine, inputs, length, num_beams, 1.0 if length_penalty is None else length_penalty, end)
    finally:
        for chunk, mode in zip(engine.module, modes, strict=True):
            chunk.train(mode)


def _sampling(options: dict[str, Any]) -> Sampling:
    unknown = [name for name in options if name not in Sampling.__dataclass_fields__]
    if unknown:
        known = ", ".join(("add_BOS", "bos_token_id", "eos_token_id", *Sampling.__dataclass_fields__))
        raise ValueError(f"megatron_generate does not accept {', '.join(unknown)}; known: {known}")
    return Sampling(**{name: value for name, value in options.items() if value is not None})


def _special_token(engine: MegatronEngine, options: dict[str, Any], name: str) -> int | None:
    given = options.pop(name, None)
    if given is None:
        given = getattr(engine.args, name, None)
    return None if given is None else int(given)


def _prepend_bos(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, first: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if first is None:
        raise ValueError("add_BOS=True needs the token to put before prompts: megatron_generate(..., bos_token_id=...)")
    inputs = torch.cat([torch.full_like(inputs[:, :1], first), inputs], 1)
    if attention_mask is not None:
        attention_mask = torch.cat([torch.ones_like(attention_mask[:, :1]), attention_mask], 1)
    return inputs, attention_mask


def _output_length(
    engine: MegatronEngine, inputs: torch.Tensor, max_length: int | None, max_new_tokens: int | None
) -> int:
    if (max_length is None) == (max_new_tokens is None):
        raise ValueError("megatron_generate needs either max_length (with the prompt) or max_new_tokens")
    prompt = inputs.shape[1]
    asked = int(max_length) if max_length is not None else prompt + int(max_new_tokens or 0)
    if asked <= prompt:
        raise ValueError(f"nothing to generate: prompts have {prompt} tokens, but the maximum length is {asked}")
    positions = int(engine.args.max_position_embeddings)
    if asked > positions:
        warnings.warn(
            f"the model has {positions} positions, so samples end at {positions} tokens instead of {asked}",
            stacklevel=4,
        )
    if positions <= prompt:
        raise ValueError(f"prompts of {prompt} tokens fill all {positions} positions of the model")
    return min(asked, positions)


def _check_beams(inputs: torch.Tensor, attention_mask: torch.Tensor | None, num_beams: int) -> None:
    if num_beams < 1:
        raise ValueError(f"num_beams={num_beams} must be 1 or more")
    if inputs.shape[0] != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError(
            "beam search takes one prompt without padding; call megatron_generate for one prompt at a time"
        )
