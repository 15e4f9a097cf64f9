"""pyproject.toml, the tree and the package root agree."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10 has no tomllib.
    import tomli as tomllib  # type: ignore[no-redef]

import notebook_accelerate
from notebook_accelerate import _lazy

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "notebook_accelerate"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULE_FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def _packages_of_the_tree() -> set[str]:
    folders = {path.parent for base in (PACKAGE, ROOT / "widgets") for path in base.rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    return {re.sub(r"^widgets", "notebook_accelerate.widgets", name) for name in names}


def test_every_package_of_the_tree_is_listed() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    missing = sorted(_packages_of_the_tree() - set(listed))
    lines = "\n".join(f'    "{name}",' for name in missing)
    assert not missing, f"add under [tool.setuptools] packages in pyproject.toml:\n{lines}"
    gone = sorted(set(listed) - _packages_of_the_tree())
    assert not gone, f"no such folders; remove them from [tool.setuptools] packages in pyproject.toml: {gone}"
    assert listed == sorted(listed)


def test_every_package_has_an_init_module() -> None:
    folders = {path.parent for path in MODULE_FILES} | {path.parent for path in (ROOT / "widgets").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_widgets_is_a_link_to_the_top_level_folder() -> None:
    link = PACKAGE / "widgets"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "widgets"
    import notebook_accelerate.widgets

    assert Path(str(notebook_accelerate.widgets.__file__)).resolve() == ROOT / "widgets" / "__init__.py"


def test_the_type_marker_and_the_static_files_are_packaged() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data["notebook_accelerate"]
    assert (PACKAGE / "py.typed").exists()
    assert "static/*" in data["notebook_accelerate.widgets"]


@pytest.mark.parametrize("name", _lazy.exports("notebook_accelerate").homes)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(notebook_accelerate, name) is not None


def test_public_names_are_listed_and_have_a_home() -> None:
    homes = _lazy.exports("notebook_accelerate").homes
    names: dict[str, object] = {}
    exec("from notebook_accelerate import *", names)  # Functions cannot contain star imports.
    assert set(homes) - set(names) == {"attach", "configure", "debug", "runs", "shutdown", "sweep"}
    assert set(notebook_accelerate.__all__) == set(homes) & set(names)
    assert set(homes) <= set(dir(notebook_accelerate))
    assert all(home.startswith("notebook_accelerate.") for home in homes.values())


def test_the_submodules_of_the_root_match_accelerate() -> None:
    table = json.loads((ROOT / "tests/parity/surface/api_surface.json").read_text())
    modules = [*table["modules"], "widgets"]  # Accelerate has no package `widgets`.
    submodules = _lazy.exports("notebook_accelerate").submodules
    assert sorted(submodules) == sorted(name for name in modules if _is_module(name))


@pytest.mark.parametrize("name", ["big_modeling", "data_loader", "hooks", "state", "tracking", "utils", "widgets"])
def test_a_star_import_of_a_public_package_brings_no_submodules(name: str) -> None:
    names: dict[str, object] = {}
    # A star import is allowed only at module level, so run it with exec.
    exec(f"from notebook_accelerate.{name} import *", names)
    assert [each for each, value in names.items() if isinstance(value, ModuleType)] == []


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'acelerator'"):
        notebook_accelerate.__getattr__("acelerator")
    with pytest.raises(ImportError):
        importlib.import_module("notebook_accelerate.acelerator")


def test_no_module_imports_names_from_the_package_root() -> None:
    offenders = []
    for path in MODULE_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "notebook_accelerate" and node.level == 0:
                # Only the version is defined in the root itself.
                names = [alias.name for alias in node.names if not _is_module(alias.name)]
                names = [name for name in names if name != "__version__"]
                offenders += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names]
    assert offenders == [], "import from the module that defines the name"


def _is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
