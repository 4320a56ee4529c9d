# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the collection, install the tarball elsewhere, and use it from there by its name.

Only what a collection needs at run time is left of it (meta, plugins, roles, playbooks, images), and nothing of the
checkout can be reached.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
KEPT = {"meta", "plugins", "roles", "playbooks", "images", "MANIFEST.json", "FILES.json"}
INVENTORY = """\
all:
  vars: {ansible_connection: local, gpu_kubeconfig: /nonexistent}
  children:
    gpu_nodes: {hosts: {one: {}}}
    control_plane: {hosts: {two: {}}}
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = "ANSIBLE_SSH_CONTROL_PATH_DIR"
    variables = {key: value for key, value in os.environ.items() if key == kept or not key.startswith("ANSIBLE_")}
    variables |= environment
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=cwd,
        env=variables,
        text=True,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    print(f"$ {' '.join(command)} -> {done.returncode}")
    return done


def unknown_to_git(share: Path) -> list[str]:
    """Files of the built collection that are nobody's source: caches, environments, the state of a lab."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    known = {os.fsdecode(name) for name in listed} | {"MANIFEST.json", "FILES.json"}
    packed = {str(path.relative_to(share)) for path in share.rglob("*") if path.is_symlink() or path.is_file()}
    return sorted(packed - known)


class Broken(Exception):
    """The collection can't be built, installed or used from where it was installed; what the tools said."""


def build(folder: Path) -> Path:
    """Build the collection.

    :returns: the tarball in this folder.
    """
    done = run("ansible-galaxy", "collection", "build", "--output-path", str(folder), cwd=ROOT)
    tarballs = list(folder.glob("kubegpu-share-*.tar.gz"))
    if done.returncode or len(tarballs) != 1:
        raise Broken(done.stdout + done.stderr)
    return tarballs[0]


def install(tarball: Path, folder: Path) -> Path:
    """Install a tarball into a folder of collections.

    :returns: the collection's folder there.
    """
    command = ("ansible-galaxy", "collection", "install", "--no-deps", "--offline", str(tarball), "-p", str(folder))
    done = run(*command, cwd=tarball.parent)
    share = folder / "ansible_collections/kubegpu/share"
    if done.returncode or not share.is_dir():
        raise Broken(done.stdout + done.stderr)
    return share


@contextmanager
def installed() -> Iterator[tuple[Path, str]]:
    """The collection, built and installed elsewhere, with nothing but what it needs at run time.

    :returns: a folder to work in, and the ANSIBLE_COLLECTIONS_PATH that finds it there.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share = install(build(folder), folder / "collections")
        strangers = unknown_to_git(share)
        if strangers:
            raise Broken(f"files that git doesn't know: {strangers}")
        for entry in share.iterdir():
            if entry.name not in KEPT:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        leaked = [str(path) for path in share.rglob("*") if path.is_symlink() and not path.exists()]
        if leaked:
            raise Broken(f"links that lead out of the collection: {leaked}")
        yield folder, f"{folder / 'collections'}:{sysconfig.get_paths()['purelib']}"


def use(folder: Path, paths: str) -> None:
    """Every playbook is found by its name, and one runs: with a kubeconfig that isn't there preflight must say so."""
    (folder / "hosts.yml").write_text(INVENTORY)
    names = [f"kubegpu.share.{path.stem}" for path in sorted((ROOT / "playbooks").glob("*.yml"))]
    listed = run(
        *("ansible-playbook", "-i", "hosts.yml", *names, "--list-tasks"), cwd=folder, ANSIBLE_COLLECTIONS_PATH=paths
    )
    if listed.returncode or len(re.findall("(?m)^playbook: ", listed.stdout)) != len(names):
        raise Broken(listed.stdout + listed.stderr)
    play = ("ansible-playbook", "-i", "hosts.yml", "kubegpu.share.site")
    site = run(*play, cwd=folder, ANSIBLE_COLLECTIONS_PATH=paths)
    if site.returncode != 2 or "gpu_kubeconfig" not in site.stdout:
        raise Broken(site.stdout + site.stderr)


def main() -> int:
    try:
        with installed() as (folder, paths):
            use(folder, paths)
    except Broken as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
