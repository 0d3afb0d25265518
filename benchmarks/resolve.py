"""What pip-compile, uv pip compile, `kernels lock`, gpkg and kernelguard make of the same kernel requirements; one run.

    .venv/bin/python benchmarks/resolve.py [--json FILE]

Official wheels are synthetic files with upstream's exact naming and metadata, served on 127.0.0.1; sdists are the real
ones of the package index. Seconds are wall time of one run each, with the tools' own caches as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# In place of this folder, whose resolve.py would hide the tests' folder of that name.
sys.path[0] = str(ROOT / "tests")

from packaging.version import Version  # noqa: E402

from kernelguard.errors import KernelguardError  # noqa: E402
from kernelguard.lock import Places, make_lock  # noqa: E402
from kernelguard.lock.compile import Engine  # noqa: E402
from kernelguard.lock.make import Subject  # noqa: E402
from kernelguard.lock.tools import make_tools  # noqa: E402
from kernelguard.observe.targets import target  # noqa: E402
from kernelguard.resolve import Market, matrix, resolve  # noqa: E402
from kernelguard.resolve.market import gather, sources_for  # noqa: E402
from kernelguard.resolve.values import Kind, Need, Provider, Rejected, RejectionCode  # noqa: E402
from kernelguard.sources.http import Http  # noqa: E402
from kernelguard.sources.hub import Hub, HubSource  # noqa: E402
from kernelguard.sources.pipconfig import PipConfig, pip_config  # noqa: E402
from lock.world import World, world  # noqa: E402
from programs import tool  # noqa: E402
from resolve.cases import declaration  # noqa: E402
from sources.fakehub import FakeHub, variant  # noqa: E402
from sources.servers import wheel  # noqa: E402

CACHE = ROOT / ".cache" / "tools"
OFFICIAL = "causal_conv1d-1.7.0+cu13torch2.13cxx11abiTRUE-cp311-cp311-linux_{}.whl"
SPEC = "a100,torch=2.13.0,python=3.11"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one tool made of one case."""

    case: str
    tool: str
    worked: bool
    says: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question, as each tool is asked it."""

    name: str
    title: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    """For pip-compile and uv alike."""
    pip_options: tuple[str, ...] = ()
    ours: Callable[[], str]


def need(package: str, distribution: str) -> Need:
    return Need(package=package, symbols=("f",), providers=(Provider(distribution=distribution),))


def cases(here: World) -> Iterator[Case]:
    folders = {name: here.tmp / name for name in ("official", "repacked", "renamed")}
    for folder in folders.values():
        folder.mkdir()
    url = here.site.put(f"/release/{OFFICIAL.format('x86_64')}", wheel("causal-conv1d", "1.7.0")).replace("+", "%2B")
    (folders["official"] / OFFICIAL.format("x86_64")).write_bytes(wheel("causal-conv1d", "1.7.0"))
    arm = here.site.put(f"/release/{OFFICIAL.format('aarch64')}", wheel("causal-conv1d", "1.7.0")).replace("+", "%2B")
    local = "1.7.0+cu.13.0.torch.2.13"
    (folders["repacked"] / f"causal_conv1d-{local}-cp311-cp311-linux_x86_64.whl").write_bytes(
        wheel("causal-conv1d", local)
    )
    (folders["renamed"] / "causal_conv1d-1.7.0-cp311-cp311-linux_x86_64.whl").write_bytes(
        wheel("causal-conv1d", "1.7.0")
    )
    conv = need("causal_conv1d", "causal-conv1d")
    yield Case(
        name="A",
        title="causal-conv1d 1.7.0 for torch 2.13, only an sdist, no build isolation",
        requirements=("causal-conv1d==1.7.0",),
        options=("--no-build-isolation",),
        ours=lambda: ours(here, SPEC, conv, config=pip_config(Path(sys.executable))),
    )
    yield Case(
        name="B",
        title="flash-attn 2.8.3.post2 for torch 2.13, only an sdist",
        requirements=("flash-attn==2.8.3.post2",),
        ours=lambda: ours(here, SPEC, need("flash_attn", "flash-attn"), config=pip_config(Path(sys.executable))),
    )
    yield Case(
        name="C",
        title="an official wheel by URL",
        requirements=(f"causal-conv1d @ {url}",),
        ours=lambda: ours(here, SPEC, conv, folder=folders["official"]),
    )
    yield Case(
        name="D",
        title="official wheels in a folder, asked for by version",
        requirements=("causal-conv1d==1.7.0",),
        options=(f"--find-links={folders['official']}",),
        ours=lambda: ours(here, SPEC, conv, folder=folders["official"]),
    )
    yield Case(
        name="E",
        title="repacked wheel, local version in name and metadata",
        requirements=("causal-conv1d==1.7.0",),
        options=(f"--find-links={folders['repacked']}",),
        ours=lambda: ours(here, SPEC, conv, folder=folders["repacked"]),
    )
    yield Case(
        name="F",
        title="wheel renamed to a plain version: nothing says its torch",
        requirements=("causal-conv1d==1.7.0",),
        options=(f"--find-links={folders['renamed']}",),
        pip_options=("--pip-args=--only-binary causal-conv1d",),
        ours=lambda: ours(here, SPEC, conv, folder=folders["renamed"]),
    )
    yield Case(
        name="G",
        title="aarch64 wheel for an x86_64 machine",
        requirements=(f"causal-conv1d @ {arm}",),
        ours=lambda: ours(here, SPEC, conv, folder=_folder(here, OFFICIAL.format("aarch64"))),
    )


def _folder(here: World, name: str) -> Path:
    folder = here.tmp / "arm"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(wheel("causal-conv1d", "1.7.0"))
    return folder


def ours(here: World, spec: str, wanted: Need, *, folder: Path | None = None, config: PipConfig | None = None) -> str:
    """Resolve and lock; the first line of the answer."""
    places = config or here.config
    http = Http(timeout=30, cache=CACHE / "http")
    folders = (folder,) if folder is not None else ()
    # Only what the sources have: what the matrices know of real release pages plays no part in these cases.
    bare = {n: dataclasses.replace(f, candidates=()) for n, f in matrix().packages.items()}
    known = dataclasses.replace(matrix(), packages=bare)
    market = gather((wanted,), known, sources_for(known, places, http, folders=folders))
    resolution = resolve(needs=(wanted,), environment=target(spec), market=market)
    if not resolution.complete:
        mine = [
            n
            for n in resolution.trace
            if isinstance(n, Rejected) and n.distribution == wanted.providers[0].distribution
        ]
        # What a person would be told first: the newest release, not one that was withdrawn long ago.
        told = [n for n in mine if n.code is RejectionCode.SOURCE_BUILD] or mine
        raise NoAnswerError(told[0].reason if told else "nothing known")
    subject = Subject(
        model=declaration().config, intent=_intent(), fast_paths=(), transformers=None, environment=target(spec)
    )
    lock = make_lock(
        resolution,
        subject,
        Places(config=places, find_links=folders),
        cache=CACHE,
        http=http,
        engine=Engine.UV,
    )
    pin = next(p for p in lock.pins if p.name == wanted.providers[0].distribution)
    return f"{'direct URL' if pin.direct else 'version pin'}, one hash, for {lock.torch.version}"


class NoAnswerError(Exception):
    """A definite no with its reason."""


def _intent() -> object:
    from kernelguard.declare.values import Intent  # noqa: PLC0415

    return Intent()


def run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> tuple[bool, str]:
    """Whether it worked, and its last telling line."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **(env or {})}, timeout=600
    )
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    telling = [x for x in lines if "Error" in x or "error" in x or "inconsistent" in x or "No matching" in x]
    return done.returncode == 0, (telling or lines or [""])[-1][:160]


