"""What bounds a step, and what would help most? Every microsecond of the window is given to one cause, then counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelguard.trace.profile import Profile

ATTAINABLE = 0.8
"""Of the data sheet's peak: what a large bf16 product reaches on an H200 (806 of 989 TFLOP/s, docs/profile.md)."""
RECORD = "with torch.profiler.profile(record_shapes=True) as prof: two_steps()  # prof.export_chrome_trace('t.json')"
"""How a trace is made."""
WORTH = 0.01
"""A fix that could give less of a step than this is not named."""


class Cause(StrEnum):
    """What a step's time goes to."""

    LAUNCH = "host launch"
    DATA = "data"
    SCRIPT = "the script's own Python"
    PADDING = "padding"
    COMMUNICATION = "communication"
    STRAGGLER = "straggler"
    GEMM = "GEMM"
    MEMORY = "memory"
    SEQUENCE = "delta rule, scans, convolution"
    OTHER = "kernels of unknown kind"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Something to do, with what it could give at most."""

    title: str
    why: str
    """The numbers behind it."""
    how: str
    """Something to paste: a command or a line of code."""
    gain: float
    """Share of the step, 0 to 1; an upper bound. 0: it only lets more be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The judgement."""

    cause: Cause = Cause.UNKNOWN
    sentence: str = ""
    """The one line that says it all."""
    paradox: bool = False
    """A utilization counter calls the GPU busy, and yet it mostly waits for the host."""
    shares: tuple[tuple[Cause, float], ...] = ()
    """Cause and its share of the window, largest first; they add up to 1."""
    fixes: tuple[Fix, ...] = ()
    """At most three, worth most first."""


_CAUSE_OF = {
    "gemm": Cause.GEMM,
    "memory": Cause.MEMORY,
    "sequence": Cause.SEQUENCE,
    "other": Cause.OTHER,
    "communication": Cause.COMMUNICATION,
}


def shares(found: Profile, *, straggling: float = 0.0) -> dict[Cause, float]:
    """Share of the window by cause; `straggling` is the share in which this rank waited for a slower one."""
    wall, idle = found.wall, found.idle
    times = dict.fromkeys(Cause, 0.0)
    times[Cause.LAUNCH] = idle.launch + idle.device + idle.compiling
    times[Cause.DATA] = idle.data
    times[Cause.SCRIPT] = idle.script
    density = found.run.density if found.run else None
    for part in found.parts:
        cause = _CAUSE_OF[part.bound]
        busy = part.busy
        if cause is not Cause.COMMUNICATION:
            # What is too short to be worth its launch is the host's doing, not the memory's.
            short = min(busy, part.short_us)
            times[Cause.LAUNCH] += short
            busy -= short
            if density is not None:
                times[Cause.PADDING] += busy * (1 - density)
                busy *= density
        times[cause] += busy
    waited = min(times[Cause.COMMUNICATION], straggling * wall)
    times[Cause.COMMUNICATION] -= waited
    times[Cause.STRAGGLER] += waited
    total = sum(times.values()) or 1.0
    return {cause: time / total for cause, time in times.items() if time > 0}


def judge(found: Profile, *, straggling: float = 0.0, straggler: str = "") -> Bound:
    """What bounds this trace's steps."""
    if not found.launches or found.wall <= 0:
        return Bound(
            cause=Cause.UNKNOWN,
            sentence="Not known what bounds it: the trace holds no GPU activity",
            fixes=(
                Fix(
                    title="Record the GPU too",
                    why="only the host is in this trace",
                    how=RECORD,
                    gain=0.0,
                ),
            ),
        )
    by_cause = sorted(shares(found, straggling=straggling).items(), key=lambda row: -row[1])
    cause, share = by_cause[0]
    known = Cause.UNKNOWN if cause is Cause.OTHER else cause
    busy = found.busy / found.wall
    said = found.run.gpu_utilization if found.run else None
    seen = found.coarse if said is None else said / 100
    paradox = cause in {Cause.LAUNCH, Cause.SCRIPT, Cause.DATA} and seen >= 0.9
    return Bound(
        cause=known,
        sentence=_sentence(found, known, share, seen=seen, busy=busy, paradox=paradox, straggler=straggler),
        paradox=paradox,
        shares=tuple(by_cause),
        fixes=tuple(_fixes(found, dict(by_cause), straggler)[:3]),
    )


