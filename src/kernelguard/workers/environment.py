"""What does this interpreter have installed? Read from files and metadata: nothing of it is imported.

Run by the observed interpreter as `python environment.py request.json result.jsonl`. Standard library only.
"""
# pathlib would cost a good part of the time that this worker has.
# ruff: noqa: PTH100, PTH113, PTH118, PTH120, PTH123

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
from typing import List

# Variables that change which kernel is found, compiled or run. Anything else stays where it is.
VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_FORCE_PTX_JIT",
        "CUDA_CACHE_DISABLE",
        "NVIDIA_TF32_OVERRIDE",
        "USE_HUB_KERNELS",
        "DISABLE_KERNEL_MAPPING",
        "LOCAL_KERNELS",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_HOME",
        "HF_HUB_CACHE",
        "TRANSFORMERS_VERBOSITY",
        "TRANSFORMERS_CACHE",
        "TORCH_CUDA_ARCH_LIST",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHDYNAMO_DISABLE",
        "TORCH_COMPILE_DISABLE",
        "TORCH_EXTENSIONS_DIR",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSAFEPATH",
        "PYTHONNOUSERSITE",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "OMP_NUM_THREADS",
    }
)
PREFIXES = ("FLA_", "TRITON_", "CAUSAL_CONV1D_", "MAMBA_", "FLASH_ATTENTION_", "FLASH_ATTN_", "KERNELS_", "NCCL_")
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|AUTH", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\b(hf|sk|pk|gh[pousr]|github_pat|xox[abp]|glpat|AKIA)[-_]?[A-Za-z0-9_-]{16,}|://[^/@\s]+@")
# A release name in `nvcc --version` and `ptxas --version`: "release 12.8, V12.8.93".
CUDA_RELEASE = re.compile(r"release \d+\.\d+, V(\d+\.\d+(?:\.\d+)?)")


class Problems(List[str]):
    """Sentences about what could not be read."""

    def about(self, what: str, error: BaseException) -> None:
        """Note that looking at `what` raised `error`."""
        self.append(f"{what} could not be read: {type(error).__name__}: {error}")


