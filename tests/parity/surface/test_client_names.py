"""Every name that transformers, TRL, PEFT, diffusers, axolotl and others import from `accelerate` can be resolved."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.surface import client_names

ROOT = Path(__file__).resolve().parents[3]
DOWNLOADS = ROOT / ".build" / "clients"


def resolve(dotted: str) -> object:
    """Return the object that a dotted name refers to: a module, or an attribute of one."""
    found: object = importlib.import_module("accelerate")
    done = "accelerate"
    for part in dotted.split(".")[1:]:
        done += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(done)
    return found


def unresolved(names: list[str]) -> list[str]:
    """Return the names that cannot be resolved, each with its error."""
    failed = []
    for name in names:
        try:
            resolve(name)
        except (AttributeError, ImportError) as error:
            failed.append(f"{name}: {error}")
    return failed


def _unresolved_in_a_fresh_interpreter(names: list[str]) -> list[str]:
    code = (
        "import json, sys, notebook_accelerate; notebook_accelerate.as_accelerate(); "
        "from tests.parity.surface.test_client_names import unresolved; "
        "print('FOUND', json.dumps(unresolved(json.load(sys.stdin))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(names), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.rpartition("FOUND")[2])
    return found


def test_every_name_of_the_table_resolves() -> None:
    names = client_names.used_by()
    assert len(names) > 100
    assert set(client_names.table()) == set(client_names.CLIENTS)
    failed = _unresolved_in_a_fresh_interpreter(sorted(names))
    assert failed == [], {name: names.get(name.partition(":")[0]) for name in failed}


def test_a_missing_name_is_reported() -> None:
    failed = _unresolved_in_a_fresh_interpreter(["accelerate.utils.gather", "accelerate.utils.absent"])
    assert len(failed) == 1
    assert failed[0].startswith("accelerate.utils.absent: No module named")


def test_names_are_read_from_imports_and_attributes() -> None:
    source = (
        "import accelerate\nimport accelerate.hooks\nimport accelerate.accelerator as acc\n"
        "from accelerate.utils import gather as g\nfrom accelerated import x\nfrom . import accelerate as y\n"
        "accelerate.hooks.CpuOffload(); acc.convert; acc.patched = 1; g.attribute\n"
    )
    assert sorted(set(client_names.names_in(source))) == [
        "accelerate", "accelerate.accelerator", "accelerate.accelerator.convert", "accelerate.hooks",
        "accelerate.hooks.CpuOffload", "accelerate.utils.gather",
    ]  # fmt: skip


def test_the_table_matches_the_sources() -> None:
    if not any(DOWNLOADS.glob("*.whl")):
        pytest.skip("the libraries' wheels are not downloaded: make client-names")
    scanned = client_names.scan(DOWNLOADS)
    assert set(scanned) == set(client_names.CLIENTS)
    failed = _unresolved_in_a_fresh_interpreter(sorted({str(n) for row in scanned.values() for n in row["names"]}))
    assert failed == []
    known = client_names.table()
    same = [name for name, row in scanned.items() if row["version"] == known[name]["version"]]
    assert {name: scanned[name] for name in same} == {name: known[name] for name in same}
