"""Groups of real ranks behind the guard, on this machine: interpreters, tickets, processes and what became of them.

Most tests use a transformers of a few lines (`light`), because only its decorator matters to them; the same faults in
real releases are in tests/guard/test_real_releases.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crafted import metadata
from kernelguard.guard import ticket as tickets
from kernelguard.observe.process import run_worker
from observed import Interpreter, environment

SRC = Path(__file__).resolve().parent.parent.parent / "src"
MODULE = "transformers.models.tiny.modeling_tiny"

_HUB_KERNELS = """
import functools, importlib, inspect

def use_kernel_func_from_hub_with_fallback(name, package, internal=None):
    def decorator(torch_function):
        try:
            module = importlib.import_module(package if internal is None else f"{package}.{internal}")
            implementation = getattr(module, name, None) or torch_function
        except Exception:
            implementation = torch_function
        applicable_params = tuple(inspect.signature(implementation).parameters)
        is_new_implementation = implementation is not torch_function
        @functools.wraps(torch_function)
        def wrapped(*args, **kwargs):
            if not is_new_implementation and kwargs.get("seq_idx") is not None:
                return torch_function(*args, **kwargs)
            return implementation(*args, **{k: v for k, v in kwargs.items() if k in applicable_params})
        return wrapped
    return decorator
"""
_MODELING = """
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

@use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
def causal_conv1d_fn(x, weight, bias=None, activation=None, **kwargs):
    return torch.nn.functional.silu(x)

@use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla", "ops.gated_delta_rule")
def torch_chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
    return v, None
