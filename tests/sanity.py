# SPDX-License-Identifier: GPL-3.0-or-later
"""Run ``ansible-test sanity --local`` over the checkout, also where only the package index can be reached.

ansible-test wants a path that ends in ``ansible_collections/kubegpu/share``, so it gets a copy of what git knows; and
it wants a script from its own server to put pip into its virtual environments, so it gets one that takes the same pip
from the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])

SHIM = """\
import runpy, sys
sys.path.insert(0, {wheel!r})
# Newer Python versions bring no setuptools, and this pip's own installer knows no such options.
sys.argv = ["pip", "install"] + [a for a in sys.argv[1:] if a not in ("--no-setuptools", "--no-wheel")]
runpy.run_module("pip", run_name="__main__")
"""


def put_pip_in_reach() -> None:
    """Leave ansible-test the bootstrap script that it would download."""
    source = (SITE / "ansible_test/_internal/python_requirements.py").read_text()  # it is nowhere public
    match = re.search(r"'?pip'?[=:] ?'([0-9.]+)'", source)
    if not match:
        sys.exit("tests/sanity.py: this ansible-test doesn't say which pip it wants")
    version = match.group(1)
    cache = Path.home() / ".ansible/test/cache"
    shim = cache / f"get_pip_{version.replace('.', '_')}.py"
    if shim.exists():
        return
    cache.mkdir(parents=True, exist_ok=True)
    pip_download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip_download, "--dest", str(cache), f"pip=={version}"], check=True, stdin=subprocess.DEVNULL)
    shim.write_text(SHIM.format(wheel=str(cache / f"pip-{version}-py3-none-any.whl")))


def copy_collection(parent: Path) -> Path:
    """Copy what git knows (and the untracked that it doesn't ignore) to where ansible-test wants it."""
    here = parent / "ansible_collections/kubegpu/share"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    for name in filter(None, (os.fsdecode(one) for one in listed)):
        source, target = ROOT / name, here / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    neighbour = parent / "ansible_collections/kubernetes"
    neighbour.mkdir()
    (neighbour / "core").symlink_to(SITE / "ansible_collections/kubernetes/core")
    return here


def path(bin_folder: Path) -> str:
    """Our Python first; pyenv's versions by themselves, since its shims fail for a version that is switched off."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    versions = sorted(map(str, pyenv.glob("versions/*/bin")))
    others = [one for one in os.environ["PATH"].split(":") if Path(one) != pyenv / "shims"]
    return ":".join([str(bin_folder), *versions, *others])


def main() -> int:
    put_pip_in_reach()
    with tempfile.TemporaryDirectory() as parent:
        here = copy_collection(Path(parent))
        bin_folder = Path(sys.executable).parent
        environment = dict(os.environ, PATH=path(bin_folder), LC_ALL="C.UTF-8")
        command = [str(bin_folder / "ansible-test"), "sanity", "--local", "--python", "default", *sys.argv[1:]]
        return subprocess.run(command, cwd=here, env=environment, check=False, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
