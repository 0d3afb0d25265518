"""Drawings as inline SVG: a timeline of one step, a line over steps, errors against what is allowed, a stack of layers.

Colours are classes of the page's style, so that a drawing follows light, dark and print; each is named in words too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 1040
LEFT, RIGHT = 92, 1030
_LANE, _GAP = 54, 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a timeline."""

    title: str
    layers: tuple[tuple[str, tuple[float, ...]], ...]
    """(colour class, share of each slice), drawn on top of each other."""


def timeline(lanes: Sequence[Lane], microseconds: float, label: str) -> Markup:
    """A step from left to right; every lane is filled as far as its slices are taken up."""
    height = 8 + len(lanes) * (_LANE + _GAP) + 26
    parts = [_open(height, label, focusable=True)]
    for number, lane in enumerate(lanes):
        top = 8 + number * (_LANE + _GAP)
        parts.append(f'<text x="0" y="{top + _LANE / 2 + 5}" font-size="14">{escape(lane.title)}</text>')
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{top + _LANE}" y2="{top + _LANE}"/>')
        below = [0.0] * len(lane.layers[0][1]) if lane.layers else []
        for css, values in lane.layers:
            above = [min(1.0, low + value) for low, value in zip(below, values, strict=True)]
            if any(values):
                path = _steps(above, below, top)
                parts.append(f'<path class="{css}" fill="var(--c)" d="{path}"/>')
            below = above
    bottom = 8 + len(lanes) * (_LANE + _GAP) - _GAP + 8
    parts += _axis(microseconds / 1000, bottom)
    parts.append(
        f'<line class="cursor" y1="4" y2="{bottom}" stroke="currentColor" stroke-width="1" style="display:none"/>'
    )
    parts.append("</svg>")
    return Markup("".join(parts))  # noqa: S704 - texts are escaped, the rest are numbers


def _steps(above: Sequence[float], below: Sequence[float], top: float) -> str:
    """A filled outline in steps, left to right along the top and back along the bottom."""
    count = len(above)
    width = (RIGHT - LEFT) / count
    line = []
    for slot, value in enumerate(above):
        y = top + _LANE * (1 - value)
        line.append(f"{'M' if slot == 0 else 'L'}{LEFT + slot * width:.1f} {y:.1f}H{LEFT + (slot + 1) * width:.1f}")
    for slot in range(count - 1, -1, -1):
        y = top + _LANE * (1 - below[slot])
        line.append(f"L{LEFT + (slot + 1) * width:.1f} {y:.1f}H{LEFT + slot * width:.1f}")
    return "".join(line) + "Z"


def _axis(total_ms: float, y: float) -> list[str]:
    stride = _round_stride(total_ms / 7)
    parts, at = [], 0.0
    while at <= total_ms * 1.0001:
        x = LEFT + (RIGHT - LEFT) * at / total_ms
        anchor = "start" if at == 0 else "end" if total_ms - at < stride / 3 else "middle"
        text = f"{at:g}" + (" ms" if at == 0 or at + stride > total_ms * 1.0001 else "")
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 3}"/>')
        parts.append(
            f'<text class="dim" x="{x:.1f}" y="{y + 19}" font-size="12.5" text-anchor="{anchor}">{text}</text>'
        )
        at = round(at + stride, 9)
    return parts


