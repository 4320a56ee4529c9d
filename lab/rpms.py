# SPDX-License-Identifier: GPL-3.0-or-later
"""RPMs of the simulated driver and of NVIDIA's real container toolkit, and the repositories that dnf and zypper read.

They hold the same files as the Debian packages. Names, split, epoch and modules are those of NVIDIA's repositories
rhel9 and opensuse15, as far as they are known; the dependencies among them aren't known in full, so each is on the very
same version. Left out is all that concerns displays, and nvidia-boot-update, which edits a boot loader that containers
lack.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.packages import (
    CARDS,
    CONFIGURE,
    EPOCH,
    MAINTAINER,
    NOUVEAU,
    SIMULATED,
    File,
    Link,
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

LIBRARIES = "usr/lib64"
UNITS = "usr/lib/systemd/system"
SCRIPT = "usr/lib/nvidia-sim/nvidia-sim"
# Folders that belong to the system, by its package filesystem or another.
OF_SYSTEM = (
    ".",
    "etc",
    "etc/products.d",
    "usr",
    "usr/bin",
    "usr/lib",
    "usr/lib64",
    "usr/lib/dracut",
    "usr/lib/dracut/dracut.conf.d",
    "usr/lib/firmware",
    "usr/lib/modprobe.d",
    "usr/lib/systemd",
    "usr/lib/systemd/system",
    "usr/share",
    "usr/share/doc",
)
# NVIDIA's packages for EL have this epoch, those for SUSE have none.
EL_EPOCH = "3"


@dataclass(frozen=True)
class Rpm:
    """An RPM; scripts are by the names that a spec has for them."""

    name: str
    version: str
    release: str
    summary: str
    details: str
    files: Mapping[str, File] = field(default_factory=dict)
    epoch: str = ""
    requires: Sequence[str] = ()
    provides: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    obsoletes: Sequence[str] = ()
    order: Sequence[str] = ()
    scripts: Mapping[str, str] = field(default_factory=dict)
    noarch: bool = False

    def nevra(self, machine: str) -> str:
        """Return its name in a module's list of artifacts."""
        return f"{self.name}-{self.epoch or '0'}:{self.version}-{self.release}.{'noarch' if self.noarch else machine}"


def _service(unit: str, start: str, stop: str) -> dict[str, str]:
    words = {"@UNIT@": unit, "@START@": start, "@STOP@": stop}
    return {name: filled(f"rpm.{name}", words) for name in ("post", "preun", "postun")}


_LDCONFIG = {"post": "ldconfig\n", "postun": "ldconfig\n"}


# --------------------------------------------------------------------------- the driver's files, by what they are for


def _libraries(built: Path, driver: str, *names: str) -> dict[str, File]:
    files: dict[str, File] = {}
    for name in names:
        files |= library(built, LIBRARIES, name, driver)
    return files


def _module(driver: str) -> dict[str, File]:
    here = {"@VERSION@": driver}
    return {
        SCRIPT: Text(filled("nvidia-sim", here), 0o755),
        f"{UNITS}/nvidia-sim.service": Text(filled("nvidia-sim.service", here)),
    }


def _persistenced(driver: str) -> dict[str, File]:
    here = {"@VERSION@": driver}
    return {
        "usr/bin/nvidia-persistenced": Text(filled("nvidia-persistenced", here), 0o755),
        f"{UNITS}/nvidia-persistenced.service": Text(filled("nvidia-persistenced.service", here)),
    }


def _firmware(driver: str) -> dict[str, File]:
    return firmware(driver)


_MODULE_DETAILS = (
    "No module is built: nvidia-sim.service makes what one shows in /dev, /proc/driver/nvidia and /sys.\n"
    "As with the real one, an upgrade takes effect when it is loaded anew: at boot or by restarting the unit."
)
_MODULE_SCRIPTS = ("nvidia-sim.service", f"/{SCRIPT} start", f"/{SCRIPT} stop")
_PERSISTENCED_SCRIPTS = ("nvidia-persistenced.service", ":", ":")


# --------------------------------------------------------------------------- as NVIDIA has it for EL


