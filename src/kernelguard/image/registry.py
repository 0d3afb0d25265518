"""Where is the proof of an image that was pushed? Attached to it in its registry, as an OCI 1.1 artifact.

The artifact's subject is the image's manifest. A registry without the referrers API is given the fallback tag of the
specification, an index named after the subject's digest, so that `oras discover` finds the verdict either way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError, KernelguardError, ToolError, UndeterminedError
from kernelguard.image.labels import PREFIX
from kernelguard.image.values import Attached

VERDICT = "application/vnd.kernelguard.verdict.v1+json"
"""Type of the artifact, and of its one layer."""
_EMPTY = "application/vnd.oci.empty.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_IMAGES = (
    _MANIFEST,
    _INDEX,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONTENT = f"{PREFIX}content-sha256"
_CREATED = "org.opencontainers.image.created"
_TITLE = "org.opencontainers.image.title"
_ASK_S = 60.0
_HUB = "registry-1.docker.io"
"""Where Docker Hub, which everybody writes docker.io, has its registry."""
_REASON = re.compile(r"\[Errno [^\]]*\] [^'\")]+|timed out|certificate verify failed[^)\"]*|WRONG_VERSION_NUMBER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a registry is spoken to."""

    plain_http: bool = False
    """Without TLS, as always on this very machine."""
    config: str = ""
    """Docker's configuration folder, when it is not the usual one: it holds the passwords."""


def attach(image: str, digest: str, verdict: bytes, *, content: str, created: str, access: Access) -> Attached:
    """Attach a verdict to an image that its registry has.

    `digest` is that of the image's manifest, `content` the content identity that the verdict is about.

    Raises:
        ToolError: the registry does not take it.
        UndeterminedError: it does not answer, or the client is not installed.
    """
    registry = _Registry(image, access)
    body, kind = registry.manifest(digest)
    config = registry.upload(b"{}", _EMPTY)
    layer = {**registry.upload(verdict, VERDICT), "annotations": {_TITLE: "verdict.json"}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "artifactType": VERDICT,
        "config": config,
        "layers": [layer],
        "subject": {"mediaType": kind, "digest": digest, "size": len(body)},
        "annotations": {_CREATED: created, _CONTENT: content},
    }
    artifact = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    name = _sha256(artifact)
    answer = registry.put(name, artifact, _MANIFEST)
    if "OCI-Subject" not in answer:
        # It did not understand `subject`: the specification has the client keep the list.
        registry.refer(
            digest,
            {
                "mediaType": _MANIFEST,
                "digest": name,
                "size": len(artifact),
                "artifactType": VERDICT,
                "annotations": manifest["annotations"],
            },
        )
    return Attached(image=f"{registry.repository}@{digest}", artifact=f"{registry.repository}@{name}")


def check_reference(image: str) -> None:
    """Find out before anything is made or asked whether a name holds a registry.

    Raises:
        InputError: it does not; engines would take it for one on Docker Hub.
    """
    head, slash, _ = image.partition("/")
    if not slash or not ({".", ":"} & set(head) or head == "localhost"):
        raise InputError(f"{image} names no registry", hint="registry.example/team/train:v1; Docker Hub's is docker.io")


def find(image: str, access: Access) -> bytes:
    """The bytes of the verdict that an image in a registry names in its labels.

    Raises:
        InputError: there is no such image, or it names no verdict.
        UndeterminedError: the registry does not answer, or has no such verdict for this image.
    """
    check_reference(image)
    registry = _Registry(image, access)
    body, _ = registry.manifest(registry.reference)
    digest = _sha256(body)
    wanted = _claimed(registry, json.loads(body), image)
    for row in registry.referrers(digest):
        layers = json.loads(registry.manifest(str(row["digest"]))[0]).get("layers") or ()
        if any(layer["digest"] == wanted for layer in layers):
            return registry.blob(wanted)
    raise UndeterminedError(
        f"{image} names the verdict {wanted}, and nothing that is attached to it in its registry is that",
        hint="kernelguard promote IMAGE --verdict FILE --push attaches it",
    )