def normalized(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def start(argv: list[str]) -> subprocess.Popen[bytes] | None:
    """A version query that runs while other things are read; None when there is no such program."""
    try:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError:
        return None


def answer(process: subprocess.Popen[bytes] | None, what: str, problems: Problems) -> str | None:
    """The CUDA release that `start` was asked for, or None."""
    if process is None:
        return None
    try:
        text = process.communicate(timeout=10)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        problems.append(f"{what} --version did not answer within 10 s")
        return None
    found = CUDA_RELEASE.search(text)
    if found is None:
        problems.append(f"{what} --version says no release: {text.strip()[-200:]!r}")
        return None
    return found.group(1)


def package_folder(name: str, problems: Problems) -> str | None:
    """The folder of a regular top-level package that `import name` would take, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError) as error:
        problems.about(f"package {name}", error)
        return None
    if spec is None:
        return None
    if spec.origin is None or not spec.submodule_search_locations:
        where = ", ".join(spec.submodule_search_locations or ()) or str(spec.origin)
        problems.append(f"{name} is not a regular package: {where}")
        return None
    return os.path.realpath(os.path.dirname(os.path.abspath(spec.origin)))


def text_of(path: str) -> str | None:
    """A file's text, or None when there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def assigned(text: str, name: str) -> str | None:
    """The string literal that a module assigns to `name`, or None."""
    found = re.search(r"^%s\s*(?::[^=\n]*)?=\s*(['\"])([^'\"]*)\1" % re.escape(name), text, re.MULTILINE)
    return found.group(2) if found else None


def top_level(dist: importlib.metadata.Distribution) -> list[str]:
    """Import names that a distribution's own records list."""
    listed = dist.read_text("top_level.txt")
    if listed:
        return sorted(set(listed.split()))
    record = dist.read_text("RECORD")
    if not record:
        return []
    names = set(re.findall(r"^\"?([^/,\"\n]+)/[^\n,]*\.(?:py|so|pyd),", record, re.MULTILINE))
    names.update(re.findall(r"^\"?([^/,.\"\n]+)(?:\.[^/,\n]+)?\.(?:py|so|pyd),", record, re.MULTILINE))
    return sorted(name for name in names if name.isidentifier())


def distributions(problems: Problems) -> list[dict[str, object]]:
    """Every installed distribution; of two with one name the one that metadata lookups find first comes first."""
    found = []
    for dist in importlib.metadata.distributions():
        where = str(dist.locate_file(""))
        try:
            head = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
            name = re.search(r"^Name:\s*(\S+)", head, re.MULTILINE)
            version = re.search(r"^Version:\s*(\S+)", head, re.MULTILINE)
            if name is None or version is None:
                problems.append(f"a distribution in {where} has no name or version in its metadata")
                continue
            entry = {"name": normalized(name.group(1)), "version": version.group(1), "location": where}
            entry["top_level"] = top_level(dist)
        except (OSError, UnicodeDecodeError) as error:
            problems.about(f"metadata of a distribution in {where}", error)
            continue
        found.append(entry)
    return found


def torch_facts(folder: str) -> dict[str, object]:
    """What torch says about itself in files: version, CUDA, HIP, and the C++ ABI that its library exports."""
    text = text_of(os.path.join(folder, "version.py")) or ""
    facts: dict[str, object] = {"folder": folder, "version": assigned(text, "__version__")}
    facts["cuda"] = assigned(text, "cuda")
    facts["hip"] = assigned(text, "hip")
    facts["says_cuda"] = re.search(r"^cuda\b", text, re.MULTILINE) is not None
    facts["cxx11_abi"] = None
    # torch's version does not tell the ABI (2.6.0 shipped both); the mangled name of c10::Error's constructor does.
    library = os.path.join(folder, "lib", "libc10.so")
    if os.path.isfile(library):
        with open(library, "rb") as handle:
            content = handle.read()
        new = b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx11" in content
        old = b"_ZN3c105ErrorC1ENS_14SourceLocationESs" in content
        if new != old:
            facts["cxx11_abi"] = new
    return facts


def shown_variables() -> dict[str, str]:
    """The relevant part of the environment, with anything that looks like a secret masked."""
    shown = {}
    for name, value in os.environ.items():
        if (name in VARIABLES or name.startswith(PREFIXES)) and not SECRET_NAME.search(name):
            shown[name] = "(masked)" if SECRET_VALUE.search(value) else value
    return shown


def nvcc_path() -> str:
    """Where torch's extension builder would look for nvcc, in its order."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            return os.path.join(home, "bin", "nvcc")
    return shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def glibc() -> str | None:
    """The C library's version, or None where it is not glibc."""
    try:
        value = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return None
    return value.rpartition(" ")[2] or None


def observe() -> dict[str, object]:
    """The one record of this worker."""
    problems = Problems()
    nvcc = nvcc_path()
    nvcc_query = start([nvcc, "--version"])
    folders = {name: package_folder(name, problems) for name in ("torch", "transformers", "triton")}
    ptxas, ptxas_queries = {}, {}
    if folders["triton"]:
        bundled = os.path.join(folders["triton"], "backends", "nvidia", "bin")
        for program, variable in (("ptxas", "TRITON_PTXAS_PATH"), ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH")):
            path = os.environ.get(variable) or os.path.join(bundled, program)
            ptxas_queries[program] = (path, start([path, "--version"]))
    record: dict[str, object] = {
        "kind": "environment",
        "python": "%d.%d.%d" % sys.version_info[:3],
        "release_level": sys.version_info.releaselevel,
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "system": platform.system(),
        "machine": platform.machine(),
        "glibc": glibc(),
        "variables": shown_variables(),
        "distributions": distributions(problems),
        "torch": None,
        "transformers": None,
        "triton": None,
    }
    if folders["torch"]:
        try:
            record["torch"] = torch_facts(folders["torch"])
        except OSError as error:
            problems.about(f"torch in {folders['torch']}", error)
    for name in ("transformers", "triton"):
        folder = folders[name]
        if folder:
            text = text_of(os.path.join(folder, "__init__.py")) or ""
            record[name] = {"folder": folder, "version": assigned(text, "__version__")}
    for program, (path, query) in ptxas_queries.items():
        version = answer(query, path, problems)
        if version:
            ptxas[program] = version
    record["ptxas"] = ptxas
    record["nvcc"] = answer(nvcc_query, nvcc, problems)
    record["problems"] = list(problems)
    return record


def main() -> None:
    """Write the record, then the marker that nothing is missing."""
    result = os.path.abspath(sys.argv[2])
    line = json.dumps(observe(), ensure_ascii=False) + "\n" + json.dumps({"done": True}) + "\n"
    descriptor = os.open(result, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(descriptor, "wb") as handle:
        # A file name that is no UTF-8 would otherwise come back as something that cannot be printed.
        handle.write(line.encode("utf-8", "replace"))


main()
