"""What do single keys of a training configuration say? Typed reading that collects every problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelguard.declare.training_configs.files import nearest, shown

DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
}
"""Names for the dtypes that models train in."""

_ON = frozenset({"true", "yes", "on", "1"})
_OFF = frozenset({"false", "no", "off", "0"})


class Keys:
    """A mapping whose values are read by type; what does not fit is put into `problems`."""

    def __init__(self, document: Mapping[str, Any], *, words: bool, prefix: str = "") -> None:
        """`words`: whether the framework takes the text "false" for false (pydantic does, a dataclass does not)."""
        self.document = document
        self.words = words
        self.prefix = prefix
        self.problems: list[str] = []

    def given(self, *names: str) -> bool:
        """Whether any of the keys has a value."""
        return any(self.document.get(name) is not None for name in names)

    def flag(self, name: str) -> bool | None:
        """True, false, or None when nothing was said."""
        value = self.document.get(name)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value in {0, 1}:
            return bool(value)
        if isinstance(value, str):
            if value.lower() in _ON:
                return True
            if value.lower() in _OFF:
                if self.words:
                    return False
                self._wrong(name, f"is the text {value!r}, which counts as true; write false without quotes")
                return None
        self._wrong(name, f"is {shown(value)}, but true or false was expected")
        return None

    def auto_flag(self, name: str, *others: str) -> bool | str | None:
        """A flag that may also be `auto` (or one of `others`), which is returned as that word."""
        value = self.document.get(name)
        if isinstance(value, str) and value.lower() in {"auto", *others}:
            return value.lower()
        return self.flag(name)

    def text(self, name: str) -> str | None:
        """A non-empty text, or None when nothing was said."""
        value = self.document.get(name)
        if value is None:
            return None
        if isinstance(value, str) and value.strip():
            return value.strip()
        self._wrong(name, f"is {shown(value)}, but a name was expected")
        return None

    def choice(self, name: str, options: tuple[str, ...]) -> str | None:
        """One of some words, or None when nothing was said."""
        value = self.text(name)
        if value is not None and value not in options:
            self._wrong(
                name, f"is {shown(value)}, but one of {', '.join(options)} was expected{nearest(value, options)}"
            )
            return None
        return value

    def dtype(self, name: str) -> str | None:
        """A dtype by its torch name; None when nothing was said or the checkpoint decides (`auto`)."""
        value = self.text(name)
        if value is None or value == "auto":
            return None
        word = value.removeprefix("torch.")
        if word not in DTYPES:
            self._wrong(name, f"is {shown(value)}, which is no dtype to train in{nearest(word, DTYPES)}")
            return None
        return DTYPES[word]

    def table(self, name: str) -> Mapping[str, Any]:
        """A mapping; empty when nothing was said."""
        value = self.document.get(name)
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        self._wrong(name, f"is {shown(value)}, but a mapping was expected")
        return {}

    def problem(self, text: str) -> None:
        """Notes what no single key can be blamed for."""
        self.problems.append(text)

    def _wrong(self, name: str, text: str) -> None:
        self.problems.append(f"{self.prefix}{name} {text}")
