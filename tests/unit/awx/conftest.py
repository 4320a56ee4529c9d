# SPDX-License-Identifier: GPL-3.0-or-later
"""The API server that the tests of this folder share with those of the others."""

from __future__ import annotations

from real_apiserver import api_server

__all__ = ["api_server"]
