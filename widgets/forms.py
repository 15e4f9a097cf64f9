"""A form over any dataclass, made of its fields with plain ipywidgets, checked by the dataclass as you type."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets

from notebook_accelerate.widgets.assets import asset
from notebook_accelerate.widgets.fields import KINDS, Field, summary, text_of
from notebook_accelerate.widgets.form_draft import Checked, FormDraft

_LABEL = {"description_width": "17em"}
_INPUT = "36em"
_NOT_SET = "default"
Groups = Sequence[tuple[str, Sequence[str]]]


class Form:
    """A form for a dataclass.

    Args:
        cls: The dataclass.
        value: An instance to begin with; None: the defaults.
        title: What it is about, as the caption of its static form.
        choices: Allowed values that the fields' types do not tell, by field.
        groups: Titles and fields; the first group stands open, the others fold. Fields in no group come last.
        names: Only these fields; None: all.
        on_change: Called with what the entries are worth after each change, on whatever thread the change came.
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
        on_change: Callable[[Checked], None] | None = None,
    ) -> None:
        self._begin(FormDraft(cls, value, choices=choices, names=names), title, groups, on_change)
        self.widget.children = (style_sheet(), *self.widget.children)

    @classmethod
    def over(cls, draft: FormDraft, on_change: Callable[[Checked], None] | None = None) -> Form:
        """Return a form over entries that somebody else holds, such as those of a nested dataclass."""
        form = cls.__new__(cls)
        form._begin(draft, "", None, on_change)
        return form

    def _begin(
        self, draft: FormDraft, title: str, groups: Groups | None, on_change: Callable[[Checked], None] | None
    ) -> None:
        self.draft, self.title = draft, title
        self._on_change = on_change
        self._lock = threading.RLock()
        self._loading = False
        self._groups = _complete(groups or (), [entry.name for entry in draft.fields])
        self._rows = {entry.name: _ROW.get(entry.kind, _TextRow)(self, entry) for entry in draft.fields}
        self._folds = ipywidgets.Accordion(
            children=[self._column(names) for _, names in self._groups[1:]], selected_index=None
        )
        parts = [self._column(self._groups[0][1])]
        parts += [self._folds] if self._groups[1:] else []
        self.widget = styled(ipywidgets.VBox(parts))
        self._show(self.draft.check())

    def _column(self, names: Sequence[str]) -> ipywidgets.VBox:
        return ipywidgets.VBox([self._rows[name].widget for name in names])

    # ---- values in and out

    @property
    def value(self) -> Any:
        """The dataclass's instance.

        Raises:
            ValueError: Entries are wrong; the message has a line for each.
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
            self._tell()

    def reload(self) -> None:
        """Show the draft's entries, which somebody else has changed."""
        with self._lock:
            self._loading = True
            try:
                for row in self._rows.values():
                    row.load()
            finally:
                self._loading = False
            self._show(self.draft.check())

    @property
    def checked(self) -> Checked:
        """What the entries are worth now, without raising."""
        return self.draft.check()

    @property
    def errors(self) -> dict[str, str]:
        """What is wrong, by field; empty where nothing is."""
        return dict(self.checked.errors)

    def input(self, name: str) -> Any:
        """Return the widget in which a field is entered."""
        return self._rows[name].input

    def note(self, name: str) -> str:
        """Return the HTML beside a field: its help, and what is wrong with it."""
        return str(self._rows[name].note.value)

    def nested(self, name: str) -> Form:
        """Return the form of a nested dataclass, which its checkbox has opened.

        Raises:
            ValueError: The field is not nested, or stays at its default.
        """
        form = getattr(self._rows[name], "form", None)
        if form is None:
            raise ValueError(f"{name} has no form now; tick its box first: form.input({name!r}).value = True")
        return form  # type: ignore[no-any-return]

    # ---- changes

    def entered(self, name: str, raw: Any) -> None:
        """Take what was entered in a field, and check everything anew."""
        with self._lock:
            if not self._loading:
                self.draft.entries[name] = raw
                self._tell()

    def _tell(self) -> None:
        checked = self.draft.check()
        self._show(checked)
        if self._on_change is not None:
            self._on_change(checked)

    def nested_changed(self) -> None:
        """Check everything anew: an entry of a nested form has changed."""
        with self._lock:
            if not self._loading:
                self._tell()

    def _show(self, checked: Checked) -> None:
        wrong = {name.partition(".")[0] for name in checked.errors}
        for name, row in self._rows.items():
            row.show(checked.errors.get(name, ""))
        for index, (title, names) in enumerate(self._groups[1:]):
            count = len(wrong.intersection(names))
            self._folds.set_title(index, f"{title} ({count} to correct)" if count else title)

    # ---- how it looks where no widget is shown

    @property
    def html(self) -> str:
        """What differs from the defaults, as a table."""
        return self.draft.html(self.title or self.draft.cls.__name__)

    @property
    def text(self) -> str:
        """What differs from the defaults, as plain text."""
        return self.draft.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return bundle(self.widget, self.html, f"{self.title or self.draft.cls.__name__}\n{self.text}")


