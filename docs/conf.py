"""How Sphinx builds the documentation: `make docs`. Reference pages are made from the code before each build."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import reference  # noqa: E402 - stands in tools/, which is no package

project = "kernelguard"
author = "the kernelguard authors"
project_copyright = author
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["training/demos"]
nitpicky = True
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # console blocks show output that no lexer knows
html_theme = "furo"
html_title = "kernelguard"
html_copy_source = False
html_show_sphinx = False

for _name, _text in reference.pages().items():
    _page = HERE / _name
    _page.parent.mkdir(exist_ok=True)
    if not _page.exists() or _page.read_text(encoding="utf-8") != _text:
        _page.write_text(_text, encoding="utf-8")
