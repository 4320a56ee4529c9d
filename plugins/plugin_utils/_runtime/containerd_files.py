# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The order, formats and deprecated settings of containerd's configuration files."""

from __future__ import annotations

import typing as t

from ...module_utils._runtime import containerd

# The newest format that a release reads; since 2.3 each imported file is migrated by itself.
NEWEST_FORMAT = (((2, 3), 4), ((2, 0), 3), ((0, 0), 2))
EACH_FILE_ITS_FORMAT = (2, 3)


def newest_format(release: tuple[int, int]) -> int:
    """Return the newest configuration format that a release reads."""
    return next(number for since, number in NEWEST_FORMAT if release >= since)


def load_order(main: str, texts: t.Mapping[str, str]) -> list[str]:
    """Return a configuration's files in the order in which containerd merges them; the later one wins."""

    def names(folder: str) -> list[str]:
        start = folder.rstrip("/") + "/"
        return list({path[len(start) :].partition("/")[0] for path in texts if path.startswith(start)})

    order: list[str] = []
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in order or path not in texts:
            continue
        order.append(path)
        pending.extend(containerd.resolve(path, containerd.imports_of(texts[path]), names))
    return order


def missing_imports(main: str, texts: t.Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the importing file and the path of each import without a wildcard that doesn't exist.

    containerd doesn't start with them, and since 2.0 its dump doesn't report them.
    """
    found = []
    for path in load_order(main, texts):
        exact = [one for one in containerd.imports_of(texts[path]) if "*" not in one]
        found += [(path, one) for one in containerd.resolve(path, exact, lambda _folder: []) if one not in texts]
    return found


def deprecated_settings(seen: containerd.EffectiveConfig) -> list[tuple[tuple[str, ...], str]]:
    """Return the deprecated settings of 1.x with which our runtime can't be the default: key and explanation.

    The dump accepts them; only the daemon fails with them when it starts.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    if seen.value("containerd", "default_runtime", "runtime_type"):
        reason = "containerd.default_runtime overrides default_runtime_name; make it one of containerd.runtimes"
        found.append((("containerd", "default_runtime"), reason))
    for old in ("systemd_cgroup", "no_pivot"):
        if seen.value(old):
            reason = f"{old} = true only works with a default runtime of type io.containerd.runtime.v1.linux; "
            found.append(((old,), reason + "set it in the options of each runtime"))
    return found
