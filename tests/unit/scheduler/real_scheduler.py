# SPDX-License-Identifier: GPL-3.0-or-later
"""The real kube-scheduler of the lab, to judge every configuration that is written."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest


@cache
def binary() -> str:
    """LAB_BIN's kube-scheduler or that of the lab's cache; empty where there is none."""
    cache_home = os.environ.get("KUBEGPU_CACHE") or (
        os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kubegpu-share")
    )
    folders = [Path(os.environ["LAB_BIN"])] if os.environ.get("LAB_BIN") else []
    found = [folder / "kube-scheduler" for folder in folders]
    found += sorted(Path(cache_home).glob("bin/kubernetes-1.36*/kube-scheduler"))
    return next((str(path) for path in found if os.access(path, os.X_OK)), "")


def complaint(text: str, folder: Path) -> str:
    """What kube-scheduler 1.36 says against a configuration; nothing where it goes on to its kubeconfig."""
    if not binary():
        pytest.skip("no kube-scheduler 1.36 on this machine: neither in LAB_BIN nor in the lab's cache")
    file = folder / "judged.yaml"
    # A kubeconfig that isn't there: the configuration is read and validated before it is missed.
    file.write_text(text.replace("/etc/kubernetes/scheduler.conf", "/nonexistent/scheduler.conf"))
    done = subprocess.run(
        [binary(), "--config", file, "--bind-address=127.0.0.1", "--secure-port=0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    fine = ("/nonexistent/scheduler.conf", "no configuration has been provided, try setting KUBERNETES_MASTER")
    return "" if any(words in last for words in fine) else last or f"ended with {done.returncode}"
