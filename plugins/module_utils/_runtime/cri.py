# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query a running container runtime over the CRI (``crictl info``)."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from .._host.system import System
from .containerd import RUNTIME_NAME, Options


@dataclasses.dataclass(frozen=True)
class CriInfo:
    """A running runtime.

    :param ready: its condition RuntimeReady; None where the answer has none.
    :param default_runtime: empty where the answer has none.
    :param binaries: the program of each of its runtimes; empty for the built-in name.
    """

    ready: bool | None
    default_runtime: str
    binaries: t.Mapping[str, str]


def query(system: System, socket: str, crictl: t.Sequence[str] = ("crictl",)) -> CriInfo | None:
    """Query the runtime behind a socket; None without crictl or without an answer."""
    done = system.run([*crictl, "--timeout", "5s", "--runtime-endpoint", f"unix://{socket}", "info"], timeout=10)
    return parse_info(done.out) if done.rc == 0 else None


def parse_info(text: str) -> CriInfo | None:
    """Parse the output of ``crictl info``; only containerd's holds the CRI plugin's configuration.

    https://github.com/kubernetes-sigs/cri-tools/blob/v1.36.0/docs/crictl.md
    """
    try:
        info = json.loads(text)
        conditions = {
            condition["type"]: condition["status"] for condition in info.get("status", {}).get("conditions") or []
        }
        containerd = (info.get("config") or {}).get("containerd") or {}
        binaries = {
            name: str((runtime.get("options") or {}).get("BinaryName") or "")
            for name, runtime in (containerd.get("runtimes") or {}).items()
        }
        return CriInfo(conditions.get("RuntimeReady"), str(containerd.get("defaultRuntimeName") or ""), binaries)
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def differences(info: CriInfo | None, wanted: Options) -> list[str]:
    """List how the running runtime differs from the requested state; empty where it doesn't report its runtimes."""
    if info is None or not info.default_runtime or not wanted.present:
        return []
    wrong = []
    if wanted.default and info.default_runtime != RUNTIME_NAME:
        wrong.append(f"its default runtime is {info.default_runtime!r}")
    if info.binaries and info.binaries.get(RUNTIME_NAME) != wanted.binary:
        binary = info.binaries.get(RUNTIME_NAME)
        wrong.append(
            f"it has no runtime {RUNTIME_NAME!r}" if binary is None else f"its runtime {RUNTIME_NAME!r} runs {binary!r}"
        )
    return wrong
