# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter to kubelet's files, sockets and processes on this machine. Changes nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import stat
import typing as t

from .._contracts.cgroup import process_owner
from .._contracts.pod_resources import LIST, LIST_REQUEST
from .._core.errors import ShareError
from .types import DeviceNodes

# Eight GPUs of 80 GiB in units of MiB make a checkpoint of about 30 MiB.
LARGEST_BYTES = 64 * 1024 * 1024
# Seconds. A kubelet answers in milliseconds, unless it is stopped or another process owns the socket.
CALL_SECONDS = 10.0
# Characters that a message quotes of a foreign error.
QUOTED = 300
# The major number of /dev/nvidiaN, and the first minor number that is no card's (nvidia-modeset, nvidiactl).
NVIDIA_MAJOR, NO_CARD = 195, 254
PACKAGE = "python3-grpcio (Debian, Ubuntu; on RHEL-like systems from EPEL)"


class Missing(ShareError):
    """A file, socket or library doesn't exist."""


class Unreadable(ShareError):
    """A file or socket exists and can't be read."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of root in this machine's root directory.

    :param arguments: its command line, the program first.
    """

    pid: int
    arguments: tuple[str, ...]


class KubeletSource(t.Protocol):
    """Read access to a node's kubelet."""

    def processes(self, names: t.Container[str]) -> list[Process]:
        """List the processes whose program has one of these names, by PID."""

    def file(self, path: str) -> bytes:
        """Read a file.

        :raises Missing: there is none.
        :raises Unreadable: it can't be read, or isn't a regular file of at most 64 MiB.
        """

    def sockets(self, path: str) -> list[str]:
        """List the names of the sockets in a directory, sorted; empty if it doesn't exist or can't be read."""

    def names(self, path: str, optional: bool = False) -> list[str]:
        """List the names of the files in a directory, sorted.

        :param optional: a directory that doesn't exist has none.
        :raises Missing: the directory doesn't exist.
        :raises Unreadable: it can't be read.
        """

    def pod_resources(self, path: str) -> bytes:
        """Call kubelet's List and return the encoded response.

        :raises Missing: the socket or the grpc library doesn't exist.
        :raises Unreadable: no response in time, an error, or a response above 64 MiB.
        """

    def device_nodes(self) -> list[DeviceNodes] | None:
        """List the containers of pods that have nodes of cards in a /dev of their own; None if they can't be read."""


