"""What does an image claim about itself, and is it still the image that was verified?

Adding labels changes an image's id, so what was verified is named by its content identity: layers and the part of the
configuration that decides what runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kernelguard.errors import InputError
from kernelguard.image.values import Claims, State
from kernelguard.judge.values import Level

PREFIX = "io.kernelguard."
SCHEMA = 1
RUN = f"{PREFIX}run"
"""On what a build starts and has to clean up: the id of the run."""
STAGE = f"{PREFIX}stage"
"""On what the stages of a build are made of, so that a person can find what a killed build left."""
_OCI = "org.opencontainers.image."
_RUNS = ("Env", "Entrypoint", "Cmd", "User", "WorkingDir")


def content_identity(inspected: Mapping[str, Any]) -> str:
    """`sha256:` over layers and configuration of an image as the engine's `inspect` shows it. Labels do not count."""
    config = inspected.get("Config") or {}
    plain: dict[str, Any] = {name: config.get(name) or None for name in _RUNS}
    plain["Env"] = sorted(plain["Env"] or ())
    plain["WorkingDir"] = plain["WorkingDir"] or "/"
    plain["Layers"] = list((inspected.get("RootFS") or {}).get("Layers") or ())
    plain["Platform"] = [inspected.get("Os"), inspected.get("Architecture")]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def to_labels(claims: Claims) -> dict[str, str]:
    """The labels that say it."""
    return {
        f"{PREFIX}schema": str(SCHEMA),
        f"{PREFIX}state": str(claims.state),
        f"{PREFIX}level": claims.level.name.lower(),
        f"{PREFIX}lock-sha256": claims.lock,
        f"{PREFIX}recipe-sha256": claims.recipe,
        f"{PREFIX}verdict-sha256": claims.verdict,
        f"{PREFIX}content-sha256": claims.content,
        f"{PREFIX}python": claims.python,
        f"{PREFIX}torch": claims.torch,
        f"{PREFIX}cuda": claims.cuda,
        f"{PREFIX}gpu": claims.gpu,
        f"{PREFIX}capability": claims.capability,
        f"{PREFIX}driver": claims.driver,
        f"{_OCI}created": claims.created,
        f"{_OCI}base.name": claims.base_name,
        f"{_OCI}base.digest": claims.base_digest,
    }


def read_labels(labels: Mapping[str, str]) -> Claims | None:
    """What an image's labels say; None: it was not made by `kernelguard build`.

    Raises:
        InputError: the labels are of a newer kernelguard, or were changed so that they say nothing.
    """
    schema = labels.get(f"{PREFIX}schema")
    if schema is None:
        return None

    def said(name: str) -> str:
        return labels.get(f"{PREFIX}{name}", "")

    try:
        if int(schema) > SCHEMA:
            raise InputError(
                f"the image's labels have schema {schema}, this kernelguard reads up to {SCHEMA}",
                hint="pip install -U kernelguard-preflight",
            )
        return Claims(
            state=State(said("state")),
            level=Level[said("level").upper()],
            lock=said("lock-sha256"),
            recipe=said("recipe-sha256"),
            verdict=said("verdict-sha256"),
            content=said("content-sha256"),
            python=said("python"),
            torch=said("torch"),
            cuda=said("cuda"),
            gpu=said("gpu"),
            capability=said("capability"),
            driver=said("driver"),
            created=labels.get(f"{_OCI}created", ""),
            base_name=labels.get(f"{_OCI}base.name", ""),
            base_digest=labels.get(f"{_OCI}base.digest", ""),
        )
    except (ValueError, KeyError) as error:
        raise InputError(f"the image's labels cannot be read: {error}", hint="build it again") from error
