# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose the planner of the node's package manager."""

from __future__ import annotations

from .._core.errors import BadInput
from .apt import AptPlanner
from .options import PackageSet
from .plan import Planner
from .rpm import RpmPlanner
from .types import PackageFacts


def planner(spec: PackageSet, facts: PackageFacts) -> Planner:
    """Return the planner of the node's package manager.

    :raises BadInput: the node has none that is supported.
    """
    if facts["rpm"] is not None:
        return RpmPlanner(spec, facts["rpm"], facts["packages"])
    if facts["apt"] is not None:
        return AptPlanner(spec, facts["apt"], facts["packages"])
    raise BadInput("packages: this node has neither apt, dnf nor zypper")
