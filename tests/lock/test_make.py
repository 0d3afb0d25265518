"""From a resolution to a lock against a real index: which files, which hashes, and what is said when that fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.lock import NoSetError, write_lock
from kernelguard.lock.compile import Engine
from kernelguard.lock.document import dumps
from kernelguard.lock.make import no_set
from kernelguard.lock.values import Role
from kernelguard.observe.targets import target
from kernelguard.resolve import Market, Options, matrix
from kernelguard.resolve.values import Kind, Need, Provider
from kernelguard.sources.http import Http
from kernelguard.sources.hub import Hub, HubSource
from lock.world import CPU, FLA, OFFICIAL, World
from sources.fakehub import FakeHub, variant
from sources.servers import broken, cut_off, html, sha256, wheel

CONV = (
    Need(package="causal_conv1d", symbols=("causal_conv1d_fn",), providers=(Provider(distribution="causal-conv1d"),)),
)


def test_a_native_lock_pins_the_very_files_for_this_machine(here: World) -> None:
    lock = here.lock(CPU, engine=Engine.PIP_TOOLS)
    pins = {pin.name: pin for pin in lock.pins}
    assert set(pins) == {"torch", "filelock", "fla-core", "einops"}
    assert pins["torch"].filename == "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    for pin in lock.pins:
        place = here.wheels / pin.filename
        body = place.read_bytes() if place.exists() else here.site.files[f"/files/{pin.filename}"][1]
        assert pin.sha256 == sha256(body)
    assert {name: pin.role for name, pin in pins.items()} == {
        "torch": Role.TORCH,
        "filelock": Role.DEPENDENCY,
        "fla-core": Role.KERNEL,
        "einops": Role.DEPENDENCY,
    }
    assert pins["fla-core"].files_sha256
    assert (lock.target.python, lock.target.glibc, lock.admits_launch) == ("3.11", "2.28", False)
    assert [p.served_by for p in lock.fast_paths] == ["", "fla-core 0.6.0"]
    assert ("dtype", "bfloat16 (assumed)") in lock.intent


def test_a_foreign_lock_pins_the_files_of_the_other_machine(here: World) -> None:
    lock = here.lock("gh200,torch=2.13.0,python=3.12")
    torch = next(pin for pin in lock.pins if pin.name == "torch")
    assert torch.filename == "torch-2.13.0-cp312-cp312-manylinux_2_28_aarch64.whl"
    assert (lock.target.machine, lock.target.driver, lock.target.capabilities) == ("aarch64", "580", ("9.0",))
    assert any(pin.name == "triton" and pin.version == "3.7.1" for pin in lock.pins)
    assert lock.admits_launch


def test_both_engines_come_to_the_same_lock_and_the_same_inputs_to_the_same_bytes(here: World) -> None:
    texts = {dumps(here.lock(CPU, engine=engine)) for engine in (Engine.PIP_TOOLS, Engine.UV, Engine.UV)}
    assert len(texts) == 1


def test_an_official_wheel_is_pinned_by_its_url_with_the_version_of_its_metadata(here: World, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    name = OFFICIAL.format(machine="x86_64")
    body = wheel("causal-conv1d", "1.7.0", requires=("torch",))
    (folder / name).write_bytes(body)
    lock = here.lock("a100,torch=2.13.0,python=3.11", needs=CONV, folders=(folder,), engine=Engine.UV)
    conv = next(pin for pin in lock.pins if pin.name == "causal-conv1d")
    assert (conv.direct, conv.version, conv.filename, conv.sha256) == (True, "1.7.0", name, sha256(body))
    assert conv.url == (folder / name).as_uri()


def test_an_extra_index_is_named_in_the_pins_that_come_from_it(here: World) -> None:
    name = "causal_conv1d-1.6.2.post1+cu.13.0.torch.2.13-cp311-cp311-manylinux_2_28_x86_64.whl"
    body = wheel("causal-conv1d", "1.6.2.post1+cu.13.0.torch.2.13", requires=("torch==2.13.*",))
    here.site.put_index("causal-conv1d", {name: body})
    page = here.site.files.pop("/simple/causal-conv1d/")
    here.site.files["/gpu/causal-conv1d/"] = page
    index = f"{here.site.url}/gpu/"
    lock = here.lock("a100,torch=2.13.0,python=3.11", needs=CONV, indexes=(index,), engine=Engine.UV)
    conv = next(pin for pin in lock.pins if pin.name == "causal-conv1d")
    assert (conv.index, conv.version, conv.direct) == (index, "1.6.2.post1+cu.13.0.torch.2.13", False)
    assert {pin.index for pin in lock.pins if pin.name != "causal-conv1d"} == {""}


def test_no_set_is_a_definite_no_that_names_the_missing_tuple_and_the_way_out(here: World) -> None:
    resolution = here.resolution("h100,torch=2.15.0,python=3.13", needs=CONV, market=Market(known=matrix()))
    with pytest.raises(NoSetError) as raised:
        here.lock("h100,torch=2.15.0,python=3.13", resolution=resolution)
    assert raised.value.exit_code == 1
    assert raised.value.message == (
        "no build of causal_conv1d for torch 2.15.0+cu132, new C++ ABI, cp313, linux x86_64"
    )
    assert "--allow-source-build serves all" in (raised.value.hint or "")
    nothing = dataclasses.replace(resolution, torch=None)
    assert "no torch fits target h100" in no_set(nothing, target("h100")).message


def test_a_file_with_another_hash_than_the_known_one_is_refused(here: World, tmp_path: Path) -> None:
    resolution = here.resolution(CPU)
    [choice] = resolution.choices
    [accepted] = choice.accepted
    other = dataclasses.replace(accepted, candidate=dataclasses.replace(accepted.candidate, sha256="0" * 64))
    changed = dataclasses.replace(resolution, choices=(dataclasses.replace(choice, accepted=(other,)),))
    with pytest.raises(UndeterminedError, match=r"fla_core-0\.6\.0.*has sha256 .*, 0{64} is known for it"):
        here.lock(CPU, resolution=changed, engine=Engine.UV)
    assert not list(tmp_path.glob("*.lock"))


def test_an_index_that_lists_a_wrong_hash_is_named(here: World) -> None:
    path = "/simple/einops/"
    page = json.loads(here.site.files[path][1])
    page["files"][0]["hashes"]["sha256"] = "1" * 64
    here.site.put(path, json.dumps(page), "application/vnd.pypi.simple.v1+json")
    # pip-tools reads the wheel to see what it requires, and finds that it is not what the index says.
    with pytest.raises(ToolError, match=r"(?i)hash"):
        here.lock(CPU, engine=Engine.PIP_TOOLS)


def test_a_truncated_wheel_is_named(here: World) -> None:
    here.site.special["/files/einops-0.8.1-py3-none-any.whl"] = cut_off(wheel("einops", "0.8.1"))
    with pytest.raises((ToolError, UndeterminedError), match="einops"):
        here.lock(CPU, engine=Engine.PIP_TOOLS)


@pytest.mark.parametrize("behaviour", [broken, html], ids=["down", "html"])
def test_an_index_that_fails_while_compiling_is_an_error(here: World, behaviour: object) -> None:
    here.site.special["/simple/einops/"] = behaviour  # type: ignore[assignment]
    with pytest.raises((UndeterminedError, ToolError), match="einops"):
        here.lock(CPU, engine=Engine.UV)


def test_requirements_that_exclude_each_other_are_an_error(here: World) -> None:
    body = wheel("fla-core", "0.6.0", files={"fla/__init__.py": ""}, requires=("einops>=99",))
    here.site.put_index("fla-core", {"fla_core-0.6.0-py3-none-any.whl": body})
    with pytest.raises(ToolError, match="einops"):
        here.lock(CPU, engine=Engine.UV)


def test_a_package_with_nothing_but_an_sdist_is_never_built(here: World) -> None:
    here.site.put_index("einops", {"einops-0.8.1.tar.gz": b"never opened"})
    for engine in Engine:
        with pytest.raises(ToolError, match="einops"):
            here.lock(CPU, engine=engine)
    assert not any(path.endswith(".tar.gz") for _, path in here.site.requests)


def test_a_source_build_is_pinned_with_what_it_takes(here: World) -> None:
    here.site.put_index("causal-conv1d", {"causal_conv1d-1.7.0.tar.gz": b"the sdist"})
    lock = here.lock(
        "h100,torch=2.13.0,python=3.11",
        needs=(*FLA, *CONV),
        options=Options(allow_source_build=True),
        engine=Engine.UV,
    )
    [source] = lock.sources
    assert (source.name, source.version, source.sha256) == ("causal-conv1d", "1.7.0", sha256(b"the sdist"))
    assert (source.nvcc, source.cxx, source.archs, source.arch_variable) == ("13.0", 17, ("9.0",), "")
    assert "setuptools" in source.requires
    assert "causal-conv1d" not in {pin.name for pin in lock.pins}
    assert lock.fast_paths[0].served_by == "causal-conv1d 1.7.0"


def test_a_hub_kernel_is_pinned_by_commit_and_the_hash_of_every_file(here: World, tmp_path: Path) -> None:
    name = "torch213-cxx11-cu130-x86_64-linux"
    hub = FakeHub(here.site)
    repository = "kernels-community/causal-conv1d"
    files = variant("causal-conv1d", name, archs=("9.0",))
    commit = hub.publish(repository, {name: files})
    client = Hub(hub.url, Http(timeout=5))
    need = Need(
        package="causal_conv1d",
        symbols=("causal_conv1d_fn",),
        providers=(Provider(distribution=repository, kind=Kind.HUB),),
    )
    source = HubSource(client, versions={repository: 1}, wanted=lambda _name: True)
    here.site.put_index("kernels", {"kernels-0.17.2-py3-none-any.whl": wheel("kernels", "0.17.2")})
    resolution = here.resolution(
        "h100,torch=2.13.0,python=3.11",
        needs=(need,),
        market=Market(known=matrix(), candidates=source.find(repository)),
        transformers="5.22.0",
    )
    lock = here.lock("h100,torch=2.13.0,python=3.11", resolution=resolution, hub=client, engine=Engine.UV)
    [pin] = lock.hub
    assert (pin.repository, pin.version, pin.commit, pin.variant) == (repository, 1, commit, name)
    assert {f.path: f.sha256 for f in pin.files} == {p: sha256(str(d).encode()) for p, d in files.items()}
    assert any(p.name == "kernels" and p.version == "0.17.2" for p in lock.pins)
    assert write_lock(lock, tmp_path / "kernelguard.lock")
