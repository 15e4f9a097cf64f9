"""Accelerate's import paths, whose modules are loaded on first use."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import notebook_accelerate
from notebook_accelerate import _lazy, utils

SURFACE = Path(__file__).parents[2] / "parity" / "surface" / "api_surface.json"
ROWS = json.loads(SURFACE.read_text())["modules"]["utils"]
SUBMODULES = sorted(path.stem for path in Path(utils.__file__).parent.glob("[a-z]*.py"))
TRAINING = sorted(name for name, row in ROWS.items() if row["area"] == "training")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("name", TRAINING)
def test_every_name_is_an_attribute_of_utils_and_of_its_submodule(name: str) -> None:
    value = getattr(utils, name)
    home = ROWS[name]["home"]
    if home.startswith("utils."):
        assert getattr(importlib.import_module(f"notebook_accelerate.{home}"), name) is value
    assert name in dir(utils)


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_every_submodule_is_imported_by_path_and_by_attribute(submodule: str) -> None:
    if submodule == "rich" and not utils.is_rich_available():
        pytest.skip("utils.rich needs rich")
    module = importlib.import_module(f"notebook_accelerate.utils.{submodule}")
    assert submodule in dir(utils)
    if submodule not in utils.__all__:
        assert getattr(utils, submodule) is module


def test_every_name_has_one_home() -> None:
    homes: dict[str, str] = {}
    for submodule in SUBMODULES:
        for name, home in _lazy.exports(f"notebook_accelerate.utils.{submodule}").homes.items():
            assert homes.setdefault(name, home) == home, name
    assert set(homes) <= set(utils.__all__)
    assert len(utils.__all__) == len(set(utils.__all__))


def test_settings_do_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from notebook_accelerate.utils import AutocastKwargs, DistributedType, WEIGHTS_NAME, patch_environment\n"
        "from notebook_accelerate.utils.dataclasses import ProjectConfiguration, FullyShardedDataParallelPlugin\n"
        "import notebook_accelerate.utils.constants, notebook_accelerate.commands.config.default\n"
        "from notebook_accelerate.utils import environment, imports, launch, clear_environment\n"
        "print('torch' in sys.modules)"
    )
    assert _run(code) == "False"


def test_a_submodule_does_not_hide_a_function_of_the_same_name() -> None:
    code = (
        "import notebook_accelerate.utils.tqdm, notebook_accelerate.utils as utils\n"
        "from notebook_accelerate.utils.tqdm import tqdm\n"
        "print(callable(utils.tqdm), utils.tqdm is tqdm)"
    )
    assert _run(code) == "True True"


def test_functions_that_refer_to_the_package_are_pickled() -> None:
    for module in (notebook_accelerate, notebook_accelerate.utils):
        assert cloudpickle.loads(cloudpickle.dumps(module)) is module


def test_constants_have_the_documented_values() -> None:
    values = {name: row["value"] for name, row in ROWS.items() if row["kind"] == "constant"}
    assert len(values) > 10
    assert {name: repr(getattr(utils, name)) for name in values} == values


def test_missing_names_raise_attribute_and_import_errors() -> None:
    assert not hasattr(utils, "no_such_name")
    with pytest.raises(AttributeError, match=r"'notebook_accelerate\.utils' has no attribute 'no_such_name'"):
        utils.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from notebook_accelerate.utils import no_such_name")


def test_a_missing_dependency_of_a_home_is_a_module_not_found_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from notebook_accelerate._lazy import reexport\n"
        "if TYPE_CHECKING:\n"
        "    from lazy_package import other as other\n"
        "    from lazy_package.home import broken as broken\n"
        "reexport(__name__)\n"
    )
    (package / "home.py").write_text("import no_such_package_here")
    (package / "other.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    lazy = importlib.import_module("lazy_package")
    try:
        assert lazy.__all__ == ["broken"]
        assert {"broken", "other"} <= set(dir(lazy))
        assert lazy.other.__name__ == "lazy_package.other"
        with pytest.raises(ModuleNotFoundError, match="no_such_package_here"):
            lazy.broken  # noqa: B018
    finally:
        for name in ("lazy_package", "lazy_package.other"):
            del sys.modules[name]


def test_an_installation_without_sources_names_the_remedy() -> None:
    with pytest.raises(ImportError, match=r"install the package with its \.py files"):
        _lazy.reexport("sys")
