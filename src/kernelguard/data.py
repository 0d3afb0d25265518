"""Where the data files that ship with kernelguard are: matrices, docker templates, schemas, examples."""

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


def package() -> Path:
    """The folder of the package itself: its workers and the guard are copied into images."""
    return _PACKAGE


def docker() -> Path:
    """The folder `docker/`."""
    return _ROOT / "docker"


def schema(name: str) -> Path:
    """The JSON Schema file of one kind of document, for example `report`."""
    return _PACKAGE / "schemas" / f"{name}.schema.json"
