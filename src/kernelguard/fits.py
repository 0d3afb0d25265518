"""Is a set of builds known that serves this run on that machine? Asks the matrices and the rules, never the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernelguard.declare.values import Declaration, Intent
from kernelguard.judge.assess import needed_paths
from kernelguard.judge.rules import Facts, Rule, apply_rules
from kernelguard.judge.values import Status
from kernelguard.matrix import kernel_packages
from kernelguard.observe.values import Environment
from kernelguard.resolve.matrix import matrix
from kernelguard.resolve.needs import needs_of
from kernelguard.resolve.request import RuleAnswer
from kernelguard.resolve.resolution import resolve
from kernelguard.resolve.values import Resolution


def known_set(declaration: Declaration, intent: Intent, environment: Environment, rules: Sequence[Rule]) -> Resolution:
    """The newest set of builds known to `matrices/` that serves what the run needs, or what stands in its way.

    Raises:
        InputError: the target contradicts what is published.
    """
    paths = needed_paths(declaration, intent)
    return resolve(
        needs=needs_of(paths, kernels=kernel_packages(), known=matrix(), hub=intent.use_kernels),
        environment=environment,
        transformers=declaration.transformers.version,
        rules=lambda hypothetical, via: ask_rules(rules, hypothetical, via, declaration, intent),
    )


def ask_rules(
    rules: Sequence[Rule], environment: Environment, via: Mapping[str, str], declaration: Declaration, intent: Intent
) -> RuleAnswer:
    """What the known bad combinations say about one hypothetical environment."""
    facts = Facts.of(environment=environment, declaration=declaration, intent=intent, via=via)
    findings, still_open = apply_rules(rules, facts)
    return RuleAnswer(
        against=tuple((f.code, f.reason) for f in findings if f.status is Status.FAIL),
        warnings=tuple((f.code, f.reason) for f in findings if f.status is Status.WARN),
        unknown=tuple((o.rule_id, o.text) for o in still_open if o.status is Status.FAIL),
    )
