"""`kernelguard check` on real transformers releases with crafted kernel packages: the whole command, every situation.

Each case asserts the exit code and the answers in the JSON, because either alone can be right by accident.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import configs
import crafted
from command import Command
from observed import VERSIONS, Interpreter, environment, with_changed_transformers

pytestmark = pytest.mark.observed

DECORATED = ("5.16.1", "5.17.0", "5.24.0")
"""Releases whose binding does not depend on a visible GPU."""
GUARDED = ("4.57.6", "5.5.4")
EDGES = ("5.16.1", "5.24.0")
"""The first and the newest of them, for what does not depend on what changed in between."""
TRAINING = ("causal_conv1d_fn", "chunk_gated_delta_rule")
GDN = "fla/ops/gated_delta_rule/__init__.py"
CONV = "causal_conv1d/__init__.py"


def config_for(version: str) -> dict[str, Any]:
    """Qwen3.5, or the one of its family that this release knows."""
    return configs.QWEN3_NEXT if version == "4.57.6" else configs.QWEN3_5


class Answer:
    """What one check said."""

    def __init__(
        self, tmp: Path, env: Interpreter, config: dict[str, Any], *options: str, first_on_path: Path | None = None
    ) -> None:
        model = configs.write(tmp / "model", config)
        asked = options or ("--level", "import")
        variables = {} if first_on_path is None else {"PYTHONPATH": str(first_on_path)}
        command = Command("check", model, "--python", env.python, "--json", *asked, env=variables)
        assert command.out, command.err
        assert "Traceback" not in command.err, command.err
        self.code = command.code
        self.json = json.loads(command.out)
        self.paths = {path["symbol"]: path for path in self.json["fast_paths"]}
        assert self.json["exit_code"] == self.code

    def status(self, symbol: str) -> str:
        return str(self.paths[symbol]["status"])

    def codes(self, symbol: str) -> set[str]:
        return set(self.paths[symbol]["codes"])


def check(tmp: Path, version: str, files: crafted.Files, *options: str, config: dict[str, Any] | None = None) -> Answer:
    env = environment(tmp / "env", version, files)
    return Answer(tmp, env, config or config_for(version), *options)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0"])
def test_all_good(tmp_path: Path, version: str) -> None:
    answer = check(tmp_path, version, crafted.everything())
    assert answer.code == 0
    assert set(answer.paths) == set(TRAINING)
    for symbol in TRAINING:
        assert answer.status(symbol) == "pass"
        assert answer.paths[symbol]["layers"] == 3
    assert answer.paths["chunk_gated_delta_rule"]["bound_to"] == "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    assert answer.paths["causal_conv1d_fn"]["bound_to"] == "causal_conv1d.causal_conv1d_fn"
    assert {n["symbol"] for n in answer.json["not_used"]} >= {
        "causal_conv1d_update",
        "fused_recurrent_gated_delta_rule",
    }


def test_all_good_is_no_pass_where_gradients_were_asked_for(tmp_path: Path) -> None:
    answer = check(tmp_path, "5.24.0", crafted.everything(), "--level", "gpu")
    assert answer.code == 3
    assert answer.json["reached"] == "import"
    assert "cpu-torch" in {f["code"] for f in answer.json["findings"]}


@pytest.mark.parametrize("version", GUARDED)
def test_all_good_cannot_be_told_without_a_gpu_where_the_lookup_needs_one(tmp_path: Path, version: str) -> None:
    answer = check(tmp_path, version, crafted.everything())
    assert answer.code == 3
    for symbol in TRAINING:
        assert answer.status(symbol) == "unknown"
        assert "needs-gpu-to-bind" in answer.codes(symbol)


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_installed(tmp_path: Path, version: str) -> None:
    answer = check(tmp_path, version, {})
    assert answer.code == 1
    for symbol in TRAINING:
        assert answer.codes(symbol) == {"not-installed"}
        assert "pip install" in answer.paths[symbol]["fix"]


@pytest.mark.parametrize(
    ("version", "removed", "missing", "present"),
    [
        *((version, "causal_conv1d", *TRAINING) for version in (*GUARDED, *EDGES)),
        *((version, "fla", *reversed(TRAINING)) for version in (GUARDED[0], EDGES[-1])),
    ],
)
def test_one_package_missing(tmp_path: Path, version: str, removed: str, missing: str, present: str) -> None:
    files = crafted.without(crafted.everything(), removed, "flash_linear_attention", "fla_core")
    if removed == "causal_conv1d":
        files |= crafted.fla()
    answer = check(tmp_path, version, files)
    assert answer.code == 1
    assert answer.codes(missing) == {"not-installed"}
    assert "not-installed" not in answer.codes(present)


@pytest.mark.parametrize("version", [*GUARDED, "5.24.0"])
def test_installed_but_its_import_raises(tmp_path: Path, version: str) -> None:
    words = "/site/causal_conv1d_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEab"
    files = crafted.replaced(crafted.everything(), CONV, f"raise ImportError({words!r})\n")
    answer = check(tmp_path, version, files)
    assert answer.code == 1
    assert answer.codes("causal_conv1d_fn") == {"broken"}
    assert words in answer.paths["causal_conv1d_fn"]["reason"]
    assert "not installed" not in answer.paths["causal_conv1d_fn"]["reason"]


@pytest.mark.parametrize(
    ("undefined", "needs", "said"),
    [
        ("_ZN3c1021kernelguard_no_such_fnEv", None, "_ZN3c1021kernelguard_no_such_fnEv"),
        (None, "libcudart.so.99", "libcudart.so.99"),
    ],
    ids=["undefined-symbol", "missing-library"],
)
def test_binary_that_cannot_be_loaded(tmp_path: Path, undefined: str | None, needs: str | None, said: str) -> None:
    files = crafted.everything()
    files[CONV] = "import torch\nimport causal_conv1d_cuda\n" + files[CONV]
    env = environment(tmp_path / "env", "5.24.0", files)
    crafted.shared_object(env.site / "causal_conv1d_cuda.so", undefined=undefined, needs=needs)
    answer = Answer(tmp_path, env, configs.QWEN3_5)
    assert answer.code == 1
    assert answer.codes("causal_conv1d_fn") == {"broken"}
    assert said in answer.paths["causal_conv1d_fn"]["reason"]
    assert answer.status("chunk_gated_delta_rule") == "pass"


@pytest.mark.parametrize(
    ("version", "body", "code"),
    [
        ("5.24.0", "import os\nos.abort()\n", "crashes"),
        ("5.5.4", "import os\nos.abort()\n", "crashes"),
        pytest.param("5.24.0", "import os\nos._exit(0)\n", "exits", marks=pytest.mark.thorough),
        pytest.param("5.24.0", "import time\ntime.sleep(3600)\n", "hangs", marks=pytest.mark.thorough),
    ],
    ids=["abort", "abort-5.5.4", "exit", "hang"],
)
def test_import_that_kills_or_blocks_the_process(tmp_path: Path, version: str, body: str, code: str) -> None:
    files = crafted.replaced(crafted.everything(), CONV, body)
    answer = check(tmp_path, version, files, "--level", "import", "--timeout", "40")
    assert answer.code == 1
    assert code in answer.codes("causal_conv1d_fn")
    assert answer.status("causal_conv1d_fn") == "fail"
    # What could not be read after that is unknown, never a pass.
    assert answer.status("chunk_gated_delta_rule") in {"unknown", "fail"}


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["5.24.0"])
def test_fla_without_triton(tmp_path: Path, version: str) -> None:
    files = crafted.everything()
    files[GDN] = "import triton\n" + files[GDN]
    answer = check(tmp_path, version, files)
    assert answer.code == 1
    assert answer.codes("chunk_gated_delta_rule") == {"missing-dependency"}
    assert "triton" in answer.paths["chunk_gated_delta_rule"]["reason"]


@pytest.mark.thorough
def test_nested_fla_is_ignored_by_5_16(tmp_path: Path) -> None:
    answer = check(tmp_path, "5.16.1", crafted.everything())
    assert answer.code == 1
    assert answer.status("causal_conv1d_fn") == "pass"
    assert "ignored" in answer.codes("chunk_gated_delta_rule")
    path = answer.paths["chunk_gated_delta_rule"]
    assert "transformers>=5.17" in path["fix"]
    assert "install 'flash" not in path["fix"]


@pytest.mark.thorough
@pytest.mark.parametrize(("version", "symbol"), list(zip(EDGES, TRAINING, strict=True)))
def test_symbol_missing(tmp_path: Path, version: str, symbol: str) -> None:
    name = CONV if symbol == "causal_conv1d_fn" else GDN
    answer = check(
        tmp_path, version, crafted.renamed(crafted.everything(), name, f"def {symbol}(", f"def old_{symbol}(")
    )
    assert answer.code == 1
    assert "symbol-missing" in answer.codes(symbol)


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["5.16.1"])
def test_leftover_folder_hides_the_package(tmp_path: Path, version: str) -> None:
    files = crafted.without(crafted.everything(), "fla", "flash_linear")
    env = environment(tmp_path / "env", version, files)
    (env.site / "fla").mkdir()
    answer = Answer(tmp_path, env, configs.QWEN3_5)
    assert answer.code == 1
    assert answer.codes("chunk_gated_delta_rule") == {"shadowed"}
    assert str(env.site / "fla") in answer.paths["chunk_gated_delta_rule"]["reason"]


ALL_SIGNALS = "position_ids,cu_seq_lens_q,seq_idx"


@pytest.mark.parametrize(
    ("version", "signals", "leaking"),
    [
        ("5.24.0", ALL_SIGNALS, set()),
        ("5.17.0", "position_ids", set(TRAINING)),
        pytest.param("5.24.0", "position_ids,cu_seq_lens_q", {"causal_conv1d_fn"}, marks=pytest.mark.thorough),
        pytest.param("5.24.0", "position_ids,seq_idx", {"chunk_gated_delta_rule"}, marks=pytest.mark.thorough),
    ],
    ids=["all", "position_ids", "no-seq_idx", "no-cu_seq_lens"],
)
def test_packed_with_every_kernel_bound(tmp_path: Path, version: str, signals: str, leaking: set[str]) -> None:
    options = ("--level", "import", "--packed", "--signals", signals)
    answer = check(tmp_path, version, crafted.everything(), *options)
    assert {s for s in TRAINING if answer.status(s) == "fail"} == leaking
    assert answer.code == (1 if leaking else 0)
    for symbol in leaking:
        assert "signal-not-sent" in answer.codes(symbol)


@pytest.mark.thorough
def test_packed_without_saying_which_signals_is_unknown(tmp_path: Path) -> None:
    answer = check(tmp_path, "5.24.0", crafted.everything(), "--level", "import", "--packed")
    assert answer.code == 3
    assert "signals-unknown" in answer.codes("chunk_gated_delta_rule")


@pytest.mark.thorough
def test_packed_without_position_ids_leaks_through_attention(tmp_path: Path) -> None:
    options = ("--level", "import", "--packed", "--signals", "cu_seq_lens_q,seq_idx")
    answer = check(tmp_path, "5.24.0", crafted.everything(), *options)
    assert answer.code == 1
    assert "attention-signal-not-sent" in {f["code"] for f in answer.json["findings"]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "old", "new", "symbol"),
    [
        (GDN, "cu_seqlens=None", "offsets=None", "chunk_gated_delta_rule"),
        pytest.param(CONV, "seq_idx=None, ", "", "causal_conv1d_fn", marks=pytest.mark.thorough),
        pytest.param(CONV, "seq_idx=None, initial", "*_, initial", "causal_conv1d_fn", marks=pytest.mark.thorough),
    ],
    ids=["renamed-and-swallowed", "dropped", "starred"],
)
def test_boundary_argument_lost(tmp_path: Path, name: str, old: str, new: str, symbol: str) -> None:
    files = crafted.renamed(crafted.everything(), name, old, new)
    unpacked = check(tmp_path / "unpacked", "5.24.0", files)
    assert unpacked.code == 0
    packed = check(tmp_path / "packed", "5.24.0", files, "--level", "import", "--packed", "--signals", ALL_SIGNALS)
    assert packed.code == 1
    assert "boundary-argument-lost" in packed.codes(symbol)


@pytest.mark.thorough
@pytest.mark.parametrize("version", [*GUARDED, *EDGES])
def test_mamba2_gate_needs_its_decode_kernels_only_while_it_is_all_or_nothing(tmp_path: Path, version: str) -> None:
    files = crafted.without(crafted.everything(), "causal_conv1d")
    files |= {
        "causal_conv1d/__init__.py": crafted.causal_conv1d()[CONV].replace("def causal_conv1d_update", "def gone")
    }
    files |= crafted.metadata("causal-conv1d", "1.7.0", "causal_conv1d")
    answer = check(tmp_path, version, files, config=configs.MAMBA2)
    if version in DECORATED:
        assert "causal_conv1d_update" not in answer.paths
        assert answer.status("causal_conv1d_fn") == "pass"
    else:
        assert answer.code == 1
        assert "symbol-missing" in answer.codes("causal_conv1d_update")


@pytest.mark.thorough
def test_a_hybrid_without_mamba_layers_needs_no_mamba_kernels(tmp_path: Path) -> None:
    config = {**configs.BAMBA, "attn_layer_indices": [0, 1, 2, 3]}
    answer = check(tmp_path, "5.24.0", {}, config=config)
    assert answer.paths == {}
    assert answer.code == 0


def test_dense_model_declares_nothing(tmp_path: Path) -> None:
    answer = check(tmp_path, "5.24.0", {}, config=configs.LLAMA)
    assert answer.paths == {}
    assert answer.code == 0


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["5.24.0"])
def test_a_wrapper_of_unknown_shape_is_unknown(tmp_path: Path, version: str) -> None:
    env = environment(tmp_path / "env", version, crafted.everything())
    change = ("is_new_implementation", "is_other_implementation")
    with_changed_transformers(env, version, {"integrations/hub_kernels.py": change})
    answer = Answer(tmp_path, env, configs.QWEN3_5)
    assert answer.code == 3
    assert {answer.status(symbol) for symbol in TRAINING} == {"unknown"}


MODELING = "models/qwen3_5/modeling_qwen3_5.py"


@pytest.mark.parametrize("version", ["5.24.0"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"chunk_gated_delta_rule", "fla"', '"chunk_gated_delta_rule_v2", "fla"'),
        pytest.param(
            '"chunk_gated_delta_rule", "fla"', '"chunk_gated_delta_rule", "fla_ng"', marks=pytest.mark.thorough
        ),
        pytest.param(
            "@use_kernel_func_from_hub_with_fallback(",
            "@use_kernel_func_from_hub_with_fallback(strict=True, *",
            marks=pytest.mark.thorough,
        ),
        ("use_kernel_func_from_hub_with_fallback", "use_kernel_func_from_hub_or_fallback"),
    ],
    ids=["renamed-symbol", "other-package", "new-argument", "renamed-decorator"],
)
def test_changed_sources_never_pass(tmp_path: Path, version: str, old: str, new: str) -> None:
    env = environment(tmp_path / "env", version, crafted.everything())
    with_changed_transformers(env, version, {MODELING: (old, new)})
    answer = Answer(tmp_path, env, configs.QWEN3_5)
    assert answer.code in {1, 3}
    assert answer.json["status"] in {"fail", "unknown"}


def checkout(folder: Path, version: str) -> Path:
    """The files of fla as they lie in a clone of its repository: no metadata beside them."""
    for name, text in crafted.fla(version or "0").items():
        if name.startswith("fla/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if version else text.replace('__version__ = "0"', ""))
    return folder


def without_fla() -> crafted.Files:
    return {name: text for name, text in crafted.everything().items() if not name.startswith(("fla", "flash_linear"))}


def reasons(answer: Answer, code: str) -> str:
    return " ".join(f["reason"] for f in answer.json["findings"] if f["code"] == code)


def test_a_checkout_before_the_installed_release_is_judged_as_what_it_is(tmp_path: Path) -> None:
    """Rules go by release: the installed one's metadata passed code that computes wrong numbers."""
    env = environment(tmp_path / "env", "5.24.0", crafted.everything())
    old = checkout(tmp_path / "old", "0.4.1")
    answer = Answer(tmp_path, env, configs.QWEN3_5, first_on_path=old)
    assert answer.code == 1
    assert answer.codes("chunk_gated_delta_rule") == {"bound", "other-release", "fla-grouped-values"}
    assert f"fla 0.4.1 from {old / 'fla'}" in reasons(answer, "other-release")


