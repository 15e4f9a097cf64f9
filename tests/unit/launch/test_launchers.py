"""``notebook_launcher``: arguments override ``config=``, and importing it has no side effects."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig, debug_launcher, launch, notebook_launcher

CONFIG = LaunchConfig(mixed_precision="bf16", num_processes=3, use_port=0, block=False, cpu=True, env={"A": "1"})


def _train() -> None: ...


def _started(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> LaunchConfig:
    """Return the configuration that a call would launch with."""
    configs: list[LaunchConfig] = []
    monkeypatch.setattr(launch, "start", lambda config, *_: configs.append(config))
    notebook_launcher(_train, *args, **kwargs)
    return configs[0]


@pytest.mark.parametrize(
    ("name", "default"),
    [("mixed_precision", "no"), ("num_processes", None), ("use_port", "29500"), ("block", True), ("env", None)],
)
def test_an_explicit_argument_overrides_config_even_if_it_equals_the_default(
    monkeypatch: pytest.MonkeyPatch, name: str, default: object
) -> None:
    assert _started(monkeypatch, config=CONFIG, **{name: default}) == CONFIG.changed(**{name: default})


def test_explicit_positional_arguments_override_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _started(monkeypatch, (), 2, "no", config=CONFIG)
    assert config == CONFIG.changed(num_processes=2, mixed_precision="no")


def test_omitted_arguments_come_from_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _started(monkeypatch, config=CONFIG) == CONFIG
    assert _started(monkeypatch) == LaunchConfig()


def test_debug_launcher_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[LaunchConfig] = []
    monkeypatch.setattr(launch, "start", lambda config, *_: configs.append(config))
    debug_launcher(_train)
    assert configs == [LaunchConfig(num_processes=2, cpu=True, use_port=0)]


def test_wrong_calls_raise_pythons_own_errors() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'function'"):
        notebook_launcher(config=CONFIG)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'processes'"):
        notebook_launcher(_train, config=CONFIG, processes=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "variables",
    [{}, {"COLAB_RELEASE_TAG": "release"}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}],
    ids=["terminal", "colab", "kaggle"],
)
@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["script", "rank"])
def test_importing_in_a_script_starts_no_process_and_no_thread(variables: dict[str, str], rank: dict[str, str]) -> None:
    code = (
        "import time, threading, psutil, notebook_accelerate.launchers; time.sleep(0.2); "
        "print(len(psutil.Process().children()), threading.active_count())"
    )
    environment = {**os.environ, **variables, **rank}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split() == ["0", "1"], found.stderr
