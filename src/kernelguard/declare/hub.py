"""Where is the config.json of a hub id? The only place of this room that talks to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from kernelguard.errors import InputError, UndeterminedError

TIMEOUT_S = 20


def fetch_config(model: str) -> tuple[Path, Path]:
    """Downloads (or finds in the hub's own cache) the config.json of `org/name` or `org/name@revision`.

    Offline mode, the cache folder and a stored token are huggingface_hub's own settings; a token is never shown.

    Raises:
        InputError: The repository, the revision or the file does not exist.
        UndeterminedError: The hub cannot be asked from here, or does not let us in.
    """
    name, _, revision = model.partition("@")
    at = f" at revision {revision}" if revision else ""
    try:
        file = huggingface_hub.hf_hub_download(name, "config.json", revision=revision or None, etag_timeout=TIMEOUT_S)
    except errors.GatedRepoError as error:
        raise UndeterminedError(
            f"{name} is gated, and the hub does not let this machine in.",
            hint=f"accept the terms at https://huggingface.co/{name}, then run: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{name} has no revision {revision}.", hint=f"give {name}@main, or a commit hash") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"The hub knows no model {name} (or it is private and no token is stored).",
            hint="check the spelling; for a private model run: hf auth login",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name, at) from error
    except errors.EntryNotFoundError as error:
        raise InputError(f"{name}{at} has no config.json.", hint="give a repository of a transformers model") from error
    except errors.HFValidationError as error:
        raise InputError(f"{name} is not a hub id.", hint="a hub id looks like Qwen/Qwen3-0.6B") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise UndeterminedError(
            f"The hub answered with status {status} when asked for {name}.",
            hint="try again later, or give a local config.json",
        ) from error
    except OSError as error:  # connection errors of every HTTP library derive from it, as do full disks
        raise _unreachable(name, at) from error
    except Exception as error:
        # httpx's errors derive from neither OSError nor anything of huggingface_hub's; by name, since it is not ours.
        if type(error).__module__.split(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2", "requests"}:
            raise _unreachable(name, at) from error
        raise
    path = Path(file)
    return path, path.parent


def _unreachable(name: str, at: str) -> UndeterminedError:
    return UndeterminedError(
        f"The config.json of {name}{at} is not in the local hub cache, and the hub cannot be reached from here.",
        hint=f"where there is a network run: hf download {name} config.json --local-dir model; then give that folder",
    )
