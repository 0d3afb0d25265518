"""What does a run make of the choices that are no kernel bindings? Hub layers, attention, experts, liger and others.

Only the definite and silent loss of something that the run asked for, or that its own class flags take away, is a
finding. What is normal says nothing: sdpa, grouped experts, a norm that no one asked to be fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packaging.version import Version

from kernelguard.declare.modes import (
    AlwaysSlow,
    Attention,
    CacheSplit,
    CarriesState,
    Experts,
    FlashBoundary,
    HubLayers,
    HubLoad,
    LigerSupport,
    ModeFact,
    Mxfp4,
    SampleMask,
)
from kernelguard.declare.values import Declaration, Intent, Phase
from kernelguard.judge.attention import judge_attention
from kernelguard.judge.hub import (
    capabilities,
    install_kernels,
    installed,
    judge_hub_layers,
    kernels_problem,
    version_of,
)
from kernelguard.judge.values import Finding, Status
from kernelguard.observe.values import Environment, ImportFact

_DTYPES = {"bfloat16", "bf16", "torch.bfloat16"}


def judge_modes(
    declaration: Declaration, intent: Intent, environment: Environment, imports: Iterable[ImportFact] = ()
) -> tuple[Finding, ...]:
    """Everything that is wrong, lost or worth knowing. Pure; an empty answer means that nothing was lost.

    `imports`: what importing the attention package gave, where that was tried (see `attention_module`).
    """
    findings: list[Finding] = []
    for fact in declaration.modes:
        findings += _judge(fact, declaration, intent, environment)
    findings += judge_attention(declaration, intent, environment, imports)
    return tuple(dict.fromkeys(findings))


def _judge(fact: ModeFact, declaration: Declaration, intent: Intent, environment: Environment) -> Iterator[Finding]:
    match fact:
        case HubLayers():
            yield from judge_hub_layers(fact, declaration, intent, environment)
        case HubLoad():
            yield from _hub_load(fact, declaration, intent, environment)
        case Experts():
            yield from _experts(fact, intent, environment)
        case Mxfp4():
            yield from _mxfp4(fact, intent, environment)
        case LigerSupport():
            yield from _liger(fact, intent, environment)
        case AlwaysSlow():
            yield Finding(
                code="always-slow",
                status=Status.WARN,
                reason=f"{fact.what}, runs in PyTorch whatever is installed; no kernel is declared for it",
                fix="no package makes it faster; count with its speed, or choose another model",
                evidence=(fact.source,),
            )
        case CacheSplit():
            yield from _cache_split(fact, declaration, intent)
        case CarriesState():
            if intent.packed and intent.phase is Phase.TRAINING:
                yield Finding(
                    code="packing-unsupported",
                    status=Status.FAIL,
                    reason=f"{fact.what}: state leaks from each packed sample into the next, whatever a batch says",
                    fix="turn packing off for this model",
                    evidence=(fact.source,),
                )
        case SampleMask():
            yield from _sample_mask(fact, declaration, intent)
        case FlashBoundary():
            yield from _flash_boundary(fact, declaration, intent)
        case _:
            return  # attention is judged for the whole model at once


def _sample_mask(fact: SampleMask, declaration: Declaration, intent: Intent) -> Iterator[Finding]:
    """Flash and varlen attention take no such mask: they read boundaries from what each batch carries."""
    if not intent.packed or intent.phase is not Phase.TRAINING:
        return
    name = _attention_of(fact.path, declaration, intent)
    if "flash" in name or "varlen" in name:
        return
    if not fact.is_library_mask:
        yield Finding(
            code="attention-mask-not-read",
            status=Status.UNKNOWN,
            reason=f"{fact.model_type} makes its attention mask itself ({fact.file}): whether packed samples stay "
            "apart in it was not read",
            fix="turn packing off for this model, or measure it: kernelguard verify --packed",
            evidence=(f"{fact.file}:{fact.line}",),
        )
        return
    yield Finding(
        code="attention-boundary-never-passed",
        status=Status.FAIL,
        reason=f"transformers {declaration.transformers.version} makes the attention mask of {fact.model_type} without "
        f"`position_ids` ({fact.file}:{fact.line}): in a packed batch samples attend to the ones before them, whatever "
        "the batch carries",
        fix="turn packing off for this model, or send an attention_mask of four dimensions that is block-diagonal",
        evidence=(f"{fact.file}:{fact.line}",),
    )


def _flash_boundary(fact: FlashBoundary, declaration: Declaration, intent: Intent) -> Iterator[Finding]:
    """Position ids do not get past such a layer; whether `cu_seq_lens_q` gets to it, depends on those around it."""
    if not intent.packed or intent.phase is not Phase.TRAINING or intent.signals is None:
        return
    name = _attention_of(fact.path, declaration, intent)
    if "flash" not in name:
        return
    place = f"{fact.attention} of transformers {declaration.transformers.version} keeps `position_ids` to itself "
    place += f"({fact.file}:{fact.line})"
    if fact.hands_on and "cu_seq_lens_q" in intent.signals:
        yield Finding(
            code="packing-unknown",
            status=Status.UNKNOWN,
            reason=f"{place}, and whether cu_seq_lens_q gets past the layers around it to {name} was not read",
            fix="turn packing off for this model, or measure it: kernelguard verify --packed",
            evidence=(f"{fact.file}:{fact.line}",),
        )
        return
    yield Finding(
        code="attention-boundary-never-passed",
        status=Status.FAIL,
        reason=f"{place}, and {name} learns from them where samples begin: they attend to the ones before them",
        fix="turn packing off for this model"
        + (", or send cu_seq_lens_q and the like too and measure it" if fact.hands_on else ""),
        evidence=(f"{fact.file}:{fact.line}",),
    )


def _attention_of(path: str, declaration: Declaration, intent: Intent) -> str:
    """The attention implementation that was asked for, by the run or by the configuration; empty: by nobody."""
    parts = {f.path: f for f in declaration.modes if isinstance(f, Attention)}
    said = [intent.attn_implementation, *(parts[p].configured for p in (path, "") if p in parts)]
    return next((n for n in said if n), "")


def _hub_load(fact: HubLoad, declaration: Declaration, intent: Intent, environment: Environment) -> Iterator[Finding]:
    if intent.phase is Phase.TRAINING and not fact.in_training:
        return
    # Where the global that holds it is a fast path as well, whether it was loaded is judged there.
    covered = any(path.mechanism == "hub_load" and path.file == fact.file for path in declaration.fast_paths)
    where = (f"{fact.file}:{fact.line}",)
    said = f"logged at level {fact.level}" if fact.level is not None else "nothing is logged"
    if fact.needs_ninja and installed(environment, "ninja") == "":
        yield Finding(
            code="hub-kernel-not-tried",
            status=Status.FAIL,
            fast_path=fact.name,
            reason=f"{fact.model_type} fetches its kernel from {fact.repository} only where ninja is installed, and it "
            f"is not: {fact.effect}, and nothing is logged",
            fix="pip install ninja",
            evidence=where,
        )
        return
    problem = kernels_problem(fact.window, environment)
    if covered and (not problem or installed(environment, "kernels") == ""):
        return
    if problem:
        yield Finding(
            code="hub-kernel-lost",
            status=Status.FAIL,
            fast_path=fact.name,
            reason=f"{fact.model_type} fetches its kernel from {fact.repository}, but {problem}: {fact.effect}; {said}",
            fix=install_kernels(fact.window),
            evidence=where,
        )
        return
    yield Finding(
        code="hub-kernel-not-verified",
        status=Status.UNKNOWN,
        fast_path=fact.name,
        reason=f"{fact.model_type} fetches its kernel from {fact.repository} when it is built; whether that has a "
        f"build for this machine was not looked at. Without one {fact.effect} ({said})",
        fix=f"look at {fact.name} of the modeling module after the model was built",
        evidence=where,
    )


def _experts(fact: Experts, intent: Intent, environment: Environment) -> Iterator[Finding]:
    asked = intent.experts_implementation or fact.configured
    where = (f"{fact.file}:{fact.line}",)
    if not fact.selectable:
        if asked not in {None, "eager"}:
            yield Finding(
                code="experts-unsupported",
                status=Status.FAIL,
                reason=f"{asked} experts were asked for, but {fact.model_type} has no choice of experts"
                + (
                    ": loading it raises ValueError"
                    if asked == "grouped_mm"
                    else f": {fact.experts_class} runs its own code"
                ),
                fix="leave the experts implementation unsaid",
                evidence=where,
            )
        elif asked is None:
            yield Finding(
                code="experts-eager",
                status=Status.WARN,
                reason=f"{fact.experts_class} of {fact.model_type} has no grouped experts in this transformers: its "
                "own PyTorch code runs, and nothing is logged",
                fix="a newer transformers may have them; nothing can be installed for it",
                evidence=where,
            )
        return
    if not fact.decorated:
        return  # another class of the same model is the one that is chosen
    if asked in {"deepgemm", "sonicmoe", "deepgemm_megamoe"}:
        yield Finding(
            code="experts-not-verified",
            status=Status.UNKNOWN,
            reason=f"{asked} experts were asked for; whether its kernels load on this machine was not looked at "
            "(loading raises where they do not)",
            fix="build the model once on that machine",
            evidence=where,
        )
        return
    if asked not in {None, "grouped_mm"}:
        return
    for reason, fix in _grouped_mm_problems(intent, environment):
        yield Finding(
            code="grouped-mm-fallback",
            status=Status.FAIL,
            reason=f"the experts of {fact.model_type} run a Python loop instead of grouped_mm, without a word: {reason}"
            if fact.checks_capability or "compile" in reason
            else f"grouped_mm of {fact.model_type} raises in the first step: {reason}",
            fix=fix,
            evidence=where,
        )
        return


def _grouped_mm_problems(intent: Intent, environment: Environment) -> Iterator[tuple[str, str]]:
    if intent.compile and intent.dtype not in _DTYPES:
        yield (
            f"torch.compile has it for bfloat16 only, and this run uses {intent.dtype}",
            "train in bfloat16, or without torch.compile",
        )
    known = capabilities(environment)
    if known is None:
        return
    old = next((c for c in known if c < (8, 0)), None)
    if old is not None:
        yield f"the GPU has capability {old[0]}.{old[1]}, it needs 8.0", "use a GPU of capability 8.0 or later"
    torch = environment.torch
    if torch is not None and torch.release < (2, 9):
        other = next((c for c in known if c[0] != 9), None)
        if other is not None:
            yield (
                f"torch {torch} has it for capability 9.x only, the GPU has {other[0]}.{other[1]}",
                "pip install 'torch>=2.9'",
            )


def _mxfp4(fact: Mxfp4, intent: Intent, environment: Environment) -> Iterator[Finding]:
    if fact.dequantize:
        return
    if intent.phase is Phase.TRAINING:
        yield Finding(
            code="mxfp4-not-trainable",
            status=Status.WARN,
            reason=f"the checkpoint of {fact.model_type} is in mxfp4, which cannot be trained: Trainer refuses it "
            "unless it is unpacked to bf16, and that takes about four times the memory",
            fix="load it with quantization_config=Mxfp4Config(dequantize=True)",
        )
        return
    reason = next(_mxfp4_problems(fact, intent, environment), None)
    if reason is not None:
        yield Finding(
            code="mxfp4-unpacked",
            status=Status.WARN,
            reason=f"the mxfp4 weights of {fact.model_type} are unpacked to bf16, about four times the memory, and the "
            f"mxfp4 kernels are not used: {reason}",
            fix=f"{install_kernels(fact.window)} 'triton>={fact.minimum_triton}'"
            if "kernels" in reason or "triton" in reason
            else "leave use_kernels off"
            if "use_kernels" in reason
            else f"use a GPU of capability {fact.minimum_capability[0]}.{fact.minimum_capability[1]} or later",
        )


def _mxfp4_problems(fact: Mxfp4, intent: Intent, environment: Environment) -> Iterator[str]:
    known = capabilities(environment)
    old = next((c for c in known or () if c < fact.minimum_capability), None)
    if old is not None:
        yield f"the GPU has capability {old[0]}.{old[1]}"
    triton = environment.triton
    if triton is not None and triton < fact.minimum_triton:
        yield f"triton {triton} is older than {fact.minimum_triton}"
    elif triton is None and installed(environment, "triton", "pytorch-triton", "triton-nightly") == "":
        yield "triton is not installed"
    problem = kernels_problem(fact.window, environment)
    if problem:
        yield problem
    if intent.use_kernels:
        yield "use_kernels=True asks for full-precision kernels"


def _liger(fact: LigerSupport, intent: Intent, environment: Environment) -> Iterator[Finding]:
    if not intent.liger:
        return
    text = installed(environment, "liger-kernel", "liger-kernel-nightly")
    if text == "":
        yield Finding(
            code="liger-not-installed",
            status=Status.FAIL,
            reason="the run asks for liger kernels, and liger-kernel is not installed: it raises ImportError",
            fix="pip install liger-kernel",
        )
        return
    version = version_of(text)
    newest, supports_newest = fact.releases[-1]
    if text is not None and version is not None and version < fact.minimum:
        yield Finding(
            code="liger-not-installed",
            status=Status.FAIL,
            reason=f"transformers takes liger-kernel {version} for absent, it wants {fact.minimum}: the run raises",
            fix=f"pip install 'liger-kernel>={fact.minimum}'",
        )
        return
    answer = supports_newest if text is None else _known(fact, version)
    if answer is True:
        return
    since = next((release for release, supports in fact.releases if supports), None)
    what = f"liger-kernel {version}" if version is not None else "liger-kernel"
    if answer is None or (text is None and since is None):
        yield Finding(
            code="liger-unknown",
            status=Status.UNKNOWN,
            reason=f"whether {what} knows the model type {fact.model_type} is not known (the newest release that was "
            f"read is {newest}, which does {'' if supports_newest else 'not '}know it). For a type that it does not "
            "know it does nothing, and only logs at level info",
            fix="python -c 'from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as t; "
            f'print("{fact.model_type}" in t)\'',
        )
        return
    yield Finding(
        code="liger-unsupported",
        status=Status.FAIL,
        reason=f"{what} does nothing for the model type {fact.model_type}, and only logs that at level info",
        fix=f"pip install 'liger-kernel>={since}'"
        if since is not None
        else "leave liger off: no release knows this type",
    )


def _known(fact: LigerSupport, version: Version | None) -> bool | None:
    """Whether a release knows the type; between two that were read it is what both of them say."""
    if version is None:
        return None
    before = [supports for release, supports in fact.releases if release <= version]
    after = [supports for release, supports in fact.releases if release >= version]
    if before and before[-1]:
        return True  # types were only ever added
    if after and not after[0]:
        return False
    return None


def _cache_split(fact: CacheSplit, declaration: Declaration, intent: Intent) -> Iterator[Finding]:
    if not intent.use_cache or intent.phase is not Phase.TRAINING:
        return
    unused = any(
        path.symbol == fact.symbol and path.file == fact.file and path.layers == 0 for path in declaration.fast_paths
    )
    if not unused:
        yield Finding(
            code="cache-skips-kernel",
            status=Status.FAIL,
            fast_path=fact.symbol,
            reason=f"{fact.owner} calls {fact.symbol} in training only without a cache; this run sets use_cache=True: "
            "its separate steps run instead, and nothing is logged",
            fix="use_cache=False while training",
            evidence=(f"{fact.file}:{fact.line}",),
        )


__all__ = ["judge_modes"]
