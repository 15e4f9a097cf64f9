"""The matrix of versions: its cells, the copied files, and the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import matrix

RELEASES = {"2.6": "2.6.0", "2.9": "2.9.1", "2.10": "2.10.0", "2.15": "2.15.0"}


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "torch_releases", lambda _: RELEASES)  # The answer of the package index.


def names(*chosen: str) -> list[str]:
    return [cell.name for cell in matrix.choose({"3.10": "a", "3.13": "b"}, chosen)]


def test_each_python_has_the_oldest_a_middle_and_the_newest_torch(releases: None) -> None:
    assert names() == ["3.10-2.6", "3.10-2.10", "3.10-2.15", "3.13-2.6", "3.13-2.10", "3.13-2.15"]


def test_cells_are_named_by_versions_or_words(releases: None) -> None:
    assert names("3.13-2.9", "3.10-oldest", "3.13-newest") == ["3.13-2.9", "3.10-2.6", "3.13-2.15"]
    with pytest.raises(SystemExit, match=r"no such cell here: 3\.9-2\.6, 3\.10-2\.7"):
        names("3.9-2.6", "3.10-2.7")


def test_a_cell_takes_the_newest_release_of_its_minor_version(releases: None) -> None:
    (cell,) = matrix.choose({"3.10": "a"}, ["3.10-2.9"])
    assert (cell.interpreter, cell.release) == ("a", "2.9.1")


def test_interpreters_are_found_by_their_version() -> None:
    version = "{}.{}".format(*sys.version_info)
    found = matrix.find_interpreter(version)
    assert found is None or Path(found).name.startswith("python")
    assert matrix.find_interpreter("3.1") is None


def test_the_tests_are_copied_without_the_package(tmp_path: Path) -> None:
    if not (matrix.ROOT / ".git").exists():
        pytest.skip("git does not track this folder")
    matrix.copy_tree(tmp_path / "tree")
    copied = {path.name for path in (tmp_path / "tree").iterdir()}
    assert {"tests", "examples", "pyproject.toml"} <= copied
    assert not copied & {*matrix.PACKAGES, ".build"}


def test_the_table_shows_failures_and_cells_that_did_not_run() -> None:
    row = {"torch": "2.6.0", "unit": {"passed": 1234, "failed": 2, "failed group": True}}
    results = {"3.13-2.6": {**row, "launch": {"failed group": True}}, "3.10-2.6": row}
    assert matrix.table(results).splitlines()[2:] == [
        "| 3.10 | 2.6.0 | did not run | 2 failed, 1,234 passed | did not run | did not run | did not run |",
        "| 3.13 | 2.6.0 | did not run | 2 failed, 1,234 passed | failed | did not run | did not run |",
    ]
