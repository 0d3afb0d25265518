"""What each engine is handed: valid for its own schema, and no argument is ever read as shell."""

from __future__ import annotations

import base64
import io
import json
import os
import runpy
import shlex
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernelguard.errors import InputError
from kernelguard.guard.ticket import load_ticket
from kernelguard.launch.engines import ENGINES
from kernelguard.launch.job import Job, Submission, Variable, check_name, plain, shell
from kernelguard.launching import bundle, script_of

ROOT = Path(__file__).resolve().parents[2]
NASTY = (
    "train.py",
    "--name=a b",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned #",
    "it's",
    '"quoted"',
    "new\nline",
    "*",
    "$HOME",
    "\\",
    "",
    "--",
    "größe",
)
IMAGE = "registry/train@sha256:" + "a" * 64


def job(run_dir: Path | str = "/shared/runs/1", **changes: Any) -> Job:
    made = Job(
        name="kernelguard-12345678",
        script=NASTY,
        python="/env/bin/python",
        run_dir=str(run_dir),
        workdir="/mnt/shared",
        nodes=2,
        processes=8,
        ticket='{"schema": 1}',
        bundle=b"zip",
    )
    return replace(made, **changes)


def render(engine: str, **changes: Any) -> Submission:
    return ENGINES[engine].render(job(**changes))


def after_guard(argv: list[str]) -> list[str]:
    """What the guard's own command line gets as the script."""
    return argv[argv.index("kernelguard.guard") + 2 :]


def program(folder: Path, name: str, text: str) -> None:
    """A program on PATH that stands for the engine's own."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_bash(text: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **environ},
    )


RECORD = "import json, sys\nopen('argv.json', 'w').write(json.dumps(sys.argv[1:]))\n"


def test_torchrun_gets_every_argument_as_it_is() -> None:
    submission = render("torchrun", nodes=1)
    argv = list(submission.argv)
    assert submission.runs_here
    assert after_guard(argv) == list(NASTY)
    assert "--standalone" in argv
    assert argv[argv.index("--max-restarts") + 1] == "0"


def test_torchrun_on_several_nodes_needs_to_know_where() -> None:
    with pytest.raises(InputError, match="first one"):
        render("torchrun")
    options = {"master-addr": "10.0.0.1", "master-port": "29500", "node-rank": "1"}
    argv = list(render("torchrun", options=options).argv)
    torchrun = argv[argv.index("torch.distributed.run") :]
    assert torchrun[torchrun.index("--node-rank") + 1] == "1"
    assert torchrun[torchrun.index("--master-addr") + 1] == "10.0.0.1"
    assert torchrun[torchrun.index("--rdzv-conf") + 1] == "timeout=90"
    assert argv[argv.index("--nnodes") + 1] == "2"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"node-rank": "2", "master-addr": "a", "master-port": "1"}, "node-rank"),
        ({"node-rank": "x", "master-addr": "a", "master-port": "1"}, "node-rank"),
        ({"master-addr": "a", "master-port": "70000"}, "master-port"),
        ({"partition": "gpu"}, "no option partition"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        render("torchrun", options=options)


def slurm_world(tmp_path: Path) -> Path:
    """Programs that do what Slurm's do with their arguments: run the task here, on each node."""
    program(tmp_path, "scontrol", "print('node-a\\nnode-b')\n")
    srun = """
import json, os, subprocess, sys
words = sys.argv[1:]
open('srun.json', 'w').write(json.dumps(words))
codes = []
for node in range(2):
    environ = {**os.environ, 'SLURM_NODEID': str(node)}
    codes.append(subprocess.run(words[words.index('bash'):], env=environ).returncode)
sys.exit(max(codes))
"""
    program(tmp_path, "srun", srun)
    stand_in = """
import json, sys
if '--settle' in sys.argv:
    sys.exit(int(sys.argv[sys.argv.index('--settle') + 1]) + 1)
node = sys.argv[sys.argv.index('--node-rank') + 1]
open(f'argv-{node}.json', 'w').write(json.dumps(sys.argv[1:]))
sys.exit(77 if node == '1' else 0)
"""
    site = tmp_path / "run" / "site" / "kernelguard" / "launch"
    site.mkdir(parents=True)
    (site / "supervisor.py").write_text(stand_in)
    return tmp_path / "run"


