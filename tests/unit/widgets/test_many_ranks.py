"""Hundreds of ranks in a panel and in a report: few rows, the worst ranks first, and small messages."""

from __future__ import annotations

import json
import re
from typing import Any

from notebook_accelerate.launch import Run
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.curves import ENVELOPE_LABEL
from notebook_accelerate.launch.report.rank_rows import MANY
from notebook_accelerate.launch.report.rank_tables import SHOWN_RANKS
from notebook_accelerate.launch.state.run_events import RankExited
from notebook_accelerate.telemetry import (
    ExceptionInfo,
    FrameInfo,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    RankFailure,
    ResourceEvent,
    StepTimeEvent,
)
from notebook_accelerate.telemetry.step_time import PARTS
from notebook_accelerate.widgets.plot import chosen_ranks
from notebook_accelerate.widgets.run_panel import RunPanel
from notebook_accelerate.widgets.table_view import FOLDED_SECONDS, _complete
from tests.support.runs import START, Clock, devices, end, feed, make_run
from tests.support.snapshots import Snapshot

RANKS, EACH = 512, 8
EVIL = "<script>alert('&')</script>"


class _Panel:
    def __init__(self, ranks: int = RANKS, each: int = EACH) -> None:
        self.run = make_run(
            ranks, host_of=lambda rank: (rank // each, f"worker-{rank // each}" if rank >= each else "")
        )
        self.clock = Clock()
        self.step = 0
        self.panel = RunPanel(self.run, self.clock)

    def turn(
        self, seconds: float = 1.0, steps: int = 10, late: tuple[int, ...] = (), slow: tuple[int, ...] = ()
    ) -> None:
        """Let all ranks take some steps, and render."""
        self.step += steps
        self.clock.turn(seconds)
        for info in self.run.ranks:
            own = 0.2 if info.rank in slow else 0.1
            step = self.step - 500 if info.rank in late else self.step
            parts = dict(zip(PARTS, (own / 2, 0.1, 0.3 - own, 0.01, own / 2), strict=True))
            feed(
                self.run, MetricEvent({"loss": 1.0 + info.rank}, step), ProgressEvent(step, 10_000, "step"),
                StepTimeEvent(parts, step, 1, own), ResourceEvent(90.0, 1 << 30),
                *devices(info.rank, 80.0, 2 << 30),
                rank=info.rank, at=self.clock.now,
            )  # fmt: skip
        self.render()

    def render(self) -> None:
        self.panel.schedule.touch()
        assert self.panel.schedule.tick()

    def groups(self) -> dict[str, list[Any]]:
        """Return the rows of each group of the table, as a view that was just opened receives them."""
        self.panel.rank_table._full_requested = True
        self.clock.turn(1.0)
        self.render()
        return {group["key"]: group["all"] for group in self.panel.rank_table.full["groups"]}

    def close(self) -> None:
        self.panel.close()


def test_nodes_are_listed_first_then_outliers_and_the_other_ranks_behind_a_fold() -> None:
    one = _Panel()
    one.step = 1000
    for _ in range(4):
        one.turn(late=(300,), slow=(9, 41))
    groups = one.groups()
    late = [("node 1 · worker-1", 9), ("node 5 · worker-5", 41), ("node 37 · worker-37", 300)]
    assert [row[1][0] for row in groups["nodes"][:3]] == [
        {"text": node, "badge": f"rank {rank} late"} for node, rank in late
    ]
    assert [row[2] for row in groups["nodes"][:3]] == [{"tone": "node late"}] * 3
    assert groups["nodes"][3][1][:2] == ["node 0 · this machine", "8 running"]
    assert len(groups["nodes"]) + len(groups["more-nodes"]) == RANKS // EACH
    assert [row[1][0]["text"] for row in groups["outliers"]] == ["300", "9", "41"]
    assert len(groups["others"]) == RANKS - 3
    verdict = one.panel.sections.widgets["verdict"].value
    assert "Ranks 9, 41 are stragglers: up to 200 ms of their own work per step" in verdict
    assert "Rank 300 is 500 steps behind." in verdict
    slowest = groups["nodes"][2][1]
    assert slowest[2:4] == ["540", "500"], "the step of the node's slowest rank, and how far it is behind"
    assert slowest[7] == "8.59 GB", "the memory of all of the node's ranks"
    one.close()


def test_failed_ranks_are_the_first_outliers_and_the_list_is_limited() -> None:
    one = _Panel()
    one.turn()
    for rank in range(100, 200):
        one.run._internals.journal.append(RankExited(rank, "failed", "exit 1"))
    groups = one.groups()
    assert [row[1][:2] for row in groups["outliers"]] == [[str(n), ["failed"]] for n in range(100, 100 + SHOWN_RANKS)]
    titles = {group["key"]: group["title"] for group in one.panel.rank_table.full["groups"]}
    assert titles["outliers"] == f"The first {SHOWN_RANKS} of 100 outliers"
    assert groups["nodes"][0][1][1] == "4 failed, 4 running"
    assert groups["nodes"][0][2] == {"tone": "node dead"}
    one.close()


def _bytes(message: Any) -> int:
    return len(json.dumps(message))


def test_an_update_for_a_few_changed_ranks_is_small() -> None:
    one = _Panel()
    for _ in range(12):  # The last update comes long after every view was opened.
        one.turn(FOLDED_SECONDS, steps=0)
    table = one.panel.rank_table
    whole, seq = _bytes(table.full), table._seq
    feed(one.run, MetricEvent({"loss": 5.0}, one.step + 1), rank=77, at=one.clock.now)
    one.clock.turn(1.5)
    one.render()
    assert table._seq == seq + 1
    changed = [row for group in table.delta["groups"] for row in group.get("changes", ())]
    print(f"\nthe whole table of {RANKS} ranks: {whole:,} bytes; a change of one rank: {_bytes(table.delta):,}")
    assert _bytes(table.delta) < whole / 20
    assert [row for row in changed if row[0] == "n9"], "rank 77 is on node 9"
    assert "rows" not in json.dumps(table.delta)
    one.close()


def test_a_table_that_applies_the_deltas_is_complete() -> None:
    one = _Panel(ranks=40)
    for _ in range(12):
        one.turn()
    shown = one.groups()
    for turn in range(10):
        seq = one.panel.rank_table._seq
        one.turn(6.0, late=(turn,) if turn % 3 else (), slow=(20, 21) if turn % 2 else ())
        assert one.panel.rank_table._seq == seq + 1
        message = one.panel.rank_table.delta
        for change in message["groups"]:
            if "all" in change:
                shown[change["key"]] = change["all"]
            else:
                shown[change["key"]] = _applied(shown[change["key"]], change)
        shown = {key: shown[key] for key in message.get("order", shown)}
        assert one.panel.rank_table.table is not None
        whole = [_complete(group) for group in one.panel.rank_table.table.groups]
        assert json.loads(json.dumps({group["key"]: group["all"] for group in whole})) == json.loads(json.dumps(shown))
    one.close()


def _applied(rows: list[Any], change: dict[str, Any]) -> list[Any]:
    """Return a group's rows after a change has been applied."""
    known = {key: (list(cells), dict(*more)) for key, cells, *more in (*rows, *change.get("rows", ()))}
    for key, *pairs in change.get("changes", ()):
        cells, more = known[key]
        for place, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(place, int):
                cells[place] = value
            else:
                more[place] = value
    found = {}
    for key, (cells, more) in known.items():
        present = {name: value for name, value in more.items() if value}
        found[key] = [key, cells, *([present] if present else [])]
    return [found[key] for key in change.get("order", [row[0] for row in rows])]


def test_curves_are_envelopes_with_selected_ranks_over_them() -> None:
    one = _Panel()
    for _ in range(3):
        one.turn()
    entries = {(name, label): (count, *rest) for name, label, count, *rest in one.panel.plot.full["series"]}
    assert {entry for entry in entries if not entry[0].startswith("system/")} == {("loss", ENVELOPE_LABEL)}
    one.panel.plot.chosen = "3, 500-501, 9999, nonsense"
    one.turn()
    labels = [label for name, label, *_ in one.panel.plot.full["series"] if name == "loss"]
    assert labels == [ENVELOPE_LABEL, "rank 3", "rank 500", "rank 501"]
    seq = one.panel.plot._seq
    one.clock.turn(0.3)
    feed(one.run, MetricEvent({"loss": 7.0}, one.step), rank=3, at=one.clock.now)
    one.render()
    assert one.panel.plot._seq == seq + 1
    (envelope, rank) = one.panel.plot.delta["series"]
    assert envelope[:3] == ("loss", ENVELOPE_LABEL, 1)
    assert envelope[3] == one.step, "points from this step on are replaced"
    assert rank == ("loss", "rank 3", 1)
    one.close()


def test_words_that_are_not_ranks_are_ignored() -> None:
    assert chosen_ranks("0, 5-7") == (0, 5, 6, 7)
    assert chosen_ranks("5 – 7; 2 2") == (5, 6, 7, 2)
    assert chosen_ranks("all, -, 3x") == ()
    assert len(chosen_ranks("0-1000000000")) < 20


def test_a_panel_of_many_ranks_sends_few_lines_of_each() -> None:
    one = _Panel()
    for info in one.run.ranks:
        feed(one.run, LogEvent("stdout", "\n".join(f"{EVIL} {n}" for n in range(500))), rank=info.rank)
    one.turn()
    assert len(one.panel.logs.full["lines"]) <= 8_000
    assert one.panel.logs.full["nodes"]["15"] == 1
    assert one.panel.logs.full["skipped"]["0"] > 400
    one.close()


def test_the_step_times_show_the_mean_the_slowest_ranks_and_the_slowest_nodes() -> None:
    one = _Panel()
    one.turn(slow=(77,))
    html = one.panel.sections.widgets["times"].value
    assert html.count('class="na-stack"') == 1 + 8 + 8
    assert html.index("mean of 512 ranks") < html.index("rank 77") < html.index("node 9 · worker-9")
    assert "use by node" in one.panel.sections.widgets["resources"].value
    assert one.panel.sections.widgets["resources"].value.count('<span class="na-meter">') == RANKS // EACH
    one.close()


def _failed(run: Run) -> None:
    frames = (FrameInfo("train.py", 7, "train", "loss = model(x)"),)
    chain = (ExceptionInfo("ValueError", EVIL, frames),)
    failed = tuple(RankFailure(rank, "exception", START, EVIL, chain) for rank in range(256))
    end(run, "failed", failed, exit_of=lambda rank: "exit 1" if rank < 256 else "SIGINT")


def test_the_report_of_many_ranks_is_short() -> None:
    one = _Panel()
    one.turn()
    _failed(one.run)
    text, html = one.panel.text, one.panel.html
    assert re.search(r"node 63 · worker-63 +504–511 +8 failed", text)
    assert "0–255" in text
    assert "ranks 0–255 failed" in text
    assert len(text.splitlines()) < 200
    assert "512 ranks, by state" in html
    assert EVIL not in html
    assert "mean, range" not in html, "the texts of an image must be inside the image"
    print(f"\nthe report of {RANKS} ranks: {len(html):,} bytes of HTML, {len(text):,} of text")
    assert len(html) < 150_000
    one.close()


def test_few_ranks_on_two_machines_are_grouped_by_node(snapshot: Snapshot) -> None:
    one = _Panel(ranks=MANY, each=8)
    one.step = 1000
    for _ in range(4):
        one.turn(late=(12,))
    table = one.panel.rank_table.table
    assert table is not None
    snapshot("ranks_of_two_machines", one.panel.sections.widgets["verdict"].value + rendering.html(table, inline=False))
    assert "node" in one.panel.text
    one.close()
