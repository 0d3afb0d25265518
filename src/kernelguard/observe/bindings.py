"""What is each fast path of a declaration really bound to in this interpreter?

Two workers answer: `importer` imports every kernel package in a process of its own, `bindings` imports the modeling
code as the training process will and reads the bound functions. This module only turns their records into values;
what a worker did not report is unknown, never a pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kernelguard.declare.source import REMOTE
from kernelguard.declare.values import Declaration, FastPath
from kernelguard.observe.process import Record, WorkerResult, run_worker
from kernelguard.observe.values import Binding, Bindings, BoundTo, GateFact, ImportFact, ImportOutcome

_LONGEST_IMPORT_S = 90.0
_LONGEST_BUILD_S = 60.0


def observe_bindings(
    python: str, declaration: Declaration, *, also: Iterable[str] = (), timeout: float = 300.0
) -> Bindings:
    """Import what `declaration` names in the interpreter `python` and read its bindings, within `timeout` seconds.

    `also`: further modules to import, each in a process of its own (the attention that was asked for).
    A package that hangs is tried twice, a quarter of the time each, so that the others are still looked at.

    Raises:
        OSError: `python` cannot be executed at all.
    """
    request = bindings_request(declaration, build_s=min(_LONGEST_BUILD_S, timeout / 4))
    with ThreadPoolExecutor(max_workers=1) as pool:
        # The two know nothing of each other, and both spend most of their time importing torch.
        importing = pool.submit(_import_packages, python, declaration.fast_paths, also, timeout=timeout)
        result = run_worker(python, "bindings", request, timeout=timeout)
        imports, problems = importing.result()
    problems += [str(record["text"]) for record in result.of_kind("problem")]
    if not result.finished:
        problems.append(f"the binding worker {result.ending()}{_last_words(result)}")
    modules = _modules(result)
    torch = next(result.of_kind("torch"), None)
    layers = next(result.of_kind("layers"), None)
    return Bindings(
        bindings=_bindings(declaration.fast_paths, result, modules, problems),
        gates=tuple(
            GateFact(
                module=str(record["module"]),
                name=str(record["name"]),
                value=None if record["value"] is None else bool(record["value"]),
                detail=str(record.get("detail", "")),
            )
            for record in result.of_kind("gate")
        ),
        imports=imports,
        modules=modules,
        layer_counts={} if layers is None else {str(name): int(count) for name, count in layers["counts"].items()},
        cuda_available=None if torch is None else bool(torch["cuda_available"]),
        problems=tuple(problems),
    )


def _import_packages(
    python: str, fast_paths: Iterable[FastPath], also: Iterable[str], *, timeout: float
) -> tuple[tuple[ImportFact, ...], list[str]]:
    """The real import of every package module, one process each, and what went wrong beside it.

    A worker that dies with a module is started again for the rest.
    """
    deadline = time.monotonic() + timeout
    problems: list[str] = []
    wanted: dict[str, list[str]] = {}
    for fast_path in fast_paths:
        symbols = wanted.setdefault(fast_path.import_module, [])
        if fast_path.symbol not in symbols:
            symbols.append(fast_path.symbol)
    for module in also:
        wanted.setdefault(module, [])
    facts: dict[str, ImportFact] = {}
    limit_s = min(_LONGEST_IMPORT_S, timeout / 4)
    while left := [module for module in wanted if module not in facts]:
        request = {"modules": [{"module": module, "symbols": wanted[module]} for module in left], "limit_s": limit_s}
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return _not_tried(wanted, facts, "no time was left to import it"), problems
        result = run_worker(python, "importer", request, timeout=remaining)
        problems += [f"import torch: {entry['error_type']}: {entry['error']}" for entry in result.of_kind("torch")]
        facts |= {fact.module: fact for fact in map(_import_fact, result.of_kind("import"))}
        if result.finished:
            break
        problems.append(f"the import worker {result.ending()}{_last_words(result)}")
        died_in = result.died_at.removeprefix("import ")
        if died_in not in wanted or died_in in facts:
            # It died before it came to a package (in torch, for example), and would again.
            return _not_tried(wanted, facts, f"the import worker {result.ending()}"), problems
        facts[died_in] = _died(died_in, result)
    return tuple(facts[module] for module in wanted), problems


def _not_tried(wanted: Iterable[str], facts: dict[str, ImportFact], why: str) -> tuple[ImportFact, ...]:
    return tuple(
        facts.get(module) or ImportFact(module=module, outcome=ImportOutcome.NOT_TRIED, error=why) for module in wanted
    )


def _died(module: str, result: WorkerResult) -> ImportFact:
    """The import of a module that took its worker with it."""
    if result.timed_out:
        return ImportFact(module=module, outcome=ImportOutcome.HUNG, error=result.ending())
    if result.signal:
        return ImportFact(module=module, outcome=ImportOutcome.CRASHED, signal=result.signal, error=result.ending())
    return ImportFact(module=module, outcome=ImportOutcome.EXITED, error=result.ending())


def _import_fact(record: Record) -> ImportFact:
    return ImportFact(
        module=str(record["module"]),
        outcome=ImportOutcome(record["outcome"]),
        error_type=str(record.get("error_type", "")),
        error=str(record.get("error", "")),
        missing_module=str(record.get("missing_module", "")),
        signal=str(record.get("signal", "")),
        file=str(record.get("file", "")),
        search_path=tuple(record.get("search_path", ())),
        symbols={str(name): bool(there) for name, there in record.get("symbols", {}).items()},
        distributions=tuple(record.get("distributions", ())),
        version=str(record.get("version", "")),
    )


def bindings_request(declaration: Declaration, *, build_s: float = 0.0, build: bool = True) -> dict[str, Any]:
    """What the `bindings` worker is asked. `build`: also build the model on the meta device, to count its layers."""
    # Code that a checkpoint brings along is not run by a check.
    fast_paths = [path for path in declaration.fast_paths if not path.file.startswith(REMOTE)]
    return {
        "modules": list(dict.fromkeys(fast_path.binding.module for fast_path in fast_paths)),
        "sites": [
            {
                "id": number,
                "kind": fast_path.binding.kind.value,
                "module": fast_path.binding.module,
                "name": fast_path.binding.name,
                "owner": fast_path.binding.owner,
                "loader": fast_path.binding.loader,
                "index": fast_path.binding.index,
                "package": fast_path.package,
                "import_module": fast_path.import_module,
                "symbol": fast_path.symbol,
                "model_type": fast_path.model_type,
                "hub_first": fast_path.hub_first,
            }
            for number, fast_path in enumerate(declaration.fast_paths)
            if fast_path in fast_paths
        ],
        "gates": [
            {"module": module, "name": name}
            for module, name in dict.fromkeys(
                (fast_path.binding.module, fast_path.gate.name)
                for fast_path in fast_paths
                if fast_path.gate is not None and fast_path.gate.module_global
            )
        ],
        # Remote code is not run by a check; without it the model cannot be built.
        "config": dict(declaration.config.raw) if build and not declaration.config.remote_code else None,
        "build_s": build_s,
    }


def _modules(result: WorkerResult) -> tuple[ImportFact, ...]:
    """The modeling modules; the one that the worker died in is among them."""
    facts = [_import_fact(record) for record in result.of_kind("module")]
    stage, _, module = result.died_at.partition("import ")
    if not result.finished and not stage and module.startswith("transformers.models."):
        facts.append(_died(module, result))
    return tuple(facts)


def _bindings(
    fast_paths: Sequence[FastPath], result: WorkerResult, modules: Iterable[ImportFact], problems: Sequence[str]
) -> tuple[Binding, ...]:
    reported = {record["id"]: record for record in result.of_kind("binding")}
    failed = {fact.module: fact for fact in modules if fact.outcome is not ImportOutcome.OK}
    bindings = []
    for number, fast_path in enumerate(fast_paths):
        record = reported.get(number)
        if record is None:
            bindings.append(_unread(fast_path, failed, problems))
            continue
        bindings.append(
            Binding(
                symbol=fast_path.symbol,
                module=fast_path.binding.module,
                bound_to=BoundTo(record["bound_to"]),
                target=str(record.get("target", "")),
                file=str(record.get("file", "")),
                distribution=str(record.get("distribution", "")),
                parameters=tuple(record.get("parameters", ())),
                accepts_any_keyword=bool(record.get("accepts_any_keyword", False)),
                detail=str(record.get("detail", "")),
            )
        )
    return tuple(bindings)


def _unread(fast_path: FastPath, failed: dict[str, ImportFact], problems: Sequence[str]) -> Binding:
    """The binding of a fast path that no record speaks of."""
    site = fast_path.binding
    if fast_path.file.startswith(REMOTE):
        detail = "the checkpoint's own code was read, not run"
        return Binding(symbol=fast_path.symbol, module=site.module, bound_to=BoundTo.UNKNOWN, detail=detail)
    fact = failed.get(site.module)
    if fact is None:
        detail = "; ".join(problems) or "the binding worker did not report it"
    else:
        how = ": ".join(part for part in (fact.error_type, fact.error) if part)
        detail = f"{site.module} could not be imported ({fact.outcome}): {how}"
    return Binding(symbol=fast_path.symbol, module=site.module, bound_to=BoundTo.UNKNOWN, detail=detail)


def _last_words(result: WorkerResult) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    return f"; the last it printed: {lines[-1]}" if lines else ""
