# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's apt repository: filled from packages.py, served on the lab's network by a container."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path

from lab import packages
from lab.engine import LABEL, NAME, Engine
from lab.network import REPOSITORY_PORT
from lab.paths import CHECKOUT, LAB, cache_root
from lab.shell import wait_for

FOLDER = LAB / "repo"
CONTAINER = f"{NAME}-repo"


def url(address: str) -> str:
    return f"http://{address}:{REPOSITORY_PORT}/"


def fill(toolkit: Path, driver_version: str, toolkit_version: str, suite: str) -> None:
    """Write the packages and the signed indexes; the cache knows what they were made from."""
    made = cache_root() / "repo"
    packages.build(made, toolkit, driver_version, toolkit_version, suite)
    FOLDER.mkdir(parents=True, exist_ok=True)
    # The folder itself stays: a running server has it mounted.
    for old in FOLDER.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(made, FOLDER, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)


def serve(engine: Engine, image: str, address: str) -> None:
    """Start the server over the filled folder, and see that it answers."""
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
    wait_for("the lab's apt repository", lambda: answers(address), 30, 0.3)


def answers(address: str) -> bool:
    # The address is on this machine's own bridge: no proxy of the environment's has a say.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url(address), timeout=3) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
