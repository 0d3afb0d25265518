"""An image and its verdict in a real registry, Debian's docker-registry: pushed, found, and not taken on trust."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from command import Command
from engine.test_build import Built, evidence, promote
from engine.world import verdict
from kernelguard.errors import InputError, ToolError, UndeterminedError
from kernelguard.image import labels
from kernelguard.image.engine import Engine
from kernelguard.image.pushing import push
from kernelguard.image.registry import VERDICT, Access, attach, check_reference, find
from kernelguard.image.values import Outcome

PASSWORD = "user:$2b$04$SOKD7aP3xbbOiNYZr14azuOYcvQvDhSfe1CEADejYAecrqni/GZKS\n"
"""The bcrypt of `secret`, as the registry's file has it."""


@contextmanager
def registry(folder: Path, password: str = "") -> Iterator[str]:
    """The name of a registry on this machine that keeps its files in `folder`."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{one.getsockname()[1]}"
    said: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "files")}},
        "http": {"addr": host},
    }
    if password:
        (folder / "passwords").write_text(password)
        said["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "passwords")}}
    (folder / "config.yml").write_text(json.dumps(said))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while _answer(f"http://{host}/v2/") is None:
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield host
    finally:
        server.terminate()
        server.wait()


def _answer(url: str) -> tuple[int, bytes] | None:
    accept = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError:
        return None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all registries here: what one was sent, the next one has, and nobody sends it again."""
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def host(files: Path) -> Iterator[str]:
    with registry(files) as name:
        yield name


def promoted(engine: Engine, built: Built, folder: Path, name: str) -> Outcome:
    return promote(engine, built, evidence(built, folder / "v.json", verdict()), tag=name)


def test_a_verdict_is_attached_and_found_again(engine: Engine, built: Built, host: str, tmp_path: Path) -> None:
    name = f"{host}/team/train:v1"
    made = promoted(engine, built, tmp_path, name)
    pushed = push(engine, made, {}).pushed
    assert pushed is not None
    assert made.verdict is not None
    assert made.facts is not None
    stored = made.verdict.read_bytes()

    # What the registry holds, asked without any of our code.
    digest = pushed.image.partition("@")[2]
    raw = _answer(f"http://{host}/v2/team/train/manifests/{pushed.artifact.partition('@')[2]}")
    assert raw is not None
    artifact = json.loads(raw[1])
    assert (artifact["artifactType"], artifact["subject"]["digest"]) == (VERDICT, digest)
    assert artifact["annotations"]["io.kernelguard.content-sha256"] == made.facts.content
    blob = _answer(f"http://{host}/v2/team/train/blobs/{artifact['layers'][0]['digest']}")
    assert blob == (200, stored)
    # This registry has no referrers API, so the list is where the specification wants it.
    assert _answer(f"http://{host}/v2/team/train/referrers/{digest}") == (404, b"")
    listed = _answer(f"http://{host}/v2/team/train/manifests/{digest.replace(':', '-')}")
    assert listed is not None
    assert [row["digest"] for row in json.loads(listed[1])["manifests"]] == [pushed.artifact.partition("@")[2]]

    for reference in (name, pushed.image):
        got = Command("verdict", reference, "-o", tmp_path / "got.json")
        assert got.code == 0, got.err
        assert (tmp_path / "got.json").read_bytes() == stored

    # Sent again, nothing is listed twice. Pulled elsewhere, it still is what was verified.
    assert push(engine, made, {}).pushed == pushed
    again = _answer(f"http://{host}/v2/team/train/manifests/{digest.replace(':', '-')}")
    assert again == listed
    engine.remove(name)
    assert engine.image(name) is None
    subprocess.run(["docker", "pull", "-q", name], check=True, capture_output=True)
    back = engine.image(name)
    assert back is not None
    claims = labels.read_labels(back.labels)
    assert claims is not None
    assert claims.content == back.content == made.facts.content
    engine.remove(name)
    engine.remove(pushed.image)


