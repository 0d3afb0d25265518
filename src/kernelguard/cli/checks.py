"""Commands that ask: check, survey, observe, diff, explain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kernelguard.cli.shared import LevelName, app, console, intent_flags, print_json, progress, takes_stdout, write
from kernelguard.cli.streams import say


@app.command()
def check(
    model: Annotated[
        str | None,
        typer.Argument(help="A config.json, a folder that holds one, or a hub id. May be left out with --image."),
    ] = None,
    *,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter to look into. Default: $VIRTUAL_ENV's, else `python` on PATH.")
    ] = None,
    environment: Annotated[
        Path | None, typer.Option(help="An environment captured by `kernelguard observe`, instead of an interpreter.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A machine by name or keys, for example h100 or h100,torch=2.12.1,driver=580.")
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(help="A lock: is it for this model, and does what it pins serve the run?")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Look into this container image, with its interpreter.")] = None,
    driver: Annotated[str, typer.Option(help="With --image: the NVIDIA driver where it will run.")] = "",
    gpus: Annotated[bool, typer.Option("--gpus", help="With --image: pass every GPU in.")] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --image: processes on one machine.", metavar="<int>", min=1)
    ] = None,
    shm_size: Annotated[int | None, typer.Option(help="With --image: MB of /dev/shm that it will be given.")] = None,
    platform: Annotated[str, typer.Option(help="With --image: air, what Databricks AI Runtime asks for.")] = "",
    transformers: Annotated[
        str | None, typer.Option(help="The transformers to read: a folder or a version. Default: the interpreter's.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Judge decoding with a cache instead of training.")] = False,
    packed: Annotated[
        bool | None, typer.Option("--packed/--no-packed", help="Batches hold several samples in one row.")
    ] = None,
    signals: Annotated[
        str | None,
        typer.Option(help="Boundary signals that packed batches carry: position_ids,cu_seq_lens_q,seq_idx."),
    ] = None,
    intent: Annotated[Path | None, typer.Option(help="A TOML or JSON file that says what the run will do.")] = None,
    train_config: Annotated[
        Path | None,
        typer.Option(help="Read the intent from a configuration of Trainer, TRL, axolotl or kernelguard_train."),
    ] = None,
    level: Annotated[
        LevelName | None,
        typer.Option(help="The claim. Default: gpu on an interpreter, resolve with --target or --environment."),
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--trust-remote-code/--no-trust-remote-code",
            help="The run loads code that the checkpoint brings along (auto_map). It is read, never run.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a no.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that all observing may take together.")] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (schemas/report.schema.json).")
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML to this file; - is stdout.")] = None,
) -> None:
    """Tell the truth about a model's fast paths: what it needs, what it is bound to, what to do about it.

    Example: kernelguard check examples/qwen3.8-27b --target h100
    """
    to_stderr = takes_stdout("--junit", junit, as_json=as_json)
    if image is not None:
        from kernelguard.cli.looks import check_image

        outside = {"--environment": environment, "--target": target, "--lock": lock, "--intent": intent}
        outside |= {"--train-config": train_config, "--junit": junit, "--transformers": transformers}
        said = {"--signals": signals, "--level": (level or LevelName.IMPORT).value}
        switches = {"--decode": decode, "--strict": strict, "--trust-remote-code": bool(trust_remote_code)}
        switches |= {"--packed": packed is True, "--no-packed": packed is False}
        code = check_image(
            image,
            model=model,
            outside=[name for name, value in outside.items() if value is not None],
            arguments=[
                *(word for name, value in said.items() if value is not None for word in (name, value)),
                *(name for name, given in switches.items() if given),
            ],
            asked={
                "driver": driver,
                "gpu": gpus,
                "ranks": ranks,
                "shm_bytes": None if shm_size is None else shm_size << 20,
                "platform": platform,
                "python": str(python or ""),
            },
            timeout=timeout,
            as_json=as_json,
        )
        raise typer.Exit(code)
    if model is None:
        from kernelguard.errors import InputError

        raise InputError("no model was given", hint="kernelguard check MODEL, or --image IMAGE")
    from kernelguard.check import Request, run_check

    request = Request(
        model=model,
        python=python,
        environment=environment,
        target=target,
        lock=lock,
        transformers=transformers,
        flags={**intent_flags(decode=decode, packed=packed, signals=signals), "trust_remote_code": trust_remote_code},
        intent_file=intent,
        train_config=train_config,
        level=level,
        strict=strict,
        timeout=timeout,
    )
    with progress("looking into the interpreter"):
        result = run_check(request, dict(os.environ))
    if junit is not None:
        from kernelguard.report.junit import to_junit

        write(junit, to_junit(result), quiet=True)
    if as_json:
        from kernelguard.report.document import to_document

        print_json(to_document(result))
    else:
        from kernelguard.report.terminal import print_check

        print_check(console(stderr=to_stderr), result)
    raise typer.Exit(result.exit_code)


@app.command()
def survey(
    *,
    transformers: Annotated[
        str | None, typer.Option(help="A folder or a version. Default: that of the interpreter `check` would take.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Show what changed since this folder or version.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List what every model type of a transformers release declares.

    Example: kernelguard survey --transformers 5.24.0
    """
    from kernelguard.check import transformers_tree
    from kernelguard.declare.survey import drift, survey_document, survey_table
    from kernelguard.declare.survey import survey as survey_types

    tree = transformers_tree(transformers, dict(os.environ))
    with progress(f"reading transformers {tree.version}"):
        rows = survey_types(tree)
        changes = None if against is None else drift(survey_types(transformers_tree(against, dict(os.environ))), rows)
    if as_json:
        print_json({**survey_document(tree, rows), **({} if changes is None else {"changes": list(changes)})})
        return
    if changes is not None:
        say("\n".join(changes) or "nothing that is declared has changed")
        return
    from kernelguard.report.survey import print_survey

    print_survey(console(), tree, rows, survey_table(rows))