def el_driver(built: Path, driver: str, dist: str = ".el9") -> list[Rpm]:
    """Return the packages of one driver version, open and proprietary."""
    release = f"1{dist}"
    evr = f"{EL_EPOCH}:{driver}-{release}"

    def rpm(name: str, summary: str, details: str, files: Mapping[str, File], **more: object) -> Rpm:
        return Rpm(name, driver, release, summary, details, files, EL_EPOCH, **more)  # type: ignore[arg-type]

    def same(*names: str) -> tuple[str, ...]:
        return tuple(f"{name} = {evr}" for name in names)

    dracut = 'omit_drivers+=" nouveau nvidia nvidia-drm nvidia-modeset nvidia-uvm "\n'
    modules = {
        "kmod-nvidia-open-dkms": "NVIDIA open kernel module",
        "kmod-nvidia-latest-dkms": "NVIDIA proprietary kernel module",
    }
    return [
        rpm(
            "libnvidia-ml",
            "NVIDIA Management Library (NVML)",
            f"Answers from {CARDS}. {SIMULATED}",
            _libraries(built, driver, "libnvidia-ml.so"),
            scripts=_LDCONFIG,
        ),
        rpm(
            "nvidia-driver-cuda-libs",
            "NVIDIA CUDA driver libraries",
            f"Two functions, which find no device. {SIMULATED}",
            _libraries(built, driver, "libcuda.so"),
            requires=same("libnvidia-ml"),
            scripts=_LDCONFIG,
        ),
        rpm(
            "nvidia-driver-cuda",
            "NVIDIA driver for computing: nvidia-smi and what CUDA needs",
            f"The nvidia-smi is the lab's own. {SIMULATED}",
            programs(built),
            requires=same("nvidia-driver-cuda-libs", "nvidia-persistenced", "nvidia-kmod-common"),
            conflicts=("xorg-x11-drv-nvidia-cuda",),
        ),
        rpm(
            "nvidia-persistenced",
            "NVIDIA persistence daemon",
            "Turns the simulated cards' persistence mode on; makes no socket.",
            _persistenced(driver),
            order=("nvidia-kmod",),
            scripts=_service(*_PERSISTENCED_SCRIPTS),
        ),
        rpm(
            "nvidia-kmod-common",
            "Common files for NVIDIA's kernel modules",
            "Keeps nouveau away, as NVIDIA's package does, and brings the firmware: a link to the simulated cards.",
            {
                **_firmware(driver),
                "usr/lib/modprobe.d/nvidia.conf": Text(NOUVEAU),
                "usr/lib/dracut/dracut.conf.d/99-nvidia.conf": Text(dracut),
            },
            requires=(f"nvidia-kmod = {evr}",),
            conflicts=("xorg-x11-drv-nvidia-kmodsrc",),
            noarch=True,
        ),
        *(
            rpm(
                name,
                summary,
                _MODULE_DETAILS,
                _module(driver),
                requires=(*same("nvidia-kmod-common"), "dkms"),
                provides=(f"nvidia-kmod = {evr}",),
                conflicts=tuple(other for other in modules if other != name),
                scripts=_service(*_MODULE_SCRIPTS),
                noarch=True,
            )
            for name, summary in modules.items()
        ),
        rpm(
            "nvidia-open",
            "NVIDIA driver with open kernel modules (metapackage)",
            "The parts for computing; NVIDIA's brings those for displays too.",
            {},
            requires=same("nvidia-driver-cuda", "kmod-nvidia-open-dkms"),
            noarch=True,
        ),
    ]


