"""What a container has that Triton and CUDA need: read from files and the environment, nothing is imported.

Run by the image's own Python as `python -I look.py`; prints one JSON object. Standard library only, Python 3.9+.
"""

# ruff: noqa: PTH110, PTH112, PTH113, PTH118, PTH123, PTH207, T201

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
from typing import Any


def main() -> None:
    """Print it."""
    print(json.dumps(look()))


def look() -> dict[str, Any]:
    """The facts."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: S108 - that is where it is
    include = sysconfig.get_path("include")
    compilers = [name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and shutil.which(name)]
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "triton": version("triton"),
        "torch": version("torch"),
        "torch_cuda": torch_cuda(),
        "compiler": compilers[0] if compilers else "",
        "libc_headers": bool(glob.glob("/usr/include/stdio.h") or glob.glob("/usr/include/*/stdio.h")),
        "python_headers": os.path.isfile(os.path.join(include, "Python.h")),
        "include": include,
        "nvcc": shutil.which("nvcc") or "",
        "uncompiled": [name for name in LARGE if uncompiled(name)],
        "compat": compat(),
        "shm_bytes": shm.f_frsize * shm.f_blocks if shm is not None else 0,
        "devices": sorted(glob.glob("/dev/nvidia[0-9]*")),
        "control": os.path.exists("/dev/nvidiactl"),
        "libcuda": libcuda(),
        "driver": driver(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NVIDIA_", "CUDA_")) or k in KNOWN},
        "databricks_python": os.path.exists("/databricks/python/bin/python"),
        "os": os_release(),
        "distributions": distributions(),
    }


LARGE = ("torch", "transformers", "triton", "fla")
"""What a training process imports most of."""
KNOWN = ("LD_LIBRARY_PATH", "OPENSSL_FORCE_FIPS_MODE", "TORCH_CUDA_ARCH_LIST", "CC")


def version(name: str) -> str:
    """Of a distribution, empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def distributions() -> dict[str, str]:
    """Versions by lower-case name."""
    found = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found[name.lower().replace("_", "-")] = one.version
    return found


def torch_cuda() -> str:
    """The CUDA that torch was built for, as its version.py says; empty: a CPU build, or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    for folder in spec.submodule_search_locations:
        path = os.path.join(folder, "version.py")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as handle:
                found = re.search(r"^cuda(?:\s*:[^=]+)?\s*=\s*'([\d.]+)'", handle.read(), re.MULTILINE)
            if found:
                return found.group(1)
    return ""


def uncompiled(name: str) -> bool:
    """Whether most modules in the package's own folder have no bytecode for this Python."""
    # `python -I` does not heed the variable, which a training process in the same image does.
    sys.pycache_prefix = sys.pycache_prefix or os.environ.get("PYTHONPYCACHEPREFIX")
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        modules = glob.glob(os.path.join(glob.escape(folder), "*.py"))
        without = [path for path in modules if not os.path.isfile(importlib.util.cache_from_source(path))]
        if 2 * len(without) > len(modules):
            return True
    return False


def compat() -> list[str]:
    """Folders with a libcuda of NVIDIA's forward-compatibility package that a program would find first."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for path in glob.glob("/etc/ld.so.conf.d/*"):
        with open(path, encoding="utf-8", errors="replace") as handle:
            named += [line.strip() for line in handle]
    return sorted({f for f in named if "compat" in f and glob.glob(os.path.join(f, "libcuda.so*"))})


def libcuda() -> bool:
    """Whether the driver's library was put into this container."""
    places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib"]
    places += [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p and "compat" not in p]
    return any(glob.glob(os.path.join(place, "libcuda.so.1*")) for place in places)


def driver() -> str:
    """The driver of the machine; /proc is the host's also in a container without a GPU."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as handle:
            found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", handle.read())
    except OSError:
        return ""
    return found.group(1) if found else ""


def os_release() -> str:
    """`ubuntu 24.04`."""
    try:
        with open("/etc/os-release", encoding="utf-8") as handle:
            rows = dict(line.rstrip("\n").split("=", 1) for line in handle if "=" in line)
    except OSError:
        return ""
    return "{} {}".format(rows.get("ID", ""), rows.get("VERSION_ID", "")).replace('"', "").strip()


if __name__ == "__main__":
    main()