@app.command()
def observe(
    *,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter to look into. Default: $VIRTUAL_ENV's, else `python` on PATH.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file. Default: stdout.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds it may take.")] = 120.0,
) -> None:
    """Capture an environment: for `check --environment` elsewhere, and to paste into a support request.

    Example: kernelguard observe -o fast-machine.json
    """
    from kernelguard.observe.files import environment_to_json
    from kernelguard.observe.interpreter import find_interpreter
    from kernelguard.observe.interpreter import observe as observe_interpreter

    interpreter = find_interpreter(python, os.environ)
    with progress(f"looking into {interpreter}"):
        captured = observe_interpreter(interpreter, timeout=timeout)
    write(output or Path("-"), environment_to_json(captured) + "\n")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="An environment (`observe -o`) or a report (`check --json`).")],
    b: Annotated[Path, typer.Argument(help="Another one of the same kind.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what changed between two machines or two checks, most suspicious first.

    Example: kernelguard diff fast-machine.json slow-machine.json
    """
    from dataclasses import asdict

    from kernelguard.matrix import kernel_packages
    from kernelguard.report.difference import compare, load_document

    differences = compare(load_document(a), load_document(b), kernel_packages().values())
    if as_json:
        rows = [{**asdict(d), "suspicion": d.suspicion.name.lower()} for d in differences]
        print_json({"schema": 1, "kind": "diff", "a": str(a), "b": str(b), "differences": rows})
        return
    from kernelguard.report.terminal import print_differences

    print_differences(console(), str(a), str(b), differences)


def _rule_names() -> list[str]:
    """What a shell offers for RULE."""
    from kernelguard.data import matrices
    from kernelguard.judge.rules import load_rules

    return [rule.id for rule in load_rules(matrices() / "rules.toml")]


@app.command()
def explain(
    rule: Annotated[
        str, typer.Argument(help="A rule id, as printed by `check` and `matrix list`.", autocompletion=_rule_names)
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain one rule: when it applies, what happens, how to fix it, and where that is known from.

    Example: kernelguard explain fla-hopper-dqkwg
    """
    from dataclasses import asdict

    from kernelguard.data import matrices
    from kernelguard.judge.rules import explain as explain_rule
    from kernelguard.judge.rules import load_rules

    explanation = explain_rule(rule, load_rules(matrices() / "rules.toml"))
    if as_json:
        print_json(asdict(explanation))
        return
    from kernelguard.report.terminal import print_explanation

    print_explanation(console(), explanation)
