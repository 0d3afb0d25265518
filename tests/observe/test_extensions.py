"""The compiled modules of installed packages against the installed torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import crafted
from kernelguard.observe.extensions import inspect_extensions
from kernelguard.observe.interpreter import observe
from kernelguard.observe.targets import target
from observed import environment, make_venv

_OLD_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
_THERE = "_ZN3c106detail23torchInternalAssertFailEPKcS2_jS2_S2_"


def _install(site: Path, distribution: str, package: str, modules: dict[str, str | None]) -> None:
    """A package with compiled modules, each of which wants one symbol."""
    rows = [f"{package}/__init__.py,,"]
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").touch()
    for name, symbol in modules.items():
        crafted.shared_object(site / name, undefined=symbol)
        rows.append(f"{name},,")
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\n")
    (info / "RECORD").write_text("\n".join(rows) + "\n")


def test_each_module_of_a_package_has_its_own_verdict(tmp_path: Path) -> None:
    env = environment(tmp_path / "venv", None)
    modules = {"causal_conv1d_cuda.so": _OLD_ABI, "causal_conv1d/good.so": _THERE, "causal_conv1d/plain.so": None}
    _install(env.site, "causal-conv1d", "causal_conv1d", modules)
    _install(env.site, "unrelated", "unrelated", {"unrelated/x.so": _OLD_ABI})
    (env.site / "causal_conv1d_cuda.so").chmod(0o755)
    seen = inspect_extensions(observe(str(env.python), gpu=False), ["causal_conv1d", "fla"])
    assert {Path(found.path).name: found.missing for found in seen} == {
        "causal_conv1d_cuda.so": (_OLD_ABI,),
        "good.so": (),
        "plain.so": (),
    }
    assert {found.distribution for found in seen} == {"causal-conv1d"}
    assert all(found.problem == "" and found.elf is not None for found in seen)


def test_what_cannot_be_compared_is_not_called_fine(tmp_path: Path) -> None:
    env = make_venv(tmp_path / "venv")
    _install(env.site, "conv", "conv", {"conv/wants.so": _THERE, "conv/plain.so": None, "conv/damaged.so": None})
    (env.site / "conv/damaged.so").write_bytes(b"\x7fELF and then nothing")
    seen = {Path(found.path).name: found for found in inspect_extensions(observe(str(env.python)), ["conv"])}
    assert (seen["wants.so"].missing, seen["wants.so"].problem) == (None, "there is no torch to compare it with")
    assert (seen["plain.so"].missing, seen["plain.so"].problem) == ((), "")
    assert (seen["damaged.so"].elf, seen["damaged.so"].missing) == (None, None)
    assert "no readable ELF file" in seen["damaged.so"].problem


def test_files_of_another_machine_are_not_looked_for(tmp_path: Path) -> None:
    env = make_venv(tmp_path / "venv")
    _install(env.site, "conv", "conv", {"conv/plain.so": None})
    captured = observe(str(env.python))
    assert len(inspect_extensions(captured, ["conv"])) == 1
    assert inspect_extensions(replace(captured, live=False), ["conv"]) == ()
    assert inspect_extensions(target("h100"), ["conv"]) == ()
