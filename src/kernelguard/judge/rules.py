"""Which known bad combinations is this run? Rules are data (`matrices/rules.toml`); no exception is written here."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.judge.bounds import Truth, all_of
from kernelguard.judge.facts import Facts
from kernelguard.judge.grammar import parse_when
from kernelguard.judge.predicates import Predicate, Uses, open_words, walk
from kernelguard.judge.values import Finding, Status

__all__ = [
    "Explanation",
    "Facts",
    "Match",
    "OpenRule",
    "Rule",
    "apply_rules",
    "check_matrices",
    "evaluate",
    "explain",
    "load_rules",
    "parse_rule",
]

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One known bad combination."""

    id: str
    title: str
    effect: str
    """What happens, one sentence."""
    status: Status
    """FAIL or WARN."""
    fix: str
    """A command that can be pasted, or the one change to make."""
    evidence: tuple[str, ...]
    retrieved: date
    """When the evidence was last looked at."""
    when: tuple[Predicate, ...]
    """All of them must hold."""
    note: str = ""
    bounds_established: bool = True
    """False: where it begins or ends is not known, so it can only warn."""
    expires: date | None = None
    """From this day on it only warns, until somebody looks at the evidence again."""
    mention_when_open: bool = True
    """False: not worth a line when a target leaves its facts open."""
    told_by: tuple[str, ...] = ()
    """Codes of findings that say the same of what is really there; beside one of them the rule says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What one rule says about some facts."""

    rule: Rule
    outcome: Truth
    because: tuple[str, ...] = ()
    """The conditions that hold, both sides named."""
    unknown_facts: tuple[str, ...] = ()
    """The facts that would decide it."""
    open_conditions: tuple[str, ...] = ()
    """The conditions that those facts are about, in words."""
    symbols: tuple[str, ...] = ()
    """The fast paths it is about; empty: the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRule:
    """A rule that would apply, depending on facts that nobody gave."""

    rule_id: str
    status: Status
    title: str
    text: str
    """`would apply (...) if triton is >=3.4.0,<3.7.1`."""
    facts: tuple[str, ...]
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A rule for a person."""

    id: str
    title: str
    status: Status
    effect: str
    condition: str
    """When it applies, in words made from the conditions themselves."""
    fix: str
    note: str
    bounds_established: bool
    expires: str | None
    evidence: tuple[str, ...]
    retrieved: str


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Read a rules file. Only what evaluation needs is looked at; `check_matrices` looks at everything.

    Raises:
        InputError: it cannot be read, or rows are unusable; all of them are named.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as rules: {error}", hint="kernelguard matrix check") from error
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"{path} has schema {document.get('schema')!r}; this kernelguard reads schema {SCHEMA}",
            hint="pip install -U kernelguard-preflight",
        )
    rules, problems = [], []
    for position, row in enumerate(document.get("rule", ())):
        try:
            rules.append(parse_rule(row))
        except ValueError as error:
            problems.append(f"{row.get('id', f'rule {position}')}: {error}")
    if problems:
        raise InputError(f"{path}: " + "; ".join(problems), hint="kernelguard matrix check")
    return tuple(rules)


def parse_rule(row: dict[str, Any]) -> Rule:
    """Make a rule of one row.

    Raises:
        ValueError: a key is missing, or a value is not of the right form.
    """
    try:
        status = Status(row["status"])
        if status not in {Status.FAIL, Status.WARN}:
            raise ValueError(f"status is fail or warn, not {status}")
        return Rule(
            id=row["id"],
            title=row["title"],
            effect=row["effect"],
            status=status,
            fix=row["fix"],
            evidence=tuple(row["evidence"]),
            retrieved=row["retrieved"],
            when=parse_when(row["when"]),
            note=row.get("note", ""),
            bounds_established=row.get("bounds", "established") == "established",
            expires=row.get("expires"),
            mention_when_open=row.get("mention_when_open", True),
            told_by=tuple(row.get("told_by", ())),
        )
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from error


