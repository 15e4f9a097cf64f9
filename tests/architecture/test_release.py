"""The parts of a release agree: version, changelog, extras, links, and the workflows of GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import notebook_accelerate
from notebook_accelerate.tracking.tracker_table import TRACKERS
from tests.architecture.test_packages import PROJECT, ROOT
from tests.architecture.test_sessions import make_targets, session_table

README = (ROOT / "README.md").read_text()
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
SOURCE = PROJECT["project"]["urls"]["Source"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if "Python :: 3." in name]


def test_the_version_has_one_place_and_an_entry_in_the_changelog() -> None:
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "notebook_accelerate.__version__"}
    assert f"\n## {notebook_accelerate.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_each_tracker_has_an_extra_and_two_extras_have_all() -> None:
    assert set(TRACKERS) <= set(EXTRAS)
    assert _members("trackers") == sorted(TRACKERS)
    others = set(EXTRAS) - {"all", "torch_tpu", "tpu", "trackers"} - set(TRACKERS)
    assert _members("all") == sorted({*others, "trackers"})


def _members(extra: str) -> list[str]:
    (found,) = (re.fullmatch(r"notebook-accelerate\[(.*)\]", line) for line in EXTRAS[extra])
    assert found is not None
    return sorted(found.group(1).split(","))


def test_the_docs_name_every_extra() -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    assert [name for name in EXTRAS if f"`{name}`" not in page] == []


def test_links_of_the_readme_work_outside_the_repository() -> None:
    targets = [*re.findall(r"\]\(([^)\s]+)\)", README), *re.findall(r"^\[[^\]]+\]: (\S+)$", README, re.MULTILINE)]
    targets += re.findall(r'src(?:set)?="([^"]+)"', README)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    raw = SOURCE.replace("https://github.com", "https://raw.githubusercontent.com")
    ours = [re.sub(rf"^({SOURCE}/(blob|tree)|{raw})/main/", "", target) for target in targets if "/main/" in target]
    assert [path for path in ours if not (ROOT / path.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_the_commands_of_developers(path: Path) -> None:
    targets = make_targets()
    commands = "\n".join(step["run"] for step in _steps(path) if "run" in step)
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", commands))
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        named |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
    assert named <= targets


def test_workflows_test_the_declared_versions() -> None:
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS}
    assert set(jobs) == {"docs", "lint", "matrix", "test", "wheels"}
    tried, torches = session_table("PYTHONS"), session_table("TORCH")
    assert jobs["matrix"]["cell"]["strategy"]["matrix"] == {"python": list(tried), "torch": list(torches)}
    assert jobs["wheels"]["install"]["strategy"]["matrix"]["python"] == PYTHONS
    assert set(PYTHONS) <= set(tried)
    assert torches["oldest"].replace("~=", ">=").removesuffix(".0") in PROJECT["project"]["dependencies"]
    assert jobs["wheels"]["publish"]["permissions"] == {"id-token": "write"}


def _steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
