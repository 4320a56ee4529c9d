# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's two apt repositories: a simulated NVIDIA driver and NVIDIA's real container toolkit, as packages.

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

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.shell import LabError, output, run, step

SOURCES = Path(__file__).resolve().parent / "driver"
CUDA_KEY = "lab-cuda.asc"
TOOLKIT_KEY = "gpgkey"
CARDS = "/var/lib/kubegpu-lab/hardware/cards"
MAINTAINER = "The kubegpu.share authors <lab@kubegpu.share>"

# The folder of NVIDIA's CUDA repository for a Debian suite.
DISTRIBUTIONS = {"bullseye": "debian11", "bookworm": "debian12", "trixie": "debian13"}

# Releases of NVIDIA's branches, so that the older version in the repository is one that exists.
RELEASES = {
    "550": ("550.90.07", "550.127.05", "550.144.03", "550.163.01"),
    "570": ("570.86.15", "570.133.20", "570.158.01"),
    "580": ("580.65.06", "580.82.07", "580.95.05", "580.105.08", "580.126.20", "580.178.04"),
    "590": ("590.44.01", "590.48.01"),
    "610": ("610.43.02", "610.57.04"),
}
# The newest CUDA that a branch supports, as cuDriverGetVersion counts: branch and all after it.
CUDA = {
    0: 12000,
    535: 12020,
    550: 12040,
    560: 12060,
    570: 12080,
    580: 13000,
    590: 13010,
    595: 13020,
    610: 13030,
    615: 13040,
}

C_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden")
# Files of a package are as old as this, whenever it is built.
EPOCH = "1767225600"


@dataclass(frozen=True)
class Architecture:
    """What one machine architecture is called by Debian, its C libraries and NVIDIA's repository."""

    debian: str
    triplet: str
    cuda: str


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64-linux-gnu", "x86_64"),
    "arm64": Architecture("arm64", "aarch64-linux-gnu", "sbsa"),
}


@dataclass(frozen=True)
class Text:
    """A file made from words."""

    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class Copy:
    """A file made from another one."""

    source: Path
    mode: int = 0o755


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Package:
    """A Debian package; `control` has the fields beyond the ones that all have, `scripts` what dpkg runs."""

    name: str
    version: str
    summary: str
    details: str
    files: Mapping[str, Text | Copy | Link] = field(default_factory=dict)
    control: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)


def older_than(version: str) -> str:
    """A version of the same branch before this one; NVIDIA's, or an invented one where none is known."""
    branch, second, *_rest = version.split(".")
    before = [release for release in RELEASES.get(branch, ()) if _numbers(release) < _numbers(version)]
    if before:
        return before[-1]
    if int(second) == 0:
        raise LabError(f"driver version {version} has none before it in its branch; choose a later one.")
    return f"{branch}.{int(second) - 1:02d}.01"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _cuda(version: str) -> int:
    return CUDA[max(branch for branch in CUDA if branch <= _numbers(version)[0])]


# --------------------------------------------------------------------------- the driver


def compile_driver(folder: Path, version: str) -> None:
    """The two libraries and nvidia-smi of one driver version."""
    folder.mkdir(parents=True, exist_ok=True)
    nvml, cuda = folder / f"libnvidia-ml.so.{version}", folder / f"libcuda.so.{version}"
    shared = ("-shared", "-pthread")
    own = f'-DDRIVER_VERSION="{version}"'
    _compile("nvml.c", nvml, *shared, own, "-Wl,-soname,libnvidia-ml.so.1")
    _compile("cuda.c", cuda, *shared, f"-DCUDA_VERSION={_cuda(version)}", "-Wl,-soname,libcuda.so.1")
    _compile("nvidia_smi.c", folder / "nvidia-smi", own, "-ldl")


def _compile(source: str, target: Path, *flags: str) -> None:
    # Libraries stand behind the source that needs them.
    run(["gcc", *C_FLAGS, "-o", str(target), str(SOURCES / source), *flags])


def _service(unit: str, start: str, stop: str) -> dict[str, str]:
    """The maintainer scripts of a package with one unit."""
    words = {"@UNIT@": unit, "@START@": start, "@STOP@": stop}
    return {name: _filled(f"service.{name}", words) for name in ("postinst", "prerm", "postrm")}


def _filled(name: str, words: Mapping[str, str]) -> str:
    text = (SOURCES / name).read_text()
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text