def test_the_slurm_script_runs_and_passes_every_argument_on(tmp_path: Path) -> None:
    run_dir = slurm_world(tmp_path)
    made = job(run_dir=run_dir, python=sys.executable, workdir=str(tmp_path))
    submission = ENGINES["slurm"].render(made)
    (name, script), *_ = submission.files
    assert submission.argv == ("sbatch", f"{run_dir}/{name}")
    done = run_bash(script, tmp_path, SLURM_JOB_NODELIST="node-[a-b]", SLURM_JOB_ID="41007")
    # 77 came from a node, and the last word has whoever reads the outcome.
    assert done.returncode == 78, done.stderr
    for node in ("0", "1"):
        argv = json.loads((tmp_path / f"argv-{node}.json").read_text())
        assert after_guard(argv) == list(NASTY)
        assert argv[argv.index("--master-addr") + 1] == "node-a"
        assert argv[argv.index("--master-port") + 1] == "21007"
        assert argv[argv.index("--nnodes") + 1] == "2"
    assert not (tmp_path / "pwned").exists()
    srun = json.loads((tmp_path / "srun.json").read_text())
    assert "--kill-on-bad-exit=1" in srun
    assert srun[srun.index("--chdir") + 1] == str(tmp_path)


def test_the_slurm_script_says_what_was_asked_for() -> None:
    options = {"partition": "gpu", "time": "12:00:00", "gres": "gpu:h200:8"}
    script = render("slurm", options=options).files[0][1]
    said = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )
    assert said["nodes"] == "2"
    assert said["ntasks-per-node"] == "1"
    assert said["gpus-per-node"] == "8"
    assert said["partition"] == "gpu"
    assert said["time"] == "12:00:00"
    assert "no-requeue" in said
    assert script.startswith("#!/bin/bash\n#SBATCH"), "sbatch stops reading at the first command"


@pytest.mark.parametrize("value", ["gpu\n#SBATCH --uid=0", "a b", "x;y", "$(id)"])
def test_no_option_can_add_a_line(value: str) -> None:
    with pytest.raises(InputError, match="can be passed on"):
        render("slurm", options={"partition": value})
    with pytest.raises(InputError, match="can be passed on"):
        render("slurm", options={f"a{value}": "1"})
    with pytest.raises(InputError, match="can be passed on"):
        render("slurm", run_dir=f"/runs/{value}")


def test_slurm_runs_in_an_image(tmp_path: Path) -> None:
    script = render("slurm", image=IMAGE, script=("train.py",)).files[0][1]
    line = next(line for line in script.splitlines() if line.startswith("srun"))
    words = shlex.split(line)
    assert words[words.index("--container-image") + 1] == IMAGE
    assert words[words.index("--container-mounts") + 1].startswith("/shared/runs/1:/shared/runs/1")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, check=False, capture_output=True, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_what_kernelguard_sets_cannot_be_set_twice() -> None:
    with pytest.raises(InputError, match="nodes is set by kernelguard"):
        render("slurm", options={"nodes": "9"})


def kubeflow_objects(**changes: Any) -> dict[str, dict[str, Any]]:
    submission = render("kubeflow", image=IMAGE, **changes)
    assert submission.argv[:3] == ("kubectl", "apply", "-f")
    return {item["kind"]: item for item in yaml.safe_load_all(submission.files[0][1])}


def unknown_keys(model: Any, document: Any, place: str = "") -> list[str]:
    """Keys of a document that survive no reading by the engine's own model of it."""
    again = model.from_dict(document).to_dict()

    def lost(a: Any, b: Any, at: str) -> list[str]:
        if isinstance(a, dict):
            return [
                x for k, v in a.items() for x in ([f"{at}.{k}"] if k not in (b or {}) else lost(v, b[k], f"{at}.{k}"))
            ]
        if isinstance(a, list):
            return [x for i, (v, w) in enumerate(zip(a, b, strict=True)) for x in lost(v, w, f"{at}[{i}]")]
        return []

    return lost(document, again, place)


