"""Traces that are read into columns, merged on one clock and joined across ranks, and the files of a profile."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.launch import Profile
from notebook_accelerate.profiling.analysis import Analysis, slow_loader
from notebook_accelerate.profiling.collective_waits import TracedCall, join
from notebook_accelerate.profiling.facts import RankFacts
from notebook_accelerate.profiling.tables import peak_of, what_fits
from notebook_accelerate.profiling.timeline import ChromeEvents, Step, Timeline, Track
from notebook_accelerate.profiling.trace import RankTrace, parse, read_trace
from notebook_accelerate.telemetry.debug_protocol import AFTER_STEPS, TRACE_KEY
from tests.support import perfetto
from tests.support.odd_values import with_odd_values

MAIN, GLOO = 100, 101


def event(name: str, start: float, duration: float, thread: int = MAIN, **arguments: Any) -> dict[str, Any]:
    kind = "user_annotation" if ":" in name[:6] or "#" in name else "cpu_op"
    return {
        "ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": duration, "args": arguments,
    }  # fmt: skip


def rank_events(late: float, later: float | None = None) -> list[dict[str, Any]]:
    """Return a rank's events: two steps of 10 ms, each with a matrix product and an all_reduce of 4 MB.

    The first all_reduce starts ``late`` microseconds late, and the second ``later`` microseconds, by default the same.
    """
    sums = {"Input Dims": [[1_000_000]], "Input type": ["float"]}
    found = []
    for begin, shift in ((0.0, late), (10_000.0, late if later is None else later)):
        found += [
            event(f"ProfilerStep#{int(begin > 0)}", begin, 10_000.0),
            event("aten::linear", begin + 100, 3000, **{"Input Dims": [[64, 8], [8, 8]]}),
            event("aten::addmm", begin + 200, 2000, **{"Input type": ["float"]}),
            event("gloo:all_reduce", begin + 4000 + shift, 9000 - 4000 - shift, GLOO, **sums),
        ]
    return found


def facts(rank: int, late: float) -> dict[str, Any]:
    return {
        "rank": rank,
        "steps": 2,
        "samples": {
            "frames": [["train.py", 5, "train", "x = model(x)"], ["train.py", 9, "train", "time.sleep(1)"]],
            "stacks": [[0], [1]],
            "times": [int(at * 1000) for at in (0, 3500, 4000 + late, 10_000, 13_500, 14_000 + late, 20_000)],
            "which": [0, 0, 1, 0, 0, 1, 0],
            "seconds": 0.02,
        },
    }


def trace(rank: int, late: float = 0.0, later: float | None = None) -> RankTrace:
    head = {TRACE_KEY: facts(rank, late), "distributedInfo": {"rank": rank, "pg_count": 1}}
    return parse(head, rank_events(late, later))


def test_a_trace_has_columns_steps_and_own_times() -> None:
    read = trace(0)
    assert len(read) == 8
    assert read.steps() == [(0.0, 10_000.0), (10_000.0, 20_000.0)]
    assert read.names[read.name[1]] == "aten::linear"
    own = {row.name: round(row.own[0] * 1e6) for row in Analysis([read], {}, str).ops}
    assert own == {"gloo:all_reduce": 10_000, "aten::addmm": 4000, "aten::linear": 2000}


def test_a_step_that_the_recording_entered_in_the_middle_is_dropped() -> None:
    head = {TRACE_KEY: {**facts(0, 0.0), "steps": 1, "skipped": 1}}
    assert parse(head, rank_events(0.0)).steps() == [(10_000.0, 20_000.0)]


def printing(times: list[float], which: list[int], **more: Any) -> RankFacts:
    """Return the facts of two steps of 10 ms. Samples at ``times`` (in ms) are in ``print`` where ``which`` is 1."""
    found = facts(0, 0.0)
    frames = [["train.py", 5, "train", "x = model(x)"], ["train.py", 9, "train", "print(x)"]]
    found["samples"] |= {"frames": frames, "times": [int(at * 1e6) for at in times], "which": which}
    return Analysis([parse({TRACE_KEY: {**found, **more}}, rank_events(0.0))], {}, str).facts.ranks[0]


def test_reads_with_other_operations_in_between_are_not_a_loop_over_values() -> None:
    def reading(pause: float) -> RankFacts:
        reads = [event("aten::item", 7000 + index * (pause + 10), 10) for index in range(10)]
        return Analysis([parse({TRACE_KEY: facts(0, 0.0)}, [*rank_events(0.0), *reads])], {}, str).facts.ranks[0]

    assert (reading(50).items, reading(150).items) == (5, 5)
    assert reading(50).item_seconds == pytest.approx((10 * 10 + 9 * 50) / 2e6)
    assert reading(150).item_seconds == pytest.approx(10 * 10 / 2e6)


def waiting_for_batches(seconds: float, processes: str = "MultiProcessing", delay: float = 0.0) -> RankFacts:
    """Return the facts of two recorded steps that get batches at once, and two sampled ones that wait ``seconds``."""
    found = facts(0, 0.0)
    loader = "lib/torch/utils/data/dataloader.py"
    frames = [["train.py", 5, "train", "x = next(batches)"], [loader, 1278, "Iter._try_get_data", ""]]
    ends = 0.02, 0.03, 0.03 + seconds, 0.05, 0.05 + seconds, 0.07
    found["samples"] |= {"frames": frames, "stacks": [[0], [0, 1]], "which": [0, 0, 1, 0, 1, 0]}
    found["samples"]["times"] = [round(end * 1e9) for end in ends]
    found["boundaries"] = [30_000_000, 50_000_000, 70_000_000]
    found["marks"] = [{"time": 0.0, "delay": 0.0}, {"time": 2e7, "delay": 0.02 * delay}]
    rows = [*rank_events(0.0), event(f"enumerate(DataLoader)#_{processes}DataLoaderIter.__next__", 50.0, 20.0)]
    return Analysis([parse({TRACE_KEY: found}, rows)], {}, str).facts.ranks[0]


def test_steps_that_were_only_sampled_give_the_wait_for_worker_processes() -> None:
    assert waiting_for_batches(0.012).loader == pytest.approx(12 / 20 * 0.01, rel=0.01)
    # Loaders without worker processes do not wait.
    assert waiting_for_batches(0.012, "SingleProcess").loader == pytest.approx(1e-5)
    assert waiting_for_batches(0.0).loader == pytest.approx(1e-5)
    (finding,) = slow_loader([waiting_for_batches(0.012)])
    assert "60 % of each step" in finding.sentence
    assert "worker processes do not keep up" in finding.sentence
    assert slow_loader([waiting_for_batches(0.012, delay=0.5)]) == [finding]
    assert slow_loader([waiting_for_batches(0.012, delay=0.8)]) == []  # These ranks may have waited for a CPU.


def test_steps_that_were_only_sampled_give_the_duration_of_printing() -> None:
    few = printing([0, 20], [0, 0])
    assert (few.logging, few.logging_line) == (0.0, None)
    boundaries = [int(at * 1e6) for at in (30, 40, 50)]
    more = printing([0, 20, 35, 40, 45, 50], [0, 0, 1, 0, 1, 0], boundaries=boundaries)
    assert more.steps == 2
    assert more.logging == pytest.approx(10 / 40 * 0.01)
    assert more.logging_line is not None
    assert more.logging_line.source == "print(x)"


def test_one_long_step_does_not_hide_a_part_of_the_others() -> None:
    boundaries = [int(at * 1e6) for at in (30, 40, 50, 550)]
    found = printing([0, 10, 13, 20, 35, 40, 45, 50, 300, 550], [0, 0, 1, 0, 1, 0, 1, 0, 0, 0], boundaries=boundaries)
    assert found.logging == pytest.approx(13 / 40 * 0.01)


def test_a_forward_pass_of_ddp_is_a_phase_and_not_an_operation() -> None:
    rows = [*rank_events(0.0), event("DistributedDataParallel.forward", 50, 3500)]
    merged = Analysis([parse({TRACE_KEY: facts(0, 0.0)}, rows)], {}, str)
    assert {row.name for row in merged.ops} == {"gloo:all_reduce", "aten::linear", "aten::addmm"}
    categories, names = merged.timeline.categories, merged.timeline.names
    main = merged.timeline.tracks[0]
    found = {names[n]: categories[c] for n, c in zip(main.names, main.category, strict=True)}
    assert found["DistributedDataParallel.forward"] == "forward"


def test_collectives_are_joined_and_the_last_rank_is_named() -> None:
    merged = Analysis([trace(1, 3000.0), trace(0)], {}, lambda frame: f"Cell In[1], line {frame.lineno}")
    assert [joined.label() for joined in merged.joined] == ["all_reduce #1 (4.00 MB)", "all_reduce #2 (4.00 MB)"]
    assert [joined.last for joined in merged.joined] == [1, 1]
    assert merged.joined[0].waits() == pytest.approx({0: 0.003})
    timeline = merged.timeline
    assert [track.name for track in timeline.tracks] == [
        f"rank {rank} · {name}" for rank in (0, 1) for name in ("main thread", "lines", "collectives")
    ]
    assert [(timeline.tracks[w.from_track].rank, timeline.tracks[w.to_track].rank) for w in timeline.waits] == [
        (0, 1)
    ] * 2
    assert [(step.rank, step.number) for step in timeline.steps] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert timeline.span == pytest.approx(20_000)
    (finding,) = merged.findings
    assert (finding.rule, finding.ranks) == ("slowest_rank", (1,))
    assert finding.sentence == (
        "rank 0 waits 3 ms per step for rank 1 in all_reduce #1 (4.00 MB), which is at Cell In[1], line 9: "
        "time.sleep(1)"
    )


def test_a_rank_that_is_much_later_in_only_one_step_is_not_reported() -> None:
    """The waits are 2.1 ms per step on average, a fifth of a step, but 0.2 ms in one of the two steps."""
    merged = Analysis([trace(1, 4000.0, later=200.0), trace(0)], {}, str)
    assert [joined.last for joined in merged.joined] == [1, 1]
    assert "slowest_rank" not in {finding.rule for finding in merged.findings}


def test_clocks_of_hosts_are_aligned() -> None:
    merged = Analysis([trace(0), trace(1)], {0: 5.0, 1: 5.002}, str)
    assert merged.timeline.origin == pytest.approx(5.0)
    starts = {track.rank: track.start[0] for track in merged.timeline.tracks if track.name.endswith("collectives")}
    assert starts == pytest.approx({0: 4000.0, 1: 6000.0})


def test_collectives_of_different_ranks_are_not_joined() -> None:
    other = parse({TRACE_KEY: facts(1, 0.0)}, [row for row in rank_events(0.0) if "gloo" not in row["name"]])
    assert Analysis([trace(0), other], {}, str).joined == []
    several = parse({"distributedInfo": {"rank": 1, "pg_count": 2}}, rank_events(0.0))
    assert Analysis([trace(0), several], {}, str).joined == []  # It is unknown which group the collective belongs to.


def test_collectives_that_start_in_another_order_on_one_rank_are_joined() -> None:
    """In each of five steps, two collectives of different sizes run at the same time, in two threads of each rank."""

    def calls(swapped: int) -> list[TracedCall]:
        sizes = [(2, 1) if step < swapped else (1, 2) for step in range(5)]
        return [
            TracedCall(2 * step + place, "", "all_reduce", nbytes, step + 0.01 * place, step + 0.5)
            for step, pair in enumerate(sizes)
            for place, nbytes in enumerate(pair)
        ]

    joined = join({0: calls(0), 1: calls(2)})
    assert [each.number for each in joined] == list(range(1, 11))
    assert all(len({call.kind for call in each.calls.values()}) == 1 for each in joined)
    assert [each.calls[1].event for each in joined] == [1, 0, 3, 2, 4, 5, 6, 7, 8, 9]


def test_collectives_of_groups_are_joined_by_when_each_rank_entered_them() -> None:
    """Ranks 0 and 1 form a group, ranks 2 and 3 form another with the same name, and all four ranks form a third."""
    every = {"pg_name": "0", "ranks": [0, 1, 2, 3]}
    entered = {rank: [["1", 8, "all_reduce", 10**6, 0.003], ["0", 5, "all_reduce", 10**6, 0.013]] for rank in range(4)}
    entered[3] = entered[3][1:]  # Rank 3 entered its first collective before the recording.
    read = []
    for rank in range(4):
        own = {"pg_name": "1", "ranks": [0, 1] if rank < 2 else [2, 3]}
        world = {"pg_count": 2, "rank": rank, "pg_config": [every, own]}
        head = {TRACE_KEY: {**facts(rank, rank * 100.0), "collectives": entered[rank]}, "distributedInfo": world}
        read.append(parse(head, rank_events(rank * 100.0)))
    joined = Analysis(read, {}, str).joined
    assert [(each.number, sorted(each.calls), each.last) for each in joined] == [(8, [0, 1], 1), (5, [0, 1, 2, 3], 3)]


def test_a_device_has_streams_and_numbered_collectives() -> None:
    rows = rank_events(0.0)[:2]
    comms = {"Collective name": "allreduce", "In msg nelems": 16_000_000, "dtype": "Float", "Process Group Name": "0"}
    rows += [
        {**event("gemm", 500, 5, 7), "cat": "kernel", "pid": 0},
        {**event("ProfilerStep#0", 500, 5, 7), "cat": "gpu_user_annotation", "pid": 0},
        {**event("cudaStreamSynchronize", 600, 8000), "cat": "cuda_runtime"},
        event("aten::item", 590, 8020),
        event("record_param_comms", 9000, 10, MAIN, **comms),
    ]
    rows.append(event(AFTER_STEPS, 10_000, 300))
    read = [parse({TRACE_KEY: {"rank": rank}}, rows, rank) for rank in (0, 1)]
    assert read[0].steps() == [(0.0, 10_000.0)]
    merged = Analysis(read, {}, str)
    assert merged.joined[0].label() == "all_reduce #1 (64.0 MB)"
    assert "rank 0 · gpu stream 7" in [track.name for track in merged.timeline.tracks]
    assert [finding.rule for finding in merged.findings] == ["reads_of_values"]
    assert "waiting for the device" in merged.findings[0].sentence


def test_files_are_read_and_written(tmp_path: Path) -> None:
    for rank in (0, 1):
        head = {TRACE_KEY: base64.b64encode(gzip.compress(json.dumps(facts(rank, 3000.0 * rank)).encode())).decode()}
        head |= {"distributedInfo": {"rank": rank, "pg_count": 1}}  # type: ignore[dict-item]
        body = json.dumps({**head, "traceEvents": rank_events(3000.0 * rank)})
        (tmp_path / f"trace{rank}.json").write_text(body)
    profile = Profile.load(tmp_path)
    assert (profile.ranks, profile.steps, profile.seconds) == ([0, 1], 2, pytest.approx(0.01))
    files = profile.save(tmp_path / "saved")
    assert [file.name for file in files] == ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz", "merged.json.gz"]
    again = Profile.load(tmp_path / "saved")
    assert again.findings == profile.findings
    assert len(again.findings) == 1
    merged = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    kept, arrows = perfetto.imported(merged)
    assert len(kept) == sum(row["ph"] == "X" for row in merged) == sum(map(len, profile.timeline.tracks)) + 4
    assert {(row.process, row.thread) for row in kept} == {
        (f"rank {rank}", thread) for rank in (0, 1) for thread in ("steps", "main thread", "lines", "collectives")
    }
    assert [(begin.process, end.process, end.start - begin.start) for begin, end in arrows] == [
        ("rank 0", "rank 1", 3_000_000)
    ] * 2
    assert {end.name for pair in arrows for end in pair} == {"gloo:all_reduce"}
    html = profile._repr_html_()
    assert profile.findings[0].sentence in html
    assert "svg" in html
    assert "aten::addmm" in repr(profile)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").write_text(json.dumps(rank_events(0.0)))  # These events do not name any rank.
    assert Profile.load(*(tmp_path / f"{name}.json" for name in "abc")).ranks == [0, 1, 2]
    (tmp_path / "text.json").write_text("[]x")
    with pytest.raises(ValueError, match="is not a trace of torch's profiler"):
        read_trace(tmp_path / "text.json")
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no trace in"):
        Profile.load(empty)
    with pytest.raises(FileNotFoundError, match=r"got no path; pass one: Profile\.load"):
        Profile.load()


@pytest.mark.parametrize("seed", range(6))
def test_a_trace_with_odd_values_is_refused_or_read(tmp_path: Path, seed: int) -> None:
    rng, read = random.Random(seed), 0
    held = [{"losses": {"id": 1, "count": 2 + 2 * each, "bytes": 100}} for each in (0, 1)]
    threads = [{"name": "t", "cpu": 0.1, "lock": 0.1, "frame": ["train.py", 5, "f", "x"]}]
    marks = [{"time": at, "delay": 0.0} for at in (0, 20_000_000)]
    added = facts(0, 0.0) | {"held": held, "marks": marks, "boundaries": [20_000_000, 30_000_000, 40_000_000]}
    added["samples"]["threads"] = threads
    added["collectives"] = [["0", 1, "all_reduce", 1_000_000, 0.004]]
    memory = {"ph": "i", "name": "[memory]", "ts": 500.0, "args": {"Bytes": 100, "Addr": 7}}
    world = {"rank": 0, "world_size": 2, "pg_count": 1, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    content = {
        TRACE_KEY: added,
        "distributedInfo": world, "baseTimeNanoseconds": 0, "traceEvents": [*rank_events(0.0), memory],
    }  # fmt: skip
    for number in range(60):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(with_odd_values(rng, content) if number else content))
        try:
            profile = Profile.load(file)
        except ValueError as error:
            assert str(file) in str(error)  # noqa: PT017 - many are read
        else:
            read += 1
            _ = repr(profile).encode(), profile.html.encode(), profile.findings, profile.timeline, profile.peaks()
    assert 10 < read < 60


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 1000, b"[" * 60_000, b"[1]", b'{"traceEvents": 3}', b'{"traceEvents": [{"ph": "X"}]}',
        gzip.compress(b"[]")[:15], gzip.compress(b"[]")[:-4] + b"????", b"\x1f\x8b" + b"x" * 100,
        gzip.compress(b"[" * 400_000_000, 1),
        json.dumps(
            {TRACE_KEY: base64.b64encode(gzip.compress(b" " * 100_000_000)).decode(), "traceEvents": []}
        ).encode(),
    ],
    ids=[
        "empty", "zeros", "deep", "number", "no list", "no name", "torn", "checksum", "no gzip", "400 MB", "facts",
    ],
)  # fmt: skip
def test_a_damaged_trace_raises_one_error_with_its_name(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(data)
    begin = time.process_time()
    with pytest.raises(ValueError, match=f"{file} is not a trace of torch's profiler"):
        Profile.load(file)
    assert time.process_time() - begin < 10


def test_a_pipe_is_not_a_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(ValueError, match="not a regular file"):
        Profile.load(tmp_path)


def test_overlapping_events_get_separate_threads_unless_their_ends_are_inexact() -> None:
    timeline = Timeline(names=["a"])
    for name, spans in {
        "two at a time": [(0.0, 9.0), (1.0, 3.0), (2.0, 3.0), (6.0, 2.0), (6.0, 5.0)],
        # In single precision, the first span would be 7 ns longer.
        "one after the other": [(0.0, 1234567.818), (1234567.818, 5.0), (1234570.0, 2.8180001)],
    }.items():
        track = Track(0, f"rank 0 · {name}")
        for start, duration in spans:
            track.start.append(start)
            track.duration.append(duration)
            track.names.append(0)
            track.category.append(0)
        timeline.tracks.append(track)
    kept, _ = perfetto.imported(list(ChromeEvents(timeline).rows()))
    found: dict[str, list[tuple[int, int]]] = {}
    for row in kept:
        found.setdefault(row.thread, []).append((row.start, row.end))
    assert found == {
        "two at a time": [(0, 9000), (1000, 4000), (6000, 8000)],
        "two at a time (2)": [(2000, 5000), (6000, 11000)],
        "one after the other": [(0, 1234567818), (1234567818, 1234572818), (1234570000, 1234572818)],
    }


def test_a_merged_trace_starts_at_0_even_if_a_step_started_before_its_first_event() -> None:
    """Perfetto drops events with negative times. Two clocks that differed by 37 ns once made it drop the first step."""
    timeline = Timeline(names=["a"], steps=[Step(0, -0.037, 10.0, 1)])
    track = Track(0, "rank 0 · main thread")
    for values, value in ((track.start, 0.0), (track.duration, 2.0), (track.names, 0), (track.category, 0)):
        values.append(value)
    timeline.tracks.append(track)
    kept, _ = perfetto.imported(list(ChromeEvents(timeline).rows()))
    assert [(row.thread, row.start, row.end) for row in kept] == [("steps", 0, 10037), ("main thread", 37, 2037)]


def test_the_peak_of_allocations_gives_the_sizes_that_fit() -> None:
    read = trace(0)
    read.memory = [(100.0, 1000, 1), (200.0, 5000, 2), (300.0, -1000, 1), (400.0, 2000, 3), (500.0, -5000, 2)]
    peak = peak_of(read, Analysis([read], {}, str).samples[0])
    assert peak.nbytes == 7000
    assert sum(nbytes for _, nbytes in peak.lines) == 7000
    parts = {"parameters": 10, "gradients": 10, "optimizer state": 20, "activations at the peak": 40}
    (more,) = what_fits(parts, 200, 2)
    assert more.endswith("batches 3.5 times as large would fit")
    (sharded,) = what_fits(parts, 80, 4)
    assert sharded.endswith("with FSDP across 4 ranks, batches 1.6 times as large would fit")
    assert what_fits({"parameters": 10}, 200, 2) == []
