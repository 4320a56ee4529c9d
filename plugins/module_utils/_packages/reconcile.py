# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring a package set of the machine that the module runs on to its desired state."""

from __future__ import annotations

import dataclasses
import time

from .._core.plan import Plan
from .._core.types import JsonObject
from .._host.system import System
from . import installed
from .apply import Sleep
from .apt_apply import AptApplier
from .options import Fetch, PackageSet, fetch_key, key_of
from .planner import planner
from .rpm_apply import RpmApplier
from .types import PackageFacts


@dataclasses.dataclass(frozen=True)
class PackagesReconciler:
    """One package set.

    :param family: the distribution's family.
    :param native: dpkg's name of the machine's architecture.
    :param fetch: downloads a key.
    """

    spec: PackageSet
    system: System
    family: str
    native: str
    fetch: Fetch = fetch_key
    sleep: Sleep = time.sleep

    def observe(self) -> PackageFacts:
        """Return the facts; of a set that is only verified, after its new keys have been downloaded and checked.

        :raises ShareError: a key can't be downloaded, or isn't the pinned one.
        """
        seen = installed.observe(self.system, self.family, self.native)
        if self.spec.verified:
            for repository in planner(self.spec, seen).new_keys():
                key_of(repository, self.fetch)
        return seen

    def plan(self, seen: PackageFacts) -> Plan:
        return planner(self.spec, seen).plan()

    def details(self, seen: PackageFacts) -> JsonObject:
        """Return what the module returns beside ``changed`` and ``diff``."""
        return {"left": planner(self.spec, seen).left()} if self.spec.exclusive else {}

    def apply(self, seen: PackageFacts, plan: Plan) -> None:
        applier = AptApplier if seen["rpm"] is None else RpmApplier
        applier(self.spec, self.system, self.observe, self.fetch, self.sleep).apply(seen, plan)
