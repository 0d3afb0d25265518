"""A package index of tiny but real wheels on 127.0.0.1, to lock and to install from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from kernelguard.declare.values import Intent
from kernelguard.lock import Places, Subject, make_lock
from kernelguard.lock.compile import Engine
from kernelguard.lock.values import Lock
from kernelguard.observe.targets import target
from kernelguard.resolve import Market, Options, matrix, resolve
from kernelguard.resolve.market import gather, sources_for
from kernelguard.resolve.values import Need, Provider, Resolution
from kernelguard.sources.http import Http
from kernelguard.sources.hub import Hub
from kernelguard.sources.pipconfig import PipConfig
from resolve.cases import declaration
from sources.servers import Site, site, wheel

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tools"
FLA = (Need(package="fla", symbols=("chunk_gated_delta_rule",), providers=(Provider(distribution="fla-core"),)),)
CPU = "cpu,torch=2.13.0,python=3.11"
OFFICIAL = "causal_conv1d-1.7.0+cu13torch2.13cxx11abiTRUE-cp311-cp311-linux_{machine}.whl"


@dataclass(slots=True, kw_only=True)
class World:
    site: Site
    tmp: Path

    @property
    def config(self) -> PipConfig:
        return PipConfig(index_url=f"{self.site.url}/simple", extra_index_urls=(), find_links=(str(self.wheels),))

    @property
    def wheels(self) -> Path:
        """A folder that pip is configured to look into, where the CPU build of torch lies."""
        return self.tmp / "configured"

    def resolution(
        self,
        spec: str,
        *,
        needs: Sequence[Need] = FLA,
        folders: Sequence[Path] = (),
        indexes: Sequence[str] = (),
        options: Options | None = None,
        market: Market | None = None,
        transformers: str = "",
    ) -> Resolution:
        if market is None:
            sources = sources_for(matrix(), self.config, self.http, folders=folders, indexes=indexes)
            market = gather(needs, matrix(), sources)
        return resolve(
            needs=needs,
            environment=target(spec),
            transformers=Version(transformers) if transformers else None,
            market=market,
            options=options,
        )

    @property
    def http(self) -> Http:
        return Http(timeout=5, attempts=1)

    def lock(
        self,
        spec: str = CPU,
        *,
        engine: Engine | None = None,
        folders: Sequence[Path] = (),
        indexes: Sequence[str] = (),
        hub: Hub | None = None,
        resolution: Resolution | None = None,
        **how: object,
    ) -> Lock:
        if resolution is None:
            resolution = self.resolution(spec, folders=folders, indexes=indexes, **how)  # type: ignore[arg-type]
        declared = declaration()
        return make_lock(
            resolution,
            Subject(
                model=declared.config,
                intent=Intent(assumed=("dtype",)),
                fast_paths=declared.fast_paths,
                transformers=None,
                environment=target(spec),
            ),
            Places(config=self.config, extra_indexes=tuple(indexes), find_links=tuple(folders)),
            cache=CACHE,
            http=self.http,
            hub=hub,
            engine=engine,
        )


def torch_wheels(version: str = "2.13.0") -> Mapping[str, bytes]:
    """The same tiny torch for two machines and two Pythons."""
    found = {}
    for python in ("cp311", "cp312"):
        for machine in ("x86_64", "aarch64"):
            tag = f"{python}-{python}-manylinux_2_28_{machine}"
            files = {"torch/__init__.py": f"__version__ = {version!r}\nMACHINE = {machine!r}\n"}
            found[f"torch-{version}-{tag}.whl"] = wheel(
                "torch", version, files=files, requires=("filelock", "triton==3.7.1 ; extra == 'x'"), tag=tag
            )
    return found


@contextmanager
def world(tmp: Path) -> Iterator[World]:
    with site() as served:
        served.put_index("torch", torch_wheels())
        served.put_index("triton", {"triton-3.7.1-py3-none-any.whl": wheel("triton", "3.7.1")})
        served.put_index("filelock", {"filelock-3.20.0-py3-none-any.whl": wheel("filelock", "3.20.0")})
        served.put_index("einops", {"einops-0.8.1-py3-none-any.whl": wheel("einops", "0.8.1")})
        fla = {
            v: wheel("fla-core", v, files={"fla/__init__.py": f"# {v}\n"}, requires=("einops",))
            for v in ("0.5.2", "0.6.0")
        }
        served.put_index("fla-core", {f"fla_core-{v}-py3-none-any.whl": body for v, body in fla.items()})
        made = World(site=served, tmp=tmp)
        made.wheels.mkdir()
        tag = "cp311-cp311-manylinux_2_28_x86_64"
        cpu = wheel("torch", "2.13.0+cpu", files={"torch/__init__.py": ""}, requires=("filelock",), tag=tag)
        (made.wheels / f"torch-2.13.0+cpu-{tag}.whl").write_bytes(cpu)
        yield made
