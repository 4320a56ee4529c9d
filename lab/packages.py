# SPDX-License-Identifier: GPL-3.0-or-later
"""The contents of the lab's packages (simulated driver, real toolkit), independent of the package format."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.shell import LabError, output, run

SOURCES = Path(__file__).resolve().parent / "driver"
CUDA_KEY = "lab-cuda.asc"
TOOLKIT_KEY = "gpgkey"
CARDS = "/var/lib/kubegpu-lab/hardware/cards"
MAINTAINER = "The kubegpu.share authors <lab@kubegpu.share>"

NOUVEAU = "# Simulated driver of the kubegpu.share lab.\nblacklist nouveau\n"
SIMULATED = "There is no GPU and no code of NVIDIA's behind it."

# Real releases of NVIDIA's branches, for the older version in the repository.
RELEASES = {
    "550": ("550.90.07", "550.127.05", "550.144.03", "550.163.01"),
    "570": ("570.86.15", "570.133.20", "570.158.01"),
    "580": ("580.65.06", "580.82.07", "580.95.05", "580.105.08", "580.126.20", "580.178.04"),
    "590": ("590.44.01", "590.48.01"),
    "610": ("610.43.02", "610.57.04"),
}
# The newest CUDA of a branch and of later ones, as cuDriverGetVersion counts.
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
# The time stamp of all packaged files, so that builds are reproducible.
EPOCH = "1767225600"


@dataclass(frozen=True)
class Architecture:
    """The names of one architecture for Debian, its C libraries and NVIDIA's repository."""

    debian: str
    triplet: str
    cuda: str


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64-linux-gnu", "x86_64"),
    "arm64": Architecture("arm64", "aarch64-linux-gnu", "sbsa"),
}


@dataclass(frozen=True)
class Text:
    """A file with the given text."""

    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class Copy:
    """A copy of another file."""

    source: Path
    mode: int = 0o755


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


File = Text | Copy | Link


def older_than(version: str) -> str:
    """Return an earlier version of the same branch: a real one, or an invented one if none is known."""
    branch, second, *_rest = version.split(".")
    before = [release for release in RELEASES.get(branch, ()) if _numbers(release) < _numbers(version)]
    if before:
        return before[-1]
    if int(second) == 0:
        raise LabError(f"driver version {version} is the first of its branch; choose a later one.")
    return f"{branch}.{int(second) - 1:02d}.01"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _cuda(version: str) -> int:
    return CUDA[max(branch for branch in CUDA if branch <= _numbers(version)[0])]


# --------------------------------------------------------------------------- the driver


def compile_driver(folder: Path, version: str, sysroot: Path | None = None) -> None:
    """Compile the libraries and programs of one driver version, against a sysroot's C library if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    nvml, cuda = folder / f"libnvidia-ml.so.{version}", folder / f"libcuda.so.{version}"
    place = sysroot_flags(sysroot) if sysroot else ()
    shared = (*place, "-shared", "-pthread")
    own = f'-DDRIVER_VERSION="{version}"'
    major = f"-DDRIVER_MAJOR={_numbers(version)[0]}"
    _compile("nvml.c", nvml, *shared, own, major, "-Wl,-soname,libnvidia-ml.so.1")
    _compile(
        "cuda.c",
        cuda,
        *shared,
        "-ldl",
        "-Wl,-Bsymbolic",
        f"-DCUDA_VERSION={_cuda(version)}",
        "-Wl,-soname,libcuda.so.1",
    )
    _compile("nvidia_smi.c", folder / "nvidia-smi", *place, own, "-ldl")
    _compile("mps.c", folder / "nvidia-cuda-mps-control", *place)


# The toolkit mounts both into containers; the lab's daemon starts no server.
MPS_SERVER = "#!/bin/sh\necho 'SIMULATED by the kubegpu.share lab: no program computes here' >&2\nexit 1\n"


def programs(built: Path) -> dict[str, File]:
    """Return the driver's programs for computing."""
    names = ("nvidia-smi", "nvidia-cuda-mps-control")
    return {
        **{f"usr/bin/{name}": Copy(built / name) for name in names},
        "usr/bin/nvidia-cuda-mps-server": Text(MPS_SERVER, 0o755),
    }


def firmware(driver: str) -> dict[str, File]:
    """Return the files that the toolkit mounts into containers as firmware: the cards and what is held of them."""
    folder = f"usr/lib/firmware/nvidia/{driver}"
    return {f"{folder}/gsp_sim.bin": Link(CARDS), f"{folder}/gsp_sim_limits.bin": Link(f"{CARDS}.limits")}


