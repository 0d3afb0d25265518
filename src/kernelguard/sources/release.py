"""Is the asset that a release workflow planned really there?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernelguard.errors import UndeterminedError
from kernelguard.sources.http import Http, MissingError


class Presence(StrEnum):
    """What asking for an asset came to."""

    PRESENT = "present"
    ABSENT = "absent"
    UNVERIFIED = "unverified"
    """The server could not be asked; nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """The answer about one URL."""

    presence: Presence
    size: int | None = None
    detail: str = ""
    """Why it is unverified."""


def look(url: str, http: Http) -> Asset:
    """Ask for the headers of an asset; never raises."""
    try:
        answer = http.head(url)
    except MissingError:
        return Asset(presence=Presence.ABSENT)
    except UndeterminedError as error:
        return Asset(presence=Presence.UNVERIFIED, detail=error.message)
    size = answer.headers.get("content-length", "")
    if answer.content_type == "text/html":
        # A login or error page that answers 200 proves nothing about the asset.
        return Asset(presence=Presence.UNVERIFIED, detail=f"{url} answered with an HTML page")
    return Asset(presence=Presence.PRESENT, size=int(size) if size.isdigit() else None)
