"""Machines that were measured, as `check --environment` takes them, from what their committed verdicts say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import ROOT, Command
from observed import transformers_base

RESULTS = ROOT / "benchmarks" / "results"
H200 = RESULTS / "verify-h200-fla060-triton371.json"
H200_STOCK_TRITON = RESULTS / "verify-h200-fla060-stock-triton.json"
MODEL = ROOT / "examples" / "qwen3.8-27b"


def environment_of(verdict: Path) -> dict[str, Any]:
    """What `kernelguard observe` would have written there, as far as the verdict's fingerprint tells it."""
    print_of = json.loads(verdict.read_text(encoding="utf-8"))["fingerprint"]
    same = {key: print_of[key] for key in ("python", "machine", "torch", "triton", "ptxas", "driver")}
    return {
        "schema": 1,
        "kind": "environment",
        "captured_from": verdict.name,
        "system": "Linux",
        **same,
        "torch_cuda": print_of["cuda"],
        "torch_is_cpu": False,
        "transformers_version": print_of["transformers"],
        "gpus": [{"name": print_of["gpu"], "capability": print_of["capability"]}],
        "gpu_state": "usable",
        "distributions": [{"name": name, "version": text} for name, text in print_of["distributions"].items()],
    }


def checked(verdict: Path, folder: Path, *options: str) -> Command:
    """The 27B example on that machine, checked by the present code. Nothing is executed, so the level is `resolve`."""
    captured = folder / f"environment-{verdict.stem}.json"
    captured.write_text(json.dumps(environment_of(verdict)), encoding="utf-8")
    version = json.loads(verdict.read_text(encoding="utf-8"))["fingerprint"]["transformers"]
    tree = transformers_base(version).site / "transformers"
    where = ("--environment", captured.name, "--transformers", tree)
    return Command("check", MODEL, *where, *options, cwd=folder)


def write_check(verdict: Path, folder: Path) -> Path:
    """Its JSON, as a file in `folder`."""
    file = folder / f"check-{verdict.stem}.json"
    file.write_text(checked(verdict, folder, "--json").out, encoding="utf-8")
    return file
