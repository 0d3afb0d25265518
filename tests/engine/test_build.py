"""Images are built, verified, promoted and refused by a real engine. What a GPU would say is the one thing made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.world import BEFORE, Asked, World, answer, says, tiny_lock, verdict
from kernelguard.errors import InputError, ToolError, UndeterminedError
from kernelguard.image import labels
from kernelguard.image.build import RefusedError, Talk, run_build
from kernelguard.image.engine import Engine
from kernelguard.image.plan import make_plan, unchanged
from kernelguard.image.promoting import promote_image
from kernelguard.image.values import Builder, Outcome, State
from kernelguard.judge.values import Level
from kernelguard.verify.values import Outcome as Found
from kernelguard.verify.values import Verdict
from sources.servers import wheel


def build(engine: Engine, world: World, *verdicts: Verdict, **changes: Any) -> Outcome:
    how = {name: changes.pop(name) for name in ("asked", "cache") if name in changes}
    talk = changes.pop("talk", None)
    return run_build(
        engine,
        world.request(**changes),
        dict(os.environ),
        world.cache,
        talk=talk,
        verifier=says(*verdicts, **how),
    )


def candidate(engine: Engine, world: World, **changes: Any) -> Outcome:
    return build(engine, world, verdict(Level.IMPORT), **changes)


def inside(image: str, *command: str, user: str = "") -> str:
    """What a command prints in a container of an image."""
    options = ["--rm", "--network=none", *(["--user", user] if user else [])]
    done = subprocess.run(["docker", "run", *options, image, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def stale(image: str) -> str:
    """How far the date in a module's bytecode is from the module's own, in seconds; Python takes it at 0 only."""
    code = (
        "import os, struct, importlib.util as u; file = u.find_spec('fla').origin; "
        "(date,) = struct.unpack('<I', open(u.cache_from_source(file), 'rb').read(12)[8:]); "
        "print(date - int(os.stat(file).st_mtime))"
    )
    return inside(image, "python", "-c", code)


def leftovers(engine: Engine) -> list[str]:
    """Containers, and images without a name or with one of a build's own, that were not there before these tests."""
    api = engine._client.api
    named = re.compile("<none>|kernelguard-(base|build|warm|cached|promote)")
    images = [(row["Id"], name) for row in api.images() for name in row.get("RepoTags") or ("<none>:<none>",)]
    mine = [image_id for image_id, name in images if named.match(name)]
    return [one for one in (*mine, *(row["Id"] for row in api.containers(all=True))) if one not in BEFORE]


Built = tuple[World, Outcome]


def test_a_candidate_is_what_the_recipe_says(engine: Engine, built: Built) -> None:
    world, made = built
    assert made.image == f"{world.image}-candidate"
    assert engine.image(world.image) is None, "only level gpu gives the tag itself"
    assert made.claims is not None
    assert made.facts is not None
    assert (made.claims.state, made.claims.level, made.claims.lock) == (State.CANDIDATE, Level.IMPORT, world.digest)
    assert labels.read_labels(made.facts.labels) == made.claims
    assert made.claims.content == made.facts.content
    code = "import importlib.metadata as m; print(*sorted({d.name for d in m.distributions()}))"
    listed = inside(made.image, "python", "-c", code).split()
    assert listed == ["fla-core", "torch", "triton"], "what the lock has, and nothing else"
    assert inside(made.image, "id", "-u") == "1000"
    assert inside(made.image, "python", "-c", "import sys; print(sys.executable)") == "/opt/venv/bin/python"
    inside(made.image, "sh", "-c", "test ! -e /wheels && test ! -e /tools && cc --version")
    assert stale(made.image) == "0", "bytecode is compiled, and is that of the file beside it"
    assert "kernelguard.lock" in inside(made.image, "ls", "/opt/kernelguard")
    assert leftovers(engine) == []


