"""From lock, verdict and model to what is submitted: the whole walk, for an image on engines that are elsewhere."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import launch_world
import pytest
import yaml

from command import Command
from kernelguard import data
from kernelguard.check import transformers_tree
from kernelguard.declare.config import read_config
from kernelguard.declare.declaration import declare
from kernelguard.declare.values import Intent
from kernelguard.guard.question import Overrides
from kernelguard.guard.ticket import to_document as ticket_document
from kernelguard.judge.values import Level, Status
from kernelguard.launch.tickets import _kernels
from kernelguard.launching import Launch, Request, intent_flags, run_launch
from kernelguard.lock.document import dumps
from kernelguard.lock.parts import locked_intent, locked_model
from kernelguard.lock.values import LockedPath, Role
from kernelguard.trace import load_names
from kernelguard.verify.files import to_document
from kernelguard.verify.fingerprint import shapes_digest
from kernelguard.verify.plan import plan
from kernelguard.verify.values import (
    CaseResult,
    Configuration,
    Fingerprint,
    Outcome,
    ProbeResult,
    SignalCheck,
    Subject,
    UsedPath,
    Verdict,
)
from observed import transformers_base
from samples import hopper, pin, sample_lock

VERSION = launch_world.VERSION
IMAGE = "registry/train@sha256:" + "a" * 64
SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")
# Where no engine is, the Docker SDK leaves the socket that it tried.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
SECRET = "hf_abcdefghijklmnopqrstuvwxyz012345"


@pytest.fixture(autouse=True)
def _sockets_go_here() -> Iterator[None]:
    """What the Docker SDK leaves is told of by whichever test is running when it is collected: by none but these."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def tree() -> Path:
    return transformers_base(VERSION).site / "transformers"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    """A folder with a model, a lock for an H200 and a verdict that fits both."""
    folder = tmp_path_factory.mktemp("launch")
    config = folder / "config.json"
    config.write_text(json.dumps(launch_world.TINY))
    intent = Intent(packed=True, signals=SIGNALS)
    declaration = declare(read_config(str(config)), transformers_tree(str(tree), {}))
    requests = plan(declaration, intent)

    lock = sample_lock(
        model=locked_model(declaration.config),
        intent=tuple(sorted(locked_intent(intent))),
        transformers=VERSION,
        target=hopper("h200"),
        fast_paths=(LockedPath(symbol="chunk_gated_delta_rule", package="fla", served_by="fla-core 0.6.0", layers=1),),
        pins=tuple(
            pin(name, version, role, files_sha256="c" * 64)
            for name, version, role in (
                ("fla-core", "0.6.0", Role.KERNEL),
                ("causal-conv1d", "1.7.0", Role.KERNEL),
                ("torch", "2.13.0", Role.TORCH),
                ("triton", "3.7.1", Role.TORCH),
                ("transformers", VERSION, Role.DEPENDENCY),
            )
        ),
    )
    configurations = tuple(
        Configuration(kernel=kernel, key="1", config=str(row), state=state)
        for kernel, states in (("a", ("refused", "right", "right")), ("b", ("right", "error", "right")))
        for row, state in enumerate(states)
    )
    verdict = Verdict(
        level=Level.GPU,
        fingerprint=Fingerprint(
            gpu="NVIDIA H200",
            capability=(9, 0),
            driver="580.95.05",
            torch="2.13.0+cu130",
            cuda="13.0",
            triton="3.7.1",
            transformers=VERSION,
            python="3.12.3",
            machine="x86_64",
            distributions={"fla-core": "0.6.0", "causal-conv1d": "1.7.0", "triton": "3.7.1"},
            binaries={"causal_conv1d_cuda.so": "d" * 64, "causal_conv1d/x.so": "e" * 64},
            model_type="qwen3_5_text",
            shapes=shapes_digest(requests),
        ),
        probes=tuple(
            ProbeResult(
                symbol=r.symbol,
                package=r.package,
                op=r.op,
                outcome=Outcome.RIGHT,
                dtype=r.dtype,
                cases=tuple(
                    CaseResult(name=c.name, lengths=c.lengths, shape=c.shape, outcome=Outcome.RIGHT) for c in r.cases
                ),
                forward_kernels=("seen_in_the_trace",) if r.package == "fla" else (),
                configurations=configurations if r.package == "fla" else (),
            )
            for r in requests
        ),
        subject=Subject(
            source=str(config), model_type="qwen3_5_text", config_sha256=locked_model(declaration.config).sha256
        ),
        fast_paths=(
            UsedPath(
                symbol="chunk_gated_delta_rule",
                package="fla",
                module="fla.ops.gated_delta_rule",
                mechanism="package",
                training=True,
                called_in="transformers.models.qwen3_5.modeling_qwen3_5",
                bound_to="kernel",
                target="fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",
            ),
        ),
        isolation=(SignalCheck(signals=SIGNALS, isolated=True),),
        signals=SIGNALS,
    )
    # A row in which one kernel cannot run here is no wrong kernel; a wrong one would be.
    good = tuple(replace(c, state="refused") if c.state == "error" else c for c in configurations)
    probes = tuple(replace(p, configurations=good if p.configurations else ()) for p in verdict.probes)
    (folder / "kernelguard.lock").write_text(dumps(lock))
    (folder / "kernelguard.verdict.json").write_text(json.dumps(to_document(replace(verdict, probes=probes))))
    return folder