def sysroot_flags(sysroot: Path) -> tuple[str, ...]:
    """Return the gcc flags that select another system's headers, start files and libraries."""
    triplet = output(["gcc", "-dumpmachine"])
    folders = (sysroot / "usr/lib" / triplet, sysroot / "lib" / triplet)
    return (f"--sysroot={sysroot}", f"-B{folders[0]}", *(f"-L{folder}" for folder in folders))


def _compile(source: str, target: Path, *flags: str) -> None:
    target.write_bytes(compiled(source, *flags))
    target.chmod(0o755)


@functools.cache
def compiled(source: str, *flags: str) -> bytes:
    """Compile a program or a library of driver/, the same one only once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        # Libraries follow the source that needs them.
        run(["gcc", *C_FLAGS, "-o", str(made), str(SOURCES / source), *flags])
        return made.read_bytes()


def filled(name: str, words: Mapping[str, str]) -> str:
    """Return a file of driver/ with its placeholders replaced."""
    text = (SOURCES / name).read_text()
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text


def library(built: Path, folder: str, name: str, driver: str) -> dict[str, File]:
    """Return a driver library and the link by which programs load it."""
    return {
        f"{folder}/{name}.{driver}": Copy(built / f"{name}.{driver}", 0o644),
        f"{folder}/{name}.1": Link(f"{name}.{driver}"),
    }


# --------------------------------------------------------------------------- the toolkit


BASE_BINARIES = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-cdi-hook")
HOOK_BINARY = "nvidia-container-runtime-hook"
# Runtimes with one fixed mode; not every build of the toolkit has them.
OPTIONAL_BINARIES = ("nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy")
CONFIGURE = "/usr/bin/nvidia-ctk --quiet config --config-file=/etc/nvidia-container-runtime/config.toml --in-place"


def toolkit_base(binaries: Path) -> dict[str, File]:
    """Return the programs of nvidia-container-toolkit-base."""
    missing = [name for name in (*BASE_BINARIES, HOOK_BINARY) if not (binaries / name).is_file()]
    if missing:
        raise LabError(f"the container toolkit's folder {binaries} has no {', '.join(missing)}.")
    present = [name for name in (*BASE_BINARIES, *OPTIONAL_BINARIES) if (binaries / name).is_file()]
    return {f"usr/bin/{name}": Copy(binaries / name) for name in present}


def toolkit_hook(binaries: Path) -> dict[str, File]:
    """Return the programs of nvidia-container-toolkit."""
    return {
        f"usr/bin/{HOOK_BINARY}": Copy(binaries / HOOK_BINARY),
        "usr/bin/nvidia-container-toolkit": Link(HOOK_BINARY),
    }


# --------------------------------------------------------------------------- files and keys


def about(name: str, details: str) -> Text:
    """Return the copyright file of a package."""
    return Text(
        f"{name} of the kubegpu.share lab: simulated.\n{details}\n\n"
        "Copyright (c) the kubegpu.share authors, GPL-3.0-or-later. The programs of NVIDIA's container toolkit:\n"
        "Copyright NVIDIA CORPORATION, Apache-2.0, https://github.com/NVIDIA/nvidia-container-toolkit\n"
    )


def write_files(root: Path, files: Mapping[str, File]) -> None:
    """Write the files of a package below a folder that represents the root."""
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


class Signer:
    """A temporary signing key in its own folder."""

    def __init__(self, home: Path, name: str) -> None:
        home.mkdir(mode=0o700)
        self._name = name
        self._environment = {**os.environ, "GNUPGHOME": str(home), "LC_ALL": "C"}
        self._gpg("--passphrase", "", "--quick-generate-key", name, "rsa3072", "sign", "0")

    def _gpg(self, *arguments: str) -> None:
        run(["gpg", "--batch", "--yes", "--quiet", "--no-tty", *arguments], env=self._environment)

    def export(self, target: Path) -> None:
        self._gpg("--armor", "--output", str(target), "--export", self._name)

    def sign(self, target: Path, file: Path, how: str = "--detach-sign") -> None:
        """Sign a file: detached, or as clear text."""
        self._gpg("--local-user", self._name, "--armor", how, "--output", str(target), str(file))

    @property
    def name(self) -> str:
        return self._name

    @property
    def environment(self) -> dict[str, str]:
        """The environment for programs that call gpg themselves."""
        return self._environment

    def close(self) -> None:
        """End the agent that gpg started for this folder."""
        run(["gpgconf", "--kill", "all"], env=self._environment)
