"""Write docs/api/settings.md from the table of settings: `python -m tests.support.settings_page`."""

from __future__ import annotations

import re
from typing import Any

from notebook_accelerate.config.config_file import SECTIONS, section_of
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.settings import Setting, settings_of, short_help
from tests.support.pages import DOCS

PAGE = DOCS / "api" / "settings.md"
_HEAD = """# Settings

The fields of `LaunchConfig` and of the plugins that are environment variables, options of `notebook-accelerate launch`
or keys of a configuration file. `python -m tests.support.settings_page` writes this page.

The variable of a field is read if the field is None, and the default applies if the variable is not set. `launch` sets
the variables of the sections that it uses; if its default differs, the table shows both. An option is the key in the
file with `--` in front of it, with two exceptions: the keys of `fp8_config` lack `fp8_`, and the key of `--cpu` is
`use_cpu`.
"""


def text() -> str:
    """Return the text of the generated page."""
    parts = [_HEAD, "## A launch\n\nFields of `LaunchConfig`; most are parameters of `notebook_launcher`, too.\n"]
    parts.append(
        _table(("field", "default", "meaning"), [_launch_row(each) for each in settings_of(LaunchConfig).values()])
    )
    for key, owners in SECTIONS.items():
        where = f"Section `{key}` of a configuration file." if key else "Top level of a configuration file."
        parts.append(f"## {section_of(key).title}\n\n{where}\n")
        for owner in owners:
            rows = [_row(owner, each) for each in settings_of(owner).values() if each.option or each.variable]
            if len(owners) > 1:
                parts.append(f"`{owner.__name__}`:\n")
            parts.append(_table(("field", "variable", "option and key", "default", "meaning"), rows))
    return "\n".join(parts)


def _launch_row(each: Setting) -> tuple[str, ...]:
    return (
        f"`{each.name}`",
        "a tuple" if each.name == "report_from" else f"`{each.default!r}`",
        _help(LaunchConfig, each),
    )


def _row(owner: type[Any], each: Setting) -> tuple[str, ...]:
    default = "" if each.unset is None else f"`{each.unset}`"
    if each.preset is not None and str(each.preset).lower() != str(each.unset).lower():
        default += f"{'; ' if default else ''}`launch`: `{each.preset}`"
    option = f"`{each.option}`" if each.option else ""
    return f"`{each.name}`", f"`{each.variable}`" if each.variable else "", option, default, _help(owner, each)


def _help(owner: type[Any], each: Setting) -> str:
    return re.sub(r"`+", "`", short_help(owner, each.name)).replace("|", "\\|")


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
