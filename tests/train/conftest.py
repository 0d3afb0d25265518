"""What the trainer's tests share. They run in an environment of their own: `make test-train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "train"))
_MISSING = [name for name in ("torch", "transformers", "datasets") if find_spec(name) is None]
if not _MISSING:
    # Other rooms' tests are collected in the same process and have an environment of their own in mind.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str:
    if _MISSING:
        return f"tests/train: NOT COLLECTED, {', '.join(_MISSING)} not installed here (make test-train)"
    return "tests/train: collected"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny Qwen3.5 configuration with its tokenizer."""
    from kernelguard_train.demo import make

    folder = tmp_path_factory.mktemp("model")
    make.main(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def alone() -> Iterator[object]:
    """The process group of a run of one."""
    import torch.distributed as dist

    from kernelguard_train import configfile, ranks

    torch_config = configfile.load(None, ["model.path=x", "data.path=x", "train.device=cpu"])
    yield ranks.start(torch_config)
    dist.destroy_process_group()