def walk(made: Path, tree: Path, **changes: Any) -> Launch:
    request = Request(
        lock=made / "kernelguard.lock",
        script=("train.py", "--x", "a b"),
        image=IMAGE,
        engine="kubeflow",
        transformers=str(tree),
        nodes=2,
        processes=8,
        name="job",
        run_dir=made / "run",
    )
    return run_launch(replace(request, **changes), {"HF_TOKEN": SECRET}, lambda _: None)


def test_what_fits_is_submitted(made: Path, tree: Path) -> None:
    found = walk(made, tree)
    assert found.admission.admitted, found.admission.refusals
    assert found.submission is not None
    objects = {o["kind"]: o for o in yaml.safe_load_all(found.submission.files[0][1])}
    assert objects["TrainJob"]["spec"]["trainer"]["image"] == IMAGE
    assert "'a b'" in objects["TrainJob"]["spec"]["trainer"]["command"][2]
    assert json.loads(objects["ConfigMap"]["data"]["ticket.json"]) == ticket_document(found.ticket)  # type: ignore[arg-type]


def test_the_ticket_tells_ranks_what_was_verified(made: Path, tree: Path) -> None:
    ticket = walk(made, tree).ticket
    assert ticket is not None
    document = ticket_document(ticket)
    jsonschema.validate(document, json.loads(data.schema("ticket").read_text()))
    expected = document["expected"]
    assert expected["capability"] == [9, 0]
    assert expected["driver"] == "580.95.05"
    assert expected["driver_floor"] == "580"
    assert expected["distributions"]["causal-conv1d"] == {
        "version": "1.7.0",
        "record_sha256": "c" * 64,
        "binaries": {"causal_conv1d/x.so": "e" * 64},
    }
    symbols = {path["symbol"]: path for path in document["fast_paths"]}
    assert {"causal_conv1d_fn", "chunk_gated_delta_rule"} <= set(symbols)
    assert symbols["chunk_gated_delta_rule"]["module"] == "transformers.models.qwen3_5.modeling_qwen3_5"
    assert "chunk_fwd_kernel_o" in document["kernels"]["chunk_gated_delta_rule"]
    assert "seen_in_the_trace" in document["kernels"]["chunk_gated_delta_rule"]
    assert symbols["chunk_gated_delta_rule"]["bound_to"] == "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"
    assert document["fallbacks"]["chunk_gated_delta_rule"] == ["aten::linalg_solve_triangular"]
    assert document["packed"] is True
    assert document["signals"] == list(SIGNALS)
    assert document["level"] == "gpu"
    assert document["device"] == "cuda"


