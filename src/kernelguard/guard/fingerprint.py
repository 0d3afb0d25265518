"""What is this rank made of? Versions, RECORD digests, binaries, GPU, driver, NCCL, and what is really bound.

Everything is read by child processes: a package that crashes or hangs when it is imported does that to a child, and
the training process imports nothing early.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelguard.guard.children import ChildResult, Stopwatch, run_worker
from kernelguard.guard.ticket import Ticket

KERNEL_DISTRIBUTIONS = frozenset(
    {
        "apex",
        "causal-conv1d",
        "fla-core",
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "flash-linear-attention",
        "flash-qla",
        "kernels",
        "liger-kernel",
        "mamba-ssm",
        "mambapy",
        "nvidia-cutlass-dsl",
        "quack-kernels",
        "tilelang",
        "transformers",
        "triton",
        "xlstm",
    }
)
"""Distributions whose files are hashed."""
TRAINING_DISTRIBUTIONS = frozenset({"torch", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "numpy"})
"""Beside the kernels, distributions that have to be the same in every rank."""
# They change which kernel runs, and nothing makes them legitimately differ between ranks.
_DECIDING_VARIABLES = (
    "USE_HUB_KERNELS",
    "DISABLE_KERNEL_MAPPING",
    "TRITON_INTERPRET",
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    "FLA_USE_TMA",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
_MECHANISM = {"kernel": "package", "hub": "hub", "torch": "torch", "other": "other"}
# What installing adds or rewrites (as in lock/record.py), so that it is no part of the digest.
_WRITTEN_BY_INSTALLERS = re.compile(
    r"(^|/)[^/]+\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json|uv_cache\.json|uv_build\.json)$"
    r"|\.pyc$|(^|/)__pycache__/|\.data/scripts/|^\.\./|^/"
)
_DRIVER = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+\.\d+(?:\.\d+)?)")
ABSENT = "absent"
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3"})
"""File systems whose caching lets one machine see another's half-written or removed files."""


@dataclass
class Report:
    """What one rank says of itself."""

    rank: int
    host: str
    node: int
    fields: dict[str, str] = field(default_factory=dict)
    """What has to be equal in all ranks."""
    hardware: dict[str, str] = field(default_factory=dict)
    """The same, for what belongs to the node."""
    noted: dict[str, str] = field(default_factory=dict)
    """What may differ, and is said when it does."""
    causes: dict[str, str] = field(default_factory=dict)
    """Field -> why it is as it is, for those that are not as they should be."""
    unknown: list[str] = field(default_factory=list)
    """What could not be told, one sentence each."""
    faults: dict[str, str] = field(default_factory=dict)
    """What was tried -> what is wrong with it, in words."""
    passed: list[str] = field(default_factory=list)
    """What was tried and is right."""
    timings: dict[str, float] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Report:
        """The report that JSON values describe.

        Raises:
            ValueError: they describe none.
        """
        names = set(cls.__dataclass_fields__)
        if not isinstance(document, Mapping) or not names.issuperset(document) or "rank" not in document:
            raise ValueError("this is no report of a rank")
        report = cls(**document)
        kinds = ((report.fields, dict), (report.hardware, dict), (report.noted, dict), (report.causes, dict))
        kinds += ((report.faults, dict), (report.unknown, list), (report.passed, list))  # type: ignore[assignment]
        if not all(isinstance(value, kind) for value, kind in kinds) or not isinstance(report.rank, int):
            raise ValueError("this is no report of a rank")
        return report


