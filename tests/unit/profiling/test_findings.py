"""The rules of profiles: each rule reports its own facts, and none reports anything about a healthy training run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.profiling.analysis import apply_rules
from notebook_accelerate.profiling.collective_waits import CollectiveWait
from notebook_accelerate.profiling.facts import ProfileFacts, RankFacts
from notebook_accelerate.profiling.tables import Line
from notebook_accelerate.profiling.trace import is_logging, is_outside_torch

LINE = Line("Cell In[3], line 7", "train", "loss.item()")
HEALTHY = RankFacts(
    0, steps=3, step=0.05, loader=0.002, compute=0.04, optimizer=0.005, rows=64, ops=60, small_ops=40,
    small_seconds=0.002, optimizer_ops=100, items=1, item_seconds=0.0001, matrix={"c10::BFloat16": 0.03}, logging=0.001,
    saving=0.0, blocked=0.02, asked={"mixed_precision": "bf16", "compiled": ""},
)  # fmt: skip
DEVICE = {"kernels": 200.0, "kernel_seconds": 0.047}


def sentences(*changes: dict[str, object], waits: tuple[CollectiveWait, ...] = ()) -> list[str]:
    ranks = [replace(HEALTHY, rank=rank, **each) for rank, each in enumerate(changes)]  # type: ignore[arg-type]
    return [each.sentence for each in apply_rules(ProfileFacts(ranks, list(waits)))]


SPEAKS: dict[str, tuple[list[dict[str, object]], str]] = {
    "slow loader": (
        [{}, {"loader": 0.0205}],
        "rank 1's data loading takes 41 % of each step (20.5 ms); num_workers=1 in the DataLoader would hide it",
    ),
    "too few workers": (
        [{"loader": 0.03, "loader_processes": True}, {"loader": 0.031, "loader_processes": True}],
        (
            "the data loading of ranks 0, 1 takes 62 % of each step (31 ms); its worker processes do not keep "
            "up; about 2.7 times "
            "as many would"
        ),
    ),
    "unbalanced": (
        [{}, {"compute": 0.02, "rows": 16}],
        (
            "rank 0 computes 40 ms per step, rank 1 20 ms: its batches have 64 rows, the others' 16; give all "
            "ranks batches "
            "of one size"
        ),
    ),
    "reads on the host": (
        [{"items": 512, "item_seconds": 0.01, "item_line": LINE}],
        (
            "rank 0 takes 20 % of each step in 512 calls of item(), each of which stops the training for one number at "
            "Cell In[3], line 7: loss.item(); keep the tensors, and read them once per epoch or every 100 steps"
        ),
    ),
    "a read that waits for the device": (
        [{"kernels": 200.0, "kernel_seconds": 0.015, "items": 1, "synchronizing": 0.03, "item_line": LINE}],
        (
            "rank 0 takes 60 % of each step in 1 call of item(), waiting for the device at Cell In[3], line "
            "7: loss.item(); "
            "keep the tensors, and read them once per epoch or every 100 steps"
        ),
    ),
    "small operations": (
        [{"ops": 4000, "small_ops": 3990, "small_seconds": 0.0305}],
        "61 % of each step of rank 0 is 3,990 launches of small operations: try torch.compile, or larger batches",
    ),
    "small kernels": (
        [{"kernels": 4000, "kernel_seconds": 0.0195}],
        "61 % of each step of rank 0 is 4,000 launches of small kernels: try torch.compile, or larger batches",
    ),
    "barriers": (
        [{"barriers": 1, "barrier_seconds": 0.004, "barrier_line": LINE}] * 2,
        (
            "ranks 0, 1 call a barrier in each step at Cell In[3], line 7: loss.item(), 4 ms: the all_reduce of the "
            "gradients already waits for all ranks; remove the barrier"
        ),
    ),
    "a growing list": (
        [{"grown": [("losses", 512, 3)]}],
        (
            "losses on rank 0 keeps the graph of every step: 512 tensors or nodes, 1 more in each step; add "
            "loss.detach() or loss.item() to it instead"
        ),
    ),
    "retained": (
        [{"retained": [("model.kept", 12_000_000)]}],
        (
            "model.kept on rank 0 keeps 12.0 MB of activations after backward, through the next step: store "
            "detached copies, "
            "or delete it; the graph is freed only without retain_graph=True"
        ),
    ),
    "full precision": (
        [{"matrix": {"float": 0.03, "c10::BFloat16": 0.01}}],
        (
            "75 % of the time of matrix products on rank 0 is in float32, although mixed_precision='bf16' was "
            "requested: call the model that prepare() returned, or use accelerator.autocast()"
        ),
    ),
    "logging": (
        [{"logging": 0.01, "logging_line": LINE}],
        (
            "rank 0's printing and logging takes 20 % of each step (10 ms) at Cell In[3], line 7: "
            "loss.item(); write less "
            "often"
        ),
    ),
    "checkpoints": (
        [{"saving": 0.02, "saving_steps": 1.0, "saving_line": LINE}],
        (
            "rank 0 saves a checkpoint in each step, 40 % of it (20 ms) at Cell In[3], line 7: loss.item(); "
            "save every few "
            "hundred steps"
        ),
    ),
    "checkpoints that samples of the other rank have seen less often": (
        [{"saving": 0.02, "saving_steps": 1.0}, {"saving": 0.004, "saving_steps": 0.4}, {}],
        "ranks 0, 1 save a checkpoint in each step, 40 % of it (20 ms); save every few hundred steps",
    ),
    "interpreter lock": (
        [{"blocked": 0.9, "threads": [("counter", 0.5, LINE)]}],
        (
            "on rank 0 the thread 'counter' takes 50 % of the CPU time, in Python at Cell In[3], line "
            "7: loss.item(): "
            "it holds the interpreter lock, and the training waits; move its work to a process"
        ),
    ),
    "not compiled": (
        [{"asked": {"mixed_precision": "no", "compiled": "fast"}}],
        (
            "no compiled code runs on rank 0, although fast requests it: call the compiled model, not the "
            "original; set TORCH_LOGS=recompiles,graph_breaks to log other causes"
        ),
    ),
}


@pytest.mark.parametrize("name", SPEAKS)
def test_a_rule_reports_its_facts(name: str) -> None:
    changes, expected = SPEAKS[name]
    assert sentences(*changes) == [expected]


SILENT: dict[str, list[dict[str, object]]] = {
    "healthy": [{}, {}],
    "a fast loader": [{"loader": 0.005}],
    "a loader whose processes wait for a processor": [{"loader": 0.03, "loader_processes": True, "delay": 0.8}],
    "equal rows: the machine is slower": [{}, {"compute": 0.02}],
    "one item on the host": [{"items": 1, "item_seconds": 0.02}],
    "small operations between large ones": [{"ops": 4000, "small_ops": 3990, "small_seconds": 0.01}],
    "compiled code launches small kernels": [{"kernels": 4000, "kernel_seconds": 0.01, "compiled": True}],
    "the device computes while the host waits for it": [{**DEVICE, "items": 1, "synchronizing": 0.03}],
    "the device computes while the host loads data": [{**DEVICE, "loader": 0.02}],
    "the device computes while the host prints": [{**DEVICE, "logging": 0.02}],
    "the device computes while the host saves": [{**DEVICE, "saving": 0.02, "saving_steps": 1.0}],
    "a barrier every ten steps": [{"barriers": 0.1, "barrier_seconds": 0.004}],
    "small tensors are kept": [{"retained": [("loss", 4)]}],
    "float32 was asked for": [{"matrix": {"float": 0.03}, "asked": {"mixed_precision": "no"}}],
    "a checkpoint in one of three steps": [{"saving": 0.02, "saving_steps": 0.33}],
    "a busy thread without the lock": [{"blocked": 0.1, "threads": [("counter", 0.5, LINE)]}],
    "the lock without a thread": [{"blocked": 0.9}],
    "no step": [{"steps": 0, "loader": 0.05}],
}


@pytest.mark.parametrize("name", SILENT)
def test_a_rule_is_silent_when_unsure(name: str) -> None:
    assert sentences(*SILENT[name]) == []


def test_waiting_ranks_are_reported_if_nothing_else_explains_the_wait() -> None:
    wait = CollectiveWait("all_reduce #7 (64 MB)", 0, {1: 0.018, 2: 0.017}, LINE, usual=0.016)
    assert sentences({}, {}, {}, waits=(wait,)) == [
        (
            "all other ranks wait 18 ms per step for rank 0 in all_reduce #7 (64 MB), which is at Cell In[3], line 7: "
            "loss.item()"
        )
    ]
    assert len(sentences({"loader": 0.02}, {}, {}, waits=(wait,))) == 1  # The loader causes the wait.
    for unsure in (
        replace(wait, usual=0.009),  # A step takes 50 ms.
        replace(wait, seconds={1: 0.009, 2: 0.009}),  # In each step, another rank waits long.
        replace(wait, line=None),
        replace(wait, culprit=9),
    ):
        assert sentences({}, {}, {}, waits=(unsure,)) == []
    assert len(sentences({"delay": 0.3}, {}, {}, waits=(wait,))) == 1
    assert sentences({"delay": 0.4}, {}, {}, waits=(wait,)) == []  # Rank 0 lacked a CPU core for 40 % of the step.
    part = ProfileFacts([replace(HEALTHY, rank=rank) for rank in range(3)], [wait], world=8)
    assert apply_rules(part)[0].sentence.startswith("ranks 1, 2 wait 18 ms")  # Nothing is known about the other ranks.


def test_time_outside_of_torch_is_reported_if_nothing_else_explains_it() -> None:
    line = Line("Cell In[3], line 9", "train", "time.sleep(0.02)")
    pausing = {"outside": 0.02, "outside_line": line}
    (found,) = sentences(pausing, {**pausing, "outside": 0.018})
    assert found == (
        "40 % of each step of ranks 0, 1 (20 ms) is spent outside of torch's operations, mostly at Cell In[3], line 9: "
        "time.sleep(0.02); move this work out of the training loop"
    )
    assert sentences({"outside": 0.009, "outside_line": line}) == []
    assert sentences({**pausing, **DEVICE}) == [], "the device computes meanwhile"
    (logging,) = sentences({**pausing, "logging": 0.015, "logging_line": LINE})
    assert "printing and logging" in logging
    wait = CollectiveWait("all_reduce #7 (64 MB)", 1, {0: 0.018}, line, usual=0.018)
    (slowest,) = sentences({}, pausing, waits=(wait,))
    assert "wait" in slowest


@pytest.mark.parametrize(
    ("below", "outside"),
    [
        ([], True),
        (["/usr/lib/python3.12/json/decoder.py"], True),
        (["/venv/site-packages/numpy/random.py"], True),
        (["/venv/site-packages/torch/_tensor.py"], False),
        (["/venv/site-packages/notebook_accelerate/accelerator.py"], False),
        (["/usr/lib/python3.12/logging/__init__.py"], False),
    ],
)
def test_a_stack_is_outside_of_torch_below_the_users_line(below: list[str], outside: bool) -> None:
    stack = [frame("/venv/site-packages/torch/nn/module.py", "__call__"), frame("<ipython-input-3>", "train")]
    assert is_outside_torch([*stack, *(frame(name, "f") for name in below)]) is outside
    assert not is_outside_torch([frame(name, "f") for name in below])


def test_a_barrier_costs_what_the_last_rank_spends_in_it_and_does_not_explain_a_wait() -> None:
    wait = CollectiveWait("all_reduce #7 (64 MB)", 0, {1: 0.018}, LINE, usual=0.018)
    changes = {"barriers": 1, "barrier_seconds": 0.0008}, {"barriers": 1, "barrier_seconds": 0.019}
    waiting, barrier = sentences(*changes, waits=(wait,))
    assert waiting.startswith("rank 1 waits 18 ms per step for rank 0")
    assert barrier.startswith("ranks 0, 1 call a barrier in each step, 0.8 ms:")


def frame(filename: str, function: str) -> FrameInfo:
    return FrameInfo(filename, 1, function, "")


def test_logging_is_recognised_by_its_own_files() -> None:
    train, library = frame("/home/me/tracking/train.py", "train"), "/lib/python3.11/site-packages"
    assert not is_logging([train])
    assert not is_logging([train, frame(f"{library}/tqdm/std.py", "tqdm.__iter__"), frame("data.py", "__getitem__")])
    assert is_logging(
        [train, frame(f"{library}/tqdm/std.py", "tqdm.__iter__"), frame(f"{library}/tqdm/std.py", "update")]
    )
    assert is_logging([train, frame(f"{library}/notebook_accelerate/tracking/vendors.py", "log")])
    assert is_logging([train, frame("/usr/lib/python3.11/logging/__init__.py", "Logger.info")])