def test_probes_of_a_rank_are_short_and_tune_nothing(made: Path, tree: Path) -> None:
    ticket = walk(made, tree).ticket
    assert ticket is not None
    probes = {p["symbol"]: p for p in ticket.probes}
    (case,) = probes["chunk_gated_delta_rule"]["cases"]
    assert case["force"] is False
    assert case["repeats"] == 1
    assert case["name"] == "ragged"
    # Row 0 cannot run for one kernel, row 1 for the other.
    assert case["pin"] == 2
    assert "device" not in probes["chunk_gated_delta_rule"]
    (only,) = (ticket.isolation or {})["checks"]
    assert only == {"signals": list(SIGNALS), "parameters": False}
    assert ticket.bindings is not None
    assert ticket.bindings["config"] is None, "a rank does not build the model to be looked at"


def test_a_warm_cache_is_told_and_shortens_the_wait(made: Path, tree: Path) -> None:
    cold, warm = walk(made, tree).ticket, walk(made, tree, warm_cache=made / "cache").ticket
    assert cold is not None
    assert warm is not None
    assert "TRITON_CACHE_DIR" not in cold.variables
    assert warm.variables["TRITON_CACHE_DIR"] == str(made / "cache")
    assert warm.deadlines.probe_s < cold.deadlines.probe_s
    pins = [p["cases"][0]["pin"] for p in warm.probes if p["package"] == "fla"]
    assert set(pins) == {None}, "what was tuned is what the training will run"
    asked = walk(made, tree, probe_s=30.0, rendezvous_s=20.0).ticket
    assert asked is not None
    assert (asked.deadlines.probe_s, asked.deadlines.rendezvous_s) == (30.0, 20.0)


def test_overrides_stand_in_the_ticket(made: Path, tree: Path) -> None:
    ticket = walk(made, tree, overrides=Overrides(accept_older_driver=True)).ticket
    assert ticket is not None
    assert ticket.admission.overrides == ("accept-older-driver-branch",)
    assert ticket.admission.reasons


def test_what_is_asked_of_the_lock_is_what_it_says(made: Path) -> None:
    from kernelguard.lock import load_lock

    flags = intent_flags(load_lock(made / "kernelguard.lock"))
    assert flags["packed"] is True
    assert flags["signals"] == SIGNALS
    assert flags["use_kernels"] is False
    assert flags["dtype"] == "bfloat16"


