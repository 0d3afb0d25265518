"""The walks of `kernelguard lock` and `kernelguard sync`: declare, resolve, lock. Wires the rooms."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelguard.check import cache_folder, transformers_tree
from kernelguard.data import matrices
from kernelguard.declare.config import read_config
from kernelguard.declare.declaration import declare
from kernelguard.declare.intent import resolve_intent
from kernelguard.errors import InputError
from kernelguard.fits import ask_rules
from kernelguard.judge.assess import needed_paths
from kernelguard.judge.rules import load_rules
from kernelguard.judge.values import Finding
from kernelguard.lock import Lock, Places, Subject, check_lock, load_lock, make_lock, sync, write_lock
from kernelguard.lock.check import SYNC, take_inventory
from kernelguard.lock.document import dumps
from kernelguard.lock.recorded import kernel_distributions, record_lock
from kernelguard.matrix import kernel_packages
from kernelguard.observe.targets import target
from kernelguard.resolve import Market, Options, fleet, matrix, needs_of, resolve
from kernelguard.resolve.market import gather, sources_for, verified
from kernelguard.resolve.values import Resolution
from kernelguard.sources.http import Http
from kernelguard.sources.pipconfig import pip_config
from kernelguard.writing import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked on the command line."""

    model: str
    targets: tuple[str, ...]
    transformers: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    intent_file: Path | None = None
    train_config: Path | None = None
    indexes: tuple[str, ...] = ()
    find_links: tuple[Path, ...] = ()
    options: Options = field(default_factory=Options)


def run_lock(request: Request, output: Path, environ: Mapping[str, str]) -> tuple[Lock, tuple[Path, ...]]:
    """Find the newest set that serves every fast path, pin every file of it, and write it down.

    Returns the lock, and which files were written.

    Raises:
        InputError: an argument or a file is unusable.
        UndeterminedError: a source that may have the answer cannot be asked.
        NoSetError: there is no such set; nothing is written.
        ToolError: pip-tools or uv failed.
    """
    if not request.targets:
        raise InputError("for which machine was not said", hint="--target h100, or several for a mixed fleet")
    environment = fleet([target(spec) for spec in request.targets])
    wanted = request.transformers or (str(v) if (v := environment.transformers_version) is not None else None)
    tree = transformers_tree(wanted, environ)
    intent = resolve_intent(request.flags, request.intent_file, request.train_config)
    declaration = declare(read_config(request.model), tree)
    paths = needed_paths(declaration, intent)
    needs = needs_of(paths, kernels=kernel_packages(), known=matrix(), hub=intent.use_kernels)
    cache = cache_folder(environ)
    http = Http(timeout=30, cache=cache / "http")
    config = pip_config(Path(sys.executable))
    sources = sources_for(matrix(), config, http, indexes=request.indexes, folders=request.find_links)
    rules = load_rules(matrices() / "rules.toml")

    def answer(market: Market) -> Resolution:
        return resolve(
            needs=needs,
            environment=environment,
            transformers=tree.version,
            market=market,
            rules=lambda hypothetical, via: ask_rules(rules, hypothetical, via, declaration, intent),
            options=request.options,
        )

    resolution, _ = verified(answer, gather(needs, matrix(), sources), http)
    lock = make_lock(
        resolution,
        Subject(
            model=declaration.config,
            intent=intent,
            fast_paths=paths,
            transformers=tree.version,
            environment=environment,
        ),
        Places(config=config, extra_indexes=request.indexes, find_links=request.find_links),
        cache=cache,
        http=http,
    )
    return lock, write_lock(lock, output)


def run_record(request: Request, python: Path | None, output: Path, environ: Mapping[str, str]) -> Lock:
    """Lock an environment as it is installed, for machines where no index can be asked, and write it down.

    Raises:
        InputError: an argument or a file is unusable.
        UndeterminedError: the environment cannot be looked at, or was changed by hand.
    """
    from kernelguard.check import Request as CheckRequest  # noqa: PLC0415 - the name is taken
    from kernelguard.check import run_check  # noqa: PLC0415

    asked = CheckRequest(
        model=request.model,
        python=python,
        flags=request.flags,
        intent_file=request.intent_file,
        train_config=request.train_config,
        level="import",
    )
    check = run_check(asked, environ)
    paths = needed_paths(check.declaration, check.intent, check.bindings)
    environment = check.environment
    lock = record_lock(
        check.declaration.config,
        check.intent,
        paths,
        environment=environment,
        inventory=take_inventory(
            Path(environment.executable or ""),
            None,
            hashed=kernel_distributions(paths, environment),
            records=True,
        ),
        bindings=check.bindings,
    )
    write_file(output, dumps(lock).encode())
    return lock


def run_sync(path: Path, python: Path, environ: Mapping[str, str], *, keep_extra: bool) -> tuple[Finding, ...]:
    """Make an environment exactly the lock, then hold it against the lock; raises as `lock.sync`."""
    return _named(sync(load_lock(path), python, cache=cache_folder(environ), keep_extra=keep_extra), path, python)


def run_lock_check(path: Path, python: Path) -> tuple[Finding, ...]:
    """Hold an environment against a lock; raises as `lock.check_lock`."""
    return _named(check_lock(load_lock(path), python), path, python)


def _named(findings: tuple[Finding, ...], path: Path, python: Path) -> tuple[Finding, ...]:
    """The same, with a fix that can be pasted."""
    command = shlex.join(["kernelguard", "sync", str(path), "--python", str(python)])
    return tuple(replace(finding, fix=command) if finding.fix == SYNC else finding for finding in findings)
