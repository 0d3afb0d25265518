"""How the rows of the catalogue of public failures are put to the tool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

import configs
import crafted
from kernelguard.check import Request, run_check
from kernelguard.observe.files import save_environment
from kernelguard.observe.values import Distribution, Environment, Gpu, GpuState
from kernelguard.report.document import Check, to_document
from observed import Interpreter, transformers_base

CONV, GDN = "causal_conv1d_fn", "chunk_gated_delta_rule"
TRAINING = (CONV, GDN)
GOOD = {"flash-linear-attention": "0.6.0", "fla-core": "0.6.0", "causal-conv1d": "1.7.0", "mamba-ssm": "2.3.2"}
"""Distributions of a machine with every kernel."""


class Said:
    """What one check said."""

    def __init__(self, check: Check) -> None:
        document = to_document(check)
        self.document: dict[str, Any] = json.loads(json.dumps(document))
        self.code = check.exit_code
        self.status = str(check.status)
        self.paths = {path["symbol"]: path for path in document["fast_paths"]}
        self.findings = document["findings"]

    def codes(self, status: str | None = None) -> set[str]:
        """Codes of all findings (of one status)."""
        return {f["code"] for f in self.findings if status in {None, f["status"]}}

    def finding(self, code: str) -> dict[str, Any]:
        """The first finding of a code."""
        return next(f for f in self.findings if f["code"] == code)

    def text(self) -> str:
        """Every reason and fix, for words that must, or must not, be said."""
        return "\n".join(f"{f['reason']}\n{f['fix']}" for f in self.findings)


def tree(version: str) -> str:
    """The source of a transformers release, as `--transformers` takes it."""
    return str(transformers_base(version).site / "transformers")


def _ask(tmp: Path, config: Mapping[str, Any], flags: Mapping[str, Any], **where: Any) -> Said:
    model = configs.write(tmp / "model", dict(config))
    return Said(run_check(Request(model=str(model), flags=flags, **where), {"PATH": "", "HOME": str(tmp)}))


def described(
    tmp: Path,
    config: Mapping[str, Any] = configs.QWEN3_5,
    *,
    transformers: str = "5.24.0",
    pkgs: Mapping[str, str] = GOOD,
    gpu: str | None = None,
    machine: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    **flags: Any,
) -> Said:
    """A check of a captured environment (`--environment`): a complete machine with one GPU and changes to it."""
    capability = None if gpu is None else (int(gpu.partition(".")[0]), int(gpu.partition(".")[2]))
    environment = Environment(
        origin="captured",
        live=False,
        executable="/venv/bin/python",
        python=Version("3.12.3"),
        system="Linux",
        machine="x86_64",
        glibc=Version("2.39"),
        torch=Version("2.13.0"),
        torch_cuda=Version("13.0"),
        torch_is_cpu=False,
        cxx11_abi=True,
        triton=Version("3.7.1"),
        ptxas=Version("13.3"),
        driver=Version("590.10"),
        gpus=() if capability is None else (Gpu(name="GPU", capability=capability),),
        gpu_state=GpuState.NONE if capability is None else GpuState.USABLE,
        distributions={n: Distribution(name=n, version=v, location="/venv/site") for n, v in pkgs.items()},
        transformers_version=Version(transformers),
        variables=variables or {},
    )
    changed: dict[str, Any] = {
        name: Version(value) if isinstance(value, str) and value[:1].isdigit() else value
        for name, value in (machine or {}).items()
    }
    tmp.mkdir(exist_ok=True)
    file = tmp / "environment.json"
    save_environment(replace(environment, **changed), file)
    return _ask(tmp, config, flags, environment=file, transformers=tree(transformers))


def at_target(tmp: Path, spec: str, config: Mapping[str, Any] = configs.QWEN3_5, **flags: Any) -> Said:
    """A check of a machine written by hand (`--target`)."""
    return _ask(tmp, config, flags, target=spec, transformers=tree("5.24.0"))


def live(
    tmp: Path, env: Interpreter, config: Mapping[str, Any] = configs.QWEN3_5, *, level: str = "import", **flags: Any
) -> Said:
    """A check of an interpreter (`--python`); at level resolve nothing of it is executed."""
    return _ask(tmp, config, flags, python=env.python, level=level)


def installed(site: Path, distribution: str, package: str, version: str, files: tuple[str, ...]) -> None:
    """Give a distribution a RECORD that lists these files of its, as pip does."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in (f"{package}/__init__.py", *files)))


def needing_version(path: Path, library: str, version: str) -> None:
    """Compile a module that wants a symbol at a version of a system library: `libc.so.6`, `GLIBC_2.99`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stub, script, source = path.with_name("stub.c"), path.with_name("stub.map"), path.with_name("source.c")
    stub.write_text("int kernelguard_versioned(void) { return 1; }\n")
    script.write_text(f"{version} {{ global: kernelguard_versioned; }};\n")
    source.write_text("int kernelguard_versioned(void);\nint keep(void) { return kernelguard_versioned(); }\n")
    made = path.with_name(library)
    shared = ["cc", "-shared", "-fPIC", "-nostdlib"]
    subprocess.run([*shared, f"-Wl,-soname,{library}", f"-Wl,--version-script={script}", "-o", made, stub], check=True)
    subprocess.run([*shared, "-o", path, source, made], check=True)
    for leftover in (stub, script, source, made):
        leftover.unlink()


def a_torch_for_cuda(site: Path, version: str, cuda: str) -> None:
    """A torch in this interpreter's own folder, as its files describe it: nothing imports it at level resolve."""
    (site / "torch").mkdir()
    (site / "torch/__init__.py").touch()
    (site / "torch/version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n")
    for name, text in crafted.metadata("torch", version, "torch").items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
