"""Is what is bound from a wheel that was made for another torch?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kernelguard.declare.values import FastPath
from kernelguard.judge.values import Finding, Status
from kernelguard.observe.values import Environment

_TAG = re.compile(r"torch(\d)\.(\d+)")
"""In the local version of an official wheel, `1.6.1+cu12torch2.10cxx11abitrue`; NVIDIA's `torch25.11` is no release."""


def other_torch(path: FastPath, found: Iterable[Finding], environment: Environment) -> Iterator[Finding]:
    """A kernel that is bound, from a wheel of another torch. A tag is no evidence against what loads."""
    distribution = (environment.distributions or {}).get(path.distribution)
    torch = environment.torch
    tag = _TAG.search(distribution.version.partition("+")[2]) if distribution is not None else None
    if tag is None or torch is None or distribution is None or not any(f.code == "bound" for f in found):
        return
    if (int(tag[1]), int(tag[2])) != (torch.major, torch.minor):
        yield Finding(
            code="tag-other-torch",
            status=Status.WARN,
            fast_path=path.symbol,
            reason=f"{distribution.name} {distribution.version} is tagged for torch {tag[1]}.{tag[2]}, this is torch "
            f"{torch}: it loads, which does not show that it computes the right thing",
            fix="kernelguard verify, with the same arguments, runs it against a reference",
        )
