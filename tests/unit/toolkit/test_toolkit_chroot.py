# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles node_baseline and toolkit on a real Debian with real apt: migration from the replaced tools, and back."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from test_toolkit_legacy import KEY, LISTS, TOOLKIT_LIST
from toolkit_kit import ROOT, run_playbook

from lab.paths import cache_root

VERSION = yaml.safe_load((ROOT / "roles/toolkit/defaults/main.yml").read_text())["toolkit_version"]
DAEMON = '{ "log-driver": "journald", "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}'
OLD = {
    "nvidia-container-toolkit-base": "",
    "libnvidia-container1": "",
    "libnvidia-container-tools": "Depends: libnvidia-container1\n",
    "nvidia-container-toolkit": "Depends: nvidia-container-toolkit-base, libnvidia-container-tools\n",
    "nvidia-container-runtime": "Depends: nvidia-container-toolkit (>= 1.13)\n",
    "nvidia-docker2": "Depends: nvidia-container-toolkit (>= 1.13)\n",
}


class Debian(RealSystem):
    """A Debian in a folder, whose commands run in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(str(root), self._chrooted)

    def _chrooted(self, argv: Sequence[str], data: str | None = None, environ_update: dict[str, str] | None = None):
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(environ_update or {})}
        done = subprocess.run(
            ["chroot", str(self.root), *argv], input=data, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    def do(self, *argv: str) -> str:
        done = self.run(argv, timeout=120)
        assert done.rc == 0, f"{argv}: {done.out}{done.err}"
        return done.out


def rootfs() -> Path | None:
    """Return the lab's Debian from the cache; creating one takes a minute and the network."""
    found = sorted((cache_root() / "rootfs").glob("base-*/rootfs.tar"))
    return found[-1] if found else None


def build(folder: Path) -> None:
    """Create an unsigned flat repository with stubs of the replaced packages."""
    folder.mkdir(parents=True)
    index = []
    for name, depends in OLD.items():
        tree = folder / "tree" / name
        (tree / "DEBIAN").mkdir(parents=True)
        fields = f"Package: {name}\nVersion: 1.13.5-1\nArchitecture: amd64\nMaintainer: A <a@example.org>\n{depends}"
        (tree / "DEBIAN/control").write_text(fields + "Description: stub\n")
        if name == "nvidia-docker2":
            (tree / "etc/docker").mkdir(parents=True)
            (tree / "etc/docker/daemon.json").write_text("{}\n")
            (tree / "DEBIAN/conffiles").write_text("/etc/docker/daemon.json\n")
        deb = folder / f"{name}.deb"
        subprocess.run(
            ["dpkg-deb", "-Zgzip", "--root-owner-group", "-b", str(tree), str(deb)], check=True, capture_output=True
        )
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        index.append(
            f"{fields}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\nDescription: stub\n"
        )
    shutil.rmtree(folder / "tree")
    (folder / "Packages").write_text("\n".join(index))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    # The lab's mirror of NVIDIA's repository.
    repository = next((cache_root() / "repos").glob("*-deb/libnvidia-container"), None)
    archive = rootfs()
    if os.geteuid() != 0 or not shutil.which("dpkg-deb"):
        pytest.skip("needs root and dpkg-deb")
    if archive is None or repository is None:
        pytest.skip("needs the lab's root filesystem and its repository in the cache (make lab-up makes them)")
    pytest.importorskip("ansible_collections.community.general", reason="needs the connection community.general.chroot")
    root = tmp_path_factory.mktemp("toolkit")
    subprocess.run(["tar", "-C", str(root), "-xf", str(archive)], check=True)
    for name, minor in (("null", 3), ("zero", 5), ("urandom", 9)):
        (root / "dev" / name).unlink(missing_ok=True)
        os.mknod(root / "dev" / name, 0o20666, os.makedev(1, minor))
        (root / "dev" / name).chmod(0o666)
    (root / "tmp").chmod(0o1777)
    shutil.copytree(repository, root / "srv/libnvidia-container")
    build(root / "srv/nvidia-docker/stable")
    machine = Debian(root)
    machine.write("/etc/apt/sources.list", "")
    for name in machine.names("/etc/apt/sources.list.d"):
        machine.remove(f"/etc/apt/sources.list.d/{name}")
    machine.write("/etc/apt/sources.list.d/nvidia-docker.list", "deb [trusted=yes] file:/srv/nvidia-docker/stable ./\n")
    machine.do("apt-get", "update")
    machine.do("apt-get", "install", "-y", "nvidia-docker2", "nvidia-container-runtime")
    machine.do("apt-mark", "hold", "nvidia-docker2")
    machine.write("/etc/docker/daemon.json", DAEMON, 0o600)
    os.chown(root / "etc/docker/daemon.json", 1000, 1000)
    # apt would reject it beside the role's own list, which has another key.
    machine.write(f"{LISTS}/nvidia-container-toolkit.list", TOOLKIT_LIST)
    (root / KEY.lstrip("/")).write_bytes(b"\x99\x02\x0d\x04\xff\x00binary")
    yield machine
    shutil.rmtree(root, ignore_errors=True)


