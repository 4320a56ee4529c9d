# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The lease that kube-schedulers hold in turn: proof that one of them is at work."""

from __future__ import annotations

import time
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref

POLL_SECONDS = 1.0
LEASE = Ref("coordination.k8s.io/v1", "Lease", "kube-system", "kube-scheduler")


class Lease(t.NamedTuple):
    """Who holds the lease (``<host name>_<uuid of the process>``) and when it was last renewed."""

    holder: str
    renewed: str


class _Options:
    """What the API's door needs of a module: its authentication options."""

    def __init__(self, kubeconfig: str) -> None:
        self.params: dict[str, t.Any] = {"kubeconfig": kubeconfig}
        self.no_log_values: set[str] = set()


class SchedulerLease:
    """kube-scheduler's lease in a cluster.

    :param kubeconfig: the cluster.
    :raises ShareError: it can't be used.
    """

    def __init__(
        self,
        kubeconfig: str,
        kube: Kube | None = None,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube: Kube = kube if kube is not None else RealKube.of_module(_Options(kubeconfig))
        self._sleep = sleep
        self._now = now

    def read(self) -> Lease:
        spec = (self._kube.get(LEASE) or {}).get("spec") or {}
        return Lease(str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))

    def taken(self, before: Lease, hostname: str, timeout: float) -> str:
        """Wait until the lease is held and renewed again; its holder.

        :param before: the lease before kube-scheduler on ``hostname`` was started anew. Where that process held it,
            another one has to.
        :raises NotInEffect: nobody does, in time.
        """
        end = self._now() + timeout
        was_here = bool(hostname) and before.holder.startswith(f"{hostname}_")
        first = self.read()
        while True:
            found = self.read()
            if found.holder and found.renewed != first.renewed and not (was_here and found.holder == before.holder):
                return found.holder
            if self._now() >= end:
                raise NotInEffect(
                    "kube-scheduler is healthy, but its lease kube-system/kube-scheduler isn't renewed after "
                    f"{timeout:g} s "
                    f"(its last holder is {found.holder or 'nobody'})"
                )
            self._sleep(POLL_SECONDS)