class NodeKubelet:
    """The kubelet of this machine.

    :param proc: the mount point of the proc file system.
    :param seconds: time limit of a call.
    :param largest: bytes of the largest file or response that is read.
    """

    def __init__(self, proc: str = "/proc", seconds: float = CALL_SECONDS, largest: int = LARGEST_BYTES) -> None:
        self._proc = proc
        self._seconds = seconds
        self._largest = largest

    def processes(self, names: t.Container[str]) -> list[Process]:
        processes = []
        for pid in self._pids():
            try:
                with open(f"{self._proc}/{pid}/cmdline", "rb") as file:
                    line = file.read(1 << 20).decode("utf-8", "replace")
                # k3s sets its own title, with blanks and without a terminator.
                arguments = tuple(line.rstrip("\0").split("\0"))
                if os.path.basename(arguments[0].split(" ")[0]) in names and self._runs_on_host(pid):
                    processes.append(Process(pid, arguments))
            except OSError:
                # The process has ended.
                continue
        return processes

    def _pids(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._proc) if name.isdecimal())
        except OSError:
            return []

    def _runs_on_host(self, pid: int) -> bool:
        """Accept root's processes only, lest a user names another directory; none in containers, as nodes of kind."""
        root, mine = os.stat(f"{self._proc}/{pid}/root"), os.stat("/")
        return os.stat(f"{self._proc}/{pid}").st_uid == 0 and (root.st_dev, root.st_ino) == (mine.st_dev, mine.st_ino)

    def file(self, path: str) -> bytes:
        try:
            # A FIFO would block, and a symbolic link may lead anywhere: kubelet creates neither.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{path} doesn't exist") from None
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path} can't be read: {_reason(error)}") from None
        try:
            content = self._content(handle, path)
        except OSError as error:
            raise Unreadable(f"{path} can't be read: {_reason(error)}") from None
        finally:
            os.close(handle)
        return content

    def _content(self, handle: int, path: str) -> bytes:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(f"{path} isn't a regular file")
        # One byte more detects a file that is growing, and a file of /proc, which reports no size.
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(self._largest + 1) if status.st_size <= self._largest else None
        if content is None or len(content) > self._largest:
            raise Unreadable(f"{path} has more than {self._largest} bytes")
        return content

    def sockets(self, path: str) -> list[str]:
        try:
            with os.scandir(path) as entries:
                names = [entry.name for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        except (OSError, ValueError):
            return []
        return sorted(name.encode("utf-8", "replace").decode("utf-8") for name in names)

    def names(self, path: str, optional: bool = False) -> list[str]:
        try:
            return sorted(name.encode("utf-8", "replace").decode("utf-8") for name in os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            if optional:
                return []
            raise Missing(f"{path} doesn't exist") from None
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path} can't be read: {_reason(error)}") from None

    def pod_resources(self, path: str) -> bytes:
        try:
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise Unreadable(f"{path} isn't a socket")
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{path} doesn't exist") from None
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path} can't be read: {_reason(error)}") from None
        return _call_list(path, self._seconds, self._largest)

    def device_nodes(self) -> list[DeviceNodes] | None:
        opened: dict[str, DeviceNodes] = {}
        for pid in self._pids():
            try:
                with open(f"{self._proc}/{pid}/cgroup", "rb") as file:
                    owner = process_owner(file.read(1 << 16).decode("utf-8", "replace"))
                # The container's first process: later ones may have other roots.
                if owner.where == "pod" and owner.container_id and owner.container_id not in opened:
                    opened[owner.container_id] = {
                        "pod_uid": owner.pod_uid,
                        "container_id": owner.container_id,
                        "minors": _card_minors(f"{self._proc}/{pid}/root/dev"),
                        "privileged": self._has_all_rights(pid),
                    }
            except PermissionError:
                return None
            except OSError:
                # The process has ended, or has no /dev.
                continue
        return [row for row in opened.values() if row["minors"]]

    def _has_all_rights(self, pid: int) -> bool:
        """Return whether a process may get each capability that the machine's first process may get."""
        own, machine = (_capabilities(f"{self._proc}/{name}/status") for name in (pid, "1"))
        return bool(machine) and not machine & ~own


def _capabilities(path: str) -> int:
    """Return the bounding set of a process's capabilities; 0 where it is unknown."""
    try:
        with open(path, "rb") as file:
            match = re.search(rb"^CapBnd:\s*([0-9a-f]+)", file.read(1 << 16), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1), 16) if match else 0


def _card_minors(folder: str) -> list[int]:
    """Return N of each node of a card in a container's /dev.

    None where it is the machine's own /dev, mounted there: the control group decides which of it may be opened.
    """
    if os.stat(folder).st_dev == os.stat("/dev").st_dev:
        return []
    with os.scandir(folder) as entries:
        nodes = [entry.stat(follow_symlinks=False) for entry in entries if re.fullmatch("nvidia[0-9]+", entry.name)]
    numbers = [node.st_rdev for node in nodes if stat.S_ISCHR(node.st_mode) and os.major(node.st_rdev) == NVIDIA_MAJOR]
    return sorted({os.minor(number) for number in numbers if os.minor(number) < NO_CARD})


def _call_list(path: str, seconds: float, largest: int) -> bytes:
    # The library logs to stderr, which Ansible would show as the module's.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import grpc
    except ImportError:
        raise Missing(
            f"kubelet's PodResources can't be read: this node's Python has no grpc. Install {PACKAGE}."
        ) from None
    except Exception as error:
        # A partial installation, whose parts have different versions, may raise anything.
        raise Unreadable(f"this node's grpc ({PACKAGE}) can't be loaded: {_reason(error)}") from None
    options = [("grpc.max_receive_message_length", largest), ("grpc.use_local_subchannel_pool", 1)]
    try:
        with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
            # Encoded messages go out and come in.
            call = channel.unary_unary(LIST, request_serializer=bytes, response_deserializer=bytes)
            return call(LIST_REQUEST, timeout=seconds)
    except Exception as error:
        # RpcError, or another exception of one of the library's many versions.
        text = f"{error.code()}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        text = " ".join(text.replace("StatusCode.", "").split())[:QUOTED]
        raise Unreadable(f"kubelet's PodResources ({path}) can't be read: {text}") from None


def _reason(error: Exception) -> str:
    """Describe an error in a few words."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "it is a symbolic link"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:QUOTED]
