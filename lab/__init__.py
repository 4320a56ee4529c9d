# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab: a real Kubernetes cluster on one machine whose GPUs, and nothing else, are simulated."""