def test_kubeflow_objects_are_what_its_own_models_know() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    options = {"namespace": "ml", "claim": "data", "claim-path": "/data", "node-selector": "gpu=h200"}
    objects = kubeflow_objects(options=options)
    for kind, model in (
        ("TrainJob", models.TrainerV1alpha1TrainJob),
        ("TrainingRuntime", models.TrainerV1alpha1TrainingRuntime),
        ("ConfigMap", models.IoK8sApiCoreV1ConfigMap),
    ):
        assert unknown_keys(model, objects[kind]) == []
    # The check notices what the models do not know.
    wrong = json.loads(json.dumps(objects["TrainJob"]))
    wrong["spec"]["trainer"]["numberOfNodes"] = 2
    assert unknown_keys(models.TrainerV1alpha1TrainJob, wrong) == [".spec.trainer.numberOfNodes"]


def test_kubeflow_does_not_retry_a_wrong_configuration() -> None:
    objects = kubeflow_objects()
    spec = objects["TrainingRuntime"]["spec"]["template"]["spec"]
    node = spec["replicatedJobs"][0]["template"]["spec"]
    rule = node["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [3, 78]
    pod = node["template"]["spec"]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"] == "node"
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    assert spec["failurePolicy"]["rules"][0] == {
        "name": "configuration",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    job_spec = objects["TrainJob"]["spec"]
    assert job_spec["runtimeRef"]["name"] == objects["TrainingRuntime"]["metadata"]["name"]
    assert job_spec["trainer"]["image"] == IMAGE
    assert job_spec["trainer"]["numNodes"] == 2


def test_the_kubeflow_command_runs_with_what_the_config_map_holds(tmp_path: Path) -> None:
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("kernelguard/launch/supervisor.py", RECORD)
    objects = kubeflow_objects(bundle=zipped.getvalue(), python=sys.executable)
    place = tmp_path / "config"
    place.mkdir()
    (place / "site.zip").write_bytes(base64.b64decode(objects["ConfigMap"]["binaryData"]["site.zip"]))
    (place / "ticket.json").write_text(objects["ConfigMap"]["data"]["ticket.json"])
    bash, option, text = objects["TrainJob"]["spec"]["trainer"]["command"]
    assert (bash, option) == ("bash", "-c")
    # The container's own places, here.
    text = text.replace("/opt/kernelguard-launch", str(place)).replace("/tmp/kernelguard-site", str(tmp_path / "site"))
    environ = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}
    done = run_bash(text, tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    argv = json.loads((tmp_path / "argv.json").read_text())
    assert after_guard(argv) == list(NASTY)
    assert argv[argv.index("--node-rank") + 1] == "1"
    assert argv[argv.index("--master-addr") + 1] == "job-node-0-0.job"
    assert not (tmp_path / "pwned").exists()


AIR_IMAGE = "main.images.train:2026-11"
# The keys of the public reference of `databricks air run`, looked at 2026-11-29.
AIR_KEYS = {
    "experiment_name": None,
    "compute": {"accelerator_type", "num_accelerators", "pool_id", "priority_class"},
    "environment": {"version", "dependencies", "unity_catalog_image"},
    "code_source": {"root_path"},
    "command": None,
    "max_retries": None,
}


def test_the_air_workload_has_only_known_keys() -> None:
    submission = render("air", image=AIR_IMAGE, run_dir="/mnt/shared/runs/1")
    document = yaml.safe_load(submission.files[0][1])
    assert set(document) <= set(AIR_KEYS)
    for key, inner in AIR_KEYS.items():
        if inner is not None:
            assert set(document[key]) <= inner
    assert {"experiment_name", "compute", "command"} <= set(document)
    assert document["compute"] == {"accelerator_type": "GPU_8xH100", "num_accelerators": 16}
    assert document["environment"] == {"unity_catalog_image": AIR_IMAGE}
    assert document["max_retries"] == 0
    assert submission.argv == ("databricks", "air", "run", "-f", "/mnt/shared/runs/1/workload.yaml")


def test_the_air_command_runs_from_the_uploaded_code(tmp_path: Path) -> None:
    uploaded = tmp_path / "code"
    site = uploaded / "runs" / "it's 1" / "site" / "kernelguard" / "launch"
    site.mkdir(parents=True)
    (site / "supervisor.py").write_text(RECORD)
    made = job(image=AIR_IMAGE, run_dir="/mnt/shared/runs/it's 1", python=sys.executable)
    command = yaml.safe_load(ENGINES["air"].render(made).files[0][1])["command"]
    command = command.replace("/tmp/kernelguard-launch", str(tmp_path / "place"))
    environ = {"CODE_SOURCE_PATH": str(uploaded), "NODE_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    done = run_bash(command, tmp_path, NUM_NODES="2", **environ)
    assert done.returncode == 0, done.stderr
    argv = json.loads((uploaded / "argv.json").read_text())
    assert after_guard(argv) == list(NASTY)
    assert argv[argv.index("--node-rank") + 1] == "1"
    assert run_bash(command, tmp_path, NUM_NODES="3", **environ).returncode != 0, (
        "another number of nodes than admitted"
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image": IMAGE, "run_dir": "/mnt/shared/runs/1"}, "no image of AI Runtime"),
        ({"image": AIR_IMAGE}, "not below"),
        ({"image": AIR_IMAGE, "options": {"accelerator": "GPU_1xA10"}}, "8 ranks"),
        ({"image": AIR_IMAGE, "options": {"pool": "x"}}, "no option pool"),
    ],
)
def test_what_air_cannot_take_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        render("air", **changes)


def test_the_examples_are_what_a_dry_run_prints() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "launch_examples.py"))
    for path, text in tool["examples"]().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run: python tools/launch_examples.py"
    # Each engine has a module and an example of its own.
    modules = {type(engine).__module__ for engine in ENGINES.values()}
    assert len(modules) == len(ENGINES) == len(tool["examples"]())


