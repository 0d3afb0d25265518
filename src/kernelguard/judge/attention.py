"""Which attention will each sub-model really run? From the classes' flags, the request and what is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packaging.version import Version

from kernelguard.declare.modes import Attention
from kernelguard.declare.values import Declaration, Intent
from kernelguard.judge.hub import install_kernels, installed, kernels_problem
from kernelguard.judge.hub_builds import OFFLINE_FIX, no_build, offline_problem
from kernelguard.judge.values import Finding, Status
from kernelguard.observe.values import Environment, ImportFact, ImportOutcome

_FLASH = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
    "flash_attention_4": ("flash-attn-4", "flash_attn.cute"),
}
"""Distribution and module that transformers looks for."""
_VARLEN_SINCE = Version("2.10")
_BY_VERSION = Version("5.13")
"""From here on transformers asks for an attention kernel by version (integrations/hub_kernels.py); before, for main."""


def attention_module(intent: Intent) -> str | None:
    """The module whose import decides whether the attention that was asked for can run."""
    return _FLASH[intent.attn_implementation][1] if intent.attn_implementation in _FLASH else None


def judge_attention(
    declaration: Declaration, intent: Intent, environment: Environment, imports: Iterable[ImportFact] = ()
) -> Iterator[Finding]:
    """One finding for each sub-model that loses something, and at most one on the package behind it. Pure."""
    facts = [fact for fact in declaration.modes if isinstance(fact, Attention)]
    top = next((fact.configured for fact in facts if not fact.path), None)
    for fact in facts:
        # A request for the whole model is handed on to every nested configuration.
        asked = intent.attn_implementation or fact.configured or top
        here = _Here(environment, declaration.transformers.version, {i.module: i for i in imports})
        yield from _part(fact, asked, here)


@dataclass(frozen=True, slots=True)
class _Here:
    """Where the model would run."""

    environment: Environment
    transformers: Version
    imports: dict[str, ImportFact]


def _part(fact: Attention, asked: str | None, here: _Here) -> Iterator[Finding]:
    name = f"{fact.model_class} ({fact.path or 'the model itself'})"
    if asked is None:
        yield from _default(fact, name)
    elif asked == "eager":
        return
    elif asked == "sdpa":
        yield from _unsupported(fact, name, asked, supported=fact.sdpa)
    elif asked == "flex_attention":
        yield from _unsupported(fact, name, asked, supported=fact.flex)
    elif asked in _FLASH:
        if fact.compatible and asked not in fact.compatible:
            yield Finding(
                code="attention-changed",
                status=Status.WARN,
                reason=f"{name} works with {', '.join(fact.compatible)} only; {asked} was asked for, and "
                f"{fact.compatible[0]} is taken instead, with one warning",
                fix=f"ask for {fact.compatible[0]}",
                evidence=_where(fact),
            )
            yield from _named(fact, fact.compatible[0], here)
            return
        refused = tuple(_unsupported(fact, name, asked, supported=fact.flash))
        yield from refused or _named(fact, asked, here)
    elif asked == "varlen":
        yield from _varlen(fact, name, here)
    elif "/" in asked:
        refused = tuple(_unsupported(fact, name, asked, supported=fact.flash)) if "flash" in asked else ()
        yield from refused or _named(fact, asked, here)
    else:
        yield Finding(
            code="attention-not-known",
            status=Status.UNKNOWN,
            reason=f"the attention implementation {asked} is none of transformers' own; what it runs is not known",
            fix="attn_implementation=sdpa, or check that one yourself",
        )


def _varlen(fact: Attention, name: str, here: _Here) -> Iterator[Finding]:
    """What kernelguard_train registers with transformers under this name: `varlen_attn` of torch itself."""
    torch = here.environment.torch
    if torch is not None and torch < _VARLEN_SINCE:
        yield Finding(
            code="attention-unsupported",
            status=Status.FAIL,
            reason=f"varlen is torch's varlen_attn, and torch {torch} has none",
            fix=f"pip install 'torch>={_VARLEN_SINCE}'",
        )
        return
    # Like sdpa it is called through transformers' table of attention functions.
    yield from _unsupported(fact, name, "varlen", supported=fact.sdpa)


def _default(fact: Attention, name: str) -> Iterator[Finding]:
    if not fact.own or fact.sdpa is True:
        return
    if fact.sdpa is None:
        yield Finding(
            code="attention-flag-unread",
            status=Status.UNKNOWN,
            reason=f"whether {name} supports sdpa could not be read: the flag is no literal",
            evidence=_where(fact),
        )
        return
    better = fact.compatible[0] if fact.compatible else "flash_attention_2" if fact.flash else ""
    better = better or ("flex_attention" if fact.flex else "")
    yield Finding(
        code="attention-eager",
        status=Status.WARN,
        reason=f"{name} does not support sdpa, so its attention ({', '.join(fact.own)}) runs eagerly; nothing says so",
        fix=f"attn_implementation={better}" if better else "nothing: the class supports no other attention",
        evidence=_where(fact),
    )


def _unsupported(fact: Attention, name: str, asked: str, *, supported: bool | None) -> Iterator[Finding]:
    if supported is True:
        return
    sure = supported is False and fact.surely_built
    yield Finding(
        code="attention-unsupported" if sure else "attention-flag-unread",
        status=Status.FAIL if sure else Status.UNKNOWN,
        reason=f"{asked} was asked for, and {name} does not support it: building the model raises"
        if sure
        else f"whether {name} is built and supports {asked} could not be told from the source",
        fix="ask for another attention implementation"
        + (f", for example attn_implementation={{'': '{asked}', '{fact.path}': 'eager'}}" if fact.path else ""),
        evidence=_where(fact),
    )


def _named(fact: Attention, asked: str, here: _Here) -> Iterator[Finding]:
    """The package or hub repository behind a name; the same text for every part, so that it is said once."""
    environment = here.environment
    problem = kernels_problem(fact.window, environment)
    if asked not in _FLASH:
        lost = None if problem else _lost(asked, asked, here)
        if lost is not None:
            yield lost
            return
        yield Finding(
            code="attention-hub-unusable" if problem else "attention-not-verified",
            status=Status.FAIL if problem else Status.UNKNOWN,
            reason=f"{asked} comes from the kernel hub, but {problem}: building the model raises"
            if problem
            else f"{asked} comes from the kernel hub; whether it has a build for this machine was not looked at",
            fix=install_kernels(fact.window) if problem else "build the model once on that machine",
        )
        return
    distribution, module = _FLASH[asked]
    text = installed(environment, distribution)
    repository = dict(fact.hub_flash).get(asked)
    imported = here.imports.get(module)
    if text is None:
        yield Finding(
            code="attention-not-verified",
            status=Status.UNKNOWN,
            reason=f"{asked} needs {distribution} or the kernel hub; what this machine has is not known",
            fix=f"check that {distribution} is installed there",
        )
    elif text == "" and imported is not None and (imported.file or imported.search_path):
        where = imported.file or ", ".join(imported.search_path)
        yield Finding(
            code="attention-without-metadata",
            status=Status.FAIL,
            reason=f"{asked} was asked for, and {module} is found at {where}, but no installed distribution owns it: "
            f"transformers cannot tell its version, and refuses it or fails while importing; {distribution} is not "
            "installed",
            fix=f"remove {where}, then install {distribution}",
        )
    elif text == "" and (problem or repository is None):
        yield Finding(
            code="attention-not-installed",
            status=Status.FAIL,
            reason=f"{asked} was asked for, and {distribution} is not installed"
            + (f"; nor can the hub stand in, because {problem}" if problem else "")
            + ": building the model raises",
            fix=f"install {distribution}, or {install_kernels(fact.window)}, or attn_implementation=sdpa",
        )
    elif text == "" and repository is not None and (lost := _lost(asked, repository, here)) is not None:
        yield lost
    elif text == "":
        yield Finding(
            code="attention-from-hub",
            status=Status.UNKNOWN,
            reason=f"{distribution} is not installed, so {asked} comes from {repository} on the hub, with one warning; "
            "whether that has a build for this machine was not looked at",
            fix=f"install {distribution}, or build the model once on that machine",
        )
    elif imported is None:
        yield Finding(
            code="attention-not-imported",
            status=Status.UNKNOWN,
            reason=f"{distribution} {text} is listed, but it was not imported: whether it loads is not known",
            fix=f"python -c 'import {module}'",
        )
    elif imported.outcome is not ImportOutcome.OK:
        said = f"{imported.error_type}: {imported.error}".strip(": ") or imported.outcome.value
        yield Finding(
            code="attention-broken",
            status=Status.FAIL,
            reason=f"{distribution} {text} is installed, but importing {module} fails: {said}",
            fix=f"reinstall {distribution} for this torch",
            evidence=(said,),
        )


def _lost(asked: str, repository: str, here: _Here) -> Finding | None:
    """A kernel of the hub that certainly cannot be loaded: building the model raises."""
    found = no_build(repository, here.transformers, here.environment)
    reason, fix = (found.reason, found.fix) if found is not None else ("", "")
    if not reason and "@" not in repository and here.transformers >= _BY_VERSION:
        reason, fix = offline_problem(here.environment, repository), OFFLINE_FIX
    if not reason:
        return None
    return Finding(
        code="attention-no-build",
        status=Status.FAIL,
        reason=(
            f"{asked} was asked for, which comes from {repository} on the hub"
            if asked != repository
            else f"{asked} was asked for"
        )
        + f": {reason}",
        fix=fix,
    )


def _where(fact: Attention) -> tuple[str, ...]:
    return (f"{fact.file}:{fact.line}",)
