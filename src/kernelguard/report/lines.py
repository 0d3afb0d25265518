"""Where may a line be broken? Prose between words, a command nowhere: half of one cannot be pasted."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PROGRAM = r"(?:\S*/)?(?:python[\d.]*|pip|uv|docker|git|hf|sudo|sed|chmod|apt-get|conda|nvidia-smi|rm|mv|nvcc)"
_SHELL = rf"(?:[A-Z_]+=\S+ )*{_PROGRAM} \S|kernelguard [a-z]+(?: |$)|(?:export|unset) [A-Z_]+"
_CALL = r"\w[\w.]*\([^)]"
_COMMAND = re.compile(
    # Prose that begins with the name of a program is taken for a command, which is the smaller harm.
    rf"(?:(?:or|then|and|to) )?(?:{_SHELL})|{_CALL}"
    # Another line of Python: an assignment, a statement with a colon.
    r"|[\w.]+ ?\+?= ?\S|(?:with|for) .*:(?: |$)"
)
_JOINT = re.compile(
    # Where one of several ways ends, and where prose leads to a command.
    r"(?<=[,;]) (?=(?:or|then|and|to|where|from|which|without|on|in|a|the|with)\b)"
    rf"|(?<=:) (?={_SHELL}|{_CALL})"
)
_WORD = re.compile(r"-{1,2}[a-z-]+ [^\s-]\S*|\S+")
"""An option stays with its value."""


def filled(text: str, width: int) -> list[str]:
    """Lines of at most `width`, where words and commands allow it."""
    lines: list[str] = []
    for piece in _pieces(text):
        if lines and len(lines[-1]) + 1 + len(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines or [""]


def _pieces(text: str) -> Iterator[str]:
    """What must stay on one line: words, and commands as a whole."""
    # A comma in a quoted program joins nothing, and the end of a comment would be run.
    whole = _COMMAND.match(text) and (" -c '" in text or " # " in text)
    for part in [text] if whole else _JOINT.split(text):
        if _COMMAND.match(part):
            yield part
        else:
            yield from _WORD.findall(part)
