"""The walk of `kernelguard check` over the files of the kernel packages a run needs. Wires reading and judging."""

from __future__ import annotations

from kernelguard.judge.assess import Evidence, needed_paths
from kernelguard.judge.binaries import BinaryFacts, distributions_of, judge_binaries, wanted_packages
from kernelguard.judge.values import Finding
from kernelguard.observe.extensions import Extension, inspect_extensions
from kernelguard.observe.loader import libraries_found, newest_libstdcxx
from kernelguard.observe.overwritten import overwritten_libraries
from kernelguard.observe.record import inspect_records


def binary_findings(evidence: Evidence) -> tuple[Finding, ...]:
    """What the files of the needed packages say, in a live environment. Nothing of them is run."""
    environment = evidence.environment
    wanted = wanted_packages(
        needed_paths(evidence.declaration, evidence.intent, evidence.bindings),
        evidence.intent,
        evidence.bindings,
        evidence.kernels,
    )
    packages = {one.package for one in wanted}
    names = distributions_of(packages, environment)
    if environment.distributions is None:
        return ()
    overwritten = overwritten_libraries(environment.distributions)
    extensions = inspect_extensions(environment, packages)
    wants_cxx = any(e.elf is not None and e.elf.libstdcxx is not None for e in extensions)
    facts = BinaryFacts(
        extensions=extensions,
        records=inspect_records(environment.distributions, names) if names else None,
        overwritten=overwritten,
        libstdcxx=newest_libstdcxx(environment) if wants_cxx else None,
        found_elsewhere=frozenset(name for e in extensions for name in _cuda_runtimes(evidence, e)),
    )
    return judge_binaries(wanted, facts, environment)


def _cuda_runtimes(evidence: Evidence, extension: Extension) -> tuple[str, ...]:
    """The CUDA runtimes it needs that the loader finds on this machine."""
    needed = extension.elf.needed if extension.elf is not None else ()
    return tuple(
        name
        for name in needed
        if name.startswith("libcudart.so") and libraries_found(evidence.environment, name, extension.elf)
    )