def _claimed(registry: _Registry, manifest: Mapping[str, Any], image: str) -> str:
    """The digest of the verdict that the labels of an image name."""
    if "manifests" in manifest:
        # Built with attestations: an index of one image and what was attested of it.
        rows = [m for m in manifest["manifests"] if (m.get("platform") or {}).get("os") != "unknown"]
        if len(rows) != 1:
            raise InputError(f"{image} is an index of {len(rows)} images", hint="name one of them by its digest")
        manifest = json.loads(registry.manifest(rows[0]["digest"])[0])
    config = json.loads(registry.blob(str(manifest["config"]["digest"])))
    found = ((config.get("config") or {}).get("Labels") or {}).get(f"{PREFIX}verdict-sha256", "")
    if not found:
        raise InputError(f"{image} names no verdict: it was not built by `kernelguard build`", hint="kernelguard build")
    return str(found)


class _Registry:
    """One repository of a registry, through oras."""

    def __init__(self, image: str, access: Access) -> None:
        try:
            import oras.container  # noqa: PLC0415
            import oras.logger  # noqa: PLC0415
            import oras.provider  # noqa: PLC0415
        except ImportError as error:
            raise UndeterminedError(
                "oras is not installed, so nothing can be attached to an image in a registry",
                hint="pip install 'kernelguard-preflight[image]'",
            ) from error
        oras.logger.setup_logger(quiet=True)
        self._image = image
        try:
            self._place = oras.container.Container(image)
        except ValueError as error:
            raise InputError(f"{image} is no image in a registry", hint="registry/name:tag") from error
        if self._place.registry in {"docker.io", "index.docker.io"}:
            self._place.registry = _HUB
        # As every engine has it: what is on this very machine needs no TLS.
        local = re.match(r"(localhost|127\.[\d.]+)(:|$)", self._place.registry) is not None
        self._scheme = "http" if access.plain_http or local else "https"

        class Client(oras.provider.Registry):  # type: ignore[misc]
            """Asks once: its own five tries take two minutes to say that nobody is there."""

            do_request = oras.provider.Registry.do_request.__wrapped__

        how = {"hostname": self._place.registry, "insecure": self._scheme == "http"}
        way = self._authentication()
        self._client = Client(auth_backend=way, **how)
        # It looks at the usual place by itself.
        folders = [str(Path(access.config, "config.json"))] if access.config else None
        self._client.auth.load_configs(self._place, configs=folders)
        if way == "basic" and not getattr(self._client.auth, "_basic_auth", None):
            raise self._denied("it asks for a password, and none is stored")

    @property
    def repository(self) -> str:
        """With the registry's name."""
        return f"{self._place.registry}/{self._place.api_prefix}"

    @property
    def reference(self) -> str:
        """The tag or digest that was named."""
        return str(self._place.digest or self._place.tag)

    def _authentication(self) -> str:
        """Which of oras's ways: registries with a password file know no tokens."""
        import requests  # noqa: PLC0415

        try:
            told = requests.get(f"{self._scheme}://{self._place.registry}/v2/", timeout=_ASK_S)
        except requests.RequestException as error:
            raise self._silent(error) from error
        return "basic" if told.headers.get("WWW-Authenticate", "").lower().startswith("basic") else "token"

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Bytes and media type of a manifest."""
        answer = self._ask("GET", f"manifests/{reference}", accept=_IMAGES)
        if answer.status_code == 404:
            raise InputError(f"the registry has no {self.repository} {reference}", hint="docker push it first")
        body = self._good(answer).content
        if reference.startswith("sha256:") and _sha256(body) != reference:
            raise ToolError(f"the registry of {self._image} answered {reference} with other bytes", hint="ask again")
        return body, answer.headers.get("Content-Type", _MANIFEST).partition(";")[0]

    def blob(self, digest: str) -> bytes:
        """A blob, held against its digest."""
        body: bytes = self._good(self._ask("GET", f"blobs/{digest}")).content
        if _sha256(body) != digest:
            raise ToolError(f"the registry of {self._image} answered {digest} with other bytes", hint="ask again")
        return body

    def upload(self, body: bytes, kind: str) -> dict[str, Any]:
        """Put a blob there; its descriptor."""
        row = {"mediaType": kind, "digest": _sha256(body), "size": len(body)}
        with tempfile.TemporaryDirectory(prefix="kernelguard-") as folder:
            file = Path(folder, "blob")
            file.write_bytes(body)
            with self._errors():
                self._good(self._client.upload_blob(str(file), self._place, row))
        return row

    def put(self, reference: str, body: bytes, kind: str) -> Mapping[str, str]:
        """Put a manifest there; the headers of the answer."""
        headers: Mapping[str, str] = self._good(self._ask("PUT", f"manifests/{reference}", body, kind=kind)).headers
        return headers

    def referrers(self, subject: str) -> Sequence[Mapping[str, Any]]:
        """What is attached to a manifest and is a verdict, newest first."""
        answer = self._ask("GET", f"referrers/{subject}", accept=(_INDEX,))
        if answer.status_code == 404:
            answer = self._ask("GET", f"manifests/{_fallback(subject)}", accept=(_INDEX,))
        rows = [] if answer.status_code == 404 else json.loads(self._good(answer).content).get("manifests") or []
        mine = [row for row in rows if row.get("artifactType") == VERDICT]
        return sorted(mine, key=lambda row: str((row.get("annotations") or {}).get(_CREATED, "")), reverse=True)

    def refer(self, subject: str, row: Mapping[str, Any]) -> None:
        """Add an artifact to the list that stands in for the referrers API."""
        answer = self._ask("GET", f"manifests/{_fallback(subject)}", accept=(_INDEX,))
        known = [] if answer.status_code == 404 else json.loads(self._good(answer).content).get("manifests") or []
        rows = [*(one for one in known if one["digest"] != row["digest"]), row]
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": rows}
        self.put(_fallback(subject), json.dumps(index).encode(), _INDEX)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, *, kind: str = "", accept: Sequence[str] = ()
    ) -> Any:
        headers = {**({"Content-Type": kind} if kind else {}), **({"Accept": ", ".join(accept)} if accept else {})}
        url = f"{self._scheme}://{self._place.registry}/v2/{self._place.api_prefix}/{path}"
        with self._errors():
            return self._client.do_request(url, method, data=body, headers=headers)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What oras and requests raise, in our words."""
        import requests  # noqa: PLC0415
        from oras.auth import AuthenticationException  # noqa: PLC0415

        try:
            yield
        except requests.RequestException as error:
            raise self._silent(error) from error
        except (AuthenticationException, ValueError) as error:
            raise self._denied(str(error)) from error

    def _good(self, answer: Any) -> Any:
        """The answer, if it is one."""
        if answer.status_code in {401, 403}:
            raise self._denied(f"{answer.status_code} {answer.reason}")
        if not answer.ok:
            raise ToolError(
                f"the registry of {self._image} answered {answer.status_code}: {answer.text.strip()[:300]}",
                hint="docker push still works? then the registry takes no artifacts",
            )
        return answer

    def _denied(self, why: str) -> KernelguardError:
        """It wants to know who asks."""
        return ToolError(
            f"the registry of {self._image} does not let this user in: {why}",
            hint=f"docker login {self._place.registry}",
        )

    def _silent(self, error: Exception) -> KernelguardError:
        # The reason stands at the end of three wrappings.
        found = _REASON.search(str(error))
        hint = "check the name, and the network"
        if self._scheme == "https" and "SSL" in str(error):
            hint = "does it speak TLS? then trust its certificate: REQUESTS_CA_BUNDLE; else --plain-http"
        return UndeterminedError(
            f"the registry of {self._image} does not answer: {found[0] if found else error}", hint=hint
        )


def _fallback(subject: str) -> str:
    """The tag of the specification's stand-in for the referrers API."""
    return re.sub(r"[^\w.-]", "-", subject)[:128]


def _sha256(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"