def _round_stride(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below what is asked for."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)


def line(
    points: Sequence[tuple[float, float]], label: str, css: str = "gemm", *, unit: str = "", from_zero: bool = True
) -> Markup:
    """One number over the steps of a run; the axis names its unit."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < 2:
        return Markup("")
    height, top, bottom = 190, 12, 160
    low = 0.0 if from_zero else min(y for _, y in finite)
    high = max(y for _, y in finite)
    spread, first, last = (high - low) or 1.0, finite[0][0], finite[-1][0]
    place = [
        (
            LEFT + (RIGHT - LEFT) * (x - first) / ((last - first) or 1),
            bottom - (bottom - top) * (y - low) / spread,
        )
        for x, y in finite
    ]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in place)
    parts = [_open(height, label)]
    for value, y in ((low, bottom), (high, top)):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="dim" x="{LEFT - 10}" y="{y + 4}" font-size="12.5" text-anchor="end">{value:.3g}'
            f"{escape(f' {unit}' if unit else '')}</text>"
        )
    parts.append(
        f'<path class="{css}" d="{path}" fill="none" stroke="var(--c)" stroke-width="2" stroke-linejoin="round"/>'
    )
    for value, x, anchor in ((first, LEFT, "start"), (last, RIGHT, "end")):
        parts.append(
            f'<text class="dim" x="{x}" y="{bottom + 20}" font-size="12.5" text-anchor="{anchor}">step {value:g}</text>'
        )
    parts.append("</svg>")
    return Markup("".join(parts))  # noqa: S704


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One tensor's error beside what plain torch has and what is allowed."""

    label: str
    error: float | None
    plain: float | None
    allowed: float | None
    right: bool


def errors(rows: Sequence[ErrorRow], label: str) -> Markup:
    """A logarithmic scale: the grey bar ends where the allowed error does, the dot must stay on it."""
    numbers = [
        n for row in rows for n in (row.error, row.plain, row.allowed) if n is not None and n > 0 and math.isfinite(n)
    ]
    if not numbers:
        return Markup("")
    low, high = math.floor(math.log10(min(numbers)) - 0.15), math.ceil(math.log10(max(numbers)) + 0.15)
    left, right, pitch, top = 250, WIDTH - 110, 26, 30

    def x(value: float) -> float:
        return left + (right - left) * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    height = top + len(rows) * pitch + 12
    parts = [_open(height, label)]
    for power in range(low, high + 1):
        at = left + (right - left) * (power - low) / (high - low)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 6}" y2="{height - 8}"/>')
        parts.append(f'<text class="dim" x="{at:.1f}" y="16" font-size="12.5" text-anchor="middle">1e{power}</text>')
    for number, row in enumerate(rows):
        y = top + number * pitch + pitch / 2
        parts.append(f'<text x="0" y="{y + 4:.1f}" font-size="13">{escape(_fit(row.label, 36))}</text>')
        if row.allowed:
            parts.append(
                f'<rect x="{left}" y="{y - 5:.1f}" width="{max(0.0, x(row.allowed) - left):.1f}" height="10" rx="2" '
                f'class="waiting" fill="var(--c)"/>'
            )
        if row.plain is not None and math.isfinite(row.plain):
            at = x(row.plain)
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 8:.1f}" y2="{y + 8:.1f}" stroke="currentColor" '
                'stroke-width="1.5"/>'
            )
        css = "sequence" if row.right else "launch"
        if row.error is None or not math.isfinite(row.error):
            text = "not measured" if row.error is None else "not finite"
            parts.append(f'<text class="dim" x="{left + 6}" y="{y + 4:.1f}" font-size="12.5">{text}</text>')
            continue
        at = x(row.error)
        # A wrong tensor is a square: the shape tells it where colour does not.
        mark = (
            f'<circle cx="{at:.1f}" cy="{y:.1f}" r="5"'
            if row.right
            else f'<rect x="{at - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
        )
        parts.append(f'{mark} class="{css}" fill="var(--c)" stroke="var(--card)" stroke-width="1.5"/>')
        share = f"{row.error / row.allowed:.0%}" if row.allowed else ""
        parts.append(f'<text class="dim" x="{WIDTH}" y="{y + 4:.1f}" font-size="12.5" text-anchor="end">{share}</text>')
    parts.append("</svg>")
    return Markup("".join(parts))  # noqa: S704


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the model's stack."""

    kind: str
    css: str
    """What its fused kernels came to: pass, warn, fail, unknown, none."""


def stack(layers: Sequence[Layer], label: str) -> Markup:
    """The layers from the first, at the bottom, to the last; equal ones are not merged, so that they can be counted."""
    pitch = 13.0 if len(layers) <= 40 else 9.0 if len(layers) <= 90 else 5.0
    height = len(layers) * pitch + 34
    names = list(dict.fromkeys(layer.kind for layer in layers))
    inset = {name: 22.0 * min(position, 3) for position, name in enumerate(names)}
    parts = [f'<svg viewBox="0 0 300 {height:g}" role="img" aria-label="{escape(label)}">']
    for number, layer in enumerate(layers):
        y = height - 17 - (number + 1) * pitch
        indent = inset[layer.kind]
        parts.append(
            f'<rect class="layer-{layer.css}" x="{34 + indent:g}" y="{y:.1f}" width="{266 - 2 * indent:g}" '
            f'height="{pitch - 2:g}" rx="1.5"/>'
        )
        if (number + 1) % 8 == 0 or number in {0, len(layers) - 1}:
            parts.append(
                f'<text class="dim" x="26" y="{y + pitch - 3:.1f}" font-size="10.5" text-anchor="end">'
                f"{number + 1}</text>"
            )
    parts.append('<text class="dim" x="34" y="11" font-size="11">output</text>')
    parts.append(f'<text class="dim" x="34" y="{height - 4:g}" font-size="11">input</text></svg>')
    return Markup("".join(parts))  # noqa: S704


def _open(height: float, label: str, *, focusable: bool = False) -> str:
    focus = ' tabindex="0"' if focusable else ""
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img"{focus} aria-label="{escape(label)}">'


def _fit(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