def test_another_model_is_refused(made: Path, tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text(json.dumps({**launch_world.TINY, "linear_num_value_heads": 4}))
    found = walk(made, tree, model=str(other))
    assert not found.admission.admitted
    assert {f.code for f in found.admission.refusals} >= {"launch-model-changed", "launch-other-shapes"}
    assert found.submission is None


def test_no_configuration_is_unknown(made: Path, tree: Path) -> None:
    found = walk(made, tree, model=str(made / "none.json"))
    assert found.admission.status is Status.UNKNOWN
    assert [f.code for f in found.admission.refusals] == ["launch-model"]


def command(made: Path, tree: Path, *arguments: str, env: dict[str, str] | None = None) -> Command:
    fixed = [
        "launch",
        str(made / "kernelguard.lock"),
        "--on",
        "kubeflow",
        "--image",
        IMAGE,
        "--transformers",
        str(tree),
    ]
    return Command(*fixed, "--processes", "8", "--run-dir", str(made / "run"), *arguments, env=env, cwd=made)


def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(made: Path, tree: Path) -> None:
    done = command(made, tree, "--dry-run", "--json", "--", "train.py", "--hub-token", "x", env={"HF_TOKEN": SECRET})
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["admitted"] is True
    assert document["command"][:3] == ["kubectl", "apply", "-f"]
    objects = list(yaml.safe_load_all(document["files"]["trainjob.yaml"]))
    assert [o["kind"] for o in objects] == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    assert not (made / "run").exists()
    assert SECRET not in done.out + done.err
    text = command(made, tree, "--dry-run", "--", "train.py").out
    assert objects[0]["binaryData"]["site.zip"] in text
    assert text.splitlines()[-1].startswith("kubectl apply -f")


def test_a_refusal_says_why_and_starts_nothing(made: Path, tree: Path) -> None:
    done = command(made, tree, "--verdict", str(made / "other.json"), "--", "train.py")
    assert done.code == 2
    assert "other.json" in done.err
    lock = made / "edited.lock"
    lock.write_text((made / "kernelguard.lock").read_text().replace("0.6.0", "0.6.1"))
    edited = Command("launch", str(lock), "--", "train.py")
    assert edited.code == 2
    assert "was changed after it was written" in edited.err
    lock.write_text((made / "kernelguard.lock").read_text())
    without = Command(
        "launch",
        str(lock),
        "--on",
        "kubeflow",
        "--image",
        IMAGE,
        "--transformers",
        str(tree),
        "--",
        "train.py",
        cwd=made,
    )
    assert without.code == 3
    assert "launch-no-verdict" in without.out
    assert "kernelguard verify" in without.out
    assert not (made / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on", "ray"), "ray is no engine"),
        (("--on", "kubeflow"), "runs in an image"),
        (("--image", IMAGE), "not in an image"),
        (("-o", "partition"), "no KEY=VALUE"),
        (("--nodes", "0"), "counted from 1"),
        (("--max-restarts", "-2"), "--max-restarts is -2"),
        (("--stop-within", "nan"), "--stop-within is nan"),
        (("--collectives", "nan"), "--collectives is nan"),
        (("--collectives", "90000"), "--collectives is 90000"),
        (("--stop-within=-5",), "--stop-within is -5"),
    ],
)
def test_unusable_arguments(made: Path, arguments: tuple[str, ...], words: str) -> None:
    done = Command("launch", str(made / "kernelguard.lock"), *arguments, "--", "train.py")
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_kernel_that_fla_hands_over_to_is_one_of_the_fast_paths_own() -> None:
    """Otherwise a rank on which FlashQLA does the work would be told that its fast path did not run."""
    rows = [row for row in load_names() if row.symbol == "chunk_gated_delta_rule"]
    admitted: Any = SimpleNamespace(verdict=SimpleNamespace(probes=()), requests=())
    found = _kernels(admitted, rows, {("fla", "chunk_gated_delta_rule")})["chunk_gated_delta_rule"]
    assert {"chunk_fwd_kernel_o", "tilelang_fused_chunk_gdr_fwd_kernel_kernel"} <= set(found)


@pytest.mark.parametrize("measured", [True, False])
def test_a_kernel_of_the_trainers_own_counts_for_the_one_it_stands_for_if_it_was_measured(*, measured: bool) -> None:
    """The bundled trainer's convolution runs in place of causal_conv1d_fn: step 1 has to show one or the other."""
    models: Any = SimpleNamespace(
        package="causal_conv1d",
        symbol="causal_conv1d_fn",
        forward_kernels=("causal_conv1d_fwd<>",),
        backward_kernels=(),
    )
    own: Any = SimpleNamespace(
        package="kernelguard_train", symbol="packed_convolution", forward_kernels=("_convolve",),
        backward_kernels=("_convolve_back",),
    )  # fmt: skip
    requests = (
        SimpleNamespace(package="causal_conv1d", symbol="causal_conv1d_fn", stands_for=""),
        SimpleNamespace(package="kernelguard_train", symbol="packed_convolution", stands_for="causal_conv1d_fn"),
    )
    probes = (models, own) if measured else (models,)
    admitted: Any = SimpleNamespace(verdict=SimpleNamespace(probes=probes), requests=requests)
    found = _kernels(admitted, [], {("causal_conv1d", "causal_conv1d_fn")})
    more = ("_convolve", "_convolve_back") if measured else ()
    assert found == {"causal_conv1d_fn": ("causal_conv1d_fwd<>", *more)}
