"""Does a run that was killed go on as if nothing had happened, and what does `model.recompute=auto` choose here?

    PYTHONPATH=train python benchmarks/train_resume.py [--device cuda] [--resumed-ranks 1] [--slice-layers N]

Two whole runs of twelve steps with the same seed show what this machine itself adds from run to run. A third, which
saves every three steps, is killed (SIGKILL; of several ranks, the last one) once a checkpoint and a later step are
done, and started again by the same command. Its losses and gradient norms of the steps after its newest checkpoint must
be those of the whole runs within

    4 x the difference of the two whole runs  +  n 2^-24 of the value

The second part is the bound for adding n positive float32 numbers (the losses of the step's n trained tokens) in
another order; on a CPU the first part is zero. One rank sums gradients in float32, several round each batch's to bf16,
by at most 2^-9: where another number of ranks goes on, 2^-9 of what the updates since the checkpoint changed the loss
by is added for losses, and 2^-8 of the value for norms (as in two_gpus/equal.py). Then the exported folder is compared
bit for bit with the last checkpoint, and loaded with `from_pretrained`. With --slice-layers, layers
of the published 27B are trained with recompute=auto and what it chose is reported. One JSON object goes to stdout.
Exit codes: 0 all holds, 1 it does not, 3 cannot tell (losses that hardly change could not show a fault).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS, SAVED = 12, 3
LIMIT = 400
"""Seconds after which a run counts as hanging."""
REAL_HEADS = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 24, "num_key_value_heads": 4,
              "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
              "linear_value_head_dim": 128, "vocab_size": 32_768}  # fmt: skip
"""On a GPU: the 27B's heads, so that its kernels run in the shapes they are tuned for, in a model of 0.2 B."""


def make_model(folder: Path, device: str) -> None:
    """The demo's model folder; on a GPU with the 27B's heads."""
    from kernelguard_train.demo import make  # noqa: PLC0415 - needs PYTHONPATH=train

    make.main(folder)
    if device == "cuda":
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **REAL_HEADS}))


def command(model: Path, output: Path, device: str, ranks: int, *overrides: str) -> list[str]:
    """The trainer's command line, under torchrun where there are several ranks."""
    tokens, rate = (4096, 5e-4) if device == "cuda" else (512, 2e-3)
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [
        *launcher, "kernelguard_train", f"model.path={model}", "model.init=random", f"train.device={device}",
        f"train.output={output}", f"data.path={ROOT / 'train/kernelguard_train/demo/chats.jsonl'}", "train.epochs=99",
        f"batch.tokens={tokens}", "batch.window=240", "batch.per_step=2", f"optim.lr={rate}", "optim.warmup=0",
        "optim.decay=constant", "checkpoint.every=0", "checkpoint.at_end=false", "report.every=1",
        "model.recompute=auto", f"train.steps={STEPS}", *overrides,
    ]  # fmt: skip


