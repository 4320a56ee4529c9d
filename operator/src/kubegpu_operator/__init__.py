# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs between ansible-operator and ansible-runner for a resource GPUShare."""

from __future__ import annotations

# The same as the collection's; a test compares them.
__version__ = "1.1.0"
