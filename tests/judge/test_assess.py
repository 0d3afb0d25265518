"""Judging, on values alone: for each guard a case in which only that one fact is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.declare.values import (
    BindingKind,
    BindingSite,
    Boundary,
    Declaration,
    FastPath,
    Gate,
    Intent,
    LayerKind,
    ModelConfig,
    Phase,
    RemoteCode,
    Requirement,
    SubModel,
    TransformersTree,
)
from kernelguard.judge.assess import Evidence, assess
from kernelguard.judge.values import Assessment, Finding, Level, Status, exit_code, worst
from kernelguard.matrix import KernelPackage, KernelSymbol
from kernelguard.observe.values import (
    Binding,
    Bindings,
    BoundTo,
    Distribution,
    Environment,
    GateFact,
    Gpu,
    GpuState,
    ImportFact,
    ImportOutcome,
)

MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"
KERNELS = {
    "fla": KernelPackage(
        package="fla",
        distributions=("flash-linear-attention", "fla-core"),
        install="pip install 'flash-linear-attention[cuda]'",
        note="",
        needs_modules=("triton",),
        symbols={
            "chunk": KernelSymbol(name="chunk", module="fla.ops", phases=("training",), boundaries=("cu_seqlens",)),
            "step": KernelSymbol(name="step", module="fla.ops", phases=("decoding",), boundaries=("cu_seqlens",)),
            "norm": KernelSymbol(
                name="norm", module="fla.ops", phases=("training", "decoding"), boundaries=(), mixes_tokens=False
            ),
            "scan": KernelSymbol(name="scan", module="fla.ops", phases=("training",), boundaries=()),
        },
    )
}


def fast_path(symbol: str = "chunk", **changes: Any) -> FastPath:
    path = FastPath(
        symbol=symbol,
        package="fla",
        distribution="flash-linear-attention",
        import_module="fla.ops",
        mechanism="decorator",
        requirement=Requirement.AUTOMATIC,
        phases=(Phase.TRAINING,),
        model_type="qwen3_5_text",
        file="models/qwen3_5/modeling_qwen3_5.py",
        line=286,
        binding=BindingSite(kind=BindingKind.CLOSURE, module=MODULE, name=f"torch_{symbol}", owner="Layer"),
        layers=48,
        fallback="torch_chunk",
        boundaries=(Boundary(argument="cu_seqlens", signals=("cu_seq_lens_q",)),),
    )
    return replace(path, **changes)


def binding(symbol: str = "chunk", bound_to: BoundTo = BoundTo.KERNEL, **changes: Any) -> Binding:
    bound = Binding(
        symbol=symbol,
        module=MODULE,
        bound_to=bound_to,
        target=f"fla.ops.{symbol}",
        parameters=("q", "cu_seqlens"),
    )
    return replace(bound, **changes)


def imported(outcome: ImportOutcome = ImportOutcome.OK, **changes: Any) -> ImportFact:
    fact = ImportFact(
        module="fla.ops", outcome=outcome, file="/site/fla/ops/__init__.py", symbols={"chunk": True, "step": True}
    )
    return replace(fact, **changes)


ENVIRONMENT = Environment(
    origin="/py",
    live=True,
    executable="/py",
    torch=Version("2.13.0"),
    gpu_state=GpuState.NONE,
    gpu_detail="no NVIDIA device on this machine",
    distributions={
        "flash-linear-attention": Distribution(name="flash-linear-attention", version="0.6.0", location="/site")
    },
)


def evidence(
    *paths: FastPath,
    bindings: Bindings | None = None,
    intent: Intent | None = None,
    environment: Environment = ENVIRONMENT,
    rules: tuple[Finding, ...] = (),
    version: str = "5.24.0",
    **declaration: Any,
) -> Evidence:
    config = ModelConfig(
        source="config.json",
        model_type="qwen3_5",
        architectures=(),
        parts=(SubModel(path="", model_type="qwen3_5", raw={}),),
        raw={},
    )
    return Evidence(
        declaration=Declaration(
            config=config,
            transformers=TransformersTree(root=Path("/t"), version=Version(version), origin="path"),
            fast_paths=paths,
            layer_kinds=(LayerKind(name="full_attention", count=16),),
            **declaration,
        ),
        intent=intent or Intent(),
        environment=environment,
        bindings=bindings,
        rule_findings=rules,
        kernels=KERNELS,
    )


GOOD = Bindings(bindings=(binding(),), imports=(imported(),), cuda_available=False)


def codes(assessment: Assessment) -> set[str]:
    return {finding.code for finding in assessment.findings}


def test_bound_is_a_pass_at_import_level_and_no_more() -> None:
    case = evidence(fast_path(), bindings=GOOD)
    assert assess(case, Level.IMPORT).status is Status.PASS
    above = assess(case, Level.GPU)
    assert above.status is Status.UNKNOWN
    assert above.reached is Level.IMPORT


@pytest.mark.parametrize(
    ("state", "gpus", "code", "status"),
    [
        (GpuState.NONE, (), "no-gpu", Status.UNKNOWN),
        (GpuState.HIDDEN, (), "gpu-hidden", Status.UNKNOWN),
        (GpuState.CPU_TORCH, (), "cpu-torch", Status.UNKNOWN),
        (GpuState.CPU_TORCH, (Gpu(name="H100", capability=(9, 0)),), "cpu-torch-on-gpu-machine", Status.FAIL),
        (GpuState.BROKEN, (), "gpu-broken", Status.UNKNOWN),
        (GpuState.UNKNOWN, (), "gpu-unknown", Status.UNKNOWN),
        (GpuState.USABLE, (), "not-verified", Status.UNKNOWN),
    ],
)
def test_every_way_to_have_no_gpu_is_told_apart(
    state: GpuState, gpus: tuple[Gpu, ...], code: str, status: Status
) -> None:
    environment = replace(ENVIRONMENT, gpu_state=state, gpus=gpus)
    assessment = assess(evidence(fast_path(), bindings=GOOD, environment=environment), Level.GPU)
    assert code in codes(assessment)
    assert assessment.status is status


NO = BoundTo.TORCH


@pytest.mark.parametrize(
    ("fact", "code"),
    [
        (imported(ImportOutcome.ABSENT, file="", symbols={}), "broken"),
        (imported(ImportOutcome.RAISED, error_type="ImportError", error="undefined symbol: x"), "broken"),
        (
            imported(ImportOutcome.RAISED, error_type="ModuleNotFoundError", missing_module="triton"),
            "missing-dependency",
        ),
        (imported(ImportOutcome.RAISED, error_type="ModuleNotFoundError", missing_module="fla.ops"), "symbol-missing"),
        (imported(ImportOutcome.CRASHED, signal="SIGABRT"), "crashes"),
        (imported(ImportOutcome.HUNG), "hangs"),
        (imported(ImportOutcome.EXITED), "exits"),
        (imported(file="", search_path=("/site/fla",)), "shadowed"),
        (imported(symbols={"chunk": False}), "symbol-missing"),
        (imported(), "ignored"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.outcome,
)
def test_each_reason_for_the_slow_path_has_its_own_code(fact: ImportFact, code: str) -> None:
    slow = Bindings(bindings=(binding(bound_to=NO),), imports=(fact,), cuda_available=True)
    assessment = assess(evidence(fast_path(), bindings=slow), Level.IMPORT)
    assert codes(assessment) == {code}
    assert assessment.status is Status.FAIL
    assert assessment.fast_paths[0].fix


def test_not_installed_is_said_only_of_what_is_not_installed() -> None:
    fact = imported(ImportOutcome.ABSENT, file="", symbols={})
    slow = Bindings(bindings=(binding(bound_to=NO),), imports=(fact,))
    environment = replace(ENVIRONMENT, distributions={})
    assert codes(assess(evidence(fast_path(), bindings=slow, environment=environment), Level.IMPORT)) == {
        "not-installed"
    }


@pytest.mark.parametrize("bound_to", [BoundTo.UNKNOWN, BoundTo.OTHER])
def test_what_could_not_be_read_is_unknown(bound_to: BoundTo) -> None:
    bindings = Bindings(bindings=(binding(bound_to=bound_to),), imports=(imported(),))
    assert assess(evidence(fast_path(), bindings=bindings), Level.IMPORT).status is Status.UNKNOWN


def test_a_binding_that_is_not_there_is_unknown() -> None:
    bindings = Bindings(imports=(imported(),), problems=("the worker died",))
    assessment = assess(evidence(fast_path(), bindings=bindings), Level.IMPORT)
    assert codes(assessment) == {"binding-unknown"}
    assert "the worker died" in assessment.fast_paths[0].reason


def test_a_slow_binding_without_a_reason_is_unknown_not_ignored() -> None:
    bindings = Bindings(bindings=(binding(bound_to=NO),))
    assert assess(evidence(fast_path(), bindings=bindings), Level.IMPORT).status is Status.UNKNOWN


def test_a_lookup_that_needs_a_gpu_is_unknown_without_one_and_ignored_with_one() -> None:
    path = fast_path(availability_check="is_fla_available", availability_needs_gpu=True)
    slow = Bindings(bindings=(binding(bound_to=NO),), imports=(imported(),), cuda_available=False)
    assert codes(assess(evidence(path, bindings=slow), Level.IMPORT)) == {"needs-gpu-to-bind"}
    assert codes(assess(evidence(path, bindings=replace(slow, cuda_available=True)), Level.IMPORT)) == {"ignored"}


GATE = Gate(name="is_fast_path_available", members=("chunk", "step"), decides=True)


@pytest.mark.parametrize(("value", "code"), [(True, "bound"), (False, "gated-off"), (None, "gate-unknown")])
def test_a_gate_that_decides_is_looked_at(value: bool | None, code: str) -> None:
    gates = (GateFact(module=MODULE, name=GATE.name, value=value),)
    assessment = assess(evidence(fast_path(gate=GATE), bindings=replace(GOOD, gates=gates)), Level.IMPORT)
    assert codes(assessment) == {code}


def test_a_gate_that_was_not_read_is_unknown() -> None:
    assert codes(assess(evidence(fast_path(gate=GATE), bindings=GOOD), Level.IMPORT)) == {"gate-unknown"}


def test_a_gate_that_only_warns_changes_nothing() -> None:
    gates = (GateFact(module=MODULE, name=GATE.name, value=False),)
    path = fast_path(gate=replace(GATE, decides=False))
    assert assess(evidence(path, bindings=replace(GOOD, gates=gates)), Level.IMPORT).status is Status.PASS


def test_a_decode_kernel_counts_in_training_only_behind_a_deciding_gate() -> None:
    step = fast_path("step", phases=(Phase.DECODING,))
    assert [n.symbol for n in assess(evidence(fast_path(), step), Level.RESOLVE).not_used] == ["step"]
    gated = assess(evidence(fast_path(gate=GATE), replace(step, gate=GATE)), Level.RESOLVE)
    assert {p.symbol for p in gated.fast_paths} == {"chunk", "step"}


def test_compile_closes_the_gate_of_old_releases() -> None:
    gate = replace(GATE, blocked_by_compile=True)
    bindings = replace(GOOD, gates=(GateFact(module=MODULE, name=GATE.name, value=True),))
    assert assess(evidence(fast_path(gate=gate), bindings=bindings), Level.IMPORT).status is Status.PASS
    compiled = evidence(fast_path(gate=gate), bindings=bindings, intent=Intent(compile=True))
    assert codes(assess(compiled, Level.IMPORT)) == {"blocked-by-compile"}


@pytest.mark.parametrize("layers", [0, 1, None])
def test_only_a_known_zero_of_layers_means_not_needed(layers: int | None) -> None:
    assessment = assess(evidence(fast_path(layers=layers)), Level.RESOLVE)
    assert bool(assessment.not_used) is (layers == 0)


def test_layers_counted_in_the_built_model_win() -> None:
    bindings = replace(GOOD, layer_counts={"Layer": 3})
    assert assess(evidence(fast_path(layers=None), bindings=bindings), Level.IMPORT).fast_paths[0].layers == 3
    gone = replace(GOOD, layer_counts={"Attention": 3})
    assert assess(evidence(fast_path(layers=None), bindings=gone), Level.IMPORT).fast_paths == ()


PACKED = Intent(packed=True, signals=("position_ids", "cu_seq_lens_q"))


def packed_codes(path: FastPath, bound: Binding, intent: Intent = PACKED) -> set[str]:
    bindings = Bindings(bindings=(bound,), imports=(imported(),))
    return codes(assess(evidence(path, bindings=bindings, intent=intent), Level.IMPORT))


@pytest.mark.parametrize(
    ("path", "bound", "intent", "code"),
    [
        (fast_path(), binding(), PACKED, None),
        (fast_path(), binding(), replace(PACKED, signals=("position_ids",)), "signal-not-sent"),
        (fast_path(), binding(), replace(PACKED, signals=()), "signal-not-sent"),
        (fast_path(), binding(), replace(PACKED, signals=None), "signals-unknown"),
        (fast_path(), binding(parameters=("q",)), PACKED, "boundary-argument-lost"),
        (fast_path(), binding(parameters=("q",), accepts_any_keyword=True), PACKED, "boundary-argument-lost"),
        (fast_path(boundaries=()), binding(), PACKED, "packing-unknown"),
        (
            fast_path(boundaries=(Boundary(argument="cu_seqlens", signals=()),)),
            binding(),
            PACKED,
            "boundary-never-passed",
        ),
        (
            fast_path(boundaries=(Boundary(argument="cu_seqlens", signals=(), known=False),)),
            binding(),
            PACKED,
            "packing-unknown",
        ),
        (fast_path("scan", boundaries=()), binding("scan"), PACKED, "packing-unsupported"),
        (fast_path("norm", boundaries=()), binding("norm"), PACKED, None),
        (fast_path("new", boundaries=()), binding("new"), PACKED, "packing-unknown"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) or value is None else "",
)
def test_packing(path: FastPath, bound: Binding, intent: Intent, code: str | None) -> None:
    expected = {"bound"} | ({code} if code else set())
    if intent.signals == ():
        expected.add("attention-signal-not-sent")
    assert packed_codes(path, bound, intent) == expected


def test_the_fallback_leaks_when_packed() -> None:
    slow = Bindings(bindings=(binding(bound_to=NO),), imports=(imported(),))
    assert "packing-on-fallback" in codes(assess(evidence(fast_path(), bindings=slow, intent=PACKED), Level.IMPORT))


@pytest.mark.parametrize(
    ("intent", "code"),
    [
        (replace(PACKED, use_cache=True), "attention-mask-lost-to-cache"),
        (replace(PACKED, signals=("cu_seq_lens_q",)), "attention-signal-not-sent"),
        (replace(PACKED, signals=("cu_seq_lens_q",), attn_implementation="flash_attention_2"), None),
        (replace(PACKED, use_cache=True, packed=False), None),
    ],
)
def test_attention_of_a_packed_run(intent: Intent, code: str | None) -> None:
    assert (codes(assess(evidence(fast_path(), bindings=GOOD, intent=intent), Level.IMPORT)) - {"bound"}) == (
        {code} if code else set()
    )


def test_nothing_executed_is_never_a_pass() -> None:
    target = replace(ENVIRONMENT, live=False, distributions=None)
    assert codes(assess(evidence(fast_path(), environment=target), Level.RESOLVE)) == {"build-unknown"}
    captured = replace(ENVIRONMENT, live=False)
    assert codes(assess(evidence(fast_path(), environment=captured), Level.RESOLVE)) == {"not-executed"}
    empty = replace(captured, distributions={})
    assert codes(assess(evidence(fast_path(), environment=empty), Level.RESOLVE)) == {"not-installed"}
    assert "level-not-reached" in codes(assess(evidence(environment=captured), Level.IMPORT))


def test_what_was_not_understood_is_unknown() -> None:
    assert assess(evidence(unknowns=("a new decorator",)), Level.RESOLVE).status is Status.UNKNOWN
    remote = RemoteCode(targets=("modeling_x.Model",), runs=True, shipped=False)
    assert codes(assess(evidence(remote=remote), Level.RESOLVE)) == {"remote-code"}


def test_a_rule_decides_for_the_fast_path_it_names() -> None:
    rule = Finding(code="some-rule", status=Status.FAIL, reason="wrong gradients", fast_path="chunk", fix="upgrade")
    assessment = assess(evidence(fast_path(), bindings=GOOD, rules=(rule,)), Level.IMPORT)
    assert assessment.fast_paths[0].status is Status.FAIL
    assert assessment.fast_paths[0].reason == "wrong gradients"
    unrelated = replace(rule, fast_path="step")
    assert assess(evidence(fast_path(), bindings=GOOD, rules=(unrelated,)), Level.IMPORT).status is Status.PASS


@pytest.mark.parametrize(
    ("off", "fix"),
    [
        ("use_it=False", "set use_it to true in the configuration"),
        # A default that is left out says the same: taking it out of the file changes nothing.
        (
            "kernel=native",
            "set kernel in the configuration to a kernel of flash-linear-attention; native is PyTorch code",
        ),
    ],
)
def test_what_the_configuration_switches_off_is_set_and_not_removed(off: str, fix: str) -> None:
    [answer] = assess(evidence(fast_path(disabled_by=off), bindings=GOOD), Level.IMPORT).fast_paths
    assert answer.codes == ("switched-off",)
    assert answer.fix == fix


def test_status_order_and_exit_codes() -> None:
    assert worst([]) is Status.PASS
    assert worst([Status.PASS, Status.WARN]) is Status.WARN
    assert worst([Status.WARN, Status.UNKNOWN]) is Status.UNKNOWN
    assert worst([Status.UNKNOWN, Status.FAIL]) is Status.FAIL
    assert [exit_code(s) for s in Status] == [0, 0, 1, 3]
    assert exit_code(Status.WARN, strict=True) == 1
    assert exit_code(Status.UNKNOWN, strict=True) == 3
