# SPDX-License-Identifier: GPL-3.0-or-later
"""A virtual machine with a real Linux kernel and simulated PCI cards, for what a container can't show."""
