"""Whole runs of one process: losses, resuming, stopping, saving, exporting."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernelguard_train import cli, export, model
from kernelguard_train.batches import packed_batch
from kernelguard_train.chat import Sample
from kernelguard_train.config import Config
from kernelguard_train.errors import CheckpointError, Interrupted, NonFiniteError
from kernelguard_train.ranks import Ranks
from kernelguard_train.report import Report
from kernelguard_train.sharding import make_mesh

GOLDEN = Path(__file__).with_name("golden.json")


class StopAt(Report):
    """Sends this process a SIGTERM once a step is done, as a cluster would."""

    at = 0

    def step(self, number: int, done: float, values: dict[str, Any]) -> None:
        super().step(number, done, values)
        if number == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_at(config: Config, ranks: Ranks, step: int) -> None:
    report = StopAt(config, first=True)
    report.at = step
    with pytest.raises(Interrupted, match=f"saved at step {step + 1}"):
        tiny.run(config, ranks, report)


def weights(config: Config) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint, as one process reads it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    newest = max((Path(config.train.output) / "checkpoints").glob("step-*"))
    whole = Path(config.train.output) / "whole.pt"
    dcp_to_torch_save(newest, whole)
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}/{name}", inner)
        elif isinstance(value, torch.Tensor):
            found[prefix] = value

    walk("", torch.load(whole, weights_only=True))
    return found


def configured(model_folder: Path, output: Path, *overrides: str) -> Config:
    return tiny.configured(model_folder, f"train.output={output}", "batch.per_step=2", "train.steps=6", *overrides)


@pytest.fixture(scope="module")
def uninterrupted(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, alone: Ranks) -> Config:
    config = configured(model_folder, tmp_path_factory.mktemp("whole"), "checkpoint.export=true")
    tiny.run(config, alone)
    return config


def test_the_loss_falls_and_follows_the_golden_curve(uninterrupted: Config) -> None:
    """Regenerate with `python tests/train/test_run.py` after a change that is meant to change it."""
    losses = [line["loss"] for line in tiny.logged(uninterrupted)]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())["losses"], rel=2e-4)
    assert losses[-1] < losses[0] - 0.5


def test_every_step_is_logged_in_full(uninterrupted: Config) -> None:
    lines = tiny.logged(uninterrupted)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["done"] == 1
    for line in lines:
        assert 0 < line["trained_tokens_per_s"] < line["tokens_per_s"] <= line["computed_tokens_per_s"]
        assert 0.5 < line["density"] <= 1
        assert line["step_s"] > line["data_wait_s"] >= 0
    summary = json.loads((Path(uninterrupted.train.output) / "summary.json").read_text())
    assert summary["steps"] == 4, "the first two steps are left out"
    assert summary["step_p95_s"] >= summary["step_p50_s"] > 0


def test_a_run_says_which_layers_it_has_and_what_they_run_on(uninterrupted: Config) -> None:
    built = json.loads((Path(uninterrupted.train.output) / "built.json").read_text())
    assert built["model_type"] == "qwen3_5_text"
    assert set(built["layer_types"]) == {"linear_attention", "full_attention"}
    assert (built["device"], built["attention"]) == ("cpu", "sdpa")
    assert any(name.endswith("chunk_gated_delta_rule") and "reference" in to for name, to in built["bound"].items())


def test_a_stopped_run_goes_on_bit_for_bit(
    uninterrupted: Config, model_folder: Path, tmp_path: Path, alone: Ranks
) -> None:
    config = configured(model_folder, tmp_path)
    stopped_at(config, alone, 2)
    assert [line["step"] for line in tiny.logged(config)] == [1, 2, 3]
    losses = [line["loss"] for line in tiny.run(config, alone)]
    assert losses == [line["loss"] for line in tiny.logged(uninterrupted)]
    expected, found = weights(uninterrupted), weights(config)
    assert expected.keys() == found.keys()
    assert len([name for name in found if "exp_avg" in name]) > 20, "the optimizer's state is compared too"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_background_saves_hold_the_state_of_their_step(
    uninterrupted: Config, model_folder: Path, tmp_path: Path, alone: Ranks
) -> None:
    """Training goes on while a checkpoint is written, and must not change what is written."""
    config = configured(model_folder, tmp_path, "checkpoint.every=2", "checkpoint.keep=9")
    tiny.run(config, alone)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006"]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    tiny.run(config, alone)
    expected, found = weights(uninterrupted), weights(config)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_finished_run_has_nothing_left_to_do(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    config = configured(model_folder, tmp_path, "train.steps=3")
    tiny.run(config, alone)
    summary = (tmp_path / "summary.json").read_text()
    assert len(tiny.run(config, alone)) == 3
    assert (tmp_path / "summary.json").read_text() == summary


def test_old_checkpoints_go(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    config = configured(model_folder, tmp_path, "checkpoint.every=1", "checkpoint.keep=2", "train.steps=4")
    tiny.run(config, alone)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("damage", ["truncated", "no metadata", "no run.json"])
def test_an_unreadable_checkpoint_falls_back_to_the_one_before(
    model_folder: Path, tmp_path: Path, alone: Ranks, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    config = configured(model_folder, tmp_path, "checkpoint.every=1", "train.steps=2")
    tiny.run(config, alone)
    newest = tmp_path / "checkpoints" / "step-00000002"
    if damage == "truncated":
        (newest / "__0_0.distcp").write_bytes((newest / "__0_0.distcp").read_bytes()[:1000])
    else:
        (newest / (".metadata" if damage == "no metadata" else "run.json")).unlink()
    lines = tiny.run(config, alone)
    assert "step-00000002 cannot be read" in caplog.text
    assert [line["step"] for line in lines] == [1, 2, 2], "step 2 was done again from the checkpoint of step 1"
    assert lines[1]["loss"] == lines[2]["loss"]


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    config = configured(model_folder, tmp_path, "train.steps=1")
    tiny.run(config, alone)
    (tmp_path / "checkpoints" / "step-00000001" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        tiny.run(config, alone)


def test_another_order_of_data_is_refused(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    tiny.run(configured(model_folder, tmp_path, "train.steps=1"), alone)
    with pytest.raises(CheckpointError, match=r"batch\.window = 32, now it is 16"):
        tiny.run(configured(model_folder, tmp_path, "train.steps=2", "batch.window=16"), alone)
    with pytest.raises(CheckpointError, match="has checkpoints; use another"):
        tiny.run(configured(model_folder, tmp_path, "train.resume=never"), alone)


def trainer_logits(made: model.Built, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the trainer's own network at all but the last position, with its weights rounded to bf16."""
    with torch.no_grad():
        for parameter in made.network.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(local.bfloat16())
    seen: list[torch.Tensor] = []
    hook = made.parts.ending[-1].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    sample = Sample(name="s", ids=ids.numpy(), trained=np.ones(len(ids), dtype=bool))
    made.network(packed_batch([sample], 128, 0)).backward()
    hook.remove()
    head: Any = made.parts.ending[-1].weight
    head = head.full_tensor() if isinstance(head, DTensor) else head
    return (seen[0] @ head.T).detach()


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
def test_an_exported_model_gives_the_same_logits(tmp_path: Path, alone: Ranks, architecture: str) -> None:
    config = tiny.configured(
        tiny.write_config(tmp_path / "config", architecture), f"train.output={tmp_path}", "data.path=synthetic"
    )
    made = model.build(config, make_mesh(alone.device, 1, 0), alone.device)
    folder = export.export(made.network.lm, made.text, config, alone, limit=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert exported.dtype == torch.bfloat16
    ids = torch.randint(0, 575, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = exported.float()(input_ids=ids[None], use_cache=False).logits[0, :-1]
    found = trainer_logits(made, ids)
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_run_exports_its_weights_rounded_once_and_its_tokenizer(uninterrupted: Config) -> None:
    folder = Path(uninterrupted.train.output) / "model"
    trained = {name.rpartition("/")[2]: value for name, value in weights(uninterrupted).items() if "/model/" in name}
    for name, parameter in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        assert torch.equal(parameter, trained[f"lm.{name}"].bfloat16()), name
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert "varlen" not in (folder / "config.json").read_text()


def test_padded_batches_train_the_same_samples(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    """One step over all samples has the same loss, however they are laid out."""
    losses = {}
    for mode in ("packed", "padded", "sorted"):
        few = tmp_path / "few.jsonl"
        few.write_text("".join(tiny.CHATS.read_text().splitlines(keepends=True)[:8]))
        changes = [f"batch.mode={mode}", f"data.path={few}", "batch.tokens=1024", "train.steps=1", "batch.per_step=4"]
        config = configured(model_folder, tmp_path / mode, *changes)
        losses[mode] = tiny.run(config, alone)[0]["loss"]
    assert losses["padded"] == pytest.approx(losses["packed"], rel=1e-6)
    assert losses["sorted"] == pytest.approx(losses["packed"], rel=1e-6)


def test_accumulated_batches_are_one_step_over_all_their_tokens(
    model_folder: Path, tmp_path: Path, alone: Ranks
) -> None:
    """Batches with few trained tokens must not weigh more: the same samples in one batch give the same gradient."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(sorted(tiny.CHATS.read_text().splitlines(keepends=True), key=len)[::34]))
    found = {}
    for tokens, batches in ((1024, 1), (256, 6)):
        changes = [f"data.path={few}", f"batch.tokens={tokens}", f"batch.per_step={batches}", "data.too_long=error"]
        config = configured(model_folder, tmp_path / str(tokens), *changes, "train.steps=0")
        (line,) = tiny.run(config, alone)
        assert line["samples"] == 8, "the premise: one step holds all samples"
        found[tokens] = (line["loss"], line["norm"])
    assert found[256] == pytest.approx(found[1024], rel=1e-5)


def test_non_finite_steps_are_skipped_and_then_end_the_run(
    model_folder: Path, tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.Network.forward
    calls = []

    def poisoned(self: Any, batch: Any, scale: float = 1.0) -> torch.Tensor:
        calls.append(batch.size)
        return forward(self, batch, scale) * (float("nan") if len(calls) in poison else 1.0)

    monkeypatch.setattr(model.Network, "forward", poisoned)
    poison = {4}  # the isolation check is the first call, so this is in the second step
    lines = tiny.run(configured(model_folder, tmp_path, "train.steps=3"), alone)
    assert [line["skipped"] for line in lines] == [0, 1, 1]
    assert len(set(calls)) == 1, "the isolation check has the size of the run's batches"
    assert lines[2]["loss"] == lines[2]["loss"], "weights are still finite"
    calls.clear()
    poison = set(range(2, 99))
    with pytest.raises(NonFiniteError, match="for 3 steps in a row"):
        tiny.run(configured(model_folder, tmp_path / "b"), alone)


def test_bfloat16_compute_trains(model_folder: Path, tmp_path: Path, alone: Ranks, uninterrupted: Config) -> None:
    lines = tiny.run(configured(model_folder, tmp_path, "model.compute_dtype=bfloat16", "model.recompute=full"), alone)
    expected = [line["loss"] for line in tiny.logged(uninterrupted)]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=0.03)


def test_tensorboard_events_are_written(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    pytest.importorskip("tensorboard")
    tiny.run(configured(model_folder, tmp_path, "report.tensorboard=true", "train.steps=2"), alone)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in tiny.logged(configured(model_folder, tmp_path))], rel=1e-6
    )


def test_a_terminal_shows_a_bar_with_the_time_left(
    model_folder: Path, tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    tiny.run(configured(model_folder, tmp_path, "train.steps=2", "report.progress=true"), alone)
    assert " left" in screen.getvalue()
    assert "100.0%" in screen.getvalue()
    assert "step 2, loss" in screen.getvalue()


# --- the command line ------------------------------------------------------------------------------------------------


def test_print_config_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "# Peak learning rate.\nlr = 1e-05" in printed
    assert cli.main(["--print-config", "model.path=m", "data.path=d", "optim.lr=2"]) == 0
    assert "lr = 2.0" in capsys.readouterr().out


def test_problems_go_to_stderr_with_an_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path
) -> None:
    assert cli.main(["optim.lrr=2"]) == 2
    assert "did you mean optim.lr?" in capsys.readouterr().err
    assert cli.main(["--audit-data", "3", f"model.path={model_folder}", f"data.path={tmp_path}/none.jsonl"]) == 1
    assert "nothing at" in capsys.readouterr().err


def test_audit_shows_what_is_trained(capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    common = [f"model.path={model_folder}", f"data.path={tiny.CHATS}", "data.shuffle=false", "batch.tokens=256"]
    assert cli.main([*common, "--audit-data", "2"]) == 0
    printed = capsys.readouterr().out
    first = json.loads(tiny.CHATS.read_text().splitlines()[0])["messages"]
    answers = [turn["content"] for turn in first if turn["role"] == "assistant"]
    assert all(f"[[{answer}<|im_end|>]]" in printed for answer in answers)
    assert printed.count("--- chats.jsonl:") == 2
    assert "240 rows: 240 samples, 0 bad" in printed


if __name__ == "__main__":  # regenerate the golden curve
    import tempfile

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))
    from kernelguard_train import ranks as ranks_
    from kernelguard_train.demo import make

    with tempfile.TemporaryDirectory() as folder:
        make.main(Path(folder))
        golden = configured(Path(folder), Path(folder) / "run")
        curve = [line["loss"] for line in tiny.run(golden, ranks_.start(golden))]
    GOLDEN.write_text(json.dumps({"losses": curve}, indent=1) + "\n")
