"""What is built from a lock: the Dockerfile, the context, and what decides its digest."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from image.locks import pin, resolved, small_lock
from kernelguard.data import package
from kernelguard.errors import InputError
from kernelguard.image.bases import base_of
from kernelguard.image.builders import Order, buildkit_command, find_builder
from kernelguard.image.labels import content_identity, read_labels, to_labels
from kernelguard.image.plan import candidate_name, check_name, verdict_path
from kernelguard.image.promotion import quoted
from kernelguard.image.recipe import Extras, make_recipe, offline_requirements
from kernelguard.image.subject import intent_document, subject_of
from kernelguard.image.values import Builder, Claims, ContextFile, Recipe, State
from kernelguard.judge.values import Level
from kernelguard.lock.parts import locked_model
from kernelguard.lock.values import HubFilePin, HubPin, Lock, Role, SourcePin
from kernelguard.resolve.matrix import matrix

BASE = resolved("python:3.12-slim-bookworm")


def recipe(lock: Lock | None = None, *, builder: Builder = Builder.LEGACY, **extras: Any) -> Recipe:
    return make_recipe(
        lock or small_lock(),
        name="kernelguard.lock",
        base=BASE,
        toolkit=resolved("nvidia/cuda:13.0.1-devel-ubuntu22.04"),
        builder=builder,
        cache=Path("/nowhere"),
        extras=Extras(**extras),
    )


def source(**changes: Any) -> SourcePin:
    made = SourcePin(
        name="causal-conv1d",
        version="1.7.0",
        url="https://files.example/causal_conv1d-1.7.0.tar.gz",
        sha256="3" * 64,
        commit="",
        requires=("ninja",),
        archs=("9.0", "10.0"),
        arch_variable="TORCH_CUDA_ARCH_LIST",
        archs_note="",
        nvcc="13.0",
        cxx=17,
    )
    return replace(made, **changes)


def instructions(text: str, word: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", text)
    return [line for line in joined.splitlines() if line.startswith(f"{word} ")]


def test_every_step_but_one_is_without_a_network() -> None:
    runs = instructions(recipe(builder=Builder.BUILDX).dockerfile, "RUN")
    online = [run for run in runs if not run.startswith("RUN --network=none ")]
    assert len(online) == 1
    assert "apt-get install" in online[0]
    # The classic builder knows no such option; there the whole build is without a network, but for that stage.
    assert "--network" not in recipe().dockerfile


@pytest.mark.parametrize("builder", Builder)
def test_both_builders_take_it(builder: Builder) -> None:
    text = recipe(replace(small_lock(), sources=(source(),)), builder=builder, **sources()).dockerfile
    for unknown in ("--mount", "--chmod", "<<", "# syntax", "--link"):
        assert unknown not in text
    assert "|| true" not in text
    assert text.rstrip().endswith("USER 1000:1000")


def sources() -> dict[str, Any]:
    files = (ContextFile(path="causal_conv1d-1.7.0.tar.gz", content=b"", sha256="3" * 64),)
    tool = ContextFile(path="tools/ninja-1-py3-none-any.whl", content=b"", sha256="4" * 64)
    return {"sources": (("0-causal-conv1d", files),), "tools": (tool,)}


def test_everything_comes_from_digests() -> None:
    made = recipe(replace(small_lock(), sources=(source(),)), **sources())
    bases = [line.split()[1] for line in instructions(made.dockerfile, "FROM")]
    assert all("@sha256:" in base or base in {"system", "wheels"} for base in bases)
    for install in (run for run in instructions(made.dockerfile, "RUN") if " pip " in run and "/built/*" not in run):
        assert "--require-hashes" in install
        assert "--no-index" in install


def test_the_image_that_runs_has_no_wheels_no_nvcc_and_no_tools() -> None:
    text = recipe(replace(small_lock(), sources=(source(),)), **sources()).dockerfile
    last = text.split("\nFROM ")[-1]
    copied = [line for line in last.splitlines() if line.startswith("COPY")]
    assert copied == [
        "COPY --from=wheels /layers/torch/ /",
        "COPY --from=installed /layers/others/ /",
        "COPY kernelguard/ /opt/kernelguard/",
    ]


def test_tilelang_alone_keeps_its_nvcc() -> None:
    lock = small_lock()
    with_tilelang = replace(lock, pins=(*lock.pins, pin("tilelang", "0.1.6", Role.KERNEL)))
    last = recipe(with_tilelang).dockerfile.split("\nFROM ")[-1]
    assert "COPY --from=toolkit /usr/local/cuda-13.0 /usr/local/cuda-13.0" in last
    assert "CUDA_HOME=/usr/local/cuda-13.0" in last
    assert "toolkit" not in recipe().dockerfile


def test_a_source_build_is_told_its_archs_and_its_nvcc() -> None:
    text = recipe(replace(small_lock(), sources=(source(),)), max_jobs=2, **sources()).dockerfile
    assert "TORCH_CUDA_ARCH_LIST='9.0;10.0'" in text
    assert 'nvcc --version | grep "release 13.0,"' in text
    assert "CAUSAL_CONV1D_FORCE_BUILD='TRUE'" in text
    assert "MAX_JOBS='2'" in text
    assert "SKIP_CUDA_BUILD" not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"archs": ()}, "no list of GPU archs"),
        ({"nvcc": "12.8"}, r"nvcc 12\.8, and torch 2\.13\.0 was built for CUDA 13\.0"),
    ],
)
def test_a_source_build_that_cannot_come_out_right_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        recipe(replace(small_lock(), sources=(source(**changes),)), **sources())


def test_what_decides_the_digest() -> None:
    lock = small_lock()
    first = recipe(lock).digest
    assert recipe(lock).digest == first
    other = replace(lock.pins[0], sha256="9" * 64)
    assert recipe(replace(lock, pins=(other, *lock.pins[1:]))).digest != first
    assert recipe(lock, builder=Builder.BUILDX).digest != first
    added = (ContextFile(path="train.py", content=b"1"),)
    assert recipe(lock, added=(("code", added),)).digest not in {first, recipe(lock, added=(("code", ()),)).digest}


def test_hub_kernels_lie_where_the_environment_says() -> None:
    hub = HubPin(
        repository="kernels-community/flash-attn",
        version=1,
        commit="a" * 40,
        variant="torch213-cu130-x86_64-linux",
        files=(HubFilePin(path="__init__.py", sha256="5" * 64, size=3),),
    )
    made = recipe(replace(small_lock(), hub=(hub,)))
    place = "kernels-community/flash-attn/build/torch213-cu130-x86_64-linux"
    assert f"hub/{place}/__init__.py" in {file.path for file in made.files}
    assert "COPY hub/ /opt/venv/share/kernelguard/hub/" in made.dockerfile
    assert f"LOCAL_KERNELS=kernels-community/flash-attn=/opt/venv/share/kernelguard/hub/{place}" in made.dockerfile


def test_official_wheels_are_installed_from_their_file() -> None:
    pins = (pin("causal-conv1d", "1.7.0", Role.KERNEL, direct=True), pin("torch", "2.13.0", Role.TORCH))
    lock = replace(small_lock(), pins=pins)
    (kernel,) = offline_requirements(lock, "others").splitlines()
    assert kernel.startswith(
        "causal-conv1d @ file:///wheels/others/causal_conv1d-1.7.0-py3-none-any.whl --hash=sha256:"
    )
    (torch,) = offline_requirements(lock, "torch").splitlines()
    assert torch.startswith("torch==2.13.0 --hash=sha256:")


def test_a_rank_needs_nothing_that_is_not_in_the_image() -> None:
    """All that the guard and the workers import when they start is the standard library, or was copied too."""
    copied = {f.path.removeprefix("kernelguard/lib/") for f in recipe().files if f.path.startswith("kernelguard/lib/")}
    assert {path.split("/")[1] for path in copied} == {"__init__.py", "workers", "guard"}
    workers = [path for path in copied if path.startswith("kernelguard/workers/") and path.endswith(".py")]
    waiting = ["kernelguard/guard/__init__.py", "kernelguard/guard/__main__.py", *workers]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.parse((package().parent / path).read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            for name in names:
                top = name.split(".")[0]
                assert top == "kernelguard" or top in sys.stdlib_module_names or top in {"torch", "triton"}, path
                file = f"{name.replace('.', '/')}.py"
                inner = file if (package().parent / file).is_file() else f"{name.replace('.', '/')}/__init__.py"
                if top == "kernelguard" and (package().parent / inner).is_file():
                    assert inner in copied, f"{path} imports {name}"
                    waiting.append(inner)


def test_floors_are_those_of_the_matrix() -> None:
    drivers = matrix().drivers
    for cuda in drivers.toolkit:
        lock = small_lock()
        base = base_of(replace(lock, torch=replace(lock.torch, cuda=str(cuda))))
        assert base.toolkit, f"docker/base-images.toml has no row for CUDA {cuda}"
        assert base.driver == Version(drivers.toolkit[cuda])
        assert base.compatible == drivers.floor(cuda)


def test_which_base() -> None:
    lock = small_lock()
    assert base_of(lock).runtime == "python:3.12-slim-bookworm"
    assert base_of(lock, "mine:1").runtime == "mine:1"
    assert base_of(replace(lock, base_image="python@sha256:1")).runtime == "python@sha256:1"
    with pytest.raises(InputError, match=r"need glibc 2\.39"):
        base_of(replace(lock, target=replace(lock.target, glibc="2.39")))
    with pytest.raises(InputError, match=r"no image with nvcc 12\.7"):
        base_of(replace(lock, torch=replace(lock.torch, cuda="12.7"), sources=(source(nvcc="12.7"),)))


def test_the_table_has_no_digest() -> None:
    assert "sha256" not in (package().parent.parent / "docker" / "base-images.toml").read_text()


INSPECTED = {
    "Os": "linux",
    "Architecture": "amd64",
    "RootFS": {"Layers": ["sha256:1", "sha256:2"]},
    "Config": {"Env": ["B=2", "A=1"], "Entrypoint": None, "Cmd": ["python"], "User": "1000", "Labels": {"x": "1"}},
}


def test_labels_are_not_part_of_the_content() -> None:
    first = content_identity(INSPECTED)
    assert content_identity({**INSPECTED, "Id": "sha256:9", "RepoTags": ["a"]}) == first
    same = {**INSPECTED["Config"], "Labels": {"y": "2"}, "Env": ["A=1", "B=2"], "Entrypoint": [], "WorkingDir": "/"}
    assert content_identity({**INSPECTED, "Config": same}) == first


@pytest.mark.parametrize(
    "change",
    [
        {"RootFS": {"Layers": ["sha256:2", "sha256:1"]}},
        {"RootFS": {"Layers": ["sha256:1"]}},
        {"Architecture": "arm64"},
        *(
            {"Config": {**INSPECTED["Config"], name: value}}
            for name, value in {
                "Env": ["A=1"],
                "Entrypoint": ["sh"],
                "Cmd": ["sh"],
                "User": "0",
                "WorkingDir": "/x",
            }.items()
        ),
    ],
)
def test_layers_and_configuration_are(change: dict[str, Any]) -> None:
    assert content_identity({**INSPECTED, **change}) != content_identity(INSPECTED)


CLAIMS = Claims(
    state=State.VERIFIED,
    level=Level.GPU,
    lock="sha256:1",
    recipe="sha256:2",
    verdict="sha256:3",
    content="sha256:4",
    python="/opt/venv/bin/python",
    base_name="python:3.12",
    base_digest="sha256:5",
    torch="2.13.0",
    cuda="13.0",
    gpu="NVIDIA H100",
    capability="9.0",
    driver="580",
    created="2026-11-29T00:00:00+00:00",
)


def test_labels_round_trip() -> None:
    assert read_labels(to_labels(CLAIMS)) == CLAIMS
    assert read_labels({"other": "1"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("schema", "2"), ("schema", "x"), ("level", "high"), ("state", "")],
)
def test_labels_that_say_nothing_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError):
        read_labels({**to_labels(CLAIMS), f"io.kernelguard.{name}": value})


@pytest.mark.parametrize("name", ["train:v1", "host:5000/team/train:v1", "a/b/c", "train"])
def test_names_of_images(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["Train:v1", "train:", "train:a b", "", "-x", "train@sha256:1", "a//b", "x:" + "t" * 200]
)
def test_names_that_no_image_can_have(name: str) -> None:
    with pytest.raises(InputError, match="is no name for an image"):
        check_name(name)


def test_names_beside_the_lock_and_the_tag() -> None:
    assert candidate_name("host:5000/train") == "host:5000/train:latest-candidate"
    assert candidate_name("train:v1") == "train:v1-candidate"
    assert verdict_path(Path("x/kernelguard.lock")) == Path("x/kernelguard.verdict.json")


def test_a_buildx_command() -> None:
    order = Order(files=(), labels={"a": "b c"}, tag="t:1", network="host", sbom=True, cache_ref="reg/cache")
    command = buildkit_command(Builder.BUILDX, order, Path("/iid"))
    assert command[:4] == ["docker", "buildx", "build", "--load"]
    for wanted in ("--label=a=b c", "--tag=t:1", "--sbom=true", "--provenance=mode=max", "--network=host"):
        assert wanted in command
    assert "--cache-to=type=registry,ref=reg/cache,mode=max" in command
    plain = buildkit_command(Builder.BUILDKIT, order, Path("/iid"))
    assert plain[:2] == ["docker", "build"]
    assert not any("sbom" in word or "cache-" in word for word in plain)


def test_which_builder(tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path)}
    assert find_builder(None, empty) == (Builder.LEGACY, "docker buildx is not installed")
    docker = tmp_path / "docker"
    docker.write_text(
        '#!/bin/sh\ncase "$1" in buildx) exit 0;; --version) echo "Docker version 28.2.2, build x";; esac\n'
    )
    docker.chmod(0o755)
    assert find_builder(None, empty)[0] is Builder.BUILDX
    assert find_builder(Builder.LEGACY, empty)[0] is Builder.LEGACY
    with pytest.raises(Exception, match="a docker command before 23 is needed"):
        find_builder(Builder.BUILDKIT, empty)
    docker.write_text('#!/bin/sh\ncase "$1" in --version) echo "Docker version 20.10.24, build x";; *) exit 1;; esac\n')
    assert find_builder(Builder.BUILDKIT, empty)[0] is Builder.BUILDKIT
    with pytest.raises(Exception, match="buildx is not installed"):
        find_builder(Builder.BUILDX, empty)


def test_what_a_lock_says_is_to_be_verified(tmp_path: Path) -> None:
    from kernelguard.declare.config import read_config

    lock = small_lock()
    assert intent_document(lock) == {"packed": True, "signals": ["position_ids", "seq_idx"]}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    mine = replace(lock, model=replace(locked_model(read_config(str(model))), source="model"))
    # Found beside the lock, from wherever the command is run.
    assert subject_of(mine, tmp_path / "kernelguard.lock").model == model
    assert subject_of(mine, Path("/other/kernelguard.lock"), model=str(model)).model == model
    with pytest.raises(InputError, match="is not the model of the lock"):
        subject_of(lock, tmp_path / "kernelguard.lock")
    with pytest.raises(InputError, match="not to be found"):
        subject_of(mine, Path("/other/kernelguard.lock"))


def test_quoted_labels() -> None:
    assert quoted('a "b" $C \\') == '"a \\"b\\" \\$C \\\\"'


def test_every_code_is_documented() -> None:
    codes: set[str] = set()
    for path in (package() / "image").glob("*.py"):
        codes |= set(re.findall(r'"(image-[a-z-]+)"', path.read_text()))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"_open", "Finding"}:
                values = [k.value for k in node.keywords if k.arg == "code"] or node.args[:1]
                codes |= {str(v.value) for v in values if isinstance(v, ast.Constant)}
    assert len(codes) > 20
    text = (package().parent.parent / "docs" / "image.md").read_text()
    findings = (package().parent.parent / "docs" / "findings.md").read_text()
    assert {code for code in codes if f"`{code}`" not in text + findings} == set()
