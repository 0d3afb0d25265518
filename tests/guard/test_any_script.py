"""Any training script: unchanged behind the wrapper, with two lines, or with a callback. Trainer, TRL, a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import group
import packages
import pytest
import scripts

import kernelguard.guard
from kernelguard.guard import ticket as tickets
from kernelguard.guard.attestation import NAME
from observed import Interpreter

FOLDER = Path(kernelguard.guard.__file__).parent
MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"
REQUEST: dict[str, Any] = {
    **group.REQUEST,
    "modules": [MODELING],
    "sites": [{**site, "module": MODELING, "owner": "Qwen3_5GatedDeltaNet"} for site in group.REQUEST["sites"]],
}


def trl_interpreter(folder: Path, files: dict[str, str]) -> Interpreter:
    env = group.make_interpreter(folder, "5.24.0", files)
    (env.site / "trl.pth").write_text(f"{scripts.trl_base().site}\n")
    return env


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return trl_interpreter(tmp_path_factory.mktemp("trl") / "env", packages.working())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return trl_interpreter(tmp_path_factory.mktemp("bare") / "env", {})


@pytest.fixture(scope="module")
def base(env: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> tickets.Ticket:
    return group.make_ticket(env, tmp_path_factory.mktemp("base"), bindings=REQUEST)


def run(
    env: Interpreter, folder: Path, script: str, *arguments: str, wrapped: bool, ticket: tickets.Ticket | None = None
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if ticket is not None:
        (folder / "ticket.json").write_text(tickets.dumps(ticket))
        variables[tickets.VARIABLE] = str(folder / "ticket.json")
    guard = ["-m", "kernelguard.guard", "--"] if wrapped else []
    return subprocess.run(
        [str(env.python), *guard, "train.py", *arguments],
        cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.observed
def test_a_plain_loop_behind_the_wrapper(env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    ticket = replace(base, run_dir=str(tmp_path / "run"))
    done = run(env, tmp_path, scripts.PLAIN, wrapped=True, ticket=ticket)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 3\n"
    assert "after step 1 the model is as it was admitted (causal_conv1d_fn: package" in done.stderr
    # What really ran is written where the launcher looks for it.
    told = json.loads((tmp_path / "run/ranks/0.training.json").read_text())
    assert told["findings"] == []
    document = json.loads((tmp_path / "run" / NAME).read_text())
    assert document["stage"] == "step 1"
    # Still known when the attestation is written anew.
    assert document["preflight_seconds"]["total"] > 0
    assert document["bound"]["causal_conv1d_fn in modeling_qwen3_5"] == "package causal_conv1d.causal_conv1d_fn"
    assert document["fields"]["version of fla-core"] == "0.6.0"


@pytest.mark.observed
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "arguments", "wrapped"),
    [
        (scripts.TWO_LINES, (), False),
        (scripts.SFT, (), True),
        # This TRL sends every signal with its packed batches.
        (scripts.SFT, ("--packed", "--callback"), False),
    ],
    ids=["two-lines", "sft-wrapped", "sft-callback-packed"],
)
def test_a_script_trains_on(
    script: str, arguments: tuple[str, ...], wrapped: bool, env: Interpreter, tmp_path: Path
) -> None:
    done = run(env, tmp_path, script, *arguments, wrapped=wrapped)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained" in done.stdout
    assert "after step 1 nothing is wrong with the model (causal_conv1d_fn: package" in done.stderr


@pytest.mark.observed
@pytest.mark.thorough
def test_a_trainer_without_the_kernels_does_not_train(bare: Interpreter, tmp_path: Path) -> None:
    done = run(bare, tmp_path, scripts.TRAINER, wrapped=True)
    assert done.returncode == 78, done.stderr[-3000:]
    assert "trained" not in done.stdout
    assert "causal_conv1d_fn runs its PyTorch fallback" in done.stderr


@pytest.mark.observed
@pytest.mark.thorough
def test_trl_with_a_collator_that_sends_positions_only(env: Interpreter, tmp_path: Path) -> None:
    """As TRL's own did until it learned of recurrent layers: attention keeps samples apart, they do not."""
    script = scripts.SFT.replace(
        "trainer.train()\n",
        "inner = trainer.data_collator\n"
        "def positions_only(rows):\n"
        "    batch = inner(rows)\n"
        "    return {n: v for n, v in batch.items() if n in ('input_ids', 'labels', 'position_ids')}\n"
        "trainer.data_collator = positions_only\n"
        "trainer.train()\n",
    )
    done = run(env, tmp_path, script, "--packed", "--callback", wrapped=False)
    assert done.returncode == 78, done.stderr[-3000:]
    assert "the recurrent layers are not given seq_idx and cu_seq_lens_q" in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.observed
