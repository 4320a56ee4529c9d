#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: airgap_push
short_description: "Push an archive's images into a registry, and write the variables that name its items"
version_added: 1.1.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""
