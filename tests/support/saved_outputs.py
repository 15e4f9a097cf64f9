"""Outputs of the example notebooks in their committed form: without paths, widgets and measured times.

    python -m tests.support.saved_outputs compare examples/*.ipynb   # with the copies that make examples has executed
    python -m tests.support.saved_outputs record examples/*.ipynb    # update the cells whose output has changed
    python -m tests.support.saved_outputs record-all ...             # update all cells, for new numbers

Measurements of a run are replaced with "…": times, process ids, memory. Other numbers remain, but are not compared,
because they differ between machines and versions of torch. A cell whose output is otherwise the same keeps its
committed output, so that recording again changes nothing.
"""

from __future__ import annotations

import difflib
import html
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / ".build" / "examples"
LARGEST = 300_000
"""The maximum size of a committed notebook in bytes. Code hosts may fail to show larger ones."""
WIDGET = "application/vnd.jupyter.widget-view+json"
MEASURED = "…"
MEASURED_COLUMNS = {
    "pid", "peak memory", "ms per step", "waiting for data", "forward and backward", "collectives", "optimizer",
    "other", "started", "seconds", "time", "elapsed", "duration", "last seen", "cpu", "memory",
}  # fmt: skip
"""The columns of reports whose cells are replaced, by their headings in lower case."""
MEASURED_ROWS = {"started", "ended", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
VARIES = "output-varies"
"""The tag of a cell whose output depends on timing, for example after a failure. Only its output types are compared."""
_NUMBER = r"\d+(?:[.,]\d+)*"
_PATTERNS = [
    (re.compile(rf"(?<![\w.-]){_NUMBER} (ms|s|min|h|tokens/s|steps/s|it/s)\b"), rf"{MEASURED} \1"),
    (re.compile(r"\[\d\d:\d\d<[^]]*/s\]"), f"[{MEASURED}]"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?: UTC)?"), MEASURED),
    (re.compile(r"(?<=it held )[\d.,]+ \w+|(?<=the machine has )[\d.,]+ \w+|[\d.,]+ \w+(?= of it free)"), MEASURED),
    (re.compile(r" on Linux-[\w.+-]+"), ""),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+"), MEASURED),
    (re.compile(r"\bpid \d+"), f"pid {MEASURED}"),
    (re.compile(r"\b[0-9a-f]{64}\b"), MEASURED),
    (re.compile(r" at 0x[0-9a-f]+"), ""),
    (re.compile(r"[\w.~-]*(?:/[\w.-]+)+/(site-packages/|lib/python3\.\d+/)"), r"\1"),
    (re.compile(r"(?:/private)?/(?:tmp|var/folders)/[\w./-]+"), f"{MEASURED}/temporary"),
]
_PATH = re.compile(r"(?<![\w:./<])/(?:home|root|Users|work|usr|opt|mnt|tmp|var|private)/[\w.-]+")
_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
_CELL = re.compile(r"(<t([hd])[^>]*>)(.*?)(</t\2>)", re.DOTALL)
_RULE = re.compile(r"^─+(?:  ─+)*$")
_IMAGE = re.compile(r'src="data:image/[^"]*"')
_LOGGED = re.compile(r"^(?:[IWE]\d{4} \d\d:\d\d:\d\d|Failed to load |importing torch\._dynamo ).*\n?", re.MULTILINE)
"""Lines on stderr that appear only on some machines: logs of imported packages, and a note about a slow import."""
_SLOW_IMPORT = re.compile(r"<tr><th[^>]*>remark</th><td[^>]*>importing torch\._dynamo [^<]*</td></tr>")
_SLOW_IMPORT_TEXT = re.compile(r"^remark +importing torch\._dynamo .*$")
_SPEED = re.compile(
    r"<details><summary>Step time</summary>.*?</details>|^rank +ms per step[^\n]*\n(?:[^\n]+\n)+"
    r"|<li>Rank \d+ is a straggler[^<]*</li>|^Rank \d+ is a straggler[^\n]*\n"
    r"|<li>waiting for the process that [^<]*</li>|^ *waiting for the process that [^\n]*\n",
    re.MULTILINE | re.DOTALL,
)
"""Parts that depend on speed, as HTML and text: the table of step times, stragglers, and notes about waiting."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def clean(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an executed notebook in its committed form."""
    book: dict[str, Any] = json.loads(json.dumps(notebook))
    book["metadata"] = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in book["cells"]:
        cell["metadata"] = {name: value for name, value in cell["metadata"].items() if name == "tags"}
        if cell["cell_type"] == "code":
            cell["outputs"] = list(_clean_outputs(cell["outputs"]))
    return book


def _clean_outputs(outputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the outputs that a reader of the saved notebook sees, with successive streams joined."""
    pending: dict[str, Any] | None = None
    for output in outputs:
        cleaned = _clean_output(output)
        if pending and cleaned and cleaned["output_type"] == "stream" and cleaned["name"] == pending["name"]:
            pending["text"] = pending["text"] + cleaned["text"]
            continue
        if cleaned is None:
            continue
        if pending:
            yield pending
        pending = cleaned if cleaned["output_type"] == "stream" else None
        if pending is None:
            yield cleaned
    if pending:
        yield pending


def _clean_output(output: dict[str, Any]) -> dict[str, Any] | None:
    """Return one output without widgets, with measured values replaced, or None if nothing is left."""
    if output["output_type"] == "stream":
        text = clean_text(_LOGGED.sub("", output["text"]))
        return {**output, "text": text} if text else None
    if output["output_type"] == "error":
        traceback = [clean_text(line) for line in output["traceback"]]
        return {**output, "evalue": clean_text(output["evalue"]), "traceback": traceback}
    if WIDGET in output["data"] and "text/html" not in output["data"]:
        return None  # Libraries show their progress bars as widgets without HTML.
    data = {kind: value for kind, value in output["data"].items() if kind != WIDGET}
    for kind, value in data.items():
        if kind.startswith("text/"):
            data[kind] = clean_html(str(value)) if kind == "text/html" else clean_text(str(value))
    if not any(str(value).strip() for value in data.values()):
        return None
    return {**output, "data": data, "metadata": {}}


def clean_text(text: str) -> str:
    """Return text in which measured values and this machine's folders are replaced."""
    return _without_measures(_without_measured_columns(_without_slow_imports(text)))


def _without_measures(text: str) -> str:
    for prefix, name in _prefixes():
        text = text.replace(prefix, name)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _prefixes() -> list[tuple[str, str]]:
    """Return the folders of this machine that outputs may name, longest first, with their replacements."""
    named = {f"{ROOT}/": "", f"{Path.home()}/": "~/"}
    return sorted(named.items(), key=lambda pair: -len(pair[0]))


def _without_slow_imports(text: str) -> str:
    """Remove the note about a slow import from tables, and shorten the line under the heading to the other rows."""
    lines = text.split("\n")
    for number in [n for n, line in enumerate(lines) if _SLOW_IMPORT_TEXT.match(line)][::-1]:
        rule = next(n for n in range(number, -1, -1) if _RULE.match(lines[n]))
        del lines[number]
        end = next(n for n in range(rule, len(lines) + 1) if n == len(lines) or not lines[n].strip())
        first = lines[rule].partition("  ")[0]
        width = max(len(lines[n]) for n in (rule - 1, *range(rule + 1, end))) - len(first) - 2
        lines[rule] = f"{first}  {'─' * width}"
    return "\n".join(lines)


def _without_measured_columns(text: str) -> str:
    """Replace the cells of measured columns in tables whose heading is underlined with ``─``."""
    lines = text.split("\n")
    for number in range(1, len(lines)):
        if not _RULE.match(lines[number]):
            continue
        columns = [match.span() for match in re.finditer("─+", lines[number])]
        headings = [lines[number - 1][begin:end].strip().lower() for begin, end in columns]
        row = number + 1
        while row < len(lines) and lines[row].strip():
            lines[row] = _without_cells(lines[row], columns, headings)
            row += 1
    return "\n".join(lines)


def _without_cells(line: str, columns: list[tuple[int, int]], headings: list[str]) -> str:
    measured_row = line[slice(*columns[0])].strip() in MEASURED_ROWS
    for place, ((begin, end), heading) in enumerate(zip(columns, headings, strict=True)):
        if line[begin:end].strip() and (heading in MEASURED_COLUMNS or (measured_row and place)):
            line = line[:begin] + MEASURED.ljust(end - begin) + line[end:]
    return line.rstrip()


def clean_html(text: str) -> str:
    """Return HTML in which measured values and this machine's folders are replaced, except in pictures."""
    parts = re.split(rf"({_IMAGE.pattern})", text)
    parts = [part if place % 2 else _SLOW_IMPORT.sub("", _without_measures(part)) for place, part in enumerate(parts)]
    text = "".join(parts)
    return _TABLE.sub(lambda table: _clean_table(table[0]), text)


def _clean_table(table: str) -> str:
    headings: list[str] = []

    def clean_row(row: re.Match[str]) -> str:
        cells = [html.unescape(re.sub("<[^>]*>", "", cell[3])).strip().lower() for cell in _CELL.finditer(row[0])]
        if not headings:
            headings.extend(cells)
            return row[0]
        places = iter(range(len(cells)))
        measured_row = bool(cells) and cells[0] in MEASURED_ROWS
        return _CELL.sub(_replacing(headings, places, measured_row), row[0])

    return _ROW.sub(clean_row, table)


def _replacing(headings: list[str], places: Iterator[int], measured_row: bool) -> Callable[[re.Match[str]], str]:
    def replaced(cell: re.Match[str]) -> str:
        place = next(places)
        measured = place < len(headings) and headings[place] in MEASURED_COLUMNS
        if cell[3].strip() and (measured or (measured_row and place)):
            return f"{cell[1]}{MEASURED}{cell[4]}"
        return cell[0]

    return replaced


def paths_in(notebook: dict[str, Any]) -> list[str]:
    """Return the absolute paths that a notebook's outputs show."""
    shown = "\n".join(line for cell in notebook["cells"] for line in _shown(cell))
    return sorted(set(_PATH.findall(_IMAGE.sub("", shown))))


def _shown(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the outputs of a cell as text. For a picture, only its type is in the text."""
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream":
            yield f"{output['name']}:\n{output['text']}"
        elif output["output_type"] == "error":
            yield "\n".join(["error:", *output["traceback"]])
        else:
            for kind, value in sorted(output["data"].items()):
                yield f"{kind}:\n{str(value) if kind.startswith('text/') else ''}"


def gist(cell: dict[str, Any], *, varies: bool) -> list[str]:
    """Return the sorted lines of a cell's outputs, without the numbers, curves and widths that differ between runs."""
    if varies:
        return sorted({shown.partition("\n")[0] for shown in _shown(cell)})
    lines = []
    shown = _SPEED.sub("", _ANSI.sub("", _IMAGE.sub("", "\n".join(_shown(cell)))))
    shown = shown.replace(MEASURED, "").replace("<ul></ul>", "").replace("><", ">\n<")
    for line in shown.splitlines():
        words = re.sub(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|\bnan\b|\binf\b", "#", line)
        lines.append(re.sub(r"\s+", " ", re.sub(r"[▁▂▃▄▅▆▇█]+", "▁", re.sub("─+", "─", words))).strip())
    return sorted(line for line in lines if line)


def differences(committed: dict[str, Any], executed: dict[str, Any]) -> dict[str, list[str]]:
    """Return how the output of each changed cell differs, by the cell's id."""
    before = {cell["id"]: cell for cell in committed["cells"] if cell["cell_type"] == "code"}
    found = {}
    for cell in executed["cells"]:
        if cell["cell_type"] != "code":
            continue
        varies = VARIES in before[cell["id"]]["metadata"].get("tags", [])
        old, new = gist(before[cell["id"]], varies=varies), gist(cell, varies=varies)
        if old != new:
            found[cell["id"]] = list(difflib.unified_diff(old, new, "committed", "executed", lineterm="", n=1))
    return found


def merged(committed: dict[str, Any], executed: dict[str, Any], changed: set[str]) -> dict[str, Any]:
    """Return the executed notebook with the committed outputs of the unchanged cells."""
    before = {cell["id"]: cell for cell in committed["cells"]}
    for cell in executed["cells"]:
        if cell["cell_type"] == "code" and cell["id"] not in changed:
            cell["outputs"] = before[cell["id"]]["outputs"]
    return executed


def main(command: str, *paths: str) -> int:
    """Compare or record notebooks. Return 1 if a compared one differs, or if a recorded one is too large."""
    failed = False
    for path in map(Path, paths):
        committed = read(path)
        executed = clean(read(EXECUTED / path.name))
        found = differences(committed, executed)
        if command == "record-all":
            found = {cell["id"]: [] for cell in executed["cells"]}
        if command.startswith("record"):
            nbformat.write(nbformat.from_dict(merged(committed, executed, set(found))), path)  # type: ignore[no-untyped-call]
            size = path.stat().st_size
            failed |= size > LARGEST
            print(f"{path}: {len(found)} cells recorded; {size / 1000:.0f} kB of at most {LARGEST / 1000:.0f}")
        else:
            failed |= bool(found)
            print(f"{path}: " + (f"{len(found)} cells differ" if found else "as committed"))
            for name, lines in found.items():
                print("\n".join([f"  {name}", *(f"    {line}" for line in lines)]))
    if failed and command == "compare":
        print("make examples-record takes over the new outputs")
    return int(failed)


def read(path: Path) -> dict[str, Any]:
    """Return a notebook in which each multiline text is a single string."""
    notebook: dict[str, Any] = json.loads(json.dumps(nbformat.read(path, as_version=4)))  # type: ignore[no-untyped-call]
    return notebook


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
