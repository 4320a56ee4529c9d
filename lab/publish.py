# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the trees that the lab's package repository serves, and cache each.

One tree for each distribution: cuda/<distribution>/<arch>/ with two driver versions, and the toolkit beside it in
libnvidia-container/stable/. Each repository has a key of its own, as NVIDIA's have.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab import debs, packages, rpms
from lab.packages import ARCHITECTURES, CUDA_KEY, SOURCES, TOOLKIT_KEY, Architecture, Signer, older_than
from lab.shell import LabError, output, step

# The folder of NVIDIA's CUDA repository for each Debian suite, oldest first.
DEBIAN = {"bullseye": "debian11", "bookworm": "debian12", "trixie": "debian13"}
RPM = ("rhel9", "opensuse15")


@dataclass(frozen=True)
class Tree:
    """A requested tree: a distribution's driver and toolkit."""

    distribution: str
    # Of the toolkit: libnvidia-container/stable/<this>; NVIDIA's is one for all Debians and one for all RPMs.
    toolkit_folder: str

    @property
    def debian(self) -> bool:
        return self.distribution in DEBIAN.values()


def tree(distribution: str, own: bool = False) -> Tree:
    """Return the tree of a distribution; only that of this machine's release has the toolkit at NVIDIA's path.

    NVIDIA's folder is one for all Debians, but each tree here has a key of its own, and programs for its own C library.
    """
    if distribution not in (*DEBIAN.values(), *RPM):
        known = ", ".join((*DEBIAN.values(), *RPM))
        raise LabError(f"the lab's repository knows the distributions {known}, not {distribution!r}.")
    if distribution in RPM:
        return Tree(distribution, "rpm" if distribution == "rhel9" else distribution)
    return Tree(distribution, "deb" if own else distribution)


def architecture_here() -> Architecture:
    debian = output(["dpkg", "--print-architecture"])
    if debian not in ARCHITECTURES:
        raise LabError(f"NVIDIA has no driver for this machine's architecture, {debian}.")
    return ARCHITECTURES[debian]


@dataclass(frozen=True)
class Folders:
    """The paths of a tree's parts below its root."""

    cuda: Path
    toolkit: Path
    cuda_key: Path
    toolkit_key: Path
    # Packages of the distribution that NVIDIA's need, for machines without another source of them.
    own: Path

    @property
    def own_key(self) -> Path:
        return self.own / "RPM-GPG-KEY"


def folders(root: Path, wanted: Tree, architecture: Architecture) -> Folders:
    """Return NVIDIA's own layout; the toolkit's key is above its folders, or in one of its own."""
    cuda = root / "cuda" / wanted.distribution / architecture.cuda
    stable = root / "libnvidia-container" / "stable" / wanted.toolkit_folder
    toolkit = stable / (architecture.debian if wanted.debian else os.uname().machine)
    key = stable.parents[1] if wanted.toolkit_folder == "deb" else stable
    own = root / "distribution" / wanted.distribution / os.uname().machine
    return Folders(cuda, toolkit, cuda / CUDA_KEY, key / TOOLKIT_KEY, own)


def build(
    root: Path,
    toolkit_bin: Path,
    driver_version: str,
    toolkit_version: str,
    wanted: Tree,
    sysroot: Path | None = None,
) -> None:
    """Build a tree below root, unless its inputs are unchanged.

    :param toolkit_bin: the folder with the real programs of NVIDIA's container toolkit.
    :param driver_version: the driver to serve, beside an older one of the same branch.
    :param toolkit_version: what version the toolkit's programs are.
    :param sysroot: the system whose C library the driver is built for, if not this machine's.
    """
    if not re.fullmatch(r"[0-9]{3}\.[0-9]{2,3}(\.[0-9]{2})?", driver_version):
        raise LabError(f"driver version {driver_version!r} isn't of the form 580.95.05.")
    architecture = architecture_here()
    packages.toolkit_base(toolkit_bin)
    stamp = root / ".made-from"
    inputs = _inputs(toolkit_bin, driver_version, toolkit_version, wanted, sysroot)
    if stamp.is_file() and stamp.read_text() == inputs:
        return
    root.mkdir(parents=True, exist_ok=True)
    with step(f"building the driver and toolkit repositories for {wanted.distribution}"):
        stamp.unlink(missing_ok=True)
        fresh = root / ".new"
        shutil.rmtree(fresh, ignore_errors=True)
        places = folders(fresh, wanted, architecture)
        places.cuda.mkdir(parents=True)
        places.toolkit.mkdir(parents=True)
        drivers = (older_than(driver_version), driver_version)
        with tempfile.TemporaryDirectory(prefix="kubegpu-repo-") as folder:
            scratch = Path(folder)
            for driver in drivers:
                packages.compile_driver(scratch / driver, driver, sysroot)
            fill = _fill_debian if wanted.debian else _fill_rpm
            fill(scratch, places, wanted, drivers, toolkit_bin, toolkit_version, architecture)
        _swap(fresh, root)
        stamp.write_text(inputs)


