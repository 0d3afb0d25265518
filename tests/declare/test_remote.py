"""Code that a checkpoint brings along: when transformers runs it, and what is read of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import configs
from kernelguard.check import Request, run_check
from kernelguard.declare import Reader, find_tree
from kernelguard.declare.config import read_config
from kernelguard.declare.index import Index
from kernelguard.declare.remote import RemoteSource, required_imports
from kernelguard.declare.source import REMOTE, Source
from kernelguard.declare.values import Declaration, Intent, RemoteCode, Requirement
from kernelguard.judge.remote import judge_remote
from kernelguard.judge.values import Status
from kernelguard.report.document import Check
from observed import VERSIONS, environment, transformers_base

pytestmark = pytest.mark.observed
NEWEST = VERSIONS[-1]
READER = Reader(find_tree(transformers_base(NEWEST).site / "transformers"))
NEW = {"model_type": "brand_new", "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}
KNOWN = {**configs.LLAMA, "auto_map": NEW["auto_map"]}

CODE = """
from transformers import LlamaForCausalLM
from transformers.utils import logging
from transformers.utils.import_utils import is_mamba_ssm_available
from .layers import Mixer
if is_mamba_ssm_available():
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
else:
    mamba_chunk_scan_combined = None
class Scan:
    def forward(self, x):
        return mamba_chunk_scan_combined(x)
class NewForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.parts = [Mixer(), Scan()]
"""
LAYERS = """
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
class Mixer:
    def forward(self, x):
        return chunk_gated_delta_rule(x)