def test_the_guard_starts_in_the_image_for_every_user(built: Built) -> None:
    for user in ("", "12345:12345"):
        code = "import kernelguard.guard, kernelguard.workers; print(kernelguard.guard.__file__)"
        assert inside(built[1].image, "python", "-c", code, user=user).startswith("/opt/kernelguard/lib/")
        inside(built[1].image, "sh", "-c", "touch $TRITON_CACHE_DIR/x", user=user)


def test_nothing_to_do_until_something_changes(engine: Engine, built: Built) -> None:
    world, made = built
    again = candidate(engine, world)
    assert again.unchanged
    assert (again.facts.id, again.image) == (made.facts.id, made.image)
    plan = make_plan(world.request(), dict(os.environ), world.cache, resolve=engine.resolve, fetched=True)
    assert unchanged(engine, world.request(), plan) is not None
    assert unchanged(engine, world.request(level=Level.GPU), plan) is None
    other = replace(plan, recipe=replace(plan.recipe, digest="sha256:other"))
    assert unchanged(engine, world.request(), other) is None
    kept = world.verdict_file.read_bytes()
    world.verdict_file.write_text("{}")
    assert unchanged(engine, world.request(), plan) is None, "the proof beside the lock is another one"
    world.verdict_file.write_bytes(kept)


def test_a_gpu_verdict_promotes_and_the_cache_is_the_last_layer(engine: Engine, world: World, monkeypatch: Any) -> None:
    monkeypatch.setattr("kernelguard.image.build._can_give_gpus", lambda *_: None)
    asked: Asked = []
    made = build(
        engine,
        world,
        verdict(Level.IMPORT),
        verdict(),
        verdict(),
        asked=asked,
        cache={"cache/abc/kernel.cubin": b"compiled", "cache/tuned.json": b"{}"},
        level=Level.GPU,
    )
    assert made.image == world.image
    assert [level for level, _ in asked] == [Level.IMPORT, Level.GPU, Level.GPU]
    assert asked[1][1] != asked[2][1], "the image with the cache is verified again"
    assert inside(world.image, "sh", "-c", "cat $TRITON_CACHE_DIR/abc/kernel.cubin") == "compiled"
    facts, verified = engine.image(world.image), engine.image(asked[2][1])
    assert facts is not None
    claims = labels.read_labels(facts.labels)
    assert claims is not None
    assert (claims.state, claims.capability, claims.driver) == (State.VERIFIED, "9.0", "580.95.05")
    # Labels only: the same layers, the same content.
    assert verified is None or (facts.layers, facts.content) == (verified.layers, verified.content)
    assert claims.content == facts.content
    assert len(made.layers) >= 3
    stored = json.loads(world.verdict_file.read_text())
    assert stored["image"]["content_sha256"] == facts.content
    assert build(engine, world, level=Level.GPU).unchanged
    assert leftovers(engine) == []


@pytest.mark.parametrize(
    ("verdicts", "error", "text"),
    [
        ([verdict(Level.IMPORT), verdict(outcome=Found.WRONG)], RefusedError, "gradient of k is wrong"),
        ([verdict(Level.IMPORT), verdict(capability=(8, 0))], UndeterminedError, "compute capability 8.0"),
        ([verdict(Level.IMPORT), verdict(), verdict(outcome=Found.WRONG)], RefusedError, "level gpu does not hold"),
    ],
    ids=["wrong-result", "another-gpu", "wrong-when-warm"],
)
def test_a_failed_image_never_gets_the_tag(  # noqa: PLR0917 - parameters of a table
    engine: Engine, world: World, monkeypatch: Any, verdicts: list[Verdict], error: type[Exception], text: str
) -> None:
    monkeypatch.setattr("kernelguard.image.build._can_give_gpus", lambda *_: None)
    with pytest.raises(error, match=text):
        build(engine, world, *verdicts, level=Level.GPU, cache={"cache/x": b"1"})
    assert engine.image(world.image) is None
    assert engine.image(f"{world.image}-candidate") is None
    assert not world.verdict_file.exists()
    assert leftovers(engine) == []


