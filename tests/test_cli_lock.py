"""`kernelguard lock` and `sync` as real processes: bad input, and a real lock held against a real environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import configs
from command import ROOT, Command
from observed import make_venv, transformers_base
from test_cli import refused

MODEL = ROOT / "examples" / "qwen3.8-27b"


@pytest.fixture(scope="module")
def tree() -> Path:
    return transformers_base("5.24.0").site / "transformers"


@pytest.mark.observed
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--target"),
        (["--target", "h101"], "h100"),
        (["--target", "h100,torch=2.12.1,cuda=11.8"], "11.8"),
        (["--target", "h100", "--find-links", "/no/such/folder"], "/no/such/folder"),
    ],
    ids=["no-target", "unknown-gpu", "contradiction", "no-folder"],
)
@pytest.mark.online
def test_unusable_requests(tmp_path: Path, tree: Path, arguments: list[str], said: str) -> None:
    command = Command("lock", MODEL, "--transformers", tree, *arguments, cwd=tmp_path)
    refused(command, 2, said)
    assert list(tmp_path.iterdir()) == []


def test_no_model() -> None:
    refused(Command("lock"), 2, "model")


@pytest.mark.parametrize(("text", "said"), [("nonsense = [", "lock"), ("schema = 99\n", "99"), ("", "schema")])
def test_unusable_locks(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "kernelguard.lock"
    path.write_text(text)
    env = make_venv(tmp_path / "env")
    refused(Command("lock", "--check", path, "--python", env.python), 2, said)
    refused(Command("sync", path, "--python", env.python), 2, said)


@pytest.mark.observed
@pytest.mark.online
@pytest.mark.thorough
def test_a_cpu_lock_is_written_edited_and_refused_and_an_empty_environment_is_not_it(
    tmp_path: Path, tree: Path
) -> None:
    model = configs.write(tmp_path / "model", configs.LLAMA)
    target = "cpu,torch=2.13.0,python=3.11"
    made = Command("lock", model, "--transformers", tree, "--target", target, cwd=tmp_path)
    assert made.code == 0, made.err
    assert {"kernelguard.lock", "requirements.txt", "pylock.toml"} <= {p.name for p in tmp_path.iterdir()}
    assert "--hash=sha256:" in (tmp_path / "requirements.txt").read_text()
    env = make_venv(tmp_path / "env")
    against = Command("lock", "--check", tmp_path / "kernelguard.lock", "--python", env.python)
    assert against.code == 1, against.err
    assert "torch" in against.out
    lock = tmp_path / "kernelguard.lock"
    lock.write_text(lock.read_text().replace("2.13.0", "2.12.0"))
    refused(Command("lock", "--check", lock, "--python", env.python), 2, "digest")


@pytest.mark.observed
@pytest.mark.thorough
def test_survey_names_every_type_and_what_changed(tree: Path) -> None:
    command = Command("survey", "--transformers", tree, "--json")
    assert command.code == 0, command.err
    rows = {row["model_type"]: row for row in json.loads(command.out)["model_types"]}
    assert len(rows) > 800
    assert "chunk_gated_delta_rule" in rows["qwen3_5_text"]["training_symbols"]
    assert rows["llama"]["symbols"] == []
