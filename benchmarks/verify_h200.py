"""What `verify` measures on one H200, as committed under `benchmarks/results/`.

    python3 benchmarks/verify_h200.py --out DIR [--work DIR] [--budget 480] [--items 1,2,3,4,5] [--resume DIR]

It needs folders with the packages to measure, made by `verify_h200.sh`: WORK/new (triton 3.7.1, fla 0.6.0, liger,
causal-conv1d), WORK/stock (fla 0.6.0 alone, for the interpreter's own triton) and WORK/old (fla-core 0.4.1 alone).

1. fla 0.6.0 on triton 3.7.1, causal-conv1d, fla's convolution, torch's attention, liger: right or not.
2. fla 0.6.0 on the interpreter's triton (3.6.0): what it says.
3. fla-core 0.4.1 on that triton: every configuration, several head counts and lengths, every tensor.
4. packed isolation of transformers with single signals and with all of them, and a profiler trace of one step.
5. the GPU kernels that fla's KDA, torch's grouped product and flex attention, and the one-token forms launch.

Each item is one verdict document (`schemas/verdict.schema.json`), rewritten after every kernel, so that a run that is
cut short loses only what it was doing. Items 2 and 3 run beside 1 and 4 when asked for together: compiling takes long.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from kernelguard.declare.values import SubModel  # noqa: E402
from kernelguard.judge.values import Level  # noqa: E402
from kernelguard.observe.interpreter import observe  # noqa: E402
from kernelguard.observe.process import run_worker  # noqa: E402
from kernelguard.observe.values import Environment  # noqa: E402
from kernelguard.trace import fast_paths, read_trace  # noqa: E402
from kernelguard.trace.names import unexplained  # noqa: E402
from kernelguard.verify.cache import cache_variables  # noqa: E402
from kernelguard.verify.files import load_verdict, to_document  # noqa: E402
from kernelguard.verify.findings import findings  # noqa: E402
from kernelguard.verify.fingerprint import binary_digests, fingerprint, record_digests  # noqa: E402
from kernelguard.verify.isolation import run_isolation  # noqa: E402
from kernelguard.verify.merge import earlier_of, same_ground  # noqa: E402
from kernelguard.verify.plan import ODD, RAGGED, TOKENWISE_ROWS  # noqa: E402
from kernelguard.verify.probing import run_probe  # noqa: E402
from kernelguard.verify.requests import Case, ProbeRequest  # noqa: E402
from kernelguard.verify.values import Outcome, ProbeResult, Verdict  # noqa: E402

SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")
GATED = ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "gated_delta_rule")
START = time.monotonic()
LOOKING = threading.Lock()
"""`observe` hands this process's environment on, so only one at a time may change it."""


