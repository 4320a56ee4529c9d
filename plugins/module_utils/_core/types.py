# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one type of data that has no type of its own: objects of the Kubernetes API, options, results of modules."""

from __future__ import annotations

import typing as t

JsonObject = dict[str, t.Any]
