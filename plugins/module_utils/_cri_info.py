# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a running container runtime says of itself over the CRI (``crictl info``)."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._system import System


@dataclasses.dataclass(frozen=True)
class CriInfo:
    """A running runtime.

    :param ready: its condition RuntimeReady; None where it doesn't say.
    :param default_runtime: empty where it doesn't say.
    :param binaries: what each of its runtimes runs; empty for the built-in name.
    """

    ready: bool | None
    default_runtime: str
    binaries: t.Mapping[str, str]


def ask(system: System, socket: str, crictl: t.Sequence[str] = ("crictl",)) -> CriInfo | None:
    """Ask over a socket; None where there is no crictl or no answer."""
    done = system.run([*crictl, "--timeout", "5s", "--runtime-endpoint", f"unix://{socket}", "info"], timeout=10)
    return read(done.out) if done.rc == 0 else None


def read(text: str) -> CriInfo | None:
    """``crictl info``'s answer; of containerd it holds the CRI plugin's configuration, of others only conditions."""
    try:
        found = json.loads(text)
        conditions = {one["type"]: one["status"] for one in found.get("status", {}).get("conditions") or []}
        containerd = (found.get("config") or {}).get("containerd") or {}
        binaries = {
            name: str((one.get("options") or {}).get("BinaryName") or "")
            for name, one in (containerd.get("runtimes") or {}).items()
        }
        return CriInfo(conditions.get("RuntimeReady"), str(containerd.get("defaultRuntimeName") or ""), binaries)
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def differences(found: CriInfo | None, present: bool, default: bool, binary: str, name: str = "nvidia") -> list[str]:
    """Why the running runtime isn't what is wanted; nothing where it doesn't say."""
    if found is None or not found.default_runtime:
        return []
    if not present:
        return []
    wrong = []
    if default and found.default_runtime != name:
        wrong.append(f"its default runtime is {found.default_runtime!r}")
    if found.binaries and found.binaries.get(name) != binary:
        what = found.binaries.get(name)
        wrong.append(f"its runtime {name!r} runs {what!r}" if what is not None else f"it has no runtime {name!r}")
    return wrong
