"""Does each of these modules really import, and which of the asked names does it have?

Run by the observed interpreter as `python importer.py request.json result.jsonl`. Standard library and the modules
under test only. Every module is imported in a process of its own, after torch, because a kernel package may crash,
hang, exit or print whatever it likes:

    request  {"modules": [{"module": "fla.ops.kda", "symbols": ["chunk_kda"]}], "limit_s": 60, "fork": true}
    result   {"stage": ...} before each step, {"kind": "import", ...} for each module, {"done": true}

`fork: false` uses fresh processes instead of forks of one that has torch.

The one change to the environment is HF_HUB_OFFLINE=1: looking at a package downloads nothing.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH100, PTH108, PTH110, PTH120, PTH123

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import importlib
import importlib.metadata
import importlib.util
import json
import re
import signal
import time
import traceback
import warnings
from typing import Any, Callable

_FILE = os.path.abspath(__file__)
_RESULT = os.path.abspath(sys.argv[2])
# Bound before anything foreign is imported, which could replace them.
_dumps = json.dumps
_open, _write, _close, _replace = os.open, os.write, os.close, os.replace
_getpid, _exit = os.getpid, os._exit
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_POLL_S = 0.005
_TORCH_LIMIT_S = 120.0


def write(path: str, record: dict[str, Any]) -> None:
    """Append one record to `path`."""
    descriptor = _open(path, _FLAGS, 0o600)
    _write(descriptor, (_dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
    _close(descriptor)


def no_core_files() -> None:
    """A crash here is a result; it should not leave a core file of some gigabytes behind."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def missing_module(error: BaseException | None) -> str:
    """The module whose absence caused an exception, also when a package wrapped it in one of its own."""
    for _ in range(10):
        if isinstance(error, ModuleNotFoundError):
            return error.name or ""
        if error is None:
            break
        error = error.__cause__ or error.__context__
    return ""


def attempt(module: str, symbols: list[str]) -> dict[str, Any]:
    """Import `module` in this very process and say what came of it."""
    try:
        imported = importlib.import_module(module)
        file = getattr(imported, "__file__", None)
        fact: dict[str, Any] = {"outcome": "ok", "file": str(file or ""), "symbols": {}}
        fact["search_path"] = [str(entry) for entry in getattr(imported, "__path__", ())]
        # Not getattr: a package whose names are made on demand may raise for this one.
        version = getattr(sys.modules.get(module.partition(".")[0]), "__dict__", {}).get("__version__")
        fact["version"] = version if isinstance(version, str) else ""
    except SystemExit as error:
        return {"outcome": "exited", "error_type": "SystemExit", "error": f"exit code {error.code}"}
    except BaseException as error:
        missing = missing_module(error)
        return {"outcome": "raised", "error_type": type(error).__name__, "error": str(error), "missing_module": missing}
    for symbol in symbols:
        try:
            # A package that sets its name to None when its extension does not load lacks it.
            fact["symbols"][symbol] = getattr(imported, symbol) is not None
        except AttributeError:
            fact["symbols"][symbol] = False
        except BaseException as error:
            fact["symbols"][symbol] = False
            fact["error_type"], fact["error"] = type(error).__name__, f"{symbol}: {error}"
            fact["missing_module"] = missing_module(error)
    return fact


def answer(module: str, symbols: list[str], path: str) -> None:
    """Write what `attempt` found to `path`, from this process only, all of it or nothing."""
    pid = _getpid()
    fact = attempt(module, symbols)
    if _getpid() != pid:
        # The module forked while it was imported, and this is the copy.
        _exit(0)
    write(path + ".part", fact)
    _replace(path + ".part", path)


def forked(module: str, symbols: list[str], path: str) -> int:
    """Start the import in a fork of this process, which has torch already."""
    with warnings.catch_warnings():
        # Python 3.12 warns about forking beside threads, which numpy may have started. None of them is at work.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        try:
            answer(module, symbols, path)
            _exit(0)
        except BaseException:
            traceback.print_exc()
            _exit(70)
    return pid


def fresh(module: str, symbols: list[str], path: str) -> int:
    """Start the import in a new interpreter."""
    request = path + ".request"
    with open(request, "w", encoding="utf-8") as handle:
        json.dump({"one": module, "symbols": symbols}, handle)
    # Not subprocess.Popen, whose object would reap the child behind `wait_for`'s back.
    return os.posix_spawn(sys.executable, [sys.executable, _FILE, request, path], os.environ)


def wait_for(pid: int, limit_s: float, ready: str = "") -> tuple[int | None, int]:
    """Exit code and signal of a child; the exit code is None when it had to be killed at the limit.

    With `ready`, the limit starts when that file is there: when the child has imported torch.
    """
    deadline = time.monotonic() + limit_s + (_TORCH_LIMIT_S if ready else 0)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            if os.WIFSIGNALED(status):
                return -1, os.WTERMSIG(status)
            return os.WEXITSTATUS(status), 0
        if ready and os.path.exists(ready):
            ready = ""
            deadline = time.monotonic() + limit_s
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, 0
        time.sleep(_POLL_S)


