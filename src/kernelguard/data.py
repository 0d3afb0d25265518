"""Where the data files that ship with kernelguard are: matrices, schemas, examples."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# In a wheel the folders lie inside the package; in a checkout (an editable install) at the top of the tree.
_ROOT = _PACKAGE / "_data" if (_PACKAGE / "_data").is_dir() else _PACKAGE.parent.parent


def matrices() -> Path:
    """The folder `matrices/`."""
    return _ROOT / "matrices"


def examples() -> Path:
    """The folder `examples/`."""
    return _ROOT / "examples"


def schema(name: str) -> Path:
    """The JSON Schema file of one kind of document, for example `report`."""
    return _PACKAGE / "schemas" / f"{name}.schema.json"
