"""Rewrites the RECORD of distributions to what their files are now: a build without debug symbols is another build.

    rerecord.py SITE DISTRIBUTION...

Files that are gone leave the RECORD, the others get their own digest and size.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import sys
from pathlib import Path


def main(site: Path, names: list[str]) -> None:
    for name in names:
        wanted = re.sub(r"[-_.]+", "_", name).lower()
        infos = [
            i
            for i in site.glob("*.dist-info")
            if i.name.removesuffix(".dist-info").rpartition("-")[0].lower() == wanted
        ]
        if len(infos) != 1:
            raise SystemExit(f"{site} holds {len(infos)} distributions called {name}")
        rerecord(site, infos[0])


def rerecord(site: Path, info: Path) -> None:
    """One distribution."""
    record = info / "RECORD"
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in csv.reader(io.StringIO(record.read_text("utf-8"))):
        file = site / row[0]
        if not file.is_file():
            continue
        if file == record or not row[1]:
            writer.writerow([row[0], "", ""])
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        writer.writerow([row[0], f"sha256={digest}", file.stat().st_size])
    record.write_text(out.getvalue(), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
