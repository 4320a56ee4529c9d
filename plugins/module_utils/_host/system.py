# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to files and commands of the machine on which the module runs.

All access to a node goes through ``System``; tests replace it by a directory tree and scripted commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import pwd
import stat
import tempfile
import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject


@dataclasses.dataclass(frozen=True)
class Done:
    """The result of a command. ``rc`` is 127 if it isn't installed and 124 after the time limit."""

    rc: int
    out: str
    err: str


# More names than any path has whose links Linux follows; a circle ends there.
MAX_STEPS = 1000
# Comes before the seconds of a command's time limit. Without pipelining Ansible gives a module a terminal, and the
# kernel stops whoever sets its modes from timeout's own process group, as apt-get does. A new session has none.
LIMITED = ("setsid", "--wait", "timeout", "--kill-after=5")
# Prefix of temporary files, which replace the old ones when they are complete.
TEMPORARY = ".kubegpu-"
# Bytes of a file that is read as text.
LONGEST = 64 << 20
NO_FILE = "is no file but a device, a socket or a pipe"


class System(t.Protocol):
    """A machine. Paths are absolute, from the machine's root."""

    def read(self, path: str) -> str | None:
        """Return the text of a file; None if it does not exist, or its process ended."""

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""

    def exists(self, path: str) -> bool: ...

    def link(self, path: str) -> str | None:
        """Return the target of a symbolic link as written; None if it isn't one."""

    def free_bytes(self, path: str) -> int: ...

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Replace a file atomically; missing folders are created with mode 0755."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        """Run a command in the C locale, never through a shell."""


def user() -> JsonObject:
    """Return ``uid`` and ``name`` of the user that this process runs as."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return {"uid": uid, "name": name}


@contextlib.contextmanager
def naming_user() -> t.Iterator[None]:
    """Add ``user`` to an error: whatever it says, another user than root may be its cause.

    :raises ShareError: the error.
    """
    try:
        yield
    except ShareError as error:
        error.details["user"] = user()
        raise


def target(system: System, path: str) -> str:
    """Return the path after following its symbolic links, also those of its directories, from the machine's root."""
    rest, done = [part for part in reversed(path.split("/")) if part], "/"
    for _step in range(MAX_STEPS):
        if not rest:
            return done
        part = rest.pop()
        place = posixpath.normpath(posixpath.join(done, part))
        link = None if part == ".." else system.link(place)
        if link is None:
            done = place
            continue
        rest += [part for part in reversed(link.split("/")) if part]
        done = "/" if link.startswith("/") else done
    # A circle: reading it fails.
    return path


class RealSystem:
    """This machine, or with ``sysroot`` the files of a directory tree; commands run on this machine in both cases.

    :param run_command: ``AnsibleModule.run_command``.
    """

    def __init__(self, sysroot: str = "/", run_command: t.Callable[..., tuple[int, str, str]] | None = None) -> None:
        self._root = os.path.abspath(sysroot)
        self._run_command = run_command

    def _real(self, path: str) -> str:
        if not path.startswith("/") or "\0" in path:
            raise ShareError(f"path {path!r} isn't absolute, or has a zero byte")
        return os.path.join(self._root, path.lstrip("/"))

    def read(self, path: str) -> str | None:
        try:
            # A process of a pod chooses some of these paths: a pipe is waited for, and some devices have no end.
            # newline="" keeps the line endings of the file.
            with open(self._real(path), encoding="utf-8", errors="replace", newline="", opener=_at_once) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) and status.st_rdev != os.makedev(1, 3):
                    raise ShareError(f"{path} {NO_FILE}")
                if status.st_size > LONGEST:
                    raise ShareError(f"{path} is larger than {LONGEST >> 20} MiB")
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ProcessLookupError):
            # The last is what /proc answers when a process ends between opening and reading.
            return None
        except OSError as error:
            raise ShareError(f"{path} can't be read: {error.strerror}") from error

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._real(path)))
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            return []
        except OSError as error:
            raise ShareError(f"{path} can't be listed: {error.strerror}") from error

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._real(path))

    def link(self, path: str) -> str | None:
        try:
            return os.readlink(self._real(path))
        except OSError:
            return None

    def free_bytes(self, path: str) -> int:
        statvfs = os.statvfs(self._real(path))
        return statvfs.f_bavail * statvfs.f_frsize

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        real = self._real(path)
        folder = os.path.dirname(real)
        self._refuse_device(path, real)
        try:
            os.makedirs(folder, mode=0o755, exist_ok=True)
            # The leading dot keeps kubelet, containerd's *.toml import and run-parts from reading a half-written file.
            handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
            try:
                with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporary, mode)
                os.replace(temporary, real)
            except BaseException:
                os.unlink(temporary)
                raise
            _sync(folder)
        except OSError as error:
            raise ShareError(f"{path} can't be written: {error.strerror}") from error

    def remove(self, path: str) -> None:
        self._refuse_device(path, self._real(path))
        try:
            os.unlink(self._real(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ShareError(f"{path} can't be removed: {error.strerror}") from error

    def _refuse_device(self, path: str, real: str) -> None:
        """Refuse to replace what is no file: a configuration may be a link to /dev/null.

        :raises ShareError: it is a device, a socket or a pipe.
        """
        try:
            mode = os.lstat(real).st_mode
        except OSError:
            # The write itself reports it.
            return
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise ShareError(f"{path} {NO_FILE}, and is left as it is")

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        if self._run_command is None:
            raise ShareError(f"{argv[0]}: commands can't run without run_command")
        # run_command has no time limit; coreutils' timeout exits with 124 after it, and with 127 for a missing command.
        rc, out, err = self._run_command(
            [*LIMITED, f"{timeout:g}", *argv],
            data=stdin,
            environ_update={"LC_ALL": "C", "LANGUAGE": "C", "DEBIAN_FRONTEND": "noninteractive"},
        )
        if rc in (124, 137):
            return Done(124, out, f"{argv[0]} didn't finish within {timeout:g} s")
        return Done(rc, out, err)


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _sync(folder: str) -> None:
    """Write a folder to the disk: after a power failure the new name is there before anything that is written later."""
    # Not every file system can; the file itself is complete.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