@contextmanager
def with_referrers(host: str) -> Iterator[str]:
    """The same registry with the referrers API of OCI 1.1 before it, which Debian's does not have yet."""
    known: list[dict[str, Any]] = []

    class Before(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            subject = json.loads(body).get("subject") if self.command == "PUT" and "/manifests/" in self.path else None
            if "/referrers/" in self.path:
                mine = [row for row in known if row["subject"] == self.path.rpartition("/")[2]]
                self.say(200, {}, json.dumps({"schemaVersion": 2, "manifests": mine}).encode())
                return
            kept = {n: v for n, v in self.headers.items() if n in {"Accept", "Content-Type"}}
            asked = urllib.request.Request(f"http://{host}{self.path}", body or None, kept, method=self.command)
            try:
                with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310
                    headers, status, said = dict(answer.headers), answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    headers, status, said = dict(error.headers), error.code, error.read()
            if subject:
                headers["OCI-Subject"] = subject["digest"]
                digest, kind = self.path.rpartition("/")[2], json.loads(body)["artifactType"]
                known.append({"digest": digest, "artifactType": kind, "subject": subject["digest"]})
            self.say(status, headers, said)

        do_GET = do_PUT = do_POST = do_HEAD = handle_one  # noqa: N815

        def say(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {"content-length", "connection", "date", "transfer-encoding"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Before) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_registry_with_the_referrers_api_keeps_the_list_itself(
    engine: Engine, built: Built, host: str, tmp_path: Path
) -> None:
    name = f"{host}/team/train:api"
    made = promoted(engine, built, tmp_path, name)
    digest = engine.push(name)
    assert made.verdict is not None
    body = made.verdict.read_bytes()
    with with_referrers(host) as before:
        there = name.replace(host, before)
        attach(there, digest, body, content="", created="2026-11-29T00:00:00+00:00", access=Access())
        assert find(there, Access()) == body
    assert _answer(f"http://{host}/v2/team/train/manifests/{digest.replace(':', '-')}") == (404, b"")
    engine.remove(name)


def test_another_verdict_than_the_labels_name_is_not_given(
    engine: Engine, built: Built, host: str, tmp_path: Path
) -> None:
    name = f"{host}/team/train:other"
    made = promoted(engine, built, tmp_path, name)
    assert made.verdict is not None
    engine.push(name)
    with pytest.raises(UndeterminedError, match="nothing that is attached"):
        find(name, Access())
    made.verdict.write_bytes(made.verdict.read_bytes().replace(b"580.95.05", b"580.95.06"))
    push(engine, made, {})
    with pytest.raises(UndeterminedError, match="nothing that is attached"):
        find(name, Access())
    engine.remove(name)


def test_a_registry_that_gives_other_bytes_is_noticed(
    engine: Engine, built: Built, host: str, files: Path, tmp_path: Path
) -> None:
    name = f"{host}/team/train:bytes"
    made = promoted(engine, built, tmp_path, name)
    push(engine, made, {})
    assert made.verdict is not None
    assert find(name, Access()) == made.verdict.read_bytes()
    (file,) = (f for f in files.rglob("data") if f.read_bytes() == made.verdict.read_bytes())
    kept = file.read_bytes()
    file.write_bytes(kept.replace(b"right", b"wrong"))
    with pytest.raises(ToolError, match="with other bytes"):
        find(name, Access())
    file.write_bytes(kept)
    engine.remove(name)


def test_a_registry_that_asks_for_a_password(
    engine: Engine, built: Built, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry(files, PASSWORD) as host:
        name = f"{host}/team/train:secret"
        made = promoted(engine, built, tmp_path, name)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "nobody"))
        with pytest.raises(ToolError, match="does not let this user push") as raised:
            push(engine, made, os.environ)
        assert f"docker login {host}" in str(raised.value.hint)
        assert engine.image(name) is not None, "it was promoted all the same"
        with pytest.raises(ToolError, match="does not let this user in"):
            find(name, Access())
        (tmp_path / "config.json").write_text(
            json.dumps({"auths": {host: {"auth": b64encode(b"user:secret").decode()}}})
        )
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        # The SDK reads passwords when it connects.
        engine._client.api.reload_config()
        assert push(engine, made, os.environ).pushed is not None
        got = Command("verdict", name)
        assert made.verdict is not None
        assert (got.code, got.out.encode()) == (0, made.verdict.read_bytes()), got.err
        engine.remove(name)


def test_nobody_answers(engine: Engine, built: Built, tmp_path: Path) -> None:
    name = "127.0.0.1:9/train:v1"
    made = promoted(engine, built, tmp_path, name)
    with pytest.raises(UndeterminedError, match="cannot be reached"):
        push(engine, made, {})
    assert Command("verdict", name).code == 3
    engine.remove(name)


def test_what_is_not_there(host: str) -> None:
    with pytest.raises(InputError, match="the registry has no"):
        find(f"{host}/nothing:v1", Access())


@pytest.mark.parametrize("name", ["train:v1", "team/train:v1"])
def test_a_name_without_a_registry_is_refused_before_anything_is_built(name: str) -> None:
    with pytest.raises(InputError, match="names no registry"):
        check_reference(name)
    check_reference(f"localhost/{name}")
