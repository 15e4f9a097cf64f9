"""Configuration of the documentation site: `make docs` builds it into .build/docs."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import notebook_accelerate
from notebook_accelerate.config.settings import settings_of
from notebook_accelerate.errors import SITE

DOCS = Path(__file__).resolve().parent

project = "notebook_accelerate"
author = "the authors of notebook_accelerate"
project_copyright = f"2026, {author}"
release = version = notebook_accelerate.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_static"]

# Code hosts render these Markdown pages, too, so headings get the anchors that code hosts give them.
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/docs executes the pages; notebooks are committed with their outputs

copybutton_selector = "div:not(.highlight-output) > div.highlight pre"

# Docstrings mark code with single backticks. Such a name becomes a link if the reference has an entry for it.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 100

html_theme = "furo"
html_baseurl = SITE
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # Language models look for it at the root of the site.
html_css_files = ["site.css"]
html_title = f"notebook_accelerate {release}"
html_theme_options = {
    "source_repository": "https://github.com/notebook-accelerate/notebook-accelerate/",
    "source_branch": "main",
    "source_directory": "docs/",
}


def _returned_text(self: GoogleDocstring, **_: object) -> list[tuple[str, str, list[str]]]:
    """Return a Returns section as plain text: types are in annotations, so no type precedes a colon."""
    lines = self._dedent(self._consume_to_next_section())
    return [("", "", lines)] if lines else []


def _attribute_text(self: GoogleDocstring) -> tuple[str, list[str]]:
    """Return the docstring of an attribute or property as plain text, because no type precedes a colon."""
    return "", type(self)(self._dedent(self._consume_to_end()), self._config).lines()


GoogleDocstring._consume_returns_section = _returned_text
GoogleDocstring._consume_inline_attribute = _attribute_text
for field in PyObject.doc_field_types:
    field.label = {"Variables": "Attributes"}.get(str(field.label), field.label)


RETURNED = {"api/run", "api/magics", "api/exceptions"}
"""Pages on classes whose objects this package creates, so that users never call the constructors."""


def _is_returned(app: Sphinx, what: str) -> bool:
    return what in {"class", "exception"} and app.env.docname in RETURNED


def _without_constructor(
    app: Sphinx, what: str, _name: str, _object: object, _options: object, arguments: str | None, _returned: str | None
) -> tuple[str, None] | None:
    """Return an empty signature for a class whose objects this package creates."""
    return ("", None) if arguments is not None and _is_returned(app, what) else None


def _without_arguments(app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Remove the Args section of a class whose objects this package creates, before napoleon reads the docstring."""
    if not _is_returned(app, what) or "Args:" not in lines:
        return
    begin = lines.index("Args:")
    end = next((i for i in range(begin + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    del lines[begin:end]


def _with_variable(_app: Sphinx, what: str, name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Add the environment variable and the default of a setting to the docstring of its field."""
    owner, _, field_name = name.rpartition(".")
    cls = pydoc.locate(owner) if what == "attribute" else None
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and field_name in settings_of(cls):
        lines += ["", settings_of(cls)[field_name].source.strip(), ""]


def _readable_defaults(
    _app: Sphinx, _what: str, _name: str, function: Any, _options: object, arguments: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Return a signature without internal names: a default is shown as its number if it is one, and else as "..."."""
    if arguments is None:
        return None
    names = getattr(inspect.unwrap(getattr(function, "__init__", function)), "__globals__", {})
    names = {**names, **getattr(inspect.unwrap(function), "__globals__", {})}

    def shown(default: re.Match[str]) -> str:
        module, _, name = default[1].rpartition(".")
        value = getattr(names.get(module), name, None) if module else names.get(name)
        return f"= {value}" if isinstance(value, (int, float)) else "= ..."

    return re.sub(r"= ?(<factory>|[a-z_]+\.\w+|[A-Z_]{3,})(?=[,)])", shown, arguments), returned


def _exception_tree(_app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Turn the tree of classes in the docstring of a module into nested lists, whose names are links."""
    if what != "module" or not any("├── " in line for line in lines):
        return
    branch = re.compile(r" {4}((?:[│├└ ][─ ]{2} )*)(\w+)\s*(.*)")
    shown: list[str] = []
    for line in lines:
        if found := branch.fullmatch(line):
            depth, text = len(found[1]) // 4, f": {found[3]}" if found[3] else ""
            shown += [f"{'  ' * depth}* `{found[2]}`{text}", ""]  # Nested lists need an empty line before them.
        else:
            shown.append(re.sub("::$", ":", line))
    lines[:] = shown


def _add_dark_pictures(_app: Sphinx, document: nodes.document) -> None:
    """Show NAME-dark.png instead of NAME.png in the dark theme, if it exists. Code hosts show NAME.png."""
    folder = Path(str(document["source"])).parent
    for image in list(document.findall(nodes.image)):
        light = Path(image["uri"])
        dark = light.with_stem(f"{light.stem}-dark")
        if not (folder / dark).exists():
            continue
        other = image.deepcopy()
        other["uri"] = dark.as_posix()
        image["classes"].append("only-light")
        other["classes"].append("only-dark")
        image.parent.insert(image.parent.index(image) + 1, other)


def _by_short_name(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Link a name in a docstring to the only class or function of that name in the reference."""
    entries = env.domains["py"].objects.items() if node.get("refdomain") == "py" else ()
    found = {
        (entry.docname, entry.node_id)
        for name, entry in entries
        if name.rpartition(".")[2] == node["reftarget"] and entry.objtype in {"class", "exception", "function"}
    }
    if len(found) != 1:
        return None
    ((page, anchor),) = found
    return make_refnode(app.builder, node["refdoc"], page, anchor, content)


def _copy_tutorials(_app: Sphinx, _config: object) -> None:
    """Copy the notebooks of examples/ into docs/tutorials, which git ignores, and keep their modification times."""
    tutorials = DOCS / "tutorials"
    shutil.rmtree(tutorials, ignore_errors=True)
    for path in (DOCS.parent / "examples").rglob("*.ipynb"):
        copy = tutorials / path.relative_to(DOCS.parent / "examples")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def _remove_sources(app: Sphinx) -> None:
    """Remove the pages of source code: viewcode keeps those of unchanged modules, which lack anchors for new names."""
    shutil.rmtree(Path(app.outdir) / "_modules", ignore_errors=True)


def _write_short_addresses(app: Sphinx, error: Exception | None) -> None:
    """Write a short address, e/NAME/, for the page of each exception. Error messages in notebooks end with it."""
    if error is not None or app.builder.format != "html":
        return
    for page in sorted((DOCS / "errors").glob("[A-Z]*.md")):
        folder = Path(app.outdir) / "e" / page.stem
        folder.mkdir(parents=True, exist_ok=True)
        target = f"../../errors/{page.stem}.html"
        (folder / "index.html").write_text(
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{page.stem}</title>'
            f'<meta http-equiv="refresh" content="0; url={target}"><link rel="canonical" href="{target}"></head>'
            f'<body><a href="{target}">{page.stem}</a></body></html>\n'
        )


def _write_base_of_missing_page(app: Sphinx, error: Exception | None) -> None:
    """Let the links of 404.html start at the root of the site: the server shows this page at any missing address."""
    if error is not None or app.builder.format != "html":
        return
    page = Path(app.outdir) / "404.html"
    base = f'<head><base href="{urlsplit(SITE).path}">'
    page.write_text(re.sub("<head>(<base[^>]*>)?", base, page.read_text(), count=1))


def _correct_links_of_sources(app: Sphinx, error: Exception | None) -> None:
    """Point the links from source code at the right entries: viewcode uses only one import path for each module."""
    if error is not None or app.builder.format != "html":
        return
    entries = {(entry.docname, entry.node_id) for entry in app.env.domains["py"].objects.values()}

    def corrected(link: re.Match[str]) -> str:
        parts = link["name"].split(".")
        for begin in range(1, len(parts)):
            end = ".".join(["", *parts[begin:]])
            found = [name for page, name in entries if page == link["page"] and name.endswith(end)]
            if len(found) == 1:
                return f'href="{link["up"]}{link["page"]}.html#{found[0]}"'
        return link[0]

    for path in (Path(app.outdir) / "_modules").rglob("*.html"):
        text = path.read_text()
        path.write_text(re.sub(r'href="(?P<up>[./]+)(?P<page>api/\w+)\.html#(?P<name>[\w.]+)"', corrected, text))


def _link_tutorials(_app: Sphinx, name: str, source: list[str]) -> None:
    """Adapt the links between pages and notebooks, which are written for code hosts, to the paths in the site."""
    if name.startswith("tutorials/"):
        source[0] = re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", source[0])
    else:
        source[0] = re.sub(r"\]\(((?:\.\./)*)\.\./examples/([\w/]+\.ipynb)\)", r"](\1tutorials/\2)", source[0])


def setup(app: Sphinx) -> None:
    """Connect the functions above to the events of Sphinx."""
    app.connect("config-inited", _copy_tutorials)
    app.connect("builder-inited", _remove_sources)
    app.connect("missing-reference", _by_short_name)
    app.connect("autodoc-process-signature", _without_constructor)
    app.connect("autodoc-process-docstring", _without_arguments, priority=100)
    app.connect("autodoc-process-signature", _readable_defaults)
    app.connect("autodoc-process-docstring", _with_variable, priority=100)
    app.connect("autodoc-process-docstring", _exception_tree, priority=100)
    app.connect("doctree-read", _add_dark_pictures, priority=100)  # before Sphinx collects the pictures
    app.connect("source-read", _link_tutorials)
    app.connect("build-finished", _write_short_addresses)
    app.connect("build-finished", _write_base_of_missing_page)
    app.connect("build-finished", _correct_links_of_sources)
