"""The reference pages of the documentation, made from the code and its data: `python tools/reference.py FOLDER`.

They are made whenever the documentation is built and are not committed, so they cannot be out of step.
"""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelguard import errors
from kernelguard.data import matrices as matrices_folder

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = ROOT / "src" / "kernelguard" / "schemas"
MECHANISMS = ROOT / "src" / "kernelguard" / "declare"
_MADE = "*This page is made from {source}.*\n"


def pages() -> dict[str, str]:
    """Every page by its path below docs/."""
    return {
        "reference/cli.md": command_line(),
        "reference/exit-codes.md": exit_codes(),
        "reference/rules.md": rules(),
        "reference/kernels.md": kernels(),
        "reference/mechanisms.md": mechanisms(),
        "reference/schemas.md": schemas(),
    }


# ---- the command line ----------------------------------------------------------------------------------------------


def command_line() -> str:
    """Each command with its arguments and options, as typer knows them."""
    lines = ["# Command line", "", _MADE.format(source="`src/kernelguard/cli/`")]
    for name, command in commands():
        lines += [f"## kernelguard {name}", "", *_help(command.help or ""), ""]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
        for title, parameters in (("argument", arguments), ("option", options)):
            if parameters:
                lines += [f"| {title} | takes | what it says |", "|---|---|---|"]
                lines += [f"| {_names(p)} | {_takes(p)} | {_cell(getattr(p, 'help', '') or '')} |" for p in parameters]
                lines.append("")
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, Any]]:
    """Each command of the tool, those of a group as `matrix list`."""
    import typer.main  # noqa: PLC0415 - with it come all of typer's own imports

    from kernelguard.cli import app  # noqa: PLC0415

    def walk(prefix: str, group: Any) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            full = f"{prefix} {name}".strip()
            if hasattr(command, "commands"):
                yield from walk(full, command)
            else:
                yield full, command

    return walk("", typer.main.get_command(app))


