"""Training functions for the ranks of these tests: small models on megatron-core, whose CUDA calls run on the CPU.

If each rank has a GPU, nothing is redirected.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from notebook_accelerate import Accelerator
from notebook_accelerate.strategies.megatron.megatron_setup import make_chunks
from notebook_accelerate.utils import MegatronLMPlugin, set_seed
from tests.support.cuda_on_cpu import cuda_on_cpu

SAMPLES, TOKENS, WORDS = 64, 16, 32
STEPS = 6
RATE, DECAY, CLIPPING = 1e-2, 0.1, 0.5

_GPT = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
_DRY = {"attn_pdrop": 0.0, "resid_pdrop": 0.0}
_BERT = {
    "model_type": "megatron-bert",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": TOKENS,
    "vocab_size": WORDS,
    "num_labels": 3,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
_T5 = {
    "model_type": "t5",
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 16,
    "num_heads": 4,
    "d_kv": 4,
    "d_ff": 32,
    "n_positions": TOKENS,
    "vocab_size": WORDS,
    "dropout_rate": 0.0,
    "layer_norm_epsilon": 1e-6,
    "pad_token_id": 0,
}


class Given(nn.Module):
    """A model as users pass it to `prepare`: its configuration determines which model is built."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.weight = nn.Parameter(torch.zeros(2, 2))


class GivenForSequenceClassification(Given):
    """A model whose class name requests training on a label for each sample."""


def gpt() -> Given:
    """Return a small decoder."""
    return Given({**_GPT, **_DRY})


def bert() -> Given:
    """Return a small encoder that is pretrained."""
    return Given(_BERT)


def classifier() -> Given:
    """Return a small encoder that labels samples."""
    return GivenForSequenceClassification(_BERT)


def t5() -> Given:
    """Return a small encoder-decoder."""
    return Given(_T5)


def samples(kind: str = "gpt") -> list[dict[str, torch.Tensor]]:
    """Return the training samples for a kind of model, which are the same at each call."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (SAMPLES, TOKENS), generator=generator)
    labels = {"gpt": words, "bert": words.where(words % 3 == 0, -100), "classifier": words[:, 0] % 3, "t5": words}
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels[kind], strict=True)]


@dataclass
class Case:
    """The options of one training run."""

    tp: int = 1
    pp: int = 1
    batch_size: int = 4
    micro_batches: int = 2
    kind: str = "gpt"
    precision: str = "no"
    start: str | None = None
    """The checkpoint to start from."""
    skipped: int = 0
    """The number of windows that are skipped at the start."""
    save_after: int = -1
    """The step after which a checkpoint is written."""
    save_to: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings of the plugin."""
    launched: bool = False
    """Whether the plugin is passed to the launch instead of the Accelerator."""

    def plugin(self) -> MegatronLMPlugin:
        """Return the plugin with this case's settings."""
        settings: dict[str, Any] = {"num_micro_batches": self.micro_batches, **self.more}
        return MegatronLMPlugin(tp_degree=self.tp, pp_degree=self.pp, **settings)


@contextmanager
def place() -> Iterator[bool]:
    """Run the block on the GPU if each rank has one, and otherwise on the CPU.

    Yields:
        Whether the ranks run on the CPU.
    """
    alone = torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", "1"))
    with warnings.catch_warnings(), cuda_on_cpu() if alone else nullcontext():
        warnings.simplefilter("ignore")  # megatron-core warns about every optional library that is missing.
        yield alone


def prepared(case: Case, cpu: bool) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator with a case's model, optimizer and loader."""
    plugin = {} if case.launched else {"megatron_lm_plugin": case.plugin()}
    accelerator = Accelerator(cpu=cpu, mixed_precision=case.precision, **plugin)
    set_seed(3)
    model = {"gpt": gpt, "bert": bert, "classifier": classifier, "t5": t5}[case.kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    loader = DataLoader(samples(case.kind), batch_size=case.batch_size)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def run(case: Case) -> list[tuple[float, float]]:
    """Train a case. Return the loss and the gradient norm of each step."""
    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        if case.start:
            accelerator.load_state(case.start, elastic=True)
        found = steps(case, accelerator, model, optimizer, loader)
        accelerator.end_training()
    return found


def steps(case: Case, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[tuple[float, float]]:
    """Train on the windows of the loader."""
    found = []
    for index, batch in enumerate(loader):
        if index >= STEPS:
            break
        if index < case.skipped:
            continue
        loss = model(**batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
        if index == case.save_after:
            accelerator.save_state(case.save_to)
    return found


def beside_plain(case: Case) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Train a case on one rank, and the same model in plain torch. Return the losses and norms of both."""
    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        (plain,) = make_chunks(accelerator.state.megatron_lm_plugin, accelerator.device)
        plain.load_state_dict(accelerator.get_state_dict(model))
        expected = plainly(plain, case.batch_size * case.micro_batches)
        found = steps(case, accelerator, model, optimizer, loader)
        accelerator.end_training()
    return found, expected


def plainly(model: nn.Module, size: int) -> list[tuple[float, float]]:
    """Train megatron-core's GPT like any other torch module, without its engine."""
    parameters = list(model.parameters())
    wide, flat = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": DECAY}, {"params": flat, "weight_decay": 0.0}], lr=RATE
    )
    rows = torch.stack([sample["input_ids"] for sample in samples()]).to(parameters[0].device)
    masked = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=rows.device).triu(1)[None, None]
    found = []
    for window in rows.split(size)[:STEPS]:
        positions = torch.arange(TOKENS, device=rows.device).expand_as(window)
        logits = model(window, positions, masked)
        loss = functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), window[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, CLIPPING)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found