def el_modules(rpms: Iterable[Rpm], machine: str) -> str:
    """Return modules.yaml: the streams of module nvidia-driver, one per flavour for the newest and for each branch."""
    made = list(rpms)
    branches = sorted({rpm.version.split(".")[0] for rpm in made if rpm.epoch == EL_EPOCH})
    streams = {"open-dkms": ("kmod-nvidia-open-dkms", ""), "latest-dkms": ("kmod-nvidia-latest-dkms", "")}
    for branch in branches:
        streams[f"{branch}-open"] = ("kmod-nvidia-open-dkms", branch)
        streams[f"{branch}-dkms"] = ("kmod-nvidia-latest-dkms", branch)
    kmods = {kmod for kmod, _branch in streams.values()} | {"nvidia-open"}
    documents = []
    for stream, (kmod, branch) in streams.items():
        own = {kmod, *(["nvidia-open"] if kmod == "kmod-nvidia-open-dkms" else [])}
        listed = [
            rpm.nevra(machine)
            for rpm in made
            if (rpm.name in own or rpm.name not in kmods) and rpm.version.startswith(branch)
        ]
        artifacts = "".join(f"    - {nevra}\n" for nevra in sorted(listed))
        documents.append(
            "---\ndocument: modulemd\nversion: 2\ndata:\n"
            f'  name: nvidia-driver\n  stream: "{stream}"\n  version: 20260101000000\n  context: kubegpu1\n'
            f"  arch: {machine}\n"
            f"  summary: Simulated NVIDIA driver, stream {stream}\n"
            "  description: >-\n    Of the kubegpu.share lab.\n"
            "  license:\n    module: [GPL-3.0-or-later]\n"
            "  profiles:\n    default:\n      rpms:\n"
            f"      - nvidia-driver-cuda\n      - {kmod}\n"
            f"  artifacts:\n    rpms:\n{artifacts}...\n"
        )
    documents.append(
        "---\ndocument: modulemd-defaults\nversion: 1\ndata:\n  module: nvidia-driver\n  stream: latest-dkms\n"
        '  profiles:\n    latest-dkms: ["default"]\n    open-dkms: ["default"]\n...\n'
    )
    return "".join(documents)


# --------------------------------------------------------------------------- as NVIDIA has it for SUSE


def suse_driver(built: Path, driver: str) -> list[Rpm]:
    """Return the packages of one driver version of generation G06, compute only."""
    release = "1"
    evr = f"{driver}-{release}"

    def rpm(name: str, summary: str, details: str, files: Mapping[str, File], **more: object) -> Rpm:
        return Rpm(name, driver, release, summary, details, files, **more)  # type: ignore[arg-type]

    def same(*names: str) -> tuple[str, ...]:
        return tuple(f"{name} = {evr}" for name in names)

    return [
        rpm(
            "nvidia-compute-G06",
            "NVIDIA driver for computing: its libraries",
            f"Answers from {CARDS}. {SIMULATED}",
            _libraries(built, driver, "libnvidia-ml.so", "libcuda.so"),
            requires=same("nvidia-common-G06", "nvidia-persistenced"),
            scripts=_LDCONFIG,
        ),
        rpm(
            "nvidia-compute-utils-G06",
            "NVIDIA driver for computing: nvidia-smi",
            f"The nvidia-smi is the lab's own. {SIMULATED}",
            programs(built),
            requires=same("nvidia-compute-G06"),
        ),
        rpm(
            "nvidia-common-G06",
            "Common files for NVIDIA's kernel modules",
            "Keeps nouveau away and brings the firmware: a link to the simulated cards.",
            {**_firmware(driver), "usr/lib/modprobe.d/50-nvidia.conf": Text(NOUVEAU)},
        ),
        rpm(
            "nvidia-persistenced",
            "NVIDIA persistence daemon",
            "Turns the simulated cards' persistence mode on; makes no socket.",
            _persistenced(driver),
            # zypper installs one by one, in the order of what is required.
            requires=(f"nvidia-kmod = {evr}",),
            scripts=_service(*_PERSISTENCED_SCRIPTS),
        ),
        *(
            rpm(
                name,
                summary,
                _MODULE_DETAILS,
                _module(driver),
                requires=same("nvidia-common-G06"),
                provides=(f"nvidia-kmod = {evr}",),
                conflicts=(other,),
                scripts=_service(*_MODULE_SCRIPTS),
            )
            for name, other, summary in (
                ("nvidia-open-driver-G06", "nvidia-driver-G06", "NVIDIA open kernel module"),
                ("nvidia-driver-G06", "nvidia-open-driver-G06", "NVIDIA proprietary kernel module"),
            )
        ),
        rpm(
            "nvidia-open",
            "NVIDIA driver with open kernel modules (metapackage)",
            "The parts for computing; NVIDIA's brings those for displays too.",
            {},
            requires=same("nvidia-compute-utils-G06", "nvidia-open-driver-G06"),
            noarch=True,
        ),
    ]


