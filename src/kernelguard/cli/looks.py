"""Commands that look at images: lint, and what `--image` of check does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelguard.cli.images import termination
from kernelguard.cli.shared import app, print_json
from kernelguard.cli.streams import say, tell
from kernelguard.errors import InputError

if TYPE_CHECKING:
    from kernelguard.judge.values import Finding


@app.command()
def lint(
    dockerfile: Annotated[Path, typer.Argument(help="A Dockerfile, or the folder that holds one.")],
    *,
    driver: Annotated[str, typer.Option(help="The NVIDIA driver where it will run, for example 550.")] = "",
    platform: Annotated[str, typer.Option(help="air: also what Databricks AI Runtime asks of an image.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a no.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read a Dockerfile of your own, and the folder it lies in, for what will cost the run on the GPU machine.

    Example: kernelguard lint Dockerfile --driver 550
    """
    from kernelguard.image.asking import Asked, lint_file

    _platform(platform)
    findings = lint_file(dockerfile, Asked(driver=_driver(driver), platform=platform))
    raise typer.Exit(_print_findings(str(dockerfile), findings, strict=strict, as_json=as_json))


def check_image(
    image: str,
    *,
    asked: Mapping[str, Any],
    model: str | None,
    outside: Sequence[str],
    arguments: Sequence[str],
    timeout: float,
    as_json: bool,
) -> int:
    """What `kernelguard check --image` does; the exit code.

    `arguments` are those of the check in the container; `outside` were given, and name something that is not in there.
    """
    from kernelguard.check import cache_folder
    from kernelguard.image.asking import Asked, check_inside
    from kernelguard.image.asking import check_image as look
    from kernelguard.image.engine import connect

    if outside:
        raise InputError(f"{outside[0]} cannot be combined with --image: it names something outside the container")
    if model is not None and not Path(model).exists():
        raise InputError(f"{model} is not on this machine", hint="give a config.json or a folder that holds one")
    _platform(asked.get("platform", ""))
    said = Asked(**{**asked, "driver": _driver(asked.get("driver", ""))})
    with termination(), connect(os.environ) as engine:
        engine.sweep()
        _, findings = look(engine, image, said)
        if model is None:
            return _print_findings(image, findings, strict="--strict" in arguments, as_json=as_json)
        code, output, last = check_inside(
            engine,
            image,
            ["/kernelguard-box/in/model", *arguments],
            Path(model),
            {},
            cache=cache_folder(os.environ),
            python=said.python,
            timeout=timeout,
            environment=_terminal(),
        )
    if code not in {0, 1, 3}:
        tell(last)
        return code
    if as_json:
        document = json.loads(output)
        document["image"] = {"name": image, "findings": [asdict(f) for f in findings]}
        document["exit_code"] = _worse(code, _code(findings, strict="--strict" in arguments))
        print_json(document)
    else:
        from kernelguard.cli.shared import console
        from kernelguard.judge.values import Status
        from kernelguard.report.terminal import close, count, print_finding

        say(output)
        for finding in findings:
            print_finding(console(), finding)
        both = _worse(code, _code(findings, strict="--strict" in arguments))
        what = f"{image}, the check above (exit {code}) and {count('finding', (f.status for f in findings))}"
        close(console(), {0: Status.PASS, 1: Status.FAIL, 3: Status.UNKNOWN}[both], what, code=both)
    return _worse(code, _code(findings, strict="--strict" in arguments))


def _print_findings(what: str, findings: Sequence[Finding], *, strict: bool, as_json: bool) -> int:
    from kernelguard.cli.shared import console
    from kernelguard.report.terminal import print_findings

    code = _code(findings, strict=strict)
    if as_json:
        rows = [{**asdict(f), "status": str(f.status)} for f in findings]
        print_json({"schema": 1, "kind": "findings", "subject": what, "exit_code": code, "findings": rows})
    else:
        print_findings(console(), what, findings, code=code)
    return code


def _code(findings: Sequence[Finding], *, strict: bool) -> int:
    from kernelguard.judge.values import exit_code, worst

    return exit_code(worst(f.status for f in findings), strict=strict)


def _worse(*codes: int) -> int:
    return next((code for code in (1, 3) if code in codes), 0)


def _terminal() -> dict[str, str]:
    """What the command in the container needs to print as it would here."""
    import shutil

    found = {"COLUMNS": str(shutil.get_terminal_size().columns)}
    found |= {name: os.environ[name] for name in ("NO_COLOR", "FORCE_COLOR") if name in os.environ}
    return found | ({"FORCE_COLOR": "1"} if sys.stdout.isatty() and "NO_COLOR" not in found else {})


def _driver(text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text)) if text else ""
    except InvalidVersion as error:
        raise InputError(f"{text} is no driver version", hint="--driver 580.95.05, as nvidia-smi prints it") from error


def _platform(name: str) -> None:
    if name not in {"", "air"}:
        raise InputError(f"nothing is known about the platform {name}", hint="--platform air")
