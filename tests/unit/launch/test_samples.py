"""Samples of ranks: totals by line, the flame graph, and real ranks that differ."""

from __future__ import annotations

import time
from xml.etree import ElementTree as ET

import pytest

from notebook_accelerate import notebook_launcher
from notebook_accelerate.launch.report.samples import Samples
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.debug_protocol import SampleReply
from tests.support.waiting import until

LIBRARY = "/usr/lib/python3/site-packages/lib.py"


def reply(own: float, library: float) -> SampleReply:
    frames = [("train.py", 3, "train"), ("train.py", 7, "load"), (LIBRARY, 1, "forward<T>")]
    stacks = [(own, 10, [0, 1]), (library, 5, [0, 2]), (0.001, 1, [0])]
    return SampleReply(1, frames, stacks, own + library + 0.001)


def test_the_time_of_libraries_is_counted_for_the_calling_line() -> None:
    samples = Samples({0: reply(1.0, 3.0), 1: reply(3.0, 1.0)}, tracebacks.frame_location)
    first, second = samples.lines()
    assert {first.place, second.place} == {"train.py, line 3", "train.py, line 7"}
    shares = {line.place: [round(line.shares[rank], 2) for rank in (0, 1)] for line in (first, second)}
    assert shares == {"train.py, line 3": [0.75, 0.25], "train.py, line 7": [0.25, 0.75]}
    assert round(first.share, 2) == 0.5
    assert "75 %" in repr(samples)
    assert "ranks 0, 1 sampled for 4.0 s" in repr(samples)


def test_the_flame_graph_is_svg_whose_bars_are_as_wide_as_their_shares() -> None:
    samples = Samples({0: reply(1.0, 3.0), 1: reply(1.0, 3.0), 2: "it has ended"}, tracebacks.frame_location)
    drawing = ET.fromstring(samples.flame_graph())
    bars = {bar[0].text.split(" ·")[0]: bar for bar in drawing.iter() if bar.tag.endswith("rect") and bar[0].text}
    widths = {name: float(bar.attrib["width"]) for name, bar in bars.items()}
    assert widths["train"] > 895
    assert 222 < widths["load"] < 226
    assert 670 < widths["forward<T>"] < 676
    assert len({bars[name].attrib["fill"] for name in ("train", "forward<T>")}) == 2
    assert "rank 2 was not sampled: it has ended" in samples._repr_html_()
    nothing = Samples({0: "it has ended"}, tracebacks.frame_location)
    assert (repr(nothing), nothing.lines()) == ("rank 0 was not sampled: it has ended", [])
    assert "has ended" in nothing._repr_html_()


def test_bars_are_redder_the_more_ranks_differ_and_give_the_difference() -> None:
    def drawn(first: SampleReply, second: SampleReply) -> tuple[int, str]:
        """Return by how much red exceeds blue in the bar for ``load``, and the bar's label."""
        samples = Samples({0: first, 1: second}, tracebacks.frame_location)
        nodes = list(ET.fromstring(samples.flame_graph()).iter())
        place = next(at for at, node in enumerate(nodes) if len(node) and (node[0].text or "").startswith("load"))
        colour = nodes[place].attrib["fill"]
        return int(colour[1:3], 16) - int(colour[5:7], 16), str(nodes[place + 2].text)

    equal = drawn(reply(2.0, 2.0), reply(2.0, 2.0))
    slightly = drawn(reply(2.6, 1.4), reply(2.0, 2.0))
    strongly = drawn(reply(3.6, 0.4), reply(1.0, 3.0))
    assert equal[0] < 0 < slightly[0] < strongly[0]
    assert equal[1] == "load · train.py, line 7"
    assert strongly[1].endswith("90 % of rank 0, 25 % of rank 1")


def test_labels_fit_into_their_bars() -> None:
    frames = [("train.py", 1, "W" * 200), ("train.py", 2, "i" * 30)]
    samples = Samples({0: SampleReply(1, frames, [(1.0, 1, [0]), (0.1, 1, [1])], 1.1)}, tracebacks.frame_location)
    labels = [node.text or "" for node in ET.fromstring(samples.flame_graph()).iter() if node.tag.endswith("text")]
    assert [label[-1] for label in labels] == ["…", "…"]
    assert len(labels[0]) * 9.6 < 820
    assert len(labels[1]) * 3.6 < 80


def loads(seconds: float) -> None:
    time.sleep(seconds)


def train(seconds: float) -> None:
    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        accelerator.log({"loop": 1.0})
        loads(0.03 if accelerator.process_index else 0.003)
        accelerator.wait_for_everyone()


def test_differing_ranks_are_sampled_while_they_run() -> None:
    run = notebook_launcher(train, (600,), num_processes=2, use_port=0, block=False, panel=False, start_method="fork")
    until(lambda: run.metrics.get("loop") is not None and len(run.metrics["loop"].rank(1).values) > 3)
    samples = run.sample(1.5)
    assert set(samples.seconds) == {0, 1}
    assert all(1.4 < seconds < 60 for seconds in samples.seconds.values())
    by_source = {line.source.partition("(")[0]: line for line in samples.lines()}
    sleeping, waiting = by_source["time.sleep"], by_source["accelerator.wait_for_everyone"]
    assert sleeping.shares[1] > sleeping.shares[0]
    assert waiting.shares[0] > waiting.shares[1]
    assert sum(line.share for line in samples.lines()) == pytest.approx(1, abs=0.01)
    assert [*run.sample(0.2, ranks=[1]).seconds] == [1]
    for wrong in ({"seconds": 0}, {"seconds": 1e9}, {"rate": 0}, {"rate": 1e9}, {"ranks": [7]}):
        with pytest.raises(ValueError, match=r"allowed|not ranks of this run"):
            run.sample(**wrong)  # type: ignore[arg-type]
    run.stop(grace=1.0)
    assert run.sample(0.1).missing[0].startswith("it is ")
