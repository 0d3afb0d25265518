"""Reading over a network that breaks: every row arrives once, or the run says what it could not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import flaky
import pytest

from kernelguard_train import source
from kernelguard_train.config import DataConfig
from kernelguard_train.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a " * 100}]}
    for i in range(300)
]
TRAIN = Path(__file__).resolve().parents[2] / "train"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(root / "chats.parquet")
    return root


@pytest.fixture
def served(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[flaky.Handler]]]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(source.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    with flaky.serving(root) as server:
        yield server


def read(url: str, **changes: Any) -> list[Any]:
    opened = source.open_source(DataConfig(path=url, shuffle=False, **changes), 0)
    if isinstance(opened, source.Stream):
        opened.pause = lambda _: None
    return [row.content for row in opened.rows(0, 0)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_a_file_whose_connection_breaks_twice_arrives_whole(
    served: tuple[str, type[flaky.Handler]], monkeypatch: pytest.MonkeyPatch, name: str, *, streaming: bool
) -> None:
    """Fsspec's own cache keeps the half that arrived and takes it for the file: fewer rows, and no error."""
    url, handler = served
    monkeypatch.setattr(source, "retrying", _unpaused(source.retrying))
    handler.cut = 2
    assert read(f"{url}/{name}", streaming=streaming) == ROWS
    assert handler.cut == 0, "the premise: connections broke"


def _unpaused(original: Any) -> Any:
    return lambda action, what, retries, pause=None: original(action, what, retries, pause or (lambda _: None))


def test_a_url_that_keeps_breaking_is_named(
    served: tuple[str, type[flaky.Handler]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, handler = served
    monkeypatch.setattr(source, "retrying", _unpaused(source.retrying))
    handler.cut = 99
    with pytest.raises(DataError, match=r"chats\.jsonl: still failing after 1 retries: ContentLengthError"):
        read(f"{url}/chats.jsonl", retries=1)
    assert not list(tmp_path.rglob("chats.jsonl")), "half a file never gets the name of the whole one"
    with pytest.raises(DataError, match=r"chats\.jsonl at row 0: still failing: ContentLengthError"):
        read(f"{url}/chats.jsonl", retries=1, streaming=True)
    with pytest.raises(DataError, match=r"none\.jsonl: not found"):
        read(f"{url}/none.jsonl")


def test_a_store_that_delivers_half_without_an_error_is_caught(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Half(LocalFileSystem):
        protocol = "half"

        def get_file(self, path: str, lpath: str, **_: Any) -> None:
            content = Path(path).read_bytes()
            Path(lpath).write_bytes(content[: len(content) // 2])

    fsspec.register_implementation("half", Half, clobber=True)
    monkeypatch.setattr(source.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(DataError, match=r"still failing after 0 retries: OSError: \d+ of \d+ bytes arrived"):
        read(f"half://{root}/chats.jsonl", retries=0)


def test_a_file_is_downloaded_once(served: tuple[str, type[flaky.Handler]]) -> None:
    url, handler = served
    for _ in range(3):
        assert read(f"{url}/chats.jsonl") == ROWS
    assert handler.asked.count("GET /chats.jsonl") == 1


def test_a_folder_behind_a_url_is_listed() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for number in (0, 1):
        with system.open(f"/listed/{number}.jsonl", "wt") as handle:
            handle.write("".join(json.dumps(row) + "\n" for row in ROWS[number::2]))
    with system.open("/listed/README.md", "wt") as handle:
        handle.write("not data")
    assert read("memory://listed") == ROWS[0::2] + ROWS[1::2]
    assert read("memory://listed", streaming=True) == ROWS[0::2] + ROWS[1::2]


def test_an_unknown_kind_of_url_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(DataError, match=r"data\.path: gopher://x/y\.jsonl cannot be opened: Protocol not known"):
        read("gopher://x/y.jsonl")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("x"), True),
        (TimeoutError(), True),
        (FileNotFoundError("x"), False),
        (ValueError("x"), False),
        (type("Refused", (OSError,), {"status": 403})(), False),
        (type("Busy", (OSError,), {"status": 429})(), True),
        (type("OfflineModeIsEnabled", (ConnectionError,), {})(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_may_pass_is_tried_again(error: Exception, expected: bool) -> None:
    assert source.is_transient(error) is expected
    wrapped = RuntimeError("while reading")
    wrapped.__cause__ = error
    assert source.is_transient(wrapped) is expected


def test_a_hub_data_set_is_read_through_a_hub_that_fails_now_and_then(root: Path, tmp_path: Path) -> None:
    """In a process of its own: the hub's address is read once, at import."""
    code = """
import json, sys, time
from kernelguard_train import source
from kernelguard_train.config import DataConfig
time.sleep = lambda _: None
opened = source.open_source(DataConfig(path="org/chats", streaming=sys.argv[1] == "True", shuffle=False), 0)
print(json.dumps([row.content for row in opened.rows(0, 0)]))
"""
    only = tmp_path / "repository"
    only.mkdir()
    (only / "train.jsonl").write_bytes((root / "chats.jsonl").read_bytes())
    with flaky.serving(only) as (url, handler):
        base = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        environment = {**base, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(TRAIN)}
        for streaming in ("False", "True"):
            handler.cut, handler.busy = 2, 1
            command = [sys.executable, "-c", code, streaming]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, done.stderr[-2000:]
            assert json.loads(done.stdout.splitlines()[-1]) == ROWS
            assert (handler.cut, handler.busy) == (0, 0), "the premise: it failed now and then"
