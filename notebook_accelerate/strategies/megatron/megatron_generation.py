"""Text from a decoder of Megatron-LM, its tensors and stages split over ranks: sampling, greedy and beam search.

Each new token is computed from all tokens before it, through the same schedule that trains: no cache of keys and values
is kept, so that what works for training works here, at the price of time that grows with the square of the length.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_accelerate.strategies.megatron import megatron_setup
from notebook_accelerate.strategies.megatron.forward_steps import GPTTrainStep, whole_vocabulary

if TYPE_CHECKING:
    from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine


@dataclass(kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 1: always the likeliest; 0: all."""
    top_p: float = 0.0
    """Only the likeliest tokens that make up this probability are drawn from; 0: all."""
    top_p_decay: float = 0.0
    """What `top_p` is multiplied by after each token; 0: it stays."""
    top_p_bound: float = 0.0
    """`top_p` gets no smaller than this."""
    random_seed: int | None = None
    """The seed of the draws; None: they follow torch's generator."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} must be above 0; for the likeliest token write top_k=1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be from 0 to 1")
        if self.top_k and self.top_p:
            raise ValueError(f"top_k={self.top_k} and top_p={self.top_p} exclude each other; leave one of them out")

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Return the generator of the draws; None: torch's own.

        Args:
            device: Where they are drawn.
        """
        return None if self.random_seed is None else torch.Generator(device).manual_seed(self.random_seed)

    def after(self, tokens: int) -> float:
        """Return `top_p` after so many tokens.

        Args:
            tokens: How many were generated.
        """
        return max(self.top_p * self.top_p_decay**tokens, self.top_p_bound) if self.top_p_decay else self.top_p


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None, done: int = 0) -> torch.Tensor:
    """Choose a token for each sample.

    Args:
        logits: Shape `[samples, vocabulary]`.
        sampling: How.
        generator: Of the draws; None: torch's own.
        done: How many tokens were generated before.

    Returns:
        Shape `[samples]`.
    """
    if sampling.top_k == 1:
        return logits.argmax(-1)
    scores = logits.float() / sampling.temperature
    if sampling.top_k:
        least = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    elif 0 < (top_p := sampling.after(done)) < 1:
        ordered, order = scores.sort(descending=True)
        shares = ordered.softmax(-1)
        # The token that crosses the border belongs to those that are kept.
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
    """Continue samples token by token; every rank must call this.

    Args:
        engine: The engine of a decoder.
        inputs: Tokens, filled up on the right, of shape `[samples, tokens]`.
        attention_mask: The same shape; 1 where there is a token; None: there is one everywhere.
        length: How long samples get at most, the prompt included.
        sampling: How a token is chosen.
        end: The token that ends a sample; None: there is none.

    Returns:
        Prompts and what follows, of shape `[samples, tokens]`; what follows an end is ends.
    """
    tokens, lengths = _start(engine, inputs, attention_mask, length, end)
    over = torch.zeros_like(lengths, dtype=torch.bool)
    first, generator = int(lengths.min()), sampling.generator(tokens.device)
    for at in range(first, length):
        logits = next_logits(engine, tokens[:, :at])
        new = None if logits is None else choose(logits, sampling, generator, at - first)
        new = _agree(new, tokens[:, 0])
        in_prompt = at < lengths
        fill = tokens[:, at] if end is None else torch.full_like(new, end)
        tokens[:, at] = torch.where(in_prompt, tokens[:, at], torch.where(over, fill, new))
        if end is not None:
            over |= ~in_prompt & (new == end)
            if bool(over.all()):
                return tokens[:, : at + 1]
    return tokens


