"""Forms over any dataclass, made of plain ipywidgets and checked by the dataclass on each change."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum
from functools import cached_property
from html import escape
from typing import Any

import ipywidgets

from notebook_accelerate.config import environ
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.plain_values import shown_value
from notebook_accelerate.launch.report.markup import LEFT, Markup, element, html_table
from notebook_accelerate.widgets.fields import (
    TEXT_FORMATS,
    Field,
    FieldError,
    fields_of,
    groups_of,
    parse,
    summary,
    text_of,
)
from notebook_accelerate.widgets.panel_elements import SharedModels, alert, style_widget, widget_bundle, with_classes

LABEL_WIDTH, INPUT_WIDTH = "16em", "34em"
"""Widths of a label, which the style sheet knows too, and of a label with its input."""
_NOT_SET = "default"
_NOT_BUILT = "The fields appear here as soon as no cell is running."
Groups = Sequence[tuple[str, Sequence[str]]]


class Form:
    """A form for a dataclass.

    Widgets are created when they are first shown: the form's on the first use of ``widget``, those of a folded group
    when it is opened. A form of a hundred fields would send 700 messages at once, and a kernel drops messages that a
    slow server has not taken.

    Args:
        cls: The dataclass, or a draft of one that another form holds.
        value: The initial instance; None: the defaults.
        title: The caption of the static form; "": the name of the class.
        choices: Allowed values by field, for types that do not list them.
        groups: Titles and fields; the first group is open, the others are folded. Fields without a group come last.
        names: Only these fields; None: all.
        on_change: Called with the checked entries after each change, on the thread of the change.
        models: The layouts and styles of the panel that the form is a part of, which has the style sheet; None: the
            form is shown on its own.
    """

    def __init__(
        self,
        cls: type[Any] | FormDraft,
        value: Any = None,
        *,
        title: str = "",
        choices: Mapping[str, Sequence[Any]] | None = None,
        groups: Groups | None = None,
        names: Iterable[str] | None = None,
        on_change: Callable[[Checked], None] | None = None,
        models: SharedModels | None = None,
    ) -> None:
        self.draft = cls if isinstance(cls, FormDraft) else FormDraft(cls, value, choices=choices, names=names)
        self.title = title or self.draft.cls.__name__
        self._on_change = on_change
        self._lock = threading.RLock()
        self._loading = False
        self._groups = _complete(groups or (), [entry.name for entry in self.draft.fields])
        self._kinds = {entry.name: entry for entry in self.draft.fields}
        self._rows: dict[str, _FieldRow] = {}
        self._pages: list[Any] = []
        self._titles: dict[int, str] = {}
        self._is_part = models is not None
        self.models = models or SharedModels()

    # ---- widgets, created when they are first shown

    @cached_property
    def widget(self) -> Any:
        """The form's widget."""
        make = self.models.make
        hint = make(ipywidgets.HTML, value=element("span", _NOT_BUILT, class_="na-help"))
        self._pages = [make(ipywidgets.VBox, children=[hint]) for _ in self._groups]
        self._folds = make(ipywidgets.Accordion, children=self._pages[1:], selected_index=None)
        self._folds.observe(self._unfolded, "selected_index")
        parts = [*self._pages[:1], *([self._folds] if self._pages[1:] else [])]
        sheet = [] if self._is_part else [style_widget("forms.css")]
        whole = with_classes(make(ipywidgets.VBox, children=[*sheet, *parts]), "na-form")
        if self._pages:
            self._open(0)
        self._show(self.draft.check())
        return whole

    def _unfolded(self, change: Any) -> None:
        if change["new"] is not None:
            with self._lock:
                self._open(1 + change["new"])

    def _open(self, index: int) -> None:
        """Create the rows of a group, if they do not exist."""
        names = self._groups[index][1]
        if all(name in self._rows for name in names):
            return
        made = {name: _ROW_TYPES.get(self._kinds[name].kind, _TextRow)(self, self._kinds[name]) for name in names}
        self._rows |= made
        errors = self.draft.check().errors
        for name, field_row in made.items():
            field_row.show_error(errors.get(name, ""))
        self._pages[index].children = [field_row.widget for field_row in made.values()]
        self._pages[index].add_class("na-fields")

    def _row(self, name: str) -> _FieldRow:
        assert self.widget is not None  # creates the pages
        with self._lock:
            self._open(next(index for index, (_, names) in enumerate(self._groups) if name in names))
            return self._rows[name]

    # ---- values in and out

    @property
    def value(self) -> Any:
        """The dataclass's instance.

        Raises:
            ValueError: Entries are not allowed; the message has a line for each.
        """
        checked = self.checked
        if checked.errors:
            raise ValueError("\n".join(checked.errors.values()))
        return checked.value

    @value.setter
    def value(self, value: Any) -> None:
        with self._lock:
            self.draft.load(value)
            self.reload()
            self.check()

    def reload(self) -> None:
        """Show the entries of the draft again, after they were changed elsewhere."""
        with self._lock:
            self._loading = True
            try:
                for field_row in self._rows.values():
                    field_row.load()
            finally:
                self._loading = False
            self._show(self.draft.check())

    @property
    def checked(self) -> Checked:
        """The checked entries; never raises."""
        return self.draft.check()

    @property
    def errors(self) -> dict[str, str]:
        """Errors by field; empty if there are none."""
        return dict(self.checked.errors)

    def input(self, name: str) -> Any:
        """Return the input widget of a field."""
        return self._row(name).input

    def note(self, name: str) -> str:
        """Return the HTML beside a field: its help text and its error."""
        return str(self._row(name).note.value)

    def nested(self, name: str) -> Form:
        """Return the form of a nested dataclass.

        Raises:
            ValueError: The field is not nested, or its box is not ticked.
        """
        form = getattr(self._row(name), "form", None)
        if form is None:
            raise ValueError(f"{name} has no form now; tick its box first: form.input({name!r}).value = True")
        return form  # type: ignore[no-any-return]

    # ---- changes

    def enter(self, name: str, raw: Any) -> None:
        """Set the entry of a field and check all entries."""
        with self._lock:
            if not self._loading:
                self.draft.entries[name] = raw
                self.check()

    def check(self) -> None:
        """Check all entries, show the errors, and call ``on_change``."""
        with self._lock:
            checked = self.draft.check()
            self._show(checked)
            if self._on_change is not None:
                self._on_change(checked)

    def _show(self, checked: Checked) -> None:
        wrong = {name.partition(".")[0] for name in checked.errors}
        for name, field_row in self._rows.items():
            field_row.show_error(checked.errors.get(name, ""))
        for index, (title, names) in enumerate(self._groups[1:] if self._pages else ()):
            count = len(wrong.intersection(names))
            shown = f"{title} ({count} to correct)" if count else title
            if self._titles.get(index) != shown:
                self._titles[index] = shown
                self._folds.set_title(index, shown)

    # ---- without widgets

    @property
    def html(self) -> str:
        """The entries that differ from the defaults, as a table."""
        return self.draft.html(self.title)

    @property
    def text(self) -> str:
        """The entries that differ from the defaults, as plain text."""
        return self.draft.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        static = {"text/html": self.html, "text/plain": f"{self.title}\n{self.text}"}
        return widget_bundle(self.widget, static)


