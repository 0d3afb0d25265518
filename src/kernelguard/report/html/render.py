"""How does a page become text? Jinja templates of the package, everything escaped, styles and scripts inline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kernelguard import __version__

_TEMPLATES = Path(__file__).resolve().parent / "templates"
NONE = "\N{EN DASH}"


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fill one template; every value is escaped unless a chart made it."""
    environment = _environment()
    inline = {
        "style": Markup((_TEMPLATES / "page.css").read_text("utf-8")),  # noqa: S704 - our own file
        "script": Markup((_TEMPLATES / "page.js").read_text("utf-8")),  # noqa: S704 - our own file
        "version": __version__,
    }
    return environment.get_template(template).render(**inline, **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"ms": ms, "us": us, "pct": pct, "num": num, "short": short, "error": error}
    return environment


def ms(microseconds: float | None) -> str:
    """Microseconds as milliseconds."""
    if microseconds is None:
        return NONE
    value = microseconds / 1000
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:,.1f} ms" if value >= 1 else f"{value:,.2f} ms"


def us(microseconds: float | None) -> str:
    """Microseconds as they are."""
    if microseconds is None:
        return NONE
    return f"{microseconds:,.0f} µs" if microseconds >= 100 else f"{microseconds:,.1f} µs"


def pct(share: float | None, digits: int = 0) -> str:
    """A share of 1 in percent; never rounded to nothing."""
    if share is None:
        return NONE
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"<{10**-digits:g}%"
    return f"{share * 100:.{digits}f}%"


def num(value: float | None, digits: int = 0) -> str:
    """A number with thousands set apart."""
    return NONE if value is None else f"{value:,.{digits}f}"


def error(value: float | None) -> str:
    """A relative error."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def short(text: str, most: int = 90) -> str:
    """The beginning and the end of a long name; the middle of a template's arguments says least."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} … {text[-most // 4 :]}"
