"""What does each step from the published baseline loop to this trainer bring? One run, one table, one JSON file.

    python benchmarks/ladder.py --out benchmarks/results --name ladder-h200 [--site SITE] [--qla FOLDER] [--budget 300]

Every rung adds one thing to the one before and is the trainer's own command with other settings (the first is the
yardstick, benchmarks/yardstick.py), in a process of its own with a time limit. What is known is written after every
rung, so a limit that ends the run loses nothing. `--tiny` runs all of it on a CPU in a model of toy size: a test that
the script works, not a measurement. SITE and FOLDER (see setup_h200.sh) go onto PYTHONPATH of the rungs that need them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ladder_report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SLICE = ROOT / "train/examples/qwen3.5-27b-slice.toml"
TOY = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 600, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-8B, twelve of its 36 layers: attention and SwiGLU alone."""
MOE = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "vocab_size": 248_320,
    "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3.5-35B-A3B, four of its 40 layers."""
MAMBA = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 12, "attn_layer_indices": [9], "num_attention_heads": 32,
    "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
    "mamba_d_conv": 4, "mamba_chunk_size": 256, "mamba_expand": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
"""Bamba-9B, twelve of its 32 layers: eleven of Mamba-2, one of attention."""
SHAPES = {"dense": DENSE, "moe": MOE, "mamba": MAMBA}
OFF = {
    "batch.mode": "padded", "model.attention": "sdpa", "model.liger": "off", "model.fused": "off",
    "parallel.one_rank": "fsdp", "model.recompute": "full", "optim.loss_chunk": 8192, "batch.tokens": 8192,
}  # fmt: skip
"""The trainer with everything of its own switched off but the fused kernels."""
LOOP = "bf16 throughout, optimizer states too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row: what it adds, as settings."""

    name: str
    adds: str
    settings: dict[str, Any]
    kind: str = "bf16"
    """bf16 rungs build on each other; variants, float8, masked, beside and the other models stand for themselves."""
    model: str = "27b"
    steps: int = 6
    environment: tuple[tuple[str, str], ...] = ()
    dtype: str = "bf16 products, float32 masters"
    script: str = ""
    """Another program than the trainer, which takes `loop` or, without it, the trainer's arguments."""
    loop: tuple[str, ...] = ()
    profile: bool = False


