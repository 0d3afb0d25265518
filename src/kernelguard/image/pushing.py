"""Send an image to its registry with the proof beside it, and get that proof back. Wires engine and registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kernelguard.errors import UndeterminedError
from kernelguard.image import registry
from kernelguard.image.engine import Engine
from kernelguard.image.values import Outcome


def push(
    engine: Engine,
    outcome: Outcome,
    environ: Mapping[str, str],
    *,
    amount: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Push what was built or promoted, and attach its verdict. Again is harmless: what is there is not sent again.

    Raises:
        ToolError: the registry does not take it; the image stays tagged here.
        UndeterminedError: the registry does not answer.
    """
    if outcome.verdict is None or outcome.claims is None:
        raise UndeterminedError(f"{outcome.image} has no verdict that could be attached to it", hint="build it again")
    digest = engine.push(outcome.image, amount)
    attached = registry.attach(
        outcome.image,
        digest,
        outcome.verdict.read_bytes(),
        content=outcome.claims.content,
        created=outcome.claims.created,
        access=registry.Access(plain_http=engine.talks_plainly(outcome.image), config=environ.get("DOCKER_CONFIG", "")),
    )
    return replace(outcome, pushed=attached)
