# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: files and commands of the machine that the module runs on.

Everything that a node concern touches goes through ``System``: tests hand it a made-up tree and scripted commands.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended. ``rc`` is 127 where it isn't installed and 124 where it ran out of time."""

    rc: int
    out: str
    err: str


# How the name of a file begins that a write fills and then puts in the old one's place.
TEMPORARY = ".kubegpu-"


class System(t.Protocol):
    """What a node concern may see and touch. Paths are absolute, as the node knows them."""

    def read(self, path: str) -> str | None:
        """The text of a file, or None where there is none."""

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; none where it doesn't exist."""

    def exists(self, path: str) -> bool: ...

    def link(self, path: str) -> str | None:
        """Where a symbolic link points, as it is written, or None where it isn't one."""

    def free_bytes(self, path: str) -> int: ...

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a whole file in place of the old one, atomically; folders above it are made (0755)."""

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        """Run a command in the C locale, never through a shell."""


class RealSystem:
    """The machine itself, or a tree under ``sysroot`` that looks like one.

    With a sysroot files are those under it, and commands are still the machine's own.

    :param run_command: ``AnsibleModule.run_command``.
    """

    def __init__(self, sysroot: str = "/", run_command: t.Callable[..., tuple[int, str, str]] | None = None) -> None:
        self._root = os.path.abspath(sysroot)
        self._run_command = run_command

    def _real(self, path: str) -> str:
        if not path.startswith("/"):
            raise ShareError(f"path {path!r} isn't absolute")
        return os.path.join(self._root, path.lstrip("/"))

    def read(self, path: str) -> str | None:
        try:
            # A user's line ends are theirs: newline="" keeps them.
            with open(self._real(path), encoding="utf-8", errors="replace", newline="") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise ShareError(f"{path} can't be read: {error.strerror}") from error

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._real(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._real(path))

    def link(self, path: str) -> str | None:
        try:
            return os.readlink(self._real(path))
        except OSError:
            return None

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(self._real(path))
        return found.f_bavail * found.f_frsize

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        real = self._real(path)
        folder = os.path.dirname(real)
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
        except OSError as error:
            raise ShareError(f"{path} can't be written: {error.strerror}") from error

    def remove(self, path: str) -> None:
        try:
            os.unlink(self._real(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ShareError(f"{path} can't be removed: {error.strerror}") from error

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        if self._run_command is None:
            raise ShareError(f"{argv[0]}: this look at a tree runs no commands")
        # run_command knows no time limit; coreutils' timeout ends with 124 then, and with 127 for a missing command.
        rc, out, err = self._run_command(
            ["timeout", "--kill-after=5", f"{timeout:g}", *argv],
            data=stdin,
            environ_update={"LC_ALL": "C", "LANGUAGE": "C", "DEBIAN_FRONTEND": "noninteractive"},
        )
        if rc in (124, 137):
            return Done(124, out, f"{argv[0]} didn't end within {timeout:g} s")
        return Done(rc, out, err)
