"""Which rank is this process, of how many, on which node, and where do the ranks meet?

Read from the variables that torchrun, accelerate and the launchers of clusters set.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass


class PlaceError(ValueError):
    """The variables that name this rank are missing or make no sense; the message names them."""


@dataclass(frozen=True)
class Place:
    """One rank's place in its group."""

    rank: int
    world: int
    local_rank: int
    node: int
    """Number of the node."""
    host: str
    address: str = ""
    """Where the ranks meet; empty for a group of one."""
    port: int = 0
    agent_store: bool = False
    """The launcher's agent serves the store already (torchrun); otherwise rank 0 does."""
    attempt: str = "0"
    """Which start of this group it is: what an earlier one left in the agent's store must not be read."""

    @property
    def hosts_store(self) -> bool:
        """This rank has to serve the store."""
        return self.rank == 0 and not self.agent_store


def read_place(environ: Mapping[str, str]) -> Place:
    """The place of the process that has these variables; without any of them it is alone.

    Raises:
        PlaceError: a variable is missing or is no number.
    """
    host = socket.gethostname()
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Place(rank=0, world=1, local_rank=0, node=0, host=host)
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise PlaceError(f"RANK={rank} is no rank of a group with WORLD_SIZE={world}")
    local_world = _number(environ, "LOCAL_WORLD_SIZE", "1")
    local_rank = _number(environ, "LOCAL_RANK", str(rank % max(local_world, 1)))
    node = _number(environ, "GROUP_RANK", str(rank // max(local_world, 1)))
    address, port = environ.get("MASTER_ADDR", ""), 0
    if world > 1:
        if not address:
            raise PlaceError(f"MASTER_ADDR is not set, so {world} ranks have no place to meet")
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise PlaceError(f"MASTER_PORT={port} is no port")
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    return Place(
        rank=rank,
        world=world,
        local_rank=local_rank,
        node=node,
        host=host,
        address=address,
        port=port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=f"{run}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def visible_device(environ: Mapping[str, str], local_rank: int) -> str:
    """`CUDA_VISIBLE_DEVICES` with which a process sees only this rank's GPU, as device 0."""
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return str(local_rank)
    return visible[local_rank] if local_rank < len(visible) else visible[0]


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not text:
        raise PlaceError(f"{name} is not set")
    try:
        return int(text)
    except ValueError as error:
        raise PlaceError(f"{name}={text!r} is no number") from error
