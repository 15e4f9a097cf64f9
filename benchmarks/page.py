"""Write docs/benchmarks.md: the recorded figures that users notice most, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.record import Entry, number

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"

_TEXT = """\
# Benchmarks

This page shows {shown} of the {recorded} recorded figures. Each figure is a median. This package and its peer, which is
Accelerate unless the line names another one, were measured alternately. A ratio below 1 means that this package is
faster or needs less memory; for rates, more is better. The goal is the value that the project aims at; not every goal
is met. The latest figures were measured on this machine: {machine}.

| | here | peer | ratio | goal |
|---|---|---|---|---|
{lines}

`benchmarks/recorded.json` contains all figures, with their quartiles and dates. `make bench` measures them again, and
`make bench ROWS=launch` measures one area or row. Both print the change of every figure, and list the ratios and
percentages that have become worse. A figure counts as worse only if each of the two medians is outside the quartiles of
the other. `make bench-record` also records the new figures and writes this page.
"""

SHOWN: dict[str, Sequence[tuple[str, str, str, str]]] = {
    "Launching": [
        (
            "call to first optimizer step, 2 ranks",
            "first step",
            "first step of 2 ranks",
            "2 ranks, auto, second launch",
        ),
        (
            "call to first optimizer step, 8 ranks",
            "first step",
            "first step of 8 ranks",
            "8 ranks, auto, second launch",
        ),
        (
            "call to panel, first launch of a kernel",
            "panels",
            "first panel",
            "call to the panel's message, first launch of a kernel",
        ),
        ("an empty function on 2 ranks: call to return", "launch", "fork", "2 ranks: call to return"),
        (
            "the same from a kernel that cannot fork",
            "launch",
            "zygote",
            "2 ranks, start_method='zygote': call to return",
        ),
        ("importing the package", "launch", "package import", "import in a new interpreter"),
        ("a line printed by a rank", "launch", "printing", "the same: extra time per line"),
        ("returning 1 GB", "launch", "large results", "1 GB returned by one of 2 ranks: until the kernel has it"),
        ("eight runs in two slots (peer: one after the other)", "launch", "sweep", "8 runs in two slots"),
        ("stopping ranks that are busy in C", "launch", "stop", "2 ranks busy in C: stop(1)"),
        ("a rank's memory with a model of 1 GB", "launch", "memory of a model", "16 ranks by fork: PSS of each rank"),
    ],
    "Training": [
        ("overhead of a step", "training", "step", "a step of a tiny model, 1 rank, accumulation 1: overhead"),
        ("overhead of a batch, 2 ranks", "training", "loader", "a batch of a plain loader, 2 ranks: overhead"),
        ("a step with gather_for_metrics", "training", "metrics", "an evaluation step with gather_for_metrics"),
        (
            "gathering 50 tensors, relative to one collective",
            "training",
            "collectives",
            "gather of 50 tensors, relative to one fused collective",
        ),
        ("logging a number per step of 2 ms", "launch", "logging", "2 ranks, a step of 2 ms: wall clock"),
        ("a step of transformers' Trainer", "trainer", "trainer", "Trainer, 2 ranks, DDP: a step of a tiny model"),
        ("a step under DDP (peer: plain torch)", "strategies", "ddp", "DDP: a step, relative to plain"),
        ("a step under FSDP2 (peer: plain torch)", "strategies", "fsdp2", "FSDP2: a step, relative to plain"),
        (
            "peak memory under FSDP2 (peer: plain torch)",
            "strategies",
            "fsdp2",
            "FSDP2: peak memory of a rank, relative to plain",
        ),
    ],
    "Checkpoints and big models": [
        (
            "pause for saving 1 GB in the background",
            "checkpoints",
            "save_state of 1 GB",
            "save_state(blocking=False): pause of the training loop",
        ),
        (
            "pause for saving in the background under FSDP2",
            "strategies",
            "sharded checkpoints",
            "FSDP2, save_state(blocking=False): pause of the training loop",
        ),
        ("load_state under FSDP2", "strategies", "sharded checkpoints", "FSDP2, load_state(), checksums verified"),
        ("loading 2 GB in 20 shards", "big models", "loading", "loading 2 GB in 20 shards: time"),
        ("inference with 1 GB on disk", "big models", "disk", "tokens per second, 1 GB on disk, window of 2 blocks"),
        ("overhead of cpu_offload, 100 layers", "big models", "hooks", "overhead of cpu_offload on 100 small layers"),
    ],
    "Watching and debugging": [
        (
            "a step with the panel open (peer: no panel)",
            "browser",
            "panel in the browser: training",
            "a step with the panel open (peer: no panel)",
        ),
        (
            "the browser's main thread while it draws",
            "browser",
            "panel in the browser: main thread",
            "main thread: busy",
        ),
        (
            "an update of a curve of 20,000 points (peer: plotly)",
            "panels",
            "one update of a curve of 20,000 points",
            "time in the kernel",
        ),
        (
            "diagnosing stuck ranks",
            "debugging",
            "diagnose",
            "run.diagnose() of 2 stuck ranks, one holding the GIL in C",
        ),
        (
            "the kernel's CPU time with 512 ranks, share of one core",
            "scale",
            "many ranks over socket pairs",
            "512 ranks: kernel CPU, share of one core",
        ),
    ],
}
"""The figures on the page by heading: the label on the page, and the area, the row and the name of the figure."""


def write() -> None:
    """Write the page to its file."""
    PAGE.write_text(text())


def text() -> str:
    """Return the text of the page. Figures that have not been recorded yet are left out."""
    entries = {entry.key: entry for entry in record.recorded()}
    shown = sum(tuple(key) in entries for figures in SHOWN.values() for _, *key in figures)
    lines = "\n".join(_lines(entries))
    return _TEXT.format(shown=shown, recorded=len(entries), machine=record.machine(), lines=lines)


def _lines(entries: dict[tuple[str, str, str], Entry]) -> Iterator[str]:
    for heading, figures in SHOWN.items():
        yield f"| **{heading}** | | | | |"
        for label, area, row, what in figures:
            if (entry := entries.get((area, row, what))) is not None:
                figure = entry.figure
                there = number(figure.peer, figure.unit) if figure.peer is not None else ""
                ratio = number(figure.ratio) if figure.ratio is not None else ""
                yield f"| {label} | {number(figure.ours, figure.unit)} | {there} | {ratio} | {figure.goal} |"
