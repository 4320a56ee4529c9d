# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The paths and abilities of the package managers, for their queries and their planners alike."""

from __future__ import annotations

import dataclasses

from .names import matches_any
from .rpm_locks import ListLocks, LockFile, TomlLocks, ZyppLocks

# Part of the name of every file of this collection.
MARK = "kubegpu-"
# What the names of an archive's repositories begin with, on machines that may reach no other.
INSIDE = "airgap-"

APT_SOURCES = "/etc/apt/sources.list.d"
APT_KEYRINGS = "/etc/apt/keyrings"
APT_PREFERENCES = "/etc/apt/preferences.d"
APT_CONFIGURATION = "/etc/apt/apt.conf.d"

RPM_KEYS = "/etc/pki/rpm-gpg"
RPM_KEY_MARK = "KUBEGPU-"
# rpm keeps several versions of these beside each other.
INSTALL_ONLY = ("kernel", "kernel-*", "kernel[0-9]*", "gpg-pubkey", "installonlypkg*")


@dataclasses.dataclass(frozen=True)
class Manager:
    """The constants of a package manager: its paths and abilities."""

    name: str
    repositories: str
    locks: LockFile
    lock_path: str
    remove_command: str
    lock_plugin: str = ""
    lock_plugin_file: str = ""
    streams: bool = False


_DNF4 = Manager(
    name="dnf",
    repositories="/etc/yum.repos.d",
    locks=ListLocks(),
    lock_path="/etc/dnf/plugins/versionlock.list",
    remove_command="dnf remove",
    lock_plugin="python3-dnf-plugin-versionlock",
    lock_plugin_file="/etc/dnf/plugins/versionlock.conf",
    streams=True,
)
_DNF5 = Manager("dnf5", "/etc/yum.repos.d", TomlLocks(), "/etc/dnf/versionlock.toml", "dnf remove")
_ZYPPER = Manager("zypper", "/etc/zypp/repos.d", ZyppLocks(), "/etc/zypp/locks", "zypper remove")
MANAGERS = {manager.name: manager for manager in (_DNF4, _DNF5, _ZYPPER)}


def install_only(name: str) -> bool:
    """Return whether rpm keeps several versions of a package."""
    return matches_any(name, INSTALL_ONLY)
