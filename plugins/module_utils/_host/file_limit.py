# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A limit of the system on each file that is written, also by programs that don't stop by themselves."""

from __future__ import annotations

import contextlib
import resource
import typing as t


@contextlib.contextmanager
def largest_file(size: int) -> t.Iterator[None]:
    """Let neither this process nor a program that it starts meanwhile write a file beyond a size.

    Such a write fails with EFBIG, and ends a program that doesn't expect that.

    :param size: bytes; a lower limit that the process has stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [limit for limit in (size, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