class Item:
    """One document that grows while its kernels are measured."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path, *, level: Level) -> None:
        self.name = name
        self.options = options
        self.level = level
        self.environ = {**os.environ, "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": f"{options.work}/cache-{name}"}
        if options.cache is not None and folder.name == "new":
            self.environ |= cache_variables(options.cache)
        self.environment = look(folder)
        self.requests: list[ProbeRequest] = []
        self.digests = {
            "binaries": binary_digests(self.environment),
            "records": record_digests(self.environment),
        }
        prints = fingerprint(self.environment, (), model_type="qwen3_5", **self.digests)
        self.verdict = Verdict(level=level, fingerprint=prints)
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.earlier = self._earlier()

    def _earlier(self) -> Verdict | None:
        """The document of an earlier run under the same fingerprint: a machine may be given back before the end."""
        file = (self.options.resume or Path()) / f"verify-h200-{self.name}.json"
        if self.options.resume is None or not file.exists():
            return None
        verdict = load_verdict(file)
        if not same_ground(verdict.fingerprint, self.verdict.fingerprint):
            self.problem("an earlier document has another fingerprint, so nothing of it was taken over")
            return None
        return verdict

    def before(self, request: ProbeRequest) -> ProbeResult | None:
        """What the earlier run measured of this kernel."""
        return earlier_of(self.earlier, request, self.verdict.fingerprint)

    def keep(self, request: ProbeRequest) -> bool:
        """Take an earlier measurement over as it is, if nothing is missing from it."""
        found = self.before(request)
        whole = found is not None and {c.name for c in request.cases} <= {c.name for c in found.cases}
        if found is None or not whole or found.unmeasured_configurations or found.outcome is not Outcome.RIGHT:
            return False
        self.add(request, found)
        return True

    def probe(self, request: ProbeRequest, *, timeout: float, shards: int = 1, compiled: bool | None = None) -> None:
        """Measure one kernel and write the document."""
        timeout = min(timeout, left(self.options))
        if timeout < 5.0:
            self.problem(f"{request.symbol} was not measured: the time was used up")
            return
        result = run_probe(
            sys.executable,
            request,
            timeout=timeout,
            device=self.options.device,
            environ=self.environ,
            shards=shards,
            compiled=compiled,
            earlier=self.before(request),
            progress=lambda text: say(f"{self.name}: {text}"),
        )
        self.add(request, result)
        wrong = ", ".join(f"{c.kernel} {c.config}" for c in result.wrong_configurations)
        states = [c.state for c in result.configurations]
        told = f"{request.symbol} {result.outcome} after {result.seconds:.0f} s: {result.reason}"
        counts = f"{states.count('right')} right, {states.count('not-measured')} not measured, of {len(states)}"
        say(f"{self.name}: {told} (configurations: {counts}; wrong: {wrong or 'none'})")
        say(f"{self.name}: {request.symbol} {dict(result.backends)} {result.forward_kernels} {result.backward_kernels}")

    def add(self, request: ProbeRequest, result: ProbeResult) -> None:
        """One more kernel in the document."""
        with self.lock:
            self.requests.append(request)
            self.verdict = replace(self.verdict, probes=(*self.verdict.probes, result))
            self.write()

    def problem(self, text: str) -> None:
        """Something that could not be measured."""
        say(f"{self.name}: {text}")
        self.verdict = replace(self.verdict, problems=(*self.verdict.problems, text))
        self.write()

    def write(self) -> None:
        """The document as it is now."""
        self.verdict = replace(
            self.verdict,
            fingerprint=fingerprint(self.environment, self.requests, model_type="qwen3_5", **self.digests),
            seconds=time.monotonic() - self.began,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        document = to_document(self.verdict)
        document["findings"] = [
            {"code": f.code, "status": str(f.status), "fast_path": f.fast_path, "reason": f.reason, "fix": f.fix}
            for f in findings(self.verdict)
        ]
        write_json(self.options.out / f"verify-h200-{self.name}.json", document)


def look(folder: Path) -> Environment:
    """The interpreter as it is with these packages in front."""
    with LOOKING:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(folder)
        try:
            return observe(sys.executable, timeout=120.0)
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def model(options: argparse.Namespace) -> dict[str, Any]:
    """The published 27B's text configuration; a tiny one for a dry run without a GPU."""
    raw: dict[str, Any] = json.loads((ROOT / "examples" / "qwen3.8-27b" / "config.json").read_text("utf-8"))
    text: dict[str, Any] = raw["text_config"]
    if options.device != "cuda":
        text |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "head_dim": 16, "linear_key_head_dim": 8}
        text |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        # Rotary parts of the real size do not fit a head of 16.
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}
    return text


def request(
    place: tuple[str, str, str, str], cases: Sequence[Case], *, trains: bool = True, backward: bool = True
) -> ProbeRequest:
    """One kernel: (package, module, symbol, operation)."""
    package, module, symbol, op = place
    return ProbeRequest(
        symbol=symbol, package=package, module=module, op=op, cases=tuple(cases), trains=trains, backward=backward
    )


def delta(heads: int, size: int, *, keys: int = 0) -> Mapping[str, Any]:
    """Shapes of the gated delta rule; models repeat the key heads before they call it."""
    return {"k_heads": keys or heads, "v_heads": heads, "k_dim": size, "v_dim": size}


