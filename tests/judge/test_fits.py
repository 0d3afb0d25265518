"""A machine that was only described: which builds are known to fit it, and what is a no, an unknown or a yes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import configs
from kernelguard.check import Request, run_check
from kernelguard.report.document import to_document
from observed import transformers_base

CONV, GDN = "causal_conv1d_fn", "chunk_gated_delta_rule"

TARGETS = [
    # A set is known, and one part of it only from what its publisher says.
    ("h100", 3, {CONV: "build-unknown", GDN: "fits"}, ["reported", "triton 3.7.1", "kernelguard lock"]),
    # Everything in the set stands on a list that somebody has read.
    ("h100,driver=470", 0, {CONV: "fits", GDN: "fits"}, ["cu118"]),
    # The image with the triton that fla refuses, or computes wrong gradients on.
    ("h200,torch=2.11.0,triton=3.6.0", 1, {GDN: "no-build"}, ["3.6.0 is in >=3.4.0,<3.7.1", "torch=2.12.1"]),
    # Allowing a source build would help, so it is no definite no.
    ("h100,torch=2.15.0", 3, {CONV: "build-unknown", GDN: "fits"}, ["--allow-source-build"]),
    ("h100,torch=2.99", 3, {CONV: "build-unknown", GDN: "build-unknown"}, ["torch 2.99 is not known"]),
    ("h100,driver=300", 1, {CONV: "no-build", GDN: "no-build"}, ["no torch fits this target", "300"]),
    ("cpu", 1, {CONV: "no-build"}, ["needs a GPU"]),
]


def asked(tmp_path: Path, target: str, *, strict: bool = False, **flags: Any) -> dict[str, Any]:
    model = configs.write(tmp_path / "model", dict(configs.QWEN3_5))
    tree = transformers_base("5.24.0").site / "transformers"
    request = Request(model=str(model), flags=flags, target=target, transformers=str(tree), strict=strict)
    return to_document(run_check(request, {"PATH": "", "HOME": str(tmp_path)}))


@pytest.mark.parametrize(("target", "code", "codes", "words"), TARGETS, ids=[t[0] for t in TARGETS])
def test_what_a_described_machine_is_told(
    tmp_path: Path, target: str, code: int, codes: dict[str, str], words: list[str]
) -> None:
    said = asked(tmp_path, target)
    found = {f["fast_path"]: f["code"] for f in said["findings"] if f["fast_path"] in codes}
    assert found == codes
    assert said["exit_code"] == code
    text = "\n".join(f"{f['reason']} {f['fix']} {f['evidence']}" for f in said["findings"])
    for word in words:
        assert word in text


def test_what_the_search_has_decided_is_not_called_open(tmp_path: Path) -> None:
    # A rule that only warns is not decided by the search, and stays open.
    assert {rule["status"] for rule in asked(tmp_path, "h100,driver=470")["open_rules"]} == {"warn"}
    assert "fail" in {rule["status"] for rule in asked(tmp_path, "h100,torch=2.15.0")["open_rules"]}


OVERRUN = "cc1d-seq-idx-overrun"
"""A rule that only warns, about the newest causal-conv1d that fits a driver of that age."""
SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")


def test_a_rule_that_warns_of_a_found_build_is_a_warning(tmp_path: Path) -> None:
    said = asked(tmp_path, "h100,driver=470", packed=True, signals=SIGNALS)
    warned = next(f for f in said["findings"] if f["code"] == OVERRUN)
    assert warned["status"] == "warn"
    assert "causal-conv1d 1.6.2.post1 is in <1.7.0" in warned["reason"]
    assert "causal-conv1d>=1.7.0" in warned["fix"]
    assert OVERRUN not in {rule["rule_id"] for rule in said["open_rules"]}, "it is decided"
    assert said["exit_code"] == 0


def test_strict_refuses_it(tmp_path: Path) -> None:
    assert asked(tmp_path, "h100,driver=470", packed=True, signals=SIGNALS, strict=True)["exit_code"] == 1
    unpacked = asked(tmp_path, "h100,driver=470", packed=False, strict=True)
    assert unpacked["exit_code"] == 0
    assert OVERRUN not in {f["code"] for f in unpacked["findings"]}