class _FieldRow:
    """One field: its input widget, and a note beside it."""

    def __init__(self, form: Form, field: Field) -> None:
        self.form_of, self.field = form, field
        self.note = form.models.make(ipywidgets.HTML, value=self._aside(""))
        self.input = self.make()
        self.load()
        self.input.observe(self._changed, names="value")
        self.widget = form.models.make(ipywidgets.HBox, children=[self.input, self.note])

    def make(self) -> Any:
        """Return the input widget, without its value."""
        raise NotImplementedError

    def _make(self, widget: Callable[..., Any], **settings: Any) -> Any:
        make = self.form_of.models.make
        return make(widget, width=INPUT_WIDTH, label=LABEL_WIDTH, description=self.field.name, **settings)

    def shown(self, raw: Any) -> Any:
        """Return the widget's value for an entry."""
        return raw

    def read(self, value: Any) -> Any:
        """Return the entry for the widget's value."""
        return value

    def load(self) -> None:
        """Show the entry of the draft."""
        self.input.value = self.shown(self.form_of.draft.entries[self.field.name])

    def help(self) -> str:
        """Return the help text."""
        return self.field.help

    def show_error(self, error: str) -> None:
        """Show the error of the entry; "" removes it."""
        html = self._aside(error)
        if self.note.value != html:
            self.note.value = html
            (self.input.add_class if error else self.input.remove_class)("na-invalid")

    def _aside(self, error: str) -> Markup:
        text = element("span", _with_code(self.help()), class_="na-help")
        return element("div", text, alert(error) if error else "", class_="na-aside")

    def _changed(self, change: Any) -> None:
        self.form_of.enter(self.field.name, self.read(change["new"]))