# --------------------------------------------------------------------------- the toolkit, and a distribution's own


def toolkit_rpms(binaries: Path, toolkit: str) -> list[Rpm]:
    """Return NVIDIA's container toolkit from its real programs; the two packages of its old C library are empty."""
    real = "The programs are NVIDIA's, built from their source; only the package is the lab's."
    empty = "Empty: the toolkit's CDI modes don't use it."
    evr = f"{toolkit}-1"
    old = ("nvidia-container-runtime <= 3.5.0-1", "nvidia-container-runtime-hook <= 1.4.0-2")
    return [
        Rpm(
            "nvidia-container-toolkit-base",
            toolkit,
            "1",
            "NVIDIA Container Toolkit base",
            real,
            toolkit_base(binaries),
            obsoletes=old,
            scripts={"post": f"{CONFIGURE}\n"},
        ),
        Rpm(
            "nvidia-container-toolkit",
            toolkit,
            "1",
            "NVIDIA Container Toolkit",
            real,
            toolkit_hook(binaries),
            requires=(f"nvidia-container-toolkit-base = {evr}", f"libnvidia-container-tools = {evr}"),
        ),
        Rpm(
            "libnvidia-container-tools",
            toolkit,
            "1",
            "NVIDIA container runtime library (command-line tools)",
            empty,
            requires=(f"libnvidia-container1 >= {evr}",),
        ),
        Rpm("libnvidia-container1", toolkit, "1", "NVIDIA container runtime library", empty),
    ]


def system() -> list[Rpm]:
    """Return stubs of what packages' scripts require, which isn't a package on these machines."""
    stub = "A stub: the program itself is the system's own."
    return [
        Rpm("bash", "5.1.8", "9", "The GNU Bourne Again shell", stub, provides=("/bin/sh", "/bin/bash")),
        Rpm("glibc", "2.34", "125", "The GNU libc libraries", stub, provides=("/sbin/ldconfig", "libc.so.6()(64bit)")),
    ]


def el_release() -> Rpm:
    """Return the package by which dnf determines the release."""
    return Rpm(
        "rocky-release",
        "9.5",
        "1.2.el9",
        "Rocky Linux release files",
        "A stub: dnf takes $releasever from what it provides.",
        {
            "etc/rocky-release": Text("Rocky Linux release 9.5 (Blue Onyx)\n"),
            "etc/redhat-release": Link("rocky-release"),
        },
        provides=("system-release = 9.5-1.2.el9", "system-release(releasever) = 9", "redhat-release = 9.5"),
        noarch=True,
    )


def suse_release() -> Rpm:
    """Return the package by which zypper determines the release."""
    return Rpm(
        "openSUSE-release",
        "15.6",
        "lp156.1.1",
        "openSUSE Leap release files",
        "A stub: zypper takes $releasever from the product that it provides.",
        {"etc/products.d/Leap.prod": Text(filled("leap.prod", {})), "etc/products.d/baseproduct": Link("Leap.prod")},
        provides=("distribution-release", "product() = Leap", "product(Leap) = 15.6-1", "suse-release = 15.6"),
        noarch=True,
    )


def el_distribution() -> list[Rpm]:
    """Return the packages of EPEL that NVIDIA's require, and what every machine has, which they require, too."""
    stub = "A stub of the kubegpu.share lab: nothing can be built with it."
    return [*system(), Rpm("dkms", "3.2.1", "1.el9", "Dynamic Kernel Module Support Framework", stub, noarch=True)]


# --------------------------------------------------------------------------- packages and repositories


