"""Will code that the checkpoint brings along (`auto_map`) run, and can anything be said about it?"""

from __future__ import annotations

from collections.abc import Iterator

from kernelguard.declare.config import shown
from kernelguard.declare.values import Declaration, Intent, RemoteCode
from kernelguard.judge.values import Finding, Status


def judge_remote(declaration: Declaration, intent: Intent) -> Iterator[Finding]:
    """What `auto_map` means for this run. Pure."""
    remote = declaration.remote
    if remote is None:
        return
    names = ", ".join(map(shown, remote.targets))
    if not remote.runs:
        if "trust_remote_code" in intent.assumed:
            yield Finding(
                code="remote-code-not-used",
                status=Status.WARN,
                reason=f"the configuration names code of its own ({names}). transformers runs it only with "
                "trust_remote_code=True, which nobody said: this answer is for the class that transformers ships",
                fix="--trust-remote-code if the run sets it, --no-trust-remote-code if it does not",
            )
        return
    for text in remote.gone:
        yield Finding(
            code="remote-code-outdated",
            status=Status.FAIL,
            reason=f"the checkpoint's own code {text}: loading it raises ImportError",
            fix="update the code of the checkpoint"
            + (", or leave trust_remote_code off: transformers ships this model" if remote.shipped else ""),
            evidence=(text.partition(" ")[0],),
        )
    yield Finding(
        code="remote-code",
        status=Status.UNKNOWN,
        reason=f"the run uses code that comes with the checkpoint ({names})"
        + ("" if remote.shipped else ", because transformers ships none for this model")
        + f"; {_reading(remote)}",
        fix=("--no-trust-remote-code checks the class that transformers ships" if remote.shipped else "")
        or ("read that code yourself" if remote.files else "give the folder that holds config.json and that code"),
    )


def _reading(remote: RemoteCode) -> str:
    """What was done with the code."""
    why = " ".join(remote.unread)
    if not remote.files:
        return f"it was not read. {why}".rstrip(". ")
    read = f"it was read and not run ({', '.join(remote.files)}), so what it does cannot be vouched for"
    return f"{read}. {why}".rstrip(". ")
