"""mkdocs calls this: puts the generated reference pages beside the written ones."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import reference


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one page for each that the code describes."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    return files
