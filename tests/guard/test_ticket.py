"""The ticket: what goes in comes out, everything wrong with one is said at once, and no secret is ever written."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelguard import data
from kernelguard.guard import ticket as tickets
from kernelguard.guard.shown import masked, shown_arguments, shown_variables
from kernelguard.guard.ticket import (
    AdmissionNote,
    Deadlines,
    Document,
    Expected,
    ExpectedDistribution,
    ExpectedPath,
    Model,
    Ticket,
    TicketError,
    dumps,
    from_document,
    load_ticket,
    to_document,
)

FULL = Ticket(
    lock=Document("kernelguard.lock", "sha256:" + "a" * 64),
    verdict=Document("verdict.json", "sha256:" + "b" * 64, "gpu"),
    admission=AdmissionNote(admitted=True, reasons=("driver 580.95.05",), overrides=("accept-unmeasured x",)),
    run_dir="/runs/1",
    level="gpu",
    model=Model("config.json", "bfloat16", "qwen3_5", "c" * 64),
    expected=Expected(
        python="3.12.3",
        torch="2.13.0+cu130",
        distributions={"fla-core": ExpectedDistribution("0.6.0", "d" * 64, {"fla/x.so": "e" * 64})},
        capability=(9, 0),
        driver="580.95.05",
        driver_floor="580",
    ),
    deadlines=Deadlines(rendezvous_s=5, probe_s=600),
    fast_paths=(ExpectedPath("chunk_gated_delta_rule", "fla.ops.f", "package", "m.modeling", "fla", 48),),
    kernels={"chunk_gated_delta_rule": ("chunk_fwd_kernel_o",)},
    fallbacks={"chunk_gated_delta_rule": ("aten::linalg_solve_triangular",)},
    packed=True,
    signals=("cu_seq_lens_q",),
    intent={"attn_implementation": "varlen"},
    probes=({"symbol": "chunk_gated_delta_rule", "cases": []},),
    isolation={"lengths": [65, 64]},
    bindings={"sites": []},
    device="cuda",
    image="sha256:" + "f" * 64,
    variables={"TRITON_CACHE_DIR": "/cache"},
)


def test_a_ticket_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ticket.json"
    path.write_text(dumps(FULL))
    assert load_ticket(str(path)) == FULL


def test_a_ticket_follows_its_schema() -> None:
    schema = json.loads(data.schema("ticket").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(to_document(FULL), schema)
    # Nothing is in a ticket that its schema does not describe.
    assert set(to_document(FULL)) == set(schema["properties"])
    assert set(to_document(FULL)["expected"]) == set(schema["properties"]["expected"]["properties"])


@pytest.mark.parametrize("key", sorted(set(json.loads(dumps(FULL)))))
def test_whoever_reads_notices_each_wrong_value(key: str) -> None:
    document = to_document(FULL)
    document[key] = 7 if key != "schema" else "1"
    with pytest.raises(TicketError, match=key):
        from_document(document)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    document = to_document(FULL)
    del document["run_dir"]
    document["level"] = "resolve"
    document["deadlines"]["probe_s"] = -1
    document["fast_paths"][0]["mechanism"] = "magic"
    document["expected"]["capability"] = [9]
    with pytest.raises(TicketError) as raised:
        from_document(document, source=str(tmp_path))
    for words in ("run_dir: missing", "level: expected one of gpu", "deadlines.probe_s", "mechanism", "capability"):
        assert words in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 2}', "[" * 100_000])
def test_what_is_no_ticket_says_so(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ticket.json"
    path.write_text(text)
    with pytest.raises(TicketError, match=r"ticket\.json"):
        load_ticket(str(path))


def test_a_missing_ticket_is_named(tmp_path: Path) -> None:
    with pytest.raises(TicketError, match="No such file"):
        load_ticket(str(tmp_path / "none.json"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(to_document(FULL))), _JSON))
def test_no_content_of_a_ticket_raises_anything_else(changes: dict[str, Any]) -> None:
    with contextlib.suppress(TicketError):
        from_document({**to_document(FULL), **changes})


SECRETS = (
    "hf_abcdefghijklmnopqrstuvwxyz",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "sk-proj-0123456789abcdefghij",
    "dapi0123456789abcdef0123456789abcdef",
    "AKIAIOSFODNN7EXAMPLEKEY",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "glpat-0123456789abcdefghij",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_token_is_masked_wherever_it_stands(secret: str) -> None:
    assert secret not in masked(f"before {secret} after")
    assert secret not in str(shown_arguments(("train.py", f"--url=x/{secret}", secret)))
    assert secret not in str(shown_variables({"PYTHONPATH": f"/a:{secret}", "HF_TOKEN": secret, "HOME": secret}))


def test_values_of_options_that_name_a_secret_are_masked() -> None:
    given_words = ("train.py", "--hub-token", "plain", "--api_key=plain", "wandb.password=plain", "--user", "me")
    shown = shown_arguments(given_words)
    assert shown == (
        "train.py",
        "--hub-token",
        "(masked)",
        "--api_key=(masked)",
        "wandb.password=(masked)",
        "--user",
        "me",
    )
    assert "pass" not in masked("https://me:pass@host/x")


def test_what_only_sounds_like_a_secret_stays() -> None:
    words = ("batch.tokens=8192", "--tokenizer", "qwen", "--max-tokens", "5", "optim.lr=1e-5")
    assert shown_arguments(words) == words


def test_only_listed_variables_are_shown() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "RANK": "1"}
    assert shown_variables(environ) == {"CUDA_VISIBLE_DEVICES": "0", "RANK": "1"}


GUARD = Path(str(tickets.__file__)).parent
IN_RANKS = [GUARD / f"{name}.py" for name in ("ticket", "reader", "shown", "outcome", "attestation")]
IN_RANKS += [GUARD.parent / "launch" / f"{name}.py" for name in ("supervisor", "outcome", "processes", "__init__")]


@pytest.mark.parametrize("path", IN_RANKS, ids=lambda path: path.stem)
def test_it_runs_in_any_training_interpreter(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    roots = {module.partition(".")[0] for module in imported} - {"__future__"}
    assert roots - {"kernelguard"} <= set(sys.stdlib_module_names)
    own = {m for m in imported if m.startswith("kernelguard")}
    ours = {f"kernelguard.guard.{name}" for name in ("ticket", "reader", "shown", "outcome")}
    assert own <= {"kernelguard.guard", *ours, "kernelguard.launch", "kernelguard.launch.outcome"}
