"""How long does a training take from the start of its process to the end of step 1, and what does a cache change?

    python benchmarks/cold_start.py --json OUT [--ways empty,kernels,verified,image,again] [--cache DIR] [SETTING...]

Starts of the same command, four layers of the published 27B (tuning does not depend on how many there are), 4096
tokens to a pack:
- empty: nothing is compiled;
- verified: the folder that `kernelguard verify --warm-cache DIR` left for that configuration and length, with
  `--train-config` of the same file and `--length 4096`, so that it measures the calls that this training makes;
- kernels: the same without what torch.compile made;
- image: that folder as an image's layer brings it, packed and unpacked elsewhere;
- again: the second start after `verified`, which finds torch.compile's own folder too.
DIR itself stays as it is: what a start tunes goes into a copy, or the next one would find it. torch.compile's folder is
a new one for each start but `again`.
One JSON file; a start that is not at its end within the limit says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SLICE = ROOT / "train/examples/qwen3.5-27b-slice.toml"
SETTINGS = ("model.layers=4", "batch.tokens=4096", "train.steps=4", "data.synthetic_samples=4000")
WAYS = ("empty", "kernels", "verified", "image", "again")
COMPILED = "torch-compile-*.bin"
"""What torch.compile made (kernelguard_train/compiled.py)."""


def start(way: str, cache: Path, work: Path, settings: list[str], limit: float) -> dict[str, Any]:
    """One start: seconds to the end of step 1, the step after it, and what was tuned when."""
    folder = work / way
    folder.mkdir()
    (folder / "go").touch()
    compiled = work / ("verified" if way == "again" else way) / "inductor"
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1",
        "TILELANG_CACHE_DIR": str(cache / "tilelang"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled), "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT / "train")]),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "rung.py"), str(folder / "go"), str(folder / "rung.json"), "--",
               str(SLICE), *SETTINGS, *settings, f"train.output={folder}"]  # fmt: skip
    begun = time.monotonic()
    found: dict[str, Any] = {"way": way}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    steps = folder / "steps.jsonl"
    lines = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    found |= {"exit_code": code, "seconds": round(time.monotonic() - begun, 1), "steps": len(lines)}
    found["step_times_s"] = [line["step_s"] for line in lines]
    if code is None:
        found["problem"] = f"not at its end after {limit:.0f} s"
    elif code:
        found["problem"] = (folder / "log.txt").read_text()[-1500:]
    else:
        seen = json.loads((folder / "rung.json").read_text())
        names = ("start_to_first_step_s", "imports_s", "tunings", "tunings_after_step_1", "recompiles_after_step_1")
        found |= {name: seen[name] for name in names}
        found |= {"tuned_late": seen["tuned_late"], "told": seen["told"]}
    return found


def as_image_layer(cache: Path, work: Path) -> Path:
    """The folder as a layer of an image holds it: through a tar, elsewhere, and not to be written to."""
    archive, target = work / "layer.tar", work / "layer"
    with tarfile.open(archive, "w") as tar:
        tar.add(cache, arcname="cache")
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    for path in (target, *target.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return target / "cache"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--cache", type=Path, help="what verify left; not needed for the empty way")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds that one start may take")
    parser.add_argument("settings", nargs="*", help="more settings of the trainer: model.layers=2")
    options = parser.parse_args()
    ways = options.ways.split(",")
    unknown = set(ways) - set(WAYS)
    if unknown:
        parser.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    if "again" in ways and "verified" not in ways[: ways.index("again")]:
        parser.error("--ways: again finds what torch.compile made in verified, which has to come before it")
    if options.cache is None and ways != ["empty"]:
        parser.error("--cache: the folder that `kernelguard verify --warm-cache` left")
    import ladder  # noqa: PLC0415 - after the arguments are known to be good

    result: dict[str, Any] = {
        "schema": 1, "kind": "cold-start", "settings": [*SETTINGS, *options.settings],
        "versions": ladder.versions("", ""), "starts": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        work = Path(folder)
        own = work / "cache"
        if options.cache is not None:
            shutil.copytree(options.cache, own)
        for way in ways:
            cache = work / "nothing" if way == "empty" else own
            if way == "image":
                cache = as_image_layer(options.cache, work)
            elif way == "kernels":
                cache = work / "kernels-only"
                shutil.copytree(options.cache, cache, ignore=shutil.ignore_patterns(COMPILED))
            row = start(way, cache, work, options.settings, options.limit)
            result["starts"].append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "told"}), flush=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all("problem" not in row for row in result["starts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