class _Row:
    """One field: the widget it is entered in, and a note beside it."""

    def __init__(self, form: Form, field: Field) -> None:
        self.form_of, self.field = form, field
        self.note = ipywidgets.HTML()
        self.note.add_class("na-aside")
        self.input = self.make()
        self.load()
        self.input.observe(self._changed, names="value")
        self.widget = ipywidgets.HBox([self.input, self.note])
        self.widget.add_class("na-row")

    def make(self) -> Any:
        """Return the widget, without its value."""
        raise NotImplementedError

    def shown(self, raw: Any) -> Any:
        """Return the widget's value for an entry."""
        return raw

    def read(self, value: Any) -> Any:
        """Return the entry for the widget's value."""
        return value

    def load(self) -> None:
        """Show the entry of the draft."""
        self.input.value = self.shown(self.form_of.draft.entries[self.field.name])

    def show(self, error: str) -> None:
        """Show what is wrong with the entry; "" for nothing."""
        alert = f'<span class="na-error" role="alert">{escape(error)}</span>' if error else ""
        html = f'<span class="na-help">{_rich(self.field.help)}</span>{alert}'
        if self.note.value != html:
            self.note.value = html
            (self.input.add_class if error else self.input.remove_class)("na-invalid")

    def _changed(self, change: Any) -> None:
        self.form_of.entered(self.field.name, self.read(change["new"]))


class _TextRow(_Row):
    def make(self) -> Any:
        kind = KINDS[self.field.kind]
        make = ipywidgets.Textarea if kind.many_lines else ipywidgets.Text
        box = make(
            description=self.field.name,
            placeholder=self._placeholder(kind.hint),
            continuous_update=True,
            style=_LABEL,
            layout=ipywidgets.Layout(width=_INPUT),
        )
        if kind.many_lines:
            box.rows = 2
        return box

    def _placeholder(self, hint: str) -> str:
        default = self.field.default
        shown = text_of(self.field, default).replace("\n", " ")
        return f"{shown} (default)" if shown else (f"{_NOT_SET} ({hint})" if hint else _NOT_SET)


class _FlagRow(_Row):
    def make(self) -> Any:
        return ipywidgets.Checkbox(
            description=self.field.name, indent=True, style=_LABEL, layout=ipywidgets.Layout(width=_INPUT)
        )


