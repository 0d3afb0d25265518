"""Sources against real servers: what they list, and what is said when they are down, slow, wrong or damaged."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from kernelguard.errors import InputError, UndeterminedError
from kernelguard.sources.folder import FolderSource
from kernelguard.sources.git import GitSource
from kernelguard.sources.http import Http, MissingError, shown
from kernelguard.sources.hub import Hub, HubSource
from kernelguard.sources.index import IndexSource
from kernelguard.sources.metadata import read_metadata
from kernelguard.sources.release import Presence, look
from kernelguard.sources.values import Kind, Known
from sources.fakehub import FakeHub, variant
from sources.servers import (
    Responder,
    Site,
    broken,
    cut_off,
    dripping,
    forbidden,
    html,
    sha256,
    silent,
    site,
    wheel,
)


@pytest.fixture
def served() -> Iterator[Site]:
    with site() as running:
        yield running


QUICK = Http(timeout=0.5, attempts=1)


def never(_distribution: str, _version: str) -> bool:
    return False


def test_an_index_lists_wheels_with_hashes_and_reads_what_they_require(served: Site) -> None:
    body = wheel("fla-core", "0.7.0", requires=("einops", "torch>=2.7 ; extra == 'cuda'"))
    served.put_index(
        "fla-core", {"fla_core-0.7.0-py3-none-any.whl": body, "fla_core-0.7.0.tar.gz": b"x", "README": b""}
    )
    wheel_found, sdist = IndexSource(f"{served.url}/simple/", QUICK).find("fla-core")
    if wheel_found.kind is Kind.SDIST:
        wheel_found, sdist = sdist, wheel_found
    assert (wheel_found.known, str(wheel_found.version)) == (Known.SEEN, "0.7.0")
    assert wheel_found.sha256 == sha256(body)
    assert [str(r) for r in wheel_found.requires] == ["einops"]
    assert (sdist.kind, sdist.source) == (Kind.SDIST, "package index")


def test_an_extra_index_with_local_versions_is_read_and_named_in_the_pin(served: Site) -> None:
    name = "causal_conv1d-1.6.2.post1+cu.13.0.torch.2.12-cp312-cp312-manylinux_2_28_x86_64.whl"
    served.put_index("causal-conv1d", {name: b"not read"})
    [found] = IndexSource(f"{served.url}/simple/", QUICK, extra=True, compiled={"causal-conv1d"}).find("causal-conv1d")
    assert found.built_for is not None
    assert (found.built_for.torch, found.built_for.cuda) == (Version("2.12"), Version("13.0"))
    assert found.index_url == f"{served.url}/simple/"
    assert found.glibc == Version("2.28")


def test_a_compiled_wheel_that_says_nothing_is_marked_as_unstated(served: Site) -> None:
    served.put_index("causal-conv1d", {"causal_conv1d-1.7.0-cp312-cp312-linux_x86_64.whl": b""})
    source = IndexSource(f"{served.url}/simple/", QUICK, compiled={"causal-conv1d"}, needs_metadata=never)
    [found] = source.find("causal-conv1d")
    assert found.built_for is not None
    assert found.built_for.torch is None


def test_an_html_index_is_read_too(served: Site) -> None:
    page = (
        '<a href="/files/a-1.0-py3-none-any.whl#sha256=' + "1" * 64 + '" data-requires-python="&gt;=3.11">a</a>'
        '<a href="/files/a-0.9%2Bcu130-py3-none-any.whl" data-yanked="broken">a</a>'
    )
    served.put("/simple/a/", page, "text/html")
    new, old = IndexSource(f"{served.url}/simple", QUICK, needs_metadata=never).files("a")
    assert (new.sha256, new.requires_python, new.yanked) == ("1" * 64, ">=3.11", "")
    assert (old.filename, old.yanked) == ("a-0.9+cu130-py3-none-any.whl", "broken")


def test_a_folder_laid_out_as_an_index_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a-1.0-py3-none-any.whl").write_bytes(wheel("a", "1.0"))
    source = IndexSource(tmp_path.as_uri(), QUICK, extra=True, needs_metadata=never)
    assert [f.filename for f in source.files("a")] == ["a-1.0-py3-none-any.whl"]
    assert source.files("b") == ()


def test_what_an_index_does_not_have_is_nothing_not_an_error(served: Site) -> None:
    assert IndexSource(f"{served.url}/simple", QUICK).find("no-such-thing") == ()


def test_yanked_files_say_why(served: Site) -> None:
    name = "flash_attn_3-0.0.0-py3-none-any.whl"
    served.put_index("flash-attn-3", {name: wheel("flash-attn-3", "0.0.0")}, **{name: {"yanked": "Empty release"}})
    [found] = IndexSource(f"{served.url}/simple", QUICK).find("flash-attn-3")
    assert found.yanked == "Empty release"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (html, "is no page of a package index: text/html that lists no files"),
        (broken, "answered HTTP 503"),
        (forbidden, "answered HTTP 403"),
        (silent, "did not answer within 0.5 s"),
        (dripping, "did not answer in time"),
        (cut_off(b"{" * 1000), "broke off"),
    ],
    ids=["html", "down", "forbidden", "silent", "dripping", "cut-off"],
)
def test_an_index_that_misbehaves_is_named_and_never_taken_for_empty(
    served: Site, behaviour: Responder, expected: str
) -> None:
    served.special["/simple/fla-core/"] = behaviour
    with pytest.raises(UndeterminedError, match=expected) as raised:
        IndexSource(f"{served.url}/simple", QUICK).find("fla-core")
    assert served.url in str(raised.value)
    assert raised.value.exit_code == 3


def test_an_index_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(UndeterminedError, match="cannot be reached") as raised:
        IndexSource(f"http://127.0.0.1:{port}/simple", QUICK).find("fla-core")
    assert "--find-links" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "body", ["{}", "[]", "no json", '{"files": 1}', '{"meta": {"api-version": "2.0"}, "files": []}'], ids=repr
)
def test_json_that_is_no_index_is_refused(served: Site, body: str) -> None:
    served.put("/simple/a/", body, "application/vnd.pypi.simple.v1+json")
    with pytest.raises(UndeterminedError, match=r"PEP 691|speaks version"):
        IndexSource(f"{served.url}/simple", QUICK).find("a")


def test_a_server_fault_is_asked_again_and_a_no_is_not(served: Site) -> None:
    served.special["/a"] = broken
    served.special["/b"] = forbidden
    for path, times in (("/a", 2), ("/b", 1), ("/c", 1)):
        served.requests.clear()
        with pytest.raises(UndeterminedError):
            Http(timeout=2, attempts=2).get(f"{served.url}{path}")
        assert len(served.requests) == times


def test_an_answer_that_is_too_large_is_refused(served: Site) -> None:
    url = served.put("/big", b"x" * 1000)
    with pytest.raises(UndeterminedError, match="larger than 10 bytes"):
        QUICK.get(url, limit=10)


def test_passwords_are_not_shown() -> None:
    assert shown("https://me:secret@host/simple/") == "https://host/simple/"


def test_only_web_and_file_urls_are_opened() -> None:
    with pytest.raises(UndeterminedError, match="no http, https or file URL"):
        QUICK.get("ftp://host/x")


# -- metadata ---------------------------------------------------------------------------------------------------------


def test_metadata_comes_from_the_file_beside_the_wheel_if_that_is_promised(served: Site) -> None:
    url = served.put("/files/a-1.0-py3-none-any.whl", b"never read")
    served.put("/files/a-1.0-py3-none-any.whl.metadata", "Name: a\nVersion: 1.0\nRequires-Dist: b\n")
    metadata = read_metadata(url, QUICK, promised=True)
    assert (metadata.how, metadata.requires, metadata.version) == ("pep658", ("b",), "1.0")


def test_else_from_the_wheel_by_ranges_and_a_broken_promise_is_forgiven(served: Site) -> None:
    import random

    noise = random.Random(1).randbytes(400_000)  # noqa: S311
    big = wheel("a", "1.0", files={"a/data.txt": noise.hex()}, requires=("b",))
    url = served.put("/files/a-1.0-py3-none-any.whl", big)
    metadata = read_metadata(url, QUICK, promised=True)
    assert (metadata.how, metadata.requires) == ("ranges", ("b",))
    fetched = [path for method, path in served.requests if method == "GET" and path.endswith(".whl")]
    assert len(big) > 200_000
    assert 1 <= len(fetched) <= 3


def test_metadata_is_fetched_once(served: Site, tmp_path: Path) -> None:
    url = served.put("/files/a-1.0-py3-none-any.whl", wheel("a", "1.0", requires=("b",)))
    for _ in range(2):
        assert read_metadata(url, Http(timeout=2, cache=tmp_path), promised=False).requires == ("b",)
    assert len(served.requests) == 1


def test_a_server_without_ranges_is_named(served: Site) -> None:
    served.ranges = False
    url = served.put("/files/a-1.0-py3-none-any.whl", wheel("a", "1.0"))
    with pytest.raises(UndeterminedError, match="takes no range requests"):
        read_metadata(url, QUICK, promised=False)


def test_a_truncated_wheel_is_named(served: Site) -> None:
    whole = wheel("a", "1.0", files={"a/x.py": "x" * 50_000})
    url = served.put("/files/a-1.0-py3-none-any.whl", whole[: len(whole) // 2])
    with pytest.raises(UndeterminedError, match="cut off"):
        read_metadata(url, QUICK, promised=False)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_hashed_and_opened(tmp_path: Path) -> None:
    name = "causal_conv1d-1.7.0+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
    body = wheel("causal-conv1d", "1.7.0", requires=("torch",))
    (tmp_path / name).write_bytes(body)
    (tmp_path / "other-1.0-py3-none-any.whl").write_bytes(b"broken, but not asked for")
    [found] = FolderSource(tmp_path).find("causal-conv1d")
    assert (found.sha256, found.direct, found.size) == (sha256(body), True, len(body))
    assert found.url == (tmp_path / name).resolve().as_uri()
    assert str(found.version) == "1.7.0+cu12torch2.8cxx11abitrue"


def test_a_wheel_in_a_folder_may_say_its_torch_in_its_metadata(tmp_path: Path) -> None:
    body = wheel("causal-conv1d", "1.7.0", requires=("torch==2.12.*",))
    (tmp_path / "causal_conv1d-1.7.0-cp312-cp312-linux_x86_64.whl").write_bytes(body)
    [found] = FolderSource(tmp_path, compiled=frozenset({"causal-conv1d"})).find("causal-conv1d")
    assert found.built_for is not None
    assert found.built_for.torch == Version("2.12")


@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped", "empty"])
def test_a_damaged_wheel_in_a_folder_is_named(tmp_path: Path, damage: str) -> None:
    whole = wheel("a", "1.0", files={"a/x.py": "y" * 5_000})
    flipped = bytearray(whole)
    flipped[whole.index(b"a/x.py") + 20] ^= 0xFF
    bodies = {"cut": whole[:-200], "garbage": b"hello", "flipped": bytes(flipped), "empty": b""}
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(bodies[damage])
    with pytest.raises(InputError, match=r"a-1\.0-py3-none-any\.whl is no"):
        FolderSource(tmp_path).find("a")


def test_a_folder_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        FolderSource(tmp_path / "nope")


# -- release assets ---------------------------------------------------------------------------------------------------


def test_an_asset_is_there_or_not_or_nobody_knows(served: Site) -> None:
    there = served.put("/releases/x.whl", b"12345")
    served.special["/releases/login.whl"] = html
    served.special["/releases/down.whl"] = broken
    assert (look(there, QUICK).presence, look(there, QUICK).size) == (Presence.PRESENT, 5)
    assert look(f"{served.url}/releases/y.whl", QUICK).presence is Presence.ABSENT
    for name in ("login", "down"):
        asset = look(f"{served.url}/releases/{name}.whl", QUICK)
        assert asset.presence is Presence.UNVERIFIED
        assert asset.detail
    assert {method for method, _ in served.requests} == {"HEAD"}


# -- git --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> tuple[str, str]:
    """A repository's URL and its only commit, which has the annotated tag v1."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    git("commit", "--quiet", "--allow-empty", "-m", "first")
    git("tag", "-a", "v1", "-m", "first")
    return tmp_path.as_uri(), git("rev-parse", "HEAD")


