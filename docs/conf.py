"""Sphinx's settings: ``make docs`` builds the site of these pages in out/docs."""

import re
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import torch_ragged

HERE = Path(__file__).parent

project = "torch_ragged"
author = "the torch_ragged authors"
copyright = "2026, the torch_ragged authors"
version = release = torch_ragged.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# These pages are written elsewhere. As long as one is missing, it is left out of the contents, and a link to it is no error.
LATER = [name for name in ("running", "reliability", "mutants") if not (HERE / f"{name}.md").exists()]
suppress_warnings = ["config.cache", *(["myst.xref_missing"] if LATER else [])]

highlight_language = "none"  # Blocks without a language are output, or drawings.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
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
html_context = {"default_mode": "light"}


def leave_out_missing_pages(app: Any, name: str, source: list[str]) -> None:
    """Take pages that are not written yet out of the contents."""
    gone = {f"<{page}>" for page in LATER} | {f"]({page}.md)" for page in LATER}
    if name in ("start", "operate", "background"):
        source[0] = "\n".join(line for line in source[0].split("\n") if not any(mark in line for mark in gone))


def shorten_types(app: Any, what: str, name: str, object: Any, options: Any, signature: str, result: str) -> tuple[str, str]:
    """``Generator`` for ``~torch._C.Generator``, also inside of other types, where Sphinx leaves the whole name."""
    short = [re.sub(r"~?\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", text) if text else text for text in (signature, result)]
    return short[0], short[1]


def setup(app: Any) -> None:
    analyzer = ModuleAnalyzer.for_module("torch_ragged.fsdp._fully_shard")
    analyzer.analyze()
    analyzer.overloads.pop("fully_shard")  # Or they would be shown in place of the signature in api/fsdp.rst.
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("source-read", leave_out_missing_pages)