class _ChoiceRow(_Row):
    """A list to choose from; it is addressed by label, so that None can be among the values."""

    def make(self) -> Any:
        flag = self.field.kind == "flag"
        values = [("yes", True), ("no", False)] if flag else [(_label(value), value) for value in self.field.choices]
        self._values = [*([(_NOT_SET, None)] if self.field.optional else []), *values]
        return ipywidgets.Dropdown(
            description=self.field.name,
            options=[label for label, _ in self._values],
            style=_LABEL,
            layout=ipywidgets.Layout(width=_INPUT),
        )

    def shown(self, raw: Any) -> Any:
        known = [label for label, value in self._values if value == raw and type(value) is type(raw)]
        if not known and raw is not None:  # set in code: an object, or a value that the list does not have
            self._values.append((_label(raw), raw))
            self.input.options = [label for label, _ in self._values]
            return _label(raw)
        return known[0] if known else _NOT_SET

    def read(self, value: Any) -> Any:
        return next(entry for label, entry in self._values if label == value)


class _CodeRow(_Row):
    """A value that is only made in code: shown, not entered."""

    def make(self) -> Any:
        return ipywidgets.Text(
            description=self.field.name, disabled=True, style=_LABEL, layout=ipywidgets.Layout(width=_INPUT)
        )

    def shown(self, raw: Any) -> Any:
        return "set in code only" if raw is None else f"set in code: {raw!r}"

    def _changed(self, change: Any) -> None:
        """Its text is no entry."""


class _NestedRow(_Row):
    """A box that opens the form of another dataclass below it; the form is made when it is first opened."""

    form: Form | None = None

    def __init__(self, form: Form, field: Field) -> None:
        self._below = ipywidgets.VBox()
        self._below.add_class("na-nested")
        super().__init__(form, field)
        self.widget = ipywidgets.VBox([self.widget, self._below])

    def make(self) -> Any:
        return ipywidgets.Checkbox(
            description=self.field.name, indent=True, style=_LABEL, layout=ipywidgets.Layout(width=_INPUT)
        )

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
            self.form = Form.over(draft, lambda _: self.form_of.nested_changed())
        self._below.children = (self.form.widget,) if wanted and self.form is not None else ()
        self._below.layout.display = "" if wanted else "none"

    def show(self, error: str) -> None:
        help_text = self.field.help or (summary(self.field.nested) if self.field.nested else "")
        alert = f'<span class="na-error" role="alert">{escape(error)}</span>' if error else ""
        self.note.value = f'<span class="na-help">{_rich(help_text)}</span>{alert}'

    def _changed(self, change: Any) -> None:
        self._open(bool(change["new"]))
        super()._changed(change)


class _OptionalFlagRow(_ChoiceRow):
    """Yes, no, or as it is by default."""


def _flag_row(form: Form, field: Field) -> _Row:
    return _OptionalFlagRow(form, field) if field.optional else _FlagRow(form, field)


_ROW: dict[str, Callable[[Form, Field], _Row]] = {
    "flag": _flag_row,
    "choice": _ChoiceRow,
    "code": _CodeRow,
    "nested": _NestedRow,
}


def _complete(groups: Groups, names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Return the groups, with one more for the fields that are in none."""
    left = [name for name in names if not any(name in placed for _, placed in groups)]
    return [*groups, *([("More" if groups else "", left)] if left else [])]


def _label(value: Any) -> str:
    return str(getattr(value, "value", value))


def _rich(text: str) -> str:
    return re.sub(r"``?([^`]+)``?", r"<code>\1</code>", escape(text))


def styled(box: Any) -> Any:
    """Give a box the look of this project's forms, whatever the front end's theme."""
    box.add_class("na-form")
    return box


def style_sheet() -> Any:
    """Return a widget that brings the style sheet of forms along."""
    css = asset("forms.css")
    sheet = ipywidgets.HTML(f"<style>{css}</style>")
    sheet.layout.display = "none"
    return sheet


def bundle(widget: Any, html: str, text: str) -> dict[str, Any]:
    """Return what a front end is given to show a widget: live, else as HTML, else as text (ipywidgets 7 and 8)."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, "text/html": html, "text/plain": text}


__all__ = ["Form", "bundle", "style_sheet", "styled"]