class _TextRow(_FieldRow):
    def make(self) -> Any:
        text_format = TEXT_FORMATS[self.field.kind]
        settings = {"placeholder": self._placeholder(text_format.hint), "continuous_update": True}
        if text_format.many_lines:
            return self._make(ipywidgets.Textarea, rows=2, **settings)
        return self._make(ipywidgets.Text, **settings)

    def _placeholder(self, hint: str) -> str:
        default = text_of(self.field, self.field.default).replace("\n", " ")
        return f"{default} (default)" if default else (f"{_NOT_SET} ({hint})" if hint else _NOT_SET)


class _FlagRow(_FieldRow):
    def make(self) -> Any:
        return self._make(ipywidgets.Checkbox, indent=True)


class _ChoiceRow(_FieldRow):
    """A list of choices. It works with labels, so that None can be one of the values."""

    def make(self) -> Any:
        flag = self.field.kind == "flag"
        values = [("yes", True), ("no", False)] if flag else [(_label(value), value) for value in self.field.choices]
        self._values = [*([(_NOT_SET, None)] if self.field.optional else []), *values]
        return self._make(ipywidgets.Dropdown, options=[label for label, _ in self._values])

    def shown(self, raw: Any) -> Any:
        known = [label for label, value in self._values if value == raw and type(value) is type(raw)]
        if not known and raw is not None:  # set in code: an object, or a value that is not in the list
            self._values.append((_label(raw), raw))
            self.input.options = [label for label, _ in self._values]
            return _label(raw)
        return known[0] if known else _NOT_SET

    def read(self, value: Any) -> Any:
        return next(entry for label, entry in self._values if label == value)


class _CodeRow(_FieldRow):
    """A value that can only be created in code: shown, but not entered."""

    def make(self) -> Any:
        return self._make(ipywidgets.Text, disabled=True)

    def shown(self, raw: Any) -> Any:
        return "set in code only" if raw is None else f"set in code: {raw!r}"

    def _changed(self, change: Any) -> None:
        """The text is not an entry."""


class _NestedRow(_FlagRow):
    """A box that opens the form of another dataclass below it. The form is created when it is first opened."""

    form: Form | None = None

    def __init__(self, form: Form, field: Field) -> None:
        # Its own layout: it is hidden while the box is not ticked.
        self._below = with_classes(ipywidgets.VBox(layout={"display": "none"}), "na-nested")
        super().__init__(form, field)
        self.widget = form.models.make(ipywidgets.VBox, children=[self.widget, self._below])

    def load(self) -> None:
        super().load()
        if not self.field.optional:
            self.input.disabled = True
        self._open(bool(self.input.value))
        if self.form is not None:
            self.form.reload()

    def _open(self, wanted: bool) -> None:
        if wanted and self.form is None:
            draft = self.form_of.draft.nested(self.field.name)
            self.form = Form(draft, on_change=lambda _: self.form_of.check(), models=self.form_of.models)
        self._below.children = (self.form.widget,) if wanted and self.form is not None else ()
        self._below.layout.display = "" if wanted else "none"

    def help(self) -> str:
        return self.field.help or (summary(self.field.nested) if self.field.nested else "")

    def _changed(self, change: Any) -> None:
        self._open(bool(change["new"]))
        super()._changed(change)


def _flag_row(form: Form, field: Field) -> _FieldRow:
    return _ChoiceRow(form, field) if field.optional else _FlagRow(form, field)


_ROW_TYPES: dict[str, Callable[[Form, Field], _FieldRow]] = {
    "flag": _flag_row,
    "choice": _ChoiceRow,
    "code": _CodeRow,
    "nested": _NestedRow,
}


