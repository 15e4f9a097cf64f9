"""The table of settings: what is derived from its entries, and what must agree with them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields

import pytest

from notebook_accelerate import LaunchConfig, notebook_launcher, utils
from notebook_accelerate.config import environ
from notebook_accelerate.config.config_file import ClusterConfig
from notebook_accelerate.config.settings import (
    SettingsSection,
    fill_unset,
    from_environment,
    help_texts,
    setting,
    settings_of,
    short_help,
)


@dataclass
class Plugin:
    """An example of a class whose fields are settings."""

    settings = SettingsSection("plugin_config", option="plugin_", variable="PLUGIN_")

    depth: int | None = setting(unset=1)
    """Number of layers.

    More than one is slow.
    """
    plugin_kind: str | None = setting(unset="flat", choices=("flat", "deep"))
    """flat or deep."""
    rate: float | None = setting()
    """A rate."""
    fast: bool | None = setting(variable="FAST", option="plugin_is_fast", unset=False)
    """Whether it is fast."""
    derived: int = 0
    """Not a setting."""


def test_names_follow_from_the_section() -> None:
    found = settings_of(Plugin)
    assert {name: (each.option, each.variable, each.kind) for name, each in found.items()} == {
        "depth": ("plugin_depth", "PLUGIN_DEPTH", int),
        "plugin_kind": ("plugin_kind", "PLUGIN_KIND", str),
        "rate": ("plugin_rate", "PLUGIN_RATE", float),
        "fast": ("plugin_is_fast", "FAST", bool),
    }
    assert [entry.default for entry in fields(Plugin)] == [None, None, None, None, 0]


def test_the_section_is_not_a_field_for_clients() -> None:
    sections = [
        Plugin,
        ClusterConfig,
        utils.DeepSpeedPlugin,
        utils.FullyShardedDataParallelPlugin,
        utils.MegatronLMPlugin,
    ]
    for cls in [*sections, utils.TorchDynamoPlugin, utils.TERecipeKwargs]:
        assert "settings" not in cls.__dataclass_fields__


def test_unset_fields_are_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUGIN_DEPTH", "3")
    monkeypatch.setenv("PLUGIN_RATE", "0.5")
    plugin = Plugin(plugin_kind="deep")
    fill_unset(plugin)
    assert plugin == Plugin(3, "deep", 0.5, False)
    with environ.ignored():
        assert from_environment(Plugin, "depth") == 1
    monkeypatch.setenv("PLUGIN_RATE", "fast")
    with pytest.raises(ValueError, match="environment variable PLUGIN_RATE='fast' is not a number"):
        fill_unset(Plugin(), "rate")


def test_texts_name_the_variable() -> None:
    texts = help_texts(Plugin)
    assert texts["depth"] == "Number of layers. More than one is slow. Read from PLUGIN_DEPTH; default: 1."
    assert texts["rate"] == "A rate. Read from PLUGIN_RATE."
    assert texts["derived"] == "Not a setting."
    assert short_help(Plugin, "depth") == "Number of layers."


def test_the_launcher_has_the_fields_of_its_configuration() -> None:
    parameters = inspect.signature(notebook_launcher).parameters
    known = settings_of(LaunchConfig)
    assert list(known) == [entry.name for entry in fields(LaunchConfig)]
    for entry in fields(LaunchConfig):
        parameter = parameters.get(entry.name)
        assert (parameter is not None) == known[entry.name].parameter, entry.name
        if parameter is not None:
            assert (parameter.default, parameter.annotation) == (entry.default, entry.type), entry.name
    own = {"function", "args", "resume", "config"}
    assert set(parameters) - set(known) == own
    described = [line.strip() for line in (notebook_launcher.__doc__ or "").splitlines()]
    listed = [name for line in described if re.match(r"[\w, ]+: ", line) for name in line.partition(":")[0].split(", ")]
    assert [name for name in listed if name in parameters] == list(parameters)


def test_the_launcher_documents_its_everyday_parameters_first() -> None:
    """Everyday parameters follow those that Accelerate has. A single line then describes the rarer ones."""
    own = list(inspect.signature(notebook_launcher).parameters)[15:]
    assert own[:9] == [
        "block", "start_method", "panel", "env", "hold_on_error", "save", "detach", "resume", "config",
    ]  # fmt: skip
    assert f"{', '.join(own[9:])}: The fields of `LaunchConfig`" in (notebook_launcher.__doc__ or "")


def test_settings_in_a_file_are_fields_of_a_launch() -> None:
    same = {each.launch for each in settings_of(ClusterConfig).values() if each.launch}
    assert same <= {entry.name for entry in fields(LaunchConfig)}
