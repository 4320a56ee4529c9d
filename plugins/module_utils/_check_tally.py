# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a check is, and what it finds. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import MOST
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

FAIL, WARN, UNKNOWN, PASS = "FAIL", "WARN", "UNKNOWN", "PASS"
LEVELS = (FAIL, WARN, UNKNOWN, PASS)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found; ``evidence`` by plane (api, kubelet, nvml, proc, extender).

    :param pod_uid: its pod's, as another pod may have the name a moment later.
    :param key: what contradicts, where node, card, pod and container don't tell it apart.
    :param parts: what a sum is of, by what never changes its meaning (UID, PID); of two samples only what is in both
        adds up.
    :param most: what such a sum may be.
    """

    check: str
    level: str
    node: str
    what: str
    do: str = ""
    card: int | None = None
    uuid: str = ""
    pod: str = ""
    container: str = ""
    evidence: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    seen: int = 1
    pod_uid: str = ""
    key: str = ""
    parts: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    most: int | None = None

    @property
    def identity(self) -> tuple[str, str, int | None, str, str, str]:
        """What is the same in two samples, but for the pod's UID; what is of no place is told by its words."""
        return (
            self.check,
            self.node,
            self.card,
            self.pod,
            self.container or ("" if self.node or self.pod else self.what),
            self.key,
        )

    def again(self, before: Finding) -> bool:
        """Whether this, and what an earlier sample found at the same place, come of the same thing."""
        if self.pod_uid and before.pod_uid and self.pod_uid != before.pod_uid:
            return False
        if self.most is None or before.most is None:
            return True
        both = sum(min(number, before.parts.get(name, 0)) for name, number in self.parts.items())
        return both > max(self.most, before.most)

    def plain(self) -> Json:
        told = {**dataclasses.asdict(self), "evidence": {k: v for k, v in self.evidence.items() if v}}
        if self.most is None:
            del told["parts"], told["most"]
        if not self.key:
            del told["key"]
        return told


class Tally:
    """What one check looked at, and what it found."""

    def __init__(self, check: str, node: str = "") -> None:
        self.check, self.node = check, node
        self.n = 0
        self.findings: list[Finding] = []

    def seen(self, number: int = 1) -> None:
        self.n += number

    def fail(self, what: str, do: str = "", **more: t.Any) -> None:
        self._add(FAIL, what, do, more)

    def warn(self, what: str, do: str = "", **more: t.Any) -> None:
        self._add(WARN, what, do, more)

    def unknown(self, what: str, do: str = "", **more: t.Any) -> None:
        self._add(UNKNOWN, what, do, more)

    def _add(self, level: str, what: str, do: str, more: Json) -> None:
        """``gpu`` stands for card and uuid, and a Pod for its name; what isn't a place is evidence by plane."""
        gpu = more.pop("gpu", None)
        pod = more.pop("pod", "")
        place: dict[str, t.Any] = {
            key: more.pop(key) for key in ("node", "card", "uuid", "container", "key") if key in more
        }
        if "most" in more:
            place["most"] = min(more.pop("most"), MOST)
            place["parts"] = {name: min(number, MOST) for name, number in more.pop("parts").items()}
        if gpu is not None:
            place.setdefault("card", gpu.index)
            place.setdefault("uuid", gpu.uuid)
        place.setdefault("node", self.node)
        name, uid = (pod.key, pod.uid) if isinstance(pod, Pod) else (pod, more.pop("pod_uid", ""))
        self.findings.append(
            Finding(self.check, level, what=what, do=do, pod=name, pod_uid=uid, evidence=dict(more), **place)
        )


NodeFunction = t.Callable[[Node, Snapshot, Tally], None]
ClusterFunction = t.Callable[[Snapshot, Tally], None]


@dataclasses.dataclass(frozen=True)
class Check:
    """An invariant.

    :param backend: common, gpushare, hami, nvidia or servers; nodes of others aren't looked at.
    :param title: what holds where it passes.
    :param compares: what is compared with what, for the documentation.
    :param levels: what it can find, for the documentation.
    :param node: run for each node of the backend.
    :param cluster: run once.
    :param confirm: an UNKNOWN of it that has a key counts in two samples only, as it may come of two moments.
    """

    id: str
    backend: str
    title: str
    compares: str
    levels: str
    node: NodeFunction | None = None
    cluster: ClusterFunction | None = None
    confirm: bool = False
