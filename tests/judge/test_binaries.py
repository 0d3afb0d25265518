"""Files against a machine and its torch: for each defect a case in which only that one thing is wrong, and its twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.declare.values import BindingKind, BindingSite, FastPath, Intent, Phase, Requirement
from kernelguard.judge.binaries import BinaryFacts, judge_binaries, wanted_packages
from kernelguard.judge.values import Finding
from kernelguard.observe.elf import ElfFacts, GpuCode
from kernelguard.observe.extensions import Extension
from kernelguard.observe.record import ChangedFile, RecordState, SharedFile, UnmetPin
from kernelguard.observe.values import (
    Binding,
    Bindings,
    BoundTo,
    Distribution,
    Environment,
    Gpu,
    ImportFact,
    ImportOutcome,
)

CONV = FastPath(
    symbol="causal_conv1d_fn",
    package="causal_conv1d",
    distribution="causal-conv1d",
    import_module="causal_conv1d",
    mechanism="decorator",
    requirement=Requirement.AUTOMATIC,
    phases=(Phase.TRAINING,),
    model_type="qwen3_5_text",
    file="models/qwen3_5/modeling_qwen3_5.py",
    line=1,
    binding=BindingSite(kind=BindingKind.CLOSURE, module="m", name="f", owner="Layer"),
    layers=3,
    fallback="f",
    boundaries=(),
)
ELF = ElfFacts(
    path="/site/causal_conv1d_cuda.so",
    machine="x86_64",
    needed=("libc10.so", "libcudart.so.13"),
    search_path=(),
    glibc=Version("2.32"),
    libstdcxx=Version("3.4.29"),
    torch_symbols=("_ZN3c104cuda9SetDeviceEa",),
    gpu_code=(GpuCode(capability=(8, 0), ptx=False), GpuCode(capability=(9, 0), ptx=False)),
)
MACHINE = Environment(
    origin="/py",
    live=True,
    executable="/py",
    python=Version("3.12.3"),
    machine="x86_64",
    glibc=Version("2.39"),
    torch=Version("2.13.0"),
    torch_cuda=Version("13.0"),
    torch_is_cpu=False,
    cxx11_abi=True,
    gpus=(Gpu(name="H100", capability=(9, 0)),),
    distributions={
        "causal-conv1d": Distribution(
            name="causal-conv1d", version="1.7.0", location="/site", top_level=("causal_conv1d", "causal_conv1d_cuda")
        )
    },
)
INTENT = Intent()
OLD_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationESs"


def module(
    name: str = "causal_conv1d_cuda.so", missing: tuple[str, ...] = (), problem: str = "", **elf: Any
) -> Extension:
    path = f"/site/{name}"
    facts = None if problem else replace(ELF, path=path, **elf)
    return Extension(distribution="causal-conv1d", path=path, elf=facts, missing=missing, problem=problem)


def judge(
    *modules: Extension,
    bindings: Bindings | None = None,
    machine: Environment = MACHINE,
    path: FastPath = CONV,
    intent: Intent = INTENT,
    **facts: Any,
) -> tuple[Finding, ...]:
    known = BinaryFacts(extensions=modules, **{"libstdcxx": Version("3.4.33"), **facts})
    return judge_binaries(wanted_packages([path], intent, bindings, {}), known, machine)


def said(findings: tuple[Finding, ...]) -> set[tuple[str, str]]:
    return {(f.code, f.status.value) for f in findings}


def imported(outcome: ImportOutcome, bound_to: BoundTo = BoundTo.TORCH) -> Bindings:
    return Bindings(
        bindings=(Binding(symbol=CONV.symbol, module="m", bound_to=bound_to),),
        imports=(ImportFact(module="causal_conv1d", outcome=outcome),),
    )


def test_a_module_that_fits_has_no_finding() -> None:
    assert judge(module()) == ()


@pytest.mark.parametrize(
    ("wrong", "code", "sides"),
    [
        (module(needed=("libcudart.so.12",)), "wrong-cuda", ("libcudart.so.12", "CUDA 13.0")),
        (module(needed=("libcudart.so.11.0",)), "wrong-cuda", ("libcudart.so.11.0", "CUDA 13.0")),
        (module(glibc=Version("2.40")), "glibc-too-old", ("2.40", "2.39")),
        (module(libstdcxx=Version("3.4.99")), "libstdcxx-too-old", ("3.4.99", "3.4.33")),
        (module(machine="aarch64"), "wrong-machine", ("aarch64", "x86_64")),
        (module(missing=("_ZN2at4_ops5zeros4callE",)), "wrong-torch", ("_ZN2at4_ops5zeros4callE", "2.13.0")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_load_is_a_no_that_names_both_sides(wrong: Extension, code: str, sides: tuple[str, ...]) -> None:
    findings = judge(wrong)
    assert said(findings) == {(code, "fail")}
    assert all(side in findings[0].reason for side in sides)
    assert findings[0].fast_path == "causal_conv1d_fn"
    assert "pip install --force-reinstall" in findings[0].fix


@pytest.mark.parametrize(
    ("outcome", "bound_to"),
    [(ImportOutcome.OK, BoundTo.TORCH), (ImportOutcome.NOT_TRIED, BoundTo.KERNEL), (ImportOutcome.RAISED, BoundTo.HUB)],
)
def test_a_working_import_is_never_contradicted(outcome: ImportOutcome, bound_to: BoundTo) -> None:
    every = (
        module("a.so", needed=("libcudart.so.12",)),
        module("b.so", glibc=Version("2.99"), missing=(OLD_ABI,)),
        module("c.so", machine="aarch64"),
        module("d.so", problem="d.so is no readable ELF file"),
    )
    assert judge(*every, bindings=imported(outcome, bound_to)) == ()
    assert said(judge(*every, bindings=imported(ImportOutcome.RAISED))) >= {
        ("wrong-cuda", "fail"),
        ("wrong-torch", "fail"),
    }


def test_the_abi_is_named_only_where_the_sides_differ() -> None:
    old = module(missing=(OLD_ABI,), torch_symbols=(OLD_ABI,))
    assert "the old C++ ABI, while this torch has the new C++ ABI" in judge(old)[0].reason
    assert "ABI" not in judge(old, machine=replace(MACHINE, cxx11_abi=False))[0].reason
    assert "ABI" not in judge(old, machine=replace(MACHINE, cxx11_abi=None))[0].reason


def test_symbols_that_a_library_of_the_package_may_bring_are_only_suspicious() -> None:
    wants = module(missing=(OLD_ABI,), needed=("libhelper.so",))
    assert said(judge(wants)) == {("wrong-torch", "fail")}
    assert said(judge(wants, module("libhelper.so"))) == {("wrong-torch", "warn")}


def test_a_cuda_runtime_found_elsewhere_is_only_suspicious() -> None:
    wants = module(needed=("libcudart.so.12",))
    assert said(judge(wants, found_elsewhere=frozenset({"libcudart.so.12"}))) == {("wrong-cuda", "warn")}
    assert said(judge(wants, found_elsewhere=frozenset({"libcudart.so.13"}))) == {("wrong-cuda", "fail")}


def test_a_cpu_torch_brings_no_cuda_runtime_and_an_unknown_torch_is_not_judged() -> None:
    cpu = replace(MACHINE, torch_cuda=None, torch_is_cpu=True)
    assert said(judge(module(), machine=cpu)) == {("wrong-cuda", "fail")}
    assert "CPU build" in judge(module(), machine=cpu)[0].reason
    assert judge(module(needed=()), machine=cpu) == ()
    assert judge(module(), machine=replace(cpu, torch_is_cpu=None)) == ()


@pytest.mark.parametrize(
    "unknown", [{"glibc": None}, {"machine": None}, {"gpus": ()}, {"gpus": (Gpu(name="?", capability=None),)}], ids=str
)
def test_what_is_not_known_about_the_machine_is_not_judged(unknown: dict[str, Any]) -> None:
    bad = module(glibc=Version("2.99")) if "glibc" in unknown else module(machine="aarch64", gpu_code=())
    bad = module(gpu_code=(GpuCode(capability=(5, 0), ptx=False),)) if "gpus" in unknown else bad
    assert judge(bad) != ()
    assert judge(bad, machine=replace(MACHINE, **unknown)) == ()
    assert judge(module(), libstdcxx=None) == ()


def test_modules_for_other_machines_and_pythons_beside_the_right_one_are_nothing() -> None:
    assert judge(module(), module("arm.so", machine="aarch64")) == ()
    other = module("x.cpython-310-x86_64-linux-gnu.so", missing=(OLD_ABI,))
    assert judge(other) == ()
    assert said(judge(module("x.cpython-312-x86_64-linux-gnu.so", missing=(OLD_ABI,)))) == {("wrong-torch", "fail")}
    assert judge(module(), machine=replace(MACHINE, machine="AMD64")) == ()


@pytest.mark.parametrize("loads", [True, False])
def test_gpu_code_is_judged_even_where_the_import_works(*, loads: bool) -> None:
    bindings = imported(ImportOutcome.OK) if loads else None
    only_ada = module(gpu_code=(GpuCode(capability=(8, 9), ptx=False),))
    findings = judge(only_ada, bindings=bindings)
    assert said(findings) == {("no-gpu-code", "fail")}
    assert "sm_89" in findings[0].reason
    assert "9.0" in findings[0].reason
    assert judge(module(gpu_code=()), bindings=bindings) == ()
    assert judge(module(gpu_code=(GpuCode(capability=(8, 0), ptx=True),)), bindings=bindings) == ()


def test_one_module_for_each_generation_is_no_failure() -> None:
    ada = module("ada.so", gpu_code=(GpuCode(capability=(8, 9), ptx=False),))
    assert said(judge(ada, module())) == {("no-gpu-code", "warn")}


def test_an_unreadable_module_is_unknown() -> None:
    assert said(judge(module(problem="x.so is no readable ELF file"))) == {("binary-unreadable", "unknown")}


def test_a_small_part_only_warns() -> None:
    assert said(judge(module(machine="aarch64"), path=replace(CONV, optional=True))) == {("wrong-machine", "warn")}


def test_a_switched_off_kernel_is_not_judged() -> None:
    assert judge(module(machine="aarch64"), path=replace(CONV, disabled_by="use_kernels=False")) == ()


RECORDS = RecordState(
    changed=(
        ChangedFile(distribution="causal-conv1d", path="causal_conv1d/__init__.py", missing=False),
        ChangedFile(distribution="another", path="another.py", missing=True),
    ),
    shared=(
        SharedFile(path="causal_conv1d/a.py", distributions=("causal-conv1d", "vendored"), same_content=False),
        SharedFile(path="causal_conv1d/b.py", distributions=("causal-conv1d", "vendored"), same_content=True),
    ),
    unmet=(UnmetPin(distribution="causal-conv1d", version="1.7.0", wants="core==1.7.0", installed="1.6.0"),),
    problems=("causal-conv1d in /site has no RECORD: what was installed is not known", "another in /site has none"),
)


def test_records_warn_and_what_could_not_be_read_is_unknown_until_an_import_works() -> None:
    suspicious = {("changed-files", "warn"), ("two-owners", "warn"), ("sibling-mismatch", "warn")}
    assert said(judge(records=RECORDS)) == {*suspicious, ("record-unreadable", "unknown")}
    assert said(judge(records=RECORDS, bindings=imported(ImportOutcome.OK))) == suspicious
    text = " ".join(f.reason for f in judge(records=RECORDS))
    for word in ("causal_conv1d/__init__.py differs", "causal-conv1d and vendored", "core==1.7.0", "1.6.0"):
        assert word in text
    assert "another" not in text
    assert judge(records=RecordState(shared=RECORDS.shared[1:])) == ()


def test_a_record_that_cannot_be_read_is_found_by_its_folder() -> None:
    records = RecordState(problems=("/site/causal_conv1d-1.7.0.dist-info/RECORD could not be read: denied",))
    assert said(judge(records=records)) == {("record-unreadable", "unknown")}
    assert judge(records=RecordState(problems=("/site/x-1.dist-info/RECORD could not be read: denied",))) == ()


def test_the_attention_that_was_asked_for_is_looked_at_too() -> None:
    owner = Distribution(name="flash-attn", version="2.8.3", location="/site", top_level=("flash_attn",))
    machine = replace(MACHINE, distributions={"flash-attn": owner})
    wrong = replace(module("flash_attn_2_cuda.so", needed=("libcudart.so.12",)), distribution="flash-attn")
    asked = Intent(attn_implementation="flash_attention_2")
    findings = judge(wrong, machine=machine, intent=asked)
    assert said(findings) == {("wrong-cuda", "fail")}
    assert findings[0].fast_path is None
    assert judge(wrong, machine=machine) == ()
    works = Bindings(imports=(ImportFact(module="flash_attn", outcome=ImportOutcome.OK),))
    assert judge(wrong, machine=machine, intent=asked, bindings=works) == ()
