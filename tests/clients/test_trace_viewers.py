"""HTA, TensorBoard's plugin and Perfetto read the files of a saved profile of two ranks."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator
from notebook_accelerate.launch import Profile
from notebook_accelerate.telemetry.debug_protocol import AFTER_STEPS
from tests.support import perfetto
from tests.support.browser import SCREENSHOTS
from tests.support.profiled_trainings import mlp, prepared, step, training

pytestmark = pytest.mark.timeout(600)  # This only guards against hangs.

HTA = """
import json, logging, sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    opened = TraceAnalysis(trace_dir=sys.argv[1])
    names = opened.t.symbol_table.get_sym_table()
    found = {}
    for rank, events in opened.t.get_all_traces().items():
        inside = events[events["iteration"] >= 0]["name"].map(lambda index: names[index])
        steps = events[events["name"].map(lambda index: names[index].startswith("ProfilerStep#"))]
        found[rank] = {
            "events": len(events), "calls": inside.value_counts().to_dict(), "begin": int(steps["ts"].min()),
            "steps": len(steps),
        }
    print(json.dumps([found, [int(number) for number in opened.get_profiler_steps()]]))
"""
TENSORBOARD = """
import json, sys
from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader
if __name__ == "__main__":
    run = RunLoader("saved", sys.argv[1], io.Cache()).load()
    found = {}
    for each in run.profiles.values():
        row = found[each.worker] = {"views": [view.display_name for view in each.views]}
        if each.worker == "All":
            tables = each.comm_ops["data"].items()
            row["operations"] = {name: [line[0] for line in table["rows"]] for name, table in tables}
        else:
            row["steps"] = [line[0] for line in each.overview["steps"]["rows"]]
            row["calls"] = {line["name"]: line["calls"] for line in each.operation_table_by_name["data"]}
    print(json.dumps(found))
"""


def train() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, mlp())
    rows = TensorDataset(torch.randn(10_000, 256), torch.randint(0, 10, (10_000,)))
    batches: Any = accelerator.prepare(DataLoader(rows, batch_size=64))
    while True:
        for batch in batches:
            step(accelerator, model, optimizer, batch)


@dataclass(frozen=True)
class Saved:
    """A saved profile and the folder that contains its files."""

    profile: Profile
    folder: Path

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events in one file of a profile."""
        rows: list[dict[str, Any]] = json.loads(gzip.decompress((self.folder / name).read_bytes()))["traceEvents"]
        return rows

    def calls(self, operation: str) -> dict[int, int]:
        """Return how often each rank called an operation in the recorded steps."""
        return next(row.calls for row in self.profile.ops() if row.name == operation)

    def opened(self, program: str) -> Any:
        """Read the folder with a program in a separate process. Return the findings that it prints as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", program, str(self.folder)], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    with training(train) as run:
        profile = run.profile(steps=3, memory=True)
    folder = tmp_path_factory.mktemp("saved")
    profile.save(folder)
    assert (profile.ranks, profile.steps) == ([0, 1], 3)
    return Saved(profile, folder)


@pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="no HolisticTraceAnalysis: make test-clients")
def test_hta_opens_the_folder(saved: Saved) -> None:
    ranks, steps = saved.opened(HTA)
    assert steps == [0, 1, 2]
    assert set(ranks) == {"0", "1"}
    for rank in (0, 1):
        rows = [row for row in saved.events(f"rank{rank}.pt.trace.json.gz") if row["ph"] == "X"]
        assert sum(row["name"] == AFTER_STEPS for row in rows) == 1
        assert ranks[str(rank)]["events"] == sum(row["cat"] != "Trace" for row in rows) - 1
        assert ranks[str(rank)]["steps"] == 3
        for name in ("aten::addmm", "aten::mm", "c10d::allreduce_"):
            assert ranks[str(rank)]["calls"][name] == saved.calls(name)[rank] > 0
    begins = {each.rank: each.start for each in saved.profile.timeline.steps if each.number == 1}
    assert ranks["1"]["begin"] - ranks["0"]["begin"] == pytest.approx(begins[1] - begins[0], abs=100)


@pytest.mark.skipif(importlib.util.find_spec("torch_tb_profiler") is None, reason="no plugin: make test-clients")
def test_tensorboard_opens_the_folder(saved: Saved) -> None:
    workers = saved.opened(TENSORBOARD)
    assert set(workers) == {"rank0", "rank1", "All"}
    for rank in (0, 1):
        worker = workers[f"rank{rank}"]
        assert worker["views"] == ["Overview", "Operator", "Trace", "Memory"]
        assert worker["steps"] == ["0", "1", "2"]
        assert worker["calls"]["aten::addmm"] == saved.calls("aten::addmm")[rank] > 0
        assert workers["All"]["operations"][f"rank{rank}"] == ["gloo:all_reduce"]
    assert workers["All"]["views"] == ["Distributed"]


@pytest.mark.skipif(perfetto.missing() is not None, reason=str(perfetto.missing()))
def test_perfetto_opens_the_combined_file_and_each_single_one(saved: Saved) -> None:
    with perfetto.opened(saved.folder / "all_ranks" / "merged.json.gz") as page:
        assert page.errors() == []
        expected, arrows = perfetto.imported(saved.events("all_ranks/merged.json.gz"))
        order = attrgetter("process", "thread", "start", "end", "name")
        assert sorted(page.slices(), key=order) == sorted(expected, key=order)
        ends = "flow join slice a on slice_out = a.id join slice b on slice_in = b.id"
        found = page.rows(f"select a.ts, a.name, b.ts, b.name from {ends}")
        assert sorted(found) == sorted((begin.start, begin.name, end.start, end.name) for begin, end in arrows)
        page.picture(SCREENSHOTS / "perfetto.png")
    for rank in (0, 1):
        with perfetto.opened(saved.folder / f"rank{rank}.pt.trace.json.gz") as page:
            steps = page.rows("select count(*) from slice where name glob 'ProfilerStep#*'")
            calls = page.rows("select count(*) from slice where name = 'aten::addmm'")
            assert (steps, calls) == ([(3,)], [(saved.calls("aten::addmm")[rank],)])


def test_perfetto_keeps_all_events_and_arrows_of_all_ranks(saved: Saved) -> None:
    timeline, rows = saved.profile.timeline, saved.events("all_ranks/merged.json.gz")
    events, arrows = perfetto.imported(rows)
    assert len(events) == sum(map(len, timeline.tracks)) + len(timeline.steps)
    assert len(arrows) == len(timeline.waits) > 0
    assert {begin.process for begin, _ in arrows} | {end.process for _, end in arrows} == {"rank 0", "rank 1"}
    assert {(row.process, row.name) for row in events if row.thread == "steps"} == {
        (f"rank {rank}", f"step {number}") for rank in (0, 1) for number in (1, 2, 3)
    }
