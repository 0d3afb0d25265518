"""What do several readers say of the same recording?

python benchmarks/trace_readers.py --hta PYTHON --torch PYTHON [--json benchmarks/results/trace-readers.json]

First one recorded step of an H200, kernelguard beside HolisticTraceAnalysis. Then three steps of a small transformer on
this CPU, recorded here: torch's `key_averages()`, which cannot read a file, is asked in the process that recorded, and
the two others read the trace that this process exported. That is done ROUNDS times; a reader's seconds are its best,
without imports, and everything else is of the last round.

--hta is an interpreter that has HolisticTraceAnalysis (python -m pip install HolisticTraceAnalysis==0.5.0), --torch one
that has torch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from traces import SEED, version_of_hta

from kernelguard.trace.profile import profile

HTA = """
import contextlib, io, json, sys
from hta.trace_analysis import TraceAnalysis
with contextlib.redirect_stdout(io.StringIO()):
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    idle = analysis.get_idle_time_breakdown(visualize=False)[0].set_index("idle_category")["idle_time"]
    kinds = analysis.get_gpu_kernel_breakdown(visualize=False)[0]
print(json.dumps({
    "kernels_us": float(kinds["sum"].sum()), "idle_us": float(times["idle_time(us)"]),
    "host_us": float(idle["host_wait"]), "between_us": float(idle["kernel_wait"]),
}))
"""
RECORD = """
import json, sys, time
import torch
from torch.profiler import ProfilerActivity, profile, schedule
torch.manual_seed(0)
torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
parts = torch.nn.Embedding(1000, 256), torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(256, 1000)
model = torch.nn.Sequential(*parts)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(1000, (4, 64))
with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=3, repeat=1), record_shapes=True,
    on_trace_ready=lambda p: p.export_chrome_trace(sys.argv[1]),
) as recording:
    for _ in range(5):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.step()
begun = time.perf_counter()
rows = recording.key_averages()
seconds = time.perf_counter() - begun
print(json.dumps({
    "torch": torch.__version__, "operators": len(rows), "calls": sum(row.count for row in rows),
    "self_cpu_us": sum(row.self_cpu_time_total for row in rows), "seconds": seconds,
}))
"""
OPERATORS_OF_KERNELGUARD = """
import json, sys, time
from pathlib import Path
from kernelguard.trace.profile import profile
begun = time.perf_counter()
found = profile(Path(sys.argv[1]))
seconds = time.perf_counter() - begun
print(json.dumps({
    "operators": len(found.operators), "calls": sum(one.calls for one in found.operators),
    "self_cpu_us": found.self_host, "seconds": seconds,
}))
"""
# Its table of operators is the one that it compares two traces with. It has no time without what an operator called.
OPERATORS_OF_HTA = """
import contextlib, io, json, pathlib, sys, time
from hta.trace_diff import DeviceType, LabeledTrace
begun = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    trace = LabeledTrace(trace_dir=str(pathlib.Path(sys.argv[1]).parent))
    rows = trace.get_ops_summary(trace.extract_ops(trace.ranks(), trace.iterations(), DeviceType.CPU))
seconds = time.perf_counter() - begun
print(json.dumps({
    "operators": len(rows), "calls": int(rows["counts"].sum()), "self_cpu_us": None, "seconds": seconds,
}))
"""
ROUNDS = 3
COMMAND = "python benchmarks/trace_readers.py --hta PYTHON --torch PYTHON --json benchmarks/results/trace-readers.json"
TITLES = {
    "kernels_us": "all kernels and copies",
    "idle_us": "GPU idle",
    "host_us": "of it waiting for the host",
    "between_us": "of it between kernels",
}


def of_kernelguard() -> dict[str, float]:
    """Microseconds, by what they are about."""
    found = profile(SEED)
    return {
        "kernels_us": found.kernels_total,
        "idle_us": found.idle.total,
        "host_us": found.idle.total - found.idle.device,
        "between_us": found.idle.device,
    }


def of_hta(python: str) -> dict[str, float]:
    """The same of HolisticTraceAnalysis."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(gzip.decompress(SEED.read_bytes()))
        say_the_rank(path)
        return asked(python, HTA, path)


def say_the_rank(path: Path) -> None:
    """HolisticTraceAnalysis asks for it."""
    document = json.loads(path.read_bytes())
    document["distributedInfo"] = {"rank": 0, "world_size": 1}
    path.write_text(json.dumps(document))


def asked(python: str, program: str, path: Path) -> dict[str, Any]:
    """What the program, in a process of its own, says of the trace at `path`, or of the one that it writes there."""
    done = subprocess.run([python, "-c", program, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python}: {done.stderr.strip()}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def of_one_recording(torch: str, hta: str) -> dict[str, Any]:
    """What three readers count in the same steps on this CPU, and in how many seconds."""
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            readers = {"key_averages": asked(torch, RECORD, path)}
            size = path.stat().st_size
            readers["kernelguard"] = asked(sys.executable, OPERATORS_OF_KERNELGUARD, path)
            say_the_rank(path)
            readers["HolisticTraceAnalysis"] = asked(hta, OPERATORS_OF_HTA, path)
        for name, told in readers.items():
            best[name] = min(best.get(name, told["seconds"]), told["seconds"])
    version = readers["key_averages"].pop("torch")
    for name, told in readers.items():
        told["seconds"] = round(best[name], 2)
        if told["self_cpu_us"] is not None:
            told["self_cpu_us"] = round(told["self_cpu_us"], 3)
    what = "three steps of a transformer of four layers on a CPU, record_shapes=True"
    return {"what": what, "torch": version, "megabytes": round(size / 1e6, 1), "rounds": ROUNDS, "readers": readers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta", required=True, help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--torch", required=True, help="an interpreter that has torch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ours, theirs = of_kernelguard(), of_hta(options.hta)
    for key, title in TITLES.items():
        print(f"{title:<28} {ours[key]:>10,.0f} µs {theirs[key]:>10,.0f} µs")
    recording = of_one_recording(options.torch, options.hta)
    for name, told in recording["readers"].items():
        own = "not told" if told["self_cpu_us"] is None else f"{told['self_cpu_us'] / 1e3:,.2f} ms"
        print(
            f"{name:<22} {told['operators']:>4} operators {told['calls']:>7,} calls {own:>10} {told['seconds']:.2f} s"
        )
    if options.json:
        document: dict[str, Any] = {
            "schema": 1,
            "kind": "trace-readers",
            "trace": SEED.name,
            "command": COMMAND,
            "versions": {"python": sys.version.split()[0], "HolisticTraceAnalysis": version_of_hta(options.hta)},
            "kernelguard": {key: round(value, 3) for key, value in ours.items()},
            "HolisticTraceAnalysis": theirs,
            "recording": recording,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