def signal_name(number: int) -> str:
    """`SIGABRT`, or a number for one without a name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def supervised(
    start: Callable[[str, list[str], str], int], module: str, symbols: list[str], limit_s: float
) -> dict[str, Any]:
    """One import in a child process, whatever becomes of it."""
    path = _RESULT + ".child"
    for leftover in (path, path + ".part", path + ".ready"):
        if os.path.exists(leftover):
            os.unlink(leftover)
    code, number = wait_for(start(module, symbols, path), limit_s, path + ".ready" if start is fresh else "")
    fact: dict[str, Any] = {}
    try:
        with open(path, encoding="utf-8") as handle:
            fact = json.load(handle)
    except FileNotFoundError:
        # It never came to its answer.
        pass
    if fact:
        return fact
    if code is None:
        return {"outcome": "hung", "error": f"not imported after {limit_s:g} s"}
    if number:
        return {"outcome": "crashed", "signal": signal_name(number)}
    return {"outcome": "exited", "error": f"exit code {code}"}


def top_level_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where `import <top-level package>` would look, without importing it."""
    try:
        return importlib.util.find_spec(module.partition(".")[0])
    except ValueError:
        # It is imported already, and without a spec: so it can be imported.
        return importlib.machinery.ModuleSpec(module, None)


def owners(top: str, file: str) -> list[str]:
    """Distributions whose records list the import name `top`, or whose editable source folder holds `file`."""
    names = []
    listed = re.compile(rf"^\"?{re.escape(top)}(?:/|\.py,|\.[^/,]*\.?so,)", re.MULTILINE)
    for dist in importlib.metadata.distributions():
        try:
            tops = (dist.read_text("top_level.txt") or "").split()
            found = top in tops or listed.search(dist.read_text("RECORD") or "") is not None
        except UnicodeDecodeError:
            # Damaged metadata lists nothing; the environment worker names it.
            continue
        if not found and file:
            url = re.search(r"\"url\":\s*\"file://([^\"]+)\"", dist.read_text("direct_url.json") or "")
            found = url is not None and os.path.realpath(file).startswith(os.path.realpath(url.group(1)) + os.sep)
        name = dist.metadata["Name"] if found else None
        if name:
            names.append(re.sub(r"[-_.]+", "-", name).lower())
    return sorted(set(names))


def examine(module: str, symbols: list[str], limit_s: float, use_fork: bool) -> dict[str, Any]:
    """Everything about one module."""
    try:
        spec = top_level_spec(module)
    except Exception as error:
        # A broken import hook: importing the module runs into it as well.
        return {"outcome": "raised", "error_type": type(error).__name__, "error": str(error)}
    if spec is None:
        return {"outcome": "absent"}
    if use_fork:
        fact = supervised(forked, module, symbols, limit_s)
    if not use_fork or fact["outcome"] in ("hung", "crashed"):
        # What a fork could not do, a process that never forked may: only what happens there as well is reported.
        fact = supervised(fresh, module, symbols, limit_s)
    if fact["outcome"] == "raised" and "HF_HUB_OFFLINE" in fact["error"] and not _USER_OFFLINE:
        fact["outcome"] = "not-tried"
        fact["error"] = f"it asks the hub, and this check downloads nothing: {fact['error']}"
    if fact["outcome"] != "ok":
        fact["file"] = spec.origin or ""
        fact["search_path"] = list(spec.submodule_search_locations or ())
    fact["distributions"] = owners(module.partition(".")[0], fact["file"] or "".join(fact["search_path"][:1]))
    return fact


def import_torch() -> None:
    """Import torch, as transformers does before anything else."""
    try:
        importlib.import_module("torch")
    except BaseException as error:
        write(_RESULT, {"kind": "torch", "error_type": type(error).__name__, "error": str(error)})


def main() -> None:
    """Go through the request."""
    no_core_files()
    with open(sys.argv[1], encoding="utf-8") as handle:
        request = json.load(handle)
    sys.argv[1:] = []
    if "one" in request:
        # The child of `fresh`: one module, in this process.
        try:
            importlib.import_module("torch")
        except BaseException:
            traceback.print_exc()
        write(_RESULT + ".ready", {})
        answer(request["one"], request["symbols"], _RESULT)
        _exit(0)
    use_fork = bool(request.get("fork", True)) and sys.platform == "linux"
    write(_RESULT, {"stage": "import torch"})
    if use_fork:
        import_torch()
    for entry in request["modules"]:
        module = entry["module"]
        write(_RESULT, {"stage": f"import {module}"})
        fact = examine(module, entry["symbols"], float(request["limit_s"]), use_fork)
        write(_RESULT, {"kind": "import", "module": module, **fact})
    write(_RESULT, {"done": True})


_USER_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
os.environ["HF_HUB_OFFLINE"] = "1"
main()
