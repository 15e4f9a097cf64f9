"""With DeepSpeed's sequence parallelism (Ulysses), losses, gradients and checkpoints equal those on whole sequences."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn import functional
from torch.utils.data import DataLoader, Dataset

from notebook_accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, ParallelismConfig
from notebook_accelerate.utils import DeepSpeedSequenceParallelConfig
from tests.clients.test_trainer import train
from tests.support.ranks import RankError, run_ranks

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None or importlib.util.find_spec("transformers") is None,
        reason="DeepSpeed and transformers are not installed: make test-deepspeed",
    ),
]
WORDS, LENGTH, ROWS, CLIP = 32, 8, 2, 0.5
SECONDS = 400


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences whose first labels are ignored. How many are ignored differs between sequences and between pieces."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.words[index].clone()
        labels[: 1 + index % 7] = -100
        return {"input_ids": self.words[index], "labels": labels, "position_ids": torch.arange(LENGTH)}


def llama(seed: int = 0, attention: str = "sdpa", heads: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": heads,
        "attn_implementation": attention,
    }
    return LlamaForCausalLM(LlamaConfig(**shape))


def plain(count: int, window: int = 1, heads: int = 4) -> dict[str, Any]:
    """Train on whole sequences in plain torch. `window` batches make a step."""
    model = llama(heads=heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for index, batch in enumerate(DataLoader(Sentences(count), batch_size=ROWS)):
        loss = model(**batch).loss
        (loss / window).backward()
        losses.append(loss.item())
        if (index + 1) % window == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


def loss_of(model: Any, batch: dict[str, torch.Tensor], group: Any) -> torch.Tensor:
    """Return the loss of whole sequences from this rank's piece, as DeepSpeed's documentation computes it."""
    targets = batch["shift_labels"]
    scores = model(**batch).logits
    loss = model.module.loss_function(logits=scores, labels=None, shift_labels=targets, vocab_size=WORDS)
    losses = gathered(loss, group)
    counts = gathered((targets != -100).sum(), group)
    whole: torch.Tensor = sum(piece * count for piece, count in zip(losses, counts, strict=True) if count > 0)
    return whole / sum(counts)


def gathered(value: torch.Tensor, group: Any) -> Sequence[torch.Tensor]:
    if group.size() == torch.distributed.get_world_size():
        return functional.all_gather(value, group=group)  # type: ignore[no-untyped-call,no-any-return]
    # On gloo, the function above mistakes the group's ranks for global ranks in its backward pass (torch 2.13).
    values: torch.Tensor = all_gather_tensor_autograd(value.reshape(1), 0, group)
    return list(values.unbind())


def accelerator_of(zero: dict[str, Any], window: int = 1, mixed_precision: str = "no", **degrees: Any) -> Accelerator:
    how = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    layout = ParallelismConfig(**{"sp_size": 2, **degrees}, sp_backend="deepspeed", sp_handler=how)
    plugin = DeepSpeedPlugin({"zero_optimization": {**zero, "stage3_gather_16bit_weights_on_model_save": True}})
    return Accelerator(
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=window,
        parallelism_config=layout,
        deepspeed_plugin=plugin,
    )


def split(
    zero: dict[str, Any],
    count: int,
    window: int = 1,
    heads: int = 4,
    degrees: dict[str, int] | None = None,
    folder: str | None = None,
    save_at: int | None = None,
) -> dict[str, Any]:
    """Train on sequences that are split across the ranks.

    Save before step `save_at`, or resume from `folder` with the second half of the batches.
    """
    accelerator = accelerator_of(zero, window, **(degrees or {}))
    model = llama(accelerator.process_index, heads=heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(Sentences(count), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found: dict[str, Any] = {"length": len(loader), "losses": [], "norms": [], "ends": [], "shapes": set()}
    if folder is not None and save_at is None:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, len(loader) // 2)
    group = accelerator.torch_device_mesh["sp"].get_group()
    for index, batch in enumerate(loader):
        if folder is not None and index == save_at:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            loss = loss_of(model, batch, group)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["ends"].append(accelerator.gradient_state.end_of_dataloader)
        found["shapes"].add(tuple(batch["input_ids"].shape))
    return {**found, "weights": accelerator.get_state_dict(model)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param({"stage": 0}, marks=pytest.mark.nightly),
        pytest.param({"stage": 1}, marks=pytest.mark.nightly),
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "reduce_scatter": False},
    ],
    ids=str,
)
def test_training_equals_a_training_on_whole_sequences(zero: dict[str, Any]) -> None:
    found = run_ranks(split, zero, 24, timeout=SECONDS)
    expected = plain(24)
    assert_equal(found[0], expected)
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["length"] == len(rank["losses"]) == 12  # The pieces come from the batches of both ranks.
        assert rank["ends"] == [False] * 11 + [True]
        assert rank["shapes"] == {(ROWS, LENGTH // 2)}
    assert expected["losses"][0] != pytest.approx(expected["losses"][-1], rel=1e-3)


def test_windows_and_shared_heads_train_equally() -> None:
    found = run_ranks(split, {"stage": 2}, 24, 3, 1, timeout=SECONDS)[0]
    assert_equal(found, plain(24, 3, 1))


def test_two_sequences_on_four_ranks_train_equally() -> None:
    # Pairs of ranks read different batches, so that together they make a step of two batches.
    found = run_ranks(split, {"stage": 2}, 32, 1, 4, {"dp_replicate_size": 2}, world_size=4, timeout=SECONDS)
    batches = list(DataLoader(Sentences(32), batch_size=ROWS))
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for first in (0, 1, 4, 5, 8, 9, 12, 13):
        for batch in (batches[first], batches[first + 2]):
            (model(**batch).loss / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    assert found[0]["norms"] == pytest.approx(norms, rel=1e-4)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[0]["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_resumed_training_continues(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = run_ranks(split, {"stage": stage}, 24, 1, 4, None, folder, 6, timeout=SECONDS)[0]
    rest = run_ranks(split, {"stage": stage}, 24, 1, 4, None, folder, timeout=SECONDS)[0]
    assert rest["losses"] == whole["losses"][6:]
    assert rest["norms"] == whole["norms"][6:]
    for name, weight in whole["weights"].items():
        assert torch.equal(rest["weights"][name], weight), name


def beside() -> dict[str, Any]:
    """Evaluate on split and whole sequences, and with another model. Then check that everything is restored."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    accelerator = accelerator_of({"stage": 2})
    model = llama()
    raw, whole = llama(), next(iter(DataLoader(Sentences(4), batch_size=ROWS)))
    loader = DataLoader(Sentences(8), batch_size=ROWS)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    group = accelerator.torch_device_mesh["sp"].get_group()
    model.eval()
    with torch.no_grad():
        pieces = [loss_of(model, batch, group).item() for batch in loader]
        own = accelerator.prepare(DataLoader(Sentences(8), batch_size=ROWS))
        mine = [model(**batch).loss.item() for batch in own]
        model.train()
        other = raw(**whole).loss.item()
    again = accelerator.deepspeed_ulysses_dl_adapter(own, model)
    found = {
        "pieces": pieces,
        "mine": mine,
        "other": other,
        "length": (len(own), len(again)),
        "same": accelerator.deepspeed_ulysses_dl_adapter(again, model) is again,
    }
    accelerator.free_memory()
    found["back"] = ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    model = llama()
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    model.eval()
    with torch.no_grad():
        found["second"] = [loss_of(model, batch, group).item() for batch in loader]
    return found


