"""The example notebooks are committed with clean outputs that code hosts and the site can show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import pages, saved_outputs

EXAMPLES = sorted((pages.ROOT / "examples").rglob("*.ipynb"))
EACH = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
# The notebooks in gpus/ need GPUs, so they have no outputs.
EACH_EXECUTED = pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.parent.name != "gpus"], ids=lambda path: path.stem
)
KEPT_ELEMENTS = {
    *("div", "span", "p", "br", "strong", "b", "em", "code", "pre", "img", "a", "ul", "ol", "li", "details", "summary"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "h1", "h2", "h3", "h4", "section"),
}
ON_PURPOSE = "raises-exception"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@EACH
def test_outputs_are_clean_and_small(path: Path) -> None:
    notebook = saved_outputs.read(path)
    assert notebook == saved_outputs.clean(notebook), "clean it with make examples-record"
    assert saved_outputs.paths_in(notebook) == []
    assert path.stat().st_size < saved_outputs.LARGEST


@EACH_EXECUTED
def test_every_cell_was_executed_in_order(path: Path) -> None:
    cells = code_cells(saved_outputs.read(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        failed = any(output["output_type"] == "error" for output in cell["outputs"])
        assert failed == (ON_PURPOSE in cell["metadata"].get("tags", [])), cell["source"]


@EACH_EXECUTED
def test_a_code_host_shows_its_reports(path: Path) -> None:
    """Viewers on code hosts keep these elements, and remove scripts, forms and style sheets."""
    outputs = [output for cell in code_cells(saved_outputs.read(path)) for output in cell["outputs"]]
    shown = [output["data"] for output in outputs if "text/html" in output.get("data", {})]
    assert shown, "no panel left its report"
    for data in shown:
        assert "text/plain" in data
        page = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
        assert set(re.findall(r"<([a-z]\w*)", page)) <= KEPT_ELEMENTS
        assert not re.search(r"\bon\w+=|javascript:", page)


@EACH
def test_links_lead_to_files(path: Path) -> None:
    text = "\n".join(cell["source"] for cell in saved_outputs.read(path)["cells"] if cell["cell_type"] == "markdown")
    for target in pages.links(text):
        assert re.match(r"\w+:", target) or (path.parent / target.partition("#")[0]).exists(), target


def test_the_site_lists_every_notebook() -> None:
    listed = re.findall(r"^tutorials/([\w/]+)$", (pages.DOCS / "tutorials.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(pages.ROOT / "examples").with_suffix("")) for path in EXAMPLES)


def _cell(*outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "cells": [{"cell_type": "code", "id": "a", "metadata": {"execution": {}}, "source": "x", "outputs": outputs}],
        "metadata": {"widgets": {"state": 1}},
    }


def test_cleaning_removes_the_parts_that_differ_in_each_run() -> None:
    report = (
        "run 1 · done in 48.4 s\n\nrank  pid    peak memory  last step\n"
        "────  ─────  ───────────  ─────────\n0     10479  217 MB       230\n"
    )
    table = (
        "<table><tr><th>rank</th><th>pid</th><th>loss</th></tr><tr><th>0</th><td>10479</td><td>0.25</td></tr></table>"
    )
    widget = {saved_outputs.WIDGET: {"model_id": "1"}, "text/html": table, "text/plain": report}
    cleaned = saved_outputs.clean(
        _cell(
            {"output_type": "stream", "name": "stdout", "text": f"a {pages.ROOT}/.v/lib/python3.11/site-packages/b\n"},
            {"output_type": "display_data", "data": {"text/plain": ""}, "metadata": {}},
            {"output_type": "stream", "name": "stdout", "text": f"{pages.ROOT}/notebook_accelerate/x.py in 12 ms\n"},
            {"output_type": "stream", "name": "stdout", "text": "100%|█| 64/64 [00:01<00:00, 43.6 rows/s]\n"},
            {"output_type": "display_data", "data": widget, "metadata": {"isolated": True}},
        )
    )
    stream, display = cleaned["cells"][0]["outputs"]
    assert stream["text"] == "a site-packages/b\nnotebook_accelerate/x.py in … ms\n100%|█| 64/64 […]\n"
    assert set(display["data"]) == {"text/html", "text/plain"}
    assert "done in … s" in display["data"]["text/plain"]
    assert display["data"]["text/plain"].splitlines()[-1] == "0     …      …            230"
    assert "<td>…</td><td>0.25</td>" in display["data"]["text/html"]
    assert cleaned["cells"][0]["metadata"] == {}
    assert "widgets" not in cleaned["metadata"]
    assert saved_outputs.clean(cleaned) == cleaned


def test_other_numbers_count_as_the_same_output_and_other_words_do_not() -> None:
    before, same, other = (
        saved_outputs.clean(_cell({"output_type": "stream", "name": "stdout", "text": text}))
        for text in ("loss 0.25\n", "loss 1.5e-3\n", "accuracy 0.25\n")
    )
    assert saved_outputs.differences(before, same) == {}
    assert {"-loss #", "+accuracy #"} <= set(saved_outputs.differences(before, other)["a"])
    kept = saved_outputs.merged(before, same, set())
    assert kept["cells"][0]["outputs"][0]["text"] == "loss 0.25\n"


def test_step_times_stragglers_and_waits_are_optional() -> None:
    head = "rank  pid\n────  ───\n0     7\n\n"
    times = "rank  ms per step  other\n────  ───────────  ─────\n0     7            1 %\n1     7            1 %\n\n"
    slow = "Rank 1 is a straggler: 8.1 ms of its own work per step, 5.2 ms on the other ranks."
    wait = "waiting for the process that ranks are forked from to import torch, once per kernel"
    html = f"<ul><li>{slow}</li><li>{wait}</li></ul><details><summary>Step time</summary><table></table></details>"
    with_times, without = (
        saved_outputs.clean(
            _cell({"output_type": "display_data", "data": {"text/html": page, "text/plain": text}, "metadata": {}})
        )
        for page, text in (
            (f"<p>a</p>{html}<p>b</p>", f"{slow}\n  {wait}\n\n{head}{times}end"),
            ("<p>a</p><p>b</p>", f"{head}end"),
        )
    )
    assert saved_outputs.differences(with_times, without) == {}
    assert saved_outputs.differences(with_times, saved_outputs.clean(_cell())) != {}
