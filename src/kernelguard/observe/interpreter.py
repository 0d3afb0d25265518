"""Which interpreter is observed, and what is installed in it?

`observe` starts the `environment` worker, which imports nothing of what it looks at, and asks torch about the GPU in
a process of its own only where there may be one.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.errors import InputError, KernelguardError, UndeterminedError
from kernelguard.observe import nvidia
from kernelguard.observe.process import Record, WorkerResult, run_worker, signal_name
from kernelguard.observe.values import Distribution, Environment, Gpu

OLDEST = Version("3.9")
"""The oldest Python that the workers run on; also the oldest that any transformers read here supports."""
_HINT = "give the interpreter that will train: --python /path/to/venv/bin/python"
_PROBE = "import sys; sys.stdout.write('python %d.%d.%d' % sys.version_info[:3])"
_PROBE_TIMEOUT_S = 20.0
_ELF_MACHINES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}


def find_interpreter(explicit: Path | None, environ: Mapping[str, str]) -> str:
    """The interpreter to observe: the given one, else `$VIRTUAL_ENV`'s, else `python` on PATH.

    It is never silently the one that runs kernelguard.

    Raises:
        InputError: there is none, or the given path cannot be an interpreter.
    """
    if explicit is not None:
        found = _usable_path(explicit, environ)
        _refuse_other_programs(found)
        return found
    active = environ.get("VIRTUAL_ENV")
    if active:
        python = Path(active, "bin", "python")
        if not python.exists():
            raise InputError(f"VIRTUAL_ENV is {active}, but there is no {python}", hint=_HINT)
        return str(python)
    on_path = shutil.which("python", path=environ.get("PATH", os.defpath))
    if on_path is None:
        other = shutil.which("python3", path=environ.get("PATH", os.defpath))
        raise InputError(
            "no interpreter to observe: VIRTUAL_ENV is not set and there is no `python` on PATH",
            hint=_HINT if other is None else f"--python {other}, or the one that will train",
        )
    return on_path


def _usable_path(path: Path, environ: Mapping[str, str]) -> str:
    if not path.exists():
        named = shutil.which(str(path), path=environ.get("PATH", os.defpath)) if len(path.parts) == 1 else None
        if named is None:
            raise InputError(f"there is no interpreter at {path}", hint=_HINT)
        return named
    if path.is_dir():
        inside = path / "bin" / "python"
        hint = f"--python {inside}" if inside.exists() else _HINT
        raise InputError(f"{path} is a folder, not an interpreter", hint=hint)
    if not os.access(path, os.X_OK):
        raise InputError(f"{path} is not executable", hint=_HINT)
    # Not resolved: a virtual environment's python is a link, and what it links to is another interpreter.
    return str(path.absolute())


def observe(python: str, *, timeout: float = 60.0, gpu: bool = True) -> Environment:
    """The environment of the interpreter `python` on this machine.

    A missing torch or transformers is data (None). `gpu=False` leaves out the question to torch, which has to be
    imported for it; drivers and devices are still looked at.

    Raises:
        InputError: `python` cannot be run, is not a Python, or one before 3.9.
        UndeterminedError: it does not answer within `timeout` seconds.
    """
    _refuse_other_programs(python)
    try:
        result = run_worker(python, "environment", {}, timeout=timeout)
    except OSError as error:
        raise _not_executable(python, error) from error
    record = next(result.of_kind("environment"), None)
    if record is None or not result.finished:
        raise _no_answer(python, result, timeout)
    if Version(record["python"]) < OLDEST:
        raise _too_old(python, record["python"])
    return _environment(python, record, timeout=timeout, ask_torch=gpu)


def _not_executable(python: str, error: OSError) -> InputError:
    try:
        with Path(python).open("rb") as handle:
            head = handle.read(20)
    except OSError:
        head = b""
    if head[:4] == b"\x7fELF" and len(head) == 20:
        (number,) = struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])
        built_for = _ELF_MACHINES.get(number, f"ELF machine {number}")
        if built_for != platform.machine():
            return InputError(
                f"{python} is a program for {built_for}; this machine is {platform.machine()}", hint=_HINT
            )
    return InputError(f"{python} cannot be run: {error.strerror or error}", hint=_HINT)


def _too_old(python: str, version: str) -> InputError:
    return InputError(f"{python} is Python {version}; {OLDEST} or newer is needed", hint=_HINT)


def _refuse_other_programs(python: str) -> None:
    """An arbitrary program must not be given our files as arguments: /bin/rm would remove them."""
    if "py" not in Path(python).name.lower():
        _probe(python)


def _probe(python: str) -> None:
    """Raise unless `python -c` prints a version that is new enough."""
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UndeterminedError(f"{python} did not answer within {_PROBE_TIMEOUT_S:g} s", hint=_HINT) from error
    except OSError as error:
        raise _not_executable(python, error) from error
    # At the end: a sitecustomize may print before.
    said = re.search(r"python (\d+\.\d+\.\d+)\Z", answer.stdout.decode("utf-8", "replace"))
    if answer.returncode < 0:
        raise InputError(f"{python} was killed by {signal_name(-answer.returncode)} when it was started", hint=_HINT)
    if answer.returncode != 0 or said is None:
        last = (answer.stderr or answer.stdout).decode("utf-8", "replace").strip().splitlines()[-1:]
        raise InputError(f"{python} is not a Python interpreter" + "".join(f" ({line})" for line in last), hint=_HINT)
    if Version(said[1]) < OLDEST:
        raise _too_old(python, said[1])


def _no_answer(python: str, result: WorkerResult, timeout: float) -> KernelguardError:
    """Why the worker said nothing: the interpreter is no Python, or too old, or something stranger."""
    if result.timed_out:
        return UndeterminedError(f"{python} did not answer within {timeout:g} s", hint=_HINT)
    try:
        _probe(python)
    except KernelguardError as error:
        return error
    last = "".join(f": {line}" for line in result.output.strip().splitlines()[-1:])
    return UndeterminedError(f"the worker in {python} {result.ending()}{last}", hint=_HINT)


def _environment(python: str, record: Record, *, timeout: float, ask_torch: bool) -> Environment:
    problems = [str(problem) for problem in record["problems"]]
    listed = [_distribution(entry) for entry in record["distributions"]]
    problems += _duplicates(listed)
    distributions = {entry.name: entry for entry in reversed(listed)}
    torch = record["torch"]
    torch_version, torch_cuda, torch_is_cpu = _torch(torch, problems)
    transformers = record["transformers"]
    hardware = nvidia.look()
    report = None
    if ask_torch and torch is not None and hardware.devices:
        report = ask_gpu(python, timeout=timeout)
    state, detail = nvidia.decide(hardware, torch_is_cpu=torch_is_cpu, variables=record["variables"], report=report)
    gpus = report.gpus if report is not None and report.gpus else hardware.gpus
    if hardware.detail:
        problems.append(hardware.detail)
    return Environment(
        origin=python,
        live=True,
        # As it was named, not sys.executable: a wrapper that sets LD_LIBRARY_PATH has to be gone through again.
        executable=python,
        python=Version(record["python"]),
        system=record["system"] or None,
        machine=record["machine"] or None,
        glibc=_version(record["glibc"], "glibc", problems),
        torch=torch_version,
        torch_cuda=torch_cuda,
        torch_is_cpu=torch_is_cpu,
        cxx11_abi=None if torch is None else torch["cxx11_abi"],
        triton=_package_version("triton", record["triton"], distributions, problems),
        ptxas=_version(_ptxas(record["ptxas"], gpus), "ptxas", problems),
        driver=hardware.driver,
        gpus=gpus,
        gpu_state=state,
        gpu_detail=detail,
        distributions=distributions,
        transformers_root=None if transformers is None else transformers["folder"],
        transformers_version=_package_version("transformers", transformers, distributions, problems),
        variables=dict(sorted(record["variables"].items())),
        cuda_toolkit=_version(record["nvcc"], "nvcc", problems),
        problems=tuple(problems),
    )


def ask_gpu(python: str, *, timeout: float) -> nvidia.TorchReport:
    """What the observed interpreter's torch says about GPUs, asked in a process of its own."""
    result = run_worker(python, "gpu", {}, timeout=timeout)
    gpus = tuple(
        Gpu(
            name=str(device["name"]),
            capability=(int(device["capability"][0]), int(device["capability"][1])),
            memory_bytes=int(device["memory_bytes"]),
        )
        for device in result.of_kind("device")
    )
    errors = [f"{entry['type']}: {entry['text']}" for entry in result.of_kind("error")]
    cuda = next(result.of_kind("cuda"), None)
    if not result.finished:
        return nvidia.TorchReport(available=None, gpus=gpus, error=f"the worker {result.ending()}")
    if cuda is None:
        return nvidia.TorchReport(available=None, error="; ".join(errors))
    # is_available() can be True on NVML's word alone; the initialization that follows it decides.
    return nvidia.TorchReport(available=bool(cuda["available"]) and not errors, gpus=gpus, error="; ".join(errors))


