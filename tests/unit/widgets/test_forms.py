"""Forms over dataclasses: their entries, errors and values."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional

import ipywidgets
import pytest

from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.config.kwargs_handlers import DataLoaderConfiguration, GradientAccumulationPlugin
from notebook_accelerate.config.launch_config import START_METHODS, LaunchConfig
from notebook_accelerate.widgets.fields import fields_of, summary
from notebook_accelerate.widgets.forms import Form, FormDraft, code_of
from notebook_accelerate.widgets.training_options import TrainingOptions


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Inner:
    """What is inside."""

    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size!r} is not allowed; pass 0 or more")


@dataclasses.dataclass
class Everything:
    """One field of each kind.

    Args:
        count: How many there are,
            over two lines.
        name: Said twice; the literal after the field wins.
    """

    required: str
    flag: bool = False
    maybe: bool | None = None
    count: int = 3
    limit: int | None = None
    rate: float = 0.5
    name: str = "a"
    """What it is ``called``."""
    folder: Path = Path("out")
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow"] | None = None
    names: list[str] = dataclasses.field(default_factory=list)
    old: Optional[int] = None  # noqa: UP045 - older code writes it
    wait: timedelta | None = None
    env: Mapping[str, str] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    port: str | int = "80"
    inner: Inner | None = None
    always: Inner = dataclasses.field(default_factory=Inner)
    made: Unknown | None = None  # type: ignore[name-defined]  # noqa: F821
    derived: int = dataclasses.field(default=0, init=False)


ENTERED = [
    ("flag", True, True),
    ("maybe", "no", False),
    ("count", "1_000", 1000),
    ("limit", "7", 7),
    ("rate", "1e-3", 0.001),
    ("name", "b c", "b c"),
    ("folder", "a/b", Path("a/b")),
    ("colour", "blue", Colour.BLUE),
    ("mode", "slow", "slow"),
    ("names", "a\n\n b ", ["a", "b"]),
    ("old", "5", 5),
    ("wait", "90", timedelta(seconds=90)),
    ("env", "A=1\nB=x=y", {"A": "1", "B": "x=y"}),
    ("settings", "depth=3\nname=big", {"depth": 3, "name": "big"}),
    ("port", "8080", 8080),
    ("port", "auto", "auto"),
]


@pytest.mark.parametrize(("name", "raw", "value"), ENTERED)
def test_entries_become_values_of_the_fields_type(name: str, raw: Any, value: Any) -> None:
    form = Form(Everything, Everything("x"))
    form.input(name).value = raw
    assert form.errors == {}
    assert getattr(form.value, name) == value
    assert type(getattr(form.value, name)) is type(value)


@pytest.mark.parametrize(("name", "raw", "value"), ENTERED)
def test_values_are_shown_and_read_unchanged(name: str, raw: Any, value: Any) -> None:
    form = Form(Everything, Everything("x"))
    given = dataclasses.replace(Everything("x"), **{name: value})
    form.value = given
    assert form.value == given
    assert form.input(name).value == {"1_000": "1000", "1e-3": "0.001", "a\n\n b ": "a\nb"}.get(raw, raw)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("count", "three", "count='three' is not a whole number"),
        ("count", "", "count is required"),
        ("rate", "fast", "rate='fast' is not a number"),
        ("wait", "soon", "wait='soon' is not a number of seconds"),
        ("env", "A", "env: line 1 is not NAME=value"),
    ],
)
def test_invalid_entries_show_an_error_until_they_are_corrected(name: str, raw: str, message: str) -> None:
    form = Form(Everything, Everything("x"))
    before = form.input(name).value
    form.input(name).value = raw
    assert message in form.errors[name]
    assert 'role="alert"' in form.note(name)
    assert "na-invalid" in form.input(name)._dom_classes
    with pytest.raises(ValueError, match=re.escape(message)):
        _ = form.value
    form.input(name).value = before
    assert form.errors == {}
    assert "alert" not in form.note(name)
    assert "na-invalid" not in form.input(name)._dom_classes


def test_a_missing_required_field_is_an_error() -> None:
    form = Form(Everything)
    assert form.errors == {"required": "required is required: write a value"}
    form.input("required").value = "here"
    assert form.value == Everything("here")


def test_the_dataclass_checks_and_every_invalid_field_has_an_error() -> None:
    form = Form(LaunchConfig, choices={"start_method": START_METHODS})
    form.input("num_processes").value = "0"
    form.input("max_restarts").value = "-2"
    form.input("timeout").value = "x"
    assert set(form.errors) == {"num_processes", "max_restarts", "timeout"}
    assert form.errors["num_processes"] == _refusal(num_processes=0)
    assert form.errors["max_restarts"] == _refusal(max_restarts=-2)


def test_an_error_of_two_fields_is_shown_at_a_changed_one() -> None:
    form = Form(LaunchConfig)
    form.input("node_rank").value = "1"
    assert form.errors == {"node_rank": _refusal(node_rank=1)}
    form.input("num_nodes").value = "2"
    assert form.value == LaunchConfig(node_rank=1, num_nodes=2)


def _refusal(**values: Any) -> str:
    with pytest.raises(ValueError, match="=") as caught:
        LaunchConfig(**values)
    return str(caught.value)


def test_help_texts_are_literals_after_fields_and_docstrings() -> None:
    texts = {field.name: field.help for field in fields_of(Everything)}
    assert texts["count"] == "How many there are, over two lines."
    assert texts["name"] == "What it is ``called``."
    form = Form(Everything, Everything("x"))
    assert "What it is <code>called</code>." in form.note("name")
    launch = {field.name: field.help for field in fields_of(LaunchConfig)}
    assert all(launch.values())
    assert summary(Inner) == "What is inside."


def test_types_that_only_type_checkers_import_are_ignored() -> None:
    kinds = {field.name: field.kind for field in fields_of(FullyShardedDataParallelPlugin)}
    assert kinds["sharding_strategy"] == "text"  # str | ShardingStrategy | None
    assert kinds["cpu_offload"] == "flag"
    assert kinds["auto_wrap_policy"] == "choice"
    assert kinds["param_init_fn"] == "code"
    assert {field.name: field.kind for field in fields_of(Everything)}["made"] == "code"


def test_fields_that_the_constructor_does_not_take_are_left_out() -> None:
    assert "derived" not in {field.name for field in fields_of(Everything)}


def test_a_nested_dataclass_opens_with_its_box_and_is_checked_too() -> None:
    form = Form(Everything, Everything("x"))
    with pytest.raises(ValueError, match="tick its box"):
        form.nested("inner")
    form.input("inner").value = True
    form.nested("inner").input("size").value = "-1"
    assert form.errors == {"inner.size": "size=-1 is not allowed; pass 0 or more"}
    assert "alert" in form.nested("inner").note("size")
    form.nested("inner").input("size").value = "4"
    assert form.value.inner == Inner(4)
    form.input("inner").value = False
    assert form.value.inner is None
    form.nested("always").input("size").value = "2"
    assert form.value.always == Inner(2)


def test_values_of_nested_dataclasses_are_shown_and_read() -> None:
    form = Form(TrainingOptions)
    given = TrainingOptions(
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4),
        dynamo_plugin=TorchDynamoPlugin(backend="INDUCTOR", mode="max-autotune"),  # type: ignore[arg-type]
    )
    form.value = given
    assert form.value == given
    assert form.nested("dataloader_config").input("dispatch_batches").value == "no"
    form.value = TrainingOptions()
    assert form.value == TrainingOptions()
    assert form.input("dataloader_config").value is False


def test_values_that_the_class_sets_itself_are_not_entries() -> None:
    draft = FormDraft(TorchDynamoPlugin, TorchDynamoPlugin(backend="EAGER"))  # type: ignore[arg-type]
    assert list(draft.changed()) == ["backend"]


def test_a_variable_of_the_environment_does_not_hide_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    form = Form(TorchDynamoPlugin)
    assert form.value.backend == "INDUCTOR"
    form.input("backend").value = "NO"
    assert form.value.backend == "NO"


def test_objects_set_in_code_are_kept() -> None:
    marker = object()
    given = Everything("x", made=marker)
    form = Form(Everything, given)
    assert form.input("made").disabled
    assert form.value.made is marker


def test_each_change_calls_on_change_once_also_with_errors() -> None:
    told: list[Any] = []
    form = Form(LaunchConfig, on_change=told.append)
    form.input("num_processes").value = "2"
    form.input("num_processes").value = "x"
    assert [checked.value.num_processes if checked.value else None for checked in told] == [2, None]
    form.value = LaunchConfig(num_processes=3, max_restarts=1)
    assert len(told) == 3
    assert told[-1].value == LaunchConfig(num_processes=3, max_restarts=1)


def test_every_input_has_its_fields_name_as_label() -> None:
    form = Form(Everything, Everything("x"))
    for field in form.draft.fields:
        assert form.input(field.name).description == field.name  # a <label for=...> in the browser


def test_folded_groups_show_their_number_of_errors() -> None:
    form = Form(LaunchConfig, groups=[("", ["num_processes"]), ("Limits", ["timeout", "max_restarts"])])
    folds = form.widget.children[-1]
    assert folds.selected_index is None
    form.input("timeout").value = "-1"
    assert folds.get_title(0) == "Limits (1 to correct)"
    form.input("timeout").value = ""
    assert folds.get_title(0) == "Limits"


def test_a_folded_groups_inputs_are_created_when_it_is_opened_with_its_entries_and_errors() -> None:
    form = Form(
        LaunchConfig, groups=[("", ["num_processes"]), ("Limits", ["timeout"])], names=["num_processes", "timeout"]
    )
    folds = form.widget.children[-1]
    form.enter("timeout", "soon")
    assert folds.get_title(0) == "Limits (1 to correct)"
    assert not any(isinstance(each, ipywidgets.Text) for each in _descendants(folds))
    folds.selected_index = 0
    (box,) = [each for each in _descendants(folds) if isinstance(each, ipywidgets.Text)]
    assert (box.description, box.value) == ("timeout", "soon")
    assert "is not a number" in form.note("timeout")
    box.value = "3"
    assert form.value.timeout == 3


def test_inputs_of_a_kind_share_their_layout_and_style() -> None:
    form = Form(LaunchConfig)
    found = _descendants(form.widget)
    assert len({each.layout.model_id for each in found}) <= 4
    texts = [each for each in found if type(each) is ipywidgets.Text]
    assert len(texts) > 5
    assert len({each.style.model_id for each in texts}) == 1


def _descendants(widget: Any) -> list[Any]:
    return [widget, *(below for child in getattr(widget, "children", ()) for below in _descendants(child))]


def test_the_static_forms_show_and_escape_changed_entries() -> None:
    form = Form(LaunchConfig, title="Launch")
    assert form.text == "defaults"
    form.input("rdzv_id").value = "<script>alert(1)</script>"
    form.input("num_processes").value = "2"
    assert form.text.splitlines()[0].split() == ["num_processes", "2"]
    assert "<script>" not in form.html
    assert '<th scope="row" style="text-align:left">num_processes</th>' in form.html
    assert "<strong>Launch</strong></caption>" in form.html
    shown = form._repr_mimebundle_()
    assert set(shown) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}


def test_the_static_form_includes_invalid_entries() -> None:
    form = Form(LaunchConfig)
    form.input("num_processes").value = "many<b>"
    assert "many<b> (not allowed)" in form.text
    assert "<b>" not in form.html
    assert "<b>" not in form.note("num_processes").replace("<br>", "")


@pytest.mark.parametrize(
    "value",
    [
        LaunchConfig(num_processes=2, env={"A": 'quote " and \\'}, cpu=True, use_port=0),
        TrainingOptions(log_with=["all"], dataloader_config=DataLoaderConfiguration(data_seed=3)),
        TorchDynamoPlugin(backend="INDUCTOR"),  # type: ignore[arg-type]
    ],
)
def test_the_code_of_a_value_evaluates_to_it(value: Any) -> None:
    scope = {cls.__name__: cls for cls in (LaunchConfig, TrainingOptions, TorchDynamoPlugin, DataLoaderConfiguration)}
    assert eval(code_of(value), scope) == value


def test_only_dataclasses_have_forms() -> None:
    with pytest.raises(ValueError, match="not a dataclass"):
        Form(int)
    with pytest.raises(ValueError, match="pass one"):
        Form(LaunchConfig).value = 3
    with pytest.raises(ValueError, match="no field 'nodes'"):
        fields_of(LaunchConfig, names=["nodes"])


def test_fields_in_no_group_come_last() -> None:
    form = Form(Inner, groups=[("", [])])
    assert form.widget.children[-1].get_title(0) == "More"
    form.input("size").value = "2"
    assert form.value == Inner(2)