def read_fingerprint(report: Report, ticket: Ticket | None, environ: Mapping[str, str], *, limit_s: float) -> None:
    """Fill in everything that identifies this rank, within about `limit_s` seconds."""
    watch = Stopwatch()
    wants_gpu = ticket is None or ticket.device == "cuda"
    bindings_request = ticket.bindings if ticket is not None else None
    with ThreadPoolExecutor(max_workers=3) as pool:
        names = _hashed(ticket)
        inventory = pool.submit(run_worker, "inventory", {"hash": names}, timeout=limit_s, environ=environ)
        gpu = pool.submit(run_worker, "gpu", {}, timeout=limit_s, environ=environ) if wants_gpu else None
        bound = (
            pool.submit(run_worker, "bindings", bindings_request, timeout=limit_s, environ=environ)
            if bindings_request is not None
            else None
        )
        report.fields["python"] = platform.python_version()
        report.noted["glibc"] = " ".join(platform.libc_ver()).strip()
        for name in (*_DECIDING_VARIABLES, *(ticket.variables if ticket is not None else ())):
            report.fields[f"variable {name}"] = environ.get(name, "not set")
        _installed(report, inventory.result(), ticket)
        if gpu is not None:
            _gpu(report, gpu.result(), required=ticket is not None)
            report.hardware["driver"] = driver_version() or "not found"
        if bound is not None and bindings_request is not None:
            _bound(report, bound.result(), bindings_request, ticket)
    if ticket is not None and bindings_request is not None:
        _explain(report, ticket, bindings_request, environ, limit_s=max(watch.left(limit_s), 5.0))
    _compile_cache(report, environ)


def _hashed(ticket: Ticket | None) -> list[str]:
    names = set(KERNEL_DISTRIBUTIONS)
    for dist in importlib.metadata.distributions():
        name = normalized(dist.metadata["Name"] or "")
        if name.startswith("nvidia-nccl"):
            names.add(name)
    if ticket is not None:
        names.update(ticket.expected.distributions)
    # torch's own gigabytes take longer to hash than everything else takes; its RECORD is compared.
    return sorted(names - {"torch"})


