# SPDX-License-Identifier: GPL-3.0-or-later
"""The real kubeadm and kubectl of the lab validate our files."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import manifests
import pytest
import real_apiserver

from lab import build

VERSION = f"v{build.SETS['kubernetes'].version}"
HEAD = "apiVersion: kubeadm.k8s.io/v1beta4\n"


@cache
def binary(name: str = "kubeadm") -> str:
    """A program of the lab's Kubernetes 1.37, built where it isn't yet; the test is skipped where that can't be."""
    try:
        return real_apiserver.programs()[name]
    except real_apiserver.Missing as missing:
        pytest.skip(str(missing))


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binary(), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "KUBEADM_INIT_DRYRUN_DIR": str(folder)},
    )


def expected() -> str:
    """The manifest that the tests' own text has for its release."""
    minor = int(VERSION.split(".")[1])
    return manifests.kubeadm(minor).replace(f":v1.{minor}.3", f":{VERSION}")


def complaint(text: str, folder: Path) -> str:
    """Return kubeadm's error for a ClusterConfiguration; empty for none."""
    file = folder / "checked.yaml"
    file.write_text(text)
    done = _run(folder, "config", "validate", "--allow-experimental-api", "--config", str(file))
    return "" if done.returncode == 0 else done.stderr.strip()


def manifest(folder: Path, configuration: str = "", patches: Path | None = None) -> str:
    """Return the manifest that kubeadm writes for kube-scheduler."""
    text = configuration or f"{HEAD}kind: ClusterConfiguration\nkubernetesVersion: {VERSION}\n"
    if patches is not None:
        text += f"---\n{HEAD}kind: InitConfiguration\npatches: {{directory: {patches}}}\n"
    file = folder / "rendered.yaml"
    file.write_text(text)
    done = _run(folder, "init", "phase", "control-plane", "scheduler", "--dry-run", "--config", str(file))
    assert done.returncode == 0, done.stderr
    return (folder / "kube-scheduler.yaml").read_text()
