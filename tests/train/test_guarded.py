"""Under a guarded launch each checkpoint carries the attestation; without one nothing of kernelguard is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kernelguard_train import guarded

GUARD = """
from pathlib import Path

def attest_checkpoint(folder):
    Path(folder, "kernelguard-attestation.json").write_text("{}")

def before_training(resume_from=""):
    Path(resume_from, "compared").write_text("")
"""
"""What the launcher puts on the path, as far as a trainer asks for it."""


def test_without_a_guarded_launch_kernelguard_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guarded.TICKET, raising=False)
    monkeypatch.setitem(sys.modules, "kernelguard", None)  # importing it would raise
    guarded.attest(tmp_path)
    guarded.say_what_changed(tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_a_verified_kernel_of_its_own_runs_under_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guarded.TICKET, raising=False)
    assert guarded.admits("packed_convolution")
    ticket = tmp_path / "ticket.json"
    monkeypatch.setenv(guarded.TICKET, str(ticket))
    row = {"package": "kernelguard_train", "symbol": "packed_convolution"}
    for probes, admitted in (([], False), ([{**row, "package": "other"}], False), ([row], True)):
        ticket.write_text(json.dumps({"probes": probes}))
        assert guarded.admits("packed_convolution") is admitted
        assert not guarded.admits("another")
    ticket.write_text("{}")
    assert not guarded.admits("packed_convolution"), "a launch without a GPU has no probes"


def test_under_one_the_guard_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "kernelguard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "guard.py").write_text(GUARD)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("kernelguard", "kernelguard.guard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(guarded.TICKET, str(tmp_path / "ticket.json"))
    checkpoint = tmp_path / "step-3"
    checkpoint.mkdir()
    guarded.attest(checkpoint)
    guarded.say_what_changed(checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {"kernelguard-attestation.json", "compared"}
