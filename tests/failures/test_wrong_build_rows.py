"""Rows about files that do not fit: read in a live interpreter at level resolve, where nothing of it is executed."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from failure_asks import CONV, GDN, Said, a_torch_for_cuda, installed, live, needing_version

import configs
import crafted
from observed import Interpreter, environment

pytestmark = pytest.mark.observed

OLD_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
CUDA = "causal_conv1d_cuda.so"
GOOD_SYMBOL = "_ZN3c106detail23torchInternalAssertFailEPKcS2_jS2_S2_"


def with_conv(tmp: Path, **broken: str | None) -> Interpreter:
    """Every kernel package, and a compiled module of causal-conv1d as `shared_object` makes it."""
    env = environment(tmp / "env", "5.24.0", crafted.everything())
    crafted.shared_object(env.site / CUDA, **broken)
    installed(env.site, "causal-conv1d", "causal_conv1d", "1.7.0", (CUDA,))
    return env


def only(said: Said, code: str) -> None:
    """A definite no for the convolution, for this reason; the other kernel is only unknown, as nothing was executed."""
    assert said.code == 1
    assert code in said.paths[CONV]["codes"]
    assert said.finding(code)["status"] == "fail"
    assert said.paths[GDN]["status"] == "unknown"


@pytest.mark.parametrize(
    "symbol",
    ["_ZN3c106detail14torchCheckFailEPKcS2_jRKSs", "_ZN2at4_ops5zeros4callEN3c108ArrayRefIlEE"],
    ids=["c10", "at"],
)
def test_b02_b04_b19_built_for_another_torch(tmp_path: Path, symbol: str) -> None:
    said = live(tmp_path, with_conv(tmp_path, undefined=symbol), level="resolve")
    only(said, "wrong-torch")
    assert symbol in said.paths[CONV]["reason"]
    assert "2.13.0" in said.paths[CONV]["reason"]
    assert "--no-cache-dir" in said.paths[CONV]["fix"]


def test_b03_the_side_with_the_old_abi_is_named_and_versions_decide_nothing(tmp_path: Path) -> None:
    said = live(tmp_path, with_conv(tmp_path, undefined=OLD_ABI), level="resolve")
    only(said, "wrong-torch")
    assert "with the old C++ ABI, while this torch has the new C++ ABI" in said.paths[CONV]["reason"]


def test_b02_twin_a_module_that_fits_raises_no_alarm(tmp_path: Path) -> None:
    said = live(tmp_path, with_conv(tmp_path, undefined=GOOD_SYMBOL), level="resolve")
    assert said.code == 3
    assert said.codes() == {"not-executed"}


@pytest.mark.parametrize(
    ("library", "version", "code"),
    [("libc.so.6", "GLIBC_2.99", "glibc-too-old"), ("libstdc++.so.6", "GLIBCXX_3.4.99", "libstdcxx-too-old")],
)
def test_b06_b28_floors_that_no_file_name_tells(tmp_path: Path, library: str, version: str, code: str) -> None:
    env = with_conv(tmp_path)
    needing_version(env.site / CUDA, library, version)
    said = live(tmp_path, env, level="resolve")
    only(said, code)
    assert version.partition("_")[2] in said.paths[CONV]["reason"]


def test_b07_b10_each_package_has_its_own_verdict_about_the_cuda_runtime(tmp_path: Path) -> None:
    """Sister packages can come from builds for different CUDAs; the good one is not blamed."""
    env = environment(tmp_path / "env", "5.24.0", crafted.everything())
    a_torch_for_cuda(env.site, "2.8.0+cu126", "12.6")
    for name, package, version, library in (
        ("causal-conv1d", "causal_conv1d", "1.7.0", "libcudart.so.12"),
        ("mamba-ssm", "mamba_ssm", "2.3.2", "libcudart.so.11"),
    ):
        crafted.shared_object(env.site / f"{package}_cuda.so", needs=library)
        installed(env.site, name, package, version, (f"{package}_cuda.so",))
    said = live(tmp_path, env, configs.MAMBA2, level="resolve")
    assert said.code == 1
    assert said.paths["mamba_chunk_scan_combined"]["status"] == "fail"
    assert "libcudart.so.11" in said.paths["mamba_chunk_scan_combined"]["reason"]
    assert "12.6" in said.paths["mamba_chunk_scan_combined"]["reason"]
    assert said.paths[CONV]["status"] == "unknown"


def test_b08_a_flash_attn_for_cuda_12_on_a_torch_for_cuda_13(tmp_path: Path) -> None:
    files = {"flash_attn/__init__.py": "", **crafted.metadata("flash-attn", "2.8.3", "flash_attn")}
    env = environment(tmp_path / "env", "5.24.0", files)
    a_torch_for_cuda(env.site, "2.9.1+cu130", "13.0")
    crafted.shared_object(env.site / "flash_attn_2_cuda.so", needs="libcudart.so.12")
    installed(env.site, "flash-attn", "flash_attn", "2.8.3", ("flash_attn_2_cuda.so",))
    said = live(tmp_path / "asked", env, configs.LLAMA, level="resolve", attn_implementation="flash_attention_2")
    assert said.code == 1
    assert "libcudart.so.12" in said.finding("wrong-cuda")["reason"]
    assert "13.0" in said.finding("wrong-cuda")["reason"]
    unused = live(tmp_path / "unused", env, configs.LLAMA, level="resolve")
    assert unused.code == 0


def _record(site: Path, distribution: str, version: str, files: dict[str, str]) -> None:
    """A RECORD that claims these files with these contents."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join(rows) + "\n")