def spec(rpm: Rpm) -> str:
    """Return the spec for rpmbuild; the files are in a folder named root."""
    head = {
        "Name": rpm.name,
        "Epoch": rpm.epoch,
        "Version": rpm.version,
        "Release": rpm.release,
        "Summary": f"{rpm.summary} (simulated, of the kubegpu.share lab)",
        "License": "GPL-3.0-or-later",
        "Vendor": MAINTAINER,
        "BuildArch": "noarch" if rpm.noarch else "",
        # What the programs need is there on every machine, and is no package of it.
        "AutoReqProv": "no",
    }
    lines = [f"{key}: {value}" for key, value in head.items() if value]
    for key, values in (
        ("Requires", rpm.requires),
        ("Provides", rpm.provides),
        ("Conflicts", rpm.conflicts),
        ("Obsoletes", rpm.obsoletes),
        ("OrderWithRequires", rpm.order),
    ):
        lines += [f"{key}: {value}" for value in values]
    lines += ["", "%description", rpm.details, "", "%install", "cp -a %{_topdir}/root/. %{buildroot}/"]
    for name, text in rpm.scripts.items():
        lines += ["", f"%{name} -p /sbin/ldconfig" if text == "ldconfig\n" else f"%{name}\n{text.rstrip()}"]
    lines += ["", "%files"]
    for path, file in {**rpm.files, _about_path(rpm): about(rpm.name, rpm.details)}.items():
        mode = "-" if isinstance(file, Link) else f"{file.mode:04o}"
        lines.append(f"%attr({mode},root,root) /{path}")
    lines += [f"%dir %attr(0755,root,root) /{folder}" for folder in _folders(rpm)]
    return "\n".join(lines) + "\n"


def _folders(rpm: Rpm) -> list[str]:
    """Return the folders of a package: all but those that a system has of itself."""
    found = {str(folder) for path in (*rpm.files, _about_path(rpm)) for folder in Path(path).parents}
    return sorted(found - set(OF_SYSTEM))


def _about_path(rpm: Rpm) -> str:
    return f"usr/share/doc/{rpm.name}/copyright"


def make_rpm(rpm: Rpm, machine: str, target: Path) -> Path:
    """Build one RPM in the target folder."""
    with tempfile.TemporaryDirectory(prefix="kubegpu-rpm-") as scratch:
        top = Path(scratch)
        write_files(top / "root", {**rpm.files, _about_path(rpm): about(rpm.name, rpm.details)})
        (top / "package.spec").write_text(spec(rpm))
        definitions = {
            "_topdir": str(top),
            "_rpmdir": str(target),
            "_rpmfilename": "%{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm",
            "_buildhost": "kubegpu-lab",
            "_binary_payload": "w6.gzdio",
            "_build_id_links": "none",
            "debug_package": "%{nil}",
            "__os_install_post": "%{nil}",
            "use_source_date_epoch_as_buildtime": "1",
            "clamp_mtime_to_source_date_epoch": "1",
            # As every package of today's has it: one that names its package's files by their own paths.
            "_build_name_fmt": "%{_rpmfilename}",
        }
        words = [word for name, value in definitions.items() for word in ("--define", f"{name} {value}")]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "LC_ALL": "C"}
        run(["rpmbuild", "-bb", "--quiet", f"--target={machine}", *words, str(top / "package.spec")], env=environment)
    return target / f"{rpm.name}-{rpm.version}-{rpm.release}.{'noarch' if rpm.noarch else machine}.rpm"


def make_index(folder: Path, signer: Signer, modules: str = "") -> None:
    """Sign the RPMs of a folder and turn it into a repository with signed metadata."""
    rpms = [str(path) for path in sorted(folder.glob("*.rpm"))]
    definitions = {"_gpg_name": signer.name, "__gpg": shutil.which("gpg") or "/usr/bin/gpg"}
    words = [word for name, value in definitions.items() for word in ("--define", f"{name} {value}")]
    run(["rpmsign", *words, "--addsign", *rpms], env=signer.environment)
    if modules:
        (folder / "modules.yaml").write_text(modules)
    run(["createrepo_c", "--quiet", "--no-database", "--general-compress-type=gz", str(folder)])
    metadata = folder / "repodata" / "repomd.xml"
    signer.sign(metadata.with_name("repomd.xml.asc"), metadata)