"""


def folder(tmp: Path, config: dict[str, Any] = NEW, **files: str) -> Path:
    """A model folder; `sub__name` stands for the file sub/name.py."""
    model = configs.write(tmp / "model", config)
    for name, text in files.items():
        path = model / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return model


def read(model: Path, *, trusted: bool | None = None) -> Declaration:
    return READER.declare(read_config(str(model)), trusted=trusted)


def remote_of(found: Declaration) -> RemoteCode:
    assert found.remote is not None
    return found.remote


def checked(tmp: Path, model: Path, **flags: Any) -> Check:
    request = Request(model=str(model), flags=flags, target="h100", transformers=str(READER.tree.root))
    return run_check(request, {"PATH": "", "HOME": str(tmp)})


def status_of(check: Check, code: str) -> Status:
    return next(f.status for f in check.assessment.findings if f.code == code)


def test_a_local_folder_is_read_with_the_files_it_imports(tmp_path: Path) -> None:
    found = read(folder(tmp_path, modeling_new=CODE, layers=LAYERS))
    assert found.remote is not None
    assert found.remote.runs
    assert not found.remote.shipped
    assert found.remote.files == (f"{REMOTE}layers.py", f"{REMOTE}modeling_new.py")
    assert not found.remote.unread
    assert {(p.import_path, p.file, p.line, p.requirement) for p in found.fast_paths} == {
        (
            "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined",
            f"{REMOTE}modeling_new.py",
            7,
            Requirement.AUTOMATIC,
        ),
        ("fla.ops.gated_delta_rule.chunk_gated_delta_rule", f"{REMOTE}layers.py", 2, Requirement.HARD),
    }
    assert {p.binding.owner for p in found.fast_paths} == {"Mixer", "Scan"}
    # Nothing is known about how often, so nothing is said.
    assert {p.layers for p in found.fast_paths} == {None}


def test_read_code_is_never_a_pass_and_a_missing_package_is_a_no(tmp_path: Path) -> None:
    plain = "import torch\nclass NewForCausalLM(torch.nn.Module):\n    pass\n"
    check = checked(tmp_path, folder(tmp_path, modeling_new=plain))
    assert (check.status, check.exit_code) == (Status.UNKNOWN, 3)
    assert "was read and not run" in check.assessment.findings[0].reason
    env = environment(tmp_path / "env", NEWEST)
    model = folder(tmp_path / "k", modeling_new=CODE, layers=LAYERS)
    live = run_check(Request(model=str(model), flags={}, python=env.python, level="resolve"), {"PATH": ""})
    assert live.exit_code == 1
    assert {p.symbol: p.status for p in live.assessment.fast_paths} == {
        "mamba_chunk_scan_combined": Status.FAIL,
        "chunk_gated_delta_rule": Status.FAIL,
    }


@pytest.mark.parametrize(
    ("target", "files", "says"),
    [
        ("modeling_new.NewForCausalLM", {}, "modeling_new.py does not lie in"),
        ("modeling_new.NewForCausalLM", {"modeling_new": "def broken(:\n"}, "is not Python"),
        ("modeling_new.NewForCausalLM", {"modeling_new": "x = 1\n"}, "has no NewForCausalLM"),
        ("modeling_new.NewForCausalLM", {"modeling_new": CODE}, "imports Mixer from a file that does not lie in"),
        ("org/code--modeling_new.NewForCausalLM", {"modeling_new": CODE}, "lies in the hub repository org/code"),
        ("../model/modeling_new.NewForCausalLM", {"modeling_new": CODE}, "not of the form file.Class"),
        ("modeling_new", {"modeling_new": CODE}, "not of the form file.Class"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, target: str, files: dict[str, str], says: str) -> None:
    config = {**NEW, "auto_map": {"AutoConfig": "modeling_new.C", "AutoModel": target}}
    check = checked(tmp_path, folder(tmp_path, config, **files))
    assert check.exit_code == 3
    found = next(f for f in check.assessment.findings if f.code == "remote-code")
    assert says in found.reason


def test_bytes_that_are_no_text_and_a_file_that_is_too_large(tmp_path: Path) -> None:
    model = folder(tmp_path)
    (model / "modeling_new.py").write_bytes(b"\xff\xfe\x00")
    assert "could not be read" in " ".join(remote_of(read(model)).unread)
    with (model / "modeling_new.py").open("wb") as handle:
        handle.truncate(11 * 2**20)
    assert "more than 10 MB" in " ".join(remote_of(read(model)).unread)


def test_code_in_a_subfolder(tmp_path: Path) -> None:
    config = {**NEW, "auto_map": {"AutoModel": "code/modeling_new.NewForCausalLM"}}
    found = read(folder(tmp_path, config, code__modeling_new=CODE, code__layers=LAYERS))
    assert remote_of(found).files == (f"{REMOTE}code/layers.py", f"{REMOTE}code/modeling_new.py")
    assert {p.package for p in found.fast_paths} == {"mamba_ssm", "fla"}


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    found = read(folder(tmp_path, modeling_new=CODE, layers=f"from . import modeling_new\n{LAYERS}"))
    assert len(remote_of(found).files) == 2


def test_the_class_that_transformers_ships_comes_first_unless_the_code_is_trusted(tmp_path: Path) -> None:
    model = folder(tmp_path, KNOWN, modeling_new=CODE, layers=LAYERS)
    silent = checked(tmp_path, model)
    assert (silent.status, silent.exit_code) == (Status.WARN, 0)
    assert status_of(silent, "remote-code-not-used") is Status.WARN
    assert "trust_remote_code" in silent.intent.assumed
    assert not silent.assessment.fast_paths
    refused = checked(tmp_path, model, trust_remote_code=False)
    assert refused.status is Status.PASS
    trusted = checked(tmp_path, model, trust_remote_code=True)
    assert trusted.exit_code == 3
    assert {p.symbol for p in trusted.assessment.fast_paths} == {"mamba_chunk_scan_combined", "chunk_gated_delta_rule"}
    # Where there is no such code, there is nothing to trust, and nothing is assumed.
    plain = checked(tmp_path, configs.write(tmp_path / "plain", configs.LLAMA))
    assert (plain.status, "trust_remote_code" in plain.intent.assumed) == (Status.PASS, False)


def test_a_tokenizer_of_its_own_is_no_model_code(tmp_path: Path) -> None:
    config = {**configs.LLAMA, "auto_map": {"AutoTokenizer": ["tok.Slow", None], "AutoProcessor": "p.P"}}
    assert read(folder(tmp_path, config)).remote is None


def test_a_known_type_without_a_class_for_that_head_needs_the_code(tmp_path: Path) -> None:
    config = {**configs.LLAMA, "auto_map": {"AutoModelForImageTextToText": "modeling_new.NewForCausalLM"}}
    found = read(folder(tmp_path, config, modeling_new=CODE, layers=LAYERS))
    assert remote_of(found).runs


def test_a_name_that_this_transformers_no_longer_has_is_a_no(tmp_path: Path) -> None:
    gone = (
        "from transformers.utils import is_flash_attn_available\nfrom transformers import HybridCacheNope, BertModel\n"
    )
    caught = "try:\n    from transformers.nowhere import x\nexcept ImportError:\n    x = None\n"
    star = "from transformers.utils import *\nfrom transformers.models.llama import LlamaModel, modeling_llama\n"
    check = checked(tmp_path, folder(tmp_path, modeling_new=gone + caught + star + CODE, layers=LAYERS))
    assert check.exit_code == 1
    said = [f.reason for f in check.assessment.findings if f.code == "remote-code-outdated"]
    assert [text.split(" imports ")[1].split(" from ")[0] for text in said] == [
        "is_flash_attn_available",
        "HybridCacheNope",
    ]


IMPORTS = """
import einops, os.path
from fla.modules import RMSNorm as R
try:
    import caught