def test_a_failed_image_can_be_kept_for_a_look(engine: Engine, world: World) -> None:
    raised = replace(verdict(Level.IMPORT).probes[0], outcome=Found.RAISED, reason="ImportError: no such symbol")
    with pytest.raises(RefusedError, match="no such symbol") as refused:
        build(engine, world, verdict(Level.IMPORT, probes=(raised,)), keep_failed=True)
    assert refused.value.exit_code == 1
    assert f"{world.image}-failed" in refused.value.message
    kept = engine.image(f"{world.image}-failed")
    assert kept is not None
    assert labels.read_labels(kept.labels) is None, "it claims nothing"


def test_without_a_gpu_runtime_nothing_is_built(engine: Engine, world: World) -> None:
    steps: list[str] = []
    with pytest.raises(UndeterminedError, match="level gpu cannot be reached here") as raised:
        build(engine, world, level=Level.GPU, talk=Talk(step=steps.append))
    assert "--require-level import" in str(raised.value.hint)
    assert not any(step.startswith("building") for step in steps)
    assert leftovers(engine) == []


def test_a_cpu_lock_is_never_verified_on_a_gpu(engine: Engine, world: World) -> None:
    world.take(tiny_lock(world.folder, cuda=""))
    with pytest.raises(UndeterminedError, match="can never be verified on a GPU"):
        build(engine, world, level=Level.GPU)


def evidence(built: Built, path: Path, of: Verdict, **image: str) -> Path:
    world, made = built
    assert made.facts is not None
    about = {"name": world.image, "content_sha256": made.facts.content, "lock": world.digest, **image}
    path.write_text(json.dumps({**answer(of)["verdict"], "image": about, "findings": answer(of)["findings"]}))
    return path


def promote(engine: Engine, built: Built, file: Path, **changes: Any) -> Outcome:
    world, made = built
    asked = {
        "lock": world.lock,
        "lock_path": file.with_suffix(".lock"),
        "tag": "",
        "builder": Builder.LEGACY,
        **changes,
    }
    return promote_image(engine, asked.pop("name", made.image), verdict=file, environ=dict(os.environ), **asked)


def test_a_candidate_is_promoted_on_evidence_from_elsewhere(engine: Engine, built: Built, tmp_path: Path) -> None:
    before = built[1].facts
    made = promote(engine, built, evidence(built, tmp_path / "v.json", verdict()), tag="kg-test-promoted:v1")
    assert before is not None
    assert made.facts is not None
    assert made.image == "kg-test-promoted:v1"
    assert (made.facts.layers, made.facts.content) == (before.layers, before.content)
    assert made.claims is not None
    assert (made.claims.state, made.claims.level) == (State.VERIFIED, Level.GPU)
    assert labels.read_labels(made.facts.labels) == made.claims
    assert engine.image(built[1].image) is not None, "the candidate stays"
    engine.remove(made.image)
    assert leftovers(engine) == []


