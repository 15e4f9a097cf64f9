"""The runner of the test groups: counts, exit status, and output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import groups


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(groups, "LOGS", tmp_path / "logs")
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "faults").mkdir()
    (tmp_path / "tests" / "gpu").mkdir()
    (tmp_path / "tests" / "faults" / "test_b.py").write_text("def test_b(): pass\n")
    return tmp_path


def test_groups_without_tests_are_omitted_and_counts_add_up(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests" / "unit" / "test_a.py").write_text(
        "import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='why')\ndef test_c(): pass\n"
    )
    assert groups.present("everyday") == {
        "unit-3": ["tests/unit/test_a.py"],
        "faults-2": ["tests/faults/test_b.py"],
    }
    assert groups.main("everyday") == 0
    closing = capsys.readouterr().out.strip().splitlines()[-1]
    assert closing.startswith("=")
    assert " 2 passed, 1 skipped in " in closing


def test_a_long_group_runs_in_parts_that_contain_each_file_once(tree: Path) -> None:
    (tree / "tests" / "gpu" / "test_a.py").write_text("")
    for number in range(12):
        (tree / "tests" / "faults" / f"test_{number:02}.py").write_text("#" * 1000)
    present = groups.present("everyday")
    assert list(present) == ["faults-1", "faults-2", "faults-3", "devices"]
    parts = [present[f"faults-{number}"] for number in (1, 2, 3)]
    assert [file for part in parts for file in part] == sorted(
        str(file.relative_to(tree)) for file in (tree / "tests" / "faults").glob("test_*.py")
    )
    assert all(3 <= len(part) <= 5 for part in parts)


def test_one_failure_fails_the_whole_and_shows_the_log(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests" / "unit" / "test_a.py").write_text("def test_a():\n    assert 'spade' == 'shovel'\n")
    assert groups.main("everyday") == 1
    out = capsys.readouterr().out
    assert "assert 'spade' == 'shovel'" in out
    assert "failed groups: unit-3;" in out
    assert " 1 failed, 1 passed in " in out.strip().splitlines()[-1]


def test_a_long_explanation_is_abridged_and_the_next_failure_is_still_shown(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests" / "unit" / "test_a.py").write_text(
        "def test_a():\n    raise AssertionError('\\n'.join(f'line {n}' for n in range(500)))\n"
        "def test_c():\n    assert 'spade' == 'shovel'\n"
    )
    assert groups.main("everyday") == 1
    out = capsys.readouterr().out
    assert "line 0\n" in out
    assert "line 499\n" in out
    assert "line 250\n" not in out
    assert "lines: see the log]" in out
    assert "assert 'spade' == 'shovel'" in out


def test_make_targets_run_in_parallel_with_the_groups(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "Makefile").write_text("lint:\n\t@echo 'All checks passed!'\n")
    assert groups.main("everyday", "lint") == 0
    assert " 1 passed in " in capsys.readouterr().out.strip().splitlines()[-1]
    (tree / "Makefile").write_text("lint:\n\t@echo 'unused import'; exit 1\n")
    assert groups.main("everyday", "lint") == 1
    out = capsys.readouterr().out
    assert "unused import" in out
    assert "failed groups: lint" in out


def test_nightly_tests_are_deselected_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def collected(value: str) -> str:
        monkeypatch.setenv("TEST_NIGHTLY", value)
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/faults/test_remote.py"]
        return subprocess.run(command, cwd=groups.ROOT, capture_output=True, text=True, check=True).stdout

    assert "1/3 tests collected (2 deselected)" in collected("")
    assert "3 tests collected" in collected("yes")


def test_a_tree_without_tests_does_not_pass(tree: Path) -> None:
    (tree / "tests" / "faults" / "test_b.py").unlink()
    assert groups.main("everyday") == 1


def test_make_runs_a_group_with_a_separate_environment(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests" / "megatron").mkdir()
    (tree / "tests" / "megatron" / "test_a.py").write_text("def test_a(): assert False\n")
    (tree / "Makefile").write_text("test-megatron:\n\t@echo '=== 3 passed in 0.10s ==='\n")
    assert groups.main("integrations") == 0
    assert " 3 passed in " in capsys.readouterr().out.strip().splitlines()[-1]
    (tree / "Makefile").write_text("test-megatron:\n\t@echo '=== 1 failed, 2 passed in 0.10s ==='; exit 1\n")
    assert groups.main("integrations") == 1
    out = capsys.readouterr().out
    assert "failed groups: megatron" in out
    assert " 1 failed, 2 passed in " in out.strip().splitlines()[-1]
