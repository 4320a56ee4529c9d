# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the servers' image from the checkout on the lab's Debian, and save it for import into nodes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

from lab import aptsources, rootfs
from lab.engine import LABEL, Engine
from lab.nodeimage import imported
from lab.paths import CHECKOUT, LAB, cache_root, made_once
from lab.shell import LabError, run, say, step

SOURCES = CHECKOUT / "images" / "gpushare"
ARCHIVE = LAB / "images" / "gpushare.tar"
WHEELS = SOURCES / "build" / "wheels"
REQUIREMENTS = (SOURCES / "requirements.txt", SOURCES / "build-requirements.txt")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def reference() -> str:
    """Return the image's name, with the package's version as its tag."""
    return f"localhost/kubegpu/gpushare:{version()}"


def version() -> str:
    text = (SOURCES / "src" / "gpushare" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if not found:
        raise LabError("images/gpushare/src/gpushare/__init__.py names no __version__.")
    return found[1]


def ensure(engine: Engine) -> None:
    """Build and save the image unless the same sources were built before."""
    if not (SOURCES / "Containerfile").exists():
        say("images/gpushare has no Containerfile; skipping the servers' image")
        return
    base = rootfs.rootfs("base", rootfs.BASE_PACKAGES, aptsources.read_machine())
    target = cache_root() / "images" / f"gpushare-{_key(base)}"
    with made_once(target) as fresh:
        if fresh:
            with step("building the servers' image"):
                _build(engine, base, fresh)
            _remove_old(target.parent)
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    made = target / "gpushare.tar"
    if ARCHIVE.exists() and ARCHIVE.samefile(made):
        return
    ARCHIVE.unlink(missing_ok=True)
    try:
        os.link(made, ARCHIVE)
    except OSError:
        shutil.copy2(made, ARCHIVE)


def _remove_old(folder: Path) -> None:
    """Remove all archives but the newest two; each change of the sources writes a new one."""
    made = sorted(folder.glob("gpushare-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in made[2:]:
        shutil.rmtree(path, ignore_errors=True)


def _key(base: Path) -> str:
    """Hash the inputs of the image: the base and the sources (following links), without build output."""
    digest = hashlib.sha256(base.parent.name.encode())
    files = [CHECKOUT / ".dockerignore", *SOURCES.rglob("*")]
    for path in sorted(files):
        inside = path.relative_to(CHECKOUT).as_posix()
        if not path.is_file() or WHEELS.parent in path.parents or "__pycache__" in inside or "/." in inside:
            continue
        digest.update(f"{inside} {os.access(path, os.X_OK)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(engine: Engine, base: Path, folder: Path) -> None:
    tag = imported(engine, "base", base)
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = engine.out("run", "--rm", "--network=none", f"--label={LABEL}", tag, "python3", "-c", ask)
    _download_wheels(python)
    engine.docker(
        "build",
        "--quiet",
        "--force-rm",
        "--network=none",
        f"--file={SOURCES / 'Containerfile'}",
        f"--build-arg=BASE={tag}",
        # BuildKit sets this by itself; the classic builder doesn't.
        f"--build-arg=BUILDPLATFORM=linux/{ARCHITECTURES.get(os.uname().machine, os.uname().machine)}",
        f"--build-arg=PIP_ARGS=--no-index --find-links {WHEELS.relative_to(CHECKOUT)}",
        f"--label={LABEL}",
        f"--tag={reference()}",
        str(CHECKOUT),
        tied=True,
    )
    engine.docker("save", f"--output={folder / 'gpushare.tar'}", reference(), tied=True)


def platforms(machine: str, newest: int = 36) -> list[str]:
    """List pip's platform names of wheels that a Debian on this machine can use, newest first."""
    tags = [f"manylinux_2_{minor}" for minor in range(newest, 4, -1)]
    return [f"{tag}_{machine}" for tag in (*tags, "manylinux2014", "linux")]


def _download_wheels(python: str) -> None:
    """Download the wheels with this machine's pip settings, since the image's build has no network."""
    pinned = b"".join(file.read_bytes() for file in REQUIREMENTS)
    digest = hashlib.sha256(pinned + python.encode()).hexdigest()[:16]
    cached = cache_root() / "wheels" / f"py{python}-{digest}"
    with made_once(cached) as fresh:
        if fresh:
            with step(f"downloading the servers' wheels for Python {python}"):
                target = (f"--python-version={python}", "--implementation=cp", "--only-binary=:all:")
                run(
                    [
                        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={fresh}", *target),
                        *(f"--platform={each}" for each in platforms(os.uname().machine)),
                        *(f"--requirement={file}" for file in REQUIREMENTS),
                    ]
                )
    shutil.rmtree(WHEELS, ignore_errors=True)
    shutil.copytree(cached, WHEELS)
