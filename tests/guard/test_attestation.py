"""The attestation: what ran on what and why, compared when training goes on, and free of secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernelguard import data
from kernelguard.guard import attestation
from kernelguard.guard.attestation import AttestationError, build, compare, find, load, on_resume, report, write
from kernelguard.guard.ticket import AdmissionNote, Document, Model, Ticket

TICKET = Ticket(
    lock=Document("kernelguard.lock", "sha256:" + "a" * 64),
    verdict=Document("verdict.json", "sha256:" + "b" * 64, "gpu"),
    admission=AdmissionNote(admitted=True, reasons=("driver 580.95.05",), overrides=("accept-older-driver-branch",)),
    run_dir="/runs/1",
    level="gpu",
    model=Model("config.json", "bfloat16", "qwen3_5", "c" * 64),
    intent={"packed": "True"},
)
FIELDS = {
    "python": "3.12.3",
    "torch": "2.13.0+cu130",
    "CUDA of torch": "13.0",
    "version of fla-core": "0.6.0",
    "RECORD of fla-core": "d" * 64,
    "GPU": "NVIDIA H200",
    "capability": "9.0",
    "driver": "580.95.05",
    "chunk_gated_delta_rule in modeling_qwen3_5": "package fla.ops.f",
}


def attest(ticket: Ticket = TICKET, **changes: Any) -> dict[str, Any]:
    named: dict[str, Any] = {"argv": ("train.py",), "environ": {}, "world_size": 2}
    named |= {"bound": {"chunk_gated_delta_rule": "package fla.ops.f"}} | changes
    fields = named.pop("fields", FIELDS)
    return build(ticket, fields, **named)


def test_it_says_what_ran_and_why() -> None:
    seconds = {"total": 31.5, "probes": 12.0}
    kernels = {"chunk_gated_delta_rule": ("b_kernel", "a_kernel")}
    reduced = {"world_size": 2, "backend": "nccl", "bytes": 8, "seconds": 0.1, "bus_gb_per_s": {"slowest": 1.0}}
    document = attest(stage="step 1", kernels=kernels, seconds=seconds, collectives=reduced)
    jsonschema.validate(document, json.loads(data.schema("attestation").read_text()))
    assert document["lock"]["digest"] == TICKET.lock.digest
    assert document["verdict"]["level"] == "gpu"
    assert document["admission"] == {
        "admitted": True,
        "reasons": ["driver 580.95.05"],
        "overrides": ["accept-older-driver-branch"],
    }
    assert document["fields"] == FIELDS
    assert document["kernels"] == {"chunk_gated_delta_rule": ["a_kernel", "b_kernel"]}
    assert document["stage"] == "step 1"
    assert document["world_size"] == 2
    assert document["preflight_seconds"] == {"total": 31.5, "probes": 12.0}
    assert document["collectives"] == reduced


def test_it_is_written_whole_and_found_from_a_checkpoint(tmp_path: Path) -> None:
    assert write(attest(), tmp_path / "checkpoints") == ""
    step = tmp_path / "checkpoints" / "step-200"
    step.mkdir()
    assert find(step) == tmp_path / "checkpoints" / attestation.NAME
    assert load(find(step) or "")["fields"] == FIELDS
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_file()] == [attestation.NAME]
    write(attest(fields={"torch": "2.14"}), step)
    assert load(find(step) or "")["fields"] == {"torch": "2.14"}, "a checkpoint's own comes first"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in write(attest(), tmp_path / "file" / "below")


def test_an_equal_run_has_no_changes(tmp_path: Path) -> None:
    write(attest(), tmp_path)
    assert on_resume(tmp_path, attest()) == ()
    assert on_resume(tmp_path / "elsewhere" / "deeper", attest()) == (), "nothing to compare with is no change"


CHANGED = {
    "another fla": ({"fields": {**FIELDS, "version of fla-core": "0.4.1"}}, "version of fla-core", True),
    "another build of fla": ({"fields": {**FIELDS, "RECORD of fla-core": "e" * 64}}, "RECORD of fla-core", True),
    "another torch": ({"fields": {**FIELDS, "torch": "2.14.0"}}, "torch", True),
    "another GPU": ({"fields": {**FIELDS, "GPU": "NVIDIA H100"}}, "GPU", True),
    "the slow path": (
        {"fields": {**FIELDS, "chunk_gated_delta_rule in modeling_qwen3_5": "torch m.torch_chunk"}},
        "chunk_gated_delta_rule in modeling_qwen3_5",
        True,
    ),
    "another live binding": (
        {"bound": {"chunk_gated_delta_rule": "torch m.torch_chunk"}},
        "bound chunk_gated_delta_rule",
        True,
    ),
    "another lock": ({"ticket": replace(TICKET, lock=Document("k", "sha256:" + "e" * 64))}, "lock", True),
    "another model": ({"ticket": replace(TICKET, model=Model("c", "bfloat16", "", "e" * 64))}, "model", True),
    "another intent": ({"ticket": replace(TICKET, intent={"packed": "False"})}, "intent", True),
    "another image": ({"ticket": replace(TICKET, image="sha256:" + "e" * 64)}, "image", True),
    "another driver": ({"fields": {**FIELDS, "driver": "590.1"}}, "driver", False),
    "other ranks": ({"world_size": 4}, "world_size", False),
}


@pytest.mark.parametrize("name", CHANGED)
def test_one_change_is_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, field, grave = CHANGED[name]
    write(attest(), tmp_path)
    found = on_resume(tmp_path, attest(**changes))
    assert [(c.field, c.grave) for c in found] == [(field, grave)]
    report(found)
    said = capsys.readouterr().err
    assert field in said
    assert ("CHANGED" in said) is grave


def test_grave_changes_come_first() -> None:
    found = compare(attest(), attest(fields={**FIELDS, "driver": "590.1", "torch": "2.14.0"}))
    assert [c.field for c in found] == ["torch", "driver"]


def test_what_one_side_does_not_know_is_no_change() -> None:
    assert compare(attest(bound={}), attest()) == ()
    assert compare(attest(fields={"torch": "2.13.0+cu130"}), attest()) == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "fields": []}'])
def test_what_is_no_attestation_says_so(text: str, tmp_path: Path) -> None:
    (tmp_path / attestation.NAME).write_text(text)
    with pytest.raises(AttestationError, match=attestation.NAME):
        on_resume(tmp_path, attest())


def test_no_secret_gets_into_it() -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    environ = {"HF_TOKEN": secret, "WANDB_API_KEY": "k3y", "PYTHONPATH": f"/x/{secret}", "MY_THING": "private"}
    argv = ("train.py", "--hub-token", "s3cret", "wandb.api_key=s3cret", f"--push={secret}")
    text = json.dumps(attest(argv=argv, environ=environ, fields={"x": secret}))
    for word in (secret, "s3cret", "k3y", "private"):
        assert word not in text
    assert "train.py" in text
