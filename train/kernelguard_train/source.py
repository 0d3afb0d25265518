"""Where do rows come from, and in which order?

A source yields the rows of an epoch from any position on, always in the same order, so that a run can go on exactly
where it stopped. A row that cannot be read is yielded with its problem; the policy for it is decided by the caller.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kernelguard_train.config import DataConfig
from kernelguard_train.errors import DataError

log = logging.getLogger("kernelguard_train")
T = TypeVar("T")
_LINES = (".jsonl", ".json", ".ndjson")
_HTTP_ERRORS = {
    "httpx": "TransportError",
    "httpx2": "TransportError",  # huggingface_hub 2
    "aiohttp": "ClientError",
    "http.client": "HTTPException",
}
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as it was found."""

    name: str
    content: Mapping[str, Any] | None
    problem: str = ""


class Source(Protocol):
    """Rows in a fixed order."""

    @property
    def size(self) -> int | None:
        """Rows of one epoch; None when only reading to the end would tell."""

    def rows(self, epoch: int, start: int, step: int = 1) -> Iterator[Row]:
        """Every `step`-th row of that epoch from position `start` on."""


def is_transient(error: BaseException | None) -> bool:
    """Whether reading again may help: a broken connection, a time-out, a server that is busy.

    The HTTP libraries below raise errors that are no `OSError`; one that is not loaded has raised nothing. Libraries
    wrap such errors in their own, so causes are looked at too.
    """
    kinds: list[type[BaseException]] = [OSError]
    kinds += [getattr(sys.modules[module], name) for module, name in _HTTP_ERRORS.items() if module in sys.modules]
    while error is not None:
        if isinstance(error, FileNotFoundError) or type(error).__name__ == "OfflineModeIsEnabled":
            return False
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in {408, 429}:
            return False  # the server has understood, and says no
        if isinstance(error, tuple(kinds)):
            return True
        error = error.__cause__ or error.__context__
    return False


def retrying(action: Callable[[], T], what: str, retries: int, pause: Callable[[float], None] = time.sleep) -> T:
    """The action's result; failed reads are repeated, with doubling pauses from one second.

    Raises:
        DataError: when it still fails; a file that does not exist is not tried again.
    """
    for attempt in range(retries + 1):
        try:
            return action()
        except FileNotFoundError as error:
            raise DataError(f"{what}: not found: {error}") from error
        except Exception as error:
            if not is_transient(error):
                raise
            if attempt == retries:
                raise DataError(f"{what}: still failing after {retries} retries: {_short(error)}") from error
            log.warning("%s: %s; retry %d of %d", what, _short(error), attempt + 1, retries)
            pause(2.0**attempt)
    raise AssertionError


def _short(error: BaseException) -> str:
    """What went wrong, from the innermost error that says something."""
    inner = error
    while (cause := inner.__cause__) is not None and str(cause):
        inner = cause
    return f"{type(inner).__name__}: {inner}" if str(inner) else type(inner).__name__


def _order(size: int, *, shuffle: bool, seed: int, epoch: int) -> Sequence[int] | npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size) if shuffle else range(size)


@dataclass(slots=True)
class Lines:
    """JSON lines in local files, read one at a time through an index of where they begin."""

    files: tuple[Path, ...]
    shuffle: bool
    seed: int
    _file: npt.NDArray[np.int32] = field(init=False)
    _line: npt.NDArray[np.int64] = field(init=False)
    _offset: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        places: list[tuple[int, int, int]] = []
        for number, path in enumerate(self.files):
            offset = 0
            with path.open("rb") as handle:
                for line, text in enumerate(handle, 1):
                    if text.strip():
                        places.append((number, line, offset))
                    offset += len(text)
        table = np.asarray(places, dtype=np.int64).reshape(-1, 3)
        self._file, self._line, self._offset = table[:, 0].astype(np.int32), table[:, 1], table[:, 2]

    @property
    def size(self) -> int:
        """Rows of one epoch."""
        return len(self._line)

    def rows(self, epoch: int, start: int, step: int = 1) -> Iterator[Row]:
        """Every `step`-th row of that epoch from position `start` on; each is named by file and line."""
        handles = [path.open("rb") for path in self.files]
        try:
            for index in _order(self.size, shuffle=self.shuffle, seed=self.seed, epoch=epoch)[start::step]:
                number = int(self._file[index])
                handles[number].seek(self._offset[index])
                name = f"{self.files[number].name}:{self._line[index]}"
                yield parse(name, handles[number].readline())
        finally:
            for handle in handles:
                handle.close()


