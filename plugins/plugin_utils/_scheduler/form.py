# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two forms in which kube-scheduler reads extenders, a configuration and a Policy: what they share. Pure."""

from __future__ import annotations

import abc
import base64
import dataclasses
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from . import extenders
from .decode import Decoded

FormName = t.Literal["config", "policy"]
NANOSECONDS = 10**9


@dataclasses.dataclass(frozen=True)
class Tls:
    """The certificates by which kube-scheduler and the extender authenticate each other, each as PEM text.

    :param authority: the authority that signed the extender's certificate.
    """

    authority: str
    certificate: str
    key: str

    def entry(self) -> JsonObject:
        parts = {"caData": self.authority, "certData": self.certificate, "keyData": self.key}
        return {name: base64.b64encode(text.encode()).decode() for name, text in parts.items()}


@dataclasses.dataclass(frozen=True)
class Extender:
    """How kube-scheduler reaches the extender.

    :param preempts: whether kube-scheduler asks it which pods to evict. Without that it evicts by a node's totals, and
        may free memory on several cards of which none has enough.
    :param tls: None where they talk over a loopback address.
    """

    url: str
    timeout_seconds: int
    preempts: bool = False
    tls: Tls | None = None

    def entry(self) -> JsonObject:
        """Return the extender as a KubeSchedulerConfiguration has it."""
        return {
            "urlPrefix": self.url,
            "filterVerb": "filter",
            **({"preemptVerb": "preempt"} if self.preempts else {}),
            "bindVerb": "bind",
            "enableHTTPS": self.tls is not None,
            **({"tlsConfig": self.tls.entry()} if self.tls else {}),
            "httpTimeout": f"{self.timeout_seconds}s",
            "nodeCacheCapable": True,
            # Only the extender knows which card a pod gets, so no pod may be bound without it.
            "ignorable": False,
            "managedResources": [dict(extenders.RESOURCE)],
        }

    def policy_entry(self) -> JsonObject:
        """Return the extender as a Policy has it, and a KubeSchedulerConfiguration of v1alpha2."""
        names = {"enableHTTPS": "enableHttps"}
        found = {names.get(key, key): value for key, value in self.entry().items()}
        return {**found, "httpTimeout": self.timeout_seconds * NANOSECONDS}


class Form(abc.ABC):
    """One form: its names, its rules, and how the extender gets into a file and out of it.

    ``flag`` is kube-scheduler's flag without dashes, and ``path`` the collection's own file.
    """

    name: FormName
    flag: str
    path: str
    kind: str

    @abc.abstractmethod
    def like_policy(self, text: str) -> bool:
        """Return whether a file has extenders as a Policy has them: their keys may be written in any case."""

    @abc.abstractmethod
    def new(self, minor: int, flags: t.Mapping[str, str], extender: Extender) -> str:
        """Return a complete file for kube-scheduler 1.``minor``, which had none."""

    @abc.abstractmethod
    def decode(self, path: str, text: str, minor: int | None) -> Decoded | None:
        """Decode a file as kube-scheduler 1.``minor`` does; None where that may know more fields than are known here.

        :raises BadInput: kube-scheduler would refuse it.
        """

    @abc.abstractmethod
    def validate(self, decoded: Decoded, minor: int | None) -> None:
        """Refuse values that kube-scheduler would refuse.

        :raises BadInput: with the line and the path of the field.
        """

    def check(self, path: str, text: str, minor: int | None) -> None:
        """Refuse a file that kube-scheduler 1.``minor`` would refuse.

        :raises BadInput: with the line and the path of the field.
        """
        decoded = self.decode(path, text, minor)
        if decoded is not None:
            self.validate(decoded, minor)

    def merged(self, path: str, text: str, minor: int | None, extender: Extender) -> str:
        """Return the user's file with our extender in it; all else, comments included, stays byte for byte.

        :param path: of the file, for messages.
        :param minor: of kube-scheduler 1.``minor``; None where it is unknown, for a Policy only.
        :raises BadInput: another extender binds pods, or kube-scheduler would refuse the file.
        """
        self.decode(path, text, minor)
        edited = self._extenders(path, text)
        edited.put_in(self._entry(text, extender))
        self.check(path, text, minor)
        after = edited.checked()
        self.check(path, after, minor)
        return after

    def without(self, path: str, text: str) -> str:
        """Return the user's file without our extender."""
        edited = self._extenders(path, text)
        edited.remove()
        return edited.checked()

    def undone(self, path: str, text: str, before: str, extender: Extender) -> str:
        """Return the user's file without our extender, and with the one that ours replaced.

        :param path: of the file, for messages.
        :param before: the file before ours was merged; it was edited since then.
        """
        edited = self._extenders(path, text)
        edited.undo(self._extenders(path, before), extender.url)
        return edited.checked()

    def has(self, path: str, text: str | None, extender: Extender) -> bool:
        """Return whether the file has an extender that can only be ours."""
        try:
            return text is not None and self._extenders(path, text).has(self._entry(text, extender))
        except BadInput:
            return False

    def _extenders(self, path: str, text: str) -> extenders.Extenders:
        return extenders.Extenders(path, text, fold=self.like_policy(text))

    def _entry(self, text: str, extender: Extender) -> JsonObject:
        return extender.policy_entry() if self.like_policy(text) else extender.entry()

    def require_kind(self, path: str, kind: t.Any) -> None:
        """Refuse a file of another kind.

        :raises BadInput: it is one.
        """
        if kind != self.kind:
            raise BadInput(f"{path} isn't a {self.kind}")