def _sentence(
    found: Profile, cause: Cause, share: float, *, seen: float, busy: float, paradox: bool, straggler: str
) -> str:
    step = found.wall / found.step_count
    if cause is Cause.UNKNOWN:
        return f"Not known what bounds it: {share:.0%} of the step is in kernels whose kind is not known"
    text = {
        Cause.LAUNCH: _stalled(found, share)
        or f"{share:.0%} of the step the GPU waits for launches or runs kernels that are not worth one "
        f"({found.launches / found.step_count:,.0f} a step, "
        f"{found.short / max(1, found.launches):.0%} shorter than 10 µs)",
        Cause.DATA: f"{share:.0%} of the step the GPU stands still while the host reads data",
        Cause.SCRIPT: f"{share:.0%} of the step the GPU stands still while the script runs nothing of torch",
        Cause.PADDING: f"{share:.0%} of the step computes padding",
        Cause.COMMUNICATION: f"{share:.0%} of the step is communication that no computing hides",
        Cause.STRAGGLER: f"{share:.0%} of the step other ranks wait for {straggler or 'the slowest rank'}",
        Cause.GEMM: f"{share:.0%} of the step is matrix products{_rate(found)}",
        Cause.MEMORY: f"{share:.0%} of the step moves bytes: elementwise work, norms, copies, the optimizer",
        Cause.SEQUENCE: f"{share:.0%} of the step is in the kernels of linear attention, scans and convolution",
    }[cause]
    lead = f"{seen:.0%} utilization and yet bound by {cause}" if paradox else f"Bound by {cause}"
    slow = _slow_paths(found)
    cost = f" The slow path of {slow} ran, a kernel's fallback in PyTorch." if slow else ""
    return f"{lead}: {text}.{cost} Really busy {busy:.0%} of {_ms(step)} a step."


def _stalled(found: Profile, share: float) -> str:
    """What the host was inside of, where that is most of what the GPU waited for."""
    if found.idle.stalled < 0.5 * share * found.wall:
        return ""
    return f"{share:.0%} of the step the GPU waits, most of it while the host is inside {found.stalls[0].operator}"


def _slow_paths(found: Profile) -> str:
    """The kernels whose fallback's operators were seen."""
    return ", ".join(dict.fromkeys(i.symbols[0] for i in found.implementations if i.fallbacks))


def _rate(found: Profile) -> str:
    part = next((p for p in found.parts if p.name == "matmul" and p.operations_time), None)
    if part is None:
        return ""
    rate = part.operations / part.operations_time / 1e6
    peak = f", {rate / found.peak.bf16_tflops:.0%} of this GPU's peak" if found.peak else ""
    return f" at {rate:,.0f} TFLOP/s{peak}"


