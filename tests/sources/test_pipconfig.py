"""Where pip looks is asked of pip itself."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from kernelguard.errors import ToolError
from kernelguard.sources.pipconfig import local_folder, pip_config

PYTHON = Path(sys.executable)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def test_without_a_configuration_it_is_the_default_that_pip_names() -> None:
    config = pip_config(PYTHON)
    assert re.fullmatch(r"https://[\w.-]+/simple", config.index_url)
    assert (config.extra_index_urls, config.find_links) == ((), ())


def test_files_and_variables_in_pips_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://global/simple/\nfind-links = /wheels\n  /more\n"
        "extra-index-url = https://a/simple/ https://b/simple\n[install]\nindex-url = https://install/simple\n"
        "[list]\nindex-url = https://list/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    config = pip_config(PYTHON)
    assert config.index_url == "https://install/simple"
    assert config.extra_index_urls == ("https://a/simple", "https://b/simple")
    assert config.find_links == ("/wheels", "/more")
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable/simple/")
    assert pip_config(PYTHON).index_url == "https://variable/simple"


def test_an_interpreter_without_pip_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="pip config failed"):
        pip_config(tmp_path / "python")


def test_local_folders(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder(tmp_path.as_uri()) == tmp_path
    assert local_folder("https://host/wheels") is None
    assert local_folder(str(tmp_path / "nope")) is None
