"""From real servers and folders to a resolution: what sources have is weighed with what the matrix knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from kernelguard.errors import UndeterminedError
from kernelguard.observe.targets import target
from kernelguard.resolve import Market, matrix, resolve
from kernelguard.resolve.hub_options import window_problem
from kernelguard.resolve.market import gather, torch_build, unverified, verified
from kernelguard.resolve.values import Known, Rejected, RejectionCode, Resolution
from kernelguard.sources.folder import FolderSource
from kernelguard.sources.http import Http
from kernelguard.sources.hub import Hub, HubSource
from kernelguard.sources.index import IndexSource
from kernelguard.sources.values import BuiltFor, Candidate, Kind, Source
from resolve.cases import needs
from sources.fakehub import FakeHub, variant
from sources.servers import Site, broken, sha256, site, wheel

QUICK = Http(timeout=2, attempts=1)
COMPILED = frozenset({"causal-conv1d", "mamba-ssm", "flash-attn"})


@pytest.fixture
def served() -> Iterator[Site]:
    with site() as running:
        yield running


def ask(spec: str, *sources: Source, transformers: str = "5.24.0", hub: bool = False) -> Resolution:
    wanted = needs(hub=hub)
    market = gather(wanted, matrix(), sources)
    return resolve(needs=wanted, environment=target(spec), transformers=Version(transformers), market=market)


def test_a_wheel_in_a_folder_makes_the_newest_torch_possible(tmp_path: Path) -> None:
    name = "causal_conv1d-1.7.0+cu13torch2.15cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
    (tmp_path / name).write_bytes(wheel("causal-conv1d", "1.7.0"))
    found = ask("h100", FolderSource(tmp_path, compiled=COMPILED))
    assert found.torch is not None
    assert str(found.torch.version) == "2.15.0"
    [pin] = [p for p in found.pins if p.distribution == "causal-conv1d"]
    assert (pin.filename, pin.sha256) == (name, sha256((tmp_path / name).read_bytes()))


def test_a_wheel_that_does_not_say_its_torch_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d-1.7.0-cp312-cp312-linux_x86_64.whl").write_bytes(wheel("causal-conv1d", "1.7.0"))
    found = ask("h100,torch=2.15.0", FolderSource(tmp_path, compiled=COMPILED))
    assert not found.complete
    [no] = [n for n in found.trace if isinstance(n, Rejected) and n.code is RejectionCode.UNSTATED]
    assert "does not say for which torch" in no.reason


def test_an_extra_index_is_preferred_to_what_only_others_report(served: Site) -> None:
    name = "causal_conv1d-1.6.2.post1+cu.13.0.torch.2.12-cp312-cp312-manylinux_2_28_x86_64.whl"
    served.put_index("causal-conv1d", {name: b""})
    found = ask("h100", IndexSource(f"{served.url}/simple/", QUICK, extra=True, compiled=COMPILED))
    [pin] = [p for p in found.pins if p.distribution == "causal-conv1d"]
    assert (pin.known, pin.index_url, pin.sha256) == (Known.SEEN, f"{served.url}/simple/", sha256(b""))
    assert not [text for text in unverified(found) if "causal" in text]


def test_what_nobody_has_seen_is_said() -> None:
    [text] = [t for t in unverified(ask("h100")) if "causal-conv1d" in t]
    assert "reported and was not seen" in text


def test_a_source_that_is_down_decides_nothing(served: Site) -> None:
    served.special["/simple/causal-conv1d/"] = broken
    with pytest.raises(UndeterminedError, match="503"):
        ask("h100", IndexSource(f"{served.url}/simple/", QUICK))


def test_a_cpu_torch_in_a_folder_is_taken_for_a_cpu_target(tmp_path: Path) -> None:
    name = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    (tmp_path / name).write_bytes(wheel("torch", "2.13.0+cpu"))
    found = ask("cpu,torch=2.13.0,python=3.11", FolderSource(tmp_path))
    assert found.torch is not None
    assert (found.torch.channel, found.torch.cuda, found.torch.triton) == ("folder", None, None)
    assert found.torch.url.endswith(name.replace("+", "%2B"))
    assert found.torch.sha256 == sha256((tmp_path / name).read_bytes())


def test_a_torch_of_an_unknown_kind_is_not_guessed_at() -> None:
    rocm = Candidate(
        distribution="torch",
        version=Version("2.12.1+rocm7.1"),
        kind=Kind.WHEEL,
        source="folder",
        known=Known.SEEN,
        machines=("x86_64",),
        url="file:///x.whl",
    )
    assert torch_build(rocm, matrix()) is None
    cuda = torch_build(dataclasses.replace(rocm, version=Version("2.12.1+cu126")), matrix())
    assert cuda is not None
    # Of another CUDA than the index build's nobody read the archs.
    assert (str(cuda.cuda), cuda.archs) == ("12.6", None)


def planned(site_url: str, version: str) -> Candidate:
    base = next(c for c in matrix().packages["causal-conv1d"].candidates if c.direct)
    made = BuiltFor(torch=Version("2.10"), cuda=Version("12"), cxx11_abi=True)
    name = f"causal_conv1d-{version}-cp312-cp312-linux_x86_64.whl"
    return dataclasses.replace(
        base,
        version=Version(f"{version}+cu12torch2.10cxx11abitrue"),
        filename=name,
        url=f"{site_url}/{name}",
        pythons=("cp312",),
        machines=("x86_64",),
        glibc=None,
        known=Known.PLANNED,
        built_for=made,
    )


def test_a_planned_asset_that_is_not_there_is_passed_over_for_one_that_is(served: Site) -> None:
    absent, present = planned(served.url, "9.1"), planned(served.url, "9.0")
    served.put(f"/{present.filename}", b"123")
    wanted = needs()
    market = Market(known=matrix(), candidates=(absent, present))

    def again(market: Market) -> Resolution:
        return resolve(needs=wanted, environment=target("a100,torch=2.10.0"), market=market)

    assert absent in again(market).pins
    found, _ = verified(again, market, QUICK)
    [pin] = [p for p in found.pins if p.distribution == "causal-conv1d"]
    assert (pin.filename, pin.known, pin.size) == (present.filename, Known.SEEN, 3)


def test_an_asset_whose_server_is_down_stays_unverified(served: Site) -> None:
    unknown = planned(served.url, "9.1")
    served.special[f"/{unknown.filename}"] = broken
    market = Market(known=matrix(), candidates=(unknown,))
    found, _ = verified(
        lambda m: resolve(needs=needs(), environment=target("a100,torch=2.10.0"), market=m), market, QUICK
    )
    assert unknown in found.pins
    assert any(unknown.filename in text for text in unverified(found))


def reported(index_url: str, version: str) -> Candidate:
    made = BuiltFor(torch=Version("2.13"), cuda=Version("13.0"))
    return Candidate(
        distribution="causal-conv1d",
        version=Version(f"{version}+cu.13.0.torch.2.13"),
        kind=Kind.WHEEL,
        source="some index",
        known=Known.REPORTED,
        index_url=index_url,
        pythons=("cp311", "cp312"),
        machines=("x86_64",),
        built_for=made,
    )


def test_what_an_index_is_reported_to_have_is_held_against_what_it_has(served: Site) -> None:
    index = f"{served.url}/simple/"
    name = "causal_conv1d-9.0+cu.13.0.torch.2.13-cp312-cp312-manylinux_2_28_x86_64.whl"
    served.put_index("causal-conv1d", {name: b"123", name.replace("cp312", "cp311"): b"456"})
    wanted = needs()
    market = Market(known=matrix(), candidates=(reported(index, "9.1"), reported(index, "9.0")))

    def again(market: Market) -> Resolution:
        return resolve(needs=wanted, environment=target("a100,torch=2.13.0"), market=market)

    assert any(str(p.version).startswith("9.1") for p in again(market).pins)
    found, _ = verified(again, market, QUICK)
    [pin] = [p for p in found.pins if p.distribution == "causal-conv1d"]
    assert (pin.filename, pin.known, pin.sha256, pin.index_url) == (name, Known.SEEN, sha256(b"123"), index)


def test_an_index_that_cannot_be_asked_leaves_its_report_unverified(served: Site) -> None:
    served.special["/simple/causal-conv1d/"] = broken
    claim = reported(f"{served.url}/simple/", "9.1")
    market = Market(known=matrix(), candidates=(claim,))
    found, _ = verified(
        lambda m: resolve(needs=needs(), environment=target("a100,torch=2.13.0"), market=m), market, QUICK
    )
    assert claim in found.pins
    assert any("9.1" in text for text in unverified(found))


# -- the hub ----------------------------------------------------------------------------------------------------------

EXACT = "torch213-cxx11-cu130-x86_64-linux"
STABLE = "torch-stable-abi210-cu130-x86_64-linux"
CONV = "kernels-community/causal-conv1d"


def from_hub(served: Site, *names: str, archs: tuple[str, ...] = ("9.0",)) -> HubSource:
    hub = FakeHub(served)
    hub.publish(CONV, {name: variant("causal-conv1d", name, archs=archs) for name in names})
    return HubSource(Hub(hub.url, QUICK), versions={CONV: 1}, wanted=lambda _name: True)


def test_a_hub_build_serves_where_there_is_no_wheel(served: Site) -> None:
    found = ask("h100,torch=2.13.0", from_hub(served, EXACT), transformers="5.22.0", hub=True)
    assert found.complete
    [variant_pin] = [p for p in found.pins if p.distribution == CONV]
    assert variant_pin.filename == EXACT
    assert len(variant_pin.commit) == 40
    # It is loaded through the package `kernels`, so that is pinned to what this transformers accepts.
    assert [str(p.version) for p in found.pins if p.distribution == "kernels"] == ["0.17.2"]


def test_a_transformers_that_accepts_no_published_kernels_is_reported(served: Site) -> None:
    found = ask("h100,torch=2.13.0", from_hub(served, EXACT), transformers="5.24.0", hub=True)
    text = "transformers 5.24.0 accepts kernels<0.19,>=0.18.2, the newest published one is 0.17.2"
    assert not found.complete
    assert any(isinstance(n, Rejected) and n.code is RejectionCode.WINDOW and n.reason == text for n in found.trace)
    assert f"no kernel from the hub can be used: {text}" in found.notes


@pytest.mark.parametrize(("version", "excluded"), [("4.57.6", False), ("5.22.2", False), ("5.23.0", True)])
def test_windows(version: str, excluded: bool) -> None:
    assert bool(window_problem(Version(version), matrix().hub)) is excluded


def test_the_build_that_kernels_would_prefer_decides_even_when_it_does_not_run(served: Site) -> None:
    hub = FakeHub(served)
    hub.publish(
        CONV,
        {
            EXACT: variant("causal-conv1d", EXACT, archs=("9.0",)),
            STABLE: variant("causal-conv1d", STABLE, archs=("8.0",)),
        },
    )
    source = HubSource(Hub(hub.url, QUICK), versions={CONV: 1}, wanted=lambda _name: True)
    found = ask("h100,torch=2.13.0", source, transformers="5.22.0", hub=True)
    assert not found.complete
    mine = [n for n in found.trace if isinstance(n, Rejected) and n.distribution == CONV]
    reasons = {n.candidate: n.reason for n in mine if n.torch == "torch 2.13.0+cu130"}
    assert reasons[STABLE] == f"{STABLE} holds code for 8.0, NVIDIA H100 is 9.0"
    assert reasons[EXACT] == f"kernels prefers {STABLE}"


def test_a_hub_kernel_without_a_right_backward_is_refused() -> None:
    from kernelguard.resolve.hub_options import unusable_hub
    from kernelguard.resolve.request import Request
    from kernelguard.resolve.values import Provider

    request = Request(needs=(), environment=target("h100"), transformers=Version("5.22.0"))
    provider = Provider(distribution="kernels-community/rotary", kind=Kind.HUB)
    reason = unusable_hub(provider, request, matrix().hub)
    assert reason is not None
    assert reason[0] is RejectionCode.NO_BACKWARD
