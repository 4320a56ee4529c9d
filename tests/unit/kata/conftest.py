# SPDX-License-Identifier: GPL-3.0-or-later
from real_apiserver import api_server

__all__ = ["api_server"]