@pytest.mark.parametrize("revision", ["v1", "main"])
def test_a_tag_or_branch_is_pinned_to_its_commit(repository: tuple[str, str], revision: str) -> None:
    url, commit = repository
    [found] = GitSource(distribution="x", url=url, revision=revision).find("x")
    assert (found.kind, found.commit, found.url) == (Kind.GIT, commit, f"git+{url}@{commit}")


def test_a_commit_is_taken_as_it_is_without_asking() -> None:
    assert GitSource(distribution="x", url="https://nowhere.invalid/x", revision="a" * 40).commit() == "a" * 40


def test_a_revision_that_is_not_there_is_named(repository: tuple[str, str]) -> None:
    with pytest.raises(InputError, match="no revision 'v9'"):
        GitSource(distribution="x", url=repository[0], revision="v9").commit()


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UndeterminedError, match="cannot be read"):
        GitSource(distribution="x", url=(tmp_path / "nope").as_uri(), revision="v1").commit()


# -- the kernel hub ---------------------------------------------------------------------------------------------------

LINUX = "torch212-cxx11-cu130-x86_64-linux"


def test_variants_of_a_version_with_commit_and_archs(served: Site) -> None:
    hub = FakeHub(served)
    commit = hub.publish(
        "org/conv", {LINUX: variant("conv", LINUX, archs=("9.0", "10.0")), "torch-cuda": variant("conv", "torch-cuda")}
    )
    source = HubSource(Hub(hub.url, QUICK), versions={"org/conv": None}, wanted=lambda name: "cu130" in name)
    noarch, linux = sorted(source.find("org/conv"), key=lambda c: c.filename)
    assert (linux.filename, linux.commit, str(linux.version), linux.kind) == (LINUX, commit, "1", Kind.HUB)
    assert linux.built_for is not None
    assert linux.built_for.archs == ("9.0", "10.0")
    assert noarch.built_for is not None
    assert noarch.built_for.archs is None
    assert source.find("org/other") == ()