def normalized(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(report: Report, result: ChildResult, ticket: Ticket | None) -> None:
    """Versions, RECORD digests, changed files and binaries."""
    if not result.finished:
        report.unknown.append(f"what is installed: the inventory worker {result.ending()}")
        return
    expected = ticket.expected.distributions if ticket is not None else {}
    compared = KERNEL_DISTRIBUTIONS | TRAINING_DISTRIBUTIONS | set(expected)
    seen = set()
    for record in result.of_kind("distribution"):
        name = str(record["name"])
        if record["shadow"]:
            continue
        seen.add(name)
        if name not in compared and not name.startswith("nvidia-"):
            report.noted[f"version of {name}"] = str(record["version"])
            continue
        report.fields[f"version of {name}"] = str(record["version"])
        rows = record["record"] or (_record_of("torch") if name == "torch" else ())
        if rows:
            report.fields[f"RECORD of {name}"] = record_digest(rows)
        if record["changed"]:
            key = f"files of {name}"
            report.fields[key] = f"{len(record['changed'])} not as installed"
            report.causes[key] = "; ".join(f"{path} {what}" for path, what in record["changed"][:3])
        for path, digest in getattr(expected.get(name), "binaries", {}).items():
            found = _sha256(Path(str(record["location"])) / path)
            report.fields[f"binary {path}"] = found
            if found != digest and name in expected:
                report.causes[f"binary {path}"] = f"the verdict was measured with sha256 {digest}"
    for name in compared - seen:
        report.fields[f"version of {name}"] = ABSENT
    shared = [r for r in result.of_kind("shared") if ".so" in Path(str(r["path"])).suffixes]
    for record in shared[:3]:
        # Two wheels with one path: the last one wins, and the other's metadata says what is not there.
        report.noted[f"file {Path(str(record['path'])).name}"] = f"owned by {' and '.join(record['owners'])}"


def record_digest(rows: Iterable[Iterable[str]]) -> str:
    """The digest that a lock has for the same files (`record_digest` of `lock/record.py`)."""
    pairs = [tuple(row) for row in rows]
    lines = sorted(f"{p[0]} {p[1]}\n" for p in pairs if p[1] and not _WRITTEN_BY_INSTALLERS.search(p[0]))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _record_of(name: str) -> list[tuple[str, str]]:
    files = importlib.metadata.distribution(name).files or []
    # Any unique text does: it is compared between ranks only.
    return [(str(f), f.hash.value) for f in files if f.hash is not None]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as handle:
            for block in iter(lambda: handle.read(1 << 20), b""):
                digest.update(block)
    except FileNotFoundError:
        return ABSENT
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return digest.hexdigest()


def _gpu(report: Report, result: ChildResult, *, required: bool) -> None:
    torch = next(result.of_kind("torch"), None)
    if torch is not None:
        report.fields["torch"] = str(torch["version"])
        report.fields["CUDA of torch"] = str(torch["cuda"])
    nccl = next(result.of_kind("nccl"), None)
    if nccl is not None:
        report.fields["NCCL"] = str(nccl["version"])
    error = next(result.of_kind("error"), None)
    device = next(result.of_kind("device"), None)
    if device is not None:
        report.hardware["GPU"] = str(device["name"])
        report.hardware["capability"] = ".".join(str(n) for n in device["capability"])
        report.noted["GPU memory"] = f"{int(device['memory_bytes']) >> 30} GiB"
        report.passed.append("CUDA")
    elif error is not None and error["where"] == "import torch":
        report.faults["import torch"] = f"{error['type']}: {error['text']}"
    elif torch is not None and result.finished and not required:
        # Nobody said that there has to be one; ranks with one and ranks without are told apart.
        report.hardware["GPU"] = "none that torch can use"
    elif error is not None:
        report.faults["CUDA"] = f"{error['where']}: {error['type']}: {error['text']}"
    elif result.finished:
        report.faults["CUDA"] = "torch sees no GPU"
    elif result.signal:
        report.faults["CUDA"] = f"looking at the GPU {result.ending()}"
    else:
        report.unknown.append(f"the GPU: the worker {result.ending()}")


def driver_version() -> str:
    """The NVIDIA kernel driver's version, or nothing where there is none."""
    try:
        found = _DRIVER.search(Path("/proc/driver/nvidia/version").read_text("utf-8", "replace"))
    except OSError:
        found = None
    if found:
        return found.group(1)
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n", 1)[0].strip() if done.returncode == 0 else ""


def _compile_cache(report: Report, environ: Mapping[str, str]) -> None:
    """Compiled kernels in a folder that several machines write at once: stale handles, and ranks that wait for ever."""
    if int(environ.get("LOCAL_WORLD_SIZE", "1") or 1) >= int(environ.get("WORLD_SIZE", "1") or 1):
        return
    folder = triton_cache(environ)
    try:
        mounts = Path("/proc/mounts").read_text("utf-8", "replace")
    except OSError:
        return
    kind = file_system(folder, mounts)
    if kind in _NETWORK:
        report.faults["Triton cache"] = (
            f"{folder} lies on {kind}, which all nodes write: set TRITON_CACHE_DIR to a local folder"
        )
    else:
        report.passed.append("Triton cache")


def triton_cache(environ: Mapping[str, str]) -> str:
    """Where Triton really keeps what it compiles, whatever lies in the home folder."""
    if environ.get("TRITON_CACHE_DIR"):
        return environ["TRITON_CACHE_DIR"]
    home = environ.get("TRITON_HOME") or environ.get("HOME") or str(Path.home())
    return str(Path(home) / ".triton" / "cache")


def file_system(folder: str, mounts: str) -> str:
    """The type of the file system that holds a folder, from the text of /proc/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        place = parts[1].replace("\\040", " ")
        inside = folder == place or folder.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, parts[2]
    return kind


def _bound(report: Report, result: ChildResult, request: Mapping[str, Any], ticket: Ticket | None) -> None:
    """The function behind each fast path that the run uses."""
    used = {(p.module, p.symbol) for p in ticket.fast_paths if p.training} if ticket is not None else set()
    found = {record.get("id"): record for record in result.of_kind("binding")}
    failed = {r["module"]: r for r in result.of_kind("module") if r["outcome"] != "ok"}
    problems = "; ".join(str(r["text"]) for r in result.of_kind("problem"))
    for site in request["sites"]:
        if (site["module"], site["symbol"]) not in used:
            continue
        key = bound_field(site["module"], site["symbol"])
        record = found.get(site["id"])
        if record is not None and record["bound_to"] in _MECHANISM:
            target = str(record.get("target", "")) or "nothing"
            report.fields[key] = f"{_MECHANISM[str(record['bound_to'])]} {target}"
            folder = _of_no_distribution(record, str(site["import_module"]).partition(".")[0])
            if folder is not None and record["bound_to"] == "kernel":
                # Versions and RECORDs above are those of other files than the ones that run.
                report.fields[key] += f" from {folder}"
                report.causes[key] = (
                    f"it is imported from {folder}, which belongs to no installed distribution (a checkout, or an "
                    "editable install): nothing says that it is what was verified. Install it"
                )
            if record["bound_to"] in {"torch", "other"} and record.get("detail"):
                report.causes[key] = str(record["detail"])
        elif site["module"] in failed:
            # The model's code itself cannot be imported: nothing would train.
            fact = failed[site["module"]]
            report.fields[key] = f"not importable: {fact.get('error_type', '')}"
            report.causes[key] = f"{site['module']}: {fact.get('error_type', '')}: {fact.get('error', '')}"
        elif result.signal:
            report.fields[key] = f"killed by {result.signal}"
            report.causes[key] = f"reading what is bound {result.ending()}"
        else:
            why = str(record.get("detail", "")) if record is not None else (problems or result.ending())
            report.unknown.append(f"what {site['symbol']} is bound to: {why or 'the worker did not say'}")


def _of_no_distribution(record: Mapping[str, Any], package: str) -> Path | None:
    """The folder of an imported package that no installed distribution owns."""
    file = str(record.get("file", ""))
    if not file or record.get("distribution"):
        return None
    folder = next((p for p in Path(file).parents if p.name == package), None)
    if folder is None:
        return None
    for dist in importlib.metadata.distributions():
        # Without a RECORD, as some package managers leave it, the place alone tells.
        named = normalized(dist.metadata["Name"] or "") in KERNEL_DISTRIBUTIONS
        if named and Path(str(dist.locate_file(""))).resolve() == folder.parent.resolve():
            return None
    return folder


def bound_field(module: str, symbol: str) -> str:
    """The name of the field that says what a symbol is bound to."""
    return f"{symbol} in {module.rpartition('.')[2]}"


def _explain(
    report: Report, ticket: Ticket, request: Mapping[str, Any], environ: Mapping[str, str], *, limit_s: float
) -> None:
    """Import what should have been bound and is not, in a process of its own: transformers swallows the reason."""
    sites = {(s["module"], s["symbol"]): s for s in request["sites"]}
    wanted: dict[str, list[str]] = {}
    keys: dict[str, list[str]] = {}
    for path in ticket.fast_paths:
        site = sites.get((path.module, path.symbol))
        key = bound_field(path.module, path.symbol)
        found = report.fields.get(key, "")
        if site is None or not path.training or path.mechanism != "package" or not found or is_bound(found):
            continue
        wanted.setdefault(site["import_module"], []).append(path.symbol)
        keys.setdefault(site["import_module"], []).append(key)
    if not wanted:
        return
    asked = [{"module": module, "symbols": symbols} for module, symbols in wanted.items()]
    request = {"modules": asked, "limit_s": max(limit_s / 3, 5.0)}
    result = run_worker("importer", request, timeout=limit_s, environ=environ)
    facts = {record["module"]: record for record in result.of_kind("import")}
    for module, fields in keys.items():
        for key in fields:
            report.causes[key] = _why(module, facts.get(module), result)


def _why(module: str, fact: Mapping[str, Any] | None, result: ChildResult) -> str:
    if fact is None:
        return f"importing {module}: {result.ending() or 'the worker did not say'}"
    outcome = fact["outcome"]
    if outcome == "absent":
        return f"{module.partition('.')[0]} is not installed here"
    if outcome == "ok":
        lacking = [name for name, there in fact.get("symbols", {}).items() if not there]
        if lacking:
            return f"{module} has no {', '.join(lacking)}"
        return f"{module} can be imported here, but the model's code did not bind it"
    if outcome == "crashed":
        return f"importing {module} is killed by {fact.get('signal')}"
    return f"importing {module}: {fact.get('error_type', outcome)}: {fact.get('error', '')}"


def is_bound(value: str) -> bool:
    """Whether the value of a `bound_field` names a kernel."""
    return value.startswith(("package ", "hub "))
