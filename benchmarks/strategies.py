"""Parallel strategies: a step in this package, in Accelerate and in plain torch, and sharded checkpoints.

DeepSpeed's rows run only if DeepSpeed is installed. ``make bench`` has an environment for them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from benchmarks.bench import Figure, alternate, compared, row
from benchmarks.worker_ranks import WorkerRanks
from notebook_accelerate.strategies.deepspeed.deepspeed_engine import remove_dead_locks

HERE, PEER, PLAIN = "notebook_accelerate", "accelerate", "plain"
RANKS = 2
ROUNDS, STEPS = 11, 3
"""The sides alternate every few steps, so that a busy moment of the machine affects all of them."""
REPEATS = 5
EXTENSIONS = Path(".build/torch-extensions").absolute()
"""The cache for DeepSpeed's compiled operators, which the first group of ranks fills."""
BLOCKS = 4
DEEP = 24
"""The number of blocks in the model that is saved. It has 19 million parameters, 230 MB together with Adam's state."""


def world(side: str, strategy: str, blocks: int = BLOCKS) -> WorkerRanks:
    """Start the ranks of one side, and return them.

    Args:
        side: `plain` or the name of a package.
        strategy: `ddp`, `fsdp2`, `zero2` or `zero3`.
        blocks: The number of blocks of the model.
    """
    arguments = ["benchmarks.strategies_worker", side, strategy, str(blocks)]
    return WorkerRanks(arguments, RANKS, _environment(side, strategy))


def _environment(side: str, strategy: str) -> dict[str, object]:
    chosen: dict[str, object] = {}
    if strategy.startswith("zero"):
        chosen |= {
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": EXTENSIONS,
            # DeepSpeed finds Ninja next to Python.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
    # With ACCELERATE_USE_CPU, Accelerate 1.15 ignores the DeepSpeed plugin and trains with DDP.
    if not (side == PEER and strategy.startswith("zero")):
        chosen |= {"ACCELERATE_USE_CPU": "true"}
    return chosen


def steps(strategy: str, words: str) -> Iterator[Figure]:
    """Measure a step and a rank's memory in this package, in Accelerate and without a library."""
    with ExitStack() as stack:
        plain, here = (stack.enter_context(world(side, strategy)) for side in (PLAIN, HERE))
        try:
            peer: WorkerRanks | None = stack.enter_context(world(PEER, strategy))
            note = ""
        except RuntimeError as error:
            peer, note = None, f"Accelerate failed: {str(error).strip().splitlines()[-1]}"
        sides = [plain, here] + ([peer] if peer is not None else [])
        rounds = _rounds(sides)
        memory = [min(max(side.ask("memory 3")) for _ in range(3)) for side in sides]
    for kind, name in (("clock", "a step"), ("processor", "a step's CPU time")):
        times = [[found[kind] for found in side] for side in rounds]
        yield _against(
            f"{words}: {name}, relative to plain", times[1], times[0], ratio=1.03 if kind == "clock" else None
        )
        if peer is not None:
            yield _against(f"{words}: {name}, Accelerate relative to plain", times[2], times[0])
    yield compared(f"{words}: peak memory of a rank, relative to plain", [memory[1]], [memory[0]], unit="MB",
                   scale=1e-6, ratio=1.03, note=note or f"Accelerate: {memory[2] * 1e-6:.0f} MB")  # fmt: skip


def _rounds(sides: Sequence[WorkerRanks]) -> list[list[dict[str, float]]]:
    found: list[list[dict[str, float]]] = [[] for _ in sides]

    def measure(index: int) -> float:
        found[index].append(sides[index].steps(STEPS))
        return 0.0

    alternate(ROUNDS, *(lambda index=index: measure(index) for index in range(len(sides))))
    return [side[1:] for side in found]


def _against(what: str, ours: Sequence[float], plain: Sequence[float], ratio: float | None = None) -> Figure:
    """Compare with `plain` by the median of the ratios in each round, because a round's sides see the same load."""
    quotient = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    return Figure(
        what=what,
        unit="ms",
        ours=1e3 * statistics.median(ours),
        peer=1e3 * statistics.median(plain),
        goal="" if ratio is None else f"≤ {ratio:g} × plain",
        met=None if ratio is None else quotient <= ratio,
        note=f"median ratio {quotient:.3f}, ratio of the fastest rounds {min(ours) / min(plain):.3f}",
    )


@row("strategies", "ddp")
def ddp() -> Iterator[Figure]:
    """Measure DistributedDataParallel."""
    return steps("ddp", "DDP")


@row("strategies", "fsdp2")
def fsdp2() -> Iterator[Figure]:
    """Measure FSDP 2."""
    return steps("fsdp2", "FSDP2")


@row("strategies", "zero")
def zero() -> Iterator[Figure]:
    """Measure DeepSpeed's ZeRO 2 and 3."""
    for stage in (2, 3):
        if find_spec("deepspeed") is None:
            yield Figure(
                what=f"ZeRO-{stage}",
                unit="ms",
                ours=None,
                note="run make bench ROWS=strategies, which installs DeepSpeed",
            )
        else:
            remove_dead_locks(EXTENSIONS)
            yield from steps(f"zero{stage}", f"ZeRO-{stage}")


@row("strategies", "sharded checkpoints")
def checkpoints() -> Iterator[Figure]:
    """Measure saving and loading 230 MB of state that is sharded across two ranks."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        here, peer = (stack.enter_context(world(side, "fsdp2", DEEP)) for side in (HERE, PEER))
        background, blocking, theirs = alternate(
            REPEATS,
            lambda: _slowest(here.ask(f"save {folder}/background no"), "stall"),
            lambda: _slowest(here.ask(f"save {folder}/here yes"), "call"),
            lambda: _slowest(peer.ask(f"save {folder}/peer yes"), "call"),
        )
        loads = alternate(
            REPEATS, lambda: max(here.ask(f"load {folder}/here")), lambda: max(peer.ask(f"load {folder}/peer"))
        )
    yield compared("FSDP2, save_state(blocking=False): pause of the training loop", background, theirs, unit="ms",
                   scale=1e3, ratio=0.2, note="the call, plus the slowdown of the next two steps")  # fmt: skip
    yield compared(
        "FSDP2, save_state(blocking=False), relative to blocking", background, blocking, unit="ms", scale=1e3
    )
    yield compared(
        "FSDP2, save_state(), synced to disk, with checksums", blocking, theirs, unit="ms", scale=1e3, ratio=1.0
    )
    yield compared("FSDP2, load_state(), checksums verified", *loads, unit="ms", scale=1e3, ratio=0.6)


def _slowest(answers: Sequence[dict[str, float]], name: str) -> float:
    return max(answer[name] for answer in answers)
