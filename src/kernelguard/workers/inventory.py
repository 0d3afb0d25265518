"""What is installed here, and are the files what their RECORD says? Run by the observed interpreter; standard library.

Request: `{"hash": [names], "hash_all": bool, "records": bool}`; `records`: give every RECORD, hashed or not.
Records: one per distribution, and one per file that two of them own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, List

_CHANGED_LIMIT = 20


def main(request_path: str, result_path: str) -> None:
    """Write what is installed as JSON lines."""
    request = json.loads(Path(request_path).read_text("utf-8"))
    with Path(result_path).open("w", encoding="utf-8") as out:

        def say(record: Dict[str, Any]) -> None:
            out.write(json.dumps(record) + "\n")
            out.flush()

        say({"stage": "list"})
        say(
            {
                "kind": "interpreter",
                "prefix": sys.prefix,
                "python": "%d.%d.%d" % sys.version_info[:3],
                "executable": sys.executable,
            }
        )
        owners: Dict[str, List[str]] = {}
        seen = set()
        for dist in importlib.metadata.distributions():
            name = _normalized(dist.metadata["Name"] or "")
            say({"stage": name})
            # The first one on the path is the one that is imported; a later one of the same name is only a shadow.
            shadow = name in seen
            seen.add(name)
            say(_describe(dist, name, shadow, request, owners))
        for path in sorted(owners):
            if len(set(owners[path])) > 1:
                say({"kind": "shared", "path": path, "owners": sorted(set(owners[path]))})
        say({"done": True})


def _describe(
    dist: importlib.metadata.Distribution,
    name: str,
    shadow: bool,
    request: Dict[str, Any],
    owners: Dict[str, List[str]],
) -> Dict[str, Any]:
    files = dist.files
    changed: List[List[str]] = []
    record: List[List[str]] = []
    hashed = request.get("hash_all") or name in request.get("hash", [])
    for file in files or []:
        place = os.path.realpath(str(dist.locate_file(file)))
        if not shadow and not place.endswith(".pyc"):
            owners.setdefault(place, []).append(name)
        if file.hash is None or file.hash.mode != "sha256":
            continue
        said = _hex(file.hash.value)
        record.append([str(file).replace(os.sep, "/"), said])
        problem = _problem(place, said, file.size, hashed)
        if problem and len(changed) < _CHANGED_LIMIT:
            changed.append([place, problem])
    return {
        "kind": "distribution",
        "name": name,
        "version": dist.version,
        "location": str(dist.locate_file("")),
        "shadow": shadow,
        "has_record": files is not None,
        "record": record if hashed or request.get("records") else [],
        "changed": changed,
    }


def _problem(place: str, said: str, size: Any, hashed: bool) -> str:
    try:
        found = Path(place).stat().st_size
        if size is not None and found != size:
            return "has %d bytes, its RECORD says %d" % (found, size)
        if not hashed:
            return ""
        digest = hashlib.sha256()
        with Path(place).open("rb") as handle:
            for block in iter(lambda: handle.read(1 << 20), b""):
                digest.update(block)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return "cannot be read: %s" % error
    if digest.hexdigest() != said:
        return "has sha256 %s, its RECORD says %s" % (digest.hexdigest(), said)
    return ""


def _hex(encoded: str) -> str:
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    except ValueError:
        return encoded


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
