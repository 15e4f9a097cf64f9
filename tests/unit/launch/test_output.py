"""The raw bytes that ranks print become complete lines with labels."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import given, strategies as st

from notebook_accelerate.launch.output.line_assembler import MAX_LINE_BYTES, LineAssembler
from notebook_accelerate.launch.output.publisher import (
    FLUSH_SECONDS,
    Publisher,
    TextPublisher,
    line_label,
    publisher_for,
)
from notebook_accelerate.launch.output.rank_output import RankOutput
from notebook_accelerate.telemetry import DisplayEvent
from notebook_accelerate.telemetry.events import display_mark


def _all(chunks: list[bytes]) -> list[str]:
    assembler = LineAssembler()
    texts = [*map(assembler.feed, chunks), assembler.finish()]
    return [line for text in texts if text is not None for line in text.split("\n")]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
        ([b"no end"], ["no end"]),
        ([b"\n\n"], ["", ""]),
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb"], ["a", "b"]),
        ([b"10%\r50%\r100%\n"], ["100%"]),
        ([b"10%\r", b"50%\r", b"100%\n"], ["100%"]),
        ([b"10%\r"], ["10%"]),
        (["ä☃".encode()[:1], "ä☃".encode()[1:4], "ä☃".encode()[4:] + b"\n"], ["ä☃"]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"a\x00b\n"], ["a\x00b"]),
        ([b"a\x0bb\x0cc\x85\n"], ["a\x0bb\x0cc\ufffd"]),
        (["a\u2028b\n".encode()], ["a\u2028b"]),
        ([], []),
    ],
)
def test_bytes_become_complete_lines(chunks: list[bytes], lines: list[str]) -> None:
    assert _all(chunks) == lines


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=8), st.data())
def test_any_cut_gives_the_same_lines(lines: list[str], data: st.DataObject) -> None:
    raw = "".join(line + "\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert _all(chunks) == lines


def test_a_line_without_an_end_is_bounded() -> None:
    assembler, seen, longest = LineAssembler(), 0, 0
    for _ in range(100):
        text = assembler.feed(b"x" * 100_000)
        seen += len(text or "")
        longest = max(longest, len(assembler._rest))
    assert longest <= MAX_LINE_BYTES + 100_000
    assert seen + len(assembler.finish() or "") == 10_000_000


def test_a_giant_line_is_not_cut_inside_a_character() -> None:
    raw = "☃".encode() * (MAX_LINE_BYTES // 3 + 50_000)
    chunks = [raw[i : i + 65_537] for i in range(0, len(raw), 65_537)]
    assert "\ufffd" not in "".join(_all([*chunks, b"\n"]))


def test_a_giant_line_costs_linear_time() -> None:
    begin = time.thread_time()  # Measure CPU time, because test machines are busy.
    _all([b"x" * 100] * 20_000)
    assert time.thread_time() - begin < 20.0


def test_a_progress_bar_without_line_breaks_stays_small() -> None:
    assembler = LineAssembler()
    for step in range(100_000):
        assert assembler.feed(b"\rstep %d of 100000 [=====    ]" % step) is None
        assert len(assembler._rest) < 1 << 16
    assert assembler.redrawn == "step 99999 of 100000 [=====    ]"


def test_a_line_that_is_not_redrawn_is_not_a_progress_bar() -> None:
    assembler = LineAssembler()
    assembler.feed(b"half a line")
    assert assembler.redrawn == ""
    assembler.feed(b"\r 5%")
    assert assembler.redrawn == " 5%"
    assembler.feed(b"\rdone\n")
    assert assembler.redrawn == ""


class _Writes(list[bytes]):
    """A file that records each write separately."""

    def write(self, text: str) -> None:
        self.append(text.encode())

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


def _bars_of_tqdm(*, leave: bool) -> _Writes:
    class tqdm(pytest.importorskip("tqdm").tqdm):  # type: ignore[misc]  # noqa: N801 - as its users write it
        monitor_interval = 0  # This keeps tqdm from starting its monitor thread.

    writes = _Writes()
    for epoch in tqdm(range(2), "epochs", file=writes, ascii=True, mininterval=0):
        for step in tqdm(range(20), f"epoch {epoch}", leave=leave, file=writes, ascii=True, mininterval=0):
            if step == 10:
                tqdm.write(f"note {epoch}", file=writes)
    writes.write("the end\n")
    return writes


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("size", [0, 1, 7, 50, 1000])
def test_nested_bars_are_redrawn_in_place(leave: bool, size: int) -> None:
    """The bars arrive as tqdm writes them, cut into pieces of ``size`` bytes or, if that is 0, one piece per write."""
    writes = _bars_of_tqdm(leave=leave)
    raw = b"".join(writes)
    chunks = [raw[i : i + size] for i in range(0, len(raw), size)] if size else list(writes)
    assembler, done, most = LineAssembler(), [], 0
    for chunk in chunks:
        done += (assembler.feed(chunk) or "").splitlines()
        most = max(most, len(assembler.redrawn.splitlines()))
    done += (assembler.finish() or "").splitlines()
    bars = [line.partition(":")[0] for line in done if "%|" in line]
    wanted = ["epoch 0", "epoch 1", "epochs"] if leave else ["epochs"]
    assert [line for line in done if "%|" not in line] == ["note 0", "note 1", "the end"]
    assert [bar for bar in bars if bar != "epochs"] == wanted[:-1]
    assert 1 <= bars.count("epochs") <= 2, "the only other line may be its first state, before the inner bar was drawn"
    assert "epochs: 100%|" in done[-2]
    assert most == 2 if size == 0 else most <= 6, "a piece may end between two writes"


def test_consecutive_bars_become_lines() -> None:
    chunks = [b"\r 0%|a", b"\r100%|a", b"\n", b"\r 0%|b", b"\r 50%|b", b"\r100%|b\n", b"over\n"]
    assembler = LineAssembler()
    texts = [assembler.feed(chunk) for chunk in chunks]
    assert [text for text in texts if text] == ["100%|a", "100%|b", "over"]
    assert assembler.redrawn == ""


def test_an_unlimited_number_of_rows_is_bounded() -> None:
    assembler, lines = LineAssembler(), 0
    for row in range(200):
        lines += len((assembler.feed(b"\n" * row + b"\r%d%%|" % row + b"\x1b[A" * row) or "").splitlines())
    rows = assembler.redrawn.splitlines()
    assert len(rows) <= 20
    assert lines > 100


@pytest.mark.parametrize(
    ("template", "label"),
    [
        (None, "[rank 3] "),
        ("", ""),
        ("${role_name}-${rank}/${local_rank}: ", "default-3/1: "),
        ("$unknown ${rank} ", "$unknown 3 "),
        ("100% ", "100% "),
        ("$ ", "$ "),
    ],
)
def test_labels_are_formatted_from_a_template(template: str | None, label: str) -> None:
    assert line_label(template, 3, 1) == label


class _Memory(Publisher):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, str]] = []
        self.bars: list[str] = []

    def _write(self, stream: str, text: str) -> None:
        self.sent.append((stream, text))

    def _draw_bars(self, text: str) -> None:
        self.bars.append(text)

    def display(self, event: DisplayEvent, label: str) -> None:
        self.flush(force=True)
        self.sent.append(("display", str(event.data["text/plain"])))


def test_every_line_has_its_label_and_streams_keep_their_order() -> None:
    publisher = _Memory()
    publisher.lines("stdout", "a\nb", "[0] ")
    publisher.lines("stdout", "c", "[1] ")
    publisher.lines("stderr", "oops", "[0] ")
    publisher.lines("stdout", "d", "[0] ")
    publisher.flush(force=True)
    assert publisher.sent == [("stdout", "[0] a\n[0] b\n[1] c\n"), ("stderr", "[0] oops\n"), ("stdout", "[0] d\n")]
    assert publisher.seconds_until_due() is None


def test_flushes_are_batched() -> None:
    publisher = _Memory()
    begin = time.monotonic()
    for number in range(1000):
        publisher.lines("stdout", str(number), "")
        publisher.flush()
    publisher.flush(force=True)
    most = 2 + (time.monotonic() - begin) / FLUSH_SECONDS
    assert "".join(text for _, text in publisher.sent) == "".join(f"{n}\n" for n in range(1000))
    assert len(publisher.sent) <= most
    publisher.lines("stdout", "x", "")
    wait = publisher.seconds_until_due()
    assert wait is not None
    assert 0 <= wait < 0.2


def test_bars_are_drawn_in_order_of_rank_and_removed() -> None:
    publisher = _Memory()
    kept: list[tuple[int, str, str]] = []
    outputs = [RankOutput(rank, f"[{rank}] ", lambda *row: kept.append(row), publisher) for rank in (1, 0)]
    for output in outputs:
        output.feed("stderr", b"\r10%")
    publisher.flush(force=True)
    assert publisher.bars == ["[0] 10%\n[1] 10%"]
    outputs[0].feed("stderr", b"\r100%\n")
    outputs[1].finish("stderr")
    publisher.flush(force=True)
    assert publisher.bars[-1] == ""
    assert kept == [(1, "stderr", "100%"), (0, "stderr", "10%")]


def _display(number: int) -> DisplayEvent:
    return DisplayEvent({"text/plain": f"display {number}"}, mark=number)


@given(st.data())
def test_lines_and_displays_keep_their_order(data: st.DataObject) -> None:
    """Each pipe's data may be split anywhere, and pieces and displays may arrive in any order."""
    marks = [display_mark(number) for number in (1, 2, 3)]
    raw = {
        "stdout": b"".join(b"line %d\n%s" % pair for pair in enumerate(marks)) + b"\x1b[1mlast\x1b[0m\n",
        "stderr": marks[0] + b"error\n" + marks[1] + marks[2],
    }
    pieces: dict[str, list[bytes]] = {}
    for stream, text in raw.items():
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces[stream] = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    names = [*["stdout"] * len(pieces["stdout"]), *["stderr"] * len(pieces["stderr"]), *["display"] * 3]
    publisher = _Memory()
    output = RankOutput(0, "", lambda *_: None, publisher)
    displays = [_display(number) for number in (1, 2, 3)]
    for name in data.draw(st.permutations(names)):
        if name == "display":
            output.display(displays.pop(0))
        else:
            output.feed(name, pieces[name].pop(0))
    publisher.flush(force=True)  # Nothing may be held back until the end.
    shown = [text for _, text in publisher.sent if text != "error\n"]
    assert shown == ["line 0\n", "display 1", "line 1\n", "display 2", "line 2\n", "display 3", "\x1b[1mlast\x1b[0m\n"]
    everything = [text for _, text in publisher.sent]
    assert everything.index("display 1") < everything.index("error\n") < everything.index("display 2")


