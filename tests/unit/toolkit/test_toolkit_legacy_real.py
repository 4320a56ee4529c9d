# SPDX-License-Identifier: GPL-3.0-or-later
"""The migration with the real rpm: Docker's file survives its package. test_toolkit_chroot has the real apt."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from test_toolkit_legacy import work

# The file of the package nvidia-docker2, and one of a user.
STOCK = """{
    "runtimes": {
        "nvidia": {
            "path": "nvidia-container-runtime",
            "runtimeArgs": []
        }
    }
}
"""
USERS = """{ "log-driver": "journald", "default-runtime" : "nvidia",
  "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}"""
WANT = ("nvidia-docker2", "nvidia-container-runtime")

SPEC = """Name: nvidia-docker2
Version: 2.13.0
Release: 1
Summary: stub
License: none
BuildArch: noarch
%description
%install
mkdir -p %{buildroot}/etc/docker
cp DAEMON %{buildroot}/etc/docker/daemon.json
%files
%config /etc/docker/daemon.json
"""


class RpmTree(RealSystem):
    """A directory that is rpm's root; other commands work on the directory's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(str(root), self._inside)

    def _inside(self, argv: Sequence[str], data: str | None = None, environ_update: dict[str, str] | None = None):
        start = argv.index("rpm") if "rpm" in argv else None
        words = [str(self.root / word.lstrip("/")) if word.startswith("/") else word for word in argv]
        if start is not None:
            words[start + 1 : start + 1] = ["--root", str(self.root), "--dbpath", "/var/lib/rpm"]
        done = subprocess.run(
            words, env={**os.environ, **(environ_update or {})}, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root: rpm works on a root folder of its own")
    if not shutil.which("rpmbuild"):
        pytest.skip("needs rpmbuild")
    folder = tmp_path_factory.mktemp("rpm")
    (folder / "daemon.json").write_text(STOCK)
    (folder / "a.spec").write_text(SPEC.replace("DAEMON", str(folder / "daemon.json")))
    defined = ("--define", f"_topdir {folder}", "--define", "_build_id_links none")
    subprocess.run(["rpmbuild", "-bb", *defined, str(folder / "a.spec")], check=True, capture_output=True)
    return next(folder.glob("RPMS/*/*.rpm"))


@pytest.mark.parametrize("text", [STOCK, USERS], ids=["as delivered", "the user's"])
def test_dockers_configuration_that_rpm_deletes_is_restored(package: Path, tmp_path: Path, text: str) -> None:
    """Without our module, rpm removes the file or renames it to .rpmsave."""
    for ours in (False, True):
        root = tmp_path / str(ours)
        (root / "var/lib/rpm").mkdir(parents=True)
        install = ["rpm", "--root", str(root), "--dbpath", "/var/lib/rpm", "-i", "--nodeps", str(package)]
        subprocess.run(install, check=True, capture_output=True)
        daemon = root / "etc/docker/daemon.json"
        daemon.write_text(text)
        daemon.chmod(0o600)
        node = RpmTree(root)
        if not ours:
            assert node.run(["rpm", "-e", "nvidia-docker2"]).rc == 0
            assert not daemon.exists()
            continue
        done = work(WANT, False, node)
        assert done["packages"] == {"nvidia-docker2": "2.13.0-1"}
        assert daemon.read_text() == text and daemon.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in daemon.parent.iterdir()] == ["daemon.json"]
        assert node.run(["rpm", "-q", "nvidia-docker2"]).rc != 0
        assert not work(WANT, False, node)["changed"]
