# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the headers of a tar file that anybody may have written: tarfile reads one whole, whatever size it claims. Pure.

``tarfile.open(..., tarinfo=Header)`` and ``members`` bound what the headers take of the memory.
"""

from __future__ import annotations

import tarfile
import typing as t

# Bytes of what extends one header: a path, and the owner's names.
LARGEST = 64 << 10
# Headers of one file; each takes about 1 KiB of memory.
MOST = 600_000
# Their content is read with the headers.
_EXTENDING = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class Header(tarfile.TarInfo):
    """A header whose extensions are small. A global one, which each later header would copy, is refused.

    So are sparse files whose map isn't in the header: it is as long as its file says.
    """

    # Documented in tarfile.py as the method that a subclass extends.
    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type == tarfile.XGLTYPE:
            raise tarfile.ReadError("it has a global header")
        if self.type in _EXTENDING and self.size > LARGEST:
            raise tarfile.ReadError(f"a header has {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc, no-any-return]

    def _proc_gnusparse_10(self, *_given: t.Any) -> None:
        raise tarfile.ReadError("it has a sparse file")


def members(tar: tarfile.TarFile) -> t.Iterator[tarfile.TarInfo]:
    """Yield what a tar file has.

    :param tar: opened with ``tarinfo=Header``.
    :raises tarfile.ReadError: it has more than ``MOST``, or a header isn't one.
    """
    for number, member in enumerate(tar, 1):
        if number > MOST:
            raise tarfile.ReadError(f"it has more than {MOST} members")
        # Applied already; tarfile keeps each member until the file is closed.
        member.pax_headers = {}
        yield member
