"""What changed between two documents: everything that changed, and the likeliest reason first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelguard.errors import InputError
from kernelguard.matrix import kernel_packages
from kernelguard.report.difference import Document, Suspicion, compare, load_document

ENVIRONMENT: dict[str, Any] = {
    "schema": 1,
    "kind": "environment",
    "captured_from": "/a/bin/python",
    "torch": "2.12.1+cu130",
    "triton": "3.7.1",
    "driver": "580.159",
    "python": "3.12.3",
    "gpus": [{"name": "NVIDIA H100", "capability": [9, 0], "memory_bytes": 1}],
    "distributions": [
        {"name": "flash-linear-attention", "version": "0.6.0", "location": "/a", "top_level": []},
        {"name": "numpy", "version": "2.4.0", "location": "/a", "top_level": []},
    ],
    "variables": {"USE_HUB_KERNELS": "NO"},
    "problems": ["something in /a"],
}


def document(content: dict[str, Any], source: str = "a.json") -> Document:
    return Document(source=source, kind=content["kind"], content=content)


def changed(**changes: Any) -> list[tuple[str, str | None, str | None, Suspicion]]:
    other = document({**ENVIRONMENT, **changes}, "b.json")
    found = compare(document(ENVIRONMENT), other, kernel_packages().values())
    return [(d.subject, d.a, d.b, d.suspicion) for d in found]


def test_nothing_changed_where_only_places_differ() -> None:
    assert changed(captured_from="/b/bin/python", problems=[]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch": "2.11.0+cu128"}, ("torch", "2.12.1+cu130", "2.11.0+cu128", Suspicion.STACK)),
        ({"triton": None}, ("triton", "3.7.1", None, Suspicion.KERNEL)),
        ({"driver": "570.1"}, ("driver", "580.159", "570.1", Suspicion.SYSTEM)),
        ({"python": "3.11.7"}, ("python", "3.12.3", "3.11.7", Suspicion.OTHER)),
        ({"variables": {}}, ("variable USE_HUB_KERNELS", "NO", None, Suspicion.SYSTEM)),
        ({"gpus": []}, ("gpus", "NVIDIA H100 (sm_90)", "", Suspicion.STACK)),
    ],
)
def test_each_difference_is_named_with_both_sides(changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert changed(**changes) == [expected]


def test_kernels_come_before_everything_that_only_surrounds_them() -> None:
    distributions = [
        {"name": "flash-linear-attention", "version": "0.4.1"},
        {"name": "numpy", "version": "1.26.0"},
    ]
    subjects = [row[0] for row in changed(distributions=distributions, driver="1", python="3.11", torch="2.9")]
    assert subjects == ["distribution flash-linear-attention", "torch", "driver", "distribution numpy", "python"]


def test_two_kinds_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="of kind check"):
        compare(document(ENVIRONMENT), document({"kind": "check"}, "b.json"), ())


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "not JSON"), ("[]", "not a document"), ('{"kind": "environment", "schema": 99}', "99"), ("{}", "not a doc")],
)
def test_unusable_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        load_document(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_document(tmp_path / "nothing.json")


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ENVIRONMENT))
    assert load_document(path).content == ENVIRONMENT
