"""The question that most tests of the resolver ask: the published 27B, on some machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from packaging.version import Version

from kernelguard.data import matrices
from kernelguard.declare.values import (
    BindingKind,
    BindingSite,
    Declaration,
    FastPath,
    Intent,
    ModelConfig,
    Phase,
    Requirement,
    SubModel,
    TransformersTree,
)
from kernelguard.judge.rules import Facts, apply_rules, load_rules
from kernelguard.judge.values import Status
from kernelguard.matrix import kernel_packages
from kernelguard.observe.targets import target
from kernelguard.observe.values import Environment
from kernelguard.resolve import Market, Options, RuleAnswer, fleet, matrix, needs_of, resolve
from kernelguard.resolve.request import RuleCheck
from kernelguard.resolve.values import Need, Resolution

TRANSFORMERS = Version("5.24.0")
HYBRID = {"causal_conv1d_fn": "causal_conv1d", "chunk_gated_delta_rule": "fla"}
MAMBA = {"mamba_chunk_scan_combined": "mamba_ssm", "causal_conv1d_fn": "causal_conv1d"}


def fast_path(symbol: str, package: str) -> FastPath:
    return FastPath(
        symbol=symbol,
        package=package,
        distribution=package.replace("_", "-"),
        import_module=package,
        mechanism="decorator",
        requirement=Requirement.AUTOMATIC,
        phases=(Phase.TRAINING,),
        model_type="qwen3_5_text",
        file="models/qwen3_5/modeling_qwen3_5.py",
        line=1,
        binding=BindingSite(kind=BindingKind.CLOSURE, module="m", name=symbol),
        layers=48,
        fallback="torch",
    )


def needs(symbols: Mapping[str, str] = HYBRID, *, hub: bool = False) -> tuple[Need, ...]:
    paths = [fast_path(symbol, package) for symbol, package in symbols.items()]
    return needs_of(paths, kernels=kernel_packages(), known=matrix(), hub=hub)


def declaration(symbols: Mapping[str, str] = HYBRID) -> Declaration:
    raw = {"model_type": "qwen3_5_text"}
    config = ModelConfig(
        source="config.json",
        model_type="qwen3_5_text",
        architectures=(),
        parts=(SubModel(path="", model_type="qwen3_5_text", raw=raw),),
        raw=raw,
    )
    return Declaration(
        config=config,
        transformers=TransformersTree(root=Path(), version=TRANSFORMERS, origin="path"),
        fast_paths=tuple(fast_path(s, p) for s, p in symbols.items()),
    )


def shipped_rules(symbols: Mapping[str, str] = HYBRID) -> RuleCheck:
    """The real rules, asked the way the command line asks them; remembered, as they are pure and tests ask alike."""
    return _shipped_rules(tuple(symbols.items()))


@cache
def _shipped_rules(symbols: tuple[tuple[str, str], ...]) -> RuleCheck:
    rules = load_rules(matrices() / "rules.toml")
    declared, intent = declaration(dict(symbols)), Intent()
    answers: dict[str, RuleAnswer] = {}

    def check(environment: Environment, via: Mapping[str, str]) -> RuleAnswer:
        facts = Facts.of(environment=environment, declaration=declared, intent=intent, via=via)
        key = repr(facts)
        if key not in answers:
            findings, still_open = apply_rules(rules, facts)
            answers[key] = RuleAnswer(
                against=tuple((f.code, f.reason) for f in findings if f.status is Status.FAIL),
                warnings=tuple((f.code, f.reason) for f in findings if f.status is Status.WARN),
                unknown=tuple((o.rule_id, o.text) for o in still_open if o.status is Status.FAIL),
            )
        return answers[key]

    return check


def answer(
    *targets: str,
    symbols: Mapping[str, str] = HYBRID,
    market: Market | None = None,
    options: Options | None = None,
) -> Resolution:
    """Resolve for one target, or for several that one set has to serve."""
    if market is None:
        return _answer(targets, tuple(symbols.items()), options)
    return resolve(
        needs=needs(symbols),
        environment=fleet([target(spec) for spec in targets]),
        transformers=TRANSFORMERS,
        market=market,
        rules=shipped_rules(symbols),
        options=options,
    )


@cache
def _answer(targets: tuple[str, ...], symbols: tuple[tuple[str, str], ...], options: Options | None) -> Resolution:
    # Pure, so each question is answered once for all tests.
    return answer(*targets, symbols=dict(symbols), options=options, market=Market(known=matrix()))
