"""Which kernels of this model are probed, at which shapes? Head counts and sizes come from the model's configuration.

Adding a kernel: one row in `_KERNELS` and, where its operation is new, one probe in `workers/probes/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelguard.declare.modes import HubLayers
from kernelguard.declare.values import Declaration, FastPath, Intent, Phase, SubModel
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.subject import is_called

RAGGED = (1, 63, 64, 65, 130)
"""Packed samples around the edges of a chunk of 64, and one that is no multiple of anything."""
ODD = (321,)
TRAINING_LENGTH = 4096
TOKENWISE_ROWS = (517,)
_COLUMNS = 128
"""Channels that one program of the bundled trainer's convolution has (kernelguard_train/kernels.py, COLUMNS)."""

Shape = Mapping[str, Any]


class NoShapeError(Exception):
    """The configuration does not say what a probe needs; `args[0]` names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """How one kernel symbol is probed."""

    op: str
    shape: Callable[[Mapping[str, Any]], Shape]
    tuned: bool = False
    """It is a Triton kernel that may be autotuned."""
    sequence: bool = True
    """It mixes tokens: length and boundaries matter."""
    rows_matter: bool = False
    """It works on each token alone, but its tuning key holds how many there are."""
    decodes: bool = False
    """One token at a time from a state; its backward is not implemented, by design."""
    boundaries: bool = True
    """It can be told of sample boundaries."""
    in_place: bool = False
    """It decodes by updating its state in place, outside of autograd."""


def plan(
    declaration: Declaration,
    intent: Intent,
    *,
    length: int = TRAINING_LENGTH,
    capabilities: Iterable[tuple[int, int]] = (),
) -> tuple[ProbeRequest, ...]:
    """Every kernel that the run calls, as a request; `length` is the training length in tokens.

    `capabilities` of the GPUs, where they are known, tell which layers the hub has a kernel for.

    A kernel that no probe is known for, or whose shapes the configuration does not tell, is a request without an
    operation: it cannot be a pass.
    """
    raws = {part.model_type: part.raw for part in declaration.config.parts}
    requests: dict[tuple[str, str], ProbeRequest] = {}
    for path in declaration.fast_paths:
        if not is_called(path, intent):
            continue
        request = _of_path(path, raws.get(path.model_type, declaration.config.raw), intent, length)
        requests.setdefault((request.package, request.symbol), request)
    if intent.use_kernels and intent.phase is Phase.TRAINING:
        for request in _hub_layers(declaration, intent, length, tuple(capabilities)):
            requests.setdefault((request.package, request.symbol), request)
    for request in _of_intent(declaration, intent, length):
        requests.setdefault((request.package, request.symbol), request)
    return tuple(requests.values())


def language_parts(declaration: Declaration) -> tuple[SubModel, ...]:
    """The parts of the configuration, those with a vocabulary first: one of them is the language model."""
    return tuple(sorted(declaration.config.parts, key=lambda part: "vocab_size" not in part.raw))


def _of_path(path: FastPath, raw: Mapping[str, Any], intent: Intent, length: int) -> ProbeRequest:
    base = ProbeRequest(
        symbol=path.symbol,
        package=path.package,
        module=path.import_module,
        op="",
        dtype=intent.dtype,
        trains=intent.phase is Phase.TRAINING,
        layers=path.layers,
    )
    kernel = _KERNELS.get((path.package, path.symbol))
    if kernel is None:
        return base
    if kernel.shape is not _delta:
        return _filled(base, kernel, raw, intent, length)
    repeats = False if intent.grouped_heads else path.repeats_heads
    ways = {True: (_delta,), False: (_grouped_delta,), None: (_delta, _grouped_delta)}[repeats]
    return _both([_filled(base, replace(kernel, shape=way), raw, intent, length) for way in ways])


def _both(requests: Sequence[ProbeRequest]) -> ProbeRequest:
    """One request with the cases of several; where the source does not tell which call is made, each is measured."""
    cases = list(requests[0].cases)
    for other in requests[1:]:
        have = [case.shape for case in cases]
        cases += [replace(case, name=f"{case.name}, grouped") for case in other.cases if case.shape not in have]
    return replace(requests[0], cases=tuple(cases))


def _filled(base: ProbeRequest, kernel: _Kernel, raw: Mapping[str, Any], intent: Intent, length: int) -> ProbeRequest:
    try:
        shape = kernel.shape(raw)
    except NoShapeError:
        return base
    trains = base.trains and not kernel.decodes
    cases = tuple(_cases(kernel, shape, packed=intent.packed, length=length))
    return replace(base, op=kernel.op, cases=cases, trains=trains, backward=not kernel.in_place)


def _cases(kernel: _Kernel, shape: Shape, *, packed: bool, length: int) -> Iterator[Case]:
    if kernel.decodes:
        yield Case(name="one token", lengths=(1,), shape=shape, state=True, batch=2, force=kernel.tuned)
        return
    if not kernel.sequence:
        yield Case(name="rows", lengths=TOKENWISE_ROWS, shape=shape, force=kernel.tuned)
        if kernel.rows_matter:
            yield Case(name="training", lengths=(length,), shape=shape, repeats=2, force=kernel.tuned)
        return
    told = packed and kernel.boundaries
    # Most kernels have the same tuning key at every length, and those are swept at the short one. What has another key
    # at the training length is swept there: only that, so it costs little.
    yield Case(
        name="ragged" if told else "odd",
        lengths=RAGGED if told else ODD,
        shape=shape,
        packed=told,
        force=kernel.tuned,
    )
    lengths = training_lengths(length, packed=told)
    yield Case(name="training", lengths=lengths, shape=shape, packed=told, repeats=2, force=kernel.tuned)


def training_lengths(length: int, *, packed: bool) -> tuple[int, ...]:
    """The samples of a row of `length` tokens: of several sizes where the run packs, one of a single token."""
    return (length - length // 3 - 1, length // 3, 1) if packed and length > 3 else (length,)


def _of_intent(declaration: Declaration, intent: Intent, length: int) -> Iterator[ProbeRequest]:
    """What no fast path of the code declares, but the run's own choices bring in: attention, experts, liger, ..."""
    text = next((part.raw for part in language_parts(declaration)), declaration.config.raw)
    if intent.phase is not Phase.TRAINING:
        return
    if intent.grouped_heads and "linear_value_head_dim" in text:
        # kernelguard_train/gated_delta.py calls fla's gated norm, also where transformers has it in PyTorch.
        place = ("fla", "fla.modules", "FusedRMSNormGated")
        yield _own(place, _KERNELS["fla", "FusedRMSNormGated"], text, intent, length)
    if intent.own_convolution and _suits_own_convolution(text):
        place = ("kernelguard_train", "kernelguard_train.kernels", "packed_convolution")
        request = _own(place, _Kernel(op="packed_convolution", shape=_packed_convolution), text, intent, length)
        yield replace(request, stands_for="causal_conv1d_fn")
    if _first(text, ("num_attention_heads",)) is not None and _has_attention(declaration):
        yield _attention(text, intent, length)
    if _first(text, ("num_experts", "num_local_experts", "n_routed_experts")) and intent.experts_implementation in {
        None,
        "grouped_mm",
    }:
        kernel = _Kernel(op="grouped_mm", shape=_experts, sequence=False)
        yield _own(("torch", "torch.nn.functional", "grouped_mm"), kernel, text, intent, length)
    if intent.liger:
        for symbol, kernel in _LIGER.items():
            place = ("liger_kernel", "liger_kernel.transformers.functional", symbol)
            yield _own(place, kernel, text, intent, length)


