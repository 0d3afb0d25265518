"""Rules: each at its bounds, and the three-valued logic behind all of them."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from rule_cases import CASES, GDN

from kernelguard.errors import InputError
from kernelguard.judge.bounds import Bounds, Truth, all_of, any_of
from kernelguard.judge.predicates import AnyOf, Installed, Predicate, VersionIn
from kernelguard.judge.rules import Facts, Rule, apply_rules, evaluate, explain, load_rules, parse_rule
from kernelguard.judge.values import Status
from rule_facts import RULES, UNKNOWN, facts, match

ALL = tuple(RULES.values())


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(RULES)


@pytest.mark.parametrize("rule_id", CASES)
def test_inside(rule_id: str) -> None:
    found = match(rule_id, **CASES[rule_id].inside)
    assert found.outcome is Truth.TRUE
    assert len(found.because) == len(RULES[rule_id].when)
    assert all(found.because)


@pytest.mark.parametrize(
    ("rule_id", "change"), [(rule_id, change) for rule_id, case in CASES.items() for change in case.outside]
)
def test_just_outside(rule_id: str, change: dict[str, Any]) -> None:
    assert match(rule_id, **{**CASES[rule_id].inside, **change}).outcome is Truth.FALSE


@pytest.mark.parametrize("rule_id", CASES)
def test_unknown_fact_leaves_it_open(rule_id: str) -> None:
    case = CASES[rule_id]
    found = match(rule_id, **{**case.inside, case.needs: UNKNOWN})
    assert found.outcome is Truth.UNKNOWN
    assert found.unknown_facts


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_every_condition_and_bound_has_a_machine_that_misses_only_it(rule: Rule) -> None:
    case = CASES[rule.id]
    machines = [facts(**{**case.inside, **change}) for change in case.outside]
    for predicate in rule.when:
        others = [other for other in rule.when if other is not predicate]
        missing = [f for f in machines if predicate.test(f).truth is Truth.FALSE]
        alone = [f for f in missing if all(other.test(f).truth is Truth.TRUE for other in others)]
        assert alone, f"{rule.id}: no machine misses only: {predicate.words()}"
        for clause in _clauses(predicate):
            assert any(
                clause.test(f).truth is Truth.FALSE for f in missing if _in_bounds_but_for(predicate, clause, f)
            ), f"{rule.id}: no machine just outside {clause.words()}"


def _clauses(predicate: Predicate) -> list[VersionIn | Installed]:
    if not isinstance(predicate, VersionIn | Installed):
        return []
    return [replace(predicate, bounds=Bounds(str(c), (c,))) for c in predicate.bounds.clauses]


def _in_bounds_but_for(predicate: Predicate, clause: Predicate, machine: Facts) -> bool:
    return all(other.test(machine).truth is Truth.TRUE for other in _clauses(predicate) if other != clause)


@pytest.mark.parametrize("rule", [r for r in ALL if any(isinstance(p, AnyOf) for p in r.when)], ids=lambda r: r.id)
def test_every_group_of_an_any_can_hold(rule: Rule) -> None:
    machines = [facts(**CASES[rule.id].inside), *(facts(**m) for m in ANY_GROUPS.get(rule.id, ()))]
    for predicate in rule.when:
        if isinstance(predicate, AnyOf):
            for group in predicate.groups:
                only_this = replace(predicate, groups=(group,))
                whole = replace(rule, when=tuple(only_this if p is predicate else p for p in rule.when))
                assert any(evaluate(whole, machine).outcome is Truth.TRUE for machine in machines), (
                    f"{rule.id}: nothing makes this group hold: {only_this.words()}"
                )


def _but(rule_id: str, **changes: Any) -> dict[str, Any]:
    return {**CASES[rule_id].inside, **changes}


def _kernels(rule_id: str, *versions: str) -> tuple[dict[str, Any], ...]:
    return (_but(rule_id, pkgs={}), *(_but(rule_id, pkgs={"kernels": version}) for version in versions))


_TILELANG = {"fla-core": "0.5.1", "tilelang": "0.1.12"}
ANY_GROUPS: dict[str, tuple[dict[str, Any], ...]] = {
    "mamba-switch-without-effect": (_but("mamba-switch-without-effect", model_types="zamba", transformers="5.18.0"),),
    "fla-hopper-dqkwg-raise": (
        _but("fla-hopper-dqkwg-raise", pkgs=_TILELANG, env={"FLA_TILELANG": "0"}),
        _but("fla-hopper-dqkwg-raise", pkgs=_TILELANG, grouped_values=True),
    ),
    "fla-hopper-dqkwg-raise2": (
        _but("fla-hopper-dqkwg-raise2", pkgs={**_TILELANG, "fla-core": "0.6.0"}, env={"FLA_TILELANG": "0"}),
        _but("fla-hopper-dqkwg-raise2", pkgs={**_TILELANG, "fla-core": "0.6.0"}, nvcc=False),
    ),
    "kernels-window-5.2": _kernels("kernels-window-5.2"),
    "kernels-window-5.13": _kernels("kernels-window-5.13", "0.16.0"),
    "kernels-window-5.15": _kernels("kernels-window-5.15", "0.17.0"),
    "kernels-window-5.18": _kernels("kernels-window-5.18", "0.18.0"),
    "kernels-window-5.20": _kernels("kernels-window-5.20", "0.18.0"),
    "kernels-window-5.23": _kernels("kernels-window-5.23", "0.19.0"),
    "use-kernels-switched-off": (_but("use-kernels-switched-off", env={"DISABLE_KERNEL_MAPPING": "1"}),),
    "mxfp4-dequantized": (
        _but("mxfp4-dequantized", triton="3.7.1", gpu="7.0"),
        _but("mxfp4-dequantized", triton="3.7.1", pkgs={}),
    ),
    "tilelang-tvmffi": (
        _but(
            "tilelang-tvmffi",
            symbols=GDN,
            gpu="9.0",
            pkgs={"tilelang": "0.1.11", "apache-tvm-ffi": "0.1.12", "fla-core": "0.6.0"},
        ),
    ),
    "tilelang-018-tvmffi": (
        _but(
            "tilelang-018-tvmffi",
            symbols="selective_scan_fn",
            pkgs={"tilelang": "0.1.8", "apache-tvm-ffi": "0.1.10", "mamba-ssm": "2.3.2.post1"},
        ),
    ),
    "fa-placeholder": ({"pkgs": {"flash-attn-interface": "0.0.1"}},),
    "glibc-232": (
        {"glibc": "2.31", "via": {"flash-attn": "sdist"}, "pkgs": {"flash-attn": "2.8.0.post1"}},
        {"glibc": "2.31", "via": {"mamba-ssm": "sdist"}, "pkgs": {"mamba-ssm": "2.2.5"}},
    ),
    "cxx17-sdists-torch214": (
        {"torch": "2.15.0", "via": {"flash-attn": "source"}, "pkgs": {"flash-attn": "2.8.3.post2"}},
    ),
}


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("spec", "version", "held"),
    [
        (">=2.11", "2.11.0+cu130", Truth.TRUE),
        ("<=1.6.1", "1.6.1+cu12torch2.8cxx11abitrue", Truth.TRUE),
        (">1.6.1", "1.6.1+cu12", Truth.FALSE),
        ("<=2.8.3", "2.8.3.post1", Truth.FALSE),
        (">2.8.3", "2.8.3.post1", Truth.TRUE),
        ("==2.3.2.post1", "2.3.2.post1+cu12torch2.8", Truth.TRUE),
        ("==12.9.*", "12.9.86", Truth.TRUE),
        (">=4.0.0b31", "4.0.0b31", Truth.TRUE),
        (">=4.0.0b31", "4.0.0b30", Truth.FALSE),
        (">=4.0.0b31", "4.0.0", Truth.TRUE),
        (">=3.4.0,<3.7.1", "3.6.0.dev20260101", Truth.TRUE),
        ("<3.7.1", "3.7.1rc1", Truth.UNKNOWN),
        (">=3.7.1", "3.7.1.dev1+git123", Truth.UNKNOWN),
        ("<2.7", "2.5.0a0+nv24.10", Truth.TRUE),
        (">=2.14", "2.5.0a0+nv24.10", Truth.FALSE),
        ("<2.5", "2.5.0a0+nv24.10", Truth.UNKNOWN),
        ("<580", "575.57.08", Truth.TRUE),
        ("", "0.0.0", Truth.TRUE),
    ],
)
def test_bounds(spec: str, version: str, held: Truth) -> None:
    assert Bounds.parse(spec).hold(Version(version)) is held


@pytest.mark.parametrize("spec", ["3.4", "=>3", ">=3.x", "===3.4.0", "any", ">= "])
def test_bounds_refuse_nonsense(spec: str) -> None:
    with pytest.raises(ValueError, match="version"):
        Bounds.parse(spec)


_NUMBERS = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
_SUFFIX = st.sampled_from(["", "", "rc1", "a0", "b31", ".dev3", ".post1", "+cu130", ".post2+cu12", "a0+nv24.10"])
_VERSION_TEXTS = st.builds(str.__add__, _NUMBERS, _SUFFIX)


@given(
    version=_VERSION_TEXTS.map(Version), bound=st.builds(str.__add__, _NUMBERS, st.sampled_from(["", "b1", ".post1"]))
)
def test_below_and_not_below_leave_no_gap(version: Version, bound: str) -> None:
    for below, rest in (("<", ">="), ("<=", ">")):
        first, second = Bounds.parse(below + bound).hold(version), Bounds.parse(rest + bound).hold(version)
        assert {first, second} in ({Truth.TRUE, Truth.FALSE}, {Truth.UNKNOWN})


# ---------------------------------------------------------------- three values

_TRUTHS = st.lists(st.sampled_from(Truth), max_size=5)


@given(_TRUTHS)
def test_and_or_are_dual(truths: list[Truth]) -> None:
    turned = {Truth.TRUE: Truth.FALSE, Truth.FALSE: Truth.TRUE, Truth.UNKNOWN: Truth.UNKNOWN}
    assert all_of(truths) is turned[any_of(turned[t] for t in truths)]


@pytest.mark.parametrize(
    ("truths", "both", "either"),
    [
        ([], Truth.TRUE, Truth.FALSE),
        ([Truth.TRUE, Truth.UNKNOWN], Truth.UNKNOWN, Truth.TRUE),
        ([Truth.FALSE, Truth.UNKNOWN], Truth.FALSE, Truth.UNKNOWN),
        ([Truth.UNKNOWN], Truth.UNKNOWN, Truth.UNKNOWN),
    ],
)
def test_and_or(truths: list[Truth], both: Truth, either: Truth) -> None:
    assert all_of(truths) is both
    assert any_of(truths) is either


_INSIDES = st.sampled_from([case.inside for case in CASES.values()])
_OUTSIDES = st.sampled_from([change for case in CASES.values() for change in case.outside])
_MIXED = st.builds(lambda one, other, change: {**one, **other, **change}, _INSIDES, _INSIDES, _OUTSIDES)
_KEYS = ("torch", "cuda", "triton", "ptxas", "glibc", "transformers", "driver", "machine", "phase", "attention")
_MORE = (
    "model_types",
    "quantization",
    "head_dim",
    "packed",
    "use_kernels",
    "liger",
    "executed",
    "nvcc",
    "grouped_values",
    "grouped_heads",
    "gpu",
)
_REMOVED = st.sets(st.sampled_from((*_KEYS, *_MORE, "symbols", "pkgs", "via", "env")))


@given(changes=_MIXED, removed=_REMOVED)
def test_a_fact_more_only_decides_what_was_unknown(changes: dict[str, Any], removed: set[str]) -> None:
    less = facts(**{**changes, **dict.fromkeys(removed, UNKNOWN)})
    more = facts(**changes)
    for rule in ALL:
        before, after = evaluate(rule, less), evaluate(rule, more)
        assert before.outcome in {Truth.UNKNOWN, after.outcome}
        assert (before.outcome is Truth.UNKNOWN) == bool(before.unknown_facts)


_NAMES = sorted({n for rule in ALL for p in rule.when if isinstance(p, Installed) for n in p.names})
_ANY_TEXT = st.one_of(
    _VERSION_TEXTS, st.sampled_from(["N/A", "", "unknown", "1.0-local-build", "git+abc"]), st.text(max_size=12)
)


@given(
    distributions=st.dictionaries(st.sampled_from(_NAMES), _ANY_TEXT, max_size=6),
    triton=st.one_of(st.none(), _VERSION_TEXTS),
    torch=_VERSION_TEXTS,
    inside=_INSIDES,
)
def test_no_version_makes_evaluation_raise(
    distributions: dict[str, str], triton: str | None, torch: str, inside: dict[str, Any]
) -> None:
    machine = facts(**{**inside, "pkgs": distributions, "triton": triton, "torch": torch})
    findings, still_open = apply_rules(ALL, machine)
    assert all(f.reason and f.fix for f in findings)
    assert all(o.facts and o.text for o in still_open)


@pytest.mark.parametrize("text", ["N/A", "", "unknown"])
def test_an_unreadable_version_is_unknown(text: str) -> None:
    found = match("fla-hopper-dqkwg", gpu="9.0", symbols=GDN, triton="3.5.0", pkgs={"fla-core": text})
    assert found.outcome is Truth.UNKNOWN
    assert found.unknown_facts == ("fla-core",)


def test_the_first_installed_name_decides() -> None:
    old = {"gpu": "9.0", "symbols": GDN, "triton": "3.5.0"}
    assert match("fla-hopper-dqkwg", **old, pkgs={"flash-linear-attention": "0.2.2"}).outcome is Truth.TRUE
    both = {"flash-linear-attention": "0.2.2", "fla-core": "0.6.0"}
    assert match("fla-hopper-dqkwg", **old, pkgs=both).outcome is Truth.FALSE


def test_one_gpu_of_several_is_enough_and_an_unknown_one_keeps_it_open() -> None:
    inside = CASES["fla-hopper-dqkwg"].inside
    rule = RULES["fla-hopper-dqkwg"]
    assert evaluate(rule, facts(**{**inside, "gpu": ("8.0", "9.0")})).outcome is Truth.TRUE
    assert evaluate(rule, replace(facts(**inside), gpus=((8, 0), None))).outcome is Truth.UNKNOWN
    assert evaluate(rule, replace(facts(**inside), gpus=(None, (9, 0)))).outcome is Truth.TRUE


# ---------------------------------------------------------------- findings and open rules


def test_finding_names_both_sides_the_symbol_and_the_fix() -> None:
    findings, still_open = apply_rules([RULES["fla-hopper-dqkwg"]], facts(**CASES["fla-hopper-dqkwg"].inside))
    (finding,) = findings
    assert still_open == ()
    assert (finding.code, finding.status, finding.fast_path) == ("fla-hopper-dqkwg", Status.FAIL, GDN)
    assert "fla-core 0.4.2 is in <0.5.0" in finding.reason
    assert "triton 3.4.0 is in >=3.4.0,<3.7.1" in finding.reason
    assert "9.0" in finding.reason
    assert finding.fix == "pip install 'torch>=2.12.1' 'triton>=3.7.1'"
    assert "fla-org/flash-linear-attention#640" in finding.evidence


def test_one_finding_for_each_symbol_in_use() -> None:
    rule = RULES["transformers-nested-fla"]
    inside = {**CASES[rule.id].inside, "symbols": (GDN, "chunk_kda")}
    assert {f.fast_path for f in apply_rules([rule], facts(**inside))[0]} == {GDN, "chunk_kda"}


def test_a_rule_without_symbols_is_about_the_whole_run() -> None:
    (finding,) = apply_rules([RULES["torch-no-blackwell"]], facts(cuda="12.6", gpu="12.0"))[0]
    assert finding.fast_path is None


def test_unestablished_bounds_only_warn_and_say_so() -> None:
    (finding,) = apply_rules([RULES["fla-blackwell-913"]], facts(**CASES["fla-blackwell-913"].inside))[0]
    assert finding.status is Status.WARN
    assert "not established" in finding.reason
    assert {r.status for r in ALL if not r.bounds_established} == {Status.WARN}


def test_open_rule_says_what_would_decide_it() -> None:
    inside = {**CASES["fla-hopper-dqkwg"].inside, "triton": UNKNOWN, "pkgs": UNKNOWN}
    findings, still_open = apply_rules([RULES["fla-hopper-dqkwg"]], facts(**inside))
    assert findings == ()
    (rule,) = still_open
    assert rule.facts == ("fla-core", "triton")
    assert rule.symbols == (GDN,)
    assert "triton is >=3.4.0,<3.7.1" in rule.text
    assert "compute capability" not in rule.text  # what is known need not be said


def test_open_any_says_only_what_is_left_of_it() -> None:
    inside = {**CASES["fla-hopper-dqkwg-raise2"].inside, "nvcc": UNKNOWN}
    inside["pkgs"] = {"fla-core": "0.6.0", "tilelang": "0.1.12"}
    _, (rule,) = apply_rules([RULES["fla-hopper-dqkwg-raise2"]], facts(**inside))
    assert rule.facts == ("nvcc",)
    assert rule.text.startswith("would fail if no nvcc is there: ")


def test_some_open_rules_are_not_worth_a_line() -> None:
    rule = RULES["kernelguard-name-taken"]
    assert apply_rules([rule], facts(pkgs=UNKNOWN)) == ((), ())
    assert len(apply_rules([replace(rule, mention_when_open=True)], facts(pkgs=UNKNOWN))[1]) == 1


def test_a_denial_past_its_day_only_warns() -> None:
    rule = RULES["cc1d-sm103-cubin"]
    assert rule.expires is not None
    inside = facts(**CASES[rule.id].inside)
    day_before = rule.expires - timedelta(days=1)
    assert [f.status for f in apply_rules([rule], inside)[0]] == [Status.FAIL]
    assert [f.status for f in apply_rules([rule], inside, today=day_before)[0]] == [Status.FAIL]
    (late,) = apply_rules([rule], inside, today=rule.expires)[0]
    assert late.status is Status.WARN
    assert f"Not looked at again since {rule.retrieved}" in late.reason


# ---------------------------------------------------------------- fixes

_NEWEST_BELOW = {"torch<2.14": "2.13.0", "torch<2.12": "2.11.0", "apache-tvm-ffi<=0.1.9": "0.1.9"}
_TOOLS = {"torch", "triton", "transformers"}


def _fixed(machine: dict[str, Any], fix: str) -> dict[str, Any]:
    """The machine after somebody did what a fix says: the lowest versions that it allows."""
    after = {**machine, "pkgs": dict(machine.get("pkgs", {}))}
    for command in fix.split(" && "):
        if command.startswith("pip uninstall "):
            for name in command.split()[2:]:
                after["pkgs"].pop(name, None)
        for name, version in re.findall(r"'?([a-z0-9-]+)(?:\[cuda\])?[>=]=([0-9a-z.]+)", command):
            _install(after, name, version)
        for asked, version in _NEWEST_BELOW.items():
            if f"'{asked}'" in command:
                _install(after, asked.split("<")[0], version)
        if cuda := re.search(r"/whl/cu(\d\d)(\d)$", command):
            after["cuda"] = f"{cuda[1]}.{cuda[2]}"
    words = {
        "attn_implementation='sdpa'": {"attention": "sdpa"},
        "TRITON_PTXAS_PATH=": {"ptxas": "13.3", "triton": "3.7.1"},  # the bundled ptxas is what was wrong
        "unset ": {"env": {}},
        "remove use_mamba_kernels": {"settings": ()},
        "--force-reinstall --no-deps causal-conv1d": {"via": {"causal-conv1d": "release-wheel"}},
        "--no-cache-dir ": {"via": {}},
        "FROM ubuntu:22.04": {"glibc": "2.35"},
        "whl/cu118": {"cuda": "11.8"},
        " kernels": {"pkgs": {**after["pkgs"], "kernels": "0.18.2"}},
    }
    for word, change in words.items():
        if word in fix:
            after.update(change)
    return after


def _install(machine: dict[str, Any], name: str, version: str) -> None:
    if name in _TOOLS:
        machine[name] = version
        if name == "torch" and Version(version) >= Version("2.11"):
            machine["cuda"] = "13.0"
        return
    machine["pkgs"][name] = version
    if name == "flash-linear-attention":
        machine["pkgs"]["fla-core"] = version


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_the_fix_leads_out_of_the_rule_and_into_no_other_that_fails(rule: Rule) -> None:
    after = facts(**_fixed(CASES[rule.id].inside, rule.fix))
    assert evaluate(rule, after).outcome is Truth.FALSE, rule.fix
    assert [f.code for f in apply_rules(ALL, after)[0] if f.status is Status.FAIL] == []


# ---------------------------------------------------------------- explain, load


def test_explain() -> None:
    told = explain("fla-hopper-dqkwg", ALL)
    assert told.condition == (
        "fla-core or flash-linear-attention <0.5.0 is installed; and triton is >=3.4.0,<3.7.1; and the GPU has compute "
        "capability 9.0; and the run uses chunk_gated_delta_rule; and the run is training"
    )
    assert told.status is Status.FAIL
    assert date.fromisoformat(told.retrieved) == RULES["fla-hopper-dqkwg"].retrieved
    assert told.evidence
    assert told.fix.startswith("pip install")


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_every_condition_can_be_said_in_words(rule: Rule) -> None:
    condition = explain(rule.id, ALL).condition
    assert condition.count("; and ") == len(rule.when) - 1
    assert "{" not in condition


def test_explain_of_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(InputError, match="fla-hopper-dqwkg") as caught:
        explain("fla-hopper-dqwkg", ALL)
    assert "fla-hopper-dqkwg" in (caught.value.hint or "")
    with pytest.raises(InputError) as caught:
        explain("zzzzzzzz", ALL)
    assert caught.value.hint == "kernelguard matrix list shows all rules"


def test_load_names_every_unusable_row(tmp_path: Any) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        'schema = 1\n[[rule]]\nid = "one"\n[[rule]]\nid = "two"\ntitle = "t"\neffect = "e"\nstatus = "fail"\n'
        'fix = "f"\nevidence = []\nretrieved = 2026-01-01\n[rule.when]\ntriton = "newer"\n'
    )
    with pytest.raises(InputError) as caught:
        load_rules(path)
    assert "one: status is missing" in caught.value.message
    assert "two: triton: 'newer'" in caught.value.message


@pytest.mark.parametrize("text", ["schema = 2\n", "schema = ", "rule = []\n"], ids=["newer", "no-toml", "no-schema"])
def test_load_refuses_what_it_cannot_read(tmp_path: Any, text: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"rules\.toml"):
        load_rules(path)


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ({"tritan": "<3"}, "did you mean 'triton'"),
        ({"gpu": ["sm_90"]}, "compute capability"),
        ({"gpu": "9.0"}, "list of words"),
        ({"packed": "yes"}, "true or false"),
        ({"packages": {"Flash_Attn": ""}}, "normalized"),
        ({"packages": {}}, "expected a table"),
        ({"differ": ["fla-core"]}, "two distributions"),
        ({"via": {"fla-core": ["magic"]}}, "release-wheel"),
        ({"any": [{"packed": True}]}, "two or more"),
        ({"any": [{"packed": True}, {"pact": True}]}, "'packed'"),
        ({"triton": 3}, "specifier"),
    ],
)
def test_the_grammar_is_closed(when: dict[str, Any], said: str) -> None:
    row = {"id": "x", "title": "t", "effect": "e", "status": "warn", "fix": "f", "evidence": [], "retrieved": date.min}
    with pytest.raises(ValueError, match=said):
        parse_rule({**row, "when": when})


def test_facts_have_no_field_that_tests_forget() -> None:
    known = {"versions", "choices", "flags", "gpus", "symbols", "distributions", "via", "variables"}
    assert {f.name for f in fields(Facts)} == known