def test_a_file_of_two_kernel_packages_and_a_changed_one_are_said(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.24.0", crafted.everything())
    path, text = "causal_conv1d/__init__.py", crafted.causal_conv1d()["causal_conv1d/__init__.py"]
    _record(env.site, "causal-conv1d", "1.7.0", {path: text})
    untouched = live(tmp_path / "untouched", env, level="resolve")
    assert untouched.codes() == {"not-executed"}
    (env.site / path).write_text(text + "# patched\n")
    changed = live(tmp_path / "changed", env, level="resolve")
    assert changed.finding("changed-files")["status"] == "warn"
    _record(env.site, "a-fork-of-it", "1.0", {path: text + "# patched\n"})
    shared = live(tmp_path / "shared", env, level="resolve")
    assert "a-fork-of-it and causal-conv1d" in shared.finding("two-owners")["reason"]


def test_siblings_of_different_releases_are_said(tmp_path: Path) -> None:
    files = crafted.without(crafted.everything(), "fla_core")
    env = environment(tmp_path / "env", "5.24.0", files | crafted.metadata("fla-core", "0.5.1", "fla"))
    with (env.site / "flash_linear_attention-0.6.0.dist-info/METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: fla-core==0.6.0\n")
    finding = live(tmp_path, env, level="resolve").finding("sibling-mismatch")
    assert (finding["status"], finding["fast_path"]) == ("warn", GDN)
    assert "wants fla-core==0.6.0, installed is 0.5.1" in finding["reason"]
    assert finding["fix"] == "pip install 'fla-core==0.6.0'"


@pytest.mark.parametrize(
    ("left", "status", "code"), [("nvidia-nccl-cu13", "fail", 1), ("nvidia-nccl-cu12", "warn", 0)], ids=["cu13", "cu12"]
)
def test_g02_a_library_that_another_distribution_overwrote(tmp_path: Path, left: str, status: str, code: int) -> None:
    """Both metadata say installed; whose file is there tells, and what torch asks for tells whether that is wrong."""
    env = environment(tmp_path / "env", "5.24.0")
    a_torch_for_cuda(env.site, "2.11.0+cu128", "12.8")
    with (env.site / "torch-2.11.0+cu128.dist-info/METADATA").open("a") as metadata:
        metadata.write('Requires-Dist: nvidia-nccl-cu12==2.28.9; platform_system == "Linux"\n')
    path = "nvidia/nccl/lib/libnccl.so.2"
    (env.site / path).parent.mkdir(parents=True)
    for name, version in (("nvidia-nccl-cu12", "2.28.9"), ("nvidia-nccl-cu13", "2.30.7")):
        _record(env.site, name, version, {path: name})
    (env.site / path).write_text(left)
    said = live(tmp_path, env, configs.LLAMA, level="resolve")
    finding = said.finding("overwritten-library")
    assert (said.code, finding["status"]) == (code, status)
    assert f"that of {left}" in finding["reason"]
    assert "this torch requires nvidia-nccl-cu12" in finding["reason"]
    # The same bytes from both are nothing.
    _record(env.site, "nvidia-nccl-cu13", "2.30.7", {path: "nvidia-nccl-cu12"})
    assert live(tmp_path / "same", env, configs.LLAMA, level="resolve").codes() == set()
