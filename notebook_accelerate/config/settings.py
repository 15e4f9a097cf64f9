"""Settings: dataclass fields that are also variables, options, keys of files, questions and rows of forms.

    @dataclass
    class Plugin:
        settings = SettingsSection("plugin_config", option="plugin_", variable="PLUGIN_")

        depth: int | None = setting(unset=1, ask="How deep?", answer=2)
        \"\"\"Number of layers.\"\"\"

If `depth` is None, it is read from the variable PLUGIN_DEPTH. It is the option ``--plugin_depth`` of ``launch`` and the
key plugin_depth of a configuration file, and ``config`` asks for it. Its help text is the string literal below it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import linecache
import re
import textwrap
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.plain_values import check_one_of

Answers = Mapping[str, Any]
MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")
RDZV_BACKENDS = ("static", "c10d")
"""Choices that launches and configuration files share."""
HARDWARE, MACHINES, LIMITS = "Hardware", "Several machines, ports", "Limits and restarts"
OUTPUT, OTHER = "Environment and output", "Other options of Accelerate"
"""Titles of groups in the form and in the help of ``launch``."""


@dataclass(frozen=True)
class SettingsSection:
    """The names under which the settings of a class appear. It is the value of the class attribute ``settings``.

    The attribute has no annotation. An annotated one would be listed in ``__dataclass_fields__``, which clients read.

    Attributes:
        key: The section of a configuration file, or "" for its top level.
        option: The prefix of the options' names.
        variable: The prefix of the variables' names.
        strategy: The strategy that the section configures, as in the option ``--use_fsdp``, or "".
        title: The heading of the section in help texts and documentation.
        presets: Whether ``launch`` passes on ``unset`` for options that are not given. ``preset`` overrides this.
        arguments: Whether fields are arguments of the library under their own names. ``argument`` overrides this.
    """

    key: str = ""
    option: str = ""
    variable: str = ""
    strategy: str = ""
    title: str = ""
    presets: bool = True
    arguments: bool = False

    @property
    def switch(self) -> str:
        """The variable that selects the strategy, or "" without a strategy."""
        return f"ACCELERATE_USE_{self.strategy.upper()}" if self.strategy else ""

    @property
    def prefix(self) -> str:
        """The part of a variable's name that comes before the option's name in capitals."""
        return self.variable.removesuffix(self.option.upper())


_DERIVED: Any = object()
"""Marks an attribute that was left out, and is therefore derived from other attributes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The names, choices and conversions of one field.

    Attributes:
        name: The field's name.
        default: The field's default.
        label: The words next to the input in a form. If "", they are derived from the name.
        kind: The type of the values of its variable and option: bool, int, float or str.
        group: The title of its group in a form and in the help of ``launch``. Forms leave out fields with None.
        launch: The field of ``LaunchConfig`` with the same meaning, for fields of a configuration file.
        choices: The values that a form offers. If left out, they are taken from a ``Literal`` in the annotation.
        variable: The environment variable that is read if the field is None, or None if there is no such variable.
        unset: The value if this variable is not set.
        read: Called with the variable's name and ``unset``; returns the value. If None, the function for ``kind`` does.
        option: The name on the command line and in a configuration file, or None if the field appears in neither.
        former: The option's name in older configuration files.
        preset: The value that ``launch`` passes on if the command line and the file set none. If left out, it is
            ``unset`` in a section with ``presets``, and otherwise None.
        parse: Converts the option's text. If None, the function for ``kind`` is called.
        switch: Whether the option is a flag, without a value.
        closed: Whether the command line rejects values that are not in ``choices``.
        ask: The question that ``config`` asks, or "" if it asks none.
        answer: The default answer: a value, or a function of the answers so far. If left out, it is ``unset``, or
            ``default`` if ``unset`` is None.
        answers: The allowed answers. If None, they are ``choices``.
        when: Called with the answers so far, by option; returns whether to ask.
        argument: The name in the library's configuration, dotted if it is nested, or None if the library does not
            have the setting. If left out, it is the field's name in a section with ``arguments``, and otherwise None.
        place: ``config`` sorts the questions of a section by place, and then by the order of the fields.
        parameter: Whether ``notebook_launcher`` has a parameter of this name, for fields of ``LaunchConfig``.
    """

    name: str = ""
    default: Any = None
    label: str = ""
    kind: type[Any] = str
    group: str | None = ""
    launch: str = ""
    choices: Sequence[Any] = ()
    variable: str | None = ""
    unset: Any = None
    read: Callable[[str, Any], Any] | None = None
    option: str | None = ""
    former: str = ""
    preset: Any = _DERIVED
    parse: Callable[[str], Any] | None = None
    switch: bool = False
    closed: bool = False
    ask: str = ""
    answer: Any = _DERIVED
    answers: tuple[Any, ...] | None = None
    when: Callable[[Answers], bool] = lambda _: True
    argument: Any = _DERIVED
    place: int = 0
    parameter: bool = True

    @property
    def source(self) -> str:
        """A sentence with the variable and its default, or "" if there is no variable."""
        if self.variable is None:
            return ""
        return f" Read from {self.variable}{'' if self.unset is None else f'; default: {self.unset}'}."


def setting(default: Any = None, **known: Any) -> Any:
    """Create a dataclass field that is a setting.

    Args:
        default: The field's default.
        known: Attributes of the field's `Setting`. Its variable and option are derived from the `SettingsSection`.
    """
    return dataclasses.field(default=default, metadata=metadata(**known))


def metadata(**known: Any) -> dict[str, Setting]:
    """Return the metadata for a required field.

    Declare the field with ``field(metadata=...)``, because mypy would take `setting` for a default.

    Args:
        known: Attributes of the field's `Setting`.
    """
    return {"setting": Setting(**known)}


def settings_of(cls: type[Any]) -> dict[str, Setting]:
    """Return the settings of a dataclass by name, in the order of the fields.

    Args:
        cls: The dataclass, with a class attribute ``settings`` if it has options or variables.
    """
    if cls not in _SETTINGS:
        entries = [entry for entry in dataclasses.fields(cls) if "setting" in entry.metadata]
        section = getattr(cls, "settings", None)
        _SETTINGS[cls] = {entry.name: _completed(entry, section) for entry in entries}
    return _SETTINGS[cls]


_SETTINGS: weakref.WeakKeyDictionary[type[Any], dict[str, Setting]] = weakref.WeakKeyDictionary()
_KINDS = {"bool": bool, "int": int, "float": float}


def _completed(entry: dataclasses.Field[Any], section: SettingsSection | None) -> Setting:
    found: Setting = entry.metadata["setting"]
    annotation = str(entry.type)
    first_type = re.match(r"\w*", annotation)
    found = replace(
        found,
        name=entry.name,
        default=entry.default,
        kind=_KINDS.get(first_type[0] if first_type else "", str),
        choices=found.choices or _literals(annotation),
    )
    if found.preset is _DERIVED:
        found = replace(found, preset=found.unset if section is None or section.presets else None)
    if found.answer is _DERIVED:
        found = replace(found, answer=found.default if found.unset is None else found.unset)
    if found.argument is _DERIVED:
        found = replace(found, argument=entry.name if section is not None and section.arguments else None)
    if section is None:
        return replace(found, option=found.option or None, variable=found.variable or None)
    name = entry.name.removeprefix(section.option)
    option = section.option + name if found.option == "" else found.option
    variable = section.variable + name.upper() if found.variable == "" and section.variable else found.variable
    return replace(found, option=option, variable=variable or None)


def _literals(annotation: str) -> tuple[str, ...]:
    """Return the strings of a ``Literal`` in an annotation."""
    found = re.search(r"Literal\[([^\]]*)\]", annotation)
    return tuple(ast.literal_eval(f"({found[1]},)")) if found else ()


def check_choices(instance: Any, *names: str) -> None:
    """Check that fields have one of their choices.

    Args:
        instance: The instance of a dataclass to check.
        names: The names of the fields.

    Raises:
        ValueError: A value is not a choice; the message lists the choices.
    """
    known = settings_of(type(instance))
    for name in names:
        check_one_of(name, getattr(instance, name), known[name].choices)


# ---- variables

_READERS: dict[type[Any], Callable[[str, Any], Any]] = {
    bool: environ.flag, int: environ.integer, float: environ.number, str: environ.text,
}  # fmt: skip


def from_environment(owner: type[Any], name: str) -> Any:
    """Return the value of a field's variable, or ``unset`` if the variable is not set.

    Args:
        owner: The dataclass that has the field.
        name: The field's name.

    Raises:
        ValueError: The variable's text does not fit the field's type.
    """
    found = settings_of(owner)[name]
    return found.unset if found.variable is None else (found.read or _READERS[found.kind])(found.variable, found.unset)


def fill_unset(instance: Any, *names: str, without: Sequence[str] = ()) -> None:
    """Set the fields that are None from their variables.

    Args:
        instance: The instance of a dataclass to change.
        names: The names of the fields. Without names, all fields with a variable are set.
        without: The names of fields to leave unchanged.

    Raises:
        ValueError: A variable's text does not fit the field's type.
    """
    known = settings_of(type(instance))
    for name in names or [each.name for each in known.values() if each.variable is not None]:
        if name not in without and getattr(instance, name) is None:
            setattr(instance, name, from_environment(type(instance), name))


# ---- help texts


def help_texts(cls: type[Any]) -> dict[str, str]:
    """Return the help texts of a class's fields: the string literals below them, or the Args of its docstring.

    Args:
        cls: The dataclass whose fields are described.

    Returns:
        One line per field. The line of a setting ends with its variable.
    """
    known = settings_of(cls) if dataclasses.is_dataclass(cls) else {}
    lines = {name: " ".join(text.split()) for name, text in _texts(cls).items()}
    return {name: f"{text}{known[name].source if name in known else ''}" for name, text in lines.items()}


def short_help(cls: type[Any], name: str) -> str:
    """Return the first paragraph of a field's help text.

    Args:
        cls: The dataclass that has the field.
        name: The field's name.
    """
    return " ".join(_texts(cls).get(name, "").partition("\n\n")[0].split())


def _texts(cls: type[Any]) -> dict[str, str]:
    if cls not in _TEXTS:
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            if dataclasses.is_dataclass(base):
                texts |= _docstring_entries(inspect.getdoc(base) or "") | _literals_after_fields(base)
        _TEXTS[cls] = texts
    return _TEXTS[cls]


_TEXTS: weakref.WeakKeyDictionary[type[Any], dict[str, str]] = weakref.WeakKeyDictionary()
_DOCSTRING_SECTIONS = re.compile(r"^(Args|Arguments|Attributes|Parameters):\s*$")
_DOCSTRING_ENTRY = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s+(.*)$")


def _docstring_entries(docstring: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    inside, name = False, ""
    for line in docstring.splitlines():
        if not line.startswith(" ") and line.strip():
            inside, name = bool(_DOCSTRING_SECTIONS.match(line)), ""
        elif inside and (found := _DOCSTRING_ENTRY.match(line.strip())) and len(line) - len(line.lstrip()) <= 4:
            name = found[1]
            texts[name] = found[2]
        elif inside and name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts


def _literals_after_fields(cls: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(_source_of_fields(cls))
    except (OSError, TypeError, SyntaxError):  # The class was defined interactively, without a source file.
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    texts = {}
    for entry, after in itertools.pairwise(body):
        if not (isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[entry.target.id] = inspect.cleandoc(str(after.value.value))
    return texts


def _source_of_fields(cls: type[Any]) -> str:
    """Return the source of a class. If the class has settings, stop at its first method.

    Only classes of this package have settings, so their layout is known. `inspect.getsource` would parse the whole
    file, which takes ten times longer.
    """
    if not settings_of(cls):
        return textwrap.dedent(inspect.getsource(cls))
    lines = linecache.getlines(inspect.getsourcefile(cls) or "")
    head = re.compile(rf"class {cls.__name__}\b")
    body = itertools.dropwhile(lambda line: not head.match(line), lines)
    first = list(itertools.islice(body, 1))
    return "".join([*first, *itertools.takewhile(re.compile(r"\s(?!   (def|@))").match, body)])


# ---- labels

_ACRONYMS = (
    "cp", "cpu", "ddp", "ds", "ep", "fp8", "fp32", "fsdp", "gpu", "hf", "id", "lm", "lr", "nvme", "pp", "sp", "tp",
)  # fmt: skip
_LONG = {"num": "number of", "kwargs": "arguments", "args": "arguments", "dataloader": "data loader", "dir": "folder"}


def _words_of(name: str) -> str:
    """Return the label of a field without one: its name in words, such as "Number of steps" for num_steps."""
    words = [word.upper() if word in _ACRONYMS else _LONG.get(word, word) for word in name.split("_") if word]
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def labels_of(cls: type[Any]) -> dict[str, str]:
    """Return the labels of a dataclass's fields, such as "Number of processes", by the name of the field.

    Args:
        cls: The dataclass. Fields that are not settings may have a "label" in their ``metadata``.
    """
    settings = settings_of(cls)
    return {
        entry.name: (known.label if (known := settings.get(entry.name)) else entry.metadata.get("label", ""))
        or _words_of(entry.name)
        for entry in dataclasses.fields(cls)
    }
