# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the collection, install the tarball elsewhere, and use it from there by its name.

Only what a collection needs at run time is left of it (meta, plugins, roles, playbooks, images), and nothing of the
checkout can be reached.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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
    variables = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")} | environment
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


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = run("ansible-galaxy", "collection", "build", "--output-path", name, cwd=ROOT)
        tarballs = list(folder.glob("kubegpu-share-*.tar.gz"))
        if built.returncode or len(tarballs) != 1:
            print(built.stdout + built.stderr)
            return 1
        paths = f"{folder / 'collections'}:{sysconfig.get_paths()['purelib']}"
        install = ("ansible-galaxy", "collection", "install", "--no-deps", "--offline", str(tarballs[0]))
        installed = run(*install, "-p", str(folder / "collections"), cwd=folder)
        share = folder / "collections/ansible_collections/kubegpu/share"
        if installed.returncode or not share.is_dir():
            print(installed.stdout + installed.stderr)
            return 1
        strangers = unknown_to_git(share)
        if strangers:
            print(f"files that git doesn't know: {strangers}")
            return 1
        for entry in share.iterdir():
            if entry.name not in KEPT:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        leaked = [str(path) for path in share.rglob("*") if path.is_symlink() and not path.exists()]
        if leaked:
            print(f"links that lead out of the collection: {leaked}")
            return 1
        (folder / "hosts.yml").write_text(INVENTORY)
        for playbook in sorted(one.stem for one in (ROOT / "playbooks").glob("*.yml")):
            tasks = ("ansible-playbook", "-i", "hosts.yml", f"kubegpu.share.{playbook}", "--list-tasks")
            listed = run(*tasks, cwd=folder, ANSIBLE_COLLECTIONS_PATH=paths)
            if listed.returncode or "TAGS" not in listed.stdout:
                print(listed.stdout + listed.stderr)
                return 1
        # And it runs: with a kubeconfig that isn't there preflight must say so, from the installed copy.
        play = ("ansible-playbook", "-i", "hosts.yml", "kubegpu.share.site")
        site = run(*play, cwd=folder, ANSIBLE_COLLECTIONS_PATH=paths)
        if site.returncode != 2 or "gpu_kubeconfig" not in site.stdout:
            print(site.stdout + site.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
