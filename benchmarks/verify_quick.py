"""How long does `kernelguard verify` take on a GPU, without and with what an earlier run compiled?

    python3 benchmarks/verify_quick.py --out DIR --cache DIR [--budget 420]

Run by the interpreter that will train, with kernelguard importable. The published 27B's configuration, packed, with all
boundary signals, at 4096 tokens: once with an empty cache and `--trace` (which also times the first training step of a
new process that finds the cache), once more with the cache that this left.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERIFY = [
    sys.executable,
    "-c",
    "from kernelguard.cli import main; main()",
    "verify",
    "examples/qwen3.8-27b",  # the verdict is published, with the place that was given
    "--python",
    sys.executable,
    "--packed",
    "--signals",
    "position_ids,cu_seq_lens_q,seq_idx",
    "--length",
    "4096",
]


def run(name: str, options: argparse.Namespace, more: list[str], *, timeout: float) -> dict[str, Any]:
    """One run of the command: its exit code, its wall time, and what its verdict says about where that went."""
    output = options.out.absolute() / f"verify-h200-27b-{name}.json"
    argv = [
        *VERIFY,
        "--warm-cache",
        str(options.cache.absolute()),
        "-o",
        str(output),
        "--timeout",
        f"{timeout:.0f}",
        *more,
    ]
    began = time.monotonic()
    code: int | None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout + 60.0, cwd=ROOT)
        code, said = done.returncode, f"{done.stdout}\n{done.stderr[-3000:]}"
    except subprocess.TimeoutExpired as error:
        code, said = None, str(error)
    seconds = time.monotonic() - began
    print(f"== {name}: exit {code} after {seconds:.1f} s\n{said}", flush=True)
    # No exit code: it was stopped a minute after its own time limit.
    found: dict[str, Any] = {"seconds": round(seconds, 1), "exit_code": code}
    if output.exists():
        verdict = json.loads(output.read_text("utf-8"))
        found["probes"] = {p["symbol"]: round(p["seconds"], 1) for p in verdict["probes"]}
        found["phases"] = verdict["phases"]
        found["fingerprint"] = verdict["fingerprint"]
        found["trace"] = verdict["trace"]
    return found


def main() -> int:
    """Cold, then warm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for both")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cold = run("cold", options, ["--trace"], timeout=options.budget - 90.0)
    size = sum(f.stat().st_size for f in options.cache.rglob("*") if f.is_file())
    warm = run("warm", options, [], timeout=90.0)
    prints = warm.pop("fingerprint", None) or cold.get("fingerprint")
    cold.pop("fingerprint", None)
    trace = cold.pop("trace", None) or {}
    warm.pop("trace", None)
    document = {
        "command": " ".join(["kernelguard", "verify", "examples/qwen3.8-27b", *VERIFY[7:], "--warm-cache", "DIR"]),
        "fingerprint": prints,
        "cold": cold,
        "warm": warm,
        "cache_bytes": size,
        "first_step_of_a_new_process_seconds": trace.get("first_step_seconds"),
        "later_step_seconds": trace.get("step_seconds"),
    }
    (options.out / "verify-h200-quick.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps({k: v for k, v in document.items() if k != "fingerprint"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
