"""What docs/how-to/check-in-ci.md offers: the action's steps, the hook and the init container, run for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from documents import blocks
from test_doc_commands import parse

import observed
from command import ROOT

sys.path.insert(0, str(ROOT / "tests" / "launch"))

import launch_world
from test_engines import unknown_keys

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
PAGE = ROOT / "docs" / "how-to" / "check-in-ci.md"
POD = ROOT / "examples" / "kubernetes" / "init-container.yaml"
EXPRESSION = re.compile(r"\$\{\{ *([a-z_]+)\.([A-Za-z_-]+) *\}\}")


def transformers() -> Path:
    return observed.transformers_base("5.24.0").site / "transformers"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository as another one would fetch it: what a build needs, and nothing of a developer's."""
    folder = tmp_path_factory.mktemp("fetched") / "kernelguard"
    folder.mkdir()
    for name in ("src", "matrices", "docker", "train", "examples"):
        leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE", "action.yml", ".pre-commit-hooks.yaml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small repository of somebody who trains: a configuration, and the lock that was made for it."""
    world = launch_world.base()
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    shutil.copy(world.config, folder / "model" / "config.json")
    shutil.copy(world.lock, folder / "kernelguard.lock")
    return folder


def widen(project: Path) -> None:
    """Another model than the lock was made for."""
    config = project / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 64}))


# The action


def action_schema() -> Any:
    built_in = pytest.importorskip("check_jsonschema.builtin_schemas", reason="pip install check-jsonschema")
    return json.loads((Path(built_in.__file__).parent / "vendor" / "github-actions.json").read_text())


def test_the_action_has_the_form_that_github_publishes() -> None:
    jsonschema.validate(ACTION, action_schema())
    without_shell = json.loads(json.dumps(ACTION))
    del without_shell["runs"]["steps"][0]["shell"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(without_shell, action_schema())


@dataclass
class Runner:
    """What GitHub's runner does with a composite action that has only `run` steps in bash."""

    checkout: Path
    folder: Path
    workspace: Path
    path: str
    out: str = ""
    summary: str = ""
    code: int = 0
    ran: list[str] = field(default_factory=list)

    def run(self, steps: list[dict[str, Any]], inputs: Mapping[str, str]) -> None:
        """Run steps in order until one fails."""
        unknown = inputs.keys() - ACTION["inputs"].keys()
        assert not unknown, unknown
        given = {
            name: str(inputs.get(name, declared.get("default", ""))) for name, declared in ACTION["inputs"].items()
        }
        contexts = {"inputs": given, "github": {"action_path": str(self.checkout)}}
        for step in steps:
            assert step["shell"] == "bash"
            assert step.keys() <= {"name", "shell", "env", "run"}, "this runner knows no more"
            assert not EXPRESSION.search(step["run"]), "what a user gives must not become part of a script"
            variables = {k: EXPRESSION.sub(lambda m: contexts[m[1]][m[2]], str(v)) for k, v in step["env"].items()}
            script, summary = self.folder / "step.sh", self.folder / "summary.md"
            script.write_text(step["run"])
            summary.touch()
            told = {"RUNNER_TEMP": self.folder, "GITHUB_STEP_SUMMARY": summary, "GITHUB_ACTION_PATH": self.checkout}
            told |= {"PATH": self.path, "HOME": self.folder, "CI": "true", "GITHUB_ACTIONS": "true"}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
                cwd=self.workspace,
                env={**outside(), **{k: str(v) for k, v in told.items()}, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self.ran.append(step["name"])
            self.out, self.code, self.summary = done.stdout, done.returncode, summary.read_text()
            if self.code:
                return


def outside() -> dict[str, str]:
    """How packages are reached from here; nothing else of this process."""
    return {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_")) or "proxy" in k.lower()}


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the action's first step has run: RUNNER_TEMP of a job whose python3 has nothing installed."""
    job = tmp_path_factory.mktemp("job")
    observed.make_venv(job / "python")
    (job / "python" / "bin" / "python3").symlink_to("python")
    (job / "temp").mkdir()
    runner = Runner(checkout, job / "temp", job, f"{job / 'python' / 'bin'}:/usr/bin:/bin")
    runner.run(ACTION["runs"]["steps"][:1], {"model": "model"})
    assert runner.code == 0, runner.out
    assert [p.name for p in (job / "python").glob("lib/python*/site-packages/*")] == [], "the job's own is left alone"
    return job


@pytest.mark.thorough
@pytest.mark.online
@pytest.mark.observed
def test_the_actions_steps_answer_for_a_model_and_its_lock(installed: Path, checkout: Path, project: Path) -> None:
    def asked(**inputs: str) -> Runner:
        (installed / "temp" / "summary.md").unlink(missing_ok=True)
        given = {k.replace("_", "-"): v for k, v in inputs.items()}
        runner = Runner(checkout, installed / "temp", project, f"{installed / 'python' / 'bin'}:/usr/bin:/bin")
        runner.run(ACTION["runs"]["steps"][1:], {"transformers": str(transformers()), **given})
        return runner

    good = asked(model="model", lock="kernelguard.lock", junit="check.xml")
    assert good.code == 0, good.out
    assert "PASS: qwen3_5_text, 2 fast paths (2 pass); level resolve; exit 0" in good.out
    assert good.summary == f"```text\n{good.out}```\n"
    assert (project / "check.xml").read_text().startswith("<?xml")

    unsaid = asked(model="model", target="h100")
    assert unsaid.code == 3, unsaid.out
    assert "exit 3" in unsaid.summary

    for hostile in ("$(touch pwned)", "--version", "model; touch pwned"):
        assert asked(model=hostile, lock="kernelguard.lock").code == 2
    assert not (project / "pwned").exists()
    assert asked(model="model", target="h101").code == 2

    widen(project)
    other = asked(model="model", lock="kernelguard.lock")
    assert other.code == 1, other.out
    assert "FAIL" in other.summary


# The hook


@dataclass
class Repository:
    """The project under git, with the hook of the fetched kernelguard."""

    folder: Path
    home: Path

    def git(self, *words: str) -> subprocess.CompletedProcess[str]:
        return _git(self.folder, self.home, *words)

    def commit(self, message: str) -> subprocess.CompletedProcess[str]:
        """Stage everything and commit, as a person would; the hook stands in the way or does not."""
        self.git("add", "-A")
        return self.git("commit", "-m", message)


def _git(folder: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **outside(),
        "HOME": str(home),
        "PRE_COMMIT_HOME": str(home / "pre-commit"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture
def repository(checkout: Path, project: Path, tmp_path: Path) -> Repository:
    home = tmp_path / "home"
    home.mkdir()
    if not (checkout / ".git").exists():
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "v0.1.0"], ["tag", "v0.1.0"]):
            assert _git(checkout, home, *words).returncode == 0
    (hook,) = [b.text for b in blocks(PAGE) if b.text.startswith("repos:")]
    shown = yaml.safe_load(hook)
    shown["repos"][0]["repo"] = str(checkout)
    shown["repos"][0]["hooks"][0]["args"][0] = "model"
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(shown))
    made = Repository(project, home)
    assert made.git("init", "-q").returncode == 0
    # What `pre-commit install` writes; it would name the interpreter of this test.
    made.git("config", "core.hooksPath", "hooks")
    (project / "hooks").mkdir()
    (project / "hooks" / "pre-commit").write_text("#!/bin/sh\nexec python -m pre_commit run\n")
    (project / "hooks" / "pre-commit").chmod(0o755)
    return made


@pytest.mark.thorough
@pytest.mark.online
@pytest.mark.observed
def test_the_hook_lets_a_model_with_its_lock_pass_and_stops_any_other(repository: Repository) -> None:
    pytest.importorskip("pre_commit", reason="pip install pre-commit")
    first = repository.commit("a model and its lock")
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"kernelguard check\.+Passed", first.stderr), first.stderr

    (repository.folder / "README.txt").write_text("nothing that decides anything")
    assert re.search(r"kernelguard check\.+\(no files to check\)Skipped", repository.commit("words").stderr)

    widen(repository.folder)
    stopped = repository.commit("a wider model, and the old lock")
    assert stopped.returncode == 1
    for words in ("kernelguard check", "Failed", "exit code: 1", "kernelguard lock model --target"):
        assert words in stopped.stderr, stopped.stderr
    assert "wider" not in repository.git("log", "--oneline").stdout


