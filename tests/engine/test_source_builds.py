"""Source builds in a stage of their own: real C extensions, from an sdist and from a git tree, by a real engine."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from engine.test_build import inside, leftovers
from engine.world import World, says, tiny_lock, verdict
from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.image.build import run_build
from kernelguard.image.builders import Order, build
from kernelguard.image.engine import Engine
from kernelguard.image.values import Builder, ContextFile
from kernelguard.judge.values import Level
from kernelguard.lock.values import SourcePin
from lock.world import CACHE

TOOLKIT = "nvidia/cuda:13.0.1-devel-ubuntu22.04"
"""The name that docker/base-images.toml has for CUDA 13.0. It cannot be pulled here: a folder with an `nvcc` that only
tells its release stands in, so what these tests prove is how it is used, not what it compiles."""


@pytest.mark.online
def test_source_builds_in_a_stage_of_their_own(engine: Engine, world: World) -> None:
    """An sdist by its hash and a git tree by its commit: real C extensions, compiled in the image."""
    files = _package("tiny-sdist", 42)
    sdist = world.folder / "tiny_sdist-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"tiny_sdist-1.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    by_hash = _pin("tiny-sdist", sdist.as_uri(), sha256=hashlib.sha256(sdist.read_bytes()).hexdigest())
    repository = _repository(world.folder / "repository", _package("tiny-git", 43))
    commit = _git(repository, "rev-parse", "HEAD")
    by_commit = _pin(
        "tiny-git", f"git+{repository.as_uri()}@{commit}", commit=commit, nvcc="13.0", archs=("9.0", "10.0")
    )
    world.take(tiny_lock(world.folder, sources=(by_hash, by_commit)))
    _toolkit(engine, world.base, "13.0")
    made = run_build(engine, world.request(), dict(os.environ), CACHE, verifier=says(verdict(Level.IMPORT)))
    engine.remove(TOOLKIT)
    code = "import tiny_sdist, tiny_git; print(tiny_sdist.answer(), tiny_git.answer(), *tiny_git.built())"
    assert inside(made.image, "python", "-c", code) == "42 43 9.0;10.0 release 13.0, V13.0.1"
    code = "import importlib.metadata as m; print(*sorted({d.name for d in m.distributions()}))"
    listed = inside(made.image, "python", "-c", code).split()
    assert listed == ["fla-core", "tiny-git", "tiny-sdist", "torch", "triton"]
    gone = ("/sources", "/tools", "/built", "/build-tools", "/usr/local/cuda-13.0")
    inside(made.image, "sh", "-c", " && ".join(f"test ! -e {place}" for place in gone))
    engine.remove(made.image)
    assert leftovers(engine) == []


@pytest.mark.online
def test_an_nvcc_of_another_release_ends_the_build(engine: Engine, world: World) -> None:
    repository = _repository(world.folder / "repository", _package("tiny-git", 43))
    commit = _git(repository, "rev-parse", "HEAD")
    pin = _pin("tiny-git", f"git+{repository.as_uri()}@{commit}", commit=commit, nvcc="13.0", archs=("9.0",))
    world.take(tiny_lock(world.folder, sources=(pin,)))
    _toolkit(engine, world.base, "13.1")
    with pytest.raises(ToolError, match=r"nvcc --version \| grep"):
        run_build(engine, world.request(), dict(os.environ), CACHE, verifier=says())
    engine.remove(TOOLKIT)
    assert leftovers(engine) == []


def test_a_commit_that_is_not_there(engine: Engine, world: World) -> None:
    repository = _repository(world.folder / "repository", _package("tiny-git", 43))
    pin = _pin("tiny-git", f"git+{repository.as_uri()}@{'0' * 40}", commit="0" * 40)
    world.take(tiny_lock(world.folder, sources=(pin,)))
    with pytest.raises(UndeterminedError, match="cannot be fetched from file:"):
        run_build(engine, world.request(), dict(os.environ), CACHE, verifier=says())
    assert leftovers(engine) == []


def _pin(name: str, url: str, **changes: Any) -> SourcePin:
    usual: dict[str, Any] = {
        "version": "1.0",
        "sha256": "",
        "commit": "",
        "requires": ("setuptools",),
        "archs": (),
        "arch_variable": "TORCH_CUDA_ARCH_LIST",
        "archs_note": "",
        "nvcc": "",
        "cxx": 17,
    }
    return SourcePin(name=name, url=url, **{**usual, **changes})


def _package(name: str, number: int) -> dict[str, str]:
    """The files of a distribution with a C extension that knows what it was built with."""
    module = name.replace("-", "_")
    setup = (
        "import os, subprocess\nfrom setuptools import Extension, setup\n"
        "home = os.environ.get('CUDA_HOME')\n"
        "said = subprocess.check_output([home + '/bin/nvcc', '--version'], text=True).strip() if home else ''\n"
        "macros = [('ARCHS', '\"%s\"' % os.environ.get('TORCH_CUDA_ARCH_LIST', '')), ('NVCC', '\"%s\"' % said)]\n"
        f"setup(ext_modules=[Extension('{module}', ['tiny.c'], define_macros=macros)])\n"
    )
    body = (
        "#include <Python.h>\n"
        f"static PyObject *answer(PyObject *self, PyObject *none) {{ return PyLong_FromLong({number}); }}\n"
        'static PyObject *built(PyObject *self, PyObject *none) { return Py_BuildValue("(ss)", ARCHS, NVCC); }\n'
        'static PyMethodDef all[] = {{"answer", answer, METH_NOARGS, 0}, {"built", built, METH_NOARGS, 0}, {0}};\n'
        f'static struct PyModuleDef it = {{PyModuleDef_HEAD_INIT, "{module}", 0, -1, all}};\n'
        f"PyMODINIT_FUNC PyInit_{module}(void) {{ return PyModule_Create(&it); }}\n"
    )
    return {
        "setup.py": setup,
        "tiny.c": body,
        "pyproject.toml": "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        f"[project]\nname = '{name}'\nversion = '1.0'\n",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }


def _repository(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    _git(folder, "init", "--quiet")
    _git(folder, "add", ".")
    _git(folder, "-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "--quiet", "--message", "one")
    return folder


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _toolkit(engine: Engine, base: str, release: str) -> None:
    """Give the stand-in the toolkit's name."""
    script = f"#!/bin/sh\necho release {release}, V{release}.1\n".encode()
    text = f"FROM {base}\nCOPY nvcc /usr/local/cuda-13.0/bin/nvcc\n".encode()
    files = (
        ContextFile(path="Dockerfile", content=text, size=len(text)),
        ContextFile(path="nvcc", content=script, size=len(script), mode=0o755),
    )
    engine.tag(build(engine, Builder.LEGACY, Order(files=files), environ={}, timeout=60), TOOLKIT)