"""
TINY_TRANSFORMERS = {
    "transformers/__init__.py": '__version__ = "5.24.0"\n',
    "transformers/integrations/__init__.py": "",
    "transformers/integrations/hub_kernels.py": _HUB_KERNELS,
    "transformers/models/__init__.py": "",
    "transformers/models/tiny/__init__.py": "",
    "transformers/models/tiny/modeling_tiny.py": _MODELING,
    **metadata("transformers", "5.24.0", "transformers"),
}
SITES = (
    ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d", "causal_conv1d"),
    ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla", "fla.ops.gated_delta_rule"),
)
REQUEST: dict[str, Any] = {
    "modules": [MODULE],
    "sites": [
        {
            "id": number,
            "kind": "closure",
            "module": MODULE,
            "name": name,
            "owner": None,
            "loader": None,
            "index": None,
            "package": package,
            "import_module": import_module,
            "symbol": symbol,
            "model_type": "tiny",
            "hub_first": False,
        }
        for number, (name, symbol, package, import_module) in enumerate(SITES)
    ],
    "gates": [],
    "config": None,
    "build_s": 20,
}
CONVOLUTION: dict[str, Any] = {
    "module": "causal_conv1d",
    "symbol": "causal_conv1d_fn",
    "op": "causal_conv1d",
    "dtype": "float32",
    "backward": True,
    "seed": 0,
    "cases": [
        {"name": "packed", "lengths": [5, 1, 9], "shape": {"channels": 8, "width": 4, "activation": "silu"},
         "packed": True, "state": False, "repeats": 1, "force": False, "batch": 1, "pin": None},
    ],
}  # fmt: skip
QUICK = tickets.Deadlines(rendezvous_s=40.0, fingerprint_s=40.0, probe_s=40.0, verdict_s=10.0, collective_s=0.0)


def make_interpreter(prefix: Path, version: str | None, packages: Mapping[str, str]) -> Interpreter:
    """An interpreter that sees these packages and, without any of its dependencies, kernelguard."""
    env = environment(prefix, version, packages)
    (env.site / "kernelguard_source.pth").write_text(f"{SRC}\n")
    return env


def light(prefix: Path, packages: Mapping[str, str]) -> Interpreter:
    """The same with a transformers of a few lines."""
    return make_interpreter(prefix, None, {**TINY_TRANSFORMERS, **packages})


def make_ticket(env: Interpreter, run_dir: Path, **changes: Any) -> tickets.Ticket:
    """What a launcher would tell ranks that run in `env` as it is now: expected is what this very moment shows."""
    request = changes.pop("bindings", REQUEST)
    result = run_worker(str(env.python), "bindings", request, timeout=120.0)
    assert result.finished, result.output
    bound = {record["id"]: record for record in result.of_kind("binding")}
    mechanism = {"kernel": "package", "hub": "hub", "torch": "torch"}
    paths = tuple(
        tickets.ExpectedPath(
            symbol=site["symbol"],
            bound_to=bound[site["id"]]["target"],
            mechanism=mechanism[bound[site["id"]]["bound_to"]],
            module=site["module"],
            package=site["package"],
        )
        for site in request["sites"]
        if changes.get("symbols") is None or site["symbol"] in changes["symbols"]
    )
    changes.pop("symbols", None)
    installed = run_worker(str(env.python), "inventory", {"hash": []}, timeout=60.0)
    mine = {"causal-conv1d", "fla-core", "flash-linear-attention", "transformers"}
    versions = {r["name"]: r["version"] for r in installed.of_kind("distribution") if r["name"] in mine}
    base = tickets.Ticket(
        expected=tickets.Expected(
            distributions={name: tickets.ExpectedDistribution(version=text) for name, text in versions.items()}
        ),
        lock=tickets.Document(path="kernelguard.lock", digest="sha256:0"),
        verdict=tickets.Document(path="verdict.json", digest="sha256:0", level="interpreted"),
        admission=tickets.AdmissionNote(admitted=True, overrides=("interpreted level admitted for a test",)),
        run_dir=str(run_dir),
        level="interpreted",
        model=tickets.Model(config="", dtype="float32"),
        fast_paths=paths,
        bindings=request,
        deadlines=QUICK,
        device="cpu",
    )
    return replace(base, **changes)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ended:
    """What became of one rank."""

    code: int
    out: str
    err: str


@dataclass
class Group:
    """What became of a group."""

    ranks: dict[int, Ended]
    run_dir: Path
    seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def codes(self) -> dict[int, int]:
        return {rank: ended.code for rank, ended in self.ranks.items()}

    @property
    def outcome(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.run_dir / "outcome.json").read_text())
        return document

    @property
    def err(self) -> str:
        return "\n".join(f"--- rank {rank}\n{ended.err}" for rank, ended in self.ranks.items())


SCRIPT = """
import os, sys
print("trained", os.environ.get("RANK", "0"), "torch" in sys.modules, sys.argv[1:])
"""


def run_group(
    env: Interpreter | Mapping[int, Interpreter],
    ticket: tickets.Ticket | None,
    folder: Path,
    *,
    world: int = 2,
    starting: Sequence[int] | None = None,
    variables: Mapping[int, Mapping[str, str]] | None = None,
    port: int | None = None,
    script: str = SCRIPT,
    during: Any = None,
    limit_s: float = 200.0,
) -> Group:
    """Start the ranks (`starting`: only those), wait for all, and return how they ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    ticket_path = folder / "ticket.json"
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world)}
    base |= {"MASTER_PORT": str(port or free_port()), "LOCAL_WORLD_SIZE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if ticket is not None:
        ticket_path.write_text(tickets.dumps(ticket))
        base[tickets.VARIABLE] = str(ticket_path)
    processes: dict[int, subprocess.Popen[str]] = {}
    began = time.monotonic()
    try:
        for rank in range(world) if starting is None else starting:
            interpreter = env if isinstance(env, Interpreter) else env[rank]
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank), **(variables or {}).get(rank, {})}
            processes[rank] = subprocess.Popen(
                [str(interpreter.python), "-m", "kernelguard.guard", "--", "train.py", "--steps", "1"],
                env={**base, **own}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        extra = during(processes) if during is not None else None
        ended = {}
        for rank, process in processes.items():
            out, err = process.communicate(timeout=max(limit_s - (time.monotonic() - began), 1.0))
            ended[rank] = Ended(process.returncode, out, err)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    seconds = time.monotonic() - began
    run_dir = Path(ticket.run_dir) if ticket is not None else folder / "none"
    return Group(ended, run_dir, seconds, extra or {})


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Files below a folder, which is returned."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def wait_for_child(pid: int, own: str, below: str, *, limit_s: float = 90.0) -> int:
    """The process id of the child of `pid` that runs `own`, once it has a child of its own that runs `below`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        for child in _children(pid):
            if own in _command(child) and any(below in _command(inner) for inner in _children(child)):
                return child
        time.sleep(0.05)
    raise AssertionError(f"{pid} has no child {own} with a child {below}")


def processes_in(folder: Path, *, patience_s: float = 5.0) -> list[str]:
    """Command lines of processes whose working folder is `folder`, those that do not go away by themselves."""
    end = time.monotonic() + patience_s
    while True:
        there = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _folder(entry) == str(folder)]
        found = [_command(int(entry.name)) for entry in there if int(entry.name) != os.getpid()]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _folder(entry: Path) -> str:
    try:
        return str((entry / "cwd").readlink())
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    found = []
    # Of every thread: workers are started by threads.
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(text) for text in task.read_text().split()]
        except OSError:
            # The thread has just ended.
            continue
    return found
