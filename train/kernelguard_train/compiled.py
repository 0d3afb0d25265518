"""What torch.compile made, as files in Triton's cache folder, for runs that start later or elsewhere.

torch.compile's own folder would do on one machine, but it is locked and written to even where everything is found in
it, so it can be no read-only layer of an image. torch packs the same into bytes
(`torch.compiler.save_cache_artifacts`), which every process unpacks into its own folder. They hold for one version of
torch, one kind of GPU and its number in the process: what does not fit is not looked up, and is compiled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from kernelguard_train.config import Config
from kernelguard_train.errors import OutputError

log = logging.getLogger("kernelguard_train")
NAME = "torch-compile-*.bin"
"""One file for each configuration: one that was unpacked and not used would be in no file that is made after it."""


def folder() -> Path | None:
    """Where the files are, or would be: `TRITON_CACHE_DIR`; None: that is not set."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else None


def load() -> int:
    """Unpack the files that are there; how many compiled graphs they had. One that cannot be used is only told of."""
    place = folder()
    return sum(_unpacked(place.glob(NAME))) if place is not None else 0


def _unpacked(files: Iterable[Path]) -> Iterable[int]:
    for file in sorted(files):
        try:
            info = torch.compiler.load_cache_artifacts(file.read_bytes())
            problem = "torch cannot read it"
        except Exception as error:  # noqa: BLE001 - whatever another torch wrote, this one can compile
            info, problem = None, f"{type(error).__name__}: {error}"
        if info is None:
            log.warning("what torch.compile made before is not used: %s: %s", file, problem)
            continue
        log.info("compiled: %d graphs from %s", len(info.inductor_artifacts), file)
        yield len(info.inductor_artifacts)


def save(config: Config) -> str:
    """Pack what this process compiled, or found compiled, for this configuration; in words, where it is now.

    Raises:
        OutputError: it cannot be written.
    """
    place = folder()
    if place is None:
        return "where Triton and torch.compile keep it by default, as TRITON_CACHE_DIR is not set"
    packed = torch.compiler.save_cache_artifacts()
    if packed is None:
        return f"{place}; nothing was compiled by torch.compile"
    content, info = packed
    file = place / NAME.replace("*", _digest(config))
    written = ""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".torch-compile-", delete=False) as handle:
            written = handle.name
            handle.write(content)
        # As readable as everything else in there, which whoever runs the image has to read.
        Path(written).chmod(0o644)
        Path(written).replace(file)
    except OSError as error:
        if written:
            Path(written).unlink(missing_ok=True)
        raise OutputError(f"TRITON_CACHE_DIR: {file} cannot be written: {error.strerror}") from error
    return f"{place}, with {len(info.inductor_artifacts)} graphs of torch.compile"


def _digest(config: Config) -> str:
    """Of everything but what changes no kernel: what comes later for the same takes the earlier one's place."""
    facts = f"{replace(config, train=replace(config.train, output='', seed=0))} {torch.__version__}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