def test_files_of_a_variant_are_hashed_and_held_to_it(served: Site) -> None:
    hub = FakeHub(served)
    files = variant("conv", LINUX)
    commit = hub.publish("org/conv", {LINUX: files})
    client = Hub(hub.url, QUICK)
    pinned = client.files("org/conv", commit, LINUX)
    assert {f.path: f.sha256 for f in pinned} == {p: sha256(str(d).encode()) for p, d in files.items()}
    assert client.fetch("org/conv", commit, LINUX, pinned[0])
    served.special[f"/kernels/org/conv/resolve/{commit}/build/{LINUX}/__init__.py"] = lambda h: h.answer(  # type: ignore[attr-defined]
        200, "text/plain", b"x" * pinned[0].size
    )
    with pytest.raises(UndeterminedError, match="is pinned"):
        client.fetch("org/conv", commit, LINUX, next(f for f in pinned if f.path == "__init__.py"))


def test_large_files_have_their_digest_listed(served: Site) -> None:
    path = f"/api/kernels/org/conv/tree/{'c' * 40}"
    row = {"type": "file", "path": f"build/{LINUX}/x.so", "size": 10**9, "oid": "0" * 40, "lfs": {"oid": "d" * 64}}
    served.put(path, json.dumps([row]), "application/json")
    [file] = Hub(served.url, QUICK).files("org/conv", "c" * 40, LINUX)
    assert (file.path, file.sha256, file.size) == ("x.so", "d" * 64, 10**9)
    assert len(served.requests) == 1


def test_a_hub_that_is_down_is_not_a_hub_without_the_repository(served: Site) -> None:
    assert Hub(served.url, QUICK).commits("org/none") == {}
    served.special["/api/kernels/org/none/refs"] = broken
    with pytest.raises(UndeterminedError, match="503"):
        Hub(served.url, QUICK).commits("org/none")
    served.special["/api/kernels/org/none/refs"] = html
    with pytest.raises(UndeterminedError, match="no JSON"):
        Hub(served.url, QUICK).commits("org/none")


def test_missing_is_its_own_kind_of_answer(served: Site) -> None:
    with pytest.raises(MissingError, match="does not exist"):
        QUICK.get(f"{served.url}/nope")
