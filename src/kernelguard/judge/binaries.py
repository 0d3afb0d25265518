"""Do the files of the kernel packages fit this machine and torch, and are they what was installed? Nothing is run.

A real import is the truth about loading: where the package was imported, what its headers say about loading is not
said again. Without one, what certainly cannot load is a no, and what is only suspicious is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from kernelguard.declare.values import FastPath, Intent
from kernelguard.judge.attention import attention_module
from kernelguard.judge.bound import find_binding, import_fact, install_command
from kernelguard.judge.values import Finding, Status
from kernelguard.matrix import KernelPackage
from kernelguard.observe.values import Bindings, BoundTo, Environment, ImportOutcome

if TYPE_CHECKING:
    from kernelguard.observe.elf import ElfFacts
    from kernelguard.observe.extensions import Extension
    from kernelguard.observe.overwritten import Overwritten
    from kernelguard.observe.record import RecordState

_MACHINE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryFacts:
    """What was read from the files of the packages."""

    extensions: tuple[Extension, ...] = ()
    records: RecordState | None = None
    libstdcxx: Version | None = None
    """The newest GLIBCXX version this machine has; None: not known."""
    overwritten: tuple[Overwritten, ...] = ()
    """NVIDIA libraries that a second distribution overwrote; they concern torch itself."""
    found_elsewhere: frozenset[str] = field(default_factory=frozenset)
    """CUDA runtimes (`libcudart.so.12`) that the loader finds on this machine beside torch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A package whose files matter to the run."""

    package: str
    """Import name."""
    distribution: str
    symbol: str | None
    """The fast path it is wanted for; None: the attention that was asked for."""
    optional: bool
    loads: bool
    """It was really imported here."""
    fix: str


def wanted_packages(
    paths: Iterable[FastPath], intent: Intent, bindings: Bindings | None, kernels: Mapping[str, KernelPackage]
) -> tuple[Wanted, ...]:
    """The packages behind the needed fast paths and behind the attention that was asked for."""
    found = []
    for path in paths:
        binding = find_binding(path, bindings) if bindings is not None else None
        if path.disabled_by or (binding is not None and binding.bound_to is BoundTo.HUB):
            # What is installed is not what runs.
            continue
        fact = import_fact(path, bindings) if bindings is not None else None
        bound = binding is not None and binding.bound_to is BoundTo.KERNEL
        found.append(
            Wanted(
                package=path.package,
                distribution=path.distribution,
                symbol=path.symbol,
                optional=path.optional,
                loads=bound or (fact is not None and fact.outcome is ImportOutcome.OK),
                fix=_reinstall(install_command(path, kernels)),
            )
        )
    module = attention_module(intent)
    if module is not None:
        package = module.partition(".")[0]
        imports = {fact.module: fact.outcome for fact in (bindings.imports if bindings is not None else ())}
        known = kernels.get(package)
        distribution = known.distributions[0] if known is not None else package
        found.append(
            Wanted(
                package=package,
                distribution=distribution,
                symbol=None,
                optional=False,
                loads=imports.get(module) is ImportOutcome.OK,
                fix=_reinstall(known.install if known is not None else f"pip install {distribution}"),
            )
        )
    return tuple(found)


def distributions_of(packages: Iterable[str], environment: Environment) -> tuple[str, ...]:
    """The installed distributions that own one of these import names."""
    wanted = set(packages)
    return tuple(name for name, d in (environment.distributions or {}).items() if wanted & set(d.top_level))


def judge_binaries(wanted: Iterable[Wanted], facts: BinaryFacts, environment: Environment) -> tuple[Finding, ...]:
    """What the files say about each wanted package. Pure."""
    findings: list[Finding] = list(_overwritten(facts.overwritten))
    for one in wanted:
        judge = _Judge(wanted=one, environment=environment, facts=facts)
        owners = distributions_of([one.package], environment)
        findings += judge.files(owners)
        for owner in owners:
            findings += judge.extensions([e for e in facts.extensions if e.distribution == owner])
    return tuple(dict.fromkeys(findings))


def _overwritten(libraries: Iterable[Overwritten]) -> Iterator[Finding]:
    """Said once for each pair of distributions; only where torch's own library is known to be gone is it a no."""
    for owners in dict.fromkeys(library.owners for library in libraries):
        mine = [library for library in libraries if library.owners == owners]
        lost = [library for library in mine if library.wanted and not set(library.wanted) & set(library.on_disk)]
        shown = (lost or mine)[0]
        reason = f"{' and '.join(owners)} both brought {shown.path}, and what is there is "
        reason += f"that of {' and '.join(shown.on_disk)}" if shown.on_disk else "neither's"
        if shown.wanted:
            reason += f"; this torch requires {' and '.join(shown.wanted)}"
        keep = shown.wanted or owners[:1]
        others = " ".join(name for name in owners if name not in keep)
        yield Finding(
            code="overwritten-library",
            status=Status.FAIL if lost else Status.WARN,
            reason=reason,
            fix=f"pip uninstall {others} && pip install --force-reinstall --no-deps {' '.join(keep)}",
            evidence=tuple(library.path for library in mine[:_FEW]),
        )