def test_a_checkout_alone_goes_by_its_own_version(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.24.0", without_fla())
    old = Answer(tmp_path, env, configs.QWEN3_5, first_on_path=checkout(tmp_path / "old", "0.4.1"))
    assert old.code == 1
    assert old.codes("chunk_gated_delta_rule") == {"bound", "fla-grouped-values"}
    new = Answer(tmp_path, env, configs.QWEN3_5, first_on_path=checkout(tmp_path / "new", "0.6.0"))
    assert new.code == 0
    assert new.codes("chunk_gated_delta_rule") == {"bound"}
    untold = Answer(tmp_path, env, configs.QWEN3_5, first_on_path=checkout(tmp_path / "untold", ""))
    assert untold.code == 3
    assert untold.codes("chunk_gated_delta_rule") == {"bound", "release-unknown"}


def test_an_editable_install_is_no_alarm(tmp_path: Path) -> None:
    place = checkout(tmp_path / "clone", "0.6.0")
    files = {
        **without_fla(),
        **crafted.metadata("fla-core", "0.6.0", "__editable___fla_core_0_6_0_finder"),
        "__editable__.fla_core-0.6.0.pth": f"{place}\n",
    }
    answer = Answer(tmp_path, environment(tmp_path / "env", "5.24.0", files), configs.QWEN3_5)
    assert answer.code == 0
    assert answer.codes("chunk_gated_delta_rule") == {"bound"}


def test_a_verdict_on_a_checkout_says_that_its_fingerprint_is_of_other_files(tmp_path: Path) -> None:
    """Otherwise it would admit ranks that have the installed release, which it never measured."""
    env = environment(tmp_path / "env", "5.24.0", crafted.everything())
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    clone = checkout(tmp_path / "clone", "0.6.0")
    asked = ("verify", model, "--python", env.python, "--level", "import", "--json")
    loose = json.loads(Command(*asked, env={"PYTHONPATH": str(clone)}).out)
    assert [str(clone / "fla") in problem for problem in loose["problems"]] == [True]
    assert json.loads(Command(*asked).out)["problems"] == []