def compare(here: World) -> Iterator[Outcome]:
    tools = make_tools(CACHE, Path(sys.executable))
    real = pip_config(Path(sys.executable))
    for case in cases(here):
        index = real.index_url if case.name in "AB" else here.config.index_url
        for engine in ("pip-compile", "uv pip compile"):
            with tempfile.TemporaryDirectory() as folder:
                source, out = Path(folder, "in.txt"), Path(folder, "out.txt")
                source.write_text("".join(f"{r}\n" for r in case.requirements))
                shared = [
                    "--generate-hashes",
                    f"--output-file={out}",
                    *case.options,
                    str(source),
                    f"--index-url={index}",
                ]
                head = (
                    ["piptools", "compile", "--quiet", *case.pip_options]
                    if engine == "pip-compile"
                    else ["uv", "pip", "compile", "--quiet"]
                )
                started = time.perf_counter()
                worked, says = run([str(tools.python), "-m", *head, *shared], Path(folder), {"PIP_FIND_LINKS": ""})
                seconds = time.perf_counter() - started
                if worked:
                    text = out.read_text()
                    hashes = text.count("--hash=")
                    says = f"{hashes} hash{'es' if hashes != 1 else ''}" if hashes else "no hash, silently"
                    says += ", the sdist" if case.name in "AB" else ""
            yield Outcome(case=case.name, tool=engine, worked=worked, says=says, seconds=round(seconds, 2))
        yield _ask_ours(case.name, case.ours)
    yield from hub(here)
    yield gpkg(here)


def _ask_ours(name: str, ask: Callable[[], str]) -> Outcome:
    started = time.perf_counter()
    try:
        worked, says = True, ask()
    except NoAnswerError as error:
        worked, says = False, f"exit 1: {error}"
    except KernelguardError as error:
        worked, says = False, f"exit {error.exit_code}: {error.message.splitlines()[0][:160]}"
    return Outcome(
        case=name, tool="kernelguard", worked=worked, says=says, seconds=round(time.perf_counter() - started, 2)
    )


