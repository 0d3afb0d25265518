"""The data files: the shipped ones are right, and every kind of mistake in one is told with its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from packaging.version import Version

from command import Command
from kernelguard import data
from kernelguard.declare.values import Declaration, Intent, LayerKind, ModelConfig, TransformersTree
from kernelguard.judge.rules import Facts, apply_rules, check_matrices, load_rules
from kernelguard.judge.values import Assessment, FastPathAnswer, Finding, Level, NotUsed, Status
from kernelguard.matrix import kernel_packages
from kernelguard.observe.targets import target
from kernelguard.report.document import Check, to_document

SHIPPED = data.matrices()
REPORT = json.loads(data.schema("report").read_text("utf-8"))


def test_the_shipped_files_have_no_problem() -> None:
    assert check_matrices(SHIPPED) == []


@pytest.mark.parametrize("name", ["rules", "kernels", "report", "targets"])
def test_the_schemas_are_schemas(name: str) -> None:
    Draft202012Validator.check_schema(json.loads(data.schema(name).read_text("utf-8")))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str, str, str], list[str]]:
    """Change one text in a copy of one shipped file, and check a folder that holds only that file."""

    def change(name: str, old: str, new: str) -> list[str]:
        source = (SHIPPED / name).read_text("utf-8")
        assert source.count(old) >= 1
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.replace(old, new, 1))
        return check_matrices(tmp_path)

    return change


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('status = "fail"', 'status = "error"', "rule fla-hopper-dqkwg.status: 'error' is not one of"),
        ('id = "fla-hopper-dqkwg"\n', "", "'id' is a required property"),
        ('id = "fla-hopper-dqkwg"', 'id = "Fla Hopper"', "does not match"),
        ('id = "fla-hopper-delta-wy"', 'id = "fla-hopper-dqkwg"', "fla-hopper-dqkwg: this id is used twice"),
        ("retrieved = 2026-11-29\n", "", "rule fla-hopper-dqkwg: 'retrieved' is a required property"),
        (
            "retrieved = 2026-11-29",
            'retrieved = "last week"',
            "rule fla-hopper-dqkwg.retrieved: 'last week' is not a 'date'",
        ),
        ('fix = "pip', 'fixes = "pip', "unknown key 'fixes', did you mean 'fix'?"),
        (
            'triton = ">=3.4.0,<3.7.1"',
            'tritan = ">=3.4.0,<3.7.1"',
            "unknown condition 'tritan', did you mean 'triton'?",
        ),
        ('triton = ">=3.4.0,<3.7.1"', 'triton = "3.4 to 3.7"', "'3.4 to 3.7' is no version specifier"),
        ('gpu = ["9.0"]', 'gpu = ["sm_90"]', "'sm_90' is no compute capability"),
        ("schema = 1", "schema = 2", "schema: 1 was expected"),
        ("[[rule]]", "[rule", "not TOML"),
        ('packages = { "fla-core|flash-linear-attention" = "<0.5.0" }\n', "", None),
        ('packages = { "kernelguard" = "" }', 'packages = { "kernelguard" = ">=0" }', None),
        ('status = "warn"\nbounds', 'status = "fail"\nbounds', "bounds that are not established can only warn"),
        ("expires = 2028-11-29", "expires = 2026-11-29", "expires 2026-11-29 is not after retrieved 2026-11-29"),
        ("expires = 2028-11-29\n", "", "torch-cuda13-old-gpu: it never ends"),
    ],
)
def test_mistakes_in_rules(copied: Any, old: str, new: str, said: str | None) -> None:
    problems = copied("rules.toml", old, new)
    if said is None:
        assert problems == []
    else:
        assert any(said in problem and problem.startswith("rules.toml: ") for problem in problems), problems


def test_a_rule_without_evidence_is_refused(copied: Any) -> None:
    problems = copied("rules.toml", 'evidence = ["fla-org/flash-linear-attention#196"]', "evidence = []")
    assert len(problems) == 1
    assert "triton-320-hopper-abort.evidence" in problems[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('package = "fla"', 'package = "flash"', "package is 'flash', but the file is called fla.toml"),
        ('boundaries = ["cu_seqlens"]\n', "", "symbols.chunk_gated_delta_rule: "),
        ("mixes_tokens = false\n", "mixes_tokens = true\n", "symbols.FusedRMSNormGated.mixes_tokens"),
        ('phase = "both"', 'phase = "train"', "symbols.chunk_gated_delta_rule.phase: 'train' is not one of"),
        ("needs_modules = ", "need_modules = ", "unknown key 'need_modules', did you mean 'needs_modules'?"),
        ('version = ">=3.3"', 'version = ">=3.x"', "minimum of triton: version"),
        ('install = "pip', 'install = "conda', "install: "),
        ("retrieved = 2026-11-29\n", "", "'retrieved' is a required property"),
    ],
)
def test_mistakes_in_kernels(copied: Any, old: str, new: str, said: str) -> None:
    problems = copied("kernels/fla.toml", old, new)
    assert any(said in problem and problem.startswith("kernels/fla.toml: ") for problem in problems), problems


def test_every_problem_is_told_not_only_the_first(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "kernels", tmp_path / "kernels")
    for name in ("fla", "mamba_ssm"):
        file = tmp_path / "kernels" / f"{name}.toml"
        file.write_text(file.read_text().replace('phase = "both"', 'phase = "always"'))
    problems = check_matrices(tmp_path)
    assert len([p for p in problems if p.startswith("kernels/fla.toml")]) >= 2
    assert [p for p in problems if p.startswith("kernels/mamba_ssm.toml")]


def test_a_file_that_no_schema_is_for_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "rulez.toml").write_text("schema = 1\n")
    assert check_matrices(tmp_path) == ["rulez.toml: there is no schema for 'rulez'"]


def test_the_command(tmp_path: Path) -> None:
    good = Command("matrix", "check")
    assert (good.code, good.out) == (0, "")
    (tmp_path / "rulez.toml").write_text("")
    bad = Command("matrix", "check", tmp_path)
    assert bad.code == 1
    assert "rulez.toml" in bad.out


# ---------------------------------------------------------------- what the shipped data says


@pytest.mark.parametrize(
    ("package", "symbol", "boundaries"),
    [
        ("fla", "chunk_gated_delta_rule", ("cu_seqlens",)),
        ("fla", "chunk_kda", ("cu_seqlens",)),
        ("causal_conv1d", "causal_conv1d_fn", ("seq_idx",)),
        ("mamba_ssm", "mamba_split_conv1d_scan_combined", ("seq_idx",)),
        ("mamba_ssm", "mamba_chunk_scan_combined", ("seq_idx",)),
        ("mamba_ssm", "selective_scan_fn", ()),
        ("mamba_ssm", "mamba_inner_fn", ()),
    ],
)
def test_boundary_arguments(package: str, symbol: str, boundaries: tuple[str, ...]) -> None:
    assert kernel_packages()[package].symbols[symbol].boundaries == boundaries


def test_installing_fla_brings_triton() -> None:
    fla = kernel_packages()["fla"]
    assert fla.install == "pip install 'flash-linear-attention[cuda]'"
    assert fla.needs_modules == ("triton",)


# ---------------------------------------------------------------- the report's schema


def _check() -> Check:
    config = ModelConfig(source="c", model_type="qwen3_5", architectures=("Q",), parts=(), raw={})
    declared = Declaration(
        config=config,
        transformers=TransformersTree(root=Path("/t"), version=Version("5.24.0"), origin="path"),
        fast_paths=(),
        layer_kinds=(LayerKind(name="linear_attention", count=48),),
        unknowns=("something",),
    )
    finding = Finding(
        code="not-installed", status=Status.FAIL, reason="r", fast_path="chunk_kda", fix="f", evidence=("e",)
    )
    answer = FastPathAnswer(
        symbol="chunk_kda",
        package="fla",
        distribution="flash-linear-attention",
        model_type="kimi_linear",
        layers=None,
        status=Status.FAIL,
        bound_to=None,
        reason="r",
        fix="f",
        codes=("not-installed",),
        declared_at="models/kimi_linear/modeling_kimi_linear.py:1",
        notice="",
    )
    assessment = Assessment(
        level=Level.RESOLVE,
        reached=Level.RESOLVE,
        fast_paths=(answer,),
        not_used=(NotUsed(symbol="fused_recurrent_kda", model_type="kimi_linear", reason="decoding only"),),
        findings=(finding,),
    )
    environment = target("h100")
    facts = Facts.of(environment=environment, declaration=None, intent=Intent())
    _, still_open = apply_rules(load_rules(SHIPPED / "rules.toml"), facts)
    assert still_open
    return Check(
        declaration=declared,
        intent=Intent(assumed=("packed",)),
        environment=environment,
        assessment=assessment,
        open_rules=still_open,
    )


def test_a_report_fits_its_schema() -> None:
    Draft202012Validator(REPORT).validate(json.loads(json.dumps(to_document(_check()), default=str)))


@pytest.mark.parametrize("key", REPORT["required"])
def test_a_report_that_lost_a_key_does_not(key: str) -> None:
    document = json.loads(json.dumps(to_document(_check()), default=str))
    del document[key]
    with pytest.raises(ValidationError, match=key):
        Draft202012Validator(REPORT).validate(document)


@pytest.mark.parametrize("key", REPORT["properties"]["fast_paths"]["items"]["required"])
def test_a_fast_path_that_lost_a_key_does_not(key: str) -> None:
    document = json.loads(json.dumps(to_document(_check()), default=str))
    del document["fast_paths"][0][key]
    with pytest.raises(ValidationError, match=key):
        Draft202012Validator(REPORT).validate(document)


def test_a_key_more_is_fine() -> None:
    document = json.loads(json.dumps(to_document(_check()), default=str))
    document["new"] = document["fast_paths"][0]["new"] = 1
    Draft202012Validator(REPORT).validate(document)
