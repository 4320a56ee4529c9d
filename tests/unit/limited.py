# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import LIMITED


def without_limit(argv: Sequence[str]) -> list[str]:
    """Return the words of a command, without the time limit that ``RealSystem`` puts before them."""
    limited = tuple(argv[: len(LIMITED)]) == LIMITED
    return [str(word) for word in (argv[len(LIMITED) + 1 :] if limited else argv)]
