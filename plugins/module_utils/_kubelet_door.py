# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: kubelet's files, sockets and processes on the machine that the module runs on. Changes nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_podresources import LIST, LIST_REQUEST

# Nobody's checkpoint is as large: eight cards of 80 GiB in units of MiB make about 30.
LARGEST_BYTES = 64 * 1024 * 1024
# A kubelet answers in milliseconds. It may be stopped, or be a process that took its place.
CALL_SECONDS = 10.0
# Sentences quote what others wrote, and no more of it than this.
QUOTED = 300
PACKAGE = "python3-grpcio (Debian and Ubuntu; on RHEL and its kin from EPEL)"


class Missing(ShareError):
    """It isn't there, in one sentence."""


class Unreadable(ShareError):
    """It is there and can't be read, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of root that sees the same files as we.

    :param arguments: its command line, the program first.
    """

    pid: int
    arguments: tuple[str, ...]


class KubeletDoor(t.Protocol):
    """What of a kubelet may be seen."""

    def processes(self, names: t.Container[str]) -> list[Process]:
        """Processes whose program has one of these names, in order of their IDs."""

    def file(self, path: str) -> bytes:
        """
        :raises Missing: there is none.
        :raises Unreadable: it can't be read, or is no file of at most 64 MiB.
        """

    def sockets(self, path: str) -> list[str]:
        """Names of the sockets in a folder, sorted; none where it doesn't exist or can't be read."""

    def pod_resources(self, path: str) -> bytes:
        """kubelet's answer to List, as it came.

        :raises Missing: there is no such socket, or no library to call it.
        :raises Unreadable: no answer in time, an error as the answer, or one above 64 MiB.
        """


class RealKubelet:
    """The machine itself.

    :param proc: where its processes are seen.
    """

    def __init__(self, proc: str = "/proc", seconds: float = CALL_SECONDS, largest: int = LARGEST_BYTES) -> None:
        self._proc = proc
        self._seconds = seconds
        self._largest = largest

    def processes(self, names: t.Container[str]) -> list[Process]:
        try:
            pids = sorted(int(one) for one in os.listdir(self._proc) if one.isdecimal())
        except OSError:
            return []
        found = []
        for pid in pids:
            try:
                with open(f"{self._proc}/{pid}/cmdline", "rb") as file:
                    line = file.read(1 << 20).decode("utf-8", "replace")
                # k3s writes a title of its own, with blanks and without an end.
                arguments = tuple(line.rstrip("\0").split("\0"))
                if os.path.basename(arguments[0].split(" ")[0]) in names and self._ours(pid):
                    found.append(Process(pid, arguments))
            except OSError:
                # It has gone.
                continue
        return found

    def _ours(self, pid: int) -> bool:
        """Root's, so that no user can name another folder; and in no container: nodes of kind have kubelets, too."""
        root, mine = os.stat(f"{self._proc}/{pid}/root"), os.stat("/")
        return os.stat(f"{self._proc}/{pid}").st_uid == 0 and (root.st_dev, root.st_ino) == (mine.st_dev, mine.st_ino)

    def file(self, path: str) -> bytes:
        try:
            # A FIFO of this name would be waited for, and a link may lead anywhere: kubelet makes neither.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"there is no {path}") from None
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path} can't be read: {_why(error)}") from None
        try:
            found = self._content(handle, path)
        except OSError as error:
            raise Unreadable(f"{path} can't be read: {_why(error)}") from None
        finally:
            os.close(handle)
        return found

    def _content(self, handle: int, path: str) -> bytes:
        kind = os.fstat(handle)
        if not stat.S_ISREG(kind.st_mode):
            raise Unreadable(f"{path} is no regular file")
        # One byte more tells of a file that is still growing, and of a kernel's that has no size.
        with os.fdopen(handle, "rb", closefd=False) as file:
            found = file.read(self._largest + 1) if kind.st_size <= self._largest else None
        if found is None or len(found) > self._largest:
            raise Unreadable(f"{path} has more than {self._largest} bytes")
        return found

    def sockets(self, path: str) -> list[str]:
        try:
            with os.scandir(path) as entries:
                names = [one.name for one in entries if stat.S_ISSOCK(one.stat(follow_symlinks=False).st_mode)]
        except (OSError, ValueError):
            return []
        return sorted(one.encode("utf-8", "replace").decode("utf-8") for one in names)

    def pod_resources(self, path: str) -> bytes:
        try:
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise Unreadable(f"{path} is no socket")
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"there is no {path}") from None
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path} can't be read: {_why(error)}") from None
        return _listed(path, self._seconds, self._largest)


def _listed(path: str, seconds: float, largest: int) -> bytes:
    # What the library has to say goes to stderr, where Ansible takes it for the module's.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc
    except ImportError:
        raise Missing(f"this node's Python has no grpc, so kubelet's PodResources can't be asked: {PACKAGE}") from None
    except Exception as error:
        # Half an installation: a part of it that is of another version raises what it likes.
        raise Unreadable(f"this node's grpc ({PACKAGE}) can't be loaded: {_why(error)}") from None
    options = [("grpc.max_receive_message_length", largest), ("grpc.use_local_subchannel_pool", 1)]
    try:
        with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
            # The messages go out and come in as the bytes that they are.
            call = channel.unary_unary(LIST, request_serializer=bytes, response_deserializer=bytes)
            return call(LIST_REQUEST, timeout=seconds)
    except Exception as error:
        # RpcError, and whatever else one of its many versions raises.
        said = f"{error.code()}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        said = " ".join(said.replace("StatusCode.", "").split())[:QUOTED]
        raise Unreadable(f"kubelet's PodResources ({path}) can't be read: {said}") from None


def _why(error: Exception) -> str:
    """An error in a few words."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a symbolic link"
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split())[:QUOTED]
