# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian packages of the simulated driver and of NVIDIA's real container toolkit, and apt repositories of them.

They are named and split as NVIDIA's are, as far as that is known. NVIDIA's CUDA repository for Debian 12 has, from
branch 560 on, firmware-nvidia-gsp, libcuda1, libnvidia-ml1, nvidia-driver-cuda, nvidia-kernel-open-dkms,
nvidia-kernel-support, nvidia-modprobe, nvidia-open, nvidia-persistenced and nvidia-driver-pinning-<branch or version>,
of version <driver>-1, beside libraries and tools for displays, video and compilers. It has no nvidia-smi package:
nvidia-driver-cuda brings the program, and conflicts with Debian's package of that name. The dependencies among them
aren't known in full; here each is on the very same version.

Of the toolkit, names and dependencies are those of its own packaging (packaging/debian/control). Left out: the units
that refresh the CDI specification, which look for a kernel module's file that a simulated driver has not.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.packages import (
    CARDS,
    CONFIGURE,
    EPOCH,
    MAINTAINER,
    NOUVEAU,
    SIMULATED,
    Architecture,
    File,
    Signer,
    Text,
    about,
    filled,
    firmware,
    library,
    programs,
    toolkit_base,
    toolkit_hook,
    write_files,
)
from lab.shell import run


@dataclass(frozen=True)
class Package:
    """A Debian package; `control` has its additional fields, `scripts` its maintainer scripts."""

    name: str
    version: str
    summary: str
    details: str
    files: Mapping[str, File] = field(default_factory=dict)
    control: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)


def _service(unit: str, start: str, stop: str) -> dict[str, str]:
    """Return the maintainer scripts of a package with one unit."""
    words = {"@UNIT@": unit, "@START@": start, "@STOP@": stop}
    return {name: filled(f"service.{name}", words) for name in ("postinst", "prerm", "postrm")}


def driver_packages(built: Path, driver: str, architecture: Architecture) -> list[Package]:
    """Return the packages of one driver version, from the output of compile_driver."""
    version = f"{driver}-1"
    branch = driver.split(".")[0]
    here = {"@VERSION@": driver}
    libraries = f"usr/lib/{architecture.triplet}"
    units = "usr/lib/systemd/system"
    script = "usr/lib/nvidia-sim/nvidia-sim"

    def same(*names: str) -> str:
        return ", ".join(f"{name} (= {version})" for name in names)

    packages = [
        Package(
            "firmware-nvidia-gsp",
            version,
            "NVIDIA GSP firmware",
            f"The file is a link to the description of the simulated cards, {CARDS}.",
            firmware(driver),
        ),
        Package(
            "libnvidia-ml1",
            version,
            "NVIDIA Management Library (NVML)",
            f"Answers from {CARDS}. {SIMULATED}",
            library(built, libraries, "libnvidia-ml.so", driver),
            {"Depends": "libc6", "Multi-Arch": "same"},
            {"triggers": "activate-noawait ldconfig\n"},
        ),
        Package(
            "libcuda1",
            version,
            "NVIDIA CUDA driver library",
            f"Two functions, which find no device. {SIMULATED}",
            library(built, libraries, "libcuda.so", driver),
            {"Depends": "libc6", "Multi-Arch": "same"},
            {"triggers": "activate-noawait ldconfig\n"},
        ),
        Package(
            "nvidia-kernel-support",
            version,
            "NVIDIA kernel module support files",
            "Keeps nouveau away, as NVIDIA's package does.",
            {"usr/lib/modprobe.d/nvidia-blacklists-nouveau.conf": Text(NOUVEAU)},
        ),
        Package(
            "nvidia-kernel-open-dkms",
            version,
            "NVIDIA open kernel module",
            "No module is built: nvidia-sim.service makes what one shows in /dev, /proc/driver/nvidia and /sys.\n"
            " As with the real one, an upgrade takes effect when it is loaded anew: at boot or by restarting the unit.",
            {
                script: Text(filled("nvidia-sim", here), 0o755),
                f"{units}/nvidia-sim.service": Text(filled("nvidia-sim.service", here)),
            },
            {"Depends": f"mount, {same('firmware-nvidia-gsp', 'nvidia-kernel-support')}"},
            _service("nvidia-sim.service", f"/{script} start", f"/{script} stop"),
        ),
        Package(
            "nvidia-persistenced",
            version,
            "NVIDIA persistence daemon",
            "Turns the simulated cards' persistence mode on; makes no socket.",
            {
                "usr/bin/nvidia-persistenced": Text(filled("nvidia-persistenced", here), 0o755),
                f"{units}/nvidia-persistenced.service": Text(filled("nvidia-persistenced.service", here)),
            },
            {},
            # No systemd, no boot: there is nothing to start.
            _service("nvidia-persistenced.service", ":", ":"),
        ),
        Package(
            "nvidia-driver-cuda",
            version,
            "NVIDIA driver for computing: nvidia-smi and what CUDA needs",
            f"The nvidia-smi is the lab's own. {SIMULATED}",
            programs(built),
            {
                "Depends": "libc6, "
                + same("libcuda1", "libnvidia-ml1", "nvidia-persistenced", "nvidia-kernel-open-dkms"),
                "Provides": "nvidia-smi",
                "Conflicts": "nvidia-smi",
                "Replaces": "nvidia-smi",
            },
        ),
        Package(
            "nvidia-open",
            version,
            "NVIDIA driver with open kernel modules (metapackage)",
            "The parts for computing; NVIDIA's brings those for displays too.",
            {},
            {"Depends": same("nvidia-driver-cuda", "nvidia-kernel-open-dkms")},
        ),
    ]
    pins = [
        (f"nvidia-driver-pinning-{driver}", version, f"{driver}-*"),
        (f"nvidia-driver-pinning-{branch}", f"{branch}-1", f"{branch}.*"),
    ]
    names = " ".join(package.name for package in packages)
    return packages + [_pin(name, pin_version, names, wanted) for name, pin_version, wanted in pins]


