"""Forms over any dataclass, made of plain ipywidgets and checked by the dataclass on each change."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

import ipywidgets

from notebook_accelerate.launch.report.markup import Markup, element
from notebook_accelerate.widgets.fields import TEXT_FORMATS, Field, summary, text_of
from notebook_accelerate.widgets.form_draft import Checked, FormDraft
from notebook_accelerate.widgets.panel_elements import alert, style_widget, widget_bundle, with_classes
from notebook_accelerate.widgets.shared_models import SharedModels

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
        self._rows: dict[str, _Row] = {}
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

    def _row(self, name: str) -> _Row:
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


class _Row:
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


class _TextRow(_Row):
    def make(self) -> Any:
        text_format = TEXT_FORMATS[self.field.kind]
        settings = {"placeholder": self._placeholder(text_format.hint), "continuous_update": True}
        if text_format.many_lines:
            return self._make(ipywidgets.Textarea, rows=2, **settings)
        return self._make(ipywidgets.Text, **settings)

    def _placeholder(self, hint: str) -> str:
        default = text_of(self.field, self.field.default).replace("\n", " ")
        return f"{default} (default)" if default else (f"{_NOT_SET} ({hint})" if hint else _NOT_SET)


class _FlagRow(_Row):
    def make(self) -> Any:
        return self._make(ipywidgets.Checkbox, indent=True)


class _ChoiceRow(_Row):
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


class _CodeRow(_Row):
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


def _flag_row(form: Form, field: Field) -> _Row:
    return _ChoiceRow(form, field) if field.optional else _FlagRow(form, field)


_ROW_TYPES: dict[str, Callable[[Form, Field], _Row]] = {
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
