# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The lease that kube-schedulers hold in turn: proof that one of them is at work."""

from __future__ import annotations

import contextlib
import os
import time
import typing as t

from ansible.module_utils.common.parameters import remove_values
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

POLL_SECONDS = 1.0
LEASE = Ref("coordination.k8s.io/v1", "Lease", "kube-system", "kube-scheduler")


class Lease(t.NamedTuple):
    """Who holds the lease (``<host name>_<uuid of the process>``) and when it was last renewed."""

    holder: str
    renewed: str


class _Options:
    """What the API's door needs of a module: its authentication options."""

    def __init__(self, kubeconfig: str | Json | None) -> None:
        if isinstance(kubeconfig, str):
            kubeconfig = os.path.expanduser(os.path.expandvars(kubeconfig)) or None
        self.params: dict[str, t.Any] = {"kubeconfig": kubeconfig}
        self.no_log_values: set[str] = set()


class SchedulerLease:
    """kube-scheduler's lease in a cluster.

    :param kubeconfig: path or content; without it, what kubernetes.core takes by default.
    :param ref: the lease.
    :raises ShareError: the cluster can't be used.
    """

    def __init__(
        self,
        kubeconfig: str | Json | None,
        kube: Kube | None = None,
        sleep: t.Callable[[float], None] = time.sleep,
        now: t.Callable[[], float] = time.monotonic,
        ref: Ref = LEASE,
    ) -> None:
        self._ref = ref
        self._options = _Options(kubeconfig)
        with self._discreet():
            self._kube: Kube = kube if kube is not None else RealKube.of_module(self._options)
        self._sleep = sleep
        self._now = now

    @contextlib.contextmanager
    def _discreet(self) -> t.Iterator[None]:
        """Nobody masks what an action plugin says as a module's answer is."""
        try:
            yield
        except ShareError as error:
            raise type(error)(str(remove_values(str(error), self._options.no_log_values)), **error.details) from None

    def read(self) -> Lease:
        with self._discreet():
            spec = (self._kube.get(self._ref) or {}).get("spec") or {}
        return Lease(str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))

    def taken(self, before: Lease, hostname: str, timeout: float) -> str:
        """Wait until the lease is held and renewed again; its holder.

        An API server that is away for a while is waited for as well: where it is part of what was started again (k3s,
        RKE2) it has to be.

        :param before: the lease before kube-scheduler on ``hostname`` was started anew. Where that process held it,
            another one has to.
        :raises NotInEffect: nobody does, in time.
        """
        was_here = bool(hostname) and before.holder.startswith(f"{hostname}_")
        first: Lease | None = None
        found: Lease | None = None
        away = ""
        for _look in Waiting(timeout, POLL_SECONDS, self._sleep, self._now).looks():
            found, away = self._asked()
            if found is not None:
                first = first or found
                if found.holder and found.renewed != first.renewed and not (was_here and found.holder == before.holder):
                    return found.holder
        holder = (found or first or before).holder or "nobody"
        raise NotInEffect(
            f"kube-scheduler is healthy, but its lease {self._ref.namespace}/{self._ref.name} isn't renewed "
            f"after {timeout:g} s ({away or f'its last holder is {holder}'})"
        )

    def _asked(self) -> tuple[Lease | None, str]:
        """The lease, or why it can't be read at the moment."""
        try:
            return self.read(), ""
        except ShareError as error:
            return None, str(error)