def _pin(name: str, version: str, packages: str, wanted: str) -> Package:
    """Return a package that pins the driver's packages; a priority above 1000 lets apt downgrade."""
    # apt ignores files with a dot in their names, except before pref.
    text = f"# Simulated driver of the kubegpu.share lab.\nPackage: {packages}\nPin: version {wanted}\n"
    return Package(
        name,
        version,
        "NVIDIA driver version lock",
        f"Holds the driver's packages at {wanted}.",
        {f"etc/apt/preferences.d/{name}.pref": Text(text + "Pin-Priority: 1001\n")},
        {"Provides": "nvidia-driver-pinning", "Conflicts": "nvidia-driver-pinning"},
    )


# --------------------------------------------------------------------------- the toolkit


_CONFIGURE = f'#!/bin/sh\nset -e\nif [ "$1" = configure ]; then\n    {CONFIGURE}\nfi\n'


def toolkit_packages(binaries: Path, toolkit: str) -> list[Package]:
    """Package NVIDIA's real container toolkit; the two packages of its old C library are empty."""
    version = f"{toolkit}-1"
    real = "The programs are NVIDIA's, built from their source; only the package is the lab's."
    empty = "Empty: the toolkit's CDI modes don't use it."
    old = "nvidia-container-runtime (<= 3.5.0-1), nvidia-container-runtime-hook"
    return [
        Package(
            "nvidia-container-toolkit-base",
            version,
            "NVIDIA Container Toolkit base",
            real,
            toolkit_base(binaries),
            {
                "Depends": "libc6",
                "Breaks": f"{old}, nvidia-container-toolkit (<= 1.10.0-1)",
                "Replaces": f"{old}, nvidia-container-toolkit (<= 1.10.0-1)",
            },
            {"postinst": _CONFIGURE},
        ),
        Package(
            "nvidia-container-toolkit",
            version,
            "NVIDIA Container Toolkit",
            real,
            toolkit_hook(binaries),
            {
                "Depends": f"libc6, nvidia-container-toolkit-base (= {version}), "
                f"libnvidia-container-tools (= {version}), libnvidia-container-tools (<< 2.0.0)",
                "Breaks": old,
                "Replaces": old,
            },
        ),
        Package(
            "libnvidia-container-tools",
            version,
            "NVIDIA container runtime library (command-line tools)",
            empty,
            {},
            {"Depends": f"libnvidia-container1 (>= {version})"},
        ),
        Package("libnvidia-container1", version, "NVIDIA container runtime library", empty),
    ]


def make_deb(package: Package, architecture: Architecture, target: Path) -> None:
    """Write one .deb into the target folder."""
    with tempfile.TemporaryDirectory(prefix="kubegpu-deb-") as scratch:
        root = Path(scratch) / package.name
        copyright_file = f"usr/share/doc/{package.name}/copyright"
        write_files(root, {**package.files, copyright_file: about(package.name, package.details)})
        fields = {
            "Package": package.name,
            "Version": package.version,
            "Architecture": architecture.debian,
            "Maintainer": MAINTAINER,
            "Section": "misc",
            "Priority": "optional",
            **package.control,
            "Description": f"{package.summary} (simulated, of the kubegpu.share lab)\n {package.details}",
        }
        control = "".join(f"{name}: {value}\n" for name, value in fields.items())
        scripts = {name: Text(text, 0o644 if name == "triggers" else 0o755) for name, text in package.scripts.items()}
        write_files(root / "DEBIAN", {"control": Text(control), **scripts})
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(root), str(target)], env=environment)


def make_index(folder: Path, signer: Signer, release: Mapping[str, str]) -> None:
    """Turn a folder of .debs into a signed flat repository."""
    packages = run(["apt-ftparchive", "packages", "."], cwd=str(folder)).stdout
    (folder / "Packages").write_text(packages)
    run(["gzip", "-9nk", str(folder / "Packages")])
    options = [word for name, value in release.items() for word in ("-o", f"APT::FTPArchive::Release::{name}={value}")]
    text = run(["apt-ftparchive", *options, "release", "."], cwd=str(folder)).stdout
    (folder / "Release").write_text(text)
    signer.sign(folder / "InRelease", folder / "Release", "--clearsign")
    signer.sign(folder / "Release.gpg", folder / "Release")
