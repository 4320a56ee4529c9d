# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lease by which kube-schedulers elect a leader: proof that one of them is at work."""

from __future__ import annotations

import time
import typing as t

from ...module_utils._core.errors import NotInEffect, ShareError
from ...module_utils._core.types import JsonObject
from ...module_utils._core.wait import Waiting
from ...module_utils._kube.api import Kube
from ...module_utils._kube.direct import connect
from ...module_utils._kube.refs import Ref
from .connection import Connection

POLL_SECONDS = 1.0


class Lease(t.NamedTuple):
    """Who holds the lease (``<host name>_<uuid of the process>``) and when it was last renewed."""

    holder: str
    renewed: str


class SchedulerLease:
    """kube-scheduler's lease in a cluster.

    :param kubeconfig: path or content; None for kubernetes.core's default.
    :param ref: the lease.
    :raises ShareError: the cluster can't be used.
    """

    def __init__(
        self,
        kubeconfig: str | JsonObject | None,
        ref: Ref,
        kube: Kube | None = None,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._ref = ref
        self._options = Connection({"kubeconfig": kubeconfig})
        with self._options.masked():
            self._kube: Kube = kube if kube is not None else connect(self._options)
        self._sleep = sleep
        self._now = now

    def read(self) -> Lease:
        with self._options.masked():
            spec = (self._kube.get(self._ref) or {}).get("spec") or {}
        return Lease(str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))

    def wait_for_renewal(self, before: Lease, hostname: str, timeout: float) -> str:
        """Wait until the lease is renewed; return its holder.

        An API server that is away for a while is waited for too: on k3s and RKE2 it restarts with kube-scheduler.

        :param before: the lease before kube-scheduler on ``hostname`` was restarted. Where that process held it,
            another process has to hold it afterwards.
        :param hostname: of the machine; empty where no process was replaced.
        :param timeout: in seconds.
        :raises NotInEffect: it isn't renewed in time.
        """
        was_here = bool(hostname) and before.holder.startswith(f"{hostname}_")
        first: Lease | None = None
        found: Lease | None = None
        away = ""
        for _attempt in Waiting(timeout, POLL_SECONDS, self._sleep, self._now).attempts():
            found, away = self._read_or_error()
            if found is not None:
                first = first or found
                if found.holder and found.renewed != first.renewed and not (was_here and found.holder == before.holder):
                    return found.holder
        holder = (found or first or before).holder or "nobody"
        raise NotInEffect(
            f"kube-scheduler is healthy, but its lease {self._ref.namespace}/{self._ref.name} isn't renewed "
            f"after {timeout:g} s ({away or f'its last holder is {holder}'})"
        )

    def _read_or_error(self) -> tuple[Lease | None, str]:
        """Return the lease, or why it can't be read at the moment."""
        try:
            return self.read(), ""
        except ShareError as error:
            return None, str(error)
