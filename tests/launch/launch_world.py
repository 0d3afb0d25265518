"""An interpreter with working kernels, a tiny model, and the lock and verdict that the tool itself makes of them."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "verify"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "guard"))

import faults
import packages

import observed
from command import Command

VERSION = observed.VERSIONS[-1]
OWNED = {
    "flash_linear_attention": ("fla/__init__.py", "fla/ops", "fla/modules"),
    "fla_core": (),
    "causal_conv1d": ("causal_conv1d",),
}
"""Folders and files of each crafted distribution; both of fla's have the import name, one has the files."""
TINY = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class World:
    folder: Path
    env: observed.Interpreter

    @property
    def python(self) -> Path:
        return self.env.python

    @property
    def lock(self) -> Path:
        return self.folder / "kernelguard.lock"

    @property
    def verdict(self) -> Path:
        return self.folder / "kernelguard.verdict.json"

    @property
    def config(self) -> Path:
        return self.folder / "model" / "config.json"

    def launch(self, *arguments: str | Path, level: str = "interpreted", env: dict[str, str] | None = None) -> Command:
        """`kernelguard launch` on this world's lock, in its folder."""
        fixed = ["launch", self.lock, "--python", self.python, "--test-only-accept-level", level]
        return Command(*fixed, *arguments, cwd=self.folder, env={"OMP_NUM_THREADS": "1", **(env or {})})


def record(site: Path) -> None:
    """Give the crafted distributions the RECORD that a real installer writes."""
    for info in site.glob("*.dist-info"):
        owned = OWNED[info.name.partition("-")[0]]
        files = [f for name in owned for f in ([site / name] if (site / name).is_file() else (site / name).rglob("*"))]
        lines = []
        for file in sorted({*files, *(f for f in info.iterdir() if f.name != "RECORD")}):
            if file.is_file() and "__pycache__" not in file.parts:
                digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
                lines.append(f"{file.relative_to(site)},sha256={digest},{file.stat().st_size}")
        (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")


def make_interpreter(prefix: Path, changes: dict[str, str] | None = None) -> observed.Interpreter:
    """torch, transformers, and crafted fla and causal-conv1d that work on a CPU."""
    working = packages.working()
    # One that does what FAULT says, in the rank that has such a variable.
    working["causal_conv1d/__init__.py"] += faults.FAULTY_CONVOLUTION
    env = observed.environment(prefix, VERSION, working | (changes or {}))
    record(env.site)
    return env


@cache
def base() -> World:
    """Made once by the real commands, shared by all test runs as long as the code that makes it stays the same."""
    made_by = (Path(__file__), Path(packages.__file__), Path(faults.__file__))
    source = b"".join(p.read_bytes() for p in made_by)
    key = hashlib.sha256(source).hexdigest()[:12]
    folder = observed.CACHE / f"launch-{VERSION}-{key}"
    with observed._locked(folder.name):
        world = World(folder, observed.Interpreter(folder / "env"))
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make_interpreter(folder / "env")
            world.config.parent.mkdir()
            world.config.write_text(json.dumps(TINY))
            python = ["--python", str(world.python)]
            told = [Command("lock", world.config, "--record", *python, "-o", world.lock)]
            told.append(Command("verify", world.config, *python, "--level", "interpreted", "-o", world.verdict))
            for command in told:
                assert command.code == 0, command.out + command.err
            (folder / "complete").touch()
    return world
