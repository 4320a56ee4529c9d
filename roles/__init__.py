# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-core imports this package when it loads the first role of the collection."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import node_results

node_results.enforce()