def _help(text: str) -> list[str]:
    return [
        f"```console\n$ {line.removeprefix('Example:').strip()}\n```" if line.startswith("Example:") else line
        for line in "\n".join(text.splitlines()).replace("\b", "").split("\n")
    ]


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _takes(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    choices = getattr(parameter.type, "choices", None)
    kind = ", ".join(f"`{getattr(c, 'value', c)}`" for c in choices) if choices else parameter.type.name
    default = parameter.default
    shown = f"; default `{getattr(default, 'value', default)}`" if isinstance(default, int | float | str | Path) else ""
    return _cell(f"{kind}{', several times' if getattr(parameter, 'multiple', False) else ''}{shown}")


# ---- exit codes ----------------------------------------------------------------------------------------------------


def exit_codes() -> str:
    """The table of README, and which error gives which code."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("### Exit codes\n", 1)[1].split("\n###", 1)[0].strip()
    lines = ["# Exit codes", "", _MADE.format(source="README.md and `src/kernelguard/errors.py`"), table, ""]
    lines += ["| what is raised | code | meaning |", "|---|---|---|"]
    for found in sorted(_errors(errors.KernelguardError), key=lambda c: (c.exit_code, c.__name__)):
        lines.append(f"| `{found.__name__}` | {found.exit_code} | {_cell((found.__doc__ or '').splitlines()[0])} |")
    return "\n".join([*lines, ""])


def _errors(base: type[errors.KernelguardError]) -> Iterator[type[errors.KernelguardError]]:
    for found in base.__subclasses__():
        if found.__module__ == errors.__name__:
            yield found
        yield from _errors(found)


# ---- rules, kernels, mechanisms ------------------------------------------------------------------------------------


def rules() -> str:
    """Every known bad combination with its evidence, as `kernelguard explain` tells it."""
    table = _toml("rules.toml")["rule"]
    lines = [
        "# Known bad combinations",
        "",
        _MADE.format(source="`matrices/rules.toml`"),
        f"{len(table)} rules. `kernelguard explain RULE` prints one. Where bounds are not established, it only warns.",
        "",
        "| rule | answer | what |",
        "|---|---|---|",
    ]
    lines += [f"| [`{r['id']}`](#{r['id']}) | {r['status']} | {_cell(r['title'])} |" for r in table]
    for rule in table:
        lines += ["", f"## {rule['id']}", "", f"**{rule['status']}**: {rule['title']}", "", rule["effect"], ""]
        lines += [f"- applies when: `{json.dumps(rule['when'], ensure_ascii=False, default=str)}`"]
        lines += [f"- fix: `{rule['fix']}`"] if rule.get("fix") else []
        lines += [f"- note: {rule['note']}"] if rule.get("note") else []
        lines += ["- evidence: " + "; ".join(_cell(e) for e in rule["evidence"]), f"- looked at: {rule['retrieved']}"]
    return "\n".join([*lines, ""])


def kernels() -> str:
    """Every known kernel package: what it needs, and what keeps packed samples apart in each of its functions."""
    lines = ["# Kernel packages", "", _MADE.format(source="`matrices/kernels/`")]
    for file in sorted((matrices_folder() / "kernels").glob("*.toml")):
        row = tomllib.loads(file.read_text(encoding="utf-8"))
        lines += [f"## {row['package']}", "", f"Distributions: {', '.join(f'`{d}`' for d in row['distributions'])}."]
        lines += ["", f"Install: `{row['install']}`"] if row.get("install") else []
        lines += ["", row["note"]] if row.get("note") else []
        lines += ["", "| symbol | module | runs in | told where samples end by |", "|---|---|---|---|"]
        for symbol, what in row.get("symbols", {}).items():
            told = ", ".join(f"`{b}`" for b in what.get("boundaries", ()))
            lines.append(
                f"| `{symbol}` | `{what.get('module', '')}` | {what.get('phase', '')} |"
                f" {told or ('not needed' if what.get('mixes_tokens') is False else 'nothing')} |"
            )
        lines.append("")
    return "\n".join(lines)


def mechanisms() -> str:
    """How models declare kernels, file by file, and which release of transformers changed what."""
    lines = ["# Mechanisms, and what each transformers changed", ""]
    lines += [_MADE.format(source="`src/kernelguard/declare/` and `matrices/transformers.toml`")]
    for folder, title in (("mechanisms", "How a kernel is declared"), ("choices", "What else decides what runs")):
        lines += [f"## {title}", "", "| file | what it reads |", "|---|---|"]
        for file in sorted((MECHANISMS / folder).glob("[a-z]*.py")):
            doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            lines.append(f"| `{folder}/{file.name}` | {_cell(doc.splitlines()[0])} |")
        lines.append("")
    data = _toml("transformers.toml")
    lines += ["## Releases", "", f"Read: {data['read']}.", "", "| since | until | change |", "|---|---|---|"]
    order = {version: place for place, version in enumerate(str(data["read"]).split())}
    for change in sorted(data["change"], key=lambda c: order.get(c["since"], -1)):
        lines.append(f"| {change['since']} | {change.get('until', '')} | {_cell(change['what'])} |")
    return "\n".join([*lines, ""])


# ---- schemas -------------------------------------------------------------------------------------------------------


def schemas() -> str:
    """Each file format with its top-level keys."""
    lines = ["# File formats", "", _MADE.format(source="`src/kernelguard/schemas/`")]
    lines += ["Every file that crosses a border has a schema with a version. Keys are only ever added.", ""]
    for file in sorted(SCHEMAS.glob("*.schema.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## {schema.get('title', file.name)}", ""]
        lines += [f"`schemas/{file.name}`. {schema.get('description', '')}", ""]
        required = set(schema.get("required", ()))
        lines += ["| key | is | required | says |", "|---|---|---|---|"]
        for key, value in schema.get("properties", {}).items():
            what = _resolved(value, schema)
            said = value.get("description") or what.get("description", "")
            lines.append(f"| `{key}` | {_type(what)} | {'yes' if key in required else ''} | {_cell(said)} |")
        lines.append("")
    return "\n".join(lines)


def _resolved(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = str(value.get("$ref", ""))
    return schema.get("$defs", {}).get(reference.rsplit("/", 1)[-1], {}) if reference else value


def _type(value: Mapping[str, Any]) -> str:
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{v}`" for v in value["enum"])
    kind = value.get("type", "")
    return ", ".join(kind) if isinstance(kind, list) else str(kind)


# ---- shared --------------------------------------------------------------------------------------------------------


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((matrices_folder() / name).read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    """One line that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for page_name, page_text in pages().items():
        path = target / page_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page_text, encoding="utf-8")
