# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What checks find. A finding carries a cause code and fields; its text is made from the catalog at the end. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts.model import Pod
from .._core.types import JsonObject
from .catalog import CATALOG
from .model import Gpu
from .parse import MAX_NUMBER, plural

FAIL, WARN, UNKNOWN, PASS = "FAIL", "WARN", "UNKNOWN", "PASS"
LEVELS = (FAIL, WARN, UNKNOWN, PASS)
# Appended where only the second of two samples had data.
UNCONFIRMED = " (the first sample had no data for this)"
PLANES = ("api", "kubelet", "nvml", "proc", "extender")
LOCATION = ("node", "card", "uuid", "container", "key", "pod_uid")


class _Fields(dict[str, t.Any]):
    def __missing__(self, key: str) -> str:
        return "unknown"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    :param cause: code of the cause, a key of the check's messages in the catalog.
    :param fields: what the cause's message needs besides the location.
    :param evidence: by plane: api, kubelet, nvml, proc or extender.
    :param key: distinguishes findings of the same node, GPU, pod and container.
    :param parts: summands by something that keeps its meaning (UID, PID), where the cause is a sum that is too large.
        Of two samples, only what is in both adds up.
    :param most: the most that such a sum may be.
    :param seen: number of samples that have it.
    :param unconfirmed: the first sample had no data for it.
    """

    check: str
    cause: str
    level: str
    node: str = ""
    card: int | None = None
    uuid: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    key: str = ""
    fields: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    evidence: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    most: int | None = None
    seen: int = 1
    unconfirmed: bool = False

    @property
    def identity(self) -> tuple[str, str, str, int | None, str, str, str]:
        """What one finding has in two samples, besides the pod's UID: its place, or else its cause; and its key."""
        cause = "" if self.node or self.pod else self.cause
        return (self.check, cause, self.node, self.card, self.pod, self.container, self.key)

    def same_cause(self, before: Finding) -> bool:
        """Return whether a finding of the same identity in an earlier sample has the same cause.

        A total fails only if the entries present in both samples exceed the limit.
        """
        if self.pod_uid and before.pod_uid and self.pod_uid != before.pod_uid:
            return False
        if self.most is None or before.most is None:
            return True
        both = sum(min(number, before.parts.get(name, 0)) for name, number in self.parts.items())
        return both > max(self.most, before.most)

    def plain(self) -> JsonObject:
        """Return the finding as JSON, with its text."""
        text, action = CATALOG[self.check].message(self.cause, self.level == UNKNOWN and not self.unconfirmed)
        fields = _Fields({key: getattr(self, key) for key in ("node", "card", "uuid", "pod", "container")})
        fields.update(self.fields)
        finding: JsonObject = {
            "check": self.check,
            "cause": self.cause,
            "level": self.level,
            "node": self.node,
            "card": self.card,
            "uuid": self.uuid,
            "pod": self.pod,
            "pod_uid": self.pod_uid,
            "container": self.container,
            "what": text.format_map(fields) + (UNCONFIRMED if self.unconfirmed else ""),
            "do": action.format_map(fields),
            "evidence": {plane: text for plane, text in self.evidence.items() if text},
            "seen": self.seen,
        }
        if self.key:
            finding["key"] = self.key
        if self.most is not None:
            finding.update(parts=dict(self.parts), most=self.most)
        return finding


class CheckResult:
    """What one check found, on one node or in the whole cluster."""

    def __init__(self, check: str, node: str = "") -> None:
        self.check, self.node = check, node
        self.checked = 0
        self.findings: list[Finding] = []

    def count(self, number: int = 1) -> None:
        """Add to the number of things that the check has compared."""
        self.checked += number

    def without_data(self, pods: t.Collection[Pod], why: str) -> bool:
        """Report pods that can't be checked, and return whether that is so.

        :param why: the reason; empty where they can be checked.
        """
        if why:
            self.count(len(pods))
        if why and pods:
            self.unknown("no_data", pods=plural(len(pods), "pod"), why=why)
        return bool(why)

    def fail(self, cause: str, **details: t.Any) -> None:
        """Add a FAIL; see ``add``."""
        self.add(FAIL, cause, details)

    def warn(self, cause: str, **details: t.Any) -> None:
        """Add a WARN; see ``add``."""
        self.add(WARN, cause, details)

    def unknown(self, cause: str, **details: t.Any) -> None:
        """Add an UNKNOWN; see ``add``."""
        self.add(UNKNOWN, cause, details)

    def add(self, level: str, cause: str, details: JsonObject) -> None:
        """Add a finding.

        :param details: the location (``gpu`` for card and UUID, a ``Pod`` for its name and UID), evidence by plane,
            ``parts`` and ``most`` of a sum. Everything else is a field of the message.
        """
        gpu: Gpu | None = details.pop("gpu", None)
        pod = details.pop("pod", "")
        location: JsonObject = {key: details.pop(key) for key in LOCATION if key in details}
        location.setdefault("node", self.node)
        if gpu is not None:
            location.setdefault("card", gpu.index)
            location.setdefault("uuid", gpu.uuid)
            details["gpu"] = gpu.label
        if isinstance(pod, Pod):
            location.update(pod=pod.key, pod_uid=pod.uid)
        else:
            location["pod"] = pod
        if "most" in details:
            location["most"] = min(details.pop("most"), MAX_NUMBER)
            location["parts"] = {name: min(number, MAX_NUMBER) for name, number in details.pop("parts").items()}
        evidence = {plane: details.pop(plane) for plane in PLANES if plane in details}
        self.findings.append(Finding(self.check, cause, level, evidence=evidence, fields=details, **location))