def parse(name: str, line: bytes | str) -> Row:
    """A line of JSON as a row; what is wrong with it becomes the row's problem."""
    try:
        content = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return Row(name=name, content=None, problem=f"not JSON: {error}")
    if not isinstance(content, dict):
        return Row(name=name, content=None, problem=f"a JSON object was expected, not {type(content).__name__}")
    return Row(name=name, content=content)


@dataclass(slots=True)
class Table:
    """A `datasets.Dataset`: parquet, arrow or a hub data set, memory-mapped."""

    dataset: Any
    label: str
    shuffle: bool
    seed: int
    retries: int

    @property
    def size(self) -> int:
        """Rows of one epoch."""
        return len(self.dataset)

    def rows(self, epoch: int, start: int, step: int = 1) -> Iterator[Row]:
        """Every `step`-th row of that epoch from position `start` on; a failed read is repeated."""
        for index in _order(self.size, shuffle=self.shuffle, seed=self.seed, epoch=epoch)[start::step]:
            name = f"{self.label} row {index}"
            content = retrying(lambda index=index: self.dataset[int(index)], name, self.retries)  # type: ignore[misc]
            yield Row(name=name, content=content)


@dataclass(slots=True)
class Stream:
    """A `datasets.IterableDataset`, read front to back; after a failed read it is opened anew and wound forward."""

    open: Callable[[], Any]
    label: str
    shuffle_buffer: int
    seed: int
    retries: int
    pause: Callable[[float], None] = time.sleep

    @property
    def size(self) -> None:
        """Not known."""
        return None

    def rows(self, epoch: int, start: int, step: int = 1) -> Iterator[Row]:
        """Every `step`-th row of that epoch from position `start` on. Those between are read too, but not parsed."""
        position = start
        failures = 0
        while True:
            try:
                for content in itertools.islice(self._opened(epoch, position), 0, None, step):
                    failures = 0
                    yield self._row(position, content)
                    position += step
            except Exception as error:
                if not is_transient(error):
                    raise
                failures += 1
                if failures > self.retries:
                    raise DataError(f"{self.label} at row {position}: still failing: {_short(error)}") from error
                log.warning("%s at row %d: %s; opening it again (%d)", self.label, position, _short(error), failures)
                self.pause(2.0 ** (failures - 1))
            else:
                return

    def _opened(self, epoch: int, position: int) -> Any:
        dataset = self.open()
        if self.shuffle_buffer:
            # The epoch goes into the seed: `set_epoch` is forgotten by the data set that `skip` returns.
            seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
            dataset = dataset.shuffle(seed=seed, buffer_size=self.shuffle_buffer)
        return dataset.skip(position)

    def _row(self, position: int, content: Mapping[str, Any]) -> Row:
        if "_line" in content:  # a line of a JSONL stream, kept as text so that a malformed one can be named
            return parse(str(content["_name"]), content["_line"])
        return Row(name=f"{self.label} row {position}", content=content)


