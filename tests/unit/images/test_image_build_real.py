# SPDX-License-Identifier: GPL-3.0-or-later
"""Two builds of the servers' image by a Docker engine without a network: they give the same bytes, and the image runs.

Needs the lab's Debian and wheels, which `make lab-up` leaves in its cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import private_dockerd
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._images import build as subject
from ansible_collections.kubegpu.share.plugins.plugin_utils._images import sources as images_sources

from lab import images, rootfs
from lab.paths import cache_root

BASE = sorted((cache_root() / "rootfs").glob("base-*/rootfs.tar"))
REFERENCE = "localhost/kubegpu/gpushare:1.0.0"

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
            *(f"--platform={one}" for one in images.platforms(os.uname().machine)),
            *(f"--requirement={file}" for file in images.REQUIREMENTS),
        ],
        check=True,
    )
    return folder


def test_two_builds_give_the_same_bytes_and_the_image_runs(tmp_path):
    engine = private_dockerd.Dockerd(private_dockerd.binary(), ["--storage-driver=overlay2"])
    engine.config.write_text("{}")
    environment = {**os.environ, "DOCKER_HOST": engine.socket, "DOCKER_BUILDKIT": "0"}

    def command(argv, data=None, environ_update=None):
        here = {**environment, **(environ_update or {})}
        done = subprocess.run(argv, input=data, capture_output=True, text=True, check=False, env=here)
        return done.returncode, done.stdout, done.stderr

    def docker(*argv):
        rc, out, err = command(["docker", *argv])
        assert rc == 0, err
        return out.strip()

    try:
        assert engine.start() == ""
        docker("import", str(BASE[-1]), "localhost/base:1")
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        python = docker("run", "--rm", "--network=none", "localhost/base:1", "python3", "-c", code)
        sources = tmp_path / "sources.tar"
        digest = images_sources.pack(str(sources), collection_with_wheels(tmp_path, python))
        usual = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()}
        platform = subject.MACHINES[os.uname().machine]
        found = []
        for number in (1, 2):
            given = {**usual, "reference": REFERENCE, "engine": "docker", "platforms": [platform]}
            given |= {"base": "localhost/base:1", "sources": digest, "context": str(sources)}
            given |= {"pip_args": "--no-index --find-links images/gpushare/build/wheels"}
            given |= {"folder": str(tmp_path / f"out{number}")}
            made = subject.ensure(given, False, RealSystem(run_command=command))
            assert not subject.ensure(given, False, RealSystem(run_command=command))["changed"]
            both = (made["archives"][platform], made["bills"][platform])
            found.append([hashlib.sha256(Path(one).read_bytes()).hexdigest() for one in both])
        assert found[0] == found[1]
        docker("load", "--input", made["archives"][platform])
        run = ("run", "--rm", "--network=none", "--read-only", "--user=65532", REFERENCE)
        assert docker(*run, "gpushare-extender", "--version")
        assert docker(*run, "python3", "-c", "import gpushare.plugin.command, grpc; print(grpc.__version__)")
        bill = json.loads(Path(made["bills"][platform]).read_text())
        names = {one["name"] for one in bill["components"]}
        assert {"grpcio", "protobuf", "libc6", "python3"} <= names and "cyclonedx-python-lib" not in names
    finally:
        engine.remove()
