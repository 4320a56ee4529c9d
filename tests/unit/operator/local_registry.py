# SPDX-License-Identifier: GPL-3.0-or-later
"""A real registry of images on loopback: Debian's docker-registry, unpacked beside the system."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import shutil
import subprocess
import time
import typing as t
from pathlib import Path

from ports import free_port

from lab.paths import cache_root, made_once

PACKAGE = "docker-registry"
START = 20.0
ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)


def program() -> Path:
    """The registry's program.

    :raises LookupError: apt can't load it here.
    """
    folder = cache_root() / PACKAGE
    with made_once(folder) as fresh:
        if fresh:
            if shutil.which("apt-get") is None:
                raise LookupError("there is no apt-get")
            done = subprocess.run(
                ["apt-get", "download", PACKAGE], cwd=fresh, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise LookupError(f"apt-get download: {done.stderr.strip()}")
            [archive] = fresh.glob("*.deb")
            subprocess.run(["dpkg", "-x", archive, fresh], check=True)
            archive.unlink()
    return folder / "usr" / "bin" / PACKAGE


class Registry:
    """A registry that runs.

    :ivar host: its name in references of images; engines take http for it, as it is of loopback.
    """

    def __init__(self, port: int) -> None:
        self.host = f"127.0.0.1:{port}"
        self.port = port

    def get(self, path: str) -> tuple[int, bytes]:
        """Ask for a path below /v2/."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", f"/v2/{path}", headers={"Accept": ACCEPT})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def manifest(self, image: str) -> dict[str, t.Any]:
        """Return the manifest of an image that is named by its digest, which has to be that of the content."""
        name, _at, digest = image.partition("@")
        status, content = self.get(f"{name.removeprefix(f'{self.host}/')}/manifests/{digest}")
        assert status == 200, (image, status, content)
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == digest
        return dict(json.loads(content))


@contextlib.contextmanager
def running(folder: Path) -> t.Iterator[Registry]:
    """Run an empty registry whose data is in a folder.

    :raises LookupError: as ``program``.
    """
    binary, port = program(), free_port()
    settings = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, "serve", folder / "config.yml"], stdout=log, stderr=subprocess.STDOUT)
        try:
            registry, end = Registry(port), time.monotonic() + START
            while True:
                with contextlib.suppress(OSError):
                    if registry.get("")[0] == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the registry doesn't start: {(folder / 'log').read_text()[-1000:]}")
                time.sleep(0.05)
            yield registry
        finally:
            process.terminate()
            process.wait(10)