# Kubernetes


def test_the_pod_is_what_kubernetes_knows() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    pod = yaml.safe_load(POD.read_text())
    assert unknown_keys(models.IoK8sApiCoreV1Pod, pod) == []
    pod["spec"]["initContainers"][0]["arguments"] = ["x"]
    assert unknown_keys(models.IoK8sApiCoreV1Pod, pod) == [".spec.initContainers[0].arguments"]


def test_both_containers_of_the_pod_are_of_one_image_and_mount_what_they_read() -> None:
    spec = yaml.safe_load(POD.read_text())["spec"]
    first, job = spec["initContainers"][0], spec["containers"][0]
    assert first["image"] == job["image"]
    assert first["resources"] == job["resources"], "the kernels are looked up where a GPU is visible"
    volumes = {v["name"] for v in spec["volumes"]}
    mounted = [m["mountPath"] for m in first["volumeMounts"] if m["name"] in volumes]
    values = {v["name"]: v["value"] for v in first["env"]}
    for name in ("KERNELGUARD_MODEL", "KERNELGUARD_LOCK"):
        assert any(values[name].startswith(f"{place}/") for place in mounted), name
    assert spec["restartPolicy"] == "Never", "neither a no nor an unknown is worth a retry"


@pytest.mark.thorough
@pytest.mark.observed
def test_the_init_containers_command_says_yes_and_no(project: Path, tmp_path: Path) -> None:
    """Its own words, run with its own variables, whose values are those of this machine."""
    world = launch_world.base()
    container = yaml.safe_load(POD.read_text())["spec"]["initContainers"][0]
    here = {
        "KERNELGUARD": Path(sys.executable).parent / "kernelguard",
        "KERNELGUARD_LOCK": project / "kernelguard.lock",
        "KERNELGUARD_MODEL": project / "model" / "config.json",
        "KERNELGUARD_PYTHON": world.python,
    }
    assert {v["name"] for v in container["env"]} == here.keys()

    def run(**changes: Path) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": "/usr/bin:/bin", **{k: str(v) for k, v in {**here, **changes}.items()}}
        command = [*container["command"], *container["args"]]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)

    good = run()
    assert good.returncode == 0, good.stdout + good.stderr
    assert "exactly those of the lock" in good.stdout
    assert "PASS: qwen3_5_text, 2 fast paths (2 pass); level import; exit 0" in good.stdout
    bare = observed.environment(tmp_path / "bare", "5.24.0", {})
    no = run(KERNELGUARD_PYTHON=bare.python)
    assert no.returncode == 1
    assert "level import" not in no.stdout, "the lock already said no"
    assert run(KERNELGUARD_LOCK=tmp_path / "absent").returncode == 2


# The page


def test_the_page_shows_inputs_and_hooks_that_there_are() -> None:
    shown = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]
    used = [entry["with"] for entry in shown if isinstance(entry, list) for entry in entry]
    assert used
    for inputs in used:
        assert inputs.keys() <= ACTION["inputs"].keys()
        assert {n for n, i in ACTION["inputs"].items() if i.get("required")} <= inputs.keys()
    offered = {hook["id"]: hook["entry"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    hooks = [h for entry in shown if isinstance(entry, dict) for repo in entry["repos"] for h in repo["hooks"]]
    assert hooks
    for hook in hooks:
        parse(f"{offered[hook['id']]} {' '.join(hook['args'])}")
