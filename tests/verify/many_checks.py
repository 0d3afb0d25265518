"""Run by the observed interpreter: the probe worker's `main` on many requests, as torch starts slowly."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

worker, requests = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
spec = importlib.util.spec_from_file_location("probe", worker)
probe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(probe)

results = {}
for name, request in requests.items():
    path = Path(f"{sys.argv[2]}.{name}")
    path.touch()
    recorder = probe.Recorder(str(path))
    probe.main(request, recorder)
    recorder.done()
    results[name] = [json.loads(line) for line in path.read_text().splitlines()]
print(json.dumps(results))