except ImportError:
    caught = None
if is_flash_attn_2_available():
    import flash_attn
if is_torch_available() and 1:
    import behind_torch
if is_own_available():
    import own
else:
    import other
if True:
    import always
def late():
    import inside
    with open("x"):
        from deep.er import thing
from .layers import Mixer
from . import sibling
"""
ORACLE = """
import json, sys
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports
known, new, gone, imports = sys.argv[1:5]
out = {"imports": get_imports(imports)}
config = AutoConfig.from_pretrained(known)
for trust in (None, False, True):
    try:
        out[f"known {trust}"] = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust)).__module__
    except Exception as error:
        out[f"known {trust}"] = type(error).__name__
for name, path in (("new", new), ("gone", gone)):
    for trust in (None, True):
        try:
            AutoConfig.from_pretrained(path, trust_remote_code=trust)
            out[f"{name} {trust}"] = "loaded"
        except Exception as error:
            out[f"{name} {trust}"] = type(error).__name__
Path(sys.argv[5]).write_text(json.dumps(out))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["4.57.6", NEWEST])
def test_transformers_itself_does_so(version: str, tmp_path: Path) -> None:
    """When code of the checkpoint's own is run, and what it must import, against the real thing."""
    env = environment(tmp_path / "env", version)
    small = CODE.replace("from .layers import Mixer\n", "").replace("Mixer(), ", "")
    known = folder(tmp_path / "known", KNOWN, modeling_new=small)
    configuration = (
        "from transformers import PretrainedConfig\nclass C(PretrainedConfig):\n    model_type = 'brand_new'\n"
    )
    new_map = {"auto_map": {"AutoConfig": "configuration_new.C"}}
    new = folder(tmp_path / "new", {**NEW, **new_map}, configuration_new=configuration)
    old = "from transformers.utils import is_flash_attn_available\n" + configuration
    gone = folder(tmp_path / "gone", {**NEW, **new_map}, configuration_new=old)
    (tmp_path / "imports.py").write_text(IMPORTS)
    done = subprocess.run(
        [env.python, "-c", ORACLE, known, new, gone, tmp_path / "imports.py", tmp_path / "out.json"],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    really = json.loads((tmp_path / "out.json").read_text())
    tree = find_tree(transformers_base(version).site / "transformers")
    reader = Reader(tree)
    for trust in (None, False, True):
        runs = remote_of(reader.declare(read_config(str(known)), trusted=trust)).runs
        assert really[f"known {trust}"].startswith("transformers_modules" if runs else "transformers.models.llama")
    assert (really["new None"], really["new True"]) == ("ValueError", "loaded")
    assert really["gone True"] == "ImportError"
    for path, outdated in ((new, False), (gone, True)):
        remote = remote_of(reader.declare(read_config(str(path)), trusted=None))
        assert (remote.runs, bool(remote.gone)) == (True, outdated)
    source = RemoteSource(Source(tree), tmp_path)
    module = source.module(f"{REMOTE}imports.py")
    assert module is not None
    assert {name for name, _ in required_imports(module, source)} == set(really["imports"])


def test_the_index_knows_what_an_auto_class_builds() -> None:
    index = Index(Source(READER.tree))
    assert index.builds("AutoModelForCausalLM", "llama")
    assert index.builds("AutoModel", "llama")
    assert not index.builds("AutoModelForImageTextToText", "llama")
    assert not index.builds("AutoModelForNothing", "llama")


_LINES = st.sampled_from(
    [
        "import fla",
        "import mamba_ssm.ops.triton.ssd_combined as ssd",
        "from causal_conv1d import causal_conv1d_fn",
        "from fla.modules import (RMSNorm, ShortConvolution as Conv)",
        "from . import layers, nothing",
        "from .layers import *",
        "from .. import above",
        "from ...far.above import x",
        "from transformers import *",
        "from transformers.nowhere import thing",
        "try:\n    from flash_attn import flash_attn_func\nexcept ImportError:\n    flash_attn_func = None",
        "if is_mamba_ssm_available():\n    from mamba_ssm import Mamba",
        "NewForCausalLM = None",
        "class NewForCausalLM(Missing):\n    x: int = 3\n    def forward(self, *a, **k): return causal_conv1d_fn(*a)",
        "class Layer:\n    def __init__(self):\n        self.f = get_kernel('org/name')",
        "@use_kernel_forward_from_hub('RMSNorm')\nclass Norm: pass",
        "def broken(:",
        "\x00",
        "x = '\\d'",
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    top=st.lists(_LINES, max_size=6),
    layers=st.none() | st.lists(_LINES, max_size=4),
    target=st.sampled_from(["modeling_new.NewForCausalLM", "modeling_new.Layer", "layers.x", "a.b.c", "", "x--y.z"]),
    auto=st.sampled_from(["AutoModel", "AutoModelForCausalLM", "AutoConfig", "AutoModelForNothing"]),
    known=st.booleans(),
)
def test_any_code_of_a_checkpoint_gives_a_report_and_never_a_pass(
    tmp_path: Path, *, top: list[str], layers: list[str] | None, target: str, auto: str, known: bool
) -> None:
    base: dict[str, Any] = configs.LLAMA if known else {"model_type": "brand_new"}
    model = folder(tmp_path, {**base, "auto_map": {auto: target}}, modeling_new="\n".join(top))
    (model / "layers.py").unlink(missing_ok=True)
    if layers is not None:
        (model / "layers.py").write_text("\n".join(layers))
    found = read(model, trusted=True)
    said = list(judge_remote(found, Intent(trust_remote_code=True)))
    assert {f.status for f in said} & {Status.UNKNOWN, Status.FAIL}
    assert all(f.reason and f.code for f in said)


def test_a_person_is_not_told_that_unread_code_needs_nothing(tmp_path: Path) -> None:
    from command import Command

    model = folder(tmp_path)
    said = Command("check", model, "--target", "h100", "--transformers", str(READER.tree.root))
    assert said.code == 3
    assert "needs no fused kernel" not in said.out
    refused = Command(
        "check", model, "--target", "h100", "--transformers", str(READER.tree.root), "--no-trust-remote-code"
    )
    assert (refused.code, "--trust-remote-code reads it" in refused.err) == (3, True)
