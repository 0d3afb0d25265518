"""Verify a model's kernels in one interpreter: plan, one worker for each kernel, packed isolation, verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kernelguard.declare.values import Declaration, Intent
from kernelguard.errors import InputError, UndeterminedError
from kernelguard.judge.values import Level
from kernelguard.observe.values import Bindings, BoundTo, Environment
from kernelguard.verify.fingerprint import binary_digests, fingerprint
from kernelguard.verify.isolation import LENGTHS, run_isolation, signal_sets
from kernelguard.verify.plan import TRAINING_LENGTH, language_parts, plan
from kernelguard.verify.probing import run_probe
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import ProbeResult, SignalCheck, Verdict

_SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")


def verify(
    declaration: Declaration,
    intent: Intent,
    environment: Environment,
    *,
    bindings: Bindings | None = None,
    level: Level = Level.GPU,
    timeout: float = 600.0,
    length: int = TRAINING_LENGTH,
    warm_cache: Path | None = None,
    shards: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Measure every kernel that the run calls, in the observed interpreter, within about `timeout` seconds.

    With `bindings`, kernels that the model is not bound to are left out: what they compute does not matter to this
    run. `length` is the training length in tokens. `warm_cache` is a folder that afterwards holds what Triton compiled
    and tuned for exactly these shapes (see `cache_variables`). `shards` is how many processes force configurations at
    once; by default half of this machine's cores.

    Raises:
        InputError: `warm_cache` cannot be made.
        UndeterminedError: the environment is not an interpreter on this machine.
    """
    if not environment.live or environment.executable is None:
        raise UndeterminedError(
            f"{environment.origin} is not an interpreter on this machine, so nothing can be executed in it",
            hint="kernelguard verify MODEL --python /path/to/venv/bin/python on the machine that will train",
        )
    began = time.monotonic()
    environ = worker_environment(os.environ, level=level, warm_cache=warm_cache)
    device = "cuda" if level is Level.GPU else "cpu"
    requests = tuple(r for r in plan(declaration, intent, length=length) if _called(r, bindings))
    if level <= Level.IMPORT:
        requests = tuple(_import_only(r) for r in requests)
    count = shards if shards is not None else max((os.cpu_count() or 2) // 2, 1)
    probes: list[ProbeResult] = []
    for number, request in enumerate(requests, start=1):
        left = timeout - (time.monotonic() - began)
        # What is left is shared by what is still to come, so that one slow kernel does not take it all.
        share = max(left / (len(requests) - number + 1), 1.0) if number < len(requests) else max(left, 1.0)
        probes.append(
            run_probe(
                environment.executable,
                request,
                timeout=max(share, min(left, 60.0)),
                device=device,
                environ=environ,
                shards=count,
                progress=lambda text, n=number: progress(f"{n}/{len(requests)} {text}"),  # type: ignore[misc]
            )
        )
    isolation: tuple[SignalCheck, ...] = ()
    if intent.packed and level > Level.IMPORT:
        progress("packed samples")
        isolation = run_isolation(
            environment.executable,
            language_parts(declaration),
            _sets(intent),
            dtype=intent.dtype if device == "cuda" else "float32",
            device=device,
            # Without a GPU there are no chunks to have edges, and every token takes its time.
            lengths=LENGTHS if device == "cuda" else (11, 1, 7),
            attn_implementation=intent.attn_implementation,
            experts_implementation=intent.experts_implementation,
            timeout=max(timeout - (time.monotonic() - began), 60.0),
            environ=environ,
        )
    return Verdict(
        level=level,
        fingerprint=fingerprint(
            environment,
            requests,
            model_type=declaration.config.model_type,
            binaries=binary_digests(environment),
        ),
        probes=tuple(probes),
        isolation=isolation,
        signals=intent.signals if intent.packed else None,
        seconds=time.monotonic() - began,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def worker_environment(environ: Mapping[str, str], *, level: Level, warm_cache: Path | None) -> dict[str, str]:
    """The environment variables of the workers: this process's own, and what the level and the cache need.

    Raises:
        InputError: the cache folder cannot be made.
    """
    found = dict(environ)
    if level is Level.INTERPRETED:
        found["TRITON_INTERPRET"] = "1"
    if warm_cache is not None:
        try:
            warm_cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the cache folder {warm_cache}: {error.strerror}", hint="--warm-cache /path/to/folder"
            ) from error
        found |= cache_variables(warm_cache)
    return found


def cache_variables(folder: Path) -> dict[str, str]:
    """What a training process has to set to find what `--warm-cache` left: compiled kernels and tuned choices."""
    return {
        "TRITON_CACHE_DIR": str(folder.absolute()),
        "TRITON_CACHE_AUTOTUNING": "1",  # Triton's own switch
        "FLA_CACHE_RESULTS": "1",  # fla's, for the kernels that it tunes itself
    }


def _sets(intent: Intent) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The run's signals with each left out in turn; and all there are, so that a fix can be named."""
    sent = intent.signals if intent.signals is not None else _SIGNALS
    sets = signal_sets(sent)
    known = tuple(dict.fromkeys((*sent, *_SIGNALS)))
    return sets if set(known) == set(sent) else (*sets, (known, "nothing"))


def _called(request: ProbeRequest, bindings: Bindings | None) -> bool:
    """Whether the model really calls it. A kernel whose binding is not known is probed."""
    if bindings is None:
        return True
    mine = [b.bound_to for b in bindings.bindings if b.symbol == request.symbol]
    return not mine or any(bound in {BoundTo.KERNEL, BoundTo.UNKNOWN, BoundTo.OTHER} for bound in mine)


def _import_only(request: ProbeRequest) -> ProbeRequest:
    return ProbeRequest(
        symbol=request.symbol,
        package=request.package,
        module=request.module,
        op=request.op,
        dtype=request.dtype,
        trains=request.trains,
        layers=request.layers,
    )
