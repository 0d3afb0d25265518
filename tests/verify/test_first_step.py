"""The trainer's first step, made ahead by `verify --warm-cache`: what it is asked, and what becomes of its failures."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import configs
import observed
from command import ROOT
from kernelguard.declare.values import Intent
from kernelguard.judge.values import Level, Status
from kernelguard.verify.cache import cache_variables, is_filled
from kernelguard.verify.files import from_document, to_document
from kernelguard.verify.findings import findings
from kernelguard.verify.first_step import FirstStep, compile_first_step
from kernelguard.verify.run import _Run
from kernelguard.verify.values import Fingerprint, Outcome, ProbeResult, Verdict

PRINTS = Fingerprint(gpu="NVIDIA H200", triton="3.7.1", shapes="a" * 64)
TOML = "[model]\ncompute_dtype = 'float32'\n[data]\npath = 'nowhere'\n[batch]\nwindow = 8\n[train]\ndevice = 'cpu'\n"


def a_trainer(folder: Path, body: str) -> dict[str, str]:
    """A package of the trainer's name that does this instead; the variables with which Python finds it."""
    package = folder / "site" / "kernelguard_train"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(f"import json, os, sys\n{body}\n")
    return {**os.environ, "PYTHONPATH": str(package.parent), **cache_variables(folder / "cache")}


def configured(folder: Path, model: str = "org/model") -> FirstStep:
    (folder / "train.toml").write_text(TOML)
    return FirstStep(config=folder / "train.toml", model=model)


def test_it_is_the_verified_model_at_the_verified_length(tmp_path: Path) -> None:
    environ = a_trainer(tmp_path, f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'said')!r}, 'w'))")
    run = configured(tmp_path, 'models/a "b"=1')
    assert not compile_first_step(sys.executable, run, packed=True, length=4096, timeout=60, environ=environ)
    words, seen = json.loads((tmp_path / "said").read_text())
    assert words == [str(run.config), 'model.path="models/a \\"b\\"=1"', "batch.tokens=4096", "--warm-up"]
    assert seen["TRITON_CACHE_DIR"] == str(tmp_path / "cache")
    assert not compile_first_step(sys.executable, run, packed=False, length=4096, timeout=60, environ=environ)
    assert "batch.tokens=4096" not in json.loads((tmp_path / "said").read_text())[0], "rows that are no packs"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "sys.exit('noise\\nerror: the configuration is unusable:\\n  - batch.tokens = 250; expected more')",
            "it ended with exit code 1: the configuration is unusable: - batch.tokens = 250; expected more",
        ),
        ("raise RuntimeError('CUDA out of memory')", "it ended with exit code 1: RuntimeError: CUDA out of memory"),
        (
            "print('[rank0]:[W] destroy_process_group() was not called', file=sys.stderr); raise ValueError('no')",
            "it ended with exit code 1: ValueError: no",
        ),
        (
            "import atexit; atexit.register(print, '[W] no destroy_process_group()'); raise ValueError('no')",
            "it ended with exit code 1: ValueError: no",
        ),
        ("os.kill(os.getpid(), 11)", "it was killed by SIGSEGV"),
        ("import time; time.sleep(60)", "it did not end within 1 s"),
    ],
    ids=["refused", "raised", "warned-before", "warned-after", "crashed", "hung"],
)
def test_every_failure_is_told_in_the_trainers_own_words(tmp_path: Path, body: str, said: str) -> None:
    environ = a_trainer(tmp_path, body)
    run = configured(tmp_path)
    limit = 1.0 if "within" in said else 60.0
    assert compile_first_step(sys.executable, run, packed=True, length=512, timeout=limit, environ=environ) == said


def test_an_interpreter_without_the_trainer_says_so(tmp_path: Path) -> None:
    run, environ = configured(tmp_path), {"PATH": os.environ["PATH"]}
    bare = str(observed.make_venv(tmp_path / "bare").python)
    told = compile_first_step(bare, run, packed=True, length=512, timeout=60, environ=environ)
    assert "No module named kernelguard_train" in told
    gone = compile_first_step("/no/python", run, packed=True, length=512, timeout=60, environ=environ)
    assert gone == "/no/python cannot be executed: No such file or directory"


