"""Facts for rule tests: a complete machine that no rule is about, and single changes to it."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from kernelguard.data import matrices
from kernelguard.judge.rules import Facts, Match, Rule, evaluate, load_rules

UNKNOWN = object()
"""A fact nobody gave."""
RULES: dict[str, Rule] = {rule.id: rule for rule in load_rules(matrices() / "rules.toml")}

_VERSIONS = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "triton": "3.7.1",
    "ptxas": "13.3",
    "glibc": "2.39",
    "python": "3.12.3",
    "transformers": "5.24.0",
    "driver": "590.10",
}
_CHOICES = {
    "machine": "x86_64",
    "dtype": "bfloat16",
    "phase": "training",
    "attention": (),
    "model_types": ("qwen3_5", "qwen3_5_text"),
    "quantization": (),
    "settings": (),
    "head_dim": ("128",),
}
_FLAGS = {
    "packed": False,
    "compile": False,
    "use_kernels": False,
    "liger": False,
    "executed": True,
    "gpu_seen_working": False,
    "nvcc": True,
    "grouped_values": False,
    "grouped_heads": False,
}


def facts(**changes: Any) -> Facts:
    """The complete machine with some facts changed; `None` for a version: known to be absent."""
    given = {**_VERSIONS, **_CHOICES, **_FLAGS, "gpu": "8.0", "symbols": (), "pkgs": {}, "via": {}, "env": {}}
    unexpected = changes.keys() - given.keys()
    if unexpected:
        raise KeyError(unexpected)
    given.update(changes)
    known = {key: value for key, value in given.items() if value is not UNKNOWN}
    return Facts(
        versions={k: None if known[k] is None else Version(known[k]) for k in _VERSIONS if k in known},
        choices={k: _texts(known[k]) for k in _CHOICES if k in known},
        flags={k: known[k] for k in _FLAGS if k in known},
        gpus=tuple(_capability(g) for g in _texts(known["gpu"])) if "gpu" in known else None,
        symbols=_texts(known["symbols"]) if "symbols" in known else None,
        distributions=known.get("pkgs"),
        via=known.get("via", {}),
        variables=known.get("env"),
    )


def match(rule_id: str, **changes: Any) -> Match:
    """What a shipped rule says about the changed machine."""
    return evaluate(RULES[rule_id], facts(**changes))


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
