"""The door: Accelerate's import paths, loaded when they are used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import notebook_accelerate.utils as door
from notebook_accelerate import _lazy
from notebook_accelerate.utils import _homes

SURFACE = Path(__file__).parents[2] / "parity" / "surface" / "api_surface.json"
ROWS = json.loads(SURFACE.read_text())["modules"]["utils"]
TRAINING = sorted(name for name, row in ROWS.items() if row["area"] == "training")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("name", TRAINING)
def test_every_name_is_at_the_door_and_at_its_home(name: str) -> None:
    value = getattr(door, name)
    home = ROWS[name]["home"]
    if home.startswith("utils."):
        assert getattr(importlib.import_module(f"notebook_accelerate.{home}"), name) is value
    assert name in dir(door)


@pytest.mark.parametrize("submodule", sorted(_homes.HOMES))
def test_every_submodule_is_imported_by_path_and_by_attribute(submodule: str) -> None:
    module = importlib.import_module(f"notebook_accelerate.utils.{submodule}")
    assert module.__all__
    if submodule not in door.__all__:
        assert getattr(door, submodule) is module


def test_no_name_has_two_homes() -> None:
    for submodule, homes in _homes.HOMES.items():
        names = [name for group in homes.values() for name in group]
        assert len(names) == len(set(names)), submodule
    assert len(door.__all__) == len(set(door.__all__))


def test_plain_settings_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from notebook_accelerate.utils import AutocastKwargs, DistributedType, WEIGHTS_NAME, patch_environment\n"
        "from notebook_accelerate.utils.dataclasses import ProjectConfiguration, FullyShardedDataParallelPlugin\n"
        "import notebook_accelerate.utils.constants, notebook_accelerate.commands.config.default\n"
        "print('torch' in sys.modules)"
    )
    assert _run(code) == "False"


def test_a_submodule_does_not_hide_a_name_that_is_spelled_alike() -> None:
    code = (
        "import notebook_accelerate.utils.tqdm, notebook_accelerate.utils as utils\n"
        "from notebook_accelerate.utils.tqdm import tqdm\n"
        "print(callable(utils.tqdm), utils.tqdm is tqdm)"
    )
    assert _run(code) == "True True"


def test_constants_have_the_documented_values() -> None:
    values = {name: row["value"] for name, row in ROWS.items() if row["kind"] == "constant"}
    assert len(values) > 10
    assert {name: repr(getattr(door, name)) for name in values} == values


def test_missing_names_are_missing_as_everywhere() -> None:
    assert not hasattr(door, "no_such_name")
    with pytest.raises(AttributeError, match=r"'notebook_accelerate\.utils' has no attribute 'no_such_name'"):
        door.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from notebook_accelerate.utils import no_such_name")


def test_a_room_that_is_missing_is_a_missing_name_and_a_package_that_is_missing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lazy_rooms"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "room.py").write_text("import no_such_package_here")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_lazy, "PACKAGE", "lazy_rooms")
    load, _, names = _lazy.attach("lazy_rooms", {"room": ("broken",), "absent": ("gone",)})
    assert names == ["broken", "gone"]
    with pytest.raises(AttributeError, match=r"there is no lazy_rooms\.absent"):
        load("gone")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here"):
        load("broken")
