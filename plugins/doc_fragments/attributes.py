# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    # A module that changes something: check mode and diff mode are complete.
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and return the changed status without modifying anything.
  diff_mode:
    support: full
    description: Returns what has changed, or would change in check mode, when in diff mode.
  platform:
    description: Target systems.
    platforms: posix
    support: full
"""

    # A module that only reads.
    INFO = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: Only reads; check mode makes no difference.
  diff_mode:
    support: N/A
    description: Changes nothing.
  platform:
    description: Target systems.
    platforms: posix
    support: full
"""

    # A module with the connection options of kubernetes.core.
    CLUSTER = r"""
options: {}
attributes:
  action_group:
    description: Use C(group/kubegpu.share.cluster) in C(module_defaults) to set options for this module.
    support: full
    membership:
      - kubegpu.share.cluster
"""
