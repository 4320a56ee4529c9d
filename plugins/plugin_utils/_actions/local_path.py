# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A path on the controller, relative to the working directory of ansible-playbook.

Ansible starts modules on localhost in the playbook's folder, which is the installed collection's for its own playbooks.
"""

from __future__ import annotations

import os
import typing as t


def local_path(value: t.Any) -> t.Any:
    """Return a path, or several that are separated as in ``KUBECONFIG``, as absolute ones; anything else as it is."""
    if not isinstance(value, str) or not value:
        return value
    return os.pathsep.join(
        os.path.abspath(os.path.expanduser(os.path.expandvars(part))) for part in value.split(os.pathsep) if part
    )


def kubeconfig(value: t.Any) -> t.Any:
    """Return the kubeconfig of a variable, or of the environment if its path is relative, as ``local_path`` does."""
    given = next(filter(None, map(os.environ.get, ("K8S_AUTH_KUBECONFIG", "KUBECONFIG"))), "")
    if value or all(part.startswith("/") for part in given.split(os.pathsep)):
        return local_path(value)
    return local_path(given)
