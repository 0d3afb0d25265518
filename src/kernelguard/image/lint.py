"""What in a Dockerfile of the user's own will cost a training run? Findings, before anything is built. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from packaging.version import InvalidVersion, Version

from kernelguard.image.context import Unfit
from kernelguard.image.dockerfile import Instruction, Stage, chain, read_dockerfile
from kernelguard.image.fitness import AIR, Situation, compat_finding, driver_finding, supported
from kernelguard.image.installs import SOURCE_ONLY, Install, all_installs, installs_of
from kernelguard.judge.values import Finding, Status
from kernelguard.resolve.facts import Matrix

_CUDA_IMAGE = re.compile(r"(?:^|/)nvidia/cuda:(?P<cuda>\d+\.\d+)[\d.]*-(?P<kind>[a-z0-9-]+)")
_TRITON_USERS = frozenset(
    {"torch", "triton", "fla-core", "flash-linear-attention", "liger-kernel", "unsloth", "tilelang"}
)
_COMPILERS = re.compile(
    r"\b(build-essential|gcc(-\d+)?|g\+\+(-\d+)?|clang(-\d+)?|gcc-c\+\+|gcc_linux-64|compilers|gxx_linux-64)(?![\w+-])"
)
_SYSTEM = re.compile(r"\b(apt-get|apt|aptitude|apk|dnf|microdnf|yum|zypper|conda|mamba|micromamba)\b")
_ARCH_VARIABLES = (
    "TORCH_CUDA_ARCH_LIST",
    "FLASH_ATTN_CUDA_ARCHS",
    "CUDAARCHS",
    "CMAKE_CUDA_ARCHITECTURES",
    "NVTE_CUDA_ARCHS",
)
_BUILDS = re.compile(
    r"\bsetup\.py\s+(install|develop|bdist_wheel|build_ext|build)\b|--no-build-isolation\b|\bcmake\s+--build\b"
)
_SWALLOWED = re.compile(r"\|\|\s*(true|:|echo\b|exit\s+0)|;\s*(true|exit\s+0)\s*$|\bset\s+\+e\b")
_PROBES = re.compile(
    r"\bnvidia-smi\b|torch\.cuda\.(is_available|get_device_\w+|current_device|init)\s*\(|\bassert\s+torch\.cuda"
)
_SKIPPED = re.compile(r"\b(\w+_SKIP_CUDA_BUILD)=['\"]?(TRUE|1|true|ON)\b")
_WITH_COMPILER = re.compile(
    r"(^|/)(python:(?!.*(slim|alpine))|gcc:|buildpack-deps:(?!curl)|nvcr\.io/nvidia/pytorch:|pytorch/pytorch:.*-devel"
    r"|nvidia/cuda:.*-devel|rocm/|databricksruntime/air:.*-devel|nvidia/pytorch:)|^gcc$|^python$"
)
_WITHOUT_COMPILER = re.compile(
    r"(^|/)(python:.*(slim|alpine)|debian|ubuntu|nvidia/cuda:.*-(base|runtime)|pytorch/pytorch:.*-runtime|alpine"
    r"|databricksruntime/air:.*-runtime|gcr\.io/distroless|ghcr\.io/astral-sh/uv:.*slim)\b"
)


def lint(
    text: str, situation: Situation, known: Matrix, *, source: str = "Dockerfile", unfit: Sequence[Unfit] = ()
) -> tuple[Finding, ...]:
    """Everything that is wrong with a Dockerfile, or that it does not tell; `unfit` is what its context cannot hold.

    Raises:
        InputError: it is no Dockerfile.
    """
    stages = read_dockerfile(text, source=source)
    final = chain(stages, stages[-1])
    found = [
        *_images(stages, source),
        *(f for stage in stages for f in _runs(stage, source)),
        *(f for stage in stages for f in _arch_lists(chain(stages, stage), stage, source)),
        *(f for stage in stages for f in _toolkits(chain(stages, stage), stage, known, source)),
        *_moved_torch(final, source),
        *_compiler(final, stages, source),
        *_drivers(final, situation, known, source),
        *_final_environment(final, source),
        *(_air(final, source) if situation.platform == AIR else ()),
    ]
    found += [_no("image-context", f"{u.path} {u.why}", f"add {u.path} to .dockerignore") for u in unfit]
    found = list(dict.fromkeys(found))
    if not any(f.status in {Status.FAIL, Status.UNKNOWN} for f in found):
        found.insert(0, Finding(code="image-fit", status=Status.PASS, reason=f"nothing in {source} stands against it"))
    return tuple(found)


def _images(stages: Sequence[Stage], source: str) -> Iterator[Finding]:
    names = {stage.name for stage in stages if stage.name}
    for stage in stages:
        base = stage.base
        if base.lower() in names or base == "scratch" or "@sha256:" in base:
            continue
        if "$" in base or base.endswith(":"):
            reason = f"{source}:{stage.line}: which image {base or 'this'} is depends on a build argument"
            yield _warn("image-latest", reason, "give its ARG a default, with a tag or a digest")
        elif ":" not in base.rpartition("/")[2] or base.endswith(":latest"):
            reason = f"{source}:{stage.line}: FROM {base} is another image next month"
            yield _warn("image-latest", reason, f"FROM {base.removesuffix(':latest')}:<version>, or @sha256:<digest>")


def _runs(stage: Stage, source: str) -> Iterator[Finding]:
    for step in stage.instructions:
        if step.word != "RUN":
            continue
        where = f"{source}:{step.line}"
        installs = [i.name for i in installs_of(step)]
        if _SWALLOWED.search(step.text) and installs:
            kernel = [name for name in installs if name in SOURCE_ONLY | _TRITON_USERS]
            make = _no if kernel else _warn
            what = ", ".join(kernel or installs)
            yield make(
                "image-swallowed-failure",
                f"{where}: a failed install of {what} is ignored, and the image is made without it",
                "take out what ignores the failure (`|| true`, `|| echo`, `set +e`)",
            )
        if _PROBES.search(step.text):
            yield _no(
                "image-build-probes-gpu",
                f"{where}: a step asks for a GPU while the image is built, and `docker build` gives it none: it passes "
                "only from the layer cache",
                "verify the built image: kernelguard verify MODEL --image IMAGE",
            )
        skipped = _SKIPPED.search(step.text)
        names = [
            n for n, v in step.environment.items() if n.endswith("_SKIP_CUDA_BUILD") and v.upper() in {"TRUE", "1"}
        ]
        if (skipped or names) and installs:
            name = skipped[1] if skipped else names[0]
            yield _no(
                "image-skips-cuda-build",
                f"{where}: {name} installs the package without its kernels: pip is content, and importing it fails",
                f"build it: take out {name} and set TORCH_CUDA_ARCH_LIST, or install a wheel",
            )


def _arch_lists(line: Sequence[Stage], stage: Stage, source: str) -> Iterator[Finding]:
    """A source build without a list of archs asks the GPU that is not there, or compiles for whatever it likes."""
    del line
    for step in stage.instructions:
        built = [i.name for i in installs_of(step) if i.from_source and (i.name in SOURCE_ONLY or i.url)]
        # `pip install .` of a pure Python package is no CUDA build; --no-build-isolation says that torch is needed.
        compiles = bool(_BUILDS.search(step.text)) or any(n in SOURCE_ONLY for n in built)
        if step.word != "RUN" or not compiles:
            continue
        if any(step.environment.get(name) or re.search(rf"\b{name}=\S", step.text) for name in _ARCH_VARIABLES):
            continue
        what = ", ".join(built) or "an extension"
        open_argument = any(name in step.environment for name in _ARCH_VARIABLES)
        reason = f"{source}:{step.line}: {what} is compiled where there is no GPU, and no list of GPU archs is set"
        if open_argument:
            yield _warn(
                "image-no-arch-list", f"{reason} unless a build argument gives it", "ARG TORCH_CUDA_ARCH_LIST=9.0"
            )
        else:
            yield _no(
                "image-no-arch-list", reason, "ARG TORCH_CUDA_ARCH_LIST=9.0, the capability of the GPU that will train"
            )


def _toolkits(line: Sequence[Stage], stage: Stage, known: Matrix, source: str) -> Iterator[Finding]:
    """Nvcc and the CUDA that torch was built for have to be of one major for an extension to load."""
    toolkit = _toolkit(line)
    if toolkit is None:
        return
    compiled = [s for s in stage.instructions if s.word == "RUN" and _compiles(s)]
    installs = [i for i in all_installs(line) if i.name == "torch"]
    if not compiled or not installs:
        return
    cuda, how = _torch_cuda(installs[-1], known)
    if cuda is None or cuda.major == toolkit.major:
        return
    unpinned = "" if installs[-1].pinned else "; torch is not pinned, and is whatever is newest"
    yield _no(
        "image-toolkit-mismatch",
        f"{source}:{compiled[0].line}: the image has nvcc {toolkit}, torch ({how}) was built for CUDA {cuda}: the "
        f"extension does not build, or does not load{unpinned}",
        f"pin torch to a build for CUDA {toolkit.major}, or start from nvidia/cuda:{cuda}.*-devel",
    )


def _compiles(step: Instruction) -> bool:
    return bool(_BUILDS.search(step.text)) or any(i.from_source and i.name in SOURCE_ONLY for i in installs_of(step))


def _toolkit(line: Sequence[Stage]) -> Version | None:
    found = _CUDA_IMAGE.search(line[0].base)
    return Version(found["cuda"]) if found and found["kind"].startswith(("devel", "cudnn")) else None


def _torch_cuda(install: Install, known: Matrix) -> tuple[Version | None, str]:
    """The CUDA of the torch that a command installs, and how that is known."""
    tag = re.search(r"(?:/whl/|\+|--torch-backend[= ])cu(\d+)", f"{install.version} {install.options}")
    if tag is not None:
        return Version(f"{tag[1][:-1]}.{tag[1][-1]}"), f"cu{tag[1]}"
    if re.search(r"/whl/cpu|\+cpu", f"{install.version} {install.options}"):
        return None, "a CPU build"
    builds = [b for b in known.torch if b.channel == "index" and b.cuda is not None]
    if install.pinned:
        try:
            wanted = Version(install.pinned.partition("+")[0])
        except InvalidVersion:
            return None, install.pinned
        mine = [b for b in builds if b.version == wanted]
    else:
        mine = sorted(builds, key=lambda b: b.version)[-1:]
    return (mine[0].cuda, f"{mine[0].version} of the package index") if mine else (None, "not known")


def _moved_torch(line: Sequence[Stage], source: str) -> Iterator[Finding]:
    """A later layer that installs another torch, or lets pip choose one, undoes what was built for the first."""
    seen: Install | None = None
    for install in all_installs(line):
        if install.name == "torch":
            if (
                seen is not None
                and seen.line != install.line
                and (seen.version, seen.options) != (install.version, install.options)
            ):
                yield _no(
                    "image-torch-moved",
                    f"{source}:{install.line}: installs torch {install.version or 'unpinned'} over torch "
                    f"{seen.version or 'unpinned'} of line {seen.line}; what was built for that one no longer loads",
                    "install torch once, and everything else with --no-deps or a constraint on torch",
                )
            seen = install
        elif seen is not None and install.line != seen.line and _may_move(install):
            yield _warn(
                "image-torch-moved",
                f"{source}:{install.line}: upgrading {install.name} may take torch of line {seen.line} along",
                "--no-deps, or -c with torch pinned in the constraints",
            )


def _may_move(install: Install) -> bool:
    upgrades = re.search(r"(^|\s)(-U|--upgrade|--force-reinstall|--upgrade-strategy[= ]eager)\b", install.options)
    held = re.search(r"--no-deps|(^|\s)(-c|--constraint|--require-hashes)\b", install.options)
    return (
        bool(upgrades) and not held and install.name not in {"pip", "setuptools", "wheel", "uv", "packaging", "ninja"}
    )


def _compiler(line: Sequence[Stage], stages: Sequence[Stage], source: str) -> Iterator[Finding]:
    """Whether the image that is run has what Triton compiles with."""
    users = [i for i in all_installs(line) if i.name in _TRITON_USERS and not re.search(r"/whl/cpu|\+cpu", i.options)]
    base = line[0].base
    brings = re.search(r"pytorch/pytorch|nvcr\.io/nvidia/pytorch|databricksruntime/air", base)
    copied = any(
        step.word == "COPY" and re.search(r"--from=\S+.*(site-packages|venv|conda)", step.text)
        for stage in line
        for step in stage.instructions
    )
    elsewhere = copied and any(i.name in _TRITON_USERS for i in all_installs(stages))
    if not users and not brings and not elsewhere:
        return
    have = "yes" if _WITH_COMPILER.search(base) else "no" if _WITHOUT_COMPILER.search(base) else "not known"
    headers = have
    last = 0
    for stage in line:
        for step in stage.instructions:
            if step.word != "RUN":
                continue
            for part in re.split(r"&&|;|\|\|", step.text):
                installs = _SYSTEM.search(part) and re.search(r"\b(install|add)\b", part)
                removes = re.search(r"\b(purge|remove|autoremove|del)\b", part)
                if removes and _COMPILERS.search(part):
                    have, last = "removed", step.line
                elif installs and _COMPILERS.search(part):
                    have = "yes"
                if installs and re.search(r"\bpython3?[\d.]*-dev(el)?\b|\bconda\b|\bmamba\b", part):
                    headers = "yes"
                if re.search(r"\buv\s+(python\s+install|venv|sync)\b|\bpyenv\s+install\b|miniconda|miniforge", part):
                    headers = "yes"
    if re.search(r"(^|/)python:", base) or brings:
        headers = "yes"
    fix = "RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev"
    why = "Triton compiles a launcher for each kernel at run time"
    if have == "removed":
        yield _no(
            "image-no-compiler", f"{source}:{last}: removes the C compiler, and {why}", "leave gcc in the final image"
        )
    elif have == "no":
        yield _no("image-no-compiler", f"{source}: {base} has no C compiler and none is installed; {why}", fix)
    elif have == "not known":
        reason = f"{source}: whether {base} has a C compiler and Python.h is not known; {why}"
        yield Finding(
            code="image-no-compiler",
            status=Status.UNKNOWN,
            reason=reason,
            fix="kernelguard check --image IMAGE, once it is built",
        )
    if have == "yes" and headers == "no":
        yield _no(
            "image-no-python-headers",
            f"{source}: Python comes from the system's packages, and Python.h is not installed; {why}",
            "apt-get install python3-dev",
        )


def _drivers(line: Sequence[Stage], situation: Situation, known: Matrix, source: str) -> Iterator[Finding]:
    base, environment = line[0].base, line[-1].environment
    torch = [i for i in all_installs(line) if i.name == "torch"]
    cuda, how = _torch_cuda(torch[-1], known) if torch else (None, "")
    image = _CUDA_IMAGE.search(base)
    asked = re.search(r"cuda>=(\d+\.\d+)", environment.get("NVIDIA_REQUIRE_CUDA", ""))
    required = Version(asked[1]) if asked else Version(image["cuda"]) if image else None
    driver = situation.driver
    if required is not None and driver is not None and not environment.get("NVIDIA_DISABLE_REQUIRE"):
        newest = supported(driver, known.drivers)
        if newest and newest[-1] < required:
            yield _no(
                "image-driver-too-old",
                f"{source}: driver {driver} supports up to CUDA {newest[-1]}, {base} demands cuda>={required}: the "
                "container does not start (unsatisfied condition)",
                f"a driver >= {known.drivers.toolkit.get(required, 'that of CUDA ' + str(required))}, or an older base",
            )
    yield from driver_finding(cuda, driver, known.drivers, f"{source}: torch ({how})")
    compat = [
        s
        for stage in line
        for s in stage.instructions
        if s.word == "RUN" and re.search(r"\binstall\b.*\bcuda-compat", s.text)
    ]
    first = re.search(r"compat", environment.get("LD_LIBRARY_PATH", ""))
    if compat or first:
        where = (
            f"{source}:{compat[0].line}" if compat else f"{source}: LD_LIBRARY_PATH={environment['LD_LIBRARY_PATH']}"
        )
        yield from compat_finding(where, cuda or required, driver, known.drivers)


def _final_environment(line: Sequence[Stage], source: str) -> Iterator[Finding]:
    environment = line[-1].environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in {"", "-1", '""'}:
        reason = (
            f"{source}: ENV CUDA_VISIBLE_DEVICES={visible!r} stays in the image: torch sees no GPU in its containers"
        )
        yield _no("image-hides-gpus", reason, "set it only in the RUN that needs it: RUN CUDA_VISIBLE_DEVICES= pip ...")
    if environment.get("NVIDIA_VISIBLE_DEVICES", "all") in {"void", "none", ""}:
        reason = f"{source}: ENV NVIDIA_VISIBLE_DEVICES={environment['NVIDIA_VISIBLE_DEVICES']}: containers get no GPU"
        yield _no("image-hides-gpus", reason, "ENV NVIDIA_VISIBLE_DEVICES=all")


def _air(line: Sequence[Stage], source: str) -> Iterator[Finding]:
    """What Databricks AI Runtime asks of an image that does not start from one of its own."""
    steps = [s for stage in line for s in stage.instructions]
    environment, base = line[-1].environment, line[0].base
    if "databricksruntime/air" not in base:
        if not any("/databricks/python" in s.text for s in steps):
            yield _no(
                "image-air",
                f"{source}: AI Runtime looks for Python at /databricks/python/bin/python",
                "RUN mkdir -p /databricks/python/bin && ln -sf $(command -v python3) /databricks/python/bin/python",
            )
        if "nvidia/cuda" not in base:
            for name, value in (("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")):
                if name not in environment:
                    yield _no("image-air", f"{source}: AI Runtime needs {name} in the image", f"ENV {name}={value}")
        if re.search(r"ubuntu:?24\.04", base) and environment.get("OPENSSL_FORCE_FIPS_MODE") != "0":
            reason = f"{source}: Ubuntu 24.04 on AI Runtime's kernel needs OPENSSL_FORCE_FIPS_MODE=0"
            yield _warn("image-air", reason, "ENV OPENSSL_FORCE_FIPS_MODE=0")
    workdir = next((s for s in reversed(steps) if s.word == "WORKDIR"), None)
    start = next((s for s in reversed(steps) if s.word in {"CMD", "ENTRYPOINT"}), None)
    if workdir is not None and start is not None and re.search(r"[\s\"'](?!/)[\w./-]+\.(py|sh)\b", start.text):
        reason = f"{source}:{start.line}: AI Runtime ignores WORKDIR {workdir.text}: a relative path is not found"
        yield _warn("image-air", reason, f"name it by its absolute path, below {workdir.text}")


def _no(code: str, reason: str, fix: str) -> Finding:
    return Finding(code=code, status=Status.FAIL, reason=reason, fix=fix)


def _warn(code: str, reason: str, fix: str) -> Finding:
    return Finding(code=code, status=Status.WARN, reason=reason, fix=fix)
