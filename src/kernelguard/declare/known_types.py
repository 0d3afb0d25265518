"""Which transformers release was the first to know a model_type? Read from matrices/model_types.toml."""

from __future__ import annotations

from packaging.version import Version

from kernelguard import data


def first_version(model_type: str) -> Version | None:
    """The first of the recorded releases that knows a type, or None when none does."""
    path = data.matrices() / "model_types.toml"
    if not path.is_file():
        return None
    import tomllib  # noqa: PLC0415 - 6 ms, needed only for an error text

    with path.open("rb") as handle:
        table = tomllib.load(handle)
    for version, types in table.get("first", {}).items():
        if model_type in types:
            return Version(version)
    return None
