"""The runner of the GPU day: time limits, the files that are written after each item, and the choice of items."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.gpu.day import __main__ as day, wheels

TESTS = """
import time
import pytest

pytestmark = pytest.mark.gpu

def test_measured(record_property):
    record_property("a figure", "7 ms")

def test_broken():
    assert 1 == 2

@pytest.mark.skipif(True, reason="no such thing")
def test_without():
    pass

def test_slow():
    time.sleep(300)
"""


def run(tmp_path: Path, *items: day.Item, seconds: float = 100.0, only: tuple[str, ...] = ()) -> day.Day:
    ran = day.Day(tmp_path / "out", tmp_path / "logs", seconds, dry=True)
    ran.run([[[item]] for item in items], only)
    return ran


@pytest.fixture
def tests(tmp_path: Path) -> str:
    file = tmp_path / "test_day.py"
    file.write_text(TESTS)
    return str(file)


def test_tests_that_finished_before_the_limit_are_known(tmp_path: Path, tests: str) -> None:
    slow = day.Item("slow", 15.0 / day.DRY_FACTOR, (tests,))
    ran = run(tmp_path, slow, day.Item("quick", 60.0, (tests, "-kmeasured")))
    slow_one, quick = ran.results
    assert (slow_one.ended, slow_one.counts) == ("killed at its limit", "1 passed, 1 failed, 1 skipped")
    assert (quick.ended, quick.counts) == ("0", "1 passed")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"summary.md", "results.json", "logs.tar.gz"}
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        assert {"logs/slow.log", "logs/quick.log", "logs/quick.jsonl"} <= set(logs.getnames())
    summary = (tmp_path / "out" / "summary.md").read_text()
    for line in ("| slow | killed at its limit |", "assert 1 == 2", "no such thing", "| quick | a figure | 7 ms |"):
        assert line in summary
    assert [row["item"] for row in json.loads((tmp_path / "out" / "results.json").read_text())] == ["slow", "quick"]


def test_items_without_time_are_listed_and_others_omitted(tmp_path: Path, tests: str) -> None:
    items = (day.Item("first", 60.0, (tests,)), day.Item("second", 60.0, (tests,)))
    ran = run(tmp_path, *items, seconds=5.0, only=("second",))
    assert [(each.item, each.ended) for each in ran.results] == [("second", "no time left")]
    assert "| second | no time left |" in (tmp_path / "out" / "summary.md").read_text()


def test_the_end_of_a_failure_is_in_the_summary(tmp_path: Path) -> None:
    file = tmp_path / "test_long.py"
    file.write_text("def test_long():\n    raise ValueError('first ' + 'x' * 3000 + ' the reason')\n")
    assert run(tmp_path, day.Item("long", 60.0, (str(file),))).results[0].ended == "1"
    assert "the reason" in (tmp_path / "out" / "summary.md").read_text()


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_broken.py"
    file.write_text("import no_such_module\n")
    run(tmp_path, day.Item("broken", 60.0, (str(file),)))
    assert "no_such_module" in (tmp_path / "out" / "summary.md").read_text()


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_DAY_ONLY", "stuck,typo")
    with pytest.raises(SystemExit, match="names typo; the items are facts, kernel, stuck"):
        day.main()


def test_each_file_of_the_day_is_an_item() -> None:
    named = {path.partition("::")[0] for phase in day.PHASES for lane in phase for item in lane for path in item.tests}
    files = {f"day/{path.name}" for path in (day.ROOT / "tests" / "gpu" / "day").glob("check_*.py")}
    assert files <= named
    assert all((day.ROOT / "tests" / "gpu" / path).exists() for path in named if not path.startswith("-"))


def test_a_wheel_keeps_the_libraries_of_one_cuda(tmp_path: Path) -> None:
    path = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = ["b/libbitsandbytes_cpu.so", "b/libbitsandbytes_cuda130.so", "b/libbitsandbytes_cuda118.so", "b/x.py"]
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
        wheel.writestr("b-1.dist-info/RECORD", "".join(f"{name},sha256=0,1\n" for name in names))
    wheels.repack(path)
    with zipfile.ZipFile(path) as wheel:
        record = wheel.read("b-1.dist-info/RECORD").decode()
        assert set(wheel.namelist()) == {*names, "b-1.dist-info/RECORD"} - {names[2]}
    assert [line.partition(",")[0] for line in record.splitlines()] == [names[0], names[1], names[3]]
