"""Probe many kernels of one interpreter in one process. Only for kernels that leave the process alive."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kernelguard import workers
from kernelguard.observe.process import WorkerResult
from kernelguard.verify.probing import interpret
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import ProbeResult


def probe_many(python: Path, requests: Mapping[str, ProbeRequest], folder: Path) -> dict[str, ProbeResult]:
    file = folder / "requests.json"
    file.write_text(json.dumps({name: r.to_json(device="cpu") for name, r in requests.items()}))
    worker = Path(workers.__file__).parent / "probe.py"
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("many_checks.py")), str(worker), str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = {}
    for name, lines in json.loads(done.stdout.splitlines()[-1]).items():
        records = tuple(r for r in lines if "kind" in r)
        results[name] = interpret(requests[name], [WorkerResult(records=records, finished=True, returncode=0)])
    return results
