"""Run by the observed interpreter: record a few real steps of a small model on the CPU, and what key_averages says.

`python recorded_checks.py KIND FOLDER` leaves FOLDER/trace.json and FOLDER/averages.json.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

kind, folder = sys.argv[1], Path(sys.argv[2])
warnings.simplefilter("ignore")
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(96, 64), batch_size=16)
forward = torch.compile(model, backend="aot_eager", dynamic=False) if kind == "compile" else model


def steps(recording):
    for number, batch in enumerate(data):
        rows = batch[: 16 - number] if kind == "compile" else batch
        loss = forward(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        recording.step()


with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
    record_shapes=kind != "stacks",
    with_stack=kind == "stacks",
    on_trace_ready=lambda p: p.export_chrome_trace(str(folder / "trace.json")),
) as recording:
    steps(recording)
rows = [
    {"key": e.key, "count": e.count, "self_cpu_us": e.self_cpu_time_total, "cpu_us": e.cpu_time_total}
    for e in recording.key_averages()
]
(folder / "averages.json").write_text(json.dumps(rows))