def test_the_bundle_holds_what_ranks_need_and_is_always_the_same() -> None:
    first = bundle()
    assert first == bundle()
    names = set(zipfile.ZipFile(io.BytesIO(first)).namelist())
    assert {
        ".kernelguard-site",
        "kernelguard/__init__.py",
        "kernelguard/guard/__main__.py",
        "kernelguard/guard/ticket.py",
        "kernelguard/launch/supervisor.py",
        "kernelguard/workers/probe.py",
    } <= names
    assert not [n for n in names if n.endswith(".pyc")]
    assert len(base64.b64encode(first)) < 700_000, "it has to fit into a ConfigMap, with the ticket"


def test_the_bundle_runs_alone(tmp_path: Path) -> None:
    """Outside of this repository, with nothing of kernelguard's dependencies."""
    with zipfile.ZipFile(io.BytesIO(bundle())) as archive:
        archive.extractall(tmp_path / "site")
    supervisor = tmp_path / "site" / "kernelguard" / "launch" / "supervisor.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(supervisor), "--ticket", str(tmp_path / "none"), "--", "x"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    with pytest.raises(ValueError, match="No such file"):
        load_ticket(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train.py", "a"), ("train.py", "a")),
        (("python", "train.py"), ("train.py",)),
        (("python3.12", "-m", "kernelguard_train", "c.toml"), ("-m", "kernelguard_train", "c.toml")),
        (("/env/bin/python", "-m", "x"), ("-m", "x")),
        (("-m", "x"), ("-m", "x")),
        (("pythonic.py",), ("pythonic.py",)),
    ],
)
def test_what_is_run(words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert script_of(words) == expected


@pytest.mark.parametrize("words", [(), ("python",), ("-m",), ("python", "-c", "x"), ("-u", "x.py")])
def test_what_cannot_be_run(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError):
        script_of(words)


@pytest.mark.parametrize("name", ["", "Job", "a_b", "-a", "a" * 64, "a\n", "1a"])
def test_a_name_that_an_engine_would_refuse(name: str) -> None:
    with pytest.raises(InputError, match="no name for a job"):
        check_name(name)


def test_only_variables_are_looked_up() -> None:
    assert shell(["a b", Variable(name="X"), "$Y"]) == "'a b' \"$X\" '$Y'"
    assert plain("12:00:00", what="x") == "12:00:00"
