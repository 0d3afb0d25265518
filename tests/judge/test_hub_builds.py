"""Kernels of the hub that certainly cannot be loaded, and everything beside them, about which nothing is said."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kernelguard.judge.hub_builds import no_build, offline_problem
from kernelguard.observe.values import Distribution, Environment, Gpu

FLASH = "kernels-community/flash-attn2"
FA3 = "kernels-community/vllm-flash-attn3"


def machine(
    torch: str | None = "2.13.0", gpu: tuple[int, int] | None = (9, 0), kernels: str | None = None, **variables: str
) -> Environment:
    found = {} if kernels is None else {"kernels": Distribution(name="kernels", version=kernels, location="")}
    return Environment(
        origin="target",
        live=False,
        torch=None if torch is None else Version(torch),
        gpus=(Gpu(name="GPU", capability=gpu),),
        distributions=found,
        variables=variables,
    )


@pytest.mark.parametrize(
    ("asked", "transformers", "environment", "lost"),
    [
        # Which version a release asks for by itself: the first one up to 5.15, the third from 5.16 on.
        (FLASH, "5.15.0", machine(), True),
        (FLASH, "5.15.0", machine("2.12.1"), False),
        (FLASH, "5.16.0", machine(), False),
        (FLASH, "5.12.0", machine(), False),
        (f"{FLASH}@v1", "5.24.0", machine(), True),
        (f"{FLASH}@v1", "5.24.0", machine("2.13.0+cu130"), True),
        (f"{FLASH}@v1", "5.24.0", machine(None), False),
        (f"{FLASH}@v2", "5.24.0", machine("2.10.0"), True),
        (f"{FLASH}@v3", "5.24.0", machine("2.8.0"), True),
        (f"{FLASH}@v3:flash_attn_varlen_func", "5.24.0", machine(), False),
        (f"{FLASH}@main", "5.24.0", machine(), False),
        ("org/other@v1", "5.24.0", machine(), False),
        (FA3, "5.24.0", machine(gpu=(10, 0)), True),
        (FA3, "5.24.0", machine(gpu=(8, 6)), False),
        (FA3, "5.24.0", machine(gpu=None), False),
        ("not a name", "5.24.0", machine(), False),
    ],
)
def test_builds(asked: str, transformers: str, environment: Environment, lost: bool) -> None:
    found = no_build(asked, Version(transformers), environment)
    assert (found is not None) is lost
    if found is not None:
        assert asked.partition("@")[0] in found.reason
        assert found.fix


@pytest.mark.parametrize(
    ("environment", "away"),
    [
        (machine(kernels="0.12.3", HF_HUB_OFFLINE="1"), True),
        (machine(kernels="0.17.2", TRANSFORMERS_OFFLINE="yes"), True),
        (machine(kernels="0.17.2", HF_HUB_OFFLINE="0"), False),
        (machine(kernels="0.17.2"), False),
        (machine(kernels="0.18.2", HF_HUB_OFFLINE="1"), False),
        (machine(HF_HUB_OFFLINE="1"), False),
        (machine(kernels="unknown", HF_HUB_OFFLINE="1"), False),
        (machine(kernels="0.17.2", HF_HUB_OFFLINE="1", LOCAL_KERNELS=f"{FLASH}=/kernels/flash"), False),
        (machine(kernels="0.17.2", HF_HUB_OFFLINE="1", LOCAL_KERNELS="org/other=/kernels"), True),
    ],
)
def test_offline(environment: Environment, away: bool) -> None:
    assert bool(offline_problem(environment, FLASH)) is away
