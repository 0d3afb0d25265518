"""What is this run supposed to be? The ticket says; without one, every kernel that a model declares is to be bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelguard.guard.ticket import ExpectedPath, Ticket

_ASSUMED = " (assumed)"


@dataclass(frozen=True)
class Finding:
    """One thing about the running model that is not as it should be."""

    row: str
    """A short name of the way in which a model gets slow or wrong (`docs/guard.md` lists them)."""
    status: str
    """`fail`, `unknown` (cannot be told, never a pass) or `warn`."""
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Expectation:
    """What the live model is held against. None and empty: nobody said."""

    ticketed: bool = False
    """A launcher admitted this run: what cannot be told then refuses it."""
    paths: tuple[ExpectedPath, ...] = ()
    sites: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """(module, symbol) -> where its binding is read, as in a request to `workers/bindings.py`."""
    attention: str = ""
    experts: str = ""
    use_kernels: bool | None = None
    liger: bool | None = None
    compiled: bool | None = None
    packed: bool | None = None
    signals: tuple[str, ...] = ()
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fallbacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    device: str = "cuda"


def expectation(ticket: Ticket | None) -> Expectation:
    """What the ticket says of the run."""
    if ticket is None:
        return Expectation()
    intent = {name: value.removesuffix(_ASSUMED) for name, value in ticket.intent.items()}
    sites = ticket.bindings["sites"] if ticket.bindings is not None else ()
    return Expectation(
        ticketed=True,
        paths=tuple(path for path in ticket.fast_paths if path.training),
        sites={(site["module"], site["symbol"]): site for site in sites},
        attention=_text(intent.get("attn_implementation")),
        experts=_text(intent.get("experts_implementation")),
        use_kernels=_flag(intent.get("use_kernels")),
        liger=_flag(intent.get("liger")),
        compiled=_flag(intent.get("compile")),
        packed=ticket.packed,
        signals=ticket.signals,
        kernels=ticket.kernels,
        fallbacks=ticket.fallbacks,
        device=ticket.device,
    )


def _text(value: str | None) -> str:
    return "" if value is None or value.lower() in {"none", ""} else value


def _flag(value: str | None) -> bool | None:
    return None if value is None or value.lower() in {"none", ""} else value.lower() in {"true", "1", "yes"}