def evaluate(rule: Rule, facts: Facts) -> Match:
    """Hold one rule against the facts. Pure; never raises, whatever the versions look like."""
    verdicts = [(predicate, predicate.test(facts)) for predicate in rule.when]
    outcome = all_of(verdict.truth for _, verdict in verdicts)
    still_open = [(p, v) for p, v in verdicts if v.truth is Truth.UNKNOWN] if outcome is Truth.UNKNOWN else []
    return Match(
        rule=rule,
        outcome=outcome,
        because=tuple(v.said for _, v in verdicts if v.truth is Truth.TRUE),
        unknown_facts=tuple(dict.fromkeys(name for _, v in still_open for name in v.unknown)),
        open_conditions=tuple(open_words(p, v) for p, v in still_open),
        symbols=tuple(
            dict.fromkeys(symbol for p in walk(rule.when) if isinstance(p, Uses) for symbol in p.used(facts))
        ),
    )


def apply_rules(
    rules: Iterable[Rule], facts: Facts, *, today: date | None = None
) -> tuple[tuple[Finding, ...], tuple[OpenRule, ...]]:
    """The findings of all rules that apply, and the rules that only missing facts keep from applying.

    A rule past its `expires` day only warns; without `today` no rule is past it.
    """
    findings: list[Finding] = []
    still_open: list[OpenRule] = []
    for rule in rules:
        match = evaluate(rule, facts)
        if match.outcome is Truth.TRUE:
            findings.extend(_findings(match, today))
        elif match.outcome is Truth.UNKNOWN and rule.mention_when_open:
            still_open.append(_open(match))
    return tuple(findings), tuple(still_open)


def _findings(match: Match, today: date | None) -> Iterable[Finding]:
    rule = match.rule
    expired = rule.expires is not None and today is not None and today >= rule.expires
    caveats = [
        "Where this begins and ends is not established." if not rule.bounds_established else "",
        f"Not looked at again since {rule.retrieved}." if expired else "",
    ]
    reason = " ".join(filter(None, (rule.effect, f"Here: {', '.join(match.because)}.", *caveats)))
    for symbol in match.symbols or (None,):
        yield Finding(
            code=rule.id,
            status=Status.WARN if expired else rule.status,
            reason=reason,
            fast_path=symbol,
            fix=rule.fix,
            evidence=rule.evidence,
        )


def _open(match: Match) -> OpenRule:
    rule = match.rule
    return OpenRule(
        rule_id=rule.id,
        status=rule.status,
        title=rule.title,
        text=f"would {rule.status} if {' and '.join(match.open_conditions)}: {rule.title}",
        facts=match.unknown_facts,
        symbols=match.symbols,
    )


def explain(rule_id: str, rules: Sequence[Rule]) -> Explanation:
    """Everything about one rule, for a person.

    Raises:
        InputError: there is none of that id; the nearest ones are named.
    """
    by_id = {rule.id: rule for rule in rules}
    rule = by_id.get(rule_id)
    if rule is None:
        near = difflib.get_close_matches(rule_id, by_id, n=3, cutoff=0.4)
        raise InputError(
            f"no rule is called {rule_id!r}",
            hint=f"near: {', '.join(near)}" if near else "kernelguard matrix list shows all rules",
        )
    return Explanation(
        id=rule.id,
        title=rule.title,
        status=rule.status,
        effect=rule.effect,
        condition="; and ".join(predicate.words() for predicate in rule.when),
        fix=rule.fix,
        note=rule.note,
        bounds_established=rule.bounds_established,
        expires=None if rule.expires is None else rule.expires.isoformat(),
        evidence=rule.evidence,
        retrieved=rule.retrieved.isoformat(),
    )


def check_matrices(folder: Path) -> list[str]:
    """Every problem of the data files in a folder like `matrices/`; empty: none."""
    from kernelguard.judge.data_files import problems_in  # noqa: PLC0415 - jsonschema, which only this command needs

    return problems_in(folder)
