"""Training on datasets in Megatron's own format."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accelerate import Accelerator
from notebook_accelerate.utils import MegatronLMDummyDataLoader, MegatronLMPlugin
from tests.megatron.trainings import TOKENS, WORDS, gpt, place
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)


def _written(prefix: str) -> None:
    builder = import_module("megatron.core.datasets.indexed_dataset").IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=np.int32
    )
    for document in torch.randint(1, WORDS - 1, (40, 50), generator=torch.Generator().manual_seed(0)):
        builder.add_document(document, [50])
    builder.finalize(f"{prefix}.idx")


def _train(prefix: str, consumed: list[int]) -> tuple[list[torch.Tensor], list[float], list[int]]:
    _written(prefix)
    tokenizer = SimpleNamespace(eod=WORDS - 1, pad=0, vocab_size=WORDS, unique_identifiers={"name": "none"})
    settings: dict[str, Any] = {"train_iters": 3, "eval_iters": 1, "seq_length": TOKENS, "consumed_samples": consumed}
    with place() as cpu:
        plugin = MegatronLMPlugin(num_micro_batches=2, megatron_dataset_flag=True, **settings)
        accelerator = Accelerator(cpu=cpu, megatron_lm_plugin=plugin)
        model: Any = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = MegatronLMDummyDataLoader(
            data_path=[prefix],
            split="80,10,10",
            micro_batch_size=2,
            tokenizer=tokenizer,
            data_cache_path=f"{prefix}-cache",
        )
        model, optimizer, *loaders = accelerator.prepare(model, optimizer, data, data, data)
        seen, losses = [], []
        for batch in loaders[0]:
            seen.append(batch["tokens"].cpu())
            loss = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        accelerator.end_training()
    return seen, losses, [len(loader) for loader in loaders]


def test_the_placeholder_becomes_loaders_for_the_three_splits(tmp_path: Path) -> None:
    ((seen, losses, lengths),) = run_ranks(_train, str(tmp_path / "data"), [], world_size=1)
    assert [tuple(tokens.shape) for tokens in seen] == [(4, TOKENS)] * 3
    assert lengths == [3, 1, 1]
    assert losses[0] == pytest.approx(float(np.log(WORDS)), rel=0.1)
    ((rest, _, _),) = run_ranks(_train, str(tmp_path / "data"), [4], world_size=1)
    assert all(torch.equal(a, b) for a, b in zip(rest, seen[1:], strict=True))