def _complete(groups: Groups, names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Return the groups, and one more with the fields that are in none."""
    others = [name for name in names if not any(name in group for _, group in groups)]
    return [*groups, *([("More" if groups else "", others)] if others else [])]


def _label(value: Any) -> str:
    return str(getattr(value, "value", value))


def _with_code(text: str) -> Markup:
    """Return a text with its `names` in backquotes as code elements."""
    return Markup(re.sub(r"``?([^`]+)``?", r"<code>\1</code>", escape(text)))


# ---- the order of the fields in the config panel

LAUNCH_GROUPS = groups_of(LaunchConfig)
TRAINING_GROUPS = (
    ("", ("batch_size", "gradient_accumulation_steps")),
    (
        "Data, projects, compilation",
        (
            "dataloader_config", "gradient_accumulation_plugin", "project_config", "dynamo_plugin", "log_with",
            "step_scheduler_with_optimizer",
        ),
    ),
    (
        "Arguments of torch and fp8 recipes",
        (
            "ddp_kwargs", "autocast_kwargs", "scaler_kwargs", "process_group_kwargs", "profile_kwargs",
            "torchao_recipe", "transformer_engine_recipe", "msamp_recipe",
        ),
    ),
    (
        "Sharded and parallel training",
        ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config", "torch_tp_plugin"),
    ),
)  # fmt: skip


# ---- entries: their values, their errors, and the instance that they make


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of checking a draft."""

    value: Any = None
    """The dataclass's instance; None: there are errors."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Errors by field, dotted for nested fields; "" for errors of no single field."""


class FormDraft:
    """The entries of a form over a dataclass, without the form.

    Args:
        cls: The dataclass.
        value: The initial instance; None: the defaults.
        choices: Allowed values by field, for types that do not list them.
        names: Only these fields; None: all.
    """

    def __init__(
        self,
        cls: type[Any],
        value: Any = None,
        *,
        choices: Mapping[str, Sequence[Any]] | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        self.cls = cls
        self.fields = fields_of(cls, choices, names)
        self.entries: dict[str, Any] = {}
        self._nested: dict[str, FormDraft] = {}
        self.load(value)

    def load(self, value: Any) -> None:
        """Set all entries from an instance; None sets the defaults.

        Raises:
            ValueError: It is an instance of another class.
        """
        if value is not None and not isinstance(value, self.cls):
            raise ValueError(f"{value!r} is not a {self.cls.__name__}; pass one: form.value = {self.cls.__name__}(...)")
        plain = self._plain_instance() if value is not None else None
        for entry in self.fields:
            given = entry.default if value is None else getattr(value, entry.name)
            if plain is not None and given == getattr(plain, entry.name):
                given = entry.default  # set by the class itself, not by the user
            self._put(entry, given)

    def _plain_instance(self) -> Any:
        """Return an instance created without arguments or environment variables; None if that is not possible."""
        with environ.ignored():
            try:
                return self.cls()
            except Exception:  # noqa: BLE001 - required fields, or a package that is not installed
                return None

    def _put(self, entry: Field, given: Any) -> None:
        if entry.kind == "nested":
            present = given is not None and given is not MISSING
            self.entries[entry.name] = present or not entry.optional
            if self.entries[entry.name]:
                self.nested(entry.name).load(given if present else None)
        elif entry.kind in {"flag", "choice", "code"}:
            self.entries[entry.name] = _member(entry, given)
        else:
            self.entries[entry.name] = text_of(entry, given)

    def nested(self, name: str) -> FormDraft:
        """Return the draft of a nested dataclass, created on first use."""
        if name not in self._nested:
            nested = next(entry.nested for entry in self.fields if entry.name == name)
            assert nested is not None, f"{name} is not a nested dataclass"
            self._nested[name] = FormDraft(nested, choices=CHOICES.get(nested.__name__))
        return self._nested[name]

    def check(self) -> Checked:
        """Create the instance, with the checks of the dataclass itself, and collect the errors by field."""
        given, errors = self._parsed()
        if any(entry.default is MISSING and entry.name not in given for entry in self.fields):
            return Checked(errors=errors)
        value = None
        for _ in range(len(given) + 1):
            try:
                value = self.cls(**given)
                break
            except Exception as error:  # noqa: BLE001 - any error of the class is shown to the user
                message = str(error) or type(error).__name__
                name = _field_in(message, given)
                errors.setdefault(name, message)
                if name not in given:
                    break
                del given[name]  # the next attempt shows further errors
        return Checked(errors=errors) if errors else Checked(value=value)

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by field, without entries that are not allowed."""
        return self._parsed()[0]

    def _parsed(self) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for entry in self.fields:
            try:
                value = self._value(entry, errors)
            except FieldError as error:
                errors[entry.name] = str(error)
                continue
            if value is MISSING:
                errors.setdefault(entry.name, f"{entry.name} is required")
            elif type(value) is not type(entry.default) or value != entry.default:
                values[entry.name] = value
        return values, errors

    def _value(self, entry: Field, errors: dict[str, str]) -> Any:
        raw = self.entries[entry.name]
        if entry.kind == "nested":
            if not raw:
                return None
            checked = self.nested(entry.name).check()
            errors.update({f"{entry.name}.{name}".rstrip("."): text for name, text in checked.errors.items()})
            return entry.default if checked.errors else checked.value
        return raw if entry.kind in {"flag", "choice", "code"} else parse(entry, raw)

    # ---- the static form

    def rows(self, prefix: str = "") -> list[tuple[str, str, str]]:
        """Return name, value and help of each field whose entry differs from the default."""
        values, errors = self._parsed()
        found = []
        for entry in self.fields:
            name = prefix + entry.name
            if entry.kind == "nested" and self.entries[entry.name]:
                found += self.nested(entry.name).rows(f"{name}.") or [(name, "defaults", entry.help)]
            elif entry.name in values:
                found.append((name, shown_code(entry.name, values[entry.name]), entry.help))
            elif entry.name in errors:
                raw = shown_value(entry.name, self.entries[entry.name])
                found.append((name, f"{raw!s} (not allowed)", entry.help))
        return found

    def text(self) -> str:
        """Return the entries that differ from the defaults, as plain text."""
        rows = self.rows()
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value, _ in rows) or "defaults"

    def html(self, caption: str) -> Markup:
        """Return the entries that differ from the defaults, as a table without scripts or style sheets.

        Args:
            caption: Its caption.
        """
        title, rows = element("strong", caption), self.rows()
        if not rows:
            return element("p", title, ": defaults")
        cells = [(name, element("code", value), help_text) for name, value, help_text in rows]
        head, columns = ("setting", "value", "description"), [LEFT] * 3
        return html_table(head, cells, caption=element("caption", title, **LEFT), columns=columns)


CHOICES: dict[str, Mapping[str, Sequence[Any]]] = {}
"""Allowed values by class name and field, for types that do not list them; panels add their own rows."""


def _member(entry: Field, given: Any) -> Any:
    """Return the choice that equals ``given``, such as an enum's member for its value."""
    return next((choice for choice in entry.choices if choice == given), given)


def _field_in(message: str, given: Mapping[str, Any]) -> str:
    """Return the changed field that a message names first, preferably as ``name=``; "" if it names none."""
    for pattern in (r"\b{}=", r"\b{}\b"):
        positions = {name: found.start() for name in given if (found := re.search(pattern.format(name), message))}
        if positions:
            return min(positions, key=lambda name: positions[name])
    return next(iter(given)) if len(given) == 1 else ""


def shown_code(name: str, value: object) -> str:
    """Return the expression of a field's value without secrets, to be shown."""
    return code_of(shown_value(name, value), field=shown_code)


def code_of(value: object, field: Callable[[str, Any], str] = lambda _, value: code_of(value)) -> str:
    """Return the expression of ``value``: dataclasses with the fields that were changed, enums by value.

    Args:
        value: Any value of a form.
        field: Returns the expression of a field of a dataclass.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        draft = FormDraft(type(value), value)
        inner = ", ".join(f"{name}={field(name, entry)}" for name, entry in draft.changed().items())
        return f"{type(value).__name__}({inner})"
    if hasattr(value, "total_seconds"):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, list):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{code_of(key)}: {code_of(entry)}" for key, entry in value.items()) + "}"
    plain = value.value if isinstance(value, Enum) else value
    # JSON's escapes are Python's too, and formatters prefer double quotes.
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else repr(plain)