def test_other_models_and_evaluation_are_not_split() -> None:
    batches = list(DataLoader(Sentences(8), batch_size=ROWS))
    with torch.no_grad():
        losses = [llama()(**batch).loss.item() for batch in batches]
    for rank, found in enumerate(run_ranks(beside, timeout=SECONDS)):
        assert found["pieces"] == pytest.approx(losses, rel=1e-5)
        assert found["mine"] == pytest.approx(losses[rank::2], rel=1e-5)
        assert found["other"] == pytest.approx(losses[0], rel=1e-5)
        assert found["length"] == (2, 4)
        assert found["same"]
        assert found["back"]
        assert found["second"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_the_trainer_trains_like_one_process(stage: int, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 1, {"split": False}, "deepspeed/sequence_trainer.py")[0]
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    found = train(tmp_path / "split", 2, {"split": True, "deepspeed": config}, "deepspeed/sequence_trainer.py")
    for rank in found:
        assert (alone["strategy"], rank["strategy"]) == ("SingleStrategy", "UlyssesStrategy")
        for name in ("losses", "norms", "evaluated"):
            assert rank[name] == pytest.approx(alone[name], rel=1e-5), name


def in_halves() -> list[float]:
    accelerator = accelerator_of({"stage": 2}, mixed_precision="bf16")
    loader: Any = DataLoader(Sentences(24), batch_size=ROWS)
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    group = accelerator.torch_device_mesh["sp"].get_group()
    losses = []
    for batch in loader:
        loss = loss_of(model, batch, group)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_low_precision_is_near_full_precision() -> None:
    for losses in run_ranks(in_halves, timeout=SECONDS):
        assert losses == pytest.approx(plain(24)["losses"], rel=1e-2)


def implied() -> tuple[str, Any]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2))
    return accelerator.distributed_type.value, accelerator.deepspeed_plugin.zero_stage


def test_the_layout_implies_deepspeed() -> None:
    assert run_ranks(implied, timeout=SECONDS) == [("DEEPSPEED", 2)] * 2


def refused(reason: str) -> None:
    accelerator = accelerator_of({"stage": 2})
    model: Any = llama(attention="eager" if reason == "attention" else "sdpa")
    if reason == "model":
        model = torch.nn.Linear(2, 2)
    if reason == "state":
        model.config.layer_types = ["full_attention", "linear_attention"]
    if reason == "uneven":
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    count = 7 if reason == "rows" else 8
    rows = DataLoader(Sentences(count), batch_size=ROWS, collate_fn=bare if reason == "places" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = accelerator.prepare(model, optimizer, rows)
    if reason == "rows":
        loader = accelerator.deepspeed_ulysses_dl_adapter(DataLoader(Sentences(3 * 4), batch_size=3), model)
    next(iter(loader))


def bare(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("model", r"Linear has no config with hidden_size, .* such as LlamaForCausalLM"),
        ("attention", r"uses the attention 'eager'; load it with attn_implementation='sdpa'"),
        ("state", r"has layers of the kind linear_attention, whose state would be reset in each piece"),
        ("uneven", r"even_batches=True"),
        ("rows", r"a batch has 3 sequences, but DeepSpeed's attention was created for 2"),
        ("places", r"a batch has input_ids, but no position_ids, labels"),
    ],
)
def test_wrong_arguments_are_refused(reason: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, reason, timeout=SECONDS)