def _hub_layers(
    declaration: Declaration, intent: Intent, length: int, capabilities: Sequence[tuple[int, int]]
) -> Iterator[ProbeRequest]:
    """Each layer and function that `use_kernels=True` may replace while the model trains on such GPUs."""
    idle = {p.symbol for p in declaration.fast_paths} - {
        p.symbol for p in declaration.fast_paths if is_called(p, intent)
    }
    model = {
        "parts": [{"model_type": part.model_type, "raw": dict(part.raw)} for part in language_parts(declaration)],
        "attn_implementation": intent.attn_implementation,
        "experts_implementation": intent.experts_implementation,
    }
    for fact in declaration.modes:
        if not isinstance(fact, HubLayers):
            continue
        replaced = {
            layer.layer
            for layer in fact.layers
            if any(o.training and o.device == "cuda" and o.serves(capabilities) for o in layer.options)
        }
        for name in sorted(replaced - idle):
            yield ProbeRequest(
                symbol=name,
                package="kernels",
                module="transformers.integrations.hub_kernels",
                op="layer",
                dtype=intent.dtype,
                cases=tuple(_cases(_HUB_LAYER, {}, packed=False, length=length)),
                model=model,
            )


def _has_attention(declaration: Declaration) -> bool:
    kinds = {kind.name for kind in declaration.layer_kinds if kind.count}
    return not kinds or any("attention" in kind and "linear" not in kind for kind in kinds)