def play(node: Debian, folder: Path, roles: list[object]) -> tuple[int, str]:
    """Run roles on the node; return the number of changed tasks and the output."""
    host = {
        "ansible_connection": "community.general.chroot",
        "ansible_host": str(node.root),
        "ansible_python_interpreter": "/usr/bin/python3",
        "toolkit_repo_url": "file:///srv/libnvidia-container/stable/deb/amd64/",
        "toolkit_repo_key_url": "file:///srv/libnvidia-container/gpgkey",
        # A key of the test's own.
        "toolkit_repo_key_sha256": "",
    }
    status, output = run_playbook(folder, {"node": host}, {"roles": roles})
    assert status == 0, output[-4000:]
    changed = re.search(r"changed=(\d+)", output)
    assert changed is not None, output[-4000:]
    return int(changed.group(1)), output


def snapshot(node: Debian) -> tuple[dict[str, tuple[int, int, bytes]], str, str]:
    """Return the files of /etc and the keyrings with mode, owner and bytes, the packages' states, and the holds."""
    paths = [path for folder in ("etc", "usr/share/keyrings") for path in sorted((node.root / folder).rglob("*"))]
    files = {
        str(path.relative_to(node.root)): (path.stat().st_mode, path.stat().st_uid, path.read_bytes())
        for path in paths
        if path.is_file() and not path.is_symlink() and path.name not in ("ld.so.cache", "extended_states")
    }
    packages = node.do("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\\n")
    return files, packages, node.do("apt-mark", "showhold")


def uninstall() -> list[object]:
    """Return the roles of uninstall.yml that apply to this node, those that a task includes as roles, too."""
    [*_others, play] = yaml.safe_load((ROOT / "playbooks/uninstall.yml").read_text())
    wanted = ("kubegpu.share.node_baseline", "kubegpu.share.toolkit")
    last = [{"role": task["ansible.builtin.include_role"]["name"], **task["vars"]} for task in play["post_tasks"]]
    return [role for role in (*play["roles"], *last) if role["role"] in wanted]


def test_a_node_with_replaced_tools_is_migrated_and_restored(node: Debian, tmp_path: Path) -> None:
    before = snapshot(node)
    roles: list[object] = ["kubegpu.share.node_baseline", "kubegpu.share.toolkit"]

    assert play(node, tmp_path, roles)[0] > 0
    files, packages, held = snapshot(node)
    assert f"installed nvidia-container-toolkit {VERSION}\n" in packages
    assert "installed nvidia-docker2 " not in packages and "installed nvidia-container-runtime " not in packages
    assert files["etc/docker/daemon.json"] == before[0]["etc/docker/daemon.json"]
    assert not {f"{LISTS}/nvidia-docker.list"[1:], f"{LISTS}/nvidia-container-toolkit.list"[1:], KEY[1:]} & set(files)
    assert "nvidia-container-toolkit-base" in held.split()
    assert play(node, tmp_path, roles)[0] == 0, "a second run changes nothing"

    output = play(node, tmp_path, uninstall())[1]
    after = snapshot(node)
    assert after[1] == before[1], output[-4000:]
    assert (after[0], after[2]) == (before[0], before[2])
    assert not node.exists("/var/lib/kubegpu-share")