@pytest.mark.parametrize(
    ("of", "image", "error", "text"),
    [
        (verdict(), {"content_sha256": "sha256:" + "0" * 64}, InputError, "about another image"),
        (verdict(Level.IMPORT), {}, UndeterminedError, "level import"),
        (verdict(capability=(10, 0)), {}, UndeterminedError, "capability 10.0"),
        (verdict(outcome=Found.WRONG), {}, RefusedError, "a no"),
        (verdict(probes=()), {}, UndeterminedError, "was not measured"),
        (verdict(outcome=Found.NO_BACKWARD), {}, UndeterminedError, "no backward"),
    ],
    ids=["other-image", "other-level", "other-gpu", "wrong", "not-measured", "no-backward"],
)
def test_evidence_that_proves_something_else_promotes_nothing(  # noqa: PLR0917 - parameters of a table
    engine: Engine, built: Built, tmp_path: Path, of: Verdict, image: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        promote(engine, built, evidence(built, tmp_path / "v.json", of, **image))
    assert engine.image(built[0].image) is None


def test_an_image_that_was_changed_is_not_promoted(engine: Engine, built: Built, tmp_path: Path) -> None:
    file = evidence(built, tmp_path / "v.json", verdict())
    text = f"FROM {built[1].image}\nENV MOVED=1\n"
    command = ["docker", "build", "-q", "-t", "kg-test-changed:v1-candidate", "-"]
    subprocess.run(command, input=text.encode(), check=True, capture_output=True)
    with pytest.raises(InputError, match="no longer what was built"):
        promote(engine, built, file, name="kg-test-changed:v1-candidate")
    engine.remove("kg-test-changed:v1-candidate")


def test_another_lock_or_a_foreign_image_is_not_promoted(engine: Engine, built: Built, tmp_path: Path) -> None:
    file = evidence(built, tmp_path / "v.json", verdict())
    with pytest.raises(InputError, match="was not built by"):
        promote(engine, built, file, name=built[0].base)
    with pytest.raises(InputError, match="from another lock"):
        promote(engine, built, file, lock=replace(built[0].lock, notes=("another",)))
    with pytest.raises(InputError, match="the engine has no image"):
        promote(engine, built, file, name="kg-test-none:v1-candidate")


def test_a_wheel_that_is_not_the_locked_one_is_named(engine: Engine, world: World) -> None:
    world.take(tiny_lock(world.folder))
    place = world.folder / "fla_core-0.6.0-py3-none-any.whl"
    place.write_bytes(wheel("fla-core", "0.6.0", files={"fla/__init__.py": "# tampered\n"}))
    with pytest.raises(ToolError, match="not what was locked") as raised:
        candidate(engine, world)
    assert raised.value.exit_code == 4
    assert not list(world.cache.rglob("*.part"))


def test_pip_in_the_image_holds_the_hash_too(engine: Engine, world: World) -> None:
    """A cache that is changed after it was hashed: the step that installs fails, with pip's own words."""
    place = world.cache / "files" / world.lock.pins[2].sha256 / world.lock.pins[2].filename

    def swap(text: str) -> None:
        if text.startswith("building"):
            place.write_bytes(wheel("fla-core", "0.6.0", files={"fla/__init__.py": "# tampered\n"}))

    with pytest.raises(ToolError, match="is not what was locked") as raised:
        candidate(engine, world, talk=Talk(step=swap))
    assert "Expected sha256" in raised.value.message
    assert leftovers(engine) == []


def test_a_failing_step_is_shown_with_its_last_lines(engine: Engine, world: World) -> None:
    broken = wheel("fla-core", "0.6.0", requires=("nonsense ===",))
    world.take(tiny_lock(world.folder, files={"fla-core": broken[:-20]}))
    lines: list[str] = []
    with pytest.raises(ToolError, match="failed") as raised:
        candidate(engine, world, talk=Talk(line=lines.append))
    assert raised.value.exit_code == 4
    assert "pip install" in raised.value.message
    assert "\x1b" not in raised.value.message
    assert len(raised.value.message.splitlines()) <= 24
    assert any(line.startswith("step ") for line in lines), "progress came as it happened"
    assert leftovers(engine) == []


def test_a_base_that_cannot_be_had(engine: Engine, world: World) -> None:
    with pytest.raises(UndeterminedError, match="is not here, and its registry cannot be reached") as raised:
        candidate(engine, world, base="registry.invalid/nothing:1")
    assert "--base" in str(raised.value.hint)


def test_a_base_without_a_compiler_and_without_apt(engine: Engine, world: World, no_compiler: str) -> None:
    with pytest.raises(ToolError, match="lacks gcc libc6-dev and has no apt-get"):
        candidate(engine, world, base=no_compiler)
    assert leftovers(engine) == []


def test_a_base_without_the_lock_s_python(engine: Engine, world: World) -> None:
    lock = tiny_lock(world.folder)
    world.take(replace(lock, target=replace(lock.target, python="3.13")))
    with pytest.raises(ToolError, match=r"has no python3\.13"):
        candidate(engine, world)


def test_a_build_that_takes_too_long_is_stopped(engine: Engine, world: World) -> None:
    with pytest.raises(UndeterminedError, match=r"did not end within 0\.5 s"):
        candidate(engine, world, timeout=0.5, no_cache=True)
    deadline = time.monotonic() + 20
    while leftovers(engine) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leftovers(engine) == []


def test_ctrl_c_leaves_nothing(engine: Engine, world: World) -> None:
    def interrupt(text: str) -> None:
        if "pip install" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        candidate(engine, world, talk=Talk(line=interrupt), no_cache=True)
    deadline = time.monotonic() + 20
    while leftovers(engine) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leftovers(engine) == []
    assert engine.image(f"{world.image}-candidate") is None


def test_what_a_killed_build_left_is_removed_by_the_next(engine: Engine, world: World) -> None:
    code = (
        "import os, sys, signal; sys.path.insert(0, sys.argv[1])\n"
        "from kernelguard.image.engine import connect\n"
        "with connect(os.environ) as engine, engine.container(sys.argv[2], ['sleep', '60']) as one:\n"
        "    engine._client.api.start(one); engine.tag_for_now(engine.image(sys.argv[2]).id, 'base0')\n"
        "    print(one, engine.run_id, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1]), world.base],
        capture_output=True,
        text=True,
        check=False,
    )
    container, run_id = done.stdout.split()
    assert container in leftovers(engine)
    assert engine.sweep() == 2
    assert container not in leftovers(engine)
    assert engine.image(f"kernelguard-base0:{run_id}") is None
    assert engine.image(world.base) is not None


def test_a_folder_of_ones_own_is_copied(engine: Engine, world: World, tmp_path: Path) -> None:
    code = tmp_path / "trainer"
    (code / "inner").mkdir(parents=True)
    (code / "inner" / "train.py").write_text("print('trains')")
    (code / ".dockerignore").write_text("*.log\n")
    (code / "run.log").write_text("x")
    made = candidate(engine, world, add=(code,))
    assert inside(made.image, "python", "/workspace/trainer/inner/train.py") == "trains"
    assert inside(made.image, "sh", "-c", "ls -A /workspace/trainer | sort | tr '\\n' ' '") == ".dockerignore inner"


def test_another_kernel_leaves_torch_s_layer_as_it_is(engine: Engine, built: Built, world: World) -> None:
    """Also without the cache, so also on another machine: a registry is not sent gigabytes again."""
    other = wheel("fla-core", "0.6.0", files={"fla/__init__.py": "# another\n"})
    world.take(tiny_lock(world.folder, files={"fla-core": other}))
    made = candidate(engine, world, no_cache=True)
    layers = [(facts := outcome.facts) and facts.layers for outcome in (built[1], made)]
    assert all(layers)
    # The base, `system`, torch, everything else, and what is kernelguard's.
    (base, _, torch, others, *_), (same_base, _, same_torch, changed, *_) = layers
    assert (base, torch) == (same_base, same_torch)
    assert others != changed


def test_labels_say_exactly_what_they_were_given(engine: Engine, built: Built, tmp_path: Path) -> None:
    odd = 'a "b" $HOME \\ ${PATH} c'
    file = evidence(built, tmp_path / "v.json", replace(verdict(), fingerprint=replace(verdict().fingerprint, gpu=odd)))
    made = promote(engine, built, file, tag="kg-test-odd:v1")
    assert made.facts is not None
    assert made.facts.labels["io.kernelguard.gpu"] == odd
    engine.remove(made.image)