def search(
    engine: MegatronEngine, inputs: torch.Tensor, length: int, beams: int, penalty: float, end: int | None
) -> torch.Tensor:
    """Find the likeliest continuation of one sample by beam search; every rank must call this.

    Args:
        engine: The engine of a decoder.
        inputs: Tokens without filling, of shape `[1, tokens]`.
        length: How long the sample gets at most, the prompt included.
        beams: How many candidates are followed.
        penalty: The power of the length by which a candidate's log probability is divided.
        end: The token that ends a sample; None: there is none.

    Returns:
        The best candidate, of shape `[1, tokens]`.
    """
    tokens, _ = _start(engine, inputs, None, length, end)
    prompt = inputs.shape[1]
    tokens = tokens.repeat(beams, 1)
    scores = torch.full((beams,), -torch.inf, device=tokens.device)
    scores[0] = 0.0  # all are the same still
    finished: list[tuple[float, torch.Tensor]] = []
    for at in range(prompt, length):
        logits = next_logits(engine, tokens[:, :at])
        found = None if logits is None else _likeliest(scores, logits, 2 * beams)
        totals, places = _agree(found, tokens.new_zeros(2, 2 * beams).double())
        kept: list[tuple[float, int, int]] = []
        size = engine.vocabulary
        for total, place in zip(totals.tolist(), places.long().tolist(), strict=True):
            beam, token = divmod(place, size)
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