def rungs(*, packs: int, qla: bool) -> list[Rung]:
    """The table's rows, in the order they run; `packs` makes the last one's update as large as the published one's."""
    steps: list[tuple[str, str, dict[str, Any]]] = [
        ("fused kernels", "fla's delta rule and a fused convolution; padded, SDPA, full recomputing, FSDP", {}),
        ("packing", "whole samples side by side, kept apart by a mask", {"batch.mode": "packed"}),
        ("varlen attention", "torch's varlen_attn in place of masked SDPA", {"model.attention": "varlen"}),
        ("chunked cross entropy", "logits of 4096 trained tokens at a time, own kernel", {"optim.loss_chunk": 4096}),
        ("fused norms and SwiGLU", "liger", {"model.liger": "on"}),
        ("selective recomputing", "every other product and attention are kept", {"model.recompute": "selective"}),
        ("no recomputing", "all is kept: there is room", {"model.recompute": "none"}),
        ("no FSDP copies", "bf16 working copy, gradients summed in float32", {"parallel.one_rank": "plain"}),
        ("fused layers", "no repeated heads, own convolution, SwiGLU kept smaller", {"model.fused": "on"}),
        ("longer packs", "16,384 tokens", {"batch.tokens": 16_384, "batch.per_step": 1}),
    ]
    made = [
        Rung(name="naive", adds="the published baseline loop (yardstick.py), no fused kernel installed",
             settings={}, script="yardstick.py", loop=("--layers", "8", "--steps", "3", "--warmup", "1"), profile=True,
             dtype=LOOP)
    ]  # fmt: skip
    settings = dict(OFF)
    environment: tuple[tuple[str, str], ...] = (("FLA_FLASH_QLA", "0"),)
    for name, adds, more in steps:
        settings = settings | more
        made.append(Rung(name=name, adds=adds, settings=dict(settings), environment=environment, profile=True))
        made += variants(name, settings, environment)
    if qla:
        environment = (("FLA_FLASH_QLA", "1"),)
        made.append(Rung(name="flash-qla", adds="Qwen's delta rule kernels", settings=settings,
                         environment=environment, profile=True))  # fmt: skip
    settings = settings | {"batch.per_step": packs}
    adds = f"{packs} packs to an update: {packs * 16_384:,} tokens (published: 262,144)"
    made.append(Rung(name="final", adds=adds, settings=settings, environment=environment, steps=5, profile=True))
    final = {"settings": settings, "environment": environment}
    recipe = "concatenate and cut, fused kernels, varlen attention, full recomputing"
    made.append(Rung(name="published recipe", adds=recipe, kind="beside", settings={}, script="yardstick.py",
                     dtype=LOOP, profile=True, loop=("--layers", "8", "--steps", "5", "--warmup", "2", "--recipe"),
                     environment=(("FLA_FLASH_QLA", "0"),)))  # fmt: skip
    trl = "SFTTrainer: packing by best fit, bf16 autocast, gradient checkpointing, fused kernels, masked SDPA"
    made.append(Rung(name="TRL", adds=trl, kind="beside", settings={}, script="beside_trl.py",
                     dtype="bf16 autocast, float32 weights",
                     loop=("--layers", "8", "--steps", "5", "--warmup", "3"),
                     environment=(("FLA_FLASH_QLA", "0"),)))  # fmt: skip
    # Half of the packs, so that the whole table fits into one call: the update's share is twice the last rung's.
    half = settings | {"batch.per_step": max(1, packs // 2)}
    narrow = half | {"model.fp8": True}
    made.append(Rung(name="float8", adds="forward and input-gradient products in float8", kind="float8",
                     dtype="float8 products, float32 masters", settings=narrow, environment=environment,
                     steps=4))  # fmt: skip
    masked = half | {"data.synthetic_trained": 0.6}
    made.append(Rung(name="masked prompts", adds="60 % of the tokens trained, as in chat data", kind="masked",
                     settings=masked, environment=environment, steps=4))  # fmt: skip
    for model in SHAPES:
        plain = OFF if model == "dense" else OFF | {"model.kernels": "reference"}
        adds = "padded, SDPA, full recomputing, FSDP"
        if model == "mamba":  # torch's own scan asks for 140 GiB at 8192 tokens
            plain = plain | {"batch.tokens": 1536, "batch.per_step": 5}
            adds += "; 1,536 tokens at once: more do not fit"
        made.append(Rung(name=f"{model}: naive", adds=adds, kind=model, model=model,
                         settings=plain, steps=5))  # fmt: skip
        own: dict[str, Any] = final["settings"] | {"batch.per_step": 4, "model.liger": "auto"}
        made.append(Rung(name=f"{model}: final", adds="all of the above, 4 packs to an update", kind=model, model=model,
                         settings=own, environment=(("FLA_FLASH_QLA", "0"),), steps=5))  # fmt: skip
    return made


def variants(name: str, settings: dict[str, Any], environment: tuple[tuple[str, str], ...]) -> list[Rung]:
    """What might stand in place of a rung or on top of it; nothing builds on these."""
    if name == "fused norms and SwiGLU":
        parts = ["mlp", "input_layernorm", "post_attention_layernorm"]
        return [Rung(name="compile", adds="in place of liger: torch.compile of each layer's MLP and norms",
                     kind="variant", settings=settings | {"model.liger": "off", "model.compile": parts},
                     environment=environment, profile=True)]  # fmt: skip
    if name == "fused layers":
        return [Rung(name="CUDA graph", adds="on top: one batch alone, captured, since its boundaries are frozen",
                     kind="variant", settings=dict(settings), script="graph.py", environment=environment)]  # fmt: skip
    return []


def tiny(rung: Rung) -> Rung:
    """The same rung in toy size, on a CPU."""
    toy = {key: value for key, value in rung.settings.items() if key != "model.kernels"}
    small = {"batch.tokens": 256, "batch.per_step": 1, "optim.loss_chunk": 64, "model.attention": "sdpa",
             "model.liger": "off", "data.synthetic_median": 40, "train.device": "cpu",
             "model.compute_dtype": "float32"}  # fmt: skip
    loop = (*rung.loop, "--tiny") if rung.loop else ()
    return replace(rung, settings=toy | small if toy else {}, steps=4, loop=loop)


SHOWN_WHOLE = ("naive", "final")
"""Rungs whose operators are listed."""
RECORDED = {"naive": "naive", "fused kernels": "fused", "packing": "packed"}
"""Rungs whose step --record keeps, and what each trace is called."""


def recorded(rung: Rung) -> Rung:
    """The same rung with four layers, three of them linear, and one step recorded: a trace small enough to commit."""
    loop = tuple(
        "4" if before == "--layers" else word for before, word in zip(("", *rung.loop), rung.loop, strict=False)
    )
    settings = rung.settings if rung.loop else rung.settings | {"model.layers": 4}
    return replace(rung, profile=True, loop=loop, settings=settings)


class Runner:
    """Runs rungs one after the other; the next one's imports go on while one measures."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def _command(self, rung: Rung) -> tuple[list[str], dict[str, str]]:
        folder = self.work / _plain(rung.name)
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **dict(rung.environment), "PYTHONUNBUFFERED": "1"}
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        extra = [self.options.qla] if dict(rung.environment).get("FLA_FLASH_QLA") == "1" else []
        site = [] if rung.name == "naive" else [self.options.site]  # with fla on its path it would not be naive
        environment["PYTHONPATH"] = os.pathsep.join([p for p in (*site, *extra) if p] + [str(ROOT / "train")])
        command = [sys.executable, str(HERE / "rung.py"), str(folder / "go"), str(folder / "rung.json")]
        if rung.script:
            command += ["--loop", rung.script]
        if site and rung.name != "final" and not self.options.tiny:
            command.append("--reuse")
        if rung.loop:
            extra = ["--profile", str(folder / "profile.json")] if rung.profile else []
            return [*command, "--", *rung.loop, *extra], environment
        settings: dict[str, Any] = {
            "data.synthetic_samples": 40_000, "train.steps": rung.steps, "train.output": str(folder), "data.workers": 0
        } | rung.settings  # fmt: skip
        if rung.name == "final" and not self.options.tiny:
            settings["data.workers"] = 1
        if rung.profile:
            settings["report.profile"] = rung.steps
        config: list[str] = [str(SLICE)]
        if self.options.tiny or rung.model != "27b":
            shape = TOY if self.options.tiny else SHAPES[rung.model]
            (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
            settings |= {"model.path": str(folder / "config.json"), "model.layers": 0}
        texts = [
            f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in settings.items()
        ]
        return [*command, "--", *config, *texts], environment

    def prepare(self, rung: Rung) -> None:
        """Starts a rung's process, which imports and then waits for its turn."""
        if rung.name in self.started:
            return
        command, environment = self._command(rung)
        log = (self.work / _plain(rung.name) / "log.txt").open("wb")
        self.started[rung.name] = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
        )

    def run(self, rung: Rung, following: Rung | None, limit: float) -> dict[str, Any]:
        """One row of the table."""
        self.prepare(rung)
        folder = self.work / _plain(rung.name)
        (folder / "go").touch()
        if following:
            self.prepare(following)
        row: dict[str, Any] = {"rung": rung.name, "adds": rung.adds, "kind": rung.kind, "model": rung.model}
        process = self.started[rung.name]
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            self.end(rung.name)
            row["problem"] = f"not done after {limit:.0f} s"
            code = None
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        if code:
            row["problem"] = f"exit code {code}: {log[-1200:]}"
        row |= ladder_report.read(folder, rung.settings, trainer=not rung.script) | {"dtype": rung.dtype}
        if rung.name not in SHOWN_WHOLE:  # the tables of thirteen rungs would be most of the file
            for table in ("top_gpu", "top_cpu"):
                row.get("profile", {}).pop(table, None)
        row["notes"] = [
            line[9:] for line in log.splitlines() if line[9:].startswith(("kernel:", "note:", "isolation:"))
        ]
        return row

    def end(self, name: str) -> None:
        """Ends a rung's process and what it started."""
        process = self.started.get(name)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def versions(site: str, qla: str) -> dict[str, str]:
    """Distributions that the rungs ran on."""
    wanted = ("torch", "transformers", "triton", "fla-core", "flash-linear-attention", "liger-kernel", "causal-conv1d",
              "mamba-ssm", "trl", "datasets",
              "flash-qla", "tilelang", "numpy")  # fmt: skip
    path = [p for p in (site, qla, *sys.path) if p]
    found: dict[str, str] = {"python": sys.version.split()[0]}
    for name in wanted:
        for distribution in metadata.distributions(name=name, path=path):
            found.setdefault(name, distribution.version)
    try:
        shown = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                               capture_output=True, text=True, check=True).stdout  # fmt: skip
        found["gpu"], found["driver"] = (part.strip() for part in shown.splitlines()[0].split(","))
    except (OSError, subprocess.CalledProcessError):
        found["gpu"] = "none"
    return found


