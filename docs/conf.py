"""Sphinx's settings: ``make docs`` builds the site of these pages in out/docs."""

import html
import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import torch_ragged
from torch_ragged.fsdp.core._kit import FeaturePart

project = "torch_ragged"
author = "the torch_ragged authors"
copyright = "2026, the torch_ragged authors"
version = release = torch_ragged.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
templates_path = ["_templates"]

# One page per public name: autosummary writes their sources to docs/api/names. Some file systems ignore case.
NAMES = Path(__file__).with_name("api") / "names"
autosummary_filename_map = {
    f"torch_ragged.{name}": f"torch_ragged.{name}Class" for name in ("fsdp.Monitor", "fsdp.MemoryReport", "transfer.Plan")
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache"]

highlight_language = "none"  # Blocks without a language are output, or drawings.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 88
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = f"torch_ragged {release}"
html_static_path = ["_static"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_css_files = ["torch_ragged.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 5,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": False,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_context = {"default_mode": "auto"}


def shorten_types(app: Any, what: str, name: str, object: Any, options: Any, signature: str, result: str) -> tuple[str, str]:
    """``Generator`` for ``~torch._C.Generator``, also inside of other types, where Sphinx leaves the whole name."""
    short = [re.sub(r"~?\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", text) if text else text for text in (signature, result)]
    return short[0], short[1]


def skip_parts(app: Any, what: str, name: str, object: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what ``Float8Policy`` and others are to ``fully_shard``, not to users."""
    return True if name in vars(FeaturePart) and not name.startswith("__") else None


class AlsoCalled(SphinxTransform):
    """Other words for a heading, in ``<!-- also called: ... -->`` below it: the search finds the heading by them."""

    default_priority = 840  # Before Sphinx collects the entries of the index.

    def apply(self, **kwargs: Any) -> None:
        for comment in list(self.document.findall(nodes.raw)):
            if words := re.fullmatch(r"<!-- also called: (.*) -->", comment.astext().strip()):
                (anchor, *_) = comment.parent["ids"]
                entries = [("single", word.strip(), anchor, "main", None) for word in words[1].split(",")]
                comment.replace_self(addnodes.index(entries=entries, inline=False))


class Made(SphinxDirective):
    """What a function of a script of docs/ writes when the site is built, for the directive's argument."""

    optional_arguments = 1
    final_argument_whitespace = True
    scripts: ClassVar[dict[str, tuple[str, str]]] = {
        "combinations": ("combinations", "table"),
        "compatibility": ("measured", "compatibility"),
        "errors": ("make_errors", "entries"),
        "fsdp2_tests": ("measured", "fsdp2_tests"),
        "mutants": ("measured", "mutants"),
        "op_coverage": ("measured", "op_coverage"),
        "optimizers": ("measured", "optimizers"),
        "programs": ("measured", "programs"),
    }

    def run(self) -> list[nodes.Node]:
        script, function = self.scripts[self.name]
        section = nodes.container()
        lines = getattr(importlib.import_module(script), function)(*self.arguments)
        self.state.nested_parse(StringList(["", *lines]), 0, section)
        return [section]


def make_cards(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Tables with long rows, of which a phone would show one column, are of the class ``cards``; each cell knows its column."""

    def plain(text: str) -> str:
        return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())

    def card(table: re.Match[str]) -> str:
        head, rows = table[0].split("<tbody>")
        if max(len(plain(row)) for row in rows.split("</tr>")) < 70:
            return table[0]
        labels = [html.escape(plain(cell)) for cell in re.findall(r"<th\b.*?</th>", head, re.DOTALL)]
        cells = re.split(r"<td\b", rows)
        labelled = [f'<td data-label="{labels[number % len(labels)]}"{cell}' for number, cell in enumerate(cells[1:])]
        head = head.replace('class="table"', 'class="table cards"')
        return f"{head}<tbody>{cells[0]}{''.join(labelled)}"

    if "body" in context:
        context["body"] = re.sub(r'<table class="table">\s*<thead>.*?</table>', card, context["body"], flags=re.DOTALL)


def setup(app: Any) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    app.add_transform(AlsoCalled)
    for name in Made.scripts:
        app.add_directive(name, Made)
    analyzer = ModuleAnalyzer.for_module("torch_ragged.fsdp._fully_shard")
    analyzer.analyze()
    analyzer.overloads.pop("fully_shard")  # Or they would be shown in place of the signature.
    shutil.rmtree(NAMES, ignore_errors=True)  # autosummary does not delete pages of names that are gone.
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("autodoc-skip-member", skip_parts)
    app.connect("html-page-context", make_cards)
