"""Sources, row policies, and the stream of steps: order, sharing between ranks, resuming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
import torch

from kernelguard_train import configfile, source
from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError, DataError
from kernelguard_train.samples import open_samples
from kernelguard_train.stream import Position, Step, Steps, batches_per_step, load_steps


def rows(count: int) -> list[dict[str, Any]]:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": " ".join(words[j % 8] for j in range(3 + i * 7 % 23))},
            ]
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, content: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in content))
    return path


def configured(model: Path, data: str | Path, *overrides: str) -> Config:
    base = ["batch.tokens=256", "batch.window=16", "data.workers=0"]
    return configfile.load(None, [f"model.path={model}", f"data.path={data}", *base, *overrides])


def steps(config: Config, rank: int = 0, world: int = 1, start: Position | None = None) -> Iterator[Step]:
    return load_steps(config, 600, rank=rank, world=world, start=start or Position(), device=torch.device("cpu"))


def names(config: Config) -> list[str]:
    samples = open_samples(config, 600)
    return [s.name for s in samples.window(0, 0)[0]]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", rows(50))


def test_every_format_gives_the_same_samples(tmp_path: Path, model_folder: Path, jsonl: Path) -> None:
    table = datasets.Dataset.from_list(rows(50))
    table.to_parquet(tmp_path / "chats.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "a.jsonl", rows(50)[:20])
    write_jsonl(tmp_path / "folder" / "b.jsonl", rows(50)[20:])
    with fsspec.open("memory://bucket/chats.jsonl", "wt") as handle:
        handle.write(jsonl.read_text())
    with fsspec.open("memory://bucket/chats.parquet", "wb") as handle:
        handle.write((tmp_path / "chats.parquet").read_bytes())
    paths = [jsonl, tmp_path / "chats.parquet", tmp_path / "saved", tmp_path / "dict", tmp_path / "folder",
             tmp_path / "folder" / "*.jsonl", "memory://bucket/chats.jsonl"]  # fmt: skip
    expected = None
    for streaming in (False, True):
        for path in paths:
            extra = ["data.shuffle=false", "batch.window=50"]
            extra += ["data.streaming=true", "train.steps=9"] if streaming else []
            window, count = open_samples(configured(model_folder, path, *extra), 600).window(0, 0)
            assert count == 50
            found = [sample.ids.tolist() for sample in window]
            expected = expected or found
            assert found == expected, (path, streaming)
            resumed, _ = open_samples(configured(model_folder, path, *extra), 600).window(0, 17)
            assert [sample.ids.tolist() for sample in resumed] == expected[17:], (path, streaming)


def test_jsonl_rows_are_named_by_file_and_line(model_folder: Path, jsonl: Path) -> None:
    assert names(configured(model_folder, jsonl, "data.shuffle=false"))[:2] == ["chats.jsonl:1", "chats.jsonl:2"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_order_changes_by_epoch_and_seed_and_by_nothing_else(
    model_folder: Path, jsonl: Path, *, streaming: bool
) -> None:
    extra = ["batch.window=50", *(["data.streaming=true", "train.steps=9"] if streaming else [])]

    def order(epoch: int, seed: int, start: int = 0) -> list[str]:
        samples = open_samples(configured(model_folder, jsonl, *extra, f"train.seed={seed}"), 600)
        return [s.name for s in samples.window(epoch, start)[0]]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0)[13:] == order(0, 0, 13)
    assert sorted(order(0, 0)) == sorted(order(1, 0))
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)


BAD = [
    ("{broken", "not JSON"),
    ("[1, 2]", "a JSON object was expected"),
    ({"text": "x"}, "no column 'messages'"),
    ({"messages": [{"role": "user", "content": "Q"}]}, "no assistant turn"),
    ({"messages": None}, "expected a non-empty list of turns"),
    ({"messages": [{"role": "assistant", "content": None}]}, "has no content"),
]


@pytest.mark.parametrize(("row", "problem"), BAD)
def test_a_bad_row_stops_the_run_with_its_name(tmp_path: Path, model_folder: Path, row: Any, problem: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [*rows(3), row, *rows(3)])
    with pytest.raises(DataError, match=rf"bad\.jsonl:4: .*{problem}.*bad_rows=skip"):
        list(steps(configured(model_folder, path)))


def test_bad_rows_are_skipped_and_counted_by_policy(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [*rows(3), *(row for row, _ in BAD), *rows(3)])
    *_, last = steps(configured(model_folder, path, "data.bad_rows=skip"))
    assert (last.counts.rows, last.counts.bad) == (12, 6)
    assert "bad.jsonl:4" in caplog.text
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows = 2"):
        list(steps(configured(model_folder, path, "data.bad_rows=skip", "data.max_bad_rows=2")))


def test_nothing_usable_is_an_error_not_an_endless_loop(tmp_path: Path, model_folder: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", ["{broken"] * 5)
    with pytest.raises(DataError, match="none of the 5 rows can be trained on"):
        list(steps(configured(model_folder, path, "data.bad_rows=skip", "train.steps=3")))
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="has no rows"):
        list(steps(configured(model_folder, empty)))


@pytest.mark.parametrize("path", ["nothing.jsonl", "./nothing", "memory://nowhere/x.jsonl"])
def test_a_missing_source_is_named(model_folder: Path, path: str) -> None:
    with pytest.raises(DataError, match=r"noth|nowhere"):
        list(steps(configured(model_folder, path)))


def test_unknown_formats_are_refused(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"unknown formats; known are \.jsonl"):
        list(steps(configured(model_folder, tmp_path / "x.csv")))


def test_a_tokenizer_that_is_too_large_for_the_model_is_refused(model_folder: Path, jsonl: Path) -> None:
    with pytest.raises(DataError, match="the tokenizer has 575 tokens and the model 500 embeddings"):
        open_samples(configured(model_folder, jsonl), 500)


def test_reads_are_retried_with_doubling_pauses() -> None:
    pauses: list[float] = []
    answers: Iterator[Any] = iter([OSError("reset"), TimeoutError("slow"), "row"])

    def read() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert source.retrying(read, "x", 2, pauses.append) == "row"
    assert pauses == [1.0, 2.0]

    def broken() -> str:
        raise OSError("gone")

    with pytest.raises(DataError, match="x: still failing after 2 retries: OSError: gone"):
        source.retrying(broken, "x", 2, pauses.append)


def test_a_stream_that_breaks_is_opened_again_where_it_was() -> None:
    opened: list[int] = []

    def generate() -> Iterator[dict[str, Any]]:
        for i in range(10):
            if i == 6 and len(opened) == 1:
                raise ConnectionError("reset")
            yield {"value": i}

    def open_() -> Any:
        opened.append(1)
        return datasets.IterableDataset.from_generator(generate)

    stream = source.Stream(open_, "s", 0, 0, retries=2, pause=lambda _: None)
    assert [row.content["value"] for row in stream.rows(0, 0) if row.content] == list(range(10))
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("policy", "count", "lengths"),
    [("truncate", "truncated", [256]), ("split", "split", [178, 177, 178]), ("drop", "dropped", [])],
)
def test_samples_that_are_too_long(
    tmp_path: Path, model_folder: Path, policy: str, count: str, lengths: list[int]
) -> None:
    long = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "x y " * 173}]}
    path = write_jsonl(tmp_path / "long.jsonl", [long, rows(1)[0]])
    samples = open_samples(configured(model_folder, path, f"data.too_long={policy}", "data.shuffle=false"), 600)
    window, _ = samples.window(0, 0)
    assert [len(sample) for sample in window[:-1]] == lengths
    assert getattr(samples.counts, count) == 1
    with pytest.raises(DataError, match=r"long\.jsonl:1: 533 tokens, more than 256"):
        list(steps(configured(model_folder, path, "data.too_long=error")))


def test_truncating_away_the_answer_drops_the_sample(tmp_path: Path, model_folder: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x y " * 173}, {"role": "assistant", "content": "A"}]}
    samples = open_samples(configured(model_folder, write_jsonl(tmp_path / "l.jsonl", [long])), 600)
    assert samples.window(0, 0)[0] == []
    assert (samples.counts.truncated, samples.counts.dropped) == (1, 1)


@pytest.mark.parametrize("mode", ["packed", "padded", "sorted"])
def test_ranks_share_the_same_sequence_whatever_their_number(model_folder: Path, jsonl: Path, mode: str) -> None:
    config = configured(model_folder, jsonl, "batch.per_step=4", f"batch.mode={mode}", "train.epochs=2")
    alone = list(steps(config))
    for world in (2, 4):
        shares = [list(steps(config, rank, world)) for rank in range(world)]
        assert {len(share) for share in shares} == {len(alone)}, "every rank has equally many steps"
        for number, step in enumerate(alone):
            together = [shares[i % world][number].batches[i // world] for i in range(4)]
            for mine, theirs in zip(step.batches, together, strict=True):
                assert torch.equal(mine.input_ids, theirs.input_ids)
                assert torch.equal(mine.labels, theirs.labels)
            assert step.after == shares[0][number].after
    assert sum(batch.samples for step in alone for batch in step.batches) == 100, "nothing is dropped"
    assert alone[-1].progress == 1.0
    assert any(batch.samples == 0 for batch in alone[-1].batches), "the premise: the last step needed filling"


def test_a_run_goes_on_to_the_sample_from_any_step(model_folder: Path, jsonl: Path) -> None:
    config = configured(model_folder, jsonl, "batch.per_step=3", "train.epochs=2")
    whole = list(steps(config))
    assert len({step.after.batches for step in whole}) > 2, "the premise: steps end inside windows too"
    for number, step in enumerate(whole[:-1]):
        position = Position(**step.after.to_dict())
        rest = list(steps(config, start=position))
        assert len(rest) == len(whole) - number - 1
        for a, b in zip(rest, whole[number + 1 :], strict=True):
            assert all(torch.equal(x.input_ids, y.input_ids) for x, y in zip(a.batches, b.batches, strict=True))
            assert a.after == b.after


def test_steps_and_errors_come_alike_from_a_process_of_their_own(tmp_path: Path, model_folder: Path) -> None:
    path = write_jsonl(tmp_path / "late.jsonl", [*rows(40), "{broken"])
    config = configured(model_folder, path, "data.shuffle=false")
    apart = replace(config, data=replace(config.data, workers=1))
    here, there = steps(config), steps(apart)
    for _ in range(3):
        a, b = next(here), next(there)
        assert torch.equal(a.batches[0].input_ids, b.batches[0].input_ids)
        assert a.after == b.after
    with pytest.raises(DataError, match=r"^late\.jsonl:41: not JSON"):
        list(there)


def test_a_world_size_that_does_not_divide_is_refused() -> None:
    config = configured(Path("m"), "d", "batch.per_step=4")
    assert batches_per_step(config, 2) == 4
    with pytest.raises(ConfigError, match=r"batch.per_step = 4 cannot be shared by 3 ranks; use 3 or 6"):
        batches_per_step(config, 3)


def test_synthetic_samples_do_not_depend_on_who_draws_them() -> None:
    config = configured(Path("m"), "synthetic", "data.synthetic_samples=40", "data.synthetic_median=60")
    first, second = (list(Steps(config, 97, 0, 1, Position())) for _ in range(2))
    assert len(first) == len(second) > 5
    for a, b in zip(first, second, strict=True):
        assert isinstance(a, Step)
        assert isinstance(b, Step)
        assert torch.equal(a.batches[0].input_ids, b.batches[0].input_ids)
        assert int(a.batches[0].input_ids.max()) < 97