def _own(
    place: tuple[str, str, str], kernel: _Kernel, raw: Mapping[str, Any], intent: Intent, length: int
) -> ProbeRequest:
    package, module, symbol = place
    base = ProbeRequest(symbol=symbol, package=package, module=module, op="", dtype=intent.dtype)
    return _filled(base, kernel, raw, intent, length)


def _attention(raw: Mapping[str, Any], intent: Intent, length: int) -> ProbeRequest:
    """Attention as the model would run it; torch's own when nothing else was asked for."""
    name = intent.attn_implementation or "sdpa"
    if name not in _ATTENTION and "/" in name:
        place = ("kernels", "transformers.integrations.hub_kernels", name)
        kernel = _Kernel(op="flash_varlen", shape=_heads)
        request = _own(place, kernel, raw, replace(intent, packed=True), length)
        return replace(request, cases=tuple(_alone(request.cases, length)), hub_attention=name)
    if name not in _ATTENTION:
        return ProbeRequest(symbol=name, package="attention", module="", op="", dtype=intent.dtype)
    package, module, symbol, op = _ATTENTION[name]
    kernel = _Kernel(op=op, shape=_heads)
    # sdpa is called once for each sample: a long one costs a quadratic reference, so the length stands alone.
    request = _own((package, module, symbol), kernel, raw, replace(intent, packed=True), length)
    return replace(request, cases=tuple(_alone(request.cases, length)))


def _alone(cases: Iterable[Case], length: int) -> Iterator[Case]:
    for case in cases:
        yield replace(case, lengths=(length,)) if case.name == "training" else case


_HUB_LAYER = _Kernel(op="layer", shape=lambda _: {}, tuned=True)
_ATTENTION: Mapping[str, tuple[str, str, str, str]] = {
    "sdpa": ("torch", "torch.nn.functional", "scaled_dot_product_attention", "sdpa"),
    "varlen": ("torch", "torch.nn.attention.varlen", "varlen_attn", "torch_varlen"),
    "flex_attention": ("torch", "torch.nn.attention.flex_attention", "flex_attention", "flex"),
    "flash_attention_2": ("flash_attn", "flash_attn", "flash_attn_varlen_func", "flash_varlen"),
    "flash_attention_3": ("flash_attn_interface", "flash_attn_interface", "flash_attn_varlen_func", "flash_varlen"),
    "flash_attention_4": ("flash_attn", "flash_attn.cute", "flash_attn_varlen_func", "flash_varlen"),
}
"""By attention implementation: package, module, symbol, operation.

A hub repository is loaded by transformers itself; others have no probe.
"""