def _distribution(entry: Mapping[str, Any]) -> Distribution:
    return Distribution(
        name=str(entry["name"]),
        version=str(entry["version"]),
        location=str(entry["location"]),
        top_level=tuple(entry["top_level"]),
    )


def _duplicates(listed: Iterable[Distribution]) -> list[str]:
    by_name: dict[str, list[Distribution]] = {}
    for entry in listed:
        by_name.setdefault(entry.name, []).append(entry)
    return [
        f"{name} is installed {len(entries)} times: "
        + ", ".join(f"{entry.version} in {entry.location}" for entry in entries)
        for name, entries in by_name.items()
        # One folder that is twice on sys.path lists the same thing twice.
        if len({(entry.version, os.path.realpath(entry.location)) for entry in entries}) > 1
    ]


def _torch(facts: Mapping[str, Any] | None, problems: list[str]) -> tuple[Version | None, Version | None, bool | None]:
    if facts is None:
        return None, None, None
    version = _version(facts["version"], f"torch in {facts['folder']}", problems)
    cuda = _version(facts["cuda"], "torch.version.cuda", problems)
    if facts["version"] is None or not facts["says_cuda"]:
        problems.append(f"{facts['folder']}/version.py does not say torch's version and CUDA")
        return version, cuda, None
    if facts["hip"] is not None:
        problems.append(f"torch is built for ROCm {facts['hip']}, which kernelguard knows nothing about")
    return version, cuda, facts["cuda"] is None and facts["hip"] is None


