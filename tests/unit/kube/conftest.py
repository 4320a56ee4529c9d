# SPDX-License-Identifier: GPL-3.0-or-later
"""The API server that the tests share."""

from __future__ import annotations

from real_apiserver import api_server

__all__ = ["api_server"]
