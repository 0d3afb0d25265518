"""Can this interpreter's torch use a GPU, and which?

Run by the observed interpreter as `python gpu.py request.json result.jsonl`. Standard library and torch only. Each
step is announced before it is taken, because a broken driver can hang or kill the process.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import importlib
import json

_RESULT = os.path.abspath(sys.argv[2])


def write(record: dict[str, object]) -> None:
    """Append one record."""
    descriptor = os.open(_RESULT, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
    os.close(descriptor)


def error_record(where: str, error: BaseException) -> dict[str, object]:
    """An exception, word for word."""
    return {"kind": "error", "where": where, "type": type(error).__name__, "text": str(error)}


def main() -> None:
    """Import torch and ask it, one step at a time."""
    write({"stage": "import torch"})
    try:
        torch = importlib.import_module("torch")
    except BaseException as error:
        write(error_record("import torch", error))
        write({"done": True})
        return
    write({"kind": "torch", "version": str(torch.__version__), "cuda": torch.version.cuda, "file": torch.__file__})
    if torch.version.cuda:
        try:
            write({"kind": "nccl", "version": ".".join(str(part) for part in torch.cuda.nccl.version())})
        except BaseException as error:
            write({**error_record("NCCL", error), "kind": "nccl-error"})
    write({"stage": "torch.cuda.is_available()"})
    try:
        available = bool(torch.cuda.is_available())
        write({"stage": "torch.cuda.device_count()"})
        count = int(torch.cuda.device_count())
        write({"kind": "cuda", "available": available, "count": count})
        # is_available() swallows the reason, and may go by NVML alone; initializing CUDA says what is so.
        write({"stage": "torch.cuda.init()"})
        torch.cuda.init()
    except BaseException as error:
        write(error_record("torch.cuda.init()", error))
        write({"done": True})
        return
    for index in range(count):
        write({"stage": f"device {index}"})
        try:
            properties = torch.cuda.get_device_properties(index)
            capability = [properties.major, properties.minor]
            memory = properties.total_memory
            write({"kind": "device", "name": properties.name, "capability": capability, "memory_bytes": memory})
        except BaseException as error:
            write(error_record(f"device {index}", error))
    write({"done": True})


main()
