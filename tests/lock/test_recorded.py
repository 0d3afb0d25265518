"""A lock of what is installed: exactly that, and nothing that was changed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.declare.values import Intent
from kernelguard.errors import UndeterminedError
from kernelguard.lock.check import Inventory
from kernelguard.lock.document import dumps, load_lock
from kernelguard.lock.record import record_digest
from kernelguard.lock.recorded import NOTE, kernel_distributions, record_lock
from kernelguard.lock.values import Lock, Role
from kernelguard.observe.values import Binding, Bindings, BoundTo, Distribution, Environment, Gpu
from resolve.cases import declaration

ROWS = [["a.py", "1" * 64], ["b.py", "2" * 64]]
INSTALLED = ("causal-conv1d", "fla-core", "numpy", "pip", "torch", "triton")
TOP = {"causal-conv1d": "causal_conv1d", "fla-core": "fla"}


def found(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "location": "/site", "record": ROWS, "changed": [], **changes}


def record(distributions: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Lock:
    rows = {name: found(name) for name in INSTALLED} | (distributions or {})
    environment = Environment(
        origin="/env/bin/python",
        live=True,
        python=Version("3.12.3"),
        machine="x86_64",
        torch=Version("2.13.0"),
        torch_cuda=Version("13.0"),
        gpus=(Gpu(name="NVIDIA H200", capability=(9, 0)),) * 2,
        distributions={
            n: Distribution(name=n, version="1.0", location="/site", top_level=(TOP.get(n, n),)) for n in INSTALLED
        },
    )
    declared = declaration()
    paths = declared.fast_paths
    to = changes.pop("bound_to", BoundTo.KERNEL)
    bound = tuple(Binding(symbol=p.symbol, module=p.binding.module, bound_to=to) for p in paths)
    inventory = Inventory(prefix=Path("/env"), python=Version("3.12.3"), distributions=rows, shared=())
    return record_lock(
        declared.config,
        Intent(),
        paths,
        environment=replace(environment, **changes),
        inventory=inventory,
        bindings=Bindings(bindings=bound),
    )


def test_it_pins_what_is_there_and_reads_back(tmp_path: Path) -> None:
    lock = record()
    pins = {pin.name: pin for pin in lock.pins}
    assert set(pins) == set(INSTALLED) - {"pip"}
    assert {name for name, pin in pins.items() if pin.role is Role.KERNEL} == {"causal-conv1d", "fla-core"}
    assert pins["torch"].role is Role.TORCH
    digest = record_digest((path, sha) for path, sha in ROWS)
    assert {pin.files_sha256 for pin in lock.pins} == {digest}
    assert lock.target.capabilities == ("9.0",)
    assert lock.target.driver == "580"
    assert lock.notes == (NOTE,)
    assert lock.admits_launch
    (tmp_path / "k.lock").write_text(dumps(lock))
    assert load_lock(tmp_path / "k.lock") == lock


@pytest.mark.parametrize("name", ["fla-core", "torch", "triton"])
def test_a_kernel_that_was_changed_by_hand_is_not_locked(name: str) -> None:
    with pytest.raises(UndeterminedError, match=f"{name}: a.py has 3 bytes"):
        record({name: found(name, changed=[["a.py", "has 3 bytes, its RECORD says 4"]])})
    with pytest.raises(UndeterminedError, match=f"{name} 1.0 has no RECORD"):
        record({name: found(name, record=[])})


@pytest.mark.parametrize("changes", [{"record": []}, {"changed": [["a.py", "is missing"]]}])
def test_a_kernel_package_that_this_run_does_not_need_is_not_left_out(changes: dict[str, Any]) -> None:
    """The verdict would hold it and the lock would not: seen on a GPU machine, where the launch was refused."""
    with pytest.raises(UndeterminedError, match="mamba-ssm") as refused:
        record({"mamba-ssm": found("mamba-ssm", **changes)})
    assert "or pip uninstall mamba-ssm, which this run does not need" in str(refused.value.hint)
    with pytest.raises(UndeterminedError, match="fla-core") as needed:
        record({"fla-core": found("fla-core", **changes)})
    assert "uninstall" not in str(needed.value.hint)


@pytest.mark.parametrize("changes", [{"record": []}, {"changed": [["a.py", "is missing"]]}])
def test_what_holds_no_kernel_is_left_out_and_named(changes: dict[str, Any]) -> None:
    lock = record({"numpy": found("numpy", **changes)})
    assert "numpy" not in {pin.name for pin in lock.pins}
    assert "numpy" in lock.notes[1]


def test_without_a_gpu_or_a_bound_kernel_it_admits_no_launch() -> None:
    assert not record(gpus=()).admits_launch
    assert not record(torch_cuda=None).admits_launch
    assert not record(bound_to=BoundTo.TORCH).admits_launch


def test_what_is_hashed_is_what_serves_the_fast_paths() -> None:
    environment = Environment(
        origin="x",
        live=True,
        distributions={n: Distribution(name=n, version="1", location="", top_level=(t,)) for n, t in TOP.items()},
    )
    paths = declaration().fast_paths
    assert kernel_distributions(paths, environment) == {"causal-conv1d", "fla-core", "torch", "triton"}
