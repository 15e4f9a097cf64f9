"""Forms for any dataclass: entries that the dataclass checks on each change, and the widget that shows them."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import anywidget
import traitlets

from notebook_accelerate.config import environ
from notebook_accelerate.config.plain_values import shown_value
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.document import Column, Group, Row, Table
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.widgets.fields import (
    Field,
    FieldError,
    content_of,
    drawn,
    fields_of,
    groups_of,
    parse,
    text_of,
    with_labels,
)
from notebook_accelerate.widgets.panel_elements import asset, script, widget_bundle

Groups = Sequence[tuple[str, Sequence[str]]]


class Form:
    """A form for a dataclass, which checks the entries on each change.

    Args:
        cls: The dataclass.
        value: The initial instance. If None, one with the defaults is created.
        title: The caption of the static form. If "", it is the name of the class.
        choices: Allowed values by field, for types that do not list them.
        groups: Titles and fields of the groups. If None, those in the class's settings are used. The first group is
            open, and the others are folded. Fields without a group come last.
        names: The fields to show. If None, all fields are shown.
        on_change: Called after each change, on the thread of the change.
        lock: A lock that is held during a change. If None, a new lock is created.

    Attributes:
        fields: The fields that the form shows.
        entries: Text, choices, and whether boxes are checked, by field.
        view: The widget that shows the form, or None if it has not been created.
    """

    def __init__(
        self,
        cls: type[Any],
        value: Any = None,
        *,
        title: str = "",
        choices: Mapping[str, Sequence[Any]] | None = None,
        groups: Groups | None = None,
        names: Iterable[str] | None = None,
        on_change: Callable[[], None] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self.fields = {entry.name: entry for entry in fields_of(cls, choices, names)}
        self.entries: dict[str, Any] = {}
        self.title = title or cls.__name__
        self.view: FormView | None = None
        self._cls, self._groups, self._on_change = cls, groups or groups_of(cls), on_change
        self._lock = lock or threading.RLock()
        self._nested: dict[str, Form] = {}
        self._choices = {name: entry.by_label() for name, entry in self.fields.items() if entry.is_choice}
        self.load(value)

    # ---- values in

    @property
    def value(self) -> Any:
        """The instance of the dataclass that the entries describe.

        Raises:
            ValueError: Some entries are not allowed; the message has a line for each.
        """
        checked = self.checked
        if checked.errors:
            raise ValueError("\n".join(checked.errors.values()))
        return checked.value

    @value.setter
    def value(self, value: Any) -> None:
        with self._lock:
            self.load(value)
            self._changed()

    def load(self, value: Any) -> None:
        """Set all entries from an instance, before the form is shown. None sets the defaults.

        Raises:
            ValueError: The value is an instance of another class.
        """
        if value is not None and not isinstance(value, self._cls):
            name = self._cls.__name__
            raise ValueError(f"{value!r} is not a {name}; pass one: form.value = {name}(...)")
        plain = self._plain_instance() if value is not None else None
        for entry in self.fields.values():
            given = entry.default if value is None else getattr(value, entry.name)
            if plain is not None and given == getattr(plain, entry.name):
                given = entry.default  # This value was set by the class, and not by the user.
            self._put(entry, given)

    def _plain_instance(self) -> Any:
        """Return an instance created without arguments or environment variables, or None if that is not possible."""
        with environ.ignored():
            try:
                return self._cls()
            except Exception:  # noqa: BLE001 - required fields, or a package that is not installed
                return None

    def _put(self, entry: Field, given: Any) -> None:
        if entry.kind == "nested":
            present = given is not None and given is not MISSING
            self.entries[entry.name] = present or not entry.optional
            if self.entries[entry.name]:
                self.nested(entry.name).load(given if present else None)
        elif entry.kind in {"flag", "choice", "code"}:
            self.entries[entry.name] = member = entry.member(given)
            if entry.is_choice:  # Keep an object that was set in code, so that it can be chosen again.
                self._choices[entry.name].setdefault(entry.label_of(member), member)
        else:
            self.entries[entry.name] = text_of(entry, given)

    def nested(self, name: str) -> Form:
        """Return the form of a nested dataclass, created on first use."""
        if name not in self._nested:
            cls = self.fields[name].nested
            assert cls is not None, f"{name} is not a nested dataclass"
            self._nested[name] = Form(cls)
        return self._nested[name]

    def enter(self, path: str, shown: str | bool) -> None:
        """Set an entry, as if the user had typed it into the form.

        Args:
            path: The field, dotted if it belongs to a nested dataclass.
            shown: The text, the label of the choice, or whether the box is checked.
        """
        name, _, inner = path.partition(".")
        entry = self.fields[name]
        with self._lock:
            if inner:
                self.nested(name).enter(inner, shown)
            elif entry.is_choice:
                self.entries[name] = self._choices[name].get(str(shown), shown) if shown else None
            elif entry.kind == "nested":
                self.entries[name] = bool(shown) or not entry.optional
                self.nested(name)
            elif entry.kind != "code":
                self.entries[name] = shown
            self._changed()

    def _changed(self) -> None:
        if self.view is not None:
            self.view.update()
        if self._on_change is not None:
            self._on_change()

    # ---- values out

    @property
    def checked(self) -> Checked:
        """The instance, or the errors that the dataclass raises."""
        given, errors = self._parsed()
        if any(entry.default is MISSING and name not in given for name, entry in self.fields.items()):
            return Checked(errors=errors)
        value = None
        for _ in range(len(given) + 1):
            try:
                value = self._cls(**given)
                break
            except Exception as error:  # noqa: BLE001 - any error of the class is shown to the user
                message = str(error) or type(error).__name__
                name = _field_in(message, given)
                errors.setdefault(name, message)
                if name not in given:
                    break
                del given[name]  # Check again without this entry, to find further errors.
        return Checked(errors=errors) if errors else Checked(value=value)

    @property
    def errors(self) -> dict[str, str]:
        """The errors of the entries, by field."""
        return dict(self.checked.errors)

    @property
    def errors_in_words(self) -> dict[str, str]:
        """The errors as the form shows them, with the labels of fields in place of their names in code."""
        return {path: in_words(error, self._labels(path)) for path, error in self.errors.items()}

    def _labels(self, path: str) -> dict[str, str]:
        """Return the labels of the fields that belong to the same dataclass as the one at ``path``."""
        outer, _, inner = path.partition(".")
        return self.nested(outer)._labels(inner) if inner else {name: each.label for name, each in self.fields.items()}

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by field, without entries that are not allowed."""
        return self._parsed()[0]

    def _parsed(self) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for name, entry in self.fields.items():
            try:
                value = self._value(entry, errors)
            except FieldError as error:
                errors[name] = str(error)
                continue
            if value is MISSING:
                errors.setdefault(name, f"{name} is required")
            elif type(value) is not type(entry.default) or value != entry.default:
                values[name] = value
        return values, errors

    def _value(self, entry: Field, errors: dict[str, str]) -> Any:
        raw = self.entries[entry.name]
        if entry.kind == "nested":
            if not raw:
                return None
            checked = self.nested(entry.name).checked
            errors.update({f"{entry.name}.{name}".rstrip("."): text for name, text in checked.errors.items()})
            return entry.default if checked.errors else checked.value
        return raw if entry.kind in {"flag", "choice", "code"} else parse(entry, raw)

    # ---- the live form

    @property
    def widget(self) -> FormView:
        """The widget that shows the form, created on first use."""
        return self.view or FormView({"form": self}, self.parts("form"))

    def parts(self, name: str) -> tuple[Part, ...]:
        """Return the groups of fields for a view that has the form under this name."""
        grouped = {field for _, fields in self._groups for field in fields}
        others = [field for field in self.fields if field not in grouped]
        groups = [*self._groups, *([("More", others)] if others else [])]
        return tuple(
            Part(kind="fields", id=name, title=title if index else "", names=tuple(fields))
            for index, (title, fields) in enumerate(groups)
        )

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The fields as a view draws them."""
        return [drawn(entry) for entry in self.fields.values()]

    def shown(self) -> dict[str, str | bool]:
        """Return the contents of the inputs by field."""
        return {name: content_of(entry, self.entries[name]) for name, entry in self.fields.items()}

    def opened(self, path: str) -> Iterator[tuple[str, Form]]:
        """Return this form and the forms of nested dataclasses that have been opened, with their paths.

        Args:
            path: The path of this form.
        """
        yield path, self
        for name, form in self._nested.items():
            yield from form.opened(f"{path}.{name}")

    # ---- the static form

    @property
    def html(self) -> Markup:
        """The entries that differ from the defaults, as a table without scripts or style sheets."""
        columns = (Column(title="setting"), Column(title="value", kind="code"), Column(title="description"))
        group = Group(rows=tuple(Row(cells=cells) for cells in self.rows()))
        empty = f"{self.title}: defaults"
        title = element("strong", self.title)
        return rendering.html(Table(key="form", columns=columns, groups=(group,), caption=title, empty=empty))

    @property
    def text(self) -> str:
        """The entries that differ from the defaults, as plain text."""
        rows = self.rows()
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value, _ in rows) or "defaults"

    def rows(self, prefix: str = "") -> list[tuple[str, str, str]]:
        """Return name, value and help of each field whose entry differs from the default."""
        values, errors = self._parsed()
        found = []
        for entry in self.fields.values():
            name = prefix + entry.name
            if entry.kind == "nested" and self.entries[entry.name]:
                found += self.nested(entry.name).rows(f"{name}.") or [(name, "defaults", entry.help)]
            elif entry.name in values:
                found.append((name, shown_code(entry.name, values[entry.name]), entry.help))
            elif entry.name in errors:
                raw = shown_value(entry.name, self.entries[entry.name])
                found.append((name, f"{raw!s} (not allowed)", entry.help))
        return found

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        static = {"text/html": self.html, "text/plain": f"{self.title}\n{self.text}"}
        return widget_bundle(self.widget, static)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of checking the entries of a form."""

    value: Any = None
    """The instance of the dataclass, or None if there are errors."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Errors by field, dotted for nested fields, or under "" if they concern no single field."""


