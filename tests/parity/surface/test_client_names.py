"""Every name that transformers, TRL, unsloth, axolotl and others import from `accelerate` can be resolved.

The attributes that they read and set on Accelerate's objects exist, too.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.surface import client_names

OTHER_OBJECTS = {
    "Accelerator.lower": "a string in unsloth's installer",
    "Accelerator.type": "a torch.device in transformers",
}
"""Attributes in the table of objects that are named like one of Accelerate's."""
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


def missing_attributes(names: list[str]) -> list[str]:
    """Return the attributes that the objects of `_objects` lack, each with its error."""
    objects = _objects()
    failed = []
    for name in names:
        kind, _, attribute = name.partition(".")
        try:
            getattr(objects[kind], attribute)
        except AttributeError as error:
            failed.append(f"{name}: {error}")
    return failed


def attributes_that_cannot_be_set(names: list[str]) -> list[str]:
    """Return the attributes that cannot be set to their own value, or to None if there is none, with their errors."""
    objects = _objects()
    failed = []
    for name in names:
        kind, _, attribute = name.partition(".")
        try:
            setattr(objects[kind], attribute, getattr(objects[kind], attribute, None))
        except (AttributeError, TypeError, ValueError) as error:
            failed.append(f"{name}: {error}")
    return failed


def _objects() -> dict[str, Any]:
    """Return an object of each class of `client_names.OBJECTS`."""
    from notebook_accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
    from notebook_accelerate.parallelism_config import ParallelismConfig

    accelerator = Accelerator(cpu=True)
    plugins = DeepSpeedPlugin(zero_stage=2), FullyShardedDataParallelPlugin(), ParallelismConfig()
    made = (accelerator, accelerator.state, accelerator.gradient_state, PartialState(), *plugins)
    return {type(each).__name__: each for each in made}


def _unresolved_in_a_fresh_interpreter(names: list[str], check: str = "unresolved") -> list[str]:
    code = (
        "import json, sys, notebook_accelerate; notebook_accelerate.as_accelerate(); "
        f"from tests.parity.surface.test_client_names import {check}; "
        f"print('FOUND', json.dumps({check}(json.load(sys.stdin))))"
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


@pytest.mark.parametrize(
    ("column", "check"), [("read", "missing_attributes"), ("set", "attributes_that_cannot_be_set")]
)
def test_every_attribute_of_the_table_exists(column: str, check: str) -> None:
    used = client_names.used_by(column)
    stored = client_names.used_by("set")
    # A library may read what only it has set, such as the attributes by which it recognizes a patched object.
    names = [name for name in used if column == "set" or name not in stored]
    failed = _unresolved_in_a_fresh_interpreter(sorted(set(names) - OTHER_OBJECTS.keys()), check)
    assert failed == [], {name: used.get(name.partition(":")[0]) for name in failed}


def test_missing_attributes_are_reported() -> None:
    failed = _unresolved_in_a_fresh_interpreter(["Accelerator.device", "Accelerator.absent"], "missing_attributes")
    assert len(failed) == 1
    assert failed[0].startswith("Accelerator.absent: ")
    [failure] = _unresolved_in_a_fresh_interpreter(["Accelerator.device"], "attributes_that_cannot_be_set")
    assert failure.startswith("Accelerator.device: ")


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
    assert sorted(set(client_names.names_in(ast.parse(source)))) == [
        "accelerate", "accelerate.accelerator", "accelerate.accelerator.convert", "accelerate.hooks",
        "accelerate.hooks.CpuOffload", "accelerate.utils.gather",
    ]  # fmt: skip


def test_attributes_are_read_from_objects_that_are_named_like_accelerates() -> None:
    source = (
        "import torch\nself.accelerator.prepare(model); trainer.accelerator.state.fsdp_plugin.fsdp_version\n"
        "self.accelerator.patched = True; PartialState().device; hasattr(self._accelerator, 'scaler')\n"
        "torch.accelerator.device_count(); getattr(accelerate_config, 'x'); getattr(accelerator, name)\n"
    )
    assert set(client_names.attributes_in(ast.parse(source))) == {
        ("Accelerator.prepare", False), ("Accelerator.state", False), ("AcceleratorState.fsdp_plugin", False),
        ("FullyShardedDataParallelPlugin.fsdp_version", False), ("Accelerator.patched", True),
        ("PartialState.device", False), ("Accelerator.scaler", False),
    }  # fmt: skip
    other = "import torch\naccelerator = torch.accelerator.current_accelerator()\naccelerator.type\n"
    assert list(client_names.attributes_in(ast.parse(other))) == []


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