def _package_version(
    name: str,
    facts: Mapping[str, Any] | None,
    distributions: Mapping[str, Distribution],
    problems: list[str],
) -> Version | None:
    """The version in the package's own source; metadata only where that says nothing."""
    if facts is None:
        return None
    installed = distributions.get(name)
    if facts["version"] is None:
        return _version(installed.version if installed else None, name, problems)
    # The local part (+git1234) is often in one of the two places only.
    if installed is not None and installed.version.partition("+")[0] != facts["version"].partition("+")[0]:
        problems.append(
            f"{name} in {facts['folder']} is {facts['version']}, but its metadata in {installed.location} says "
            f"{installed.version}"
        )
    return _version(facts["version"], name, problems)


def _ptxas(versions: Mapping[str, str], gpus: tuple[Gpu, ...]) -> str | None:
    """Triton's assembler for these GPUs; newer ones bring a second one for Blackwell."""
    blackwell = any(gpu.capability is not None and gpu.capability[0] >= 10 for gpu in gpus)
    return versions.get("ptxas-blackwell" if blackwell else "ptxas") or versions.get("ptxas")


def _version(text: str | None, what: str, problems: list[str]) -> Version | None:
    if text is None:
        return None
    try:
        return Version(text)
    except InvalidVersion:
        problems.append(f"the version of {what} is no version: {text!r}")
        return None