def _inputs(toolkit_bin: Path, driver: str, toolkit: str, wanted: Tree, sysroot: Path | None) -> str:
    """Return all inputs of a tree as text."""
    here = Path(__file__).resolve().parent
    # Sources of the driver's programs, for every package format.
    sources = [here / "packages.py", here / ("debs.py" if wanted.debian else "rpms.py"), Path(__file__).resolve()]
    sources += sorted(path for path in SOURCES.iterdir() if path.is_file())
    programs = {**packages.toolkit_base(toolkit_bin), **packages.toolkit_hook(toolkit_bin)}
    sources += [file.source for file in programs.values() if isinstance(file, packages.Copy)]
    facts = {
        "driver": driver,
        "toolkit": toolkit,
        "distribution": wanted.distribution,
        "toolkit folder": wanted.toolkit_folder,
        "machine": os.uname().machine,
        "compiler": output(["gcc", "-dumpfullversion"]),
        "sysroot": sysroot.name if sysroot else "",
        "sources": {path.name: _digest(path) for path in sources},
    }
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _signers(scratch: Path, places: Folders) -> list[tuple[str, Path, Signer]]:
    """Return a label, a folder and a new key for each repository."""
    made = []
    wanted = [
        ("NVIDIA CUDA", places.cuda, places.cuda_key),
        ("NVIDIA Container Toolkit", places.toolkit, places.toolkit_key),
        ("Distribution", places.own, places.own_key),
    ]
    for number, (label, folder, key) in enumerate(each for each in wanted if each[1].exists()):
        name = f"{label} repository, simulated by the kubegpu.share lab <lab@kubegpu.share>"
        signer = Signer(scratch / f"gnupg{number}", name)
        signer.export(key)
        made.append((label, folder, signer))
    return made


def _fill_debian(
    scratch: Path,
    places: Folders,
    wanted: Tree,
    drivers: Sequence[str],
    toolkit_bin: Path,
    toolkit: str,
    architecture: Architecture,
) -> None:
    for driver in drivers:
        for package in debs.driver_packages(scratch / driver, driver, architecture):
            debs.make_deb(package, architecture, places.cuda)
    for package in debs.toolkit_packages(toolkit_bin, toolkit):
        debs.make_deb(package, architecture, places.toolkit)
    suite = next(suite for suite, name in DEBIAN.items() if name == wanted.distribution)
    for label, folder, signer in _signers(scratch, places):
        try:
            release = {
                "Origin": "kubegpu.share lab",
                "Label": f"{label} (simulated)",
                "Codename": suite,
                "Architectures": architecture.debian,
                "Description": f"{label}, simulated by the kubegpu.share lab",
            }
            debs.make_index(folder, signer, release)
        finally:
            signer.close()


def _fill_rpm(
    scratch: Path,
    places: Folders,
    wanted: Tree,
    drivers: Sequence[str],
    toolkit_bin: Path,
    toolkit: str,
    _architecture: Architecture,
) -> None:
    machine = os.uname().machine
    describe = rpms.el_driver if wanted.distribution == "rhel9" else rpms.suse_driver
    made = [rpm for driver in drivers for rpm in describe(scratch / driver, driver)]
    for rpm in made:
        rpms.make_rpm(rpm, machine, places.cuda)
    for rpm in rpms.toolkit_rpms(toolkit_bin, toolkit):
        rpms.make_rpm(rpm, machine, places.toolkit)
    modules = ""
    if wanted.distribution == "rhel9":
        modules = rpms.el_modules(made, machine)
        places.own.mkdir(parents=True)
        for rpm in rpms.el_distribution():
            rpms.make_rpm(rpm, machine, places.own)
    for _label, folder, signer in _signers(scratch, places):
        try:
            rpms.make_index(folder, signer, modules if folder == places.cuda else "")
        finally:
            signer.close()


def _swap(fresh: Path, root: Path) -> None:
    """Replace the old folders by the new ones; the root stays, since a server may have it open."""
    old = root / ".old"
    shutil.rmtree(old, ignore_errors=True)
    old.mkdir()
    for each in sorted(fresh.iterdir()):
        if (root / each.name).exists():
            (root / each.name).rename(old / each.name)
        each.rename(root / each.name)
    fresh.rmdir()
    shutil.rmtree(old)
