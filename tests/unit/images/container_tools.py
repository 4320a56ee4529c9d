# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian's podman and buildah, unpacked beside the system: with their own configuration, images and network's plugins.

Nothing is installed, so that no other test finds them in its PATH.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

from lab.paths import cache_root

PACKAGES = (
    *("podman", "buildah", "conmon", "runc", "containernetworking-plugins", "netavark", "aardvark-dns"),
    *("libsubid4", "libgpgme11", "libassuan0", "libyajl2", "libdevmapper1.02.1"),
)


@functools.cache
def root() -> Path:
    """The folder in which the packages are unpacked.

    :raises LookupError: apt can't load them here.
    """
    folder = cache_root() / "container-tools"
    if not folder.exists():
        work = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if shutil.which("apt-get") is None:
            raise LookupError("there is no apt-get")
        # A machine may know no index yet; a package that is gone from the index is the other reason to fail.
        done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=work, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LookupError(f"apt-get download: {done.stderr.strip()}")
        for package in work.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, work / "root"], check=True)
            package.unlink()
        work.rename(folder)
    return folder / "root"


def environment(folder: Path) -> dict[str, str]:
    """The environment for both programs, with images below a folder.

    :raises LookupError: as ``root``.
    """
    tools, home = root(), folder / "home"
    own = home / ".config" / "containers"
    own.mkdir(parents=True)
    (own / "policy.json").write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    (own / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    machine = f"{os.uname().machine}-linux-gnu"
    libraries = f"{tools}/usr/lib/{machine}:{tools}/lib/{machine}"
    # It gets none of this environment.
    runtime = folder / "runc"
    runtime.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {tools}/usr/sbin/runc "$@"\n')
    runtime.chmod(0o755)
    (own / "containers.conf").write_text(
        f'[engine]\nconmon_path = ["{tools}/usr/bin/conmon"]\nhelper_binaries_dir = ["{tools}/usr/lib/podman"]\n'
        f'runtime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'[engine.runtimes]\nrunc = ["{runtime}"]\n'
        # The tests may not be allowed to raise these limits, as the defaults do.
        f'[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        f'[network]\ncni_plugin_dirs = ["{tools}/usr/lib/cni"]\n'
    )
    return {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{tools}/usr/bin:{tools}/usr/sbin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": libraries,
        "CONTAINERS_CONF": str(own / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(own / "storage.conf"),
    }


def unmount(folder: Path) -> None:
    """Unmount what the programs left below a folder, so that it can be removed."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((one for one in places if one.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", place], check=True)
