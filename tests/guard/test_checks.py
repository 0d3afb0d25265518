"""Checks of a rank run side by side where it has the cores for it, and again alone where others took the memory."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from kernelguard.guard import checks
from kernelguard.guard.children import ChildResult
from kernelguard.guard.fingerprint import Report
from kernelguard.guard.ticket import AdmissionNote, Document, Model, Ticket

RIGHT = ({"kind": "case", "case": "ragged", "tensors": []},)
TIGHT = ({"kind": "error", "where": "forward", "type": "OutOfMemoryError", "text": "full", "sort": "memory"},)


@pytest.fixture
def ticket() -> Ticket:
    return Ticket(
        lock=Document("kernelguard.lock", "sha256:" + "a" * 64),
        verdict=Document("verdict.json", "sha256:" + "b" * 64, "gpu"),
        admission=AdmissionNote(admitted=True),
        run_dir="/runs/1",
        level="gpu",
        model=Model("config.json", "bfloat16"),
        probes=tuple({"symbol": name, "cases": [{"name": "ragged"}]} for name in "abcdef"),
    )


@pytest.mark.parametrize(
    ("cores", "ranks", "many"), [(2, "1", 1), (8, "2", 2), (32, "2", 4), (128, "8", 4), (4, "8", 1), (8, "x", 4)]
)
def test_a_rank_uses_its_share_of_the_cores(cores: int, ranks: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert checks.checks_at_once({"LOCAL_WORLD_SIZE": ranks}) == many


def test_several_run_side_by_side_and_each_gets_its_share_of_the_time(
    ticket: Ticket, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, limits, lock = 0, 0, {}, threading.Lock()

    def worker(_name: str, request: dict[str, Any], *, timeout: float, environ: Any) -> ChildResult:
        del environ
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            limits[request["symbol"]] = timeout
        time.sleep(0.2)
        with lock:
            running -= 1
        return ChildResult(records=RIGHT, finished=True, returncode=0)

    monkeypatch.setattr(checks, "run_worker", worker)
    monkeypatch.setattr(checks, "checks_at_once", lambda _: 3)
    report = Report(rank=0, host="a", node=0)
    checks.run_checks(report, ticket, {}, limit_s=60.0)
    assert report.passed == [f"probe of {name}" for name in "abcdef"]
    assert most == 3
    assert limits["a"] == pytest.approx(30.0, abs=1.0), "two rounds"
    assert limits["f"] == pytest.approx(60.0, abs=1.0), "the last one may have all that is left"


def test_what_only_lacked_the_others_memory_is_run_again_alone(ticket: Ticket, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def worker(_name: str, request: dict[str, Any], **_: Any) -> ChildResult:
        symbol = request["symbol"]
        asked.append(symbol)
        tight = symbol == "b" and asked.count("b") == 1
        return ChildResult(records=TIGHT if tight else RIGHT, finished=True, returncode=0)

    monkeypatch.setattr(checks, "run_worker", worker)
    monkeypatch.setattr(checks, "checks_at_once", lambda _: 2)
    report = Report(rank=0, host="a", node=0)
    checks.run_checks(report, ticket, {}, limit_s=60.0)
    assert len(report.passed) == 6
    assert asked[-1] == "b"
    asked.clear()
    monkeypatch.setattr(checks, "checks_at_once", lambda _: 1)
    alone = Report(rank=0, host="a", node=0)
    checks.run_checks(alone, ticket, {}, limit_s=60.0)
    assert asked.count("b") == 1
    assert [text for text in alone.unknown if "probe of b" in text]
