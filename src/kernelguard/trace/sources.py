"""Which traces and which run did the user name? One trace, one for each rank, a training run's folder, or a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kernelguard.errors import InputError
from kernelguard.trace.profile import Profile, profile
from kernelguard.trace.ranks import Spread, judge_ranks, refuse_same_rank
from kernelguard.trace.runs import RunFacts, is_run, read_run

MOST_RANKS = 64
"""Traces of one run that are read; their columns are dropped one after the other."""


def traces_in(folder: Path) -> list[Path]:
    """The traces that lie in a folder or below: files that are named like one."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name.endswith((".json", ".json.gz")) and "trace" in path.name.lower()
    )


def understand_sources(
    sources: Sequence[Path], tell: Callable[[Path, int], None]
) -> tuple[Profile | None, RunFacts | None, Spread | None]:
    """The profile to show (of several ranks, one that stands for all), the run's own numbers, and the ranks' spread.

    Raises:
        InputError: a source is neither a trace nor a folder with one; several runs were named, or their traces.
    """
    traces: list[Path] = []
    runs: list[RunFacts] = []
    for source in sources:
        if not source.is_dir():
            traces.append(source)
            continue
        inside = traces_in(source)
        if is_run(source):
            runs.append(read_run(source))
        elif not inside:
            raise InputError(
                f"{source} holds neither a trace (*trace*.json, *trace*.json.gz) nor a training run's steps.jsonl",
                hint="name the trace file itself",
            )
        traces += inside
    if len(runs) > 1:
        raise InputError(f"{len(runs)} training runs were named", hint="kernelguard report RUN RUN compares two")
    if len(traces) > MOST_RANKS:
        raise InputError(f"{len(traces)} traces were found, at most {MOST_RANKS} are read", hint="name fewer of them")
    run = runs[0] if runs else None
    profiles: list[Profile] = []
    for path in traces:
        profiles.append(profile(path, run=run, tell=partial(tell, path)))
        refuse_same_rank(profiles)
    if not profiles:
        return None, run, None
    shown, ranks = judge_ranks(profiles)
    return shown, run, ranks