def test_a_lost_display_or_mark_does_not_hold_up_output_forever() -> None:
    publisher = _Memory()
    output = RankOutput(0, "", lambda *_: None, publisher)

    def feed(text: bytes, number: int) -> None:
        output.feed("stdout", text + display_mark(number))
        output.feed("stderr", display_mark(number))

    feed(b"a\n", 1)
    output.display(DisplayEvent({}, mark=1))  # This display could not be sent in full.
    output.display(_display(2))  # An interrupt arrived before the marks of this display.
    feed(b"b\n", 3)
    output.display(_display(3))
    output.feed("stdout", b"c\n" + display_mark(4) + b"d\n")  # An interrupt arrived between the marks of this display.
    output.display(_display(4))
    feed(b"e\n", 5)
    output.display(_display(5))
    feed(b"f\n", 6)  # The display for this mark does not arrive.
    output.feed("stdout", b"g\n")
    output.expect_no_displays()
    feed(b"h\n", 7)
    output.finish()
    publisher.flush(force=True)
    shown = "".join(text if text.endswith("\n") else f"<{text[-1]}>" for _, text in publisher.sent).replace("\n", "")
    assert shown == "ab<2><3>c<4>de<5>fgh"


def test_the_text_publisher_writes_to_the_streams_of_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    publisher = publisher_for(1)
    assert isinstance(publisher, TextPublisher)
    publisher.lines("stdout", "out", "> ")
    publisher.lines("stderr", "err", "> ")
    publisher.display(DisplayEvent({"text/html": "<b>", "text/plain": "shown"}), "> ")
    publisher.flush(force=True)
    captured = capsys.readouterr()
    assert captured.out == "> out\n> shown\n"
    assert captured.err == "> err\n"


def test_a_closed_stream_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = (tmp_path_factory.mktemp("out") / "file").open("w")
    monkeypatch.setattr(sys, "stdout", file)
    publisher = TextPublisher()
    file.close()
    publisher.lines("stdout", "late", "")
    publisher.flush(force=True)