def hub(here: World) -> Iterator[Outcome]:
    """Case H: a CUDA-only hub kernel, locked on a machine without a GPU."""
    published = FakeHub(here.site)
    name = "torch213-cxx11-cu130-x86_64-linux"
    published.publish("kernels-community/causal-conv1d", {name: variant("causal-conv1d", name, archs=("9.0",))})
    with tempfile.TemporaryDirectory() as folder:
        text = '[tool.kernels.dependencies]\n"kernels-community/causal-conv1d" = 1\n'
        Path(folder, "pyproject.toml").write_text(text)
        python = tool("kernels-0.17.2", "kernels==0.17.2")
        env = {"HF_ENDPOINT": published.url, "HF_HUB_CACHE": f"{folder}/cache", "HF_HUB_DISABLE_XET": "1"}
        started = time.perf_counter()
        worked, says = run([str(python.parent / "kernels"), "lock", folder], Path(folder), env)
        seconds = time.perf_counter() - started
        if worked:
            entry = json.loads(Path(folder, "kernels.lock").read_text())[0]
            says = f"a commit; keys: {', '.join(sorted(entry['lock']))}; no hash, no variant, no machine"
        yield Outcome(case="H", tool="kernels lock", worked=worked, says=says, seconds=round(seconds, 2))

    def ask() -> str:
        client = Hub(published.url, Http(timeout=10))
        repository = "kernels-community/causal-conv1d"
        source = HubSource(client, versions={repository: 1}, wanted=lambda _name: True)
        wanted = Need(
            package="causal_conv1d", symbols=("f",), providers=(Provider(distribution=repository, kind=Kind.HUB),)
        )
        market = Market(known=matrix(), candidates=source.find(repository))
        told = []
        for spec in ("h100,torch=2.13.0,python=3.11", "b200,torch=2.13.0,python=3.11"):
            found = resolve(needs=(wanted,), environment=target(spec), transformers=Version("5.22.0"), market=market)
            [pin] = [p for p in found.pins if p.kind is Kind.HUB] or [None]
            nos = [n for n in found.trace if isinstance(n, Rejected) and n.torch == "torch 2.13.0+cu130"]
            gpu = spec.split(",")[0]
            if pin is None:
                told.append(f"{gpu}: no, {nos[-1].reason}")
            else:
                files = client.files(repository, pin.commit, pin.filename)
                told.append(f"{gpu}: commit, variant and {len(files)} file hashes")
        return "; ".join(told)

    yield _ask_ours("H", ask)


def gpkg(here: World) -> Outcome:
    """Case C asked of gpkg, which looks for wheels on release pages and indexes of its own choice."""
    python = tool("gpkg-0.4.3", "gpkg==0.4.3")
    started = time.perf_counter()
    command = ["--torch", "2.12.1", "--cuda", "130", "causal-conv1d", "-o", str(here.tmp / "gpkg.toml")]
    try:
        worked, says = run([str(python.parent / "gpkg"), *command], here.tmp)
    except subprocess.TimeoutExpired:
        worked, says = False, "no answer within 600 s"
    written = here.tmp / "gpkg.toml"
    if worked:
        says = "wrote a pyproject.toml" + (
            " that names a wheel" if written.exists() and ".whl" in written.read_text() else ""
        )
    return Outcome(case="C", tool="gpkg", worked=worked, says=says, seconds=round(time.perf_counter() - started, 2))


def timings() -> dict[str, float]:
    """Seconds of the pure search alone, with the matrices loaded; the slowest of the targets of the tests."""
    from resolve.cases import needs, shipped_rules  # noqa: PLC0415

    wanted, rules = needs(), shipped_rules()
    found = {}
    for spec in (
        "h100",
        "a100",
        "b200",
        "gh200",
        "v100",
        "cpu",
        "h100,torch=2.15.0",
        "h100,torch=2.10.0",
        "h100,driver=470",
    ):
        started = time.perf_counter()
        resolve(needs=wanted, environment=target(spec), transformers=Version("5.24.0"), rules=rules)
        found[spec] = round(time.perf_counter() - started, 3)
    return found


@contextmanager
def somewhere() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="kernelguard-bench-") as folder, world(Path(folder)) as here:
        yield here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with somewhere() as here:
        titles = {case.name: case.title for case in cases(World(site=here.site, tmp=_fresh(here.tmp)))}
        outcomes = []
        for outcome in compare(here):
            outcomes.append(outcome)
            how = "ok  " if outcome.worked else "FAIL"
            print(f"{outcome.case}  {outcome.tool:15} {how} {outcome.seconds:6.2f} s  {outcome.says}")
        searched = timings()
        # Addresses of this run's servers and folders mean nothing elsewhere.
        rows = [
            dataclasses.asdict(o) | {"says": o.says.replace(here.site.url, "URL").replace(str(here.tmp), "DIR")}
            for o in outcomes
        ]
    for spec, seconds in searched.items():
        print(f"search {spec:20} {seconds:.3f} s")
    if arguments.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "cases": titles,
            "outcomes": rows,
            "search_seconds": searched,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def _fresh(folder: Path) -> Path:
    other = folder / "titles"
    other.mkdir()
    return other


if __name__ == "__main__":
    main()
