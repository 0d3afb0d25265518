"""The order of preference is total and does not depend on how things came in; neither does the resolution."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from kernelguard.observe.targets import target
from kernelguard.resolve import Market, matrix, resolve
from kernelguard.resolve.matrix import Matrix
from kernelguard.resolve.rank import rank_candidates, rank_torch
from kernelguard.resolve.values import BuiltFor, Candidate, Kind, Known
from resolve.cases import TRANSFORMERS, needs

VERSIONS = st.sampled_from(["1.0", "1.0.post1", "1.1rc1", "2.0", "2.0+cu12torch2.8", "10.0"]).map(Version)
CANDIDATES = st.builds(
    Candidate,
    distribution=st.sampled_from(["a", "b"]),
    version=VERSIONS,
    kind=st.sampled_from(Kind),
    source=st.sampled_from(["package index", "folder x"]),
    known=st.sampled_from(Known),
    url=st.sampled_from(["", "https://x/1", "https://x/2"]),
    sha256=st.sampled_from(["", "0" * 64]),
    built_for=st.none()
    | st.builds(
        BuiltFor, torch=st.just(Version("2.8")), cuda=st.sampled_from(["12", "12.8", "13.0"]).map(Version) | st.none()
    ),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(CANDIDATES, max_size=8), st.randoms(use_true_random=False))
def test_ranking_of_candidates_is_total(candidates: list[Candidate], shuffle: random.Random) -> None:
    ranked = rank_candidates(candidates)
    other = list(candidates)
    shuffle.shuffle(other)
    assert rank_candidates(other) == ranked
    assert sorted(map(repr, ranked)) == sorted(map(repr, candidates))


@settings(max_examples=50, deadline=None)
@given(st.lists(CANDIDATES, min_size=2, max_size=8))
def test_a_prebuilt_newer_candidate_is_never_behind_an_older_one(candidates: list[Candidate]) -> None:
    ranked = [c for c in rank_candidates(candidates) if c.kind is Kind.WHEEL]
    public = [Version(c.version.public) for c in ranked]
    assert public == sorted(public, reverse=True)


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_ranking_of_torch_is_total(shuffle: random.Random, on_cpu: bool) -> None:
    builds = list(matrix().torch)
    ranked = rank_torch(builds, on_cpu=on_cpu)
    shuffle.shuffle(builds)
    assert rank_torch(builds, on_cpu=on_cpu) == ranked
    assert [b.version for b in ranked] == sorted((b.version for b in builds), reverse=True)


@settings(max_examples=6, deadline=None)
@given(st.integers(), st.sampled_from(["h100,torch=2.12", "a100,torch=2.10.0", "cpu", "gh200"]))
def test_the_resolution_does_not_depend_on_the_order_of_what_is_known(seed: int, spec: str) -> None:
    shuffle = random.Random(seed)  # noqa: S311
    known = matrix()
    expected = resolve(needs=needs(), environment=target(spec), transformers=TRANSFORMERS)
    packages = list(known.packages.items())
    torch = list(known.torch)
    shuffle.shuffle(packages)
    shuffle.shuffle(torch)
    other = Matrix(torch=tuple(torch), drivers=known.drivers, hub=known.hub, packages=dict(packages))
    candidates = [c for facts in known.packages.values() for c in facts.candidates]
    shuffle.shuffle(candidates)
    market = Market(known=other, candidates=tuple(candidates[:50]))
    mine = resolve(needs=needs(), environment=target(spec), transformers=TRANSFORMERS, market=market)
    assert (mine.torch, mine.pins, mine.missing, mine.costs) == (
        expected.torch,
        expected.pins,
        expected.missing,
        expected.costs,
    )


@pytest.mark.thorough
def test_the_resolution_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from resolve.cases import answer; "
        "r = answer('h100', 'b200'); "
        "print(hashlib.sha256(repr((r.torch, r.pins, r.costs, r.trace, r.notes)).encode()).hexdigest())"
    )
    tests = str(Path(__file__).resolve().parents[1])
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, tests],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1
