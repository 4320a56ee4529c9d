# SPDX-License-Identifier: GPL-3.0-or-later
"""Real programs for the tests, downloaded or built once and kept in the cache; a machine may lack some."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from lab import aptsources, build
from lab.paths import cache_root, made_once
from lab.shell import LabError, run, step

# What is taken out of which package of which suite of Debian; they run on any later Debian or Ubuntu too.
_DOCKER = {"containerd": ("usr/bin/containerd",), "docker.io": ("usr/sbin/dockerd", "usr/sbin/docker-proxy")}
SUITES = {"bookworm": {"containerd": ("usr/bin/containerd",)}, "trixie": _DOCKER, "sid": _DOCKER}
_CONTAINERD = build.SETS["containerd"]
# Releases beside the lab's, each a Go module in lab/go/.
TOOL_SETS = {
    name: build.ToolSet(name, _CONTAINERD.module, ("containerd",), _CONTAINERD.ldflags, tags=_CONTAINERD.tags)
    for name in ("containerd-2.0", "containerd-2.2")
}
APT = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferences "-";
Dir::Etc::preferencesparts "-";
APT::Sandbox::User "";
APT::Default-Release "";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Retries "1";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
"""


class Missing(Exception):
    """A program isn't available on this machine; the message has the reason."""


@cache
def debian(suite: str) -> Path:
    """Return a folder with the programs of a Debian suite.

    :raises Missing: this machine's apt has no mirror of Debian, or the mirror can't be reached.
    """
    key = hashlib.sha256(repr(SUITES[suite]).encode()).hexdigest()[:8]
    target = cache_root() / "bin" / f"debian-{suite}-{key}"
    try:
        with made_once(target) as fresh:
            if fresh:
                with step(f"fetching {' and '.join(SUITES[suite])} of Debian {suite}"):
                    _fetch(suite, fresh)
    except (LabError, OSError) as error:
        raise Missing(f"no {' or '.join(SUITES[suite])} of Debian {suite}: {error}") from None
    return target


@contextmanager
def private_apt(kind: str, suite: str, parent: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a folder for apt with fresh lists of a suite of this machine's mirror, and the environment to use it.

    :param kind: ``deb`` or ``deb-src``.
    """
    machine = aptsources.read_machine()
    option = f"[signed-by={machine.signed_by}] " if machine.signed_by else ""
    with tempfile.TemporaryDirectory(prefix=".tmp-apt-", dir=parent) as name:
        folder = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text(f"{kind} {option}{machine.uri} {suite} main\n")
        (folder / "apt.conf").write_text(APT.format(folder=folder))
        environment = {**os.environ, "APT_CONFIG": str(folder / "apt.conf")}
        run(["apt-get", "update", "--error-on=any"], env=environment, cwd=name)
        yield folder, environment


def _fetch(suite: str, target: Path) -> None:
    with private_apt("deb", suite, target.parent) as (folder, environment):
        for package, paths in SUITES[suite].items():
            run(["apt-get", "download", package], env=environment, cwd=str(folder))
            (archive,) = folder.glob(f"{package}_*.deb")
            run(["dpkg", "-x", str(archive), str(folder / package)])
            for path in paths:
                shutil.move(folder / package / path, target / Path(path).name)


@cache
def built(name: str) -> Path:
    """Return a folder with programs built from one of the Go modules in lab/go/.

    :raises Missing: it can't be built, for want of Go or of the modules.
    """
    tools = TOOL_SETS.get(name) or build.SETS[name]
    try:
        return build.built(tools)
    except (LabError, OSError) as error:
        raise Missing(f"no {name}: {error}") from None


def version_words(binary: str | Path) -> str:
    """Return what a program prints for --version; nothing where it doesn't run here."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
