"""The table of measurements that the tests on a GPU make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu import DRY, Figure

_FIGURES = pytest.StashKey[list[tuple[str, str]]]()
_TABLE = Path(__file__).resolve().parents[2] / ".build" / "gpu-figures.md"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Record a measurement for the table that is printed after the tests and written to .build/gpu-figures.md.

    The measurement is also recorded as a property of the test, which `tests.gpu.day` reads for its summary.
    """

    def note(name: str, value: str) -> None:
        request.node.user_properties.append((name, value))
        request.config.stash[_FIGURES].append((name, value))

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of measurements, and write it to a file."""
    figures = terminalreporter.config.stash[_FIGURES]
    if not figures:
        return
    import torch

    where = "a dry run on the CPU: these figures mean nothing" if DRY else torch.cuda.get_device_name(0)
    lines = [f"Measured on: {where} · torch {torch.__version__}", "", "| figure | measured |", "|---|---|"]
    lines.extend(f"| {name} | {value} |" for name, value in figures)
    if not terminalreporter.config.pluginmanager.hasplugin("tests.gpu.day.outcomes"):
        _TABLE.parent.mkdir(exist_ok=True)
        _TABLE.write_text("\n".join(lines) + "\n")
    terminalreporter.section("figures")
    for line in lines:
        terminalreporter.write_line(line)
