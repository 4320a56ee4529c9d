# SPDX-License-Identifier: GPL-3.0-or-later
"""Real kube-schedulers that validate the generated configurations, built once and kept in the lab's cache.

Unmarked tests use the lab's own release only. Tests with another one are long, since each takes minutes to build.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import threading
import typing as t
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from real_apiserver import OTHERS
from real_parts import Missing, private_apt

from lab import build
from lab.paths import cache_root, made_once
from lab.shell import LabError, output, run, step

NEWEST = "1.37"
VERSIONS = ("1.20", "1.29", "1.34", "1.36", NEWEST)
_KUBE = build.SETS["kubernetes"]
# Go modules of lab/go/ beside the lab's own Kubernetes.
TOOL_SETS = {
    "1.34": build.ToolSet("kube-scheduler-1.34", _KUBE.module, ("kube-scheduler",), _KUBE.ldflags),
    **OTHERS,
}
# The suite of Debian whose source package has 1.20 with all that it needs, and what is of no use to the scheduler.
SUITE = "bookworm"
ARCHIVE = re.compile(r"kubernetes_1\.20\..*\.orig\.tar\.gz")
LEFT_OUT = ("CHANGELOG", "LICENSES", "api", "build", "cluster", "docs", "hack", "logo", "test", "translations")
LDFLAGS = "-s -w -X k8s.io/component-base/version.gitVersion=v1.20.2"

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
users: [{name: none, user: {}}]
"""
# What kube-scheduler logs when its configuration is read and validated, and every plugin has taken its arguments.
STARTED = "Starting Kubernetes Scheduler"
END = re.compile(r'"command failed"|^(?![IWEF][0-9]{4} |Flag --)')


def release(version: str, *values: t.Any) -> t.Any:
    """Return the parameters of a test with a real kube-scheduler, marked long unless it is the lab's own release."""
    return pytest.param(version, *values, marks=[] if version == NEWEST else [pytest.mark.long])


# Of each release the version of its configuration, and its minor version.
_KNOWN = (("1.20", "v1beta1", 20), ("1.29", "v1", 29), ("1.34", "v1", 34), ("1.36", "v1", 36), (NEWEST, "v1", 37))
RELEASES = [release(*one) for one in _KNOWN]


@cache
def binary(version: str = NEWEST) -> Path:
    """Return a kube-scheduler, built if the cache has none; skip the test where it can't be built."""
    try:
        if version == NEWEST:
            return build.binaries("kubernetes") / "kube-scheduler"
        folder = _from_debian(build.find_go()) if version == "1.20" else build.built(TOOL_SETS[version])
    except (LabError, OSError, Missing) as error:
        pytest.skip(f"no kube-scheduler {version}: {error}")
    return folder / "kube-scheduler"


def _from_debian(go: str) -> Path:
    """Go's modules have no 1.20 that a Go of today builds; Debian's source package has it with its dependencies."""
    parts = (SUITE, ARCHIVE.pattern, LEFT_OUT, LDFLAGS, output([go, "env", "GOVERSION", "GOOS", "GOARCH"]))
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    target = cache_root() / "bin" / f"kube-scheduler-1.20-{key}"
    with made_once(target) as fresh:
        if fresh:
            with step("building kube-scheduler 1.20 from Debian's source package"):
                _build_from_debian(go, fresh)
    return target


def _build_from_debian(go: str, target: Path) -> None:
    with private_apt("deb-src", SUITE, target.parent) as (folder, environment):
        run(["apt-get", "source", "--download-only", "kubernetes"], env=environment, cwd=str(folder))
        archives = [path for path in folder.iterdir() if ARCHIVE.fullmatch(path.name)]
        if not archives:
            raise Missing(f"Debian {SUITE} has no source package of Kubernetes 1.20")
        source = folder / "go" / "src" / "k8s.io" / "kubernetes"
        source.mkdir(parents=True)
        left_out = [f"--exclude=*/kubernetes-*/{one}" for one in LEFT_OUT]
        run(["tar", "-xzf", str(archives[0]), "--strip-components=1", "-C", str(source), *left_out])
        # It is older than modules' vendor folders as Go requires them today.
        environment = {**os.environ, "GO111MODULE": "off", "GOPATH": str(folder / "go"), "GOFLAGS": ""}
        environment.update(CGO_ENABLED="0", GOWORK="off")
        flags = ["-trimpath", "-ldflags", LDFLAGS, "-o", str(target / "kube-scheduler")]
        run(["nice", go, "build", *flags, "./cmd/kube-scheduler"], tied=True, env=environment, cwd=str(source))


@contextmanager
def running(text: str, folder: Path, version: str = NEWEST, *, policy: bool = False) -> Iterator[str]:
    """Run a real kube-scheduler with a configuration or Policy; yield its error, which is empty where it starts.

    There is no API server: kube-scheduler validates its configuration before it connects.
    """
    program = binary(version)
    kubeconfig, file = folder / "scheduler.conf", folder / ("checked.json" if policy else "checked.yaml")
    kubeconfig.write_text(KUBECONFIG)
    file.write_bytes(text.replace("/etc/kubernetes/scheduler.conf", str(kubeconfig)).encode())
    flags = [f"--kubeconfig={kubeconfig}", f"--policy-config-file={file}"] if policy else [f"--config={file}"]
    flags += ["--master=http://127.0.0.1:1", "--secure-port=0", f"--cert-dir={folder}", "--v=1"]
    with (cache_root() / "kube-scheduler-1.20.lock").open("w") as lock:
        if version == "1.20":
            # Flags can't close its port without TLS, 10251, so one process runs at a time.
            fcntl.flock(lock, fcntl.LOCK_EX)
            flags.append("--port=0")
        process = subprocess.Popen(
            [program, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        limit = threading.Timer(60, process.kill)
        limit.start()
        try:
            yield _error(process)
        finally:
            limit.cancel()
            process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()


def _error(process: subprocess.Popen[str]) -> str:
    lines: list[str] = []
    assert process.stderr
    for line in process.stderr:
        if STARTED in line:
            return ""
        lines.append(line.strip())
    # What comes at the end, in one line or several, isn't of the log's form, or has these words.
    first = next((number for number, line in enumerate(lines) if END.search(line)), -1)
    return " ".join(lines[first:]) or f"ended with {process.wait()}"


def complaint(text: str, folder: Path, version: str = NEWEST, *, policy: bool = False) -> str:
    """Return the error of a real kube-scheduler for a configuration or Policy; empty where it starts with it."""
    with running(text, folder, version, policy=policy) as error:
        return error