def read_lines(urls: Sequence[str]) -> Iterator[dict[str, str]]:
    """The lines of JSONL files behind any fsspec URL, with their names."""
    import fsspec  # noqa: PLC0415 - slow to import, and only streams need it

    for url in urls:
        with fsspec.open(url, "rt", encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield {"_name": f"{url}:{number}", "_line": line}


def open_source(config: DataConfig, seed: int) -> Source:
    """The source that `data.path` names.

    Raises:
        DataError: when nothing is there, or it is of no known format.
    """
    path, label = config.path, config.path.rstrip("/").rpartition("/")[2]
    buffer = config.shuffle_buffer if config.shuffle else 0
    files = _files(path, config.retries)
    lines = bool(files) and all(name.endswith(_LINES) for name in files)
    if lines and not config.streaming:
        return Lines(_local(files, config.retries), config.shuffle, seed)
    import datasets  # noqa: PLC0415 - slow to import, and what is above does without

    datasets.disable_progress_bars()
    if not files:
        if Path(path).exists():
            return _saved(config, datasets, label, seed)
        if Path(path).suffix in (*_LINES, *_TABLES) or path.startswith((".", "/")) or "://" in path:
            raise DataError(f"data.path: nothing at {path}")
        arguments: dict[str, Any] = {"path": path, "split": config.split}
    elif lines:

        def opened() -> Any:
            return datasets.IterableDataset.from_generator(read_lines, gen_kwargs={"urls": list(files)})

        return Stream(opened, label, buffer, seed, config.retries)
    else:
        kinds = {_TABLES.get(Path(name).suffix, "") for name in files}
        if len(kinds) != 1 or "" in kinds:
            known = ", ".join((*_LINES, *_TABLES))
            raise DataError(f"data.path: {path} holds files of mixed or unknown formats; known are {known}")
        files = files if config.streaming else tuple(str(path) for path in _local(files, config.retries))
        arguments = {"path": kinds.pop(), "data_files": list(files), "split": "train"}

    def load() -> Any:
        return datasets.load_dataset(**arguments, streaming=config.streaming)

    if config.streaming:
        return Stream(load, label, buffer, seed, config.retries)
    try:
        return Table(retrying(load, f"data.path {path}", config.retries), label, config.shuffle, seed, config.retries)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise DataError(f"data.path: {path} cannot be read: {error.__cause__ or error}") from error


def _files(path: str, retries: int) -> tuple[str, ...]:
    """The data files that a path, folder, glob or URL stands for; none for a save_to_disk folder or a hub id."""
    if "://" in path:
        system, inner = _filesystem(path)
        if "*" in inner:
            found = retrying(lambda: system.glob(inner), path, retries)
        elif not inner.endswith((*_LINES, *_TABLES)) and retrying(lambda: system.isdir(inner), path, retries):
            found = retrying(lambda: system.ls(inner, detail=False), path, retries)
            found = [name for name in found if name.endswith((*_LINES, *_TABLES))]
        else:
            found = [inner]
        return tuple(sorted(system.unstrip_protocol(name) for name in found))
    local = Path(path)
    if local.is_dir():
        if (local / "state.json").exists() or (local / "dataset_dict.json").exists():
            return ()
        return tuple(sorted(str(p) for p in local.iterdir() if p.suffix in (*_LINES, *_TABLES)))
    return tuple(sorted(glob.glob(path, recursive=True)))  # noqa: PTH207 - pathlib's glob takes no absolute pattern


def _local(files: Sequence[str], retries: int) -> tuple[Path, ...]:
    """Local copies of the files; those behind a URL are downloaded, once on each machine."""
    return tuple(
        retrying(lambda name=name: _download(name), name, retries) if "://" in name else Path(name)  # type: ignore[misc]
        for name in files
    )


def _download(url: str) -> Path:
    """A whole local copy of the file behind an fsspec URL.

    fsspec's own cache takes what a broken connection left behind for the file, and a shorter file is no error anywhere.
    So the copy gets its name only when it is as long as the server said.
    """
    system, inner = _filesystem(url)
    about = system.info(inner)
    key = hashlib.sha256(f"{url} {system.ukey(inner)}".encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"kernelguard-train-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / key / Path(inner).name
    target.parent.mkdir(exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks of this machine wait, and then find it
        if not target.exists():
            partial = target.with_suffix(".partial")
            system.get_file(inner, str(partial))
            size, expected = partial.stat().st_size, about.get("size")
            if expected is not None and size != expected:
                raise OSError(f"{size} of {expected} bytes arrived")
            partial.rename(target)
    return target


def _filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path on it.

    Raises:
        DataError: when there is none of that kind, or a package is missing for it.
    """
    import fsspec  # noqa: PLC0415 - slow to import, and local files do without

    try:
        system, inner = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"data.path: {url} cannot be opened: {error}") from error
    return system, inner


def _saved(config: DataConfig, datasets: Any, label: str, seed: int) -> Source:
    """A folder that `Dataset.save_to_disk` wrote."""
    try:
        dataset = datasets.load_from_disk(config.path)
    except FileNotFoundError as error:
        raise DataError(f"data.path: {config.path} holds no data file: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if config.split not in dataset:
            raise DataError(f"data.split = {config.split}; {config.path} has {', '.join(dataset)}")
        dataset = dataset[config.split]
    if config.streaming:
        buffer = config.shuffle_buffer if config.shuffle else 0
        return Stream(dataset.to_iterable_dataset, label, buffer, seed, config.retries)
    return Table(dataset, label, config.shuffle, seed, config.retries)