def _fixes(found: Profile, by_cause: dict[Cause, float], straggler: str) -> list[Fix]:
    """What could be done, worth most first."""
    wall, idle = found.wall, found.idle
    launch = by_cause.get(Cause.LAUNCH, 0.0)
    after_wait = idle.after_wait / wall
    fixes = [*_launch_fixes(found, launch, after_wait), *_work_fixes(found, by_cause)]
    if idle.data:
        fixes.append(
            Fix(
                title="Read data ahead",
                why=f"the GPU stands still for {_ms(idle.data / found.step_count)} a step while a batch is read",
                how="DataLoader(..., num_workers=4, prefetch_factor=4, pin_memory=True, persistent_workers=True)",
                gain=idle.data / wall,
            )
        )
    if idle.script:
        fixes.append(
            Fix(
                title="Find out what the script does between operators",
                why=f"for {_ms(idle.script / found.step_count)} a step no thread runs anything of torch while the GPU "
                "stands still: reading data, logging, saving, plain Python",
                how='with torch.profiler.record_function("data"): batch = next(batches)',
                gain=idle.script / wall,
            )
        )
    if Cause.PADDING in by_cause and found.run and found.run.density is not None:
        fixes.append(
            Fix(
                title="Pack samples instead of padding them",
                why=f"{1 - found.run.density:.0%} of the computed tokens are padding",
                how='batch.mode="packed"   # packing=True in TRL',
                gain=by_cause[Cause.PADDING],
            )
        )
    if by_cause.get(Cause.COMMUNICATION):
        fixes.append(
            Fix(
                title="Hide communication behind computing",
                why=f"{_ms(found.exposed_communication / found.step_count)} of "
                f"{_ms(found.communication / found.step_count)} of communication a step is not hidden",
                how="layer.set_modules_to_forward_prefetch([following])   # fully_shard each layer, within a node",
                gain=by_cause[Cause.COMMUNICATION],
            )
        )
    if by_cause.get(Cause.STRAGGLER):
        fixes.append(
            Fix(
                title=f"Look at {straggler or 'the slowest rank'}",
                why="the others wait for it in collectives",
                how="nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE   # there; then its data and sample lengths",
                gain=by_cause[Cause.STRAGGLER],
            )
        )
    return sorted((fix for fix in fixes if fix.gain >= WORTH), key=lambda fix: -fix.gain)


_FIRST_CALLS = {
    f"aten::_cudnn_attention_{way}": "torch.backends.cuda.enable_cudnn_sdp(False)   # or one padded length for all"
    for way in ("forward", "backward")
}
"""Operators that are known to prepare a plan for each new shape."""


def _launch_fixes(found: Profile, launch: float, after_wait: float) -> list[Fix]:
    fixes = []
    slow = [i for i in found.implementations if i.fallbacks]
    if slow:
        names = _slow_paths(found)
        seen = "; ".join(op for i in slow for op in i.fallbacks)
        # The optimizer runs however the kernels are computed, and so does what the host prepares for a new shape.
        slowed = [p for p in found.parts if p.bound in {"memory", "sequence"} and p.name != "optimizer"]
        small = sum(part.busy for part in slowed) / found.wall
        short = found.short_us / found.wall
        launch -= found.idle.stalled / found.wall
        fixes.append(
            Fix(
                title=f"Get {names} off the slow path",
                why=f"operators of the fallback ran: {seen}",
                how="kernelguard check MODEL --python $(which python)",
                gain=min(1.0, launch + max(0.0, small - short)),
            )
        )
    if found.waits and after_wait:
        first = found.waits[0]
        count = sum(wait.count for wait in found.waits)
        fixes.append(
            Fix(
                title="Do not wait for the GPU in every step",
                why=f"{count / found.step_count:,.0f} waits a step, most time in {first.operator or first.call} "
                f"({first.count}x); after them the GPU stands still for "
                f"{_ms(found.idle.after_wait / found.step_count)}",
                how="total += loss.detach()   # and total.item() only every 50 steps",
                gain=after_wait,
            )
        )
    if found.idle.compiling:
        fixes.append(
            Fix(
                title="Stop compiling inside steps",
                why=f"{found.compilations} compilations in the recorded steps keep the GPU waiting for "
                f"{_ms(found.idle.compiling)}",
                how="TORCH_LOGS=recompiles python train.py   # then fixed lengths, or torch._dynamo.mark_dynamic",
                gain=found.idle.compiling / found.wall,
            )
        )
    stalled = found.idle.stalled / found.wall
    if found.stalls:
        worst = found.stalls[0]
        names = ", ".join(stall.operator for stall in found.stalls[:3])
        fixes.append(
            Fix(
                title=f"Keep {worst.operator} from holding up the host",
                why=f"for {_ms(found.idle.stalled / found.step_count)} a step the GPU stands still while the host is "
                f"inside {names}, up to {_ms(worst.longest)} in one call that launches nothing: memory, or what is "
                "prepared once for each new shape",
                how=_FIRST_CALLS.get(
                    worst.operator,
                    "tokenizer(texts, padding='max_length')   # one length for all",
                ),
                gain=stalled,
            )
        )
    rest = launch - after_wait - stalled - found.idle.compiling / found.wall
    if rest > WORTH and not slow:
        fixes.append(
            Fix(
                title="Launch less",
                why=f"{found.launches / found.step_count:,.0f} launches a step, "
                f"{found.short / max(1, found.launches):.0%} of them shorter than 10 µs",
                how="for layer in model.model.layers: layer.mlp.compile()   # norms too; AdamW(..., fused=True)",
                gain=rest,
            )
        )
    return fixes


