# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's paths: `down` removes .lab/; builds are cached outside the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.shell import LabError, say

CHECKOUT = Path(__file__).resolve().parents[1]
LAB = CHECKOUT / ".lab"
# Sockets and process ids of the lab's own engine; a reboot removes them.
RUN = Path("/run/kubegpu-lab")


def cache_root() -> Path:
    """Return the cache folder: $KUBEGPU_CACHE, else the XDG one."""
    if os.environ.get("KUBEGPU_CACHE"):
        return Path(os.environ["KUBEGPU_CACHE"]).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "kubegpu-share"


@contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """Yield a folder to fill, which becomes the target on success, or None when the target exists.

    A half-filled folder never carries the target's name, and what a killed run left is swept by the next.
    """
    if target.exists():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        for stale in target.parent.glob(".tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".tmp-{target.name}-", dir=target.parent))
        try:
            yield fresh
            fresh.chmod(0o755)
            fresh.rename(target)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise


@contextmanager
def only_one() -> Iterator[None]:
    """Lock the machine's lab for one command; the kernel releases the lock of a killed one."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"the cache folder {root} can't be created: {error.strerror} (set by KUBEGPU_CACHE).") from None
    with (root / "lab.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another `lab` command is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
