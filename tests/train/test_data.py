"""Sources, row policies, and the stream of steps: order, sharing between ranks, resuming."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from kernelguard_train.exchange import Packed
from kernelguard_train.samples import open_samples
from kernelguard_train.stream import Position, Shares, Step, batches_per_step, load_steps
from kernelguard_train.stream import steps as steps_of


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


def together(config: Config, world: int, start: Position | None = None, most: int | None = None) -> list[list[Step]]:
    """The steps of every rank; each is a thread, and they exchange their shares as ranks do."""
    everyone: list[Any] = [None] * world
    barrier = threading.Barrier(world, timeout=60)

    def rank_of(rank: int) -> list[Step]:
        def gather(own: Packed) -> list[Packed]:
            everyone[rank] = own
            barrier.wait()
            found = list(everyone)
            barrier.wait()
            return found

        begin = start or Position()
        shares = Shares(config, 600, rank, world, begin)
        return list(itertools.islice(steps_of(config, shares, gather, rank=rank, world=world, start=begin), most))

    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(rank_of, rank) for rank in range(world)]]


def names(config: Config) -> list[str]:
    return [s.name for s in open_samples(config, 600).share(0, 0).samples]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", rows(50))


def test_every_format_gives_the_same_samples(tmp_path: Path, model_folder: Path, jsonl: Path) -> None:
    table = datasets.Dataset.from_list(rows(50))
    table.to_parquet(tmp_path / "chats.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "dict")
    (tmp_path / "arrow").mkdir()
    (tmp_path / "arrow" / "part.arrow").write_bytes(next((tmp_path / "saved").glob("*.arrow")).read_bytes())
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "a.jsonl", rows(50)[:20])
    write_jsonl(tmp_path / "folder" / "b.jsonl", rows(50)[20:])
    with fsspec.open("memory://bucket/chats.jsonl", "wt") as handle:
        handle.write(jsonl.read_text())
    with fsspec.open("memory://bucket/chats.parquet", "wb") as handle:
        handle.write((tmp_path / "chats.parquet").read_bytes())
    paths = [jsonl, tmp_path / "chats.parquet", tmp_path / "saved", tmp_path / "dict", tmp_path / "arrow",
             tmp_path / "folder", tmp_path / "folder" / "*.jsonl", "memory://bucket/chats.jsonl"]  # fmt: skip
    expected = None
    for streaming in (False, True):
        for path in paths:
            extra = ["data.shuffle=false", "batch.window=50"]
            extra += ["data.streaming=true", "train.steps=9"] if streaming else []
            share = open_samples(configured(model_folder, path, *extra), 600).share(0, 0)
            assert share.counts.rows == 50
            found = [sample.ids.tolist() for sample in share.samples]
            expected = expected or found
            assert found == expected, (path, streaming)
            resumed = open_samples(configured(model_folder, path, *extra), 600).share(0, 17)
            assert [sample.ids.tolist() for sample in resumed.samples] == expected[17:], (path, streaming)


def test_jsonl_rows_are_named_by_file_and_line(model_folder: Path, jsonl: Path) -> None:
    assert names(configured(model_folder, jsonl, "data.shuffle=false"))[:2] == ["chats.jsonl:1", "chats.jsonl:2"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_order_changes_by_epoch_and_seed_and_by_nothing_else(
    model_folder: Path, jsonl: Path, *, streaming: bool
) -> None:
    extra = ["batch.window=50", *(["data.streaming=true", "train.steps=9"] if streaming else [])]

    def order(epoch: int, seed: int, start: int = 0) -> list[str]:
        samples = open_samples(configured(model_folder, jsonl, *extra, f"train.seed={seed}"), 600)
        return [s.name for s in samples.share(epoch, start).samples]

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
    share = samples.share(0, 0)
    assert [len(sample) for sample in share.samples[:-1]] == lengths
    assert getattr(share.counts, count) == 1
    with pytest.raises(DataError, match=r"long\.jsonl:1: 533 tokens, more than 256"):
        list(steps(configured(model_folder, path, "data.too_long=error")))


def test_truncating_away_the_answer_drops_the_sample(tmp_path: Path, model_folder: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x y " * 173}, {"role": "assistant", "content": "A"}]}
    samples = open_samples(configured(model_folder, write_jsonl(tmp_path / "l.jsonl", [long])), 600)
    share = samples.share(0, 0)
    assert share.samples == ()
    assert (share.counts.truncated, share.counts.dropped) == (1, 1)


@pytest.mark.parametrize("mode", ["packed", "padded", "sorted"])
def test_ranks_share_the_same_sequence_whatever_their_number(model_folder: Path, jsonl: Path, mode: str) -> None:
    config = configured(model_folder, jsonl, "batch.per_step=4", f"batch.mode={mode}", "train.epochs=2")
    alone = list(steps(config))
    for world in (2, 4):
        shares = together(config, world)
        assert {len(share) for share in shares} == {len(alone)}, "every rank has equally many steps"
        for number, step in enumerate(alone):
            theirs_all = [shares[i % world][number].batches[i // world] for i in range(4)]
            for mine, theirs in zip(step.batches, theirs_all, strict=True):
                assert torch.equal(mine.input_ids, theirs.input_ids)
                assert torch.equal(mine.labels, theirs.labels)
            assert step.after == shares[0][number].after
    assert sum(batch.samples for step in alone for batch in step.batches) == 100, "nothing is dropped"
    assert alone[-1].progress == 1.0
    assert any(batch.samples == 0 for batch in alone[-1].batches), "the premise: the last step needed filling"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_tokenising_and_end_the_epoch_together(model_folder: Path, tmp_path: Path, world: int) -> None:
    """Of a stream nobody knows the length. It ends with 15 of 16 rows: some ranks' last share is full, some is not."""
    jsonl = write_jsonl(tmp_path / "chats.jsonl", rows(47))
    changes = ["data.streaming=true", "train.steps=9", f"batch.per_step={world * 2}", "data.shuffle_buffer=8"]
    config = configured(model_folder, jsonl, *changes)
    shares = [list(itertools.islice(Shares(config, 600, rank, world, Position()), 5)) for rank in range(world)]
    first_epoch = [[head.rows for p in own if (head := p.numbers).epoch == 0] for own in shares]
    assert sum(sum(rows) for rows in first_epoch) == 47, "each row is tokenised by one rank"
    assert max(sum(rows) for rows in first_epoch) <= 47 // world + 4
    alone = [step for step, _ in zip(steps(config), range(24), strict=False)]
    assert {step.after.epoch for step in alone} >= {0, 1, 2}, "the premise: epochs end"

    everyone = together(config, world, most=24)
    for number, step in enumerate(alone):
        assert {own[number].after for own in everyone} == {step.after}
        batches = [everyone[i % world][number].batches[i // world] for i in range(world * 2)]
        for mine, theirs in zip(step.batches, batches, strict=True):
            assert torch.equal(mine.input_ids, theirs.input_ids)
            assert torch.equal(mine.labels, theirs.labels)


def test_what_one_rank_finds_wrong_ends_all_of_them_alike(tmp_path: Path, model_folder: Path) -> None:
    """Two bad rows, found by different ranks: the first is raised by all."""
    path = write_jsonl(tmp_path / "bad.jsonl", [*rows(4), "{broken", *rows(2), "[]", *rows(9)])
    config = configured(model_folder, path, "data.shuffle=false")
    with pytest.raises(DataError) as alone:
        list(steps(config))
    assert str(alone.value).startswith("bad.jsonl:5: not JSON")
    for world in (2, 3):
        with pytest.raises(DataError) as caught:
            together(config, world)
        assert str(caught.value) == str(alone.value)
    skipping = configured(model_folder, path, "data.shuffle=false", "data.bad_rows=skip")
    for own in together(skipping, 3):
        assert own[-1].counts == list(steps(skipping))[-1].counts
        assert own[-1].counts.bad == 2
    with pytest.raises(ConfigError, match=r"batch\.window = 16 rows cannot be shared by 17 ranks"):
        next(steps(config, 0, 17))


def test_a_run_goes_on_to_the_sample_from_any_step(model_folder: Path, jsonl: Path) -> None:
    config = configured(model_folder, jsonl, "batch.per_step=3", "train.epochs=2")
    whole = list(steps(config))
    assert len({step.after.batches for step in whole}) > 2, "the premise: steps end inside windows too"
    for number, step in enumerate(whole[:-1]):
        position = Position(**step.after.to_dict())
        rest = list(steps(config, start=position))
        shared = together(replace(config, batch=replace(config.batch, per_step=3)), 3, position)
        assert [len(own) for own in shared] == [len(rest)] * 3, "on another number of ranks too"
        assert all(torch.equal(shared[i][0].batches[0].input_ids, rest[0].batches[i].input_ids) for i in range(3))
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
    first, second = (
        list(load_steps(config, 97, rank=0, world=1, start=Position(), device=torch.device("cpu"))) for _ in range(2)
    )
    assert len(first) == len(second) > 5
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.batches[0].input_ids, b.batches[0].input_ids)
        assert int(a.batches[0].input_ids.max()) < 97


def test_what_prepares_samples_ends_with_a_run_that_is_killed_while_it_imports(
    model_folder: Path, tmp_path: Path
) -> None:
    script = f"""
import multiprocessing, os, sys
if __name__ == "__main__":
    sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2] / "train")]!r}
    import tiny, torch
    from pathlib import Path
    from kernelguard_train.stream import Position, load_steps
    config = tiny.configured(Path({str(model_folder)!r}), "data.workers=1")
    steps = load_steps(config, 600, rank=0, world=1, start=Position(), device=torch.device("cpu"))
    Path({str(tmp_path / "pids")!r}).write_text(" ".join(str(c.pid) for c in multiprocessing.active_children()))
    os.kill(os.getpid(), 9)
"""
    (tmp_path / "run.py").write_text(script)
    # Not to a pipe: what is left behind would hold it open.
    done = subprocess.run([sys.executable, str(tmp_path / "run.py")], stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == -9
    (pid,) = map(int, (tmp_path / "pids").read_text().split())

    def lives() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
        except OSError:
            return False

    until = time.monotonic() + 30
    while lives() and time.monotonic() < until:
        time.sleep(0.1)
    assert not lives(), "it imports for seconds, finds its parent gone, and ends"
