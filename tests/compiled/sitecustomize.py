# SPDX-License-Identifier: GPL-3.0-or-later
"""Save processor time in the processes of a test run: shared code and archives, and no garbage collection in playbooks.

ansible-core compiles a collection's files in each process that imports them, each playbook builds an archive of every
module that it runs, and each execution of a module compiles all files of its archive. Python imports this file at its
start, since ``tests/conftest.py`` puts the folder on PYTHONPATH; what is shared is in the folder that KUBEGPU_COMPILED
names.
"""

from __future__ import annotations

import _imp
import contextlib
import gc
import hashlib
import marshal
import os
import sys
import zipimport
from pathlib import Path


def compiled(source: bytes, filename: str, mode: str = "exec", flags: int = 0, dont_inherit: bool = True):
    """Do what the built-in function ``compile`` does for a file, or return what another process compiled."""
    digest = hashlib.sha256(source).hexdigest()
    file = Path(os.environ["KUBEGPU_COMPILED"], f"{digest}-{sys.implementation.cache_tag}-{mode}-{flags}")
    with contextlib.suppress(OSError):
        code = marshal.loads(file.read_bytes())
        # Another process may have had the file elsewhere: each execution of a module has an archive of its own.
        _imp._fix_co_filename(code, filename)
        return code
    code = compile(source, filename, mode, flags, dont_inherit)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    # A process of another user may not write there.
    with contextlib.suppress(OSError):
        part.write_bytes(marshal.dumps(code))
        part.replace(file)
    return code


def share_archives() -> None:
    """Let this playbook use the archives that others built of the same files, as it uses those of its own tasks."""
    import ansible
    from ansible import constants

    own = Path("ansible_collections", "kubegpu", "share", "plugins")
    roots = [(path / own).resolve() for path in map(Path, constants.COLLECTIONS_PATHS)]
    files = (file for root in roots for name in ("modules", "module_utils") for file in (root / name).rglob("*.py"))
    parts = [
        [ansible.__file__, ansible.__version__, *constants.COLLECTIONS_PATHS, *constants.DEFAULT_MODULE_PATH],
        sorted((str(file), file.stat().st_mtime_ns) for file in files),
    ]
    shared = Path(os.environ["KUBEGPU_COMPILED"], f"archives-{hashlib.sha256(repr(parts).encode()).hexdigest()}")
    # Where ansible-core keeps them for the tasks of one playbook.
    with contextlib.suppress(OSError):
        shared.mkdir(exist_ok=True)
        Path(constants.DEFAULT_LOCAL_TMP, "ansiballz_cache").symlink_to(shared)


if "KUBEGPU_COMPILED" in os.environ:
    zipimport.compile = compiled
    # A module has an ``ansible`` of its own, which must not be imported yet.
    if any(Path(word).name in ("ansible", "ansible-playbook") for word in getattr(sys, "orig_argv", ())):
        from ansible.utils.collection_loader import _collection_finder

        _collection_finder.compile = compiled
        share_archives()
        # Neither a playbook nor the processes that it forks for its tasks live long enough to need it.
        gc.disable()