def driver_packages(built: Path, driver: str, architecture: Architecture) -> list[Package]:
    """The packages of one driver version, from what compile_driver made."""
    version = f"{driver}-1"
    branch = driver.split(".")[0]
    here = {"@VERSION@": driver}
    libraries = f"usr/lib/{architecture.triplet}"
    units = "usr/lib/systemd/system"
    script = "usr/lib/nvidia-sim/nvidia-sim"
    nouveau = "# Simulated driver of the kubegpu.share lab.\nblacklist nouveau\n"
    simulated = "There is no GPU and no code of NVIDIA's behind it."

    def same(*names: str) -> str:
        return ", ".join(f"{name} (= {version})" for name in names)

    def library(name: str, soname: str) -> dict[str, Text | Copy | Link]:
        return {
            f"{libraries}/{name}.{driver}": Copy(built / f"{name}.{driver}", 0o644),
            f"{libraries}/{soname}": Link(f"{name}.{driver}"),
        }

    packages = [
        Package(
            "firmware-nvidia-gsp",
            version,
            "NVIDIA GSP firmware",
            f"The file is a link to the description of the simulated cards, {CARDS}.",
            {f"usr/lib/firmware/nvidia/{driver}/gsp_sim.bin": Link(CARDS)},
        ),
        Package(
            "libnvidia-ml1",
            version,
            "NVIDIA Management Library (NVML)",
            f"Answers from {CARDS}. {simulated}",
            library("libnvidia-ml.so", "libnvidia-ml.so.1"),
            {"Depends": "libc6", "Multi-Arch": "same"},
            {"triggers": "activate-noawait ldconfig\n"},
        ),
        Package(
            "libcuda1",
            version,
            "NVIDIA CUDA driver library",
            f"Two functions, which find no device. {simulated}",
            library("libcuda.so", "libcuda.so.1"),
            {"Depends": "libc6", "Multi-Arch": "same"},
            {"triggers": "activate-noawait ldconfig\n"},
        ),
        Package(
            "nvidia-kernel-support",
            version,
            "NVIDIA kernel module support files",
            "Keeps nouveau away, as NVIDIA's package does.",
            {"usr/lib/modprobe.d/nvidia-blacklists-nouveau.conf": Text(nouveau)},
        ),
        Package(
            "nvidia-kernel-open-dkms",
            version,
            "NVIDIA open kernel module",
            "No module is built: nvidia-sim.service makes what one shows in /dev, /proc/driver/nvidia and /sys.\n"
            " As with the real one, an upgrade takes effect when it is loaded anew: at boot or by restarting the unit.",
            {
                script: Text(_filled("nvidia-sim", here), 0o755),
                f"{units}/nvidia-sim.service": Text(_filled("nvidia-sim.service", here)),
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
                "usr/bin/nvidia-persistenced": Text(_filled("nvidia-persistenced", here), 0o755),
                f"{units}/nvidia-persistenced.service": Text(_filled("nvidia-persistenced.service", here)),
            },
            {},
            # Without systemd there is nothing to start: the daemon of a machine that isn't booted has nobody to serve.
            _service("nvidia-persistenced.service", ":", ":"),
        ),
        Package(
            "nvidia-driver-cuda",
            version,
            "NVIDIA driver for computing: nvidia-smi and what CUDA needs",
            f"The nvidia-smi is the lab's own. {simulated}",
            {"usr/bin/nvidia-smi": Copy(built / "nvidia-smi")},
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
    """A package whose installation holds the driver's packages at some versions; above 1000 apt downgrades too."""
    # apt reads no file whose name has a dot but in front of pref.
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


BASE_BINARIES = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-cdi-hook")
HOOK_BINARY = "nvidia-container-runtime-hook"
# The runtime in one fixed mode; not everybody's build of the toolkit has them.
OPTIONAL_BINARIES = ("nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy")

_CONFIGURE = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    /usr/bin/nvidia-ctk --quiet config --config-file=/etc/nvidia-container-runtime/config.toml --in-place
fi
"""


def toolkit_packages(binaries: Path, toolkit: str) -> list[Package]:
    """NVIDIA's container toolkit from its real programs; the two packages of its old C library are empty."""
    missing = [name for name in (*BASE_BINARIES, HOOK_BINARY) if not (binaries / name).is_file()]
    if missing:
        raise LabError(f"the container toolkit's folder {binaries} lacks {', '.join(missing)}.")
    version = f"{toolkit}-1"
    base = [name for name in (*BASE_BINARIES, *OPTIONAL_BINARIES) if (binaries / name).is_file()]
    real = "The programs are NVIDIA's, built from their source; only the package is the lab's."
    empty = "Empty: the toolkit's CDI modes don't use it."
    old = "nvidia-container-runtime (<= 3.5.0-1), nvidia-container-runtime-hook"
    return [
        Package(
            "nvidia-container-toolkit-base",
            version,
            "NVIDIA Container Toolkit base",
            real,
            {f"usr/bin/{name}": Copy(binaries / name) for name in base},
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
            {
                f"usr/bin/{HOOK_BINARY}": Copy(binaries / HOOK_BINARY),
                "usr/bin/nvidia-container-toolkit": Link(HOOK_BINARY),
            },
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


# --------------------------------------------------------------------------- packages and repositories


def _write(root: Path, files: Mapping[str, Text | Copy | Link]) -> None:
    for name, file in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(file, Link):
            target.symlink_to(file.target)
            continue
        if isinstance(file, Copy):
            shutil.copyfile(file.source, target)
        else:
            target.write_text(file.content)
        target.chmod(file.mode)
    for folder, _names, _files in os.walk(root):
        Path(folder).chmod(0o755)


def make_deb(package: Package, architecture: Architecture, target: Path) -> None:
    """One .deb in the target folder."""
    with tempfile.TemporaryDirectory(prefix="kubegpu-deb-") as scratch:
        root = Path(scratch) / package.name
        about = Text(
            f"{package.name} of the kubegpu.share lab: simulated.\n{package.details}\n\n"
            "Copyright (c) the kubegpu.share authors, GPL-3.0-or-later. The programs of NVIDIA's container toolkit:\n"
            "Copyright NVIDIA CORPORATION, Apache-2.0, https://github.com/NVIDIA/nvidia-container-toolkit\n"
        )
        _write(root, {**package.files, f"usr/share/doc/{package.name}/copyright": about})
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
        _write(root / "DEBIAN", {"control": Text(control), **scripts})
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(root), str(target)], env=environment)


class Signer:
    """A signing key that lives in a folder of its own for as long as the repositories are made."""

    def __init__(self, home: Path, name: str) -> None:
        home.mkdir(mode=0o700)
        self._name = name
        self._environment = {**os.environ, "GNUPGHOME": str(home), "LC_ALL": "C"}
        self._gpg("--passphrase", "", "--quick-generate-key", name, "rsa3072", "sign", "0")

    def _gpg(self, *arguments: str) -> None:
        run(["gpg", "--batch", "--yes", "--quiet", "--no-tty", *arguments], env=self._environment)

    def export(self, target: Path) -> None:
        self._gpg("--armor", "--output", str(target), "--export", self._name)

    def sign(self, release: Path) -> None:
        """InRelease and Release.gpg beside a Release file."""
        self._gpg(
            "--local-user", self._name, "--clearsign", "--output", str(release.with_name("InRelease")), str(release)
        )
        detached = str(release.with_name("Release.gpg"))
        self._gpg("--local-user", self._name, "--armor", "--detach-sign", "--output", detached, str(release))

    def close(self) -> None:
        """End the agent that gpg started for this folder."""
        run(["gpgconf", "--kill", "all"], env=self._environment)


def make_index(folder: Path, signer: Signer, release: Mapping[str, str]) -> None:
    """Turn a folder of .debs into a signed flat repository."""
    packages = run(["apt-ftparchive", "packages", "."], cwd=str(folder)).stdout
    (folder / "Packages").write_text(packages)
    run(["gzip", "-9nk", str(folder / "Packages")])
    options = [word for name, value in release.items() for word in ("-o", f"APT::FTPArchive::Release::{name}={value}")]
    text = run(["apt-ftparchive", *options, "release", "."], cwd=str(folder)).stdout
    (folder / "Release").write_text(text)
    signer.sign(folder / "Release")


def build(repo_dir: Path, toolkit_bin: Path, driver_version: str, toolkit_version: str, suite: str) -> None:
    """Make both repositories under repo_dir, unless what they are made from is what they were made from.

    :param repo_dir: the folder that is served; gets cuda/<distribution>/<arch>/ and libnvidia-container/.
    :param toolkit_bin: the folder with the real programs of NVIDIA's container toolkit.
    :param driver_version: the driver to serve, beside an older one of the same branch.
    :param toolkit_version: what version the toolkit's programs are.
    :param suite: the nodes' Debian, which names the folder.
    """
    if not re.fullmatch(r"[0-9]{3}\.[0-9]{2,3}(\.[0-9]{2})?", driver_version):
        raise LabError(f"driver version {driver_version!r} isn't one like 580.95.05.")
    if suite not in DISTRIBUTIONS:
        raise LabError(f"the lab's repository knows the Debian suites {', '.join(DISTRIBUTIONS)}, not {suite!r}.")
    debian = output(["dpkg", "--print-architecture"])
    if debian not in ARCHITECTURES:
        raise LabError(f"NVIDIA has no driver for this machine's architecture, {debian}.")
    architecture = ARCHITECTURES[debian]
    toolkit = toolkit_packages(toolkit_bin, toolkit_version)
    stamp = repo_dir / ".made-from"
    inputs = _inputs(toolkit, driver_version, suite, debian)
    if stamp.is_file() and stamp.read_text() == inputs:
        return
    repo_dir.mkdir(parents=True, exist_ok=True)
    with step("making the apt repositories of the simulated driver and the container toolkit"):
        stamp.unlink(missing_ok=True)
        fresh = repo_dir / ".new"
        shutil.rmtree(fresh, ignore_errors=True)
        cuda = fresh / "cuda" / DISTRIBUTIONS[suite] / architecture.cuda
        container = fresh / "libnvidia-container" / "stable" / "deb" / architecture.debian
        cuda.mkdir(parents=True)
        container.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="kubegpu-repo-") as scratch:
            _fill(Path(scratch), cuda, container, (older_than(driver_version), driver_version), toolkit, architecture)
            _sign(Path(scratch), cuda, container, suite, architecture)
        _swap(fresh, repo_dir)
        stamp.write_text(inputs)


def _inputs(toolkit: Sequence[Package], driver: str, suite: str, debian: str) -> str:
    """All that the repositories are made from, as text."""
    sources = [Path(__file__).resolve(), *sorted(path for path in SOURCES.iterdir() if path.is_file())]
    sources += [file.source for package in toolkit for file in package.files.values() if isinstance(file, Copy)]
    facts = {
        "driver": driver,
        "toolkit": toolkit[0].version,
        "suite": suite,
        "architecture": debian,
        "compiler": output(["gcc", "-dumpfullversion"]),
        "sources": {path.name: _digest(path) for path in sources},
    }
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill(
    scratch: Path,
    cuda: Path,
    container: Path,
    drivers: Sequence[str],
    toolkit: Sequence[Package],
    architecture: Architecture,
) -> None:
    for driver in drivers:
        compile_driver(scratch / driver, driver)
        for package in driver_packages(scratch / driver, driver, architecture):
            make_deb(package, architecture, cuda)
    for package in toolkit:
        make_deb(package, architecture, container)


def _sign(scratch: Path, cuda: Path, container: Path, suite: str, architecture: Architecture) -> None:
    """Index both; each has a key of its own, as NVIDIA's have."""
    for number, (folder, label, key) in enumerate(
        (
            (cuda, "NVIDIA CUDA", cuda / CUDA_KEY),
            (container, "NVIDIA Container Toolkit", container.parents[2] / TOOLKIT_KEY),
        )
    ):
        signer = Signer(
            scratch / f"gnupg{number}", f"{label} repository, simulated by the kubegpu.share lab <lab@kubegpu.share>"
        )
        try:
            make_index(
                folder,
                signer,
                {
                    "Origin": "kubegpu.share lab",
                    "Label": f"{label} (simulated)",
                    "Codename": suite,
                    "Architectures": architecture.debian,
                    "Description": f"{label}, simulated by the kubegpu.share lab",
                },
            )
            signer.export(key)
        finally:
            signer.close()


def _swap(fresh: Path, repo_dir: Path) -> None:
    """Put the new trees in the old ones' place; the folder itself stays, because a server may have it open."""
    old = repo_dir / ".old"
    shutil.rmtree(old, ignore_errors=True)
    old.mkdir()
    for tree in sorted(fresh.iterdir()):
        if (repo_dir / tree.name).exists():
            (repo_dir / tree.name).rename(old / tree.name)
        tree.rename(repo_dir / tree.name)
    fresh.rmdir()
    shutil.rmtree(old)
