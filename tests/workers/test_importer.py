"""Every way in which importing a kernel package goes wrong, each really done by a package, each told apart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import crafted
from kernelguard.observe.process import Record, WorkerResult, run_worker
from observed import Interpreter, environment, make_venv, torch_base

_FORK = "import os\npid = os.fork()\n"
_UNDEFINED = "_ZN3c105ErrorC2ENS_14SourceLocationESs"


@dataclass(frozen=True)
class Case:
    """A package, and what the importer has to say about it."""

    files: Mapping[str, str]
    expected: Mapping[str, Any]
    module: str = ""
    symbols: tuple[str, ...] = ()


def _one(text: str) -> dict[str, str]:
    return {"{name}/__init__.py": text}


CASES: dict[str, Case] = {
    "good": Case(
        _one("def kernel(): ..."),
        {"outcome": "ok", "symbols": {"kernel": True, "gone": False}},
        symbols=("kernel", "gone"),
    ),
    "single_file": Case(
        {"{name}.py": "kernel = 1"}, {"outcome": "ok", "symbols": {"kernel": True}}, symbols=("kernel",)
    ),
    "not_there": Case({}, {"outcome": "absent"}),
    "not_there_nested": Case({}, {"outcome": "absent"}, module="not_there_nested.ops.kda"),
    "no_submodule": Case(
        _one(""),
        {"outcome": "raised", "error_type": "ModuleNotFoundError", "missing_module": "no_submodule.ops"},
        module="no_submodule.ops.kda",
    ),
    "none_symbol": Case(_one("kernel = None"), {"outcome": "ok", "symbols": {"kernel": False}}, symbols=("kernel",)),
    "lazy_symbol": Case(
        _one("def __getattr__(name):\n    raise ImportError('needs tilelang')"),
        {"outcome": "ok", "symbols": {"kernel": False}, "error_type": "ImportError", "error": "kernel: needs tilelang"},
        symbols=("kernel",),
    ),
    "raises": Case(
        _one("raise RuntimeError('größer\\nthan \"expected\"')"),
        {"outcome": "raised", "error_type": "RuntimeError", "error": 'größer\nthan "expected"', "missing_module": ""},
    ),
    "unprintable": Case(_one("raise RuntimeError('\\udcff!')"), {"outcome": "raised", "error": "?!"}),
    "asks_the_hub": Case(
        _one("import os; raise OSError('HF_HUB_OFFLINE=' + os.environ['HF_HUB_OFFLINE'])"),
        {"outcome": "not-tried", "error": "it asks the hub, and this check downloads nothing: HF_HUB_OFFLINE=1"},
    ),
    "behind_a_broken_hook": Case({}, {"outcome": "raised", "error_type": "AttributeError", "error": "broken hook"}),
    "no_triton": Case(
        {"{name}/__init__.py": "", "{name}/ops/__init__.py": "", "{name}/ops/rule.py": "import triton\n"},
        {
            "outcome": "raised",
            "error_type": "ModuleNotFoundError",
            "error": "No module named 'triton'",
            "missing_module": "triton",
        },
        module="no_triton.ops.rule",
    ),
    "no_triton_said_otherwise": Case(
        _one("try:\n    import triton\nexcept ImportError as e:\n    raise RuntimeError('please install it') from e"),
        {"outcome": "raised", "error_type": "RuntimeError", "error": "please install it", "missing_module": "triton"},
    ),
    "interrupts": Case(_one("raise KeyboardInterrupt"), {"outcome": "raised", "error_type": "KeyboardInterrupt"}),
    "aborts": Case(_one("import os; os.abort()"), {"outcome": "crashed", "signal": "SIGABRT"}),
    "segfaults": Case(_one("import ctypes; ctypes.string_at(0)"), {"outcome": "crashed", "signal": "SIGSEGV"}),
    "hangs": Case(_one("import time; time.sleep(600)"), {"outcome": "hung", "error": "not imported after 1 s"}),
    "hangs_and_will_not_die": Case(
        _one(
            "import signal, time\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):\n"
            "    signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)"
        ),
        {"outcome": "hung"},
    ),
    "exits": Case(_one("raise SystemExit(3)"), {"outcome": "exited", "error": "exit code 3"}),
    "exits_quietly": Case(_one("import os; os._exit(0)"), {"outcome": "exited", "error": "exit code 0"}),
    "claims_to_be_fine": Case(
        _one('import os, sys\nprint(\'{"outcome": "ok"}\', flush=True)\nos._exit(0)'),
        {"outcome": "exited", "error": "exit code 0"},
    ),
    "prints": Case(_one("import sys\nprint('x' * 3_000_000)\nsys.stderr.write('y' * 3_000_000)"), {"outcome": "ok"}),
    "forks": Case(_one(_FORK + "kernel = 1"), {"outcome": "ok", "symbols": {"kernel": True}}, symbols=("kernel",)),
    "forks_and_leaves": Case(_one(_FORK + "if pid: os._exit(0)"), {"outcome": "exited", "error": "exit code 0"}),
    "changes_everything": Case(
        _one(
            "import builtins, json, os, signal, sys\nos.chdir('/')\nsys.stdout = sys.stderr = None\n"
            "sys.argv = ['x']\nsys.path.clear()\nos.environ.clear()\nos.closerange(0, 100)\n"
            "json.dumps = os.open = os.write = builtins.open = builtins.print = None\n"
            "os.getpid = lambda: 1\nos._exit = os.abort\nkernel = 1"
        ),
        {"outcome": "ok", "symbols": {"kernel": True}},
        symbols=("kernel",),
    ),
    "leftover": Case({"{name}/ops/__pycache__/rule.pyc": ""}, {"outcome": "ok", "file": ""}),
    "leftover_nested": Case(
        {"{name}/ops/__pycache__/rule.pyc": ""},
        {"outcome": "raised", "missing_module": "leftover_nested.ops.rule", "file": ""},
        module="leftover_nested.ops.rule",
    ),
    "shows_path": Case(_one("import sys; raise ImportError(repr([sys.path, sys.argv[1:]]))"), {"outcome": "raised"}),
    "broken_abi": Case(_one("from . import _C"), {"outcome": "raised", "error_type": "ImportError"}),
    "other_cuda": Case(_one("from . import _C"), {"outcome": "raised", "error_type": "ImportError"}),
    "good_after_all_that": Case(_one(""), {"outcome": "ok"}),
}


def _request(limit_s: float, *, fork: bool, names: tuple[str, ...]) -> dict[str, Any]:
    modules = [{"module": CASES[name].module or name, "symbols": list(CASES[name].symbols)} for name in names]
    return {"modules": modules, "limit_s": limit_s, "fork": fork}


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """All the packages side by side, and no torch, which these do not need."""
    env = make_venv(tmp_path_factory.mktemp("importer") / "venv")
    for name, case in CASES.items():
        for template, text in case.files.items():
            path = env.site / template.format(name=name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (env.site / "sitecustomize.py").write_text(
        "import sys\nclass Hook:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'behind_a_broken_hook': raise AttributeError('broken hook')\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    crafted.shared_object(env.site / "broken_abi/_C.so", undefined=_UNDEFINED)
    crafted.shared_object(env.site / "other_cuda/_C.so", needs="libcudart.so.11.0")
    return env


@pytest.fixture(scope="module")
def result(interpreter: Interpreter) -> WorkerResult:
    """One run over all of them: none may disturb the others."""
    return run_worker(str(interpreter.python), "importer", _request(1.0, fork=True, names=tuple(CASES)), timeout=120)


@pytest.fixture(scope="module")
def facts(result: WorkerResult) -> dict[str, Record]:
    return {str(record["module"]): record for record in result.of_kind("import")}


def test_the_worker_survives_all_of_them(result: WorkerResult, facts: dict[str, Record]) -> None:
    assert result.finished, result.ending()
    assert list(facts) == [case.module or name for name, case in CASES.items()]
    assert [record["error_type"] for record in result.of_kind("torch")] == ["ModuleNotFoundError"]


@pytest.mark.parametrize("name", CASES)
def test_outcome(name: str, facts: dict[str, Record]) -> None:
    fact = facts[CASES[name].module or name]
    assert {key: fact.get(key) for key in CASES[name].expected} == CASES[name].expected


def test_the_loader_is_quoted_word_for_word(facts: dict[str, Record], interpreter: Interpreter) -> None:
    assert f"undefined symbol: {_UNDEFINED}" in facts["broken_abi"]["error"]
    assert facts["other_cuda"]["error"].startswith("libcudart.so.11.0: cannot open shared object file")
    assert facts["broken_abi"]["file"] == str(interpreter.site / "broken_abi/__init__.py")


def test_a_leftover_folder_is_told_from_a_package(facts: dict[str, Record], interpreter: Interpreter) -> None:
    for name in ("leftover", "leftover_nested.ops.rule"):
        assert facts[name]["file"] == ""
        assert facts[name]["search_path"] == [str(interpreter.site / name.partition(".")[0])]
    assert facts["no_triton.ops.rule"]["file"] == str(interpreter.site / "no_triton/__init__.py")


def test_a_module_sees_what_it_would_see_in_training(interpreter: Interpreter, facts: dict[str, Record]) -> None:
    path, arguments = eval(facts["shows_path"]["error"], {})  # noqa: S307  # our own package wrote it
    assert arguments == []
    assert str(interpreter.site) in path
    assert not [entry for entry in path if "kernelguard" in entry or entry in ("", str(Path.cwd()))]


def test_fresh_processes_say_the_same_as_forks(interpreter: Interpreter, facts: dict[str, Record]) -> None:
    names = ("good", "not_there", "raises", "aborts", "exits_quietly", "forks", "hangs", "good_after_all_that")
    result = run_worker(str(interpreter.python), "importer", _request(1.0, fork=False, names=names), timeout=120)
    assert result.finished
    assert list(result.of_kind("import")) == [facts[name] for name in names]


def test_who_owns_an_import_name(tmp_path: Path) -> None:
    files = {**crafted.fla(), **crafted.metadata("flash-attn", "2.8.3", "flash_attn"), "bare/__init__.py": ""}
    files["sgl_kernel-1.0.dist-info/METADATA"] = "Name: sgl_kernel\nVersion: 1.0\n"
    files["sgl_kernel-1.0.dist-info/RECORD"] = "sgl_kernel/__init__.py,,\nflash_attn/__init__.py,,\n"
    files["flash_attn/__init__.py"] = ""
    files["triton/__init__.py"] = ""
    source = tmp_path / "src"
    source.mkdir()
    (source / "editable.py").write_text("")
    files["editable.pth"] = f"{source}\n"
    files["edited-1.dist-info/METADATA"] = "Name: edited\nVersion: 1\n"
    url = {"url": source.as_uri(), "dir_info": {"editable": True}}
    files["edited-1.dist-info/direct_url.json"] = json.dumps(url)
    env = make_venv(tmp_path / "venv")
    for name, text in files.items():
        (env.site / name).parent.mkdir(parents=True, exist_ok=True)
        (env.site / name).write_text(text)
    (env.site / "edited-1.dist-info/RECORD").write_text("")
    (env.site / "damaged-1.dist-info").mkdir()
    (env.site / "damaged-1.dist-info/RECORD").write_bytes(b"fla/\xff.py,,\n")
    modules = ("fla.ops.gated_delta_rule", "flash_attn", "bare", "editable")
    request = {"modules": [{"module": module, "symbols": []} for module in modules], "limit_s": 20}
    records = run_worker(str(env.python), "importer", request, timeout=60).of_kind("import")
    assert {record["module"]: record["distributions"] for record in records} == {
        "fla.ops.gated_delta_rule": ["fla-core", "flash-linear-attention"],
        "flash_attn": ["flash-attn", "sgl-kernel"],
        "bare": [],
        "editable": ["edited"],
    }


def test_an_extension_that_needs_torch_first_is_not_broken(tmp_path: Path) -> None:
    """It has no search path to torch's libraries, so that it loads only after torch: as transformers does it (B23)."""
    env = environment(tmp_path / "venv", None, {"conv/__init__.py": "from . import _C"})
    source = tmp_path / "_C.c"
    source.write_text(
        "extern void *PyModule_Create2(void *, int);\n"
        "static struct { long head[5]; const char *name; const char *doc; long size; void *rest[5]; } definition =\n"
        '  {{1}, "_C", 0, -1};\n'
        "void *PyInit__C(void) { return PyModule_Create2(&definition, 1013); }\n"
    )
    command = ["cc", "-shared", "-fPIC", "-o", str(env.site / "conv/_C.so"), str(source), "-Wl,--no-as-needed"]
    subprocess.run([*command, str(torch_base().site / "torch/lib/libc10.so")], check=True)
    request = {"modules": [{"module": "conv", "symbols": []}], "limit_s": 20}
    (fact,) = run_worker(str(env.python), "importer", request, timeout=120).of_kind("import")
    assert fact["outcome"] == "ok", fact
    bare = subprocess.run([str(env.python), "-c", "import conv"], capture_output=True, text=True, check=False)
    assert "libc10.so: cannot open shared object file" in bare.stderr