def not_worth(rows: list[dict[str, Any]]) -> str:
    """Why the rungs to come do without what the last of these added; nothing when they go with it."""
    last = rows[-1]
    before = next((row for row in reversed(rows[:-1]) if row["kind"] == "bf16" and "tokens_per_s" in row), None)
    if "problem" in last or "tokens_per_s" not in last:
        return f"{last['rung']} did not run"
    if before and last["tokens_per_s"] < before["tokens_per_s"]:
        return f"{last['rung']} is slower: {last['tokens_per_s']:,.0f} tokens/s after {before['tokens_per_s']:,.0f}"
    return ""


def ceilings(options: argparse.Namespace, target: Path) -> Path:
    """This GPU's best product and copy, measured by parts.py while no rung runs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in (options.site, str(ROOT / "train")) if p])}
    measure = [sys.executable, str(HERE / "parts.py"), "--json", str(target), "--only", "nothing"]
    try:
        subprocess.run(measure, env=environment, check=False, timeout=40, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        print("the ceilings were not measured within 40 s", flush=True)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.json, NAME.md and NAME.svg")
    parser.add_argument("--name", default="ladder")
    parser.add_argument("--site", default="", help="folder with fla, triton and liger")
    parser.add_argument(
        "--qla", default="", help="folder with flash-qla and tilelang; without it that rung is left out"
    )
    parser.add_argument("--packs", type=int, default=16, help="packs of 16,384 tokens to an update in the last rung")
    parser.add_argument("--only", default="", help="names of rungs, comma separated")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that one rung may take")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further rung starts")
    parser.add_argument("--hard", type=float, default=1e9, help="seconds after which the rung that runs is ended too")
    parser.add_argument("--parts", type=Path, help="ceilings that parts.py measured; otherwise it runs after `final`")
    parser.add_argument(
        "--record",
        action="store_true",
        help=f"only {', '.join(RECORDED)}, four layers each; their traces go into --out",
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--join", type=Path, nargs="+", help="measure nothing: put these results of one machine into one table"
    )
    options = parser.parse_args()
    if options.join:
        order = [rung.name for rung in rungs(packs=options.packs, qla=True)]
        found = [json.loads(path.read_text(encoding="utf-8")) for path in options.join]
        ladder_report.write(ladder_report.join(found, order), options.out, options.name, {})
        return 0
    chosen = rungs(packs=options.packs, qla=bool(options.qla))
    if options.record:
        chosen = [recorded(rung) for rung in chosen if rung.name in RECORDED]
    if options.tiny:
        chosen = [tiny(rung) for rung in chosen if rung.model == "27b"]
    if options.only:
        chosen = [rung for rung in chosen if rung.name in options.only.split(",")]
    # `timeout` ends a program with SIGTERM: the rungs must not stay behind on the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.perf_counter()
    command = " ".join(["python", "benchmarks/ladder.py", *sys.argv[1:]])
    result: dict[str, Any] = {
        "schema": 1, "kind": "ladder", "tiny": options.tiny, "command": command,
        "versions": versions(options.site, options.qla), "rungs": [],
    }  # fmt: skip
    # Results are published; where they were made is nobody's business.
    hidden = {str(options.out): "OUT", options.site: "SITE", options.qla: "QLA", f"{ROOT}/": "", str(ROOT): "."}
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        hidden[folder] = "WORK"
        runner = Runner(options, Path(folder))
        parts = options.parts
        try:
            while chosen:
                rung, *chosen = chosen
                # Whether the rungs after this one go with it is known when it is over.
                following = chosen[0] if chosen and rung.name != "flash-qla" else None
                spent = time.perf_counter() - begun
                if spent > options.budget:
                    result.setdefault("left_out", []).append(rung.name)
                    runner.end(rung.name)
                    continue
                row = runner.run(rung, following, min(options.limit, max(1.0, options.hard - spent)))
                result["rungs"].append(row)
                if rung.name == "flash-qla" and (why := not_worth(result["rungs"])):
                    result["without_flash_qla"] = why
                    chosen = [replace(each, environment=(("FLA_FLASH_QLA", "0"),)) for each in chosen]
                if options.record:
                    (trace,) = (Path(folder) / _plain(rung.name)).glob("*.trace.json.gz")
                    shutil.copy(trace, options.out / f"{RECORDED[rung.name]}.json.gz")
                if rung.name == "final" and parts is None and not options.tiny:
                    parts = ceilings(options, Path(folder) / "parts.json")
                if parts is not None and parts.exists():
                    result["ceilings"] = json.loads(parts.read_text(encoding="utf-8"))["ceilings"]
                ladder_report.rate(result)
                ladder_report.write(result, options.out, options.name, hidden)
                print(ladder_report.line(row), flush=True)
        finally:
            for name in runner.started:
                runner.end(name)
        ladder_report.write(result, options.out, options.name, hidden)
    print((options.out / f"{options.name}.md").read_text(encoding="utf-8"))
    return 0 if all("problem" not in row for row in result["rungs"] if row["kind"] == "bf16") else 1


if __name__ == "__main__":
    sys.exit(main())