def _reinstall(command: str) -> str:
    return command.replace("pip install", "pip install --force-reinstall --no-deps --no-cache-dir", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """One wanted package and what its findings need."""

    wanted: Wanted
    environment: Environment
    facts: BinaryFacts

    def extensions(self, extensions: list[Extension]) -> Iterator[Finding]:
        """The compiled modules of one distribution."""
        ours = [e for e in extensions if _for_this_python(Path(e.path).name, self.environment.python)]
        read = [(e, e.elf) for e in ours if e.elf is not None]
        if not self.wanted.loads:
            for extension in ours:
                if extension.problem:
                    yield self._finding("binary-unreadable", Status.UNKNOWN, extension.problem)
            names = {Path(e.path).name for e in extensions}
            machines = {elf.machine for _, elf in read}
            for extension, elf in read:
                yield from self._loading(extension, elf, machines, names)
        yield from self._gpu_code(read)

    def _loading(
        self, extension: Extension, elf: ElfFacts, machines: set[str], siblings: set[str]
    ) -> Iterator[Finding]:
        name, env = Path(extension.path).name, self.environment
        here = _MACHINE_NAMES.get((env.machine or "").lower(), env.machine)
        if here is not None and elf.machine != here:
            # Some packages bring a module for each machine.
            if here not in machines:
                yield self._fail(
                    "wrong-machine", f"{name} is built for {elf.machine}, this machine is {here}", extension
                )
            return
        if elf.glibc is not None and env.glibc is not None and elf.glibc > env.glibc:
            yield self._fail(
                "glibc-too-old", f"{name} needs glibc {elf.glibc}, this machine has {env.glibc}", extension
            )
        if elf.libstdcxx is not None and self.facts.libstdcxx is not None and elf.libstdcxx > self.facts.libstdcxx:
            yield self._fail(
                "libstdcxx-too-old",
                f"{name} needs a libstdc++ with GLIBCXX_{elf.libstdcxx}, the newest here has "
                f"GLIBCXX_{self.facts.libstdcxx}",
                extension,
            )
        yield from self._cuda(extension, elf)
        if extension.missing:
            shown = ", ".join(extension.missing[:_FEW]) + (", ..." if len(extension.missing) > _FEW else "")
            reason = (
                f"{name} wants {len(extension.missing)} symbol(s) that torch {env.torch} does not export ({shown}): it "
                f"was built for another torch{self._abi(elf)}"
            )
            # A library of the package's own may bring them.
            own = bool(siblings & set(elf.needed))
            yield self._finding("wrong-torch", Status.WARN if own else Status.FAIL, reason, extension.path)

    def _cuda(self, extension: Extension, elf: ElfFacts) -> Iterator[Finding]:
        wanted, torch = elf.cuda_runtime, self.environment.torch_cuda
        if wanted is None or (torch is None and not self.environment.torch_is_cpu):
            return
        if torch is not None and torch.major == wanted.major:
            return
        library = next(n for n in elf.needed if n.startswith("libcudart.so"))
        brings = "is a CPU build" if torch is None else f"brings CUDA {torch}"
        reason = f"{Path(extension.path).name} needs {library}, torch {self.environment.torch} {brings}"
        elsewhere = library in self.facts.found_elsewhere
        if elsewhere:
            reason += f"; a {library} of this machine's would be loaded beside it"
        yield self._finding("wrong-cuda", Status.WARN if elsewhere else Status.FAIL, reason, extension.path)

    def _abi(self, elf: ElfFacts) -> str:
        built, here = elf.cxx11_abi, self.environment.cxx11_abi
        if built is None or here is None or built is here:
            return ""
        old, new = "the old C++ ABI", "the new C++ ABI (cxx11)"
        return f", with {new if built else old}, while this torch has {new if here else old}"

    def _gpu_code(self, read: list[tuple[Extension, ElfFacts]]) -> Iterator[Finding]:
        """Only what has GPU code for other GPUs: a package may bring one module for each generation."""
        built = [(extension, elf) for extension, elf in read if elf.gpu_code]
        for capability in dict.fromkeys(gpu.capability for gpu in self.environment.gpus if gpu.capability is not None):
            bad = [(extension, elf) for extension, elf in built if not elf.runs_on(capability)]
            status = Status.FAIL if len(bad) == len(built) else Status.WARN
            for extension, elf in bad:
                codes = ", ".join(map(str, elf.gpu_code))
                yield self._finding(
                    "no-gpu-code",
                    status,
                    f"{Path(extension.path).name} holds GPU code for {codes} only, and this GPU has compute capability "
                    f"{capability[0]}.{capability[1]}",
                    extension.path,
                )

    def files(self, owners: Iterable[str]) -> Iterator[Finding]:
        """What the records say about the distributions of this package."""
        records, mine = self.facts.records, set(owners)
        if records is None:
            return
        for owner in sorted(mine):
            changed = [f for f in records.changed if f.distribution == owner]
            if changed:
                shown = ", ".join(f"{f.path} {'is gone' if f.missing else 'differs'}" for f in changed[:_FEW])
                reason = f"{len(changed)} file(s) of {owner} are not what was installed: {shown}"
                yield self._finding("changed-files", Status.WARN, reason)
        clashing = [f for f in records.shared if mine & set(f.distributions) and not f.same_content]
        for names in dict.fromkeys(f.distributions for f in clashing):
            paths = [f.path for f in clashing if f.distributions == names]
            reason = (
                f"{' and '.join(names)} both brought {paths[0]}"
                + (f" and {len(paths) - 1} more file(s)" if len(paths) > 1 else "")
                + ", with different content: whichever was installed last has won"
            )
            yield self._finding("two-owners", Status.WARN, reason)
        for pin in records.unmet:
            if pin.distribution in mine:
                reason = f"{pin.distribution} {pin.version} wants {pin.wants}, installed is {pin.installed}"
                wanted = pin.wants.partition("==")[0]
                yield self._finding(
                    "sibling-mismatch", Status.WARN, reason, fix=f"pip install '{pin.wants}'" if wanted else ""
                )
        if not self.wanted.loads:
            folders = {_metadata_folder(self.environment, owner) for owner in mine}
            for problem in records.problems:
                named = any(problem.startswith(f"{owner} ") for owner in mine)
                if named or any(folder in problem for folder in folders):
                    yield self._finding("record-unreadable", Status.UNKNOWN, problem)

    def _fail(self, code: str, reason: str, extension: Extension) -> Finding:
        return self._finding(code, Status.FAIL, reason, extension.path)

    def _finding(self, code: str, status: Status, reason: str, *evidence: str, fix: str = "") -> Finding:
        if self.wanted.optional and status is Status.FAIL:
            status = Status.WARN
        return Finding(
            code=code,
            status=status,
            fast_path=self.wanted.symbol,
            reason=f"{self.wanted.distribution}: {reason}",
            fix=fix or self.wanted.fix,
            evidence=evidence,
        )


def _metadata_folder(environment: Environment, owner: str) -> str:
    found = (environment.distributions or {})[owner]
    return f"/{found.name.replace('-', '_')}-{found.version}.dist-info/"


def _for_this_python(name: str, python: Version | None) -> bool:
    """Whether this interpreter would look at a module of this name (`x.cpython-310-x86_64-linux-gnu.so`)."""
    tag = name.partition(".cpython-")[2].partition("-")[0]
    return python is None or not tag or tag.rstrip("t") == f"{python.major}{python.minor}"
