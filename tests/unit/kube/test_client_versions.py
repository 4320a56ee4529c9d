# SPDX-License-Identifier: GPL-3.0-or-later
"""What both clients write arrives at a real API server with any version of the library kubernetes.

The library encodes a request's body by its media type, which has changed twice.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.paths import cache_root

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
import kubernetes
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.scheduler import DynamicKube
path, space = sys.argv[1:]
dynamic = kubernetes.dynamic.DynamicClient(kubernetes.config.new_client_from_config(path))
found = {"version": kubernetes.__version__}
for name, kube in (("real", RealKube(dynamic)), ("dynamic", DynamicKube(dynamic, "kubernetes"))):
    ref = Ref("v1", "ConfigMap", space, name)
    wanted = {"metadata": {"name": name, "namespace": space}, "data": {"a": "1", "b": "\\u00fc"}}
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", **wanted}, "us")
    kube.patch(ref, {"data": {"a": None}})
    found[name] = kube.get(ref)["data"]
print(json.dumps(found))
"""


def library(version: str) -> Path:
    """Install a version with what it needs, and return the folder."""
    folder = cache_root() / "python" / f"kubernetes-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, "--target", str(new), f"kubernetes=={version}"), check=True, capture_output=True)
        new.rename(folder)
    return folder


# 30 is among those that execution environments have; the others are the first and the last that encode alike.
@pytest.mark.parametrize(
    "version",
    ["30.1.0", *(pytest.param(one, marks=pytest.mark.long) for one in ("25.3.0", "36.0.0"))],
)
def test_applied_and_patched(api_server, version):
    space = api_server.namespace(f"client-{version.replace('.', '-')}")
    environment = {**os.environ, "PYTHONPATH": f"{library(version)}:{ROOT / '.collections'}"}
    command = (sys.executable, "-c", PROGRAM, str(api_server.kubeconfig), space)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = {"b": "\u00fc"}
    assert json.loads(done.stdout) == {"version": version, "real": written, "dynamic": written}
