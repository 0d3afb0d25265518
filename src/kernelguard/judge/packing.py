"""Do the sample boundaries of a packed batch reach every op that could carry state across them?

Speed and isolation are separate questions: with every kernel bound, a batch that sends only `position_ids` still leaks
the delta rule's and the convolution's state from one sample into the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kernelguard.declare.values import Boundary, FastPath, Intent, TransformersTree
from kernelguard.judge.bound import declared_at
from kernelguard.judge.values import Finding, Status
from kernelguard.matrix import KernelPackage
from kernelguard.observe.values import Binding, BoundTo

_COLLATOR = {
    "seq_idx": "return_seq_idx=True",
    "cu_seq_lens_q": "return_flash_attn_kwargs=True",
}


def judge_packing(
    path: FastPath,
    *,
    intent: Intent,
    binding: Binding | None,
    observed: bool,
    tree: TransformersTree,
    kernels: Mapping[str, KernelPackage],
) -> Iterator[Finding]:
    """Findings on one recurrent or convolutional fast path of a packed run; none when the run is not packed.

    `observed` tells that an interpreter was looked into, so that a missing binding is "unknown" instead of "later".
    """
    if not intent.packed:
        return
    package = kernels.get(path.package)
    symbol = package.symbols.get(path.symbol) if package is not None else None
    if symbol is None:
        yield _unknown(
            path,
            "packing-unknown",
            f"which argument of {path.symbol} keeps packed samples apart is not recorded in matrices/kernels",
        )
        return
    if not symbol.boundaries:
        yield _leak(
            path,
            "packing-unsupported",
            f"{path.symbol} has no argument for sample boundaries: state leaks from each packed sample into the next",
            "turn packing off for this model",
        )
        return
    usable = [b for b in path.boundaries if b.argument in symbol.boundaries]
    passed = [b for b in usable if b.signals]
    if not passed:
        yield _nothing_passed(path, usable, tree)
        return
    if intent.signals is None:
        yield _unknown(
            path,
            "signals-unknown",
            f"the run packs samples, but which boundary signals its batches carry was not said; {path.symbol} needs "
            + _either(passed),
            "--signals position_ids,cu_seq_lens_q,seq_idx (what your collator really sends)",
        )
        return
    sent = [b for b in passed if set(b.signals) & set(intent.signals)]
    if not sent:
        wanted = passed[0].signals[0]
        flag = _COLLATOR.get(wanted)
        yield _leak(
            path,
            "signal-not-sent",
            f"packed batches carry {_list(intent.signals)}, but {path.symbol} learns of sample boundaries only from "
            f"{_either(passed)}: state leaks from each sample into the next",
            f"send `{wanted}` with every batch"
            + (f", for example DataCollatorWithFlattening({flag}, return_position_ids=True)" if flag else ""),
        )
        return
    if not observed:
        return
    if binding is None or binding.bound_to is BoundTo.UNKNOWN:
        yield _unknown(
            path, "packing-unknown", f"whether the function bound for {path.symbol} takes {_either(sent)} is not known"
        )
        return
    if binding.bound_to is BoundTo.TORCH:
        yield _leak(
            path,
            "packing-on-fallback",
            f"packed batches and the PyTorch fallback of {path.symbol}: it ignores sample boundaries, so state leaks "
            "(or, from transformers 5.20 on, the first packed call raises ValueError)",
            "bind the kernel, or turn packing off",
        )
        return
    if not any(b.argument in binding.parameters for b in sent):
        yield _not_accepted(path, binding, sent)


def judge_attention_packing(intent: Intent, *, has_attention: bool) -> Iterator[Finding]:
    """Findings on the attention mask of a packed run.

    transformers builds a block-diagonal mask from restarting `position_ids`, but only when there is neither a 2-D
    attention mask nor a cache (masking_utils, 4.57 to 5.24). Flash attention can use `cu_seq_lens_*` instead.
    """
    if not intent.packed or not has_attention or intent.signals is None:
        return
    name = intent.attn_implementation or "sdpa"
    varlen = "flash" in name or "varlen" in name
    if "position_ids" not in intent.signals and not (varlen and "cu_seq_lens_q" in intent.signals):
        yield Finding(
            code="attention-signal-not-sent",
            status=Status.FAIL,
            reason=f"packed batches carry {_list(intent.signals)}, but {name} attention is masked per sample only from "
            "`position_ids` that restart at every sample: samples attend to the ones before them",
            fix="send `position_ids` that restart at 0 with every sample",
        )
    elif intent.use_cache and not varlen:
        yield Finding(
            code="attention-mask-lost-to-cache",
            status=Status.FAIL,
            reason=f"packed batches with `use_cache`: transformers detects packing for {name} attention only when "
            "there is no cache, so samples attend to the ones before them",
            fix="set use_cache=False while training",
        )


def _nothing_passed(path: FastPath, usable: list[Boundary], tree: TransformersTree) -> Finding:
    if not usable or any(not b.known for b in usable):
        return _unknown(
            path,
            "packing-unknown",
            f"how sample boundaries reach {path.symbol} could not be read from {declared_at(path)}",
        )
    return _leak(
        path,
        "boundary-never-passed",
        f"transformers {tree.version} never passes {_names(usable)} to {path.symbol} ({declared_at(path)}): "
        "packed samples leak whatever the batch carries",
        "pip install 'transformers>=5.17', or turn packing off",
    )


def _not_accepted(path: FastPath, binding: Binding, sent: list[Boundary]) -> Finding:
    wanted = _names(sent)
    how = (
        f"swallows {wanted} in **kwargs instead of using it"
        if binding.accepts_any_keyword
        else f"does not take {wanted}, and transformers drops arguments that a function does not take"
    )
    return _leak(
        path,
        "boundary-argument-lost",
        f"{binding.target or path.symbol} {how}: packed samples leak although the kernel is fast",
        f"pip install --upgrade {path.distribution}",
        (f"its parameters: {', '.join(binding.parameters)}",),
    )


def _leak(path: FastPath, code: str, reason: str, fix: str, evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=code, status=Status.FAIL, fast_path=path.symbol, reason=reason, fix=fix, evidence=evidence)


def _unknown(path: FastPath, code: str, reason: str, fix: str = "") -> Finding:
    return Finding(code=code, status=Status.UNKNOWN, fast_path=path.symbol, reason=reason, fix=fix)


def _names(boundaries: list[Boundary]) -> str:
    return " or ".join(f"`{b.argument}`" for b in boundaries)


def _either(boundaries: list[Boundary]) -> str:
    return " or ".join(dict.fromkeys(f"`{s}`" for b in boundaries for s in b.signals))


def _list(signals: tuple[str, ...]) -> str:
    return "only " + ", ".join(f"`{s}`" for s in signals) if signals else "no boundary signal at all"