def _first(raw: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((raw[name] for name in names if raw.get(name) is not None), None)


def _need(raw: Mapping[str, Any], *names: str) -> int:
    value = _first(raw, names)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NoShapeError(" or ".join(names))
    return value


def _delta(raw: Mapping[str, Any]) -> Shape:
    """As models call it that repeat query and key heads to as many as value heads (transformers before 5.23)."""
    heads = _need(raw, "linear_num_value_heads")
    return {
        "k_heads": heads,
        "v_heads": heads,
        "k_dim": _need(raw, "linear_key_head_dim"),
        "v_dim": _need(raw, "linear_value_head_dim"),
    }


def _grouped_delta(raw: Mapping[str, Any]) -> Shape:
    """As the others call it, and the bundled trainer's fused layers: each key head serves several value heads."""
    return {**_delta(raw), "k_heads": _need(raw, "linear_num_key_heads")}


def _kda(raw: Mapping[str, Any]) -> Shape:
    inner = raw.get("linear_attn_config") or {}
    heads = _need({**inner, **raw}, "linear_num_heads", "num_heads")
    size = _need({**inner, **raw}, "linear_head_dim", "head_dim")
    return {"k_heads": heads, "v_heads": heads, "k_dim": size, "v_dim": size}


def _convolution(raw: Mapping[str, Any]) -> Shape:
    if "linear_num_value_heads" in raw:
        keys = _need(raw, "linear_num_key_heads") * _need(raw, "linear_key_head_dim")
        values = _need(raw, "linear_num_value_heads") * _need(raw, "linear_value_head_dim")
        channels, bias = 2 * keys + values, False
    elif _first(raw, ("mamba_n_groups", "n_groups", "mamba_ngroups")) is not None:
        s = _ssd(raw)
        channels, bias = s["heads"] * s["head_dim"] + 2 * s["groups"] * s["state"], True
    elif raw.get("linear_attn_config") or "linear_num_heads" in raw:
        s = _kda(raw)
        channels, bias = s["k_heads"] * s["k_dim"], False
    else:
        channels, bias = _scan(raw)["channels"], True
    width = _first(raw, ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel")) or 4
    return {"channels": channels, "width": int(width), "activation": "silu", "bias": bias}


def _packed_convolution(raw: Mapping[str, Any]) -> Shape:
    """The bundled trainer's: it takes queries, keys and values side by side and returns them apart."""
    return {**_convolution(raw), "keys": _need(raw, "linear_num_key_heads") * _need(raw, "linear_key_head_dim")}


def _suits_own_convolution(raw: Mapping[str, Any]) -> bool:
    """Whether the bundled trainer takes its own (kernelguard_train/kernels.py, convolution_suits)."""
    if "linear_num_value_heads" not in raw:
        return False
    shape = _packed_convolution(raw)
    fits = shape["width"] == 4 and shape["keys"] % _COLUMNS == 0 and shape["channels"] % _COLUMNS == 0
    return fits and raw.get("hidden_act", "silu") in {"silu", "swish"}


def _ssd(raw: Mapping[str, Any]) -> Shape:
    return {
        "heads": _need(raw, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads"),
        "head_dim": _need(raw, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"),
        "groups": _need(raw, "mamba_n_groups", "n_groups", "mamba_ngroups"),
        "state": _need(raw, "mamba_d_state", "ssm_state_size", "state_size"),
        "chunk": int(_first(raw, ("mamba_chunk_size", "chunk_size")) or 256),
        "width": int(_first(raw, ("mamba_d_conv", "conv_kernel")) or 4),
        "hidden": _need(raw, "hidden_size"),
    }


def _scan(raw: Mapping[str, Any]) -> Shape:
    hidden = _need(raw, "hidden_size")
    channels = _first(raw, ("intermediate_size",)) if "state_size" in raw else None
    expand = _first(raw, ("mamba_expand", "expand")) or 2
    return {
        "channels": int(channels or expand * hidden),
        "state": _need(raw, "mamba_d_state", "state_size"),
    }


def _update(raw: Mapping[str, Any]) -> Shape:
    return _ssd(raw) if _first(raw, ("mamba_n_groups", "n_groups", "mamba_ngroups")) is not None else _scan(raw)


def _inner(raw: Mapping[str, Any]) -> Shape:
    hidden = _need(raw, "hidden_size")
    rank = _first(raw, ("mamba_dt_rank", "time_step_rank"))
    return {
        **_scan(raw),
        # "auto" in a configuration is a sixteenth of the hidden size.
        "rank": rank if isinstance(rank, int) else -(-hidden // 16),
        "width": int(_first(raw, ("mamba_d_conv", "conv_kernel")) or 4),
        "hidden": hidden,
        "norms": raw.get("model_type") == "falcon_mamba",
    }


def _gated_norm(raw: Mapping[str, Any]) -> Shape:
    if "linear_value_head_dim" in raw:
        return {"size": _need(raw, "linear_value_head_dim"), "heads": [_need(raw, "linear_num_value_heads")]}
    s = _kda(raw)
    return {"size": s["v_dim"], "heads": [s["v_heads"]], "activation": "sigmoid"}


def _heads(raw: Mapping[str, Any]) -> Shape:
    queries = _need(raw, "num_attention_heads")
    size = raw.get("head_dim") or _need(raw, "hidden_size") // queries
    return {"q_heads": queries, "kv_heads": raw.get("num_key_value_heads") or queries, "head_dim": int(size)}


def _hidden(raw: Mapping[str, Any]) -> Shape:
    return {"size": _need(raw, "hidden_size")}


def _intermediate(raw: Mapping[str, Any]) -> Shape:
    return {"size": _need(raw, "intermediate_size", "moe_intermediate_size")}


def _head(raw: Mapping[str, Any]) -> Shape:
    return {"hidden": _need(raw, "hidden_size"), "vocabulary": _need(raw, "vocab_size")}


def _experts(raw: Mapping[str, Any]) -> Shape:
    return {
        "experts": _need(raw, "num_experts", "num_local_experts", "n_routed_experts"),
        "hidden": _need(raw, "hidden_size"),
        "intermediate": _need(raw, "moe_intermediate_size", "intermediate_size"),
    }


_KERNELS: Mapping[tuple[str, str], _Kernel] = {
    ("fla", "chunk_gated_delta_rule"): _Kernel(op="gated_delta_rule", shape=_delta, tuned=True),
    ("fla", "fused_recurrent_gated_delta_rule"): _Kernel(
        op="recurrent_gated_delta_rule", shape=_delta, tuned=True, decodes=True
    ),
    ("fla", "chunk_kda"): _Kernel(op="kda", shape=_kda, tuned=True),
    ("fla", "fused_recurrent_kda"): _Kernel(op="recurrent_kda", shape=_kda, tuned=True, decodes=True),
    ("fla", "FusedRMSNormGated"): _Kernel(
        op="gated_rms_norm", shape=_gated_norm, tuned=True, sequence=False, rows_matter=True
    ),
    ("fla", "causal_conv1d"): _Kernel(op="fla_convolution", shape=_convolution, tuned=True),
    ("causal_conv1d", "causal_conv1d_fn"): _Kernel(op="causal_conv1d", shape=_convolution),
    ("causal_conv1d", "causal_conv1d_update"): _Kernel(
        op="causal_conv1d_update", shape=_convolution, decodes=True, in_place=True
    ),
    ("mamba_ssm", "mamba_chunk_scan_combined"): _Kernel(op="chunk_scan", shape=_ssd, tuned=True),
    ("mamba_ssm", "mamba_split_conv1d_scan_combined"): _Kernel(op="split_conv1d_scan", shape=_ssd, tuned=True),
    ("mamba_ssm", "selective_scan_fn"): _Kernel(op="selective_scan", shape=_scan, boundaries=False),
    ("mamba_ssm", "mamba_inner_fn"): _Kernel(op="mamba_inner", shape=_inner, boundaries=False),
    ("mamba_ssm", "falcon_mamba_inner_fn"): _Kernel(op="mamba_inner", shape=_inner, boundaries=False),
    ("mamba_ssm", "selective_state_update"): _Kernel(op="state_update", shape=_update, decodes=True, in_place=True),
}
_LIGER: Mapping[str, _Kernel] = {
    "liger_fused_linear_cross_entropy": _Kernel(op="linear_cross_entropy", shape=_head, sequence=False),
    "liger_rms_norm": _Kernel(op="rms_norm", shape=_hidden, sequence=False),
    "liger_swiglu": _Kernel(op="swiglu", shape=_intermediate, sequence=False),
}
