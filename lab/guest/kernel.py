# SPDX-License-Identifier: GPL-3.0-or-later
"""The guest's kernel, its modules and tools, from Debian's packages, which are unpacked and never installed.

Below the cache there is a folder of the packages, by their versions, and one with the simulated cards, by their source:

* ``kernel-<release>-<key>``: ``vmlinuz``, ``config``, ``headers`` and ``layer``, which is laid over this machine's
  root
* ``cards-<key>``: that layer once more, with the compiled modules of ``lab/guest/modules`` and kmod's index of all
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from lab.paths import cache_root, made_once
from lab.shell import LabError, output, run, step, wait_for

MODULES = Path(__file__).resolve().parent / "modules"
# Programs of the guest that this machine may not have; udev's must be of one version.
TOOLS = ("busybox-static", "kmod", "libkmod2", "udev", "libudev1", "libsystemd-shared")
# Seconds. Another checkout may be using what this one doesn't.
KEPT = 14 * 24 * 3600.0
# Increase when the steps below change the result.
RECIPE = 2


@dataclass(frozen=True)
class Kernel:
    """A kernel and what belongs to it."""

    release: str
    image: Path
    config: Path
    # Laid over this machine's root in the guest.
    layer: Path

    @property
    def modules(self) -> Path:
        return self.layer / "usr/lib/modules" / self.release


def kernel() -> Kernel:
    """Return the kernel of this machine's Debian release with the simulated cards, making them on first use.

    :raises LabError: this machine's package lists have no kernel, or it isn't amd64.
    """
    architecture = output(["dpkg", "--print-architecture"])
    if architecture != "amd64":
        raise LabError(f"the guest is made for amd64, and this machine is {architecture}.")
    versions = _packages()
    release = versions[0].partition("=")[0].removeprefix("linux-image-")
    packages = cache_root() / "guest" / f"kernel-{release}-{_key(RECIPE, versions)}"
    with made_once(packages) as fresh:
        if fresh:
            with step(f"fetching and unpacking Debian's kernel {release}"):
                _unpack(fresh, release, versions)
    sources = [path.read_bytes() for path in sorted(MODULES.iterdir())]
    cards = cache_root() / "guest" / f"cards-{_key(packages.name, sources)}"
    with made_once(cards) as fresh:
        if fresh:
            with step(f"compiling the simulated cards for {release}"):
                _compile(fresh, packages, release)
    for used in (packages, cards):
        os.utime(used)
    forget("kernel-*", "cards-*", "system-*", "run-*")
    return Kernel(release, packages / "vmlinuz", packages / "config", cards / "layer")


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def forget(*patterns: str) -> None:
    """Remove what no run has used for long, made of earlier packages or sources: some hundred MiB each."""
    for made in (path for pattern in patterns for path in (cache_root() / "guest").glob(pattern)):
        if made.stat().st_mtime < time.time() - KEPT:
            shutil.rmtree(made, ignore_errors=True)


def _fields(*packages: str) -> dict[str, dict[str, str]]:
    """Return the fields of each package that the package lists have, of the version that apt would install."""
    text = run(["apt-cache", "show", "--no-all-versions", *packages], check=False).stdout
    stanzas = [dict(re.findall(r"^(\S+): (.*)$", stanza, re.MULTILINE)) for stanza in text.split("\n\n")]
    return {stanza["Package"]: stanza for stanza in stanzas if "Package" in stanza}


def _packages() -> list[str]:
    """Return the packages as NAME=VERSION, the kernel's first; this machine's package lists say which it is."""

    def newest() -> str:
        found = re.match(
            r"linux-image-\S+", _fields("linux-image-amd64").get("linux-image-amd64", {}).get("Depends", "")
        )
        return found[0] if found else ""

    image = newest()
    if not image:
        with step("reading the package lists"):
            wait_for("the lock of apt", lambda: run(["apt-get", "check"], check=False).returncode == 0, 120)
            run(["apt-get", "-q", "update"])
        image = newest()
    if not image:
        raise LabError("this machine's package lists have no linux-image-amd64, which the guest's kernel is of.")
    headers = image.replace("linux-image-", "linux-headers-")
    known = _fields(image, headers, *TOOLS)
    more = re.findall(r"linux-(?:headers|kbuild)-[^ ,]+", known.get(headers, {}).get("Depends", ""))
    known |= _fields(*more) if more else {}
    return [f"{name}={known[name]['Version']}" for name in (image, headers, *more, *TOOLS) if name in known]


def _unpack(folder: Path, release: str, versions: list[str]) -> None:
    debs, layer, headers = folder / "debs", folder / "layer", folder / "headers"
    debs.mkdir()
    # apt drops its rights to a user that can't write into this folder.
    run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *versions], tied=True, cwd=str(debs))
    for deb in sorted(debs.glob("*.deb")):
        building = deb.name.startswith(("linux-headers-", "linux-kbuild-"))
        run(["dpkg-deb", "-x", str(deb), str(headers if building else layer)], tied=True)
    shutil.rmtree(debs)
    for name in ("vmlinuz", "config"):
        (layer / "boot" / f"{name}-{release}").rename(folder / name)
    for name in ("boot", "usr/share"):
        shutil.rmtree(layer / name)
    # Where the machine has links to /usr, a folder of the same name would hide them.
    for name in ("bin", "sbin", "lib", "lib64"):
        if (layer / name).is_dir():
            shutil.copytree(
                layer / name, layer / "usr" / name, symlinks=True, dirs_exist_ok=True, copy_function=os.link
            )
            shutil.rmtree(layer / name)
    # It names the common headers by the path at which the package would have them.
    makefile = headers / "usr/src" / f"linux-headers-{release}" / "Makefile"
    here = "include $(dir $(lastword $(MAKEFILE_LIST)))../"
    makefile.write_text(makefile.read_text().replace("include /usr/src/", here))


def _compile(folder: Path, packages: Path, release: str) -> None:
    sources = folder / "sources"
    shutil.copytree(MODULES, sources)
    headers = packages / "headers/usr/src" / f"linux-headers-{release}"
    run(["make", "-C", str(headers), f"M={sources}", "CC=gcc", "modules"], tied=True)
    layer = folder / "layer"
    # By links: the files are large and stay as they are.
    shutil.copytree(packages / "layer", layer, symlinks=True, copy_function=os.link)
    updates = layer / "usr/lib/modules" / release / "updates"
    updates.mkdir()
    for module in sources.glob("*.ko"):
        shutil.copyfile(module, updates / module.name)
    shutil.rmtree(sources)
    libraries = ":".join(str(path.parent) for path in layer.glob("usr/lib/*/libkmod.so.2"))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    # kmod is the program that the link's name says; the package's links are those of the root.
    depmod = folder / "depmod"
    depmod.symlink_to(layer / "usr/bin/kmod")
    run([str(depmod), "-b", str(layer / "usr"), release], env=environment)
    depmod.unlink()