def _work_fixes(found: Profile, by_cause: dict[Cause, float]) -> list[Fix]:
    fixes = []
    products = next((part for part in found.parts if part.name == "matmul"), None)
    single = sum(run.microseconds for run in found.kernels if _is_single_precision(run.name))
    if products is not None and single > 0.2 * products.kernels:
        fixes.append(
            Fix(
                title="Multiply in bf16",
                why=f"{single / products.kernels:.0%} of the matrix products' time is in float32 kernels",
                how='with torch.autocast("cuda", dtype=torch.bfloat16): ...',
                gain=by_cause.get(Cause.GEMM, 0.0) * single / products.kernels,
            )
        )
    elif products is not None and products.operations_time and found.peak:
        reached = products.operations / products.operations_time / 1e6 / (ATTAINABLE * found.peak.bf16_tflops)
        if reached < 1:
            fixes.append(
                Fix(
                    title="Make the matrix products larger",
                    why=f"they reach {reached:.0%} of the {ATTAINABLE * found.peak.bf16_tflops:,.0f} TFLOP/s "
                    "of large ones",
                    how="per_device_train_batch_size=2   # or longer packs",
                    gain=products.busy * (1 - reached) / found.wall,
                )
            )
    if found.recomputed:
        fixes.append(
            Fix(
                title="Recompute less",
                why=f"{_ms(found.recomputed / found.step_count)} of every step are products and attention of the "
                "forward pass that run again inside the backward pass (activation checkpointing)",
                how="gradient_checkpointing=False   # or every other layer",
                gain=found.recomputed / found.wall,
            )
        )
    memory = [part for part in found.parts if part.bound == "memory"]
    moved = by_cause.get(Cause.MEMORY, 0.0)
    # An update costs the same however many tokens went into it, and is one fused kernel already more often than not.
    update = next((part for part in memory if part.name == "optimizer"), None)
    share = update.busy / found.wall if update else 0.0
    if update and share > WORTH:
        memory.remove(update)
        moved = max(0.0, moved - share)
        fixes.append(
            Fix(
                title="Give each update more tokens",
                why=f"optimizer and clipping take {_ms(update.busy / found.step_count)} of every step, however many "
                "tokens it has",
                how="gradient_accumulation_steps=4   # or longer packs",
                gain=share,
            )
        )
    if memory and moved > 0:
        largest = max(memory, key=lambda part: part.busy)
        fixes.append(
            Fix(
                title="Fuse what only moves bytes",
                why=f"{moved:.0%} of the step, most of it {largest.title} "
                f"({_ms(largest.busy / found.step_count)} a step, {largest.launches / found.step_count:,.0f} launches)",
                how="for layer in model.model.layers: layer.mlp.compile()   # norms too; or liger-kernel's",
                gain=moved,
            )
        )
    return fixes


def _is_single_precision(name: str) -> bool:
    return any(word in name for word in ("sgemm", "f32f32_f32f32", "_tf32", "gemm_f32", "simt_gemm"))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:,.1f} ms"