def run(arguments: list[str], log: Path) -> None:
    """Runs to the end; a failure ends this program with the last lines of what was said."""
    with log.open("w") as handle:
        done = subprocess.run(arguments, stdout=handle, stderr=handle, timeout=LIMIT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{log.read_text()[-3000:]}")


def steps(output: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step; of one that was done twice, the second time."""
    path = output / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {line["step"]: line for line in map(json.loads, (line for line in lines if line.endswith("\n")))}


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def killed(arguments: list[str], output: Path, log: Path, ranks: int) -> dict[str, Any]:
    """Starts a run and kills it, or its last rank, once a checkpoint is there and a step after it is done."""
    checkpoint = output / "checkpoints" / f"step-{SAVED:08d}"
    with log.open("w") as handle:
        process = subprocess.Popen(arguments, stdout=handle, stderr=handle)
        until = time.monotonic() + LIMIT
        while not (checkpoint.exists() and max(steps(output), default=0) > SAVED):
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise SystemExit(f"the run ended before it could be killed:\n{log.read_text()[-3000:]}")
            time.sleep(0.005)
        victim = max(children(process.pid)) if ranks > 1 else process.pid
        os.kill(victim, signal.SIGKILL)
        code = process.wait(timeout=LIMIT)
    saved = sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))
    return {"after_step": max(steps(output)), "exit_code": code, "checkpoints": saved}


def compare(whole: Path, again: Path, resumed: Path, saved: int, ranks: int, *, changed: bool) -> dict[str, Any]:
    """Losses and gradient norms of the steps after the kill."""
    one, two, three = steps(whole), steps(again), steps(resumed)
    trained = max(line["trained_tokens_per_s"] * line["step_s"] for line in one.values()) * ranks
    found: dict[str, Any] = {"passed": True}
    for name in ("loss", "norm"):
        noise = max(abs(one[n][name] - two[n][name]) for n in one)
        tolerance = {n: 4 * noise + trained * 2**-24 * one[n][name] for n in one}
        if changed:
            since = {
                n: 2**-9 * abs(one[n][name] - one[saved][name]) if name == "loss" else 2**-8 * one[n][name] for n in one
            }
            tolerance = {n: tolerance[n] + since[n] for n in one}
        worst = max(range(saved + 1, STEPS + 1), key=lambda n: abs(one[n][name] - three[n][name]) / tolerance[n])
        found[name] = {
            "whole": [one[n][name] for n in sorted(one)],
            "resumed": [three[n][name] for n in range(saved + 1, STEPS + 1)],
            "noise": noise,
            "tolerance": tolerance[worst],
            "difference": abs(one[worst][name] - three[worst][name]),
            "change_from_step_to_step": min(abs(one[n][name] - one[n + 1][name]) for n in range(saved, STEPS)),
        }
        found["passed"] &= found[name]["difference"] <= found[name]["tolerance"]
    # A fault would be about as large as what a step changes: a tolerance near that could not show it.
    found["can_show_a_fault"] = found["loss"]["change_from_step_to_step"] > 4 * found["loss"]["tolerance"]
    return found


def reloaded(output: Path, losses: list[float]) -> dict[str, Any]:
    """Whether the exported folder holds the last checkpoint's weights in bf16, and loads."""
    import torch  # noqa: PLC0415 - only now, so that --help answers at once
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    newest = max((output / "checkpoints").glob("step-*"))
    dcp_to_torch_save(newest, output / "whole.pt")
    saved = {
        name.removeprefix("lm."): tensor
        for name, tensor in torch.load(output / "whole.pt", weights_only=True)["model"].items()
    }
    folder = output / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    wrong = [name for name, tensor in model.named_parameters() if not torch.equal(tensor, saved[name].bfloat16())]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = json.loads((ROOT / "train/kernelguard_train/demo/chats.jsonl").read_text().splitlines()[0])
    ids = tokenizer.apply_chat_template(row["messages"], return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        loss = float(model.float()(input_ids=ids, labels=ids, use_cache=False).loss)
    return {
        "checkpoint": newest.name,
        "dtype": "bfloat16",
        "tensors": len(saved),
        "tensors_that_differ": len(wrong),
        "first_that_differ": wrong[:3],
        "loss_of_a_chat": loss,
        "passed": not wrong and loss < losses[0],
    }


def layers_of_the_27b(work: Path, layers: int) -> dict[str, Any]:
    """Trains layers of the published 27B with recompute=auto and says what was chosen."""
    output, log = work / "slice", work / "slice.log"
    begun = time.monotonic()
    slice_ = ROOT / "train/examples/qwen3.5-27b-slice.toml"
    overrides = [f"model.path={ROOT / 'examples/qwen3.8-27b/config.json'}", f"model.layers={layers}"]
    overrides += ["model.recompute=auto", "train.steps=6", f"train.output={output}"]
    run([sys.executable, "-m", "kernelguard_train", str(slice_), *overrides], log)
    chosen = re.search(r"recompute: (.*)", log.read_text())
    summary = json.loads((output / "summary.json").read_text())
    keys = ("tokens_per_s", "mfu", "step_s", "peak_gib", "reserved_gib", "alloc_retries")
    health = [key for key in list(steps(output).values())[-1] if key.startswith("gpu_")]
    return {
        "layers": layers,
        "chosen": chosen[1] if chosen else None,
        **{key: summary.get(key) for key in keys},
        "health_reported": health,
        "seconds": round(time.monotonic() - begun, 1),
        "passed": chosen is not None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--resumed-ranks", type=int, default=0, help="ranks after the kill; 0: as many as before")
    parser.add_argument("--slice-layers", type=int, default=0, help="layers of the 27B for recompute=auto; 0: skip")
    parser.add_argument("--work", type=Path, help="folder for what the runs write; default: one that is removed")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="train-resume-"))
    work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    model = work / "model"
    make_model(model, options.device)

    def start(name: str, ranks: int, *overrides: str) -> list[str]:
        return command(model, work / name, options.device, ranks, *overrides)

    saving = [f"checkpoint.every={SAVED}"]

    def uninterrupted() -> None:
        for name in ("whole", "again"):
            run(start(name, options.ranks, "checkpoint.export=false"), work / f"{name}.log")

    with ThreadPoolExecutor(1) as beside:  # nothing here is about speed, and most of the time goes into starting
        whole = beside.submit(uninterrupted)
        going = start("resumed", options.ranks, *saving, "train.steps=99")
        kill = killed(going, work / "resumed", work / "killed.log", options.ranks)
        run(
            start("resumed", options.resumed_ranks or options.ranks, *saving, "checkpoint.at_end=true"),
            work / "resumed.log",
        )
        whole.result()
    log = (work / "resumed.log").read_text()
    resumed_at = re.search(r"resumed at step (\d+)", log)
    chosen = re.search(r"recompute: (.*)", (work / "whole.log").read_text())
    saved = max(kill["checkpoints"])
    comparison = compare(
        work / "whole",
        work / "again",
        work / "resumed",
        saved,
        options.ranks,
        changed=options.resumed_ranks not in {0, options.ranks},
    )
    result: dict[str, Any] = {
        "schema": 1,
        "kind": "train-resume",
        "device": options.device,
        "ranks": options.ranks,
        "ranks_after_the_kill": options.resumed_ranks or options.ranks,
        "killed": kill,
        "resumed_at_step": int(resumed_at[1]) if resumed_at else None,
        "steps_lost": kill["after_step"] - int(resumed_at[1]) if resumed_at else None,
        "recompute_auto": chosen[1] if chosen else "no choice on a CPU: all layers full",
        "comparison": comparison,
        "reloaded": reloaded(work / "resumed", comparison["loss"]["whole"]),
    }
    if options.slice_layers:
        result["slice"] = layers_of_the_27b(work, options.slice_layers)
    parts = [comparison["passed"], result["reloaded"]["passed"], result["resumed_at_step"] == saved]
    parts += [
        kill["exit_code"] != 0,
        kill["after_step"] - saved <= SAVED,
        result.get("slice", {"passed": True})["passed"],
    ]
    result["seconds"] = round(time.monotonic() - begun, 1)
    result["status"] = "fail" if not all(parts) else "pass" if comparison["can_show_a_fault"] else "unknown"
    print(json.dumps(result, indent=1))
    if not options.work:
        shutil.rmtree(work)
    return {"pass": 0, "fail": 1, "unknown": 3}[result["status"]]


if __name__ == "__main__":
    sys.exit(main())
