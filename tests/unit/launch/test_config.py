"""The checks of LaunchConfig's fields, and the texts of their error messages."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig, notebook_launcher
from notebook_accelerate.config.launch_config import START_METHODS
from notebook_accelerate.config.settings import MIXED_PRECISIONS


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"num_processes": 0}, r"num_processes=0 .*at least 1"),
        ({"num_processes": -1}, "num_processes=-1"),
        ({"num_processes": 2.0}, "num_processes=2.0"),
        ({"num_processes": True}, "num_processes=True"),
        ({"num_processes": "2"}, "num_processes='2'"),
        ({"mixed_precision": "fp61"}, "mixed_precision='fp61'.*'no', 'fp16', 'bf16', 'fp8'"),
        ({"mixed_precision": None}, "mixed_precision=None"),
        ({"start_method": "forkserver"}, "start_method='forkserver'.*'zygote'"),
        ({"use_port": "http"}, "use_port='http'"),
        ({"use_port": 65536}, "65535"),
        ({"use_port": -1}, "use_port=-1"),
        ({"use_port": None}, "use_port=None"),
        ({"node_rank": 1}, "node_rank=1 is out of range: num_nodes=1"),
        ({"node_rank": -1}, "node_rank=-1"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"timeout": 0}, "timeout=0.*above 0"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"timeout": True}, "timeout=True"),
        ({"timeout": math.nan}, "timeout=nan"),
        ({"hang_timeout": -2}, "hang_timeout=-2"),
        ({"monitor_interval": 0}, "monitor_interval=0"),
        ({"panel": "yes"}, "panel='yes'"),
        ({"env": {"A": 1}}, r"env=\{'A': ...\} with a value of type int"),
        ({"env": [("A", "1")]}, "env="),
        ({"env": {1: "a"}}, "env="),
        ({"env": {"A=B": "1"}}, "env="),
        ({"env": {"": "1"}}, "env="),
        ({"env": {"A": "x\0y"}}, "env="),
        ({"env": {"A\0": "1"}}, "env="),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd'"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LaunchConfig(**values)
    with pytest.raises(ValueError, match=match):
        notebook_launcher(print, (), **values)


@pytest.mark.parametrize(
    "values",
    [
        {"use_port": 0}, {"use_port": "0"}, {"use_port": 65535}, {"num_processes": 128}, {"timeout": 0.001},
        {"panel": True}, {"env": {}}, {"node_rank": 1, "num_nodes": 2},
        *({"mixed_precision": name} for name in MIXED_PRECISIONS),
        *({"start_method": name} for name in START_METHODS),
    ],
)  # fmt: skip
def test_valid_settings_are_accepted(values: dict[str, Any]) -> None:
    config = LaunchConfig(**values)
    assert config.changed().non_default() == config.non_default()


def test_a_configuration_is_frozen_keyword_only_and_checked_again_by_replace() -> None:
    config = LaunchConfig(use_port="1234")
    assert config.non_default() == {"use_port": "1234"}
    with pytest.raises(AttributeError):
        config.num_processes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        LaunchConfig(2)  # type: ignore[misc]
    with pytest.raises(ValueError, match="timeout"):
        config.changed(timeout=-1)


def test_the_defaults_of_the_launcher_and_the_configuration_agree() -> None:
    defaults = LaunchConfig()
    for name, parameter in inspect.signature(notebook_launcher).parameters.items():
        if name not in ("function", "args", "resume", "config"):
            assert getattr(defaults, name) == parameter.default, name


def test_accelerates_parameters_come_first_and_in_its_order() -> None:
    names = list(inspect.signature(notebook_launcher).parameters)
    assert names[:15] == [
        "function", "args", "num_processes", "mixed_precision", "use_port", "master_addr", "node_rank", "num_nodes",
        "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id", "max_restarts", "monitor_interval",
        "log_line_prefix_template",
    ]  # fmt: skip


@pytest.mark.parametrize("args", ["abc", b"abc", 3, None])
def test_arguments_that_are_not_a_tuple_are_refused(args: Any) -> None:
    with pytest.raises(ValueError, match=r"print, \("):
        notebook_launcher(print, args)


@pytest.mark.parametrize("function", [None, 3, "train"])
def test_a_training_function_that_cannot_be_called_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"notebook_launcher\(train, \(args,\)\)"):
        notebook_launcher(function)


def test_the_result_of_a_called_function_is_refused_with_an_explanation() -> None:
    with pytest.raises(ValueError, match="is not a function"):
        notebook_launcher(print("called"), num_processes=2)  # type: ignore[func-returns-value,arg-type]


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="LaunchConfig"):
        notebook_launcher(print, config={"num_processes": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_nodes": 3, "num_nodes": 2}, "min_nodes=3 is more than num_nodes=2"),
        ({"min_nodes": 0, "num_nodes": 2}, "min_nodes=0"),
        ({"min_nodes": 1, "num_nodes": 2}, "rdzv_backend='c10d'"),
        ({"num_nodes": 2, "use_port": 0}, "use_port=0 is not allowed with num_nodes=2"),
        ({"rdzv_conf": {"join_timout": 3}}, "'join_timout'"),
        ({"rdzv_conf": {"join_timeout": 0}}, "'join_timeout': 0"),
        ({"rdzv_conf": {"join_timeout": "soon"}}, "'join_timeout': 'soon'"),
        ({"rdzv_conf": {"secret": ""}}, "'secret'"),
        ({"rdzv_conf": "join_timeout=3"}, "rdzv_conf=*** is not allowed; pass a dict"),
    ],
)
def test_contradictory_settings_of_several_notebooks_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        LaunchConfig(**settings)


def test_several_notebooks_work_with_either_back_end() -> None:
    assert LaunchConfig(num_nodes=2, node_rank=1).rdzv_backend == "static"
    elastic = LaunchConfig(num_nodes=3, rdzv_backend="c10d", min_nodes=2, rdzv_endpoint="10.0.0.1:29400")
    assert elastic.rendezvous_address == ("10.0.0.1", 29400)
    assert LaunchConfig(num_nodes=2, min_nodes=2).min_nodes == 2


def test_the_repr_of_a_configuration_hides_the_secret() -> None:
    assert "hush" not in repr(LaunchConfig(num_nodes=2, rdzv_conf={"secret": "hush"}))