@pytest.mark.thorough
def test_the_attestation_lies_beside_checkpoints_and_is_compared(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    ticket = replace(base, run_dir=str(tmp_path / "run"))
    first = run(env, tmp_path, scripts.TRAINER, "--callback", wrapped=True, ticket=ticket)
    assert first.returncode == 0, first.stderr[-3000:]
    place = tmp_path / "out" / "checkpoint-1" / NAME
    document = json.loads(place.read_text())
    assert document["stage"] == "step 1"
    # Of the guard nothing is left in the model or the optimizers.
    assert "trained 2\nleft 0\n" in first.stdout
    # The same machine with another fla, as it was when the checkpoint was written.
    document["fields"]["version of fla-core"] = "0.5.1"
    place.write_text(json.dumps(document))
    again = run(env, tmp_path, scripts.TRAINER, "--callback", "--resume", wrapped=True, ticket=ticket)
    assert again.returncode == 0, again.stderr[-3000:]
    said = "CHANGED: version of fla-core: 0.5.1 when the checkpoint was written, 0.6.0 now"
    assert said in again.stderr
    assert again.stderr.index(said) < again.stderr.index("after step 1")


@pytest.mark.observed
@pytest.mark.thorough
def test_one_rank_builds_its_model_with_another_attention(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    """Public failure G01: no rank is wrong by itself, and nothing that is installed differs."""
    script = scripts.PLAIN.replace(
        "model.train()\n",
        "import os\nif os.environ['RANK'] == '1':\n    model.set_attn_implementation('eager')\nmodel.train()\n",
    )
    ticket = replace(base, run_dir=str(tmp_path / "run"))
    ended = group.run_group(env, ticket, tmp_path, script=script)
    # Whichever comes second sees both.
    assert 78 in ended.codes.values(), ended.err
    assert ended.outcome["phase"] == "training"
    place = "attn_implementation of Qwen3_5ForCausalLM"
    said = (f"rank 1 has {place} eager, rank 0 has sdpa", f"rank 0 has {place} sdpa, rank 1 has eager")
    assert any(words in ended.outcome["summary"] for words in said)


def test_the_wrapper_says_how_it_is_used(tmp_path: Path) -> None:
    for arguments in ([], ["--"], ["--", "-m"], ["--", "--oops"]):
        done = subprocess.run(
            [sys.executable, "-m", "kernelguard.guard", *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.startswith("usage: python -m kernelguard.guard")) == (2, True)
    argv = [sys.executable, "-m", "kernelguard.guard", "--", "gone.py"]
    gone = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (gone.returncode, gone.stderr) == (2, "kernelguard: there is no script gone.py\n")


def test_a_script_knows_where_it_lies(tmp_path: Path) -> None:
    """Also after it went elsewhere: `__file__` is absolute, as Python makes it."""
    (tmp_path / "train.py").write_text("import os, sys\nos.chdir('/')\nprint(__file__, sys.path[0], sys.argv[1:])\n")
    become = "import sys; from kernelguard.guard.__main__ import _become; _become(sys.argv[1:])"
    behind, plain = (
        subprocess.run(
            [sys.executable, *first, "train.py", "a b"], capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout
        for first in (["-c", become], [])
    )
    assert behind == plain == f"{tmp_path}/train.py {tmp_path} ['a b']\n"


# What of the guard's own folder runs in kernelguard's interpreter, where jobs are admitted.
OUTSIDE = {"admission.py", "question.py"}
INSIDE = [file for file in sorted(FOLDER.glob("*.py")) if file.name not in OUTSIDE]


SUPERVISOR = [FOLDER.parent / "launch" / f"{name}.py" for name in ("supervisor", "outcome", "processes")]


def test_what_runs_in_a_rank_needs_no_newer_python_than_3_9() -> None:
    """In images it runs with whatever Python trains: neither syntax nor anything of the standard library is newer."""
    files = [*INSIDE, *sorted((FOLDER.parent / "workers").rglob("*.py")), *SUPERVISOR]
    argv = [str(Path(sys.executable).with_name("vermin")), "--target=3.9-", "--eval-annotations", "--no-tips"]
    done = subprocess.run([*argv, "--violations", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # `X | None` in an annotation is no syntax of 3.9's, unless it is never evaluated.
    assert [
        f.name for f in files if " | " in f.read_text() and "from __future__ import annotations" not in f.read_text()
    ] == []


def test_the_guard_brings_nothing_that_an_image_need_not_have(tmp_path: Path) -> None:
    """Each module is imported where nothing but the standard library is installed."""
    skipped = OUTSIDE | {"__main__.py", "__init__.py", "station.py", "trainer.py"}
    names = [f.stem for f in sorted(FOLDER.glob("*.py")) if f.name not in skipped]
    foreign = {"torch", "typer", "rich", "packaging", "jsonschema", "yaml", "transformers"}
    code = f"import importlib, sys\nsys.path.insert(0, {str(group.SRC)!r})\n"
    code += f"for name in {names!r}:\n    importlib.import_module('kernelguard.guard.' + name)\n"
    code += f"print(sorted(n for n in sys.modules if n.partition('.')[0] in {foreign!r}))\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
