# SPDX-License-Identifier: GPL-3.0-or-later
"""gpushare's servers: the scheduler extender and the device plugin, one package and one image."""

__version__ = "1.1.0"
