"""What torch.compile made, as one file in Triton's cache folder, for runs that start later or elsewhere.

torch.compile's own folder would do on one machine, but it is locked and written to even where everything is found in
it, so it can be no read-only layer of an image. torch packs the same into bytes
(`torch.compiler.save_cache_artifacts`), which every process unpacks into its own folder. They hold for one version of
torch and one kind of GPU: what does not fit is not looked up, and is compiled.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import torch

from kernelguard_train.errors import OutputError

log = logging.getLogger("kernelguard_train")
NAME = "torch-compile.bin"


def place() -> Path | None:
    """Where the file is, or would be: in `TRITON_CACHE_DIR`; None: that is not set."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    return Path(folder) / NAME if folder else None


def load() -> int:
    """Unpack the file, if there is one; how many compiled graphs it had. One that cannot be used is only told of."""
    file = place()
    if file is None or not file.is_file():
        return 0
    try:
        info = torch.compiler.load_cache_artifacts(file.read_bytes())
        problem = "torch cannot read it" if info is None else ""
    except Exception as error:  # noqa: BLE001 - whatever another torch wrote, this one can compile
        info, problem = None, f"{type(error).__name__}: {error}"
    if info is None:
        log.warning("what torch.compile made before is not used: %s: %s", file, problem)
        return 0
    graphs = len(info.inductor_artifacts)
    log.info("compiled: %d graphs from %s", graphs, file)
    return graphs


def save() -> str:
    """Pack what this process compiled, or found compiled, into the file; in words, where it is now.

    Raises:
        OutputError: it cannot be written.
    """
    file = place()
    if file is None:
        return "where Triton and torch.compile keep it by default, as TRITON_CACHE_DIR is not set"
    packed = torch.compiler.save_cache_artifacts()
    if packed is None:
        return f"{file.parent}; nothing was compiled by torch.compile"
    content, info = packed
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{NAME}-", delete=False) as written:
            written.write(content)
        # As readable as everything else in there, which whoever runs the image has to read.
        Path(written.name).chmod(0o644)
        Path(written.name).replace(file)
    except OSError as error:
        raise OutputError(f"TRITON_CACHE_DIR: {file} cannot be written: {error.strerror}") from error
    return f"{file.parent}, with {len(info.inductor_artifacts)} graphs of torch.compile"
