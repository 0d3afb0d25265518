"""What becomes of `use_kernels=True` on this machine? And can the `kernels` package be used by this transformers?"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from kernelguard.declare.modes import HubLayer, HubLayers, KernelsWindow
from kernelguard.declare.values import Declaration, Intent, Phase
from kernelguard.judge.hub_builds import OFFLINE_FIX, offline_problem
from kernelguard.judge.values import Finding, Status
from kernelguard.observe.values import Environment

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
"""Anything else in USE_HUB_KERNELS takes the decorators away."""


def installed(environment: Environment, *names: str) -> str | None:
    """The version text of a distribution; empty: known to be absent; None: not known."""
    if environment.distributions is None:
        return None
    return next((environment.distributions[n].version for n in names if n in environment.distributions), "")


def capabilities(environment: Environment) -> tuple[tuple[int, int], ...] | None:
    """Compute capabilities of all GPUs; None when there are none or one is not known."""
    found = tuple(gpu.capability for gpu in environment.gpus if gpu.capability is not None)
    return found if found and len(found) == len(environment.gpus) else None


def version_of(text: str | None) -> Version | None:
    """A version text as a version, where it is one."""
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def kernels_problem(window: KernelsWindow, environment: Environment) -> str:
    """Why this transformers takes `kernels` for absent; empty: it does not, or nothing is known about it."""
    text = installed(environment, "kernels")
    if text is None:
        return ""
    if text == "":
        return "the kernels package is not installed"
    version = version_of(text)
    if version is None:
        return ""
    too_old = window.minimum is not None and version < window.minimum
    too_new = window.maximum is not None and version >= window.maximum
    return f"kernels {version} is outside {window_text(window)}" if too_old or too_new else ""


def window_text(window: KernelsWindow) -> str:
    """`>=0.18.2,<0.19.0`."""
    bounds = [f">={window.minimum}" if window.minimum else "", f"<{window.maximum}" if window.maximum else ""]
    return ",".join(bound for bound in bounds if bound)


def install_kernels(window: KernelsWindow) -> str:
    """The command that installs a release of `kernels` inside the window."""
    text = window_text(window)
    return f"pip install 'kernels{text}'" if text else "pip install kernels"


def judge_hub_layers(
    fact: HubLayers, declaration: Declaration, intent: Intent, environment: Environment
) -> Iterator[Finding]:
    """Nothing at all unless the run asks for hub kernels: a norm in PyTorch is normal."""
    if not intent.use_kernels:
        return
    problem = kernels_problem(fact.window, environment)
    if problem:
        yield Finding(
            code="kernels-unusable",
            status=Status.FAIL,
            reason=f"the run sets use_kernels=True, but {problem}: transformers {declaration.transformers.version} "
            "takes it for absent, and loading the model raises",
            fix=install_kernels(fact.window),
        )
        return
    switched = _switched_off(fact, environment)
    if switched:
        yield Finding(
            code="hub-switched-off",
            status=Status.FAIL,
            reason=f"the run sets use_kernels=True, but {switched}: every layer keeps its PyTorch code, and "
            "model.use_kernels is True all the same",
            fix=f"unset {switched.partition('=')[0]}",
        )
        return
    if fact.unread:
        # An entry that was not read may be there or not, so nothing is said about single layers.
        for text in fact.unread:
            yield Finding(code="hub-mapping-unread", status=Status.UNKNOWN, reason=text)
        return
    yield from _by_entry(fact, intent, environment)


def _switched_off(fact: HubLayers, environment: Environment) -> str:
    use = environment.variables.get("USE_HUB_KERNELS")
    if fact.obeys_switch and use is not None and use.upper() not in _TRUE:
        return f"USE_HUB_KERNELS={use}"
    disable = environment.variables.get("DISABLE_KERNEL_MAPPING", "0")
    return f"DISABLE_KERNEL_MAPPING={disable}" if disable not in {"", "0"} else ""


def _by_entry(fact: HubLayers, intent: Intent, environment: Environment) -> Iterator[Finding]:
    device = "rocm" if environment.torch is not None and "rocm" in (environment.torch.local or "") else "cuda"
    training = intent.phase is Phase.TRAINING
    possible: list[HubLayer] = []
    lost: dict[str, str] = {}
    inference_only: list[str] = []
    for layer in fact.layers:
        reason = _why_not(layer, device, environment, training=training)
        if reason == "":
            possible.append(layer)
        elif layer.package:
            continue  # the installed package serves it
        elif reason == _INFERENCE_ONLY:
            inference_only.append(layer.layer)
        else:
            lost[layer.layer] = reason
    for layer, what in _wrong(possible, device, environment, training=training):
        yield Finding(
            code="hub-wrong-gradient",
            status=Status.FAIL,
            reason=f"use_kernels=True puts a kernel of {what[0]} in the place of {layer.layer} in training: {what[1]}; "
            "the output is right, the gradient is not, and nothing is logged",
            fix="leave use_kernels off while training, or pip install 'transformers>=5.20'",
            evidence=(f"{layer.file}:{layer.line}",),
        )
    names = tuple(dict.fromkeys(inference_only))
    if not possible:
        told = "; ".join(
            [*(f"{name}: {why}" for name, why in lost.items()), *(f"{n}: {_INFERENCE_ONLY}" for n in names)]
        )
        yield Finding(
            code="hub-layers-none",
            status=Status.FAIL,
            reason=f"the run sets use_kernels=True, but the hub mapping replaces no layer of this model here ({told}); "
            "nothing is logged, and model.use_kernels is True all the same",
            fix="leave use_kernels off, or give the model a kernel_config of your own",
        )
        return
    if lost:
        yield Finding(
            code="hub-layers-partly",
            status=Status.WARN,
            reason="use_kernels=True leaves some layers in PyTorch: "
            + "; ".join(f"{name}: {why}" for name, why in lost.items()),
            fix="nothing can be installed for them",
        )
    if names:
        yield Finding(
            code="hub-layers-inference-only",
            status=Status.PASS,
            reason=f"{', '.join(names)} keep their PyTorch code while training: their hub kernels are for inference",
        )
    repositories = ", ".join(sorted({o.repository for layer in possible for o in layer.options if o.device == device}))
    taken = [o for layer in possible for o in layer.options if o.device == device and (o.training or not training)]
    away = next((text for o in taken if o.versioned and (text := offline_problem(environment, o.repository))), "")
    if away:
        yield Finding(
            code="hub-offline",
            status=Status.FAIL,
            reason=f"use_kernels=True asks the hub for {', '.join(sorted({layer.layer for layer in possible}))} "
            f"({repositories}), but {away}",
            fix=OFFLINE_FIX,
        )
        return
    yield Finding(
        code="hub-layers-not-verified",
        status=Status.UNKNOWN,
        reason=f"use_kernels=True asks the hub for {', '.join(sorted({layer.layer for layer in possible}))} "
        f"({repositories}); whether it has builds for this machine was not looked at, and without one a layer keeps "
        "its PyTorch code with at most a line at level info",
        fix="after loading, look at module.__dict__.get('forward') of each layer that has kernel_layer_name",
    )


def _wrong(
    layers: list[HubLayer], device: str, environment: Environment, *, training: bool
) -> Iterator[tuple[HubLayer, tuple[str, str]]]:
    """Layers that get a kernel whose backward is known to be wrong; one for each name."""
    seen = set()
    known = capabilities(environment) or ()
    for layer in layers if training else ():
        for option in layer.options:
            taken = option.device == device and option.training and option.serves(known)
            if taken and option.wrong_gradient and layer.layer not in seen:
                seen.add(layer.layer)
                yield layer, (option.repository, option.wrong_gradient)


_INFERENCE_ONLY = "its kernel is for inference only"


def _why_not(layer: HubLayer, device: str, environment: Environment, *, training: bool) -> str:
    """Why the mapping has nothing for this layer on this machine in this mode; empty: it has, or may have."""
    if not layer.mapped:
        return "the hub mapping has no entry for it"
    here = [option for option in layer.options if option.device == device]
    if not here:
        others = ", ".join(sorted({option.device for option in layer.options}))
        return f"its kernel is not for {device}" + (f" but for {others}" if others else "")
    fitting = [option for option in here if option.serves(capabilities(environment) or ())]
    if not fitting:
        lowest, highest = here[0].minimum_capability, here[0].maximum_capability
        wanted = f"{lowest[0]}.{lowest[1]}" if lowest else "any"
        upper = f"{highest[0]}.{highest[1]}" if highest else "any"
        return f"its kernel is for capability {wanted}" + (f" to {upper}" if upper != wanted else "")
    if training and not any(option.training for option in fitting):
        return _INFERENCE_ONLY
    return ""
