"""Forms for dataclasses: their entries, errors and values."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.config.kwargs_handlers import DataLoaderConfiguration, GradientAccumulationPlugin
from notebook_accelerate.config.launch_config import START_METHODS, LaunchConfig
from notebook_accelerate.widgets.fields import drawn, fields_of, form_words, summary
from notebook_accelerate.widgets.forms import Checked, Form, FormView, code_of, in_words
from notebook_accelerate.widgets.training_options import TrainingOptions


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Inner:
    """An inner dataclass."""

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
        name: Described twice; the literal after the field takes precedence.
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
    form.enter(name, raw)
    assert form.errors == {}
    assert getattr(form.value, name) == value
    assert type(getattr(form.value, name)) is type(value)


@pytest.mark.parametrize(("name", "raw", "value"), ENTERED)
def test_values_are_shown_and_read_unchanged(name: str, raw: Any, value: Any) -> None:
    form = Form(Everything, Everything("x"))
    given = dataclasses.replace(Everything("x"), **{name: value})
    form.value = given
    assert form.value == given
    assert form.shown()[name] == {"1_000": "1000", "1e-3": "0.001", "a\n\n b ": "a\nb"}.get(raw, raw)


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
    before = form.shown()[name]
    form.enter(name, raw)
    assert message in form.errors[name]
    assert form.widget.errors == {f"form.{name}": form.errors_in_words[name]}
    with pytest.raises(ValueError, match=re.escape(message)):
        _ = form.value
    form.enter(name, before)
    assert form.errors == form.widget.errors == {}


def test_a_missing_required_field_is_an_error() -> None:
    form = Form(Everything)
    assert form.errors == {"required": "required is required: write a value"}
    form.enter("required", "here")
    assert form.value == Everything("here")


def test_the_dataclass_is_validated_and_every_invalid_field_has_an_error() -> None:
    form = Form(LaunchConfig, choices={"start_method": START_METHODS})
    form.enter("num_processes", "0")
    form.enter("max_restarts", "-2")
    form.enter("timeout", "x")
    assert set(form.errors) == {"num_processes", "max_restarts", "timeout"}
    assert form.errors["num_processes"] == _refusal(num_processes=0)
    assert form.errors["max_restarts"] == _refusal(max_restarts=-2)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "num_processes='two' is not a whole number; write one",
            "\"Number of processes\" = 'two' is not a whole number; write one",
        ),
        ("num_processes is required: write a number", '"Number of processes" is required: write a number'),
        (
            "node_rank=1 is out of range: num_nodes=1",
            '"Number of this machine" = 1 is out of range: "Number of machines" = 1',
        ),
        ("detach=True is not allowed; pass one", '"Keep running without this kernel" = yes is not allowed; enter one'),
        ("env: line 1 is not NAME=value", '"Environment variables": line 1 is not NAME=value'),
        (
            "name='a/b' is not allowed; no output has this name",
            "\"Name of the run\" = 'a/b' is not allowed; no output has this name",
        ),
        ("other=1 and $timeout", "other=1 and $timeout"),
    ],
)
def test_errors_under_fields_have_the_labels_of_the_form(message: str, shown: str) -> None:
    labels = {name: field.label for name, field in Form(LaunchConfig).fields.items()}
    assert in_words(message, labels) == shown


def test_an_error_of_two_fields_is_shown_at_a_changed_one() -> None:
    form = Form(LaunchConfig)
    form.enter("node_rank", "1")
    assert form.errors == {"node_rank": _refusal(node_rank=1)}
    form.enter("num_nodes", "2")
    assert form.value == LaunchConfig(node_rank=1, num_nodes=2)


def _refusal(**values: Any) -> str:
    with pytest.raises(ValueError, match="=") as caught:
        LaunchConfig(**values)
    return str(caught.value)


def test_help_texts_are_literals_after_fields_and_docstrings() -> None:
    texts = {field.name: field.help for field in fields_of(Everything)}
    assert texts["count"] == "How many there are, over two lines."
    assert texts["name"] == "What it is ``called``."
    launch = {field.name: field.help for field in fields_of(LaunchConfig)}
    assert all(launch.values())
    assert summary(Inner) == "An inner dataclass."


def test_types_that_only_type_checkers_import_are_ignored() -> None:
    kinds = {field.name: field.kind for field in fields_of(FullyShardedDataParallelPlugin)}
    assert kinds["ignored_modules"] == "text"  # The field's type is Iterable[torch.nn.Module] | str | None.
    assert kinds["cpu_offload"] == "flag"
    assert kinds["auto_wrap_policy"] == "choice"
    assert kinds["param_init_fn"] == "code"
    assert {field.name: field.kind for field in fields_of(Everything)}["made"] == "code"


def test_fields_that_the_constructor_does_not_accept_are_omitted() -> None:
    assert "derived" not in {field.name for field in fields_of(Everything)}


def test_a_nested_dataclass_opens_with_its_box_and_is_checked_too() -> None:
    form = Form(Everything, Everything("x"))
    assert "form.inner" not in form.widget.tables
    form.enter("inner", True)
    assert [field["name"] for field in form.widget.tables["form.inner"]] == ["size"]
    assert form.widget.entries["form.inner.size"] == "1"
    form.enter("inner.size", "-1")
    assert form.errors == {"inner.size": "size=-1 is not allowed; pass 0 or more"}
    assert form.widget.errors == {"form.inner.size": '"Size" = -1 is not allowed; enter 0 or more'}
    form.enter("inner.size", "4")
    assert form.value.inner == Inner(4)
    form.enter("inner", False)
    assert form.value.inner is None
    form.enter("always.size", "2")
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
    assert form.nested("dataloader_config").shown()["dispatch_batches"] == "no"
    form.value = TrainingOptions()
    assert form.value == TrainingOptions()
    assert form.shown()["dataloader_config"] is False


def test_values_that_the_class_sets_itself_are_not_entries() -> None:
    draft = Form(TorchDynamoPlugin, TorchDynamoPlugin(backend="EAGER"))  # type: ignore[arg-type]
    assert list(draft.changed()) == ["backend"]


def test_a_variable_of_the_environment_does_not_hide_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    form = Form(TorchDynamoPlugin)
    assert form.value.backend == "INDUCTOR"
    form.enter("backend", "NO")
    assert form.value.backend == "NO"


def test_objects_set_in_code_are_kept() -> None:
    marker = object()
    given = Everything("x", made=marker)
    form = Form(Everything, given)
    assert form.widget.entries["form.made"] == f"set in code: {marker!r}"
    assert form.value.made is marker
    form.value = dataclasses.replace(given, mode=marker)
    assert form.value.mode is marker
    form.enter("mode", "slow")
    form.enter("mode", str(marker))
    assert form.value.mode is marker, "the object can be chosen again"


def test_each_change_calls_on_change_once_even_with_errors() -> None:
    told: list[Checked] = []
    form = Form(LaunchConfig, on_change=lambda: told.append(form.checked))
    form.enter("num_processes", "2")
    form.enter("num_processes", "x")
    assert [checked.value.num_processes if checked.value else None for checked in told] == [2, None]
    form.value = LaunchConfig(num_processes=3, max_restarts=1)
    assert len(told) == 3
    assert told[-1].value == LaunchConfig(num_processes=3, max_restarts=1)


def _parts(form: Form) -> dict[str, tuple[str, ...]]:
    return {part["title"]: part["names"] for part in form.widget.parts}


def test_the_first_group_is_open_and_the_others_are_folded() -> None:
    groups = [("", ["num_processes"]), ("Limits", ["timeout", "max_restarts"])]
    form = Form(LaunchConfig, groups=groups, names=["num_processes", "timeout", "max_restarts"])
    assert _parts(form) == {"": ("num_processes",), "Limits": ("timeout", "max_restarts")}


def test_fields_are_drawn_with_their_label_help_default_and_choices() -> None:
    drawn = {field["name"]: field for field in Form(Everything, Everything("x")).widget.tables["form"]}
    assert (drawn["name"]["label"], drawn["maybe"]["label"]) == ("Name", "Maybe")
    assert drawn["name"]["help"] == "What it is ``called``."
    assert drawn["count"]["placeholder"] == "3 (default)"
    assert drawn["limit"]["placeholder"] == "default (a whole number)"
    assert drawn["inner"]["help"] == "An inner dataclass."
    assert drawn["maybe"]["choices"] == ["yes", "no"]
    assert drawn["colour"]["choices"] == ["red", "blue"]
    kinds = [drawn[name]["kind"] for name in ("flag", "maybe", "count", "colour", "env", "inner", "made")]
    assert kinds == ["flag", "choice", "text", "choice", "area", "nested", "code"]


# ---- messages


def _receive(view: FormView, **content: Any) -> None:
    view._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def _sent(view: FormView) -> list[dict[str, Any]]:
    """Return a list that receives the states that the view sends from now on."""
    states: list[dict[str, Any]] = []
    view.comm.send = lambda data, **_: states.append(data["state"])
    return states


def test_typed_text_is_not_sent_back() -> None:
    view = Form(LaunchConfig).widget
    sent = _sent(view)
    _receive(view, kind="enter", path="form.num_processes", value="2", version=view.version)
    assert sent == []
    _receive(view, kind="enter", path="form.num_processes", value="x", version=view.version)
    assert [list(state) for state in sent] == [["errors"]]
    assert view.entries["form.num_processes"] == "x", "views opened later get the text"


def test_entries_set_in_code_are_sent() -> None:
    form = Form(LaunchConfig)
    view, version = form.widget, form.widget.version
    sent = _sent(view)
    form.value = LaunchConfig(num_processes=2)
    assert [set(state) for state in sent] == [{"entries", "version"}]
    assert sent[0]["entries"]["form.num_processes"] == "2"
    _receive(view, kind="enter", path="form.cpu", value=True, version=version)
    assert sent[1]["entries"]["form.cpu"] is True, "the user typed it before the browser received the entries from code"


def test_a_nested_form_is_sent_when_it_is_opened() -> None:
    view = Form(TrainingOptions).widget
    assert list(view.tables) == ["form"]
    sent = _sent(view)
    _receive(view, kind="enter", path="form.dataloader_config", value=True, version=view.version)
    assert [set(state) for state in sent] == [{"tables", "entries", "version"}]
    assert sent[0]["entries"]["form.dataloader_config.even_batches"] is True


# ---- without widgets


def test_the_static_forms_show_and_escape_changed_entries() -> None:
    form = Form(LaunchConfig, title="Launch")
    assert form.text == "defaults"
    form.enter("rdzv_id", "<script>alert(1)</script>")
    form.enter("num_processes", "2")
    assert form.text.splitlines()[0].split() == ["num_processes", "2"]
    assert "<script>" not in form.html
    assert '<th scope="row" style="text-align:left">num_processes</th>' in form.html
    assert "<strong>Launch</strong></caption>" in form.html
    shown = form._repr_mimebundle_()
    assert set(shown) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}


def test_the_static_form_includes_invalid_entries() -> None:
    form = Form(LaunchConfig)
    form.enter("num_processes", "many<b>")
    assert "many<b> (not allowed)" in form.text
    assert "<b>" not in form.html


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


def test_fields_without_a_group_come_last() -> None:
    form = Form(Inner, groups=[("", [])])
    assert _parts(form) == {"": (), "More": ("size",)}
    form.enter("size", "2")
    assert form.value == Inner(2)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("Whether the call waits (True) or returns at its start (False).", "flag", "The call waits."),
        ("Whether to show a panel: auto, True or False.", "choice", "Show a panel: auto, yes or no."),
        (
            "Time limit in seconds. If None, there is no limit.",
            "number",
            "Time limit in seconds. If empty, there is no limit.",
        ),
        ("Settings of FSDP. If None, FSDP is not used.", "nested", "Settings of FSDP. If unchecked, FSDP is not used."),
        ("Whether ``save`` copies. ``block`` is then False.", "flag", "``save`` copies. ``block`` is then off."),
    ],
)
def test_help_has_the_words_of_a_form(text: str, kind: str, words: str) -> None:
    assert form_words(text, kind) == words


def _classes(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for entry in fields_of(cls):
        if entry.nested is not None:
            yield from _classes(entry.nested)


@pytest.mark.parametrize("cls", [LaunchConfig, TrainingOptions])
def test_forms_show_words_and_no_code(cls: type[Any]) -> None:
    for each in set(_classes(cls)):
        for field in map(drawn, fields_of(each)):
            shown = [field["label"], field["help"], field["placeholder"], *field["choices"]]
            assert not re.search(r"\b(None|True|False)\b", " ".join(shown)), (each, field)
            assert "_" not in field["label"], (each, field)


def test_help_refers_to_other_settings_by_their_labels() -> None:
    helps = {field.name: field.help for field in fields_of(LaunchConfig)}
    assert '"Wait until the run ends" is then off' in helps["detach"]
    assert 'static (by "Number of this machine")' in helps["rdzv_backend"]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("num_processes", "Number of processes"),
        ("block", "Wait until the run ends"),
        ("cpu", "Use only the CPU"),
    ],
)
def test_labels_have_the_words_of_a_form(name: str, label: str) -> None:
    (field,) = fields_of(LaunchConfig, names=[name])
    assert field.label == label


def test_words_are_separated_by_commas() -> None:
    form = Form(LaunchConfig, names=["tags"])
    form.enter("tags", "baseline, small,")
    assert form.value.tags == ("baseline", "small")
    form.enter("tags", "")
    assert form.value.tags == ()
