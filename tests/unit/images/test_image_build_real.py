# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds of the servers' image without a network, by Docker, podman and buildah, and what each has to give.

Needs the lab's Debian, which `make lab-up` leaves in its cache; podman and buildah come from Debian's archive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import container_tools
import private_dockerd
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._images import build as subject
from ansible_collections.kubegpu.share.plugins.module_utils._images import engine as images_engine
from ansible_collections.kubegpu.share.plugins.module_utils._images import sources as images_sources

from lab import images, rootfs
from lab.paths import cache_root

BASE = sorted((cache_root() / "rootfs").glob("base-*/rootfs.tar"))
REFERENCE = "localhost/kubegpu/gpushare:1.1.0"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not BASE, reason=f"{rootfs.__name__} has made no base on this machine yet"),
]


def collection_with_wheels(folder: Path, python: str) -> Path:
    """Unpack the sources, with the wheels that pip would download."""
    images_sources.pack(str(folder / "own.tar"))
    subprocess.run(["tar", "-xf", folder / "own.tar", "-C", folder], check=True)
    wheels = folder / "images" / "gpushare" / "build" / "wheels"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={wheels}"),
            *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
            *(f"--platform={platform}" for platform in images.platforms(os.uname().machine)),
            *(f"--requirement={file}" for file in images.REQUIREMENTS),
        ],
        check=True,
    )
    return folder


class Engine:
    """An engine with images of its own.

    :param name: docker, podman or buildah.
    """

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self._environment = environment

    def command(self, argv, data=None, environ_update=None):
        """Run a program in the engine's environment, as RealSystem needs it."""
        here = {**self._environment, **(environ_update or {})}
        done = subprocess.run(argv, input=data, capture_output=True, text=True, check=False, env=here)
        return done.returncode, done.stdout, done.stderr

    def do(self, *argv):
        rc, out, err = self.command([self.name, *argv])
        assert rc == 0, err
        return out.strip()

    def make_base(self, folder: Path, reference: str) -> None:
        """Make an image of the lab's Debian."""
        if self.name == "docker":
            self.do("import", str(BASE[-1]), reference)
            return
        folder.mkdir()
        shutil.copy(BASE[-1], folder / "rootfs.tar")
        (folder / "Containerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        self.do("build", f"--tag={reference}", str(folder))

    def run(self, image: str, *argv: str) -> str:
        """Run a program in a container without a network, as a user without rights."""
        if self.name != "buildah":
            return self.do("run", "--rm", "--network=none", "--read-only", "--user=65532", image, *argv)
        container = self.do("from", image)
        return self.do("run", "--user=65532", container, "--", *argv)

    def load(self, archive: str) -> None:
        if self.name == "buildah":
            self.do("pull", f"docker-archive:{archive}")
        else:
            self.do("load", "--input", archive)


@contextlib.contextmanager
def engine_of(name, folder):
    if name == "docker":
        server = private_dockerd.Dockerd(private_dockerd.binary(), ["--storage-driver=overlay2"])
        server.config.write_text("{}")
        try:
            assert server.start() == ""
            yield Engine(name, {**os.environ, "DOCKER_HOST": server.socket, "DOCKER_BUILDKIT": "0"})
        finally:
            server.remove()
        return
    try:
        environment = container_tools.environment(folder)
    except LookupError as error:
        pytest.skip(str(error))
    try:
        yield Engine(name, environment)
    finally:
        container_tools.unmount(folder)


@pytest.mark.parametrize("name", ["docker", "podman", "buildah"])
def test_two_builds_give_the_same_bytes_and_the_image_runs(name, tmp_path):
    with engine_of(name, tmp_path) as engine:
        engine.make_base(tmp_path / "base", "localhost/base:1")
        python = engine.run("localhost/base:1", "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        sources = tmp_path / "sources.tar"
        digest = images_sources.pack(str(sources), collection_with_wheels(tmp_path, python))
        usual = {option: spec.get("default") for option, spec in subject.ARGUMENTS.items()}
        platform = images_engine.MACHINES[os.uname().machine]
        found = []
        for number in (1, 2):
            given = {**usual, "reference": REFERENCE, "engine": name, "platforms": [platform]}
            given |= {"base": "localhost/base:1", "sources": digest, "context": str(sources)}
            given |= {"pip_args": "--no-index --find-links images/gpushare/build/wheels"}
            given |= {"folder": str(tmp_path / f"out{number}")}
            made = subject.ensure(given, False, RealSystem(run_command=engine.command))
            assert not subject.ensure(given, False, RealSystem(run_command=engine.command))["changed"]
            both = (made["archives"][platform], made["bills"][platform])
            found.append([hashlib.sha256(Path(one).read_bytes()).hexdigest() for one in both])
        assert found[0] == found[1]
        engine.load(made["archives"][platform])
        assert engine.run(REFERENCE, "gpushare-extender", "--version")
        assert engine.run(REFERENCE, "python3", "-c", "import gpushare.plugin.command, grpc; print(grpc.__version__)")
        bill = json.loads(Path(made["bills"][platform]).read_text())
        names = {component["name"] for component in bill["components"]}
        assert {"grpcio", "protobuf", "libc6", "python3"} <= names and "cyclonedx-python-lib" not in names
