# SPDX-License-Identifier: GPL-3.0-or-later
"""A system with the real dnf or the real zypper, and repositories of stub packages: no container, no network.

The base is Debian, which packages both; os-release, the place of rpm's database and the repositories, whose
RPMs are built and signed here, are those of EL and SUSE.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from limited import without_limit

from lab.aptsources import read_machine
from lab.paths import cache_root, made_once
from lab.rootfs import rootfs

COMMON = ("python3", "rpm", "createrepo-c", "gnupg", "gpg-agent", "ca-certificates")
SYSTEMS = {"dnf": (*COMMON, "dnf", "dnf-plugins-core"), "zypper": (*COMMON, "zypper")}
# The folders that a package manager changes; the rest of the tree stays as it was unpacked.
STATE = ("etc", "var/lib/rpm", "var/lib/dnf", "var/lib/zypp", "var/cache", "root", "srv")
KEY = "root/key.asc"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
# Made by a package in the middle of its installation, which then takes long.
AT_WORK = "/root/at-work"
DRIVER = ("570.10", "580.82", "580.95", "590.44")


@dataclass(frozen=True)
class Stub:
    """A package without content."""

    name: str
    version: str
    epoch: str = ""
    lines: tuple[str, ...] = ()
    post: str = ""

    def spec(self) -> str:
        head = [f"Name: {self.name}", f"Version: {self.version}", "Release: 1.el9", "Summary: stub", "License: MIT"]
        head += ["BuildArch: noarch", "Vendor: Stubs Inc"] + ([f"Epoch: {self.epoch}"] if self.epoch else [])
        # In Lua, which rpm has itself: nothing here provides a shell.
        post = f"%post -p <lua>\nos.execute('{self.post}')\n" if self.post else ""
        return "\n".join([*head, *self.lines, "%description", "stub", post, "%files", ""])


def driver(version: str) -> list[Stub]:
    """The packages of one driver version with their requirements and conflicts."""
    same = f"= 3:{version}"
    kmod = ("kmod-nvidia-open-dkms", "kmod-nvidia-latest-dkms")
    return [
        Stub("nvidia-open", version, "3", (f"Requires: {kmod[0]} {same}", f"Requires: nvidia-driver-cuda {same}")),
        Stub(kmod[0], version, "3", (f"Provides: nvidia-kmod {same}", f"Conflicts: {kmod[1]}")),
        Stub(kmod[1], version, "3", (f"Provides: nvidia-kmod {same}", f"Conflicts: {kmod[0]}")),
        Stub("nvidia-driver-cuda", version, "3", (f"Requires: nvidia-kmod {same}", "Requires: nvidia-persistenced")),
        Stub("cuda-drivers", version, "", (f"Requires: {kmod[1]} {same}", f"Requires: nvidia-driver-cuda {same}")),
    ]


REPOSITORIES: dict[str, list[Stub]] = {
    "cuda": [
        *(stub for version in DRIVER for stub in driver(version)),
        Stub("nvidia-persistenced", "590.44", "3", ("Requires: nvidia-modprobe",)),
        Stub("nvidia-modprobe", "590.44", "3"),
        Stub("cuda-toolkit", "13", "", ("Requires: nvidia-driver-cuda",)),
        *(Stub("slow", version, "", (f"Requires: slow-lib = {version}",)) for version in ("1", "2")),
        Stub("slow-lib", "1"),
        Stub("slow-lib", "2", "", (), f"touch {AT_WORK}; sleep 60"),
        *(Stub("kernel-devel", version, "", ("Provides: installonlypkg(kernel)",)) for version in ("5.14.0", "5.14.1")),
    ],
    "foreign": [Stub("base", "1"), Stub("tool", "1"), Stub("tool", "2"), Stub("tool-lib", "1"), Stub("tool-lib", "2")],
}
STREAMS = {
    "latest-dkms": ("590.44", ("kmod-nvidia-latest-dkms", "nvidia-driver-cuda", "cuda-drivers")),
    "open-dkms": ("590.44", ("kmod-nvidia-open-dkms", "nvidia-driver-cuda", "nvidia-open")),
    "580-dkms": ("580.95", ("kmod-nvidia-latest-dkms", "nvidia-driver-cuda", "cuda-drivers")),
    "580-open": ("580.95", ("kmod-nvidia-open-dkms", "nvidia-driver-cuda", "nvidia-open")),
}


def modules() -> str:
    """The modules.yaml of a repository whose driver packages are streams of the module nvidia-driver."""
    documents = []
    for number, (stream, (version, names)) in enumerate(STREAMS.items()):
        artifacts = "".join(
            f"    - {name}-{0 if name == 'cuda-drivers' else 3}:{version}-1.el9.noarch\n" for name in names
        )
        documents.append(
            f'---\ndocument: modulemd\nversion: 2\ndata:\n  name: nvidia-driver\n  stream: "{stream}"\n  version: 1\n'
            f"  context: c0ffee0{number}\n  arch: x86_64\n  summary: stub\n  description: stub\n"
            f"  license: {{module: [MIT]}}\n  artifacts:\n    rpms:\n{artifacts}"
        )
    return "".join(documents)


def batch(address: str) -> str:
    """Return the input from which gpg generates a key."""
    kind = "%no-protection\nKey-Type: RSA\nKey-Length: 2048\nKey-Usage: sign\nName-Real: Stubs\n"
    return f"{kind}Name-Email: {address}\nExpire-Date: 0\n%commit\n"


class Tree:
    """An unpacked system; files and commands of it through the collection's own adapter."""

    def __init__(self, root: Path, kind: str = "") -> None:
        self.root, self.kind = root, kind
        self.system = RealSystem(str(root), self._run_command)
        self.ran: list[str] = []

    def _run_command(
        self, argv: Sequence[str], data: str | None = None, environ_update: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        self.ran.append(" ".join(without_limit(argv)))
        done = subprocess.run(
            self._inside(argv),
            input=data,
            text=True,
            capture_output=True,
            check=False,
            env={**ENVIRONMENT, **(environ_update or {})},
        )
        return done.returncode, done.stdout, done.stderr

    def _inside(self, argv: Sequence[str]) -> list[str]:
        # Mounts and processes of namespaces of its own are gone with the command, however it ends.
        # Device files of the tree's own: a package's script that clears /dev must never see this machine's.
        inside = (
            'mount -t tmpfs none "$0/dev" && (cd "$0/dev" && mknod -m 666 null c 1 3 && mknod -m 666 zero c 1 5 '
            "&& mknod -m 666 random c 1 8 && mknod -m 666 urandom c 1 9 && ln -s /proc/self/fd fd) "
            '&& mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
        )
        alone = ("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child")
        return [*alone, "sh", "-c", inside, str(self.root), *argv]

    def kill_at_work(self, *argv: str) -> None:
        """A command that is killed in the middle of a package's installation."""
        at_work = self.root / AT_WORK.lstrip("/")
        # As process 1 of its namespace it would leave a lock that the next one, in another namespace, takes for alive.
        started = subprocess.Popen(
            self._inside(["timeout", "300", *argv]),
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not at_work.exists():
                assert started.poll() is None, f"{argv} ended with {started.returncode} before it was to be killed"
                time.sleep(0.05)
        finally:
            started.kill()
            started.wait()

    def run(self, *argv: str, rc: int | None = 0) -> str:
        """Run a command as a user does; return its output."""
        got, out, err = self._run_command(argv, environ_update={"LC_ALL": "C"})
        assert rc is None or got == rc, f"{argv}: {got}\n{out}\n{err}"
        return out + err

    def packages(self) -> dict[str, str]:
        """Return the installed packages and their versions; several of one name are joined."""
        found: dict[str, str] = {}
        for line in self.run("rpm", "-qa", "--qf", "%{NAME} %{VERSION}\\n").splitlines():
            name, version = line.split()
            if name not in ("gpg-pubkey", "base"):
                found[name] = " ".join(sorted([*found.get(name, "").split(), version]))
        return found

    def keys(self) -> list[str]:
        return sorted(line for line in self.run("rpm", "-qa", "gpg-pubkey").splitlines())

    def read(self, path: str) -> str:
        return (self.root / path.lstrip("/")).read_text()

    def write(self, path: str, text: str) -> None:
        real = self.root / path.lstrip("/")
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_text(text)

    def files(self, *folders: str) -> dict[str, str]:
        """Every file below folders."""
        found = {}
        for folder in folders:
            for path in sorted((self.root / folder.lstrip("/")).rglob("*")):
                if path.is_file():
                    found["/" + str(path.relative_to(self.root))] = path.read_text()
        return found


def missing() -> str:
    """Return why this machine can't build such a tree; empty where it can."""
    if os.geteuid() != 0:
        return "unpacks a system and works in it by chroot, which takes root"
    for tool in ("debootstrap", "unshare", "chroot"):
        if not shutil.which(tool):
            return f"makes a system from Debian's packages, and there is no {tool}"
    return ""


def _unpack(kind: str, folder: Path) -> Tree:
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-C", str(folder), "-xf", str(rootfs(kind, SYSTEMS[kind], read_machine()))], check=True)
    tree = Tree(folder)
    # Debian's own rpm keeps its database in the home directory, warns of its use, and its dnf knows no release.
    tree.write("/etc/rpm/macros", "%_dbpath /var/lib/rpm\n%__gpg /usr/bin/gpg\n%_gpg_name stub@example.org\n")
    (folder / "etc/os-release").unlink()
    name = (
        "ID=sles\nVERSION_ID=15.6\n" if kind == "zypper" else 'ID=rocky\nID_LIKE="rhel centos fedora"\nVERSION_ID=9.4\n'
    )
    tree.write("/etc/os-release", f"{name}PLATFORM_ID=platform:el9\n")
    tree.write("/etc/dnf/vars/releasever", "9\n")
    # As EL has it; Debian's package differs.
    tree.write(
        "/etc/dnf/dnf.conf",
        "[main]\ngpgcheck=1\ninstallonly_limit=3\nclean_requirements_on_remove=True\nbest=True\nskip_if_unavailable=False\n",
    )
    tree.write("/etc/dnf/plugins/local.conf", "[main]\nenabled = false\n")
    (folder / "var/lib/dpkg/status").unlink()
    shutil.rmtree(folder / "root/.rpmdb", ignore_errors=True)
    tree.run("rpm", "--initdb")
    return tree


def _build(tree: Tree, stubs: Iterable[Stub], folder: str) -> None:
    script = ["set -e", f"mkdir -p {folder}"]
    for number, stub in enumerate(stubs):
        tree.write(f"/root/{number}.spec", stub.spec())
        where = f"--define '_rpmdir {folder}' --define '_rpmfilename %%{{NAME}}-%%{{VERSION}}.rpm'"
        script.append(f"rpmbuild -bb --quiet {where} /root/{number}.spec")
    script.append(f"rpm --addsign {folder}/*.rpm")
    script.append(f"createrepo_c -q {folder}")
    tree.run("sh", "-c", "\n".join(script))


def repositories() -> Path:
    """The folder of the signed repositories ``cuda``, ``modular`` and ``foreign``, made once."""
    recipe = inspect.getsource(sys.modules[__name__])
    target = cache_root() / "rpm-stubs" / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    with made_once(target) as fresh:
        if fresh:
            tree = _unpack("dnf", fresh / "system")
            tree.write("/root/batch", batch("stub@example.org"))
            tree.run("sh", "-c", f"gpg --batch --gen-key /root/batch && gpg --armor --export > /{KEY}")
            for name, stubs in REPOSITORIES.items():
                _build(tree, stubs, f"/srv/{name}")
            tree.write("/root/modules.yaml", modules())
            tree.run("sh", "-c", "cp -r /srv/cuda /srv/modular && createrepo_c -q /srv/modular")
            tree.run("modifyrepo_c", "--mdtype=modules", "/root/modules.yaml", "/srv/modular/repodata")
            (fresh / "key.asc").write_text(tree.read(KEY))
            shutil.move(str(fresh / "system" / "srv"), str(fresh / "srv"))
            shutil.rmtree(fresh / "system")
    return target


@contextlib.contextmanager
def borrowed(kind: str) -> Iterator[Tree]:
    """A system with the repositories under /srv and the foreign one in use; unpacked once, one test run's at a time."""
    recipe = inspect.getsource(sys.modules[__name__])
    source = rootfs(kind, SYSTEMS[kind], read_machine())
    key = hashlib.sha256(f"{recipe}{source}".encode()).hexdigest()[:16]
    target = cache_root() / "rpm-trees" / f"{kind}-{key}"
    with made_once(target) as fresh:
        if fresh:
            _fill(kind, fresh)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Tree(target / "system", kind)


def _fill(kind: str, folder: Path) -> None:
    stubs = repositories()
    tree = _unpack(kind, folder / "system")
    shutil.rmtree(tree.root / "srv")
    shutil.copytree(stubs / "srv", tree.root / "srv")
    shutil.copy(stubs / "key.asc", tree.root / KEY)
    where = "zypp/repos.d" if kind == "zypper" else "yum.repos.d"
    tree.write(
        f"/etc/{where}/mine.repo",
        "[mine]\nname=mine\nbaseurl=file:///srv/foreign\nenabled=1\ngpgcheck=0\nautorefresh=1\n",
    )
    # zypper can't work with a machine on which nothing at all is installed.
    tree.run("rpm", "-i", "--nosignature", "/srv/foreign/base-1.rpm")
    for one in STATE:
        if (tree.root / one).exists():
            shutil.copytree(tree.root / one, folder / "state" / one, symlinks=True)


def reset(tree: Tree) -> None:
    """The tree as it was unpacked."""
    saved = tree.root.parent / "state"
    for one in STATE:
        shutil.rmtree(tree.root / one, ignore_errors=True)
        if (saved / one).exists():
            shutil.copytree(saved / one, tree.root / one, symlinks=True)
    tree.ran.clear()
