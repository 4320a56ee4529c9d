# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian's skopeo, unpacked beside the system, and real registries that ask for a password by TLS."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import ssl
import subprocess
import time
import typing as t
import urllib.error
import urllib.request
from pathlib import Path

import local_registry
from ports import free_port

from lab.paths import cache_root, made_once

PACKAGES = ("skopeo", "libgpgme11", "libassuan0", "libdevmapper1.02.1")
START = 20.0
# A public test vector of bcrypt: the name is the tests', the password is that of the vector.
USER, PASSWORD = "pusher", "U*U"
HASHED = "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"


def program() -> str:
    """Path of a script that runs skopeo with its libraries.

    :raises LookupError: apt can't load it here.
    """
    folder = cache_root() / "skopeo"
    with made_once(folder) as fresh:
        if fresh:
            if shutil.which("apt-get") is None:
                raise LookupError("there is no apt-get")
            done = subprocess.run(
                ["apt-get", "download", *PACKAGES], cwd=fresh, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise LookupError(f"apt-get download: {done.stderr.strip()}")
            for archive in fresh.glob("*.deb"):
                subprocess.run(["dpkg", "-x", archive, fresh / "root"], check=True)
                archive.unlink()
            script = fresh / "skopeo"
            script.write_text(
                '#!/bin/sh\nroot="$(dirname "$0")/root"\n'
                'LD_LIBRARY_PATH="$(echo "$root"/usr/lib/*-linux-gnu):$(echo "$root"/lib/*-linux-gnu)" '
                'exec "$root/usr/bin/skopeo" "$@"\n'
            )
            script.chmod(0o755)
    return str(folder / "skopeo")


class Registry(t.NamedTuple):
    """A registry that runs.

    :ivar host: its name in references.
    :ivar authority: path of the certificate of its authority.
    :ivar auth_file: path of the credentials.
    :ivar data: its folder.
    """

    host: str
    authority: str
    auth_file: str
    data: Path

    def manifest(self, repository: str, reference: str) -> bytes:
        """The manifest, or nothing where there is none."""
        token = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        headers = {"Authorization": f"Basic {token}", "Accept": local_registry.ACCEPT}
        asked = urllib.request.Request(f"https://{self.host}/v2/{repository}/manifests/{reference}", headers=headers)
        context = ssl.create_default_context(cafile=self.authority)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            with urllib.request.urlopen(asked, timeout=10, context=context) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            assert error.code == 404, error
            return b""


def certificates(folder: Path, address: str) -> tuple[Path, Path, Path]:
    """An authority, as people make them: without key usage; and a key and a certificate of an address by it."""
    paths = {name: folder / name for name in ("ca.key", "ca.pem", "tls.key", "tls.csr", "tls.pem", "ext")}
    paths["ext"].write_text(f"subjectAltName=IP:{address}\n")
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    signed = ["openssl", "x509", "-req", "-days", "2", "-CAcreateserial", "-extfile", paths["ext"]]
    for command in (
        [*new, "-x509", "-keyout", paths["ca.key"], "-out", paths["ca.pem"], "-subj", "/CN=tests"],
        [*new, "-keyout", paths["tls.key"], "-out", paths["tls.csr"], "-subj", "/CN=registry"],
        [*signed, "-in", paths["tls.csr"], "-CA", paths["ca.pem"], "-CAkey", paths["ca.key"], "-out", paths["tls.pem"]],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return paths["ca.pem"], paths["tls.key"], paths["tls.pem"]


@contextlib.contextmanager
def registry(folder: Path, address: str = "127.0.0.1", within: t.Sequence[str] = ()) -> t.Iterator[Registry]:
    """Run an empty registry with TLS, an authority of its own, and a password.

    :param address: where it listens.
    :param within: the beginning of a command that runs the rest where that address is.
    :raises LookupError: as ``local_registry.program``.
    """
    binary, port = local_registry.program(), free_port()
    folder.mkdir(parents=True)
    authority, key, certificate = certificates(folder, address)
    (folder / "htpasswd").write_text(f"{USER}:{HASHED}\n")
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    host = f"{address}:{port}"
    (folder / "auth.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    settings = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "auth": {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}},
        "http": {"addr": host, "tls": {"certificate": str(certificate), "key": str(key)}},
    }
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        command = [*within, binary, "serve", folder / "config.yml"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        made = Registry(host, str(authority), str(folder / "auth.json"), folder / "data")
        end = time.monotonic() + START
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError):
                    if made.manifest("none", "none") == b"":
                        break
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the registry doesn't start: {(folder / 'log').read_text()[-1000:]}")
                time.sleep(0.05)
            yield made
        finally:
            process.terminate()
            process.wait(10)
