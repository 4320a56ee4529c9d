# SPDX-License-Identifier: GPL-3.0-or-later
"""A file system that answers from a tree of folders, texts and links, made anew for each request.

It speaks the kernel's FUSE protocol itself (include/uapi/linux/fuse.h, version 7.31), with nothing but the standard
library. A write reaches the tree while the writer waits, and its OSError is the writer's error, as in sysfs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from pci_bus import Entry, Link, Text

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _READLINK, _OPEN, _READ, _WRITE = 1, 2, 3, 4, 5, 14, 15, 16
_STATFS, _RELEASE, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 17, 18, 25, 26, 27, 28, 29
_INTERRUPT, _BATCH_FORGET = 36, 42
_UNANSWERED = (_FORGET, _BATCH_FORGET, _INTERRUPT)

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR, _ENTRY, _ATTR_HEAD = struct.Struct("<6Q10I"), struct.Struct("<4QII"), struct.Struct("<QII")
_OPENED, _TRANSFER, _WRITTEN = struct.Struct("<QII"), struct.Struct("<QQIIQII"), struct.Struct("<II")
_DIRENT, _KSTATFS = struct.Struct("<QQII"), struct.Struct("<5Q10I")
_INIT_OUT = struct.Struct("<IIIIHHII32x")
_DEVICE, _NUMBER = "/dev/fuse", os.makedev(10, 229)
_DIRECT_IO = 1
_MAJOR, _MINOR, _MAX_WRITE = 7, 31, 65536
_ROOT = 1
_SIZE = 4096
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MNT_DETACH = 2, 4, 8, 4096, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), f"{target} can't be mounted: {os.strerror(ctypes.get_errno())}")


def bind(source: Path, target: Path) -> None:
    """Show a folder at another place, too."""
    _mount(str(source), str(target), "", _MS_BIND, "")


def unmount(target: Path) -> None:
    """Take the topmost file system off a place, if there is any."""
    _libc.umount2(str(target).encode(), _MNT_DETACH)


def _kind(entry: Entry) -> int:
    if isinstance(entry, Link):
        return stat.S_IFLNK
    return stat.S_IFREG if isinstance(entry, Text) else stat.S_IFDIR


class Files:
    """The mounted tree.

    :param tree: returns the root folder.
    """

    def __init__(self, tree: Callable[[], dict[str, Entry]], target: Path) -> None:
        self._tree = tree
        self._paths: list[tuple[str, ...]] = [(), ()]
        self._numbers: dict[tuple[str, ...], int] = {(): _ROOT}
        # A container that isn't privileged has it only by its own hand.
        if not os.path.exists(_DEVICE):
            os.mknod(_DEVICE, stat.S_IFCHR | 0o600, _NUMBER)
        self._device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        _mount("simulated-pci", str(target), "fuse.simulated-pci", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)

    def serve(self) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, _MAX_WRITE + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                if error.errno == errno.ENODEV:
                    return
                raise
            _length, operation, unique, number, *_who = _IN.unpack_from(request)
            body = request[_IN.size :]
            if operation in _UNANSWERED:
                continue
            if operation == _WRITE:
                # It may wait, and everybody else goes on.
                threading.Thread(target=self._answer, args=(unique, operation, number, body), daemon=True).start()
            else:
                self._answer(unique, operation, number, body)

    def _answer(self, unique: int, operation: int, number: int, body: bytes) -> None:
        try:
            answer, failed = self._do(operation, number, body), 0
        except OSError as error:
            answer, failed = b"", error.errno or errno.EIO
        try:
            os.write(self._device, _OUT.pack(_OUT.size + len(answer), -failed, unique) + answer)
        except OSError as error:
            # The request was interrupted, or the file system is gone.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise

    def _do(self, operation: int, number: int, body: bytes) -> bytes:
        if operation == _INIT:
            return _INIT_OUT.pack(_MAJOR, _MINOR, 0, 0, 16, 12, _MAX_WRITE, 1)
        if operation == _STATFS:
            return _KSTATFS.pack(0, 0, 0, 0, 0, _SIZE, 255, _SIZE, *(0,) * 7)
        path = self._paths[number]
        if operation == _LOOKUP:
            return self._lookup((*path, body.rstrip(b"\0").decode()))
        entry = self._entry(path)
        if operation in (_GETATTR, _SETATTR):
            return _ATTR_HEAD.pack(0, 0, 0) + self._attributes(number, entry)
        if operation == _READLINK and isinstance(entry, Link):
            return entry.target.encode()
        if operation in (_OPEN, _OPENDIR):
            return _OPENED.pack(0, _DIRECT_IO if operation == _OPEN else 0, 0)
        if operation == _READ and isinstance(entry, Text):
            _handle, offset, size, *_rest = _TRANSFER.unpack_from(body)
            return entry.content.encode()[offset : offset + size]
        if operation == _WRITE and isinstance(entry, Text) and entry.write is not None:
            size = _TRANSFER.unpack_from(body)[2]
            entry.write(body[_TRANSFER.size : _TRANSFER.size + size].decode(errors="replace"))
            return _WRITTEN.pack(size, 0)
        if operation == _READDIR and isinstance(entry, dict):
            _handle, offset, size, *_rest = _TRANSFER.unpack_from(body)
            return self._names(path, entry, offset, size)
        if operation in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not for this file")

    def _entry(self, path: tuple[str, ...]) -> Entry:
        entry: Entry = self._tree()
        for name in path:
            if not isinstance(entry, dict) or name not in entry:
                raise OSError(errno.ENOENT, "/".join(path))
            entry = entry[name]
        return entry

    def _number(self, path: tuple[str, ...]) -> int:
        if path not in self._numbers:
            self._paths.append(path)
            self._numbers[path] = len(self._paths) - 1
        return self._numbers[path]

    def _lookup(self, path: tuple[str, ...]) -> bytes:
        entry = self._entry(path)
        number = self._number(path)
        # The kernel remembers nothing: each look is a new question.
        return _ENTRY.pack(number, 0, 0, 0, 0, 0) + self._attributes(number, entry)

    def _attributes(self, number: int, entry: Entry) -> bytes:
        if isinstance(entry, Link):
            rights, size = 0o777, len(entry.target)
        elif isinstance(entry, Text):
            rights, size = (0o444 if entry.content or entry.write is None else 0) | (0o200 if entry.write else 0), _SIZE
        else:
            rights, size = 0o755, 0
        return _ATTR.pack(number, size, 0, 0, 0, 0, 0, 0, 0, _kind(entry) | rights, 1, 0, 0, 0, _SIZE, 0)

    def _names(self, path: tuple[str, ...], folder: dict[str, Entry], offset: int, size: int) -> bytes:
        rows = b""
        for place, name in list(enumerate((".", "..", *sorted(folder)), 1))[offset:]:
            entry = folder.get(name, {})
            kind = (
                stat.S_IFLNK if isinstance(entry, Link) else stat.S_IFREG if isinstance(entry, Text) else stat.S_IFDIR
            )
            raw = name.encode()
            # A number for show: the kernel asks for each name anyway.
            row = _DIRENT.pack(place + 1, place, len(raw), kind >> 12) + raw
            row += b"\0" * (-len(row) % 8)
            if len(rows) + len(row) > size:
                break
            rows += row
        return rows
