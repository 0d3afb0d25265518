"""The benchmark's RECORD writer says what the files are now, and finds a distribution whatever its name."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from command import ROOT

TOOL = ROOT / "benchmarks" / "two_gpus" / "rerecord.py"


def test_a_changed_file_gets_its_own_digest_and_a_missing_one_leaves(tmp_path: Path) -> None:
    info = tmp_path / "some_thing-3.7.1.dist-info"
    info.mkdir()
    (tmp_path / "kept.py").write_text("stripped")
    (info / "RECORD").write_text(
        "kept.py,sha256=old,99\ngone.py,sha256=x,1\nsome_thing-3.7.1.dist-info/RECORD,,\n", encoding="utf-8"
    )
    subprocess.run([sys.executable, TOOL, tmp_path, "some-thing"], check=True)
    rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
    assert [row[0] for row in rows] == ["kept.py", "some_thing-3.7.1.dist-info/RECORD"]
    assert rows[0][1].startswith("sha256=")
    assert rows[0][1] != "sha256=old"
    assert rows[0][2] == "8"