# ---- the widget


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a view. Its kind is the name of the method of ``static/forms.js`` that draws it."""

    kind: str
    """fields, text, button, copy, box, or tabs with a tab for each of its parts."""
    id: str = ""
    """The name of the form, the key of the text, or the id that a click reports."""
    title: str = ""
    """The label. Fields with a title are folded."""
    hint: str = ""
    """A description of what a click does."""
    style: str = ""
    """The CSS classes of the part."""
    names: tuple[str, ...] = ()
    """The names of the fields, in order."""
    parts: tuple[Part, ...] = ()
    """The parts inside this one."""


class FormView(anywidget.AnyWidget):
    """Forms, texts and buttons in one widget.

    The browser sends the path and the new content of the input that was changed. That entry is not sent back:
    ``entries`` is modified in place, and sent only if the entries of the forms differ from it after the change.

    Args:
        forms: The forms to show, by name.
        parts: The parts, from the top.
        on_click: Called with the id of the button that was clicked.
    """

    _esm = script("copy.js", "forms.js")
    _css = asset("palette.css") + asset("forms.css")
    parts: Any = traitlets.List().tag(sync=True)
    tables: Any = traitlets.Dict().tag(sync=True)
    """The fields of each form, and of the nested dataclasses that were opened, by the path of their form."""
    entries: Any = traitlets.Dict().tag(sync=True)
    """The contents of the inputs by path."""
    version: Any = traitlets.Int(0).tag(sync=True)
    """The number of times ``entries`` was sent, which shows if an entry was typed before the latest ones arrived."""
    errors: Any = traitlets.Dict().tag(sync=True)
    """The errors of the entries, by path."""
    suggestions: Any = traitlets.Dict().tag(sync=True)
    """Values that are offered while typing, by path."""
    texts: Any = traitlets.Dict().tag(sync=True)
    """The HTML of the texts by key; see `show`."""
    code: Any = traitlets.Unicode("").tag(sync=True)
    """The text that the copy buttons copy."""
    disabled: Any = traitlets.List().tag(sync=True)
    """The ids of the buttons that cannot be clicked now."""

    def __init__(
        self, forms: Mapping[str, Form], parts: Iterable[Part], on_click: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(parts=[asdict(part) for part in parts])
        self._lock = threading.RLock()
        self.add_class("na-form")
        self._forms, self._on_click = forms, on_click
        for form in forms.values():
            form.view = self
        self.update()
        self.on_msg(self._on_message)

    def update(self) -> None:
        """Send what has changed in the forms since the last update."""
        tables: dict[str, list[dict[str, Any]]] = {}
        entries: dict[str, str | bool] = {}
        errors: dict[str, str] = {}
        for name, form in self._forms.items():
            for path, opened in form.opened(name):
                tables[path] = opened.table
                entries |= {f"{path}.{field}": shown for field, shown in opened.shown().items()}
            errors |= {f"{name}.{field}": error for field, error in form.errors_in_words.items()}
        with self.one_message():
            self.tables, self.errors = tables, errors
            if self.entries != entries:
                self.entries, self.version = entries, self.version + 1

    def show(self, **texts: str) -> None:
        """Show texts by key. `Markup` is shown as HTML, and other strings as text."""
        with self.one_message():
            self.texts = {**self.texts, **{key: join([text]) for key, text in texts.items()}}

    @contextmanager
    def one_message(self) -> Iterator[None]:
        """Send all changes in one message at the end of the block. Other threads wait until then."""
        with self._lock, self.hold_sync():
            yield

    def enter(self, path: str, shown: str | bool) -> None:
        """Handle the change of an input."""
        form, _, name = path.partition(".")
        self.entries[path] = shown
        self._forms[form].enter(name, shown)

    def click(self, button: str) -> None:
        """Handle a click."""
        if self._on_click is not None:
            self._on_click(button)

    def _on_message(self, _: object, content: Any, __: object) -> None:
        if content.get("kind") == "click":
            self.click(content["id"])
        elif content.get("kind") == "enter":
            is_late = content["version"] != self.version
            self.enter(content["path"], content["value"])
            if is_late:
                self.send_state("entries")


def _field_in(message: str, given: Mapping[str, Any]) -> str:
    """Return the changed field that a message names first, preferably as ``name=``, or "" if it names no such field."""
    for pattern in (r"\b{}=", r"\b{}\b"):
        positions = {name: found.start() for name in given if (found := re.search(pattern.format(name), message))}
        if positions:
            return min(positions, key=lambda name: positions[name])
    return next(iter(given)) if len(given) == 1 else ""


def in_words(message: str, labels: Mapping[str, str]) -> str:
    """Return an error in the words of a form: labels instead of names, and yes and no instead of True and False.

    Args:
        message: The error of the dataclass, or of the text of a field.
        labels: The labels of the dataclass's fields by name.
    """
    words = with_labels(message, labels)
    words = re.sub(r"= (True|False)\b", lambda found: "= yes" if found[1] == "True" else "= no", words)
    return re.sub(r"\bpass\b", "enter", words)


# ---- code


def shown_code(name: str, value: object) -> str:
    """Return the code of a field's value, without secrets."""
    return code_of(shown_value(name, value), field=shown_code)


def code_of(value: object, field: Callable[[str, Any], str] = lambda _, value: code_of(value)) -> str:
    """Return the code of ``value``: dataclasses with their changed fields, and enums by value.

    Args:
        value: Any value of a form.
        field: Returns the code of a field of a dataclass.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = Form(type(value), value).changed()
        inner = ", ".join(f"{name}={field(name, entry)}" for name, entry in changed.items())
        return f"{type(value).__name__}({inner})"
    if hasattr(value, "total_seconds"):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, list):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{code_of(key)}: {code_of(entry)}" for key, entry in value.items()) + "}"
    plain = value.value if isinstance(value, Enum) else value
    # Use JSON's escapes, which Python accepts too, because formatters prefer double quotes.
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else repr(plain)