def good_stack(options: argparse.Namespace) -> None:
    """Item 1."""
    text = model(options)
    long = 4096 if options.device == "cuda" else 96
    heads, size = text["linear_num_value_heads"], text["linear_value_head_dim"]
    keys = text["linear_num_key_heads"]
    channels = 2 * keys * text["linear_key_head_dim"] + heads * size
    item = Item("fla060-triton371", options, options.work / "new", level=options.level)
    shape = delta(heads, size)
    conv = {"channels": channels, "width": text["linear_conv_kernel_dim"], "activation": "silu", "bias": False}
    attention = {"q_heads": text["num_attention_heads"], "kv_heads": text["num_key_value_heads"]}
    attention["head_dim"] = text["head_dim"]
    packed = (long // 2 - 1, long // 2, 1)
    sequence = [
        Case(name="ragged", lengths=RAGGED, shape=conv, packed=True),
        Case(name="training", lengths=packed, shape=conv, packed=True, repeats=2),
    ]
    tuned = [replace(sequence[0], force=True), sequence[1]]
    head = {"hidden": text["hidden_size"], "vocabulary": text["vocab_size"]}
    norm, plus = {"size": text["hidden_size"]}, {"size": text["hidden_size"], "offset": 1.0}
    light = [
        (request(("causal_conv1d", "causal_conv1d", "causal_conv1d_fn", "causal_conv1d"), sequence), 1),
        (request(("torch", "torch.nn.attention.varlen", "varlen_attn", "torch_varlen"), _with(sequence, attention)), 1),
        (
            request(
                ("torch", "torch.nn.functional", "scaled_dot_product_attention", "sdpa"), _with(sequence, attention)
            ),
            1,
        ),
        (request(("liger_kernel", _LIGER, "liger_rms_norm", "rms_norm"), _rows(norm, plus)), 1),
        (request(("liger_kernel", _LIGER, "liger_swiglu", "swiglu"), _rows({"size": text["intermediate_size"]})), 1),
        (
            request(("liger_kernel", _LIGER, "liger_fused_linear_cross_entropy", "linear_cross_entropy"), _rows(head)),
            1,
        ),
        (
            request(
                ("fla", "fla.modules", "FusedRMSNormGated", "gated_rms_norm"),
                [Case(name="rows", lengths=TOKENWISE_ROWS, shape={"size": size, "heads": [heads]}, force=True)],
            ),
            2,
        ),
        (request(("fla", "fla.modules.causal_conv1d", "causal_conv1d", "fla_convolution"), tuned), 3),
        (
            request(
                ("fla", "fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule"),
                [Case(name="one token", lengths=(1,), shape=shape, state=True, batch=2, force=True)],
                trains=False,
            ),
            1,
        ),
    ]
    # The model's own kernel first: it is the most valuable.
    delta_cases = [
        Case(name="ragged", lengths=RAGGED, shape=shape, packed=True, force=True),
        Case(name="training", lengths=packed, shape=shape, packed=True, repeats=2, force=True),
    ]
    if item.before(request(GATED, delta_cases)) is None:
        delta_cases.insert(1, Case(name="odd", lengths=ODD, shape=shape, force=True))
    with ThreadPoolExecutor(options.light + 1) as pool:
        first = pool.submit(
            item.probe, request(GATED, delta_cases), timeout=0.58 * options.budget, shards=options.shards
        )
        jobs = [pool.submit(item.probe, asked, timeout=120.0, shards=shards) for asked, shards in light]
        for job in (first, *jobs):
            job.result()


def kernel_names(options: argparse.Namespace) -> None:
    """Item 5: kernels that item 1 does not need, each with one pinned configuration, for the names that they launch."""
    text = model(options)
    item = Item("names", options, options.work / "new", level=options.level)
    shape = delta(text["linear_num_value_heads"], text["linear_value_head_dim"])
    experts = {"experts": 16, "hidden": 2048, "intermediate": 512}
    attention = {"q_heads": text["num_attention_heads"], "kv_heads": text["num_key_value_heads"]}
    attention["head_dim"] = text["head_dim"]
    jobs = [
        request(
            ("fla", "fla.ops.kda", "chunk_kda", "kda"),
            [Case(name="ragged", lengths=RAGGED, shape=shape, packed=True, pin=0)],
        ),
        request(
            ("torch", "torch.nn.functional", "grouped_mm", "grouped_mm"),
            [Case(name="rows", lengths=TOKENWISE_ROWS, shape=experts)],
        ),
        request(
            ("torch", "torch.nn.attention.flex_attention", "flex_attention", "flex"),
            [Case(name="ragged", lengths=RAGGED, shape=attention, packed=True, pin=0)],
        ),
        request(
            ("causal_conv1d", "causal_conv1d", "causal_conv1d_update", "causal_conv1d_update"),
            [
                Case(
                    name="one token",
                    lengths=(1,),
                    shape={"channels": 10240, "width": 4, "activation": "silu", "bias": False},
                    state=True,
                    batch=2,
                )
            ],
            trains=False,
            backward=False,
        ),
        request(
            ("fla", "fla.ops.kda", "fused_recurrent_kda", "recurrent_kda"),
            [Case(name="one token", lengths=(1,), shape=shape, state=True, batch=2, pin=0)],
            trains=False,
        ),
    ]
    with ThreadPoolExecutor(options.light) as pool:
        for job in [pool.submit(item.probe, asked, timeout=100.0, compiled=True) for asked in jobs]:
            job.result()


_LIGER = "liger_kernel.transformers.functional"


def _with(cases: Sequence[Case], shape: Mapping[str, Any]) -> list[Case]:
    return [replace(case, shape=shape) for case in cases]


def _rows(*shapes: Mapping[str, Any]) -> list[Case]:
    names = ("rows", "rows, weight minus one")
    return [Case(name=n, lengths=TOKENWISE_ROWS, shape=s) for n, s in zip(names, shapes, strict=False)]


def refused_stack(options: argparse.Namespace) -> None:
    """Item 2. One pinned configuration is enough to reach the backward, which is where it speaks."""
    text = model(options)
    item = Item("fla060-stock-triton", options, options.work / "stock", level=options.level)
    shape = delta(text["linear_num_value_heads"], text["linear_value_head_dim"])
    item.probe(request(GATED, [Case(name="ragged", lengths=RAGGED, shape=shape, packed=True, pin=0)]), timeout=150.0)


def silent_stack(options: argparse.Namespace) -> None:
    """Item 3: every configuration at several head counts and lengths; the model's own first."""
    text = model(options)
    item = Item("fla041-stock-triton", options, options.work / "old", level=options.level)
    heads, size = text["linear_num_value_heads"], text["linear_value_head_dim"]
    long = 2048 if options.device == "cuda" else 96
    for number, count in enumerate((heads, heads // 3 or 1, heads // 12 or 1)):
        shape = delta(count, size)
        cases = [
            Case(name=f"H={count} odd", lengths=ODD, shape=shape, force=True),
            Case(name=f"H={count} T={long}", lengths=(long,), shape=shape, force=True, repeats=2),
        ]
        if number == 0:
            cases.insert(1, Case(name=f"H={count} ragged", lengths=RAGGED, shape=shape, packed=True, force=True))
        asked = request(GATED, cases)
        if item.keep(asked):
            continue
        if item.before(asked) is not None:
            # The short ones are done; what is missing has its key at the long one.
            asked = replace(asked, cases=asked.cases[-1:])
        if left(options) > 45.0:
            item.probe(asked, timeout=left(options), shards=options.shards, compiled=False)
        else:
            item.problem(f"H={count} was not measured: the time was used up")


def isolation(options: argparse.Namespace) -> None:
    """Item 4, and the trace: in the environment and with the cache of item 1."""
    text = model(options)
    item = Item("isolation", options, options.work / "new", level=options.level)
    item.environ["TRITON_CACHE_DIR"] = f"{options.work}/cache-fla060-triton371"
    part = SubModel(path="text_config", model_type=text["model_type"], raw=text)
    sets: list[tuple[tuple[str, ...], str]] = [(SIGNALS, "")]
    sets += [((name,), f"all but {name}") for name in SIGNALS]
    sets += [(tuple(s for s in SIGNALS if s != out), out) for out in SIGNALS]
    small = options.device != "cuda"
    options_of_model: dict[str, Any] = {"dtype": "float32", "lengths": (11, 1, 7)} if small else {}
    checks = run_isolation(
        sys.executable,
        [part],
        sets,
        device=options.device,
        timeout=max(min(200.0, left(options)), 5.0),
        environ=item.environ,
        **options_of_model,
    )
    item.verdict = replace(item.verdict, isolation=checks, signals=SIGNALS)
    item.write()
    for check in checks:
        leaks = f"gradient {check.leak_gradient}, logits {check.leak_logit}"
        say(f"isolation: {'+'.join(check.signals)}: isolated={check.isolated} {leaks} {check.detail}")
    trace(options, item, part, small=small)


def trace(options: argparse.Namespace, item: Item, part: SubModel, *, small: bool) -> None:
    """One training step of the cut-down model under the profiler."""
    output = options.out / "verify-h200-trace.json.gz"
    asked = {
        "parts": [{"model_type": part.model_type, "raw": dict(part.raw)}],
        "dtype": "float32" if small else "bfloat16",
        "device": options.device,
        "lengths": [11, 1, 7] if small else [65, 64, 1, 200],
        "signals": list(SIGNALS),
        "output": str(output),
    }
    result = run_worker(
        sys.executable, "trace", asked, timeout=max(min(120.0, left(options)), 5.0), environ=item.environ
    )
    if not output.exists():
        item.problem(f"no trace: {result.ending()} {[dict(r) for r in result.of_kind('error')]} {result.output[-500:]}")
        return
    facts = read_trace(output)
    versions = {name: d.version for name, d in (item.environment.distributions or {}).items()}
    wanted = [("fla", "chunk_gated_delta_rule"), ("causal_conv1d", "causal_conv1d_fn"),
              ("torch", "scaled_dot_product_attention")]  # fmt: skip
    found = fast_paths(facts, wanted, versions)
    document = {
        "gpu": item.verdict.fingerprint.gpu,
        "versions": {n: versions[n] for n in ("torch", "triton", "fla-core", "causal-conv1d") if n in versions},
        "launches": facts.launches,
        "gpu_microseconds": facts.gpu_microseconds,
        "fast_paths": [
            {
                "symbol": p.symbol,
                "known": p.known,
                "forward": p.forward,
                "backward": p.backward,
                "kernels": {k.name: k.count for k in p.kernels},
                "fallbacks": list(p.fallbacks),
            }
            for p in found
        ],
        "others": {k.name: k.count for k in unexplained(facts, found)},
    }
    write_json(options.out / "verify-h200-trace-kernels.json", document)
    say(f"trace: {json.dumps(document['fast_paths'])}")


def left(options: argparse.Namespace) -> float:
    """Seconds of the budget that are not used up."""
    return float(options.budget) - (time.monotonic() - START)


def say(text: str) -> None:
    """Progress, with the time; the log comes back even when the run is cut short."""
    print(f"[{time.monotonic() - START:6.1f}] {text}", file=sys.stderr, flush=True)


def write_json(path: Path, document: Any) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")
    beside.replace(path)


def main() -> int:
    """Run the items; one that breaks does not take the others with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/verify-h200"))  # noqa: S108
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--items", default="1,2,3,4,5")
    parser.add_argument("--resume", type=Path, help="a folder of documents of an earlier run: measure what they lack")
    parser.add_argument("--cache", type=Path, help="what `kernelguard verify --warm-cache` left for the new packages")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run with tiny shapes")
    parser.add_argument("--shards", type=int, default=max((os.cpu_count() or 2) // 2 - 1, 1))
    parser.add_argument("--light", type=int, default=3, help="kernels measured at once")
    options = parser.parse_args()
    options.level = Level.GPU if options.device == "cuda" else Level.INTERPRETED
    options.out.mkdir(parents=True, exist_ok=True)
    items = set(options.items.split(","))
    chains: list[list[tuple[str, Callable[[argparse.Namespace], None]]]] = [
        [("1", good_stack), ("5", kernel_names), ("4", isolation)],
        [("2", refused_stack), ("3", silent_stack)],
    ]
    failed = 0

    def follow(chain: list[tuple[str, Callable[[argparse.Namespace], None]]]) -> int:
        broken = 0
        for number, job in chain:
            if number not in items:
                continue
            try:
                job(options)
            except Exception as error:  # noqa: BLE001 - the other items are worth having; the error is shown
                broken += 1
                say(f"item {number} broke: {type(error).__name__}: {error}")
        return broken

    with ThreadPoolExecutor(2) as pool:
        failed = sum(pool.map(follow, chains))
    say(f"done, {failed} items broke")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