def _likeliest(scores: torch.Tensor, logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return log probabilities and places (beam times vocabulary) of the likeliest continuations, as two rows."""
    totals = (scores[:, None] + logits.float().log_softmax(-1)).flatten()
    best = totals.topk(min(count, totals.numel()))
    return torch.stack([best.values.double(), best.indices.double()])


def _start(
    engine: MegatronEngine, inputs: torch.Tensor, attention_mask: torch.Tensor | None, length: int, end: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for all tokens, and how long each prompt is."""
    inputs = inputs.to(engine.device).long()
    samples, given = inputs.shape
    mask = torch.ones_like(inputs) if attention_mask is None else attention_mask.to(engine.device)
    if not bool((mask[:, :-1] >= mask[:, 1:]).all()):
        raise ValueError(
            "megatron_generate takes prompts that are filled up on the right: tokenizer.padding_side = 'right'"
        )
    tokens = inputs.new_full((samples, length), 0 if end is None else end)
    tokens[:, :given] = inputs
    return tokens, mask.sum(1).long()


@torch.no_grad()
def next_logits(engine: MegatronEngine, tokens: torch.Tensor) -> torch.Tensor | None:
    """Compute what follows samples; every rank must call this.

    Args:
        engine: The engine of a decoder.
        tokens: Shape `[samples, tokens]`.

    Returns:
        Logits on the last stage, of shape `[samples, vocabulary]`; None on the others.
    """
    run = import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
    chunks, size = list(engine.module), engine.vocabulary

    def forward(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        words = next(data)
        places = torch.arange(words.shape[1], device=words.device).expand_as(words)
        masked = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool, device=words.device).triu(1)[None, None]
        return model(words, places, masked), partial(_last, tokens.shape[1], size)

    # Where the layers' norms are split over the sequence, it must divide; what is added behind changes nothing before.
    spare = -tokens.shape[1] % megatron_setup.load().get_tensor_model_parallel_world_size()
    filled = torch.nn.functional.pad(tokens, (0, spare))
    several = [iter([filled]) for _ in chunks]
    told = run(
        forward_step_func=forward,
        data_iterator=several if len(chunks) > 1 else several[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=1,
        seq_length=filled.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return told[0] if told else None


def _last(length: int, size: int, logits: torch.Tensor, **_: Any) -> torch.Tensor:
    return whole_vocabulary(logits[:, length - 1], size)


def _agree(found: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Give all ranks that hold one model what the first rank of its last stage has found."""
    groups = megatron_setup.load()
    group = groups.get_model_parallel_group()
    if dist.get_world_size(group) == 1:
        assert found is not None
        return found
    source = dist.get_global_rank(group, _rank_of_last_stage(groups, group))
    shared = torch.empty_like(like) if found is None else found.to(like.dtype).contiguous()
    dist.broadcast(shared, src=source, group=group)
    return shared


def _rank_of_last_stage(groups: Any, group: Any) -> int:
    """Return the place, in the group of ranks that hold one model, of the last stage's first rank."""
    tensors: int = groups.get_tensor_model_parallel_world_size()
    return dist.get_world_size(group) - tensors


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
    """Continue samples, by beam search where `num_beams` is given; every rank must call this.

    Args:
        engine: The engine of a decoder.
        inputs: Tokens, filled up on the right, of shape `[samples, tokens]`.
        attention_mask: The same shape; 1 where there is a token; None: there is one everywhere.
        max_length: How long samples get at most, the prompt included.
        max_new_tokens: How many tokens are added at most to the longest prompt.
        num_beams: How many candidates are followed.
        length_penalty: The power of the length by which a candidate's log probability is divided; None: 1.
        options: `add_BOS`, `bos_token_id`, `eos_token_id`, and the fields of `Sampling`.

    Returns:
        Prompts and what follows, of shape `[samples, tokens]`.

    Raises:
        ValueError: The model is no decoder, or arguments contradict each other.
    """
    if not isinstance(engine.train_step_handler, GPTTrainStep):
        raise ValueError(
            f"megatron_generate continues text with a GPT, and {engine.train_step_handler.name} trains another model"
        )
    end, first = _special(engine, options, "eos_token_id"), _special(engine, options, "bos_token_id")
    if options.pop("add_BOS", False):
        inputs, attention_mask = _with_beginning(inputs, attention_mask, first)
    length = _length(engine, inputs, max_length, max_new_tokens)
    modes = [chunk.training for chunk in engine.module]
    engine.module.eval()
    try:
        if num_beams is None:
            sampling = _sampling(options)
            return generate(engine, inputs, attention_mask, length, sampling, end)
        if options:
            raise ValueError(f"beam search knows no {', '.join(options)}; leave num_beams out to draw tokens")
        _check_beams(inputs, attention_mask, num_beams)
        return search(engine, inputs, length, num_beams, 1.0 if length_penalty is None else length_penalty, end)
    finally:
        for chunk, mode in zip(engine.module, modes, strict=True):
            chunk.train(mode)


def _sampling(options: dict[str, Any]) -> Sampling:
    unknown = [name for name in options if name not in Sampling.__dataclass_fields__]
    if unknown:
        known = ", ".join(("add_BOS", "bos_token_id", "eos_token_id", *Sampling.__dataclass_fields__))
        raise ValueError(f"megatron_generate knows no {', '.join(unknown)}; it takes {known}")
    return Sampling(**{name: value for name, value in options.items() if value is not None})


def _special(engine: MegatronEngine, options: dict[str, Any], name: str) -> int | None:
    given = options.pop(name, None)
    if given is None:
        given = getattr(engine.args, name, None)
    return None if given is None else int(given)


def _with_beginning(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, first: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if first is None:
        raise ValueError("add_BOS=True needs the token that begins a text: megatron_generate(..., bos_token_id=...)")
    inputs = torch.cat([torch.full_like(inputs[:, :1], first), inputs], 1)
    if attention_mask is not None:
        attention_mask = torch.cat([torch.ones_like(attention_mask[:, :1]), attention_mask], 1)
    return inputs, attention_mask


def _length(engine: MegatronEngine, inputs: torch.Tensor, max_length: int | None, max_new_tokens: int | None) -> int:
    if (max_length is None) == (max_new_tokens is None):
        raise ValueError("megatron_generate takes one of max_length (prompt included) and max_new_tokens")
    prompt = inputs.shape[1]
    asked = int(max_length) if max_length is not None else prompt + int(max_new_tokens or 0)
    if asked <= prompt:
        raise ValueError(f"nothing to generate: prompts of {prompt} tokens, and {asked} are asked for in all")
    room = int(engine.args.max_position_embeddings)
    if asked > room:
        warnings.warn(f"the model has {room} positions: samples end there, not at {asked} tokens", stacklevel=4)
    if room <= prompt:
        raise ValueError(f"prompts of {prompt} tokens leave no room in a model of {room} positions")
    return min(asked, room)


def _check_beams(inputs: torch.Tensor, attention_mask: torch.Tensor | None, num_beams: int) -> None:
    if num_beams < 1:
        raise ValueError(f"num_beams={num_beams} must be 1 or more")
    if inputs.shape[0] != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError(
            f"beam search takes one prompt without filling; got {inputs.shape[0]}: call it for each of them"
        )


__all__ = ["Sampling", "choose", "generate", "megatron_generate", "next_logits", "search"]
