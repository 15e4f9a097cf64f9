"""Reports remain readable in front ends that do not trust the notebook and sanitize its HTML."""

from __future__ import annotations

import re
from typing import Any

import bleach
import nbformat
import pytest
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter

from notebook_accelerate import Run
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.document import table_of
from notebook_accelerate.telemetry import LogEvent, MetricEvent, RankFailure
from tests.support.runs import START, end, feed, make_run

# The HTML that github.com's sanitizer keeps (jch/html-pipeline, SanitizationFilter), and nbviewer's fallbacks: no
# styles, scripts or classes, and only images from the web.
_TAGS = set(
    "h1 h2 h3 h4 h5 h6 br b i strong em a pre code img tt div ins del sup sub p picture ol ul table thead tbody tfoot "  # noqa: SIM905
    "blockquote dl dt dd kbd q samp var hr ruby rt rp li tr td th s strike summary details caption figure figcaption "
    "abbr bdo cite dfn mark small span time wbr".split()
)
_ATTRIBUTES = {"*": ["align", "alt", "colspan", "height", "open", "rowspan", "scope", "title", "width"], "img": ["src"]}
WORDS = (
    "failed",
    "train",
    "2 processes on cpu",
    "rank 1 failed: KeyError: 'lost <b>'",
    "Curve of loss: 100 points of 2 ranks; first 1, last 0.02",
    "number of processes",
    "torch",
    "last step",
)


@pytest.fixture
def run() -> Run:
    """Return a run that has curves, output and a failure."""
    run = make_run(2)
    for rank in (0, 1):
        feed(run, *(MetricEvent({"loss": 1 / (step + 1)}, step) for step in range(50)), rank=rank)
        feed(run, LogEvent("stdout", f"hello from {rank}"), rank=rank)
    end(run, "failed", (RankFailure(1, "exception", START, "KeyError: 'lost <b>'"),))
    return run


def _read(html: str) -> str:
    """Return the text in sanitized HTML and in its images."""
    soup = BeautifulSoup(html, "html.parser")
    for image in soup.find_all("img"):
        image.replace_with(str(image.get("alt", "")))
    return re.sub(r"\s+", " ", soup.get_text(" "))


def _cleaned(html: str) -> str:
    without = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    cleaned: str = bleach.clean(without, tags=_TAGS, attributes=_ATTRIBUTES, protocols=["https"], strip=True)
    return cleaned


def test_a_report_sanitized_like_on_github_is_complete(run: Run) -> None:
    cleaned = _cleaned(run.report().html)
    assert "data:" not in cleaned
    assert "style=" not in cleaned
    read = _read(cleaned)
    assert [words for words in WORDS if words not in read] == []
    tables = BeautifulSoup(cleaned, "html.parser").find_all("table")
    heads = [[cell.get_text() for cell in table.find_all("th")] for table in tables]
    assert any("rank" in head and "exit" in head for head in heads), heads
    assert "&lt;b&gt;" in cleaned, "text from the ranks stays text"


def test_the_strictest_sanitizer_keeps_tables_and_text(run: Run) -> None:
    """nbconvert's sanitizer (--sanitize-html) shows most tags as text, and keeps the plain-text form."""
    report = run.report()
    shown: dict[str, Any] = {"text/html": report.html, "text/plain": report.text}
    output = nbformat.v4.new_output("execute_result", data=shown, execution_count=1)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("run.report()", outputs=[output])])
    page, _ = HTMLExporter(sanitize_html=True).from_notebook_node(book)
    area = BeautifulSoup(page, "html.parser").select_one(".jp-OutputArea-output")
    assert area is not None
    assert area.find("script") is None
    read = re.sub(r"\s+", " ", area.get_text(" "))
    assert [words for words in WORDS if words not in read] == []
    assert len(area.find_all("table")) >= 2


def test_the_cells_of_a_large_table_stay_in_their_rows_and_columns_without_its_style_sheet() -> None:
    rows = [[f"r{number}", str(number), f"a <b> & {number}\0"] for number in range(rendering.MANY_ROWS + 1)]
    html = rendering.html(table_of("many", [["name", "number", "text"], *rows], caption="Many"))
    style, _, table = html.partition("</style>")
    assert style == (
        "<style>table.na-columns-lrl tr>:is(:nth-child(1),:nth-child(3)){text-align:left}"
        "table.na-columns-lrl tr>:is(:nth-child(2)){text-align:right}"
    )
    assert "<td>1<td>" in table, "end tags are left out"
    cleaned = BeautifulSoup(_cleaned(html), "html.parser")
    shown = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in cleaned.find_all("tr")]
    assert shown == [["name", "number", "text"], *([*cells, text.rstrip("\0")] for *cells, text in rows)]
    assert rendering.html(table_of("few", rows[:10])).count("text-align:right") == 10


def test_the_plain_form_is_complete(run: Run) -> None:
    """Front ends that show no HTML show the plain-text form."""
    text = run.report().text
    for words in ("failed", "train", "KeyError: 'lost <b>'", "number of processes", "loss", "█", "last step"):
        assert words in text
    assert "<div" not in text
