# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Bring a package set of the machine that the module runs on to its desired state."""

from __future__ import annotations

import time

from .._core.plan import Plan
from .._host.system import System
from . import installed
from .apt_apply import AptApplier
from .commands import Sleep
from .planner import planner
from .rpm_apply import RpmApplier
from .signing_key import Fetch, fetch_key
from .spec import PackageSet
from .types import PackageFacts


class PackagesReconciler:
    """One package set.

    :param family: the distribution's family.
    :param native: dpkg's name of the machine's architecture.
    :param fetch: downloads a key.
    """

    def __init__(
        self,
        spec: PackageSet,
        system: System,
        family: str,
        native: str,
        fetch: Fetch = fetch_key,
        sleep: Sleep = time.sleep,
    ) -> None:
        self._spec = spec
        self._system = system
        self._family = family
        self._native = native
        self._fetch = fetch
        self._sleep = sleep

    def observe(self) -> PackageFacts:
        return installed.observe(self._system, self._family, self._native)

    def plan(self, seen: PackageFacts) -> Plan:
        return planner(self._spec, seen).plan()

    def apply(self, seen: PackageFacts, plan: Plan) -> None:
        applier = AptApplier if seen["rpm"] is None else RpmApplier
        applier(self._spec, self._system, self.observe, self._fetch, self._sleep).apply(seen, plan)
