# SPDX-License-Identifier: GPL-3.0-or-later
"""Serve the lab's package repository, built by publish.py, from a container on the lab's network."""

from __future__ import annotations

import hashlib
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from lab import publish
from lab.engine import LABEL, NAME, Engine
from lab.network import REPOSITORY_PORT
from lab.paths import CHECKOUT, LAB, cache_root
from lab.publish import Tree
from lab.shell import wait_for

FOLDER = LAB / "repo"
CONTAINER = f"{NAME}-repo"


def url(address: str) -> str:
    return f"http://{address}:{REPOSITORY_PORT}/"


def fill(toolkit: Path, driver_version: str, toolkit_version: str, wanted: Tree, sysroot: Path | None = None) -> None:
    """Rebuild a distribution's packages if their inputs changed."""
    made = cache_root() / "repos" / f"{wanted.distribution}-{wanted.toolkit_folder}"
    publish.build(made, toolkit, driver_version, toolkit_version, wanted, sysroot)
    FOLDER.mkdir(parents=True, exist_ok=True)
    architecture = publish.architecture_here()
    served, fresh = publish.folders(FOLDER, wanted, architecture), publish.folders(made, wanted, architecture)
    # Each build has new keys; an unchanged one stays, since others may be downloading from it.
    keys = ((served.cuda_key, fresh.cuda_key), (served.toolkit_key, fresh.toolkit_key))
    if all(old.exists() and old.read_bytes() == new.read_bytes() for old, new in keys):
        return
    for old in (served.cuda.parent, served.toolkit.parent, served.own.parent):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(made, FOLDER, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)


def places(wanted: Tree) -> dict[str, str]:
    """Return the URL paths of a distribution's packages and of their keys."""
    served = publish.folders(FOLDER, wanted, publish.architecture_here())

    def inside(path: Path) -> str:
        return path.relative_to(FOLDER).as_posix()

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    return {
        "driver": f"{inside(served.cuda)}/",
        "driver_key": inside(served.cuda_key),
        "driver_key_sha256": digest(served.cuda_key),
        "toolkit": f"{inside(served.toolkit)}/",
        "toolkit_key": inside(served.toolkit_key),
        "toolkit_key_sha256": digest(served.toolkit_key),
        **({"own_key": inside(served.own_key)} if served.own_key.exists() else {}),
    }


def serve(engine: Engine, image: str, address: str) -> None:
    """Start the server on the filled folder, and wait until it answers."""
    engine.docker(
        "run",
        "--detach",
        f"--name={CONTAINER}",
        "--hostname=repo",
        f"--label={LABEL}",
        f"--label=kubegpu-lab.checkout={CHECKOUT}",
        f"--network={NAME}",
        f"--ip={address}",
        "--init",
        f"--volume={FOLDER}:/srv:ro",
        image,
        "python3",
        "-m",
        "http.server",
        "--directory=/srv",
        str(REPOSITORY_PORT),
    )
    wait_for("the lab's package repository", lambda: answers(address), 30, 0.3)


def ensure(engine: Engine, image: str, address: str) -> None:
    """Start the server if it isn't running."""
    there = engine.containers().get(CONTAINER)
    if there is None:
        serve(engine, image, address)
    elif not there:
        engine.docker("start", CONTAINER)


def answers(address: str) -> bool:
    # The address is on this machine's bridge; ignore proxies of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url(address), timeout=3) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
