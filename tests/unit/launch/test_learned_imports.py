"""The server process imports what earlier ranks have imported, unless that could change what a rank does."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.launch.processes import learned_imports
from notebook_accelerate.launch.processes.learned_imports import ServerImports, fits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests inspect /proc")
SETUP = """
import json, os, sys, time
import torch
from notebook_accelerate import notebook_launcher
from notebook_accelerate.launch.processes import zygote

def launch(function, *args, **options):
    options = {"num_processes": 2, "use_port": 0, "start_method": "zygote", **options}
    return notebook_launcher(function, args, **options).results

def refused():
    # Wait for the server that imports what ranks have imported, and return what it has refused.
    deadline = time.monotonic() + 120
    while (zygote._spare is None or not zygote._spare.ready()) and time.monotonic() < deadline:
        time.sleep(0.02)
    zygote._spare.fits(None, as_accelerate=False)
    return zygote._spare._learned.refused

answers = []
"""
PACKAGES = {
    "clean": "import atexit, os\nHOME = os.environ.get('CLEAN_HOME')\natexit.register(lambda: print('clean ended'))",
    "user_of_rank": "from clean import m0\nimport ranked",
    "ranked": "import os\nRANK = os.environ.get('RANK')",
    "sets": "import os\nos.environ['SET'] = '1'",
    "noisy": "import warnings\nwarnings.warn('noisy is deprecated')",
    "threaded": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "path": "import sys\nsys.path.append('/nowhere')",
    "copies": "import os\nCOPY = dict(os.environ)",
    "searches": "import os\nFOUND = {n: v for n, v in dict(os.environ).items() if n.startswith('SEARCHES_')}",
}
"""The code of each package in the folder of installed packages. `clean` has 120 modules, and the others have one."""


def _write(folder: Path, name: str, code: str, modules: int = 0) -> None:
    (folder / name).mkdir(parents=True)
    names = [f"m{index}" for index in range(modules)]
    for module in names:
        (folder / name / f"{module}.py").write_text("")
    (folder / name / "__init__.py").write_text("".join(f"from {name} import {each}\n" for each in names) + code)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    for name, code in PACKAGES.items():
        _write(folder, name, code, 120 if name == "clean" else 0)
    return folder


def _answers(script: str, site: Path, **variables: str) -> Any:
    """Run a script in a new interpreter, and return its list ``answers`` and its output."""
    program = SETUP + f"PACKAGES = {list(PACKAGES)}\n" + textwrap.dedent(script) + "\nprint(json.dumps(answers))"
    (site.parent / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).resolve().parents[3]}:{site}", **variables},
        cwd=site.parent / "work",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_later_ranks_share_safe_imports(site: Path) -> None:
    script = """
    def train():
        shared = sorted({*sys.modules} & {*PACKAGES})
        import clean, user_of_rank, ranked, sets, noisy, threaded, path, copies, searches
        return shared, clean.HOME, ranked.RANK, os.environ["SET"], "/nowhere" in sys.path, searches.FOUND

    answers += [launch(train), refused(), launch(train)]
    answers.append(launch(train, env={"CLEAN_HOME": "there"}))
    answers.append(launch(train, env={"SEARCHES_X": "1"}))
    answers.append(launch(train))
    """
    (first, refused, second, changed, searched, last), output = _answers(script, site)
    assert first == [[[], None, str(rank), "1", True, {}] for rank in range(2)]
    assert set(refused) == {"user_of_rank", "ranked", "sets", "noisy", "threaded", "path", "copies"}
    assert second == last == [[["clean", "searches"], None, str(rank), "1", True, {}] for rank in range(2)]
    assert [each[:2] for each in changed] == [[[], "there"]] * 2, "the launch has changed a variable that is read"
    assert [(each[0], each[-1]) for each in searched] == [([], {"SEARCHES_X": "1"})] * 2
    assert output.count("clean ended") == 5 * 2, "the exit handlers of shared imports run in each rank"


def _imports(**changes: Any) -> ServerImports:
    found = ServerImports(["tool"], {}, [], as_accelerate=False, installed=learned_imports.installed_state())
    found.read, found.prefixes = {"TOOL_HOME": None, "HOME": "/home"}, ["OTHER"]
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize(
    ("variables", "as_accelerate", "expected"),
    [
        ({"HOME": "/home", "UNRELATED": "1"}, False, True),
        ({"HOME": "/home", "TOOL_HOME": ""}, False, False),
        ({"HOME": "/elsewhere"}, False, False),
        ({}, False, False),
        ({"HOME": "/home", "OTHER_SETTING": "1"}, False, False),
        ({"HOME": "/home"}, True, False),
    ],
)
def test_launches_with_other_variables_do_not_share_imports(
    variables: dict[str, str], *, as_accelerate: bool, expected: bool
) -> None:
    assert fits(_imports(), variables, as_accelerate=as_accelerate) is expected


def test_changed_packages_and_settings_end_the_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(imports: ServerImports) -> bool:
        return fits(imports, {"HOME": "/home"}, as_accelerate=False)

    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    before = _imports()
    assert shares(before)
    os.utime(packages, ns=(1, 1))
    assert not shares(before), "a package was installed"
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    assert not shares(_imports()), "ranks show what is logged on import"
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shares(_imports())
    (tmp_path / "tool.py").touch()
    assert not shares(_imports()), "ranks import the user's module"