@pytest.mark.observed
def test_the_real_trainer_takes_its_first_steps(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    configs.write(tmp_path / "model", {**configs.LLAMA, "num_hidden_layers": 3})
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "train"), **cache_variables(tmp_path / "cache")}
    python = str(observed.transformers_base("5.24.0").python)
    run = configured(tmp_path, str(tmp_path / "model"))
    assert not compile_first_step(python, run, packed=True, length=256, timeout=120, environ=environ)
    refused = compile_first_step(python, run, packed=True, length=250, timeout=120, environ=environ)
    assert refused.startswith("it ended with exit code 2: the configuration is unusable: - batch.tokens = 250")


def warming(environ: dict[str, str], **changes: Any) -> _Run:
    blank: Any = None
    run = _Run(
        python=sys.executable, declaration=blank, intent=Intent(packed=True), level=Level.GPU, length=512,
        environ=environ, end=time.monotonic() + 60.0, isolates=True, records=True, shards=1, compiled=None,
        earlier=None, prints=PRINTS, progress=lambda _: None,
    )  # fmt: skip
    return replace(run, **changes)


RIGHT = ProbeResult(symbol="f", package="p", op="o", outcome=Outcome.RIGHT, reason="", dtype="bfloat16")


def test_a_folder_is_filled_once(tmp_path: Path) -> None:
    environ = a_trainer(tmp_path, f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    run, cache = configured(tmp_path), tmp_path / "cache"
    cache.mkdir()
    (cache / "torch-compile-a.bin").touch()
    for _ in range(2):
        assert warming(environ).warmed(cache, [RIGHT], run) == ()
    assert is_filled(cache, PRINTS, first_step=run.digest(512))
    assert (tmp_path / "count").read_text() == "x"
    run.config.write_text(TOML.replace("8", "16"))
    assert warming(environ).warmed(cache, [RIGHT], run) == ()
    assert warming(environ, length=1024).warmed(cache, [RIGHT], run) == ()
    assert (tmp_path / "count").read_text() == "xxx", "another configuration, another length"
    (cache / "torch-compile-a.bin").unlink()
    assert warming(environ, length=1024).warmed(cache, [RIGHT], run) == ()
    assert (tmp_path / "count").read_text() == "xxxx", "a copy without what torch.compile made"


def test_what_the_folder_lacks_is_a_warning_and_no_doubt_about_kernels(tmp_path: Path) -> None:
    environ = a_trainer(tmp_path, "sys.exit('error: no room')")
    run, cache = configured(tmp_path), tmp_path / "cache"
    cache.mkdir()
    (problem,) = warming(environ).warmed(cache, [RIGHT], run)
    assert problem == f"what the trainer's first step compiles is not in {cache}: it ended with exit code 1: no room"
    assert is_filled(cache, PRINTS)
    assert not is_filled(cache, PRINTS, first_step=run.digest(512))
    verdict = Verdict(level=Level.GPU, fingerprint=PRINTS, probes=(RIGHT,), cache_problems=(problem,))
    assert from_document(to_document(verdict), source="here").cache_problems == (problem,)
    found = {finding.code: finding for finding in findings(verdict)}
    assert (found["cache-incomplete"].status, found["cache-incomplete"].reason) == (Status.WARN, problem)


def test_below_the_gpu_level_and_without_a_trainer_nothing_is_started(tmp_path: Path) -> None:
    environ = a_trainer(tmp_path, f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    run, cache = configured(tmp_path), tmp_path / "cache"
    cache.mkdir()
    assert warming(environ, level=Level.INTERPRETED).warmed(cache, [RIGHT], run) == ()
    assert warming(environ).warmed(cache, [RIGHT], None) == ()
    (problem,) = warming(environ, prints=replace(PRINTS, gpu="")).warmed(cache, [RIGHT], run)
    assert problem.endswith("there is no GPU here, and its kernels are compiled for one")
    assert not (tmp_path / "count").exists()
    run.config.unlink()
    (problem,) = warming(environ).warmed(cache, [RIGHT], run)
    assert "train.toml cannot be read: No such file or directory" in problem


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = warming({}).warmed(tmp_path / "file" / "x", [RIGHT], None)
    assert "no note of it could be left there" in problem
    untold = replace(RIGHT, outcome=Outcome.HUNG)
    assert warming({}).warmed(tmp_path / "file" / "x", [untold], None) == (), "it was not filled"
