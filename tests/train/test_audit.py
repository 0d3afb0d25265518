"""`--audit-data` as a person sees it: trained text in green, masked text in grey, every token in one of the two."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny

from kernelguard_train import cli

TRAINED, MASKED, OFF = "\x1b[4;32m", "\x1b[90m", "\x1b[0m"


def shown(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    common = [f"model.path={model_folder}", f"data.path={tiny.CHATS}", "data.shuffle=false", "batch.tokens=256"]
    assert cli.main([*common, "--audit-data", "1"]) == 0
    return capsys.readouterr().out


def test_colours_say_what_is_trained(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    printed = shown(model_folder, capsys)
    first = json.loads(tiny.CHATS.read_text().splitlines()[0])["messages"]
    sample = printed.split("--- ")[1].partition("\n")[2].rstrip("\n")
    parts = re.findall(rf"({re.escape(TRAINED)}|{re.escape(MASKED)})(.*?){re.escape(OFF)}", sample, re.DOTALL)
    assert "".join(f"{colour}{text}{OFF}" for colour, text in parts) == sample, "no text is without a colour"
    green = [text for colour, text in parts if colour == TRAINED]
    assert green == [f"{turn['content']}<|im_end|>" for turn in first if turn["role"] == "assistant"]
    grey = "".join(text for colour, text in parts if colour == MASKED)
    assert all(turn["content"] in grey for turn in first if turn["role"] == "user")


def test_no_colours_where_they_are_not_wanted(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    printed = shown(model_folder, capsys)
    assert "\x1b" not in printed
    assert "[[" in printed


def test_an_audit_of_no_sample_is_refused_and_never_trains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["model.path=x", "data.path=y", "--audit-data", "0"])
    assert ended.value.code == 2
    assert "expected 1 or more samples" in capsys.readouterr().err
