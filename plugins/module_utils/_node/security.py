# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe Secure Boot, the key that signs kernel modules, SELinux and AppArmor."""

from __future__ import annotations

import re

from .._host.cached_reader import names, text, whole
from .._host.system import System
from .._host.types import MachineOwnerKey, Security

EFI = "/sys/firmware/efi/efivars"
SECURE_BOOT = f"{EFI}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# shim's variable with the keys that the MOK manager asks about at the next boot.
REQUESTED = f"{EFI}/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23"
DKMS = "/etc/dkms/framework.conf"
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"


def secure_boot(system: System) -> bool | None:
    """Return whether firmware checks signatures; None without UEFI."""
    variable = whole(system, SECURE_BOOT)
    return variable[-1] == "\x01" if variable else None


def security(system: System) -> Security:
    """Return SELinux's mode, empty without SELinux, and whether AppArmor is on."""
    enforcing = text(system, "/sys/fs/selinux/enforce")
    mode = {"1": "enforcing", "0": "permissive"}.get(enforcing, "")
    if not mode and system.exists("/etc/selinux/config"):
        mode = "disabled"
    return {"selinux": mode, "apparmor": text(system, "/sys/module/apparmor/parameters/enabled") == "Y"}


def mok(system: System, distribution: str, checked: bool | None) -> MachineOwnerKey:
    """Return the key that modules built on this machine are signed with, and whether firmware trusts it.

    :param distribution: its id.
    :param checked: whether firmware checks signatures; where it doesn't, the key's state doesn't matter.
    """
    key = signing_key(system, distribution)
    found: MachineOwnerKey = {"key": key, "enrolled": None, "pending": None}
    if not key or not checked:
        return found
    done = system.run(["mokutil", "--test-key", key], timeout=10)
    output = done.out + done.err
    if "is already enrolled" in output or "is already in db" in output:
        return {**found, "enrolled": True, "pending": False}
    if "is already in the enrollment request" in output:
        return {**found, "enrolled": False, "pending": True}
    if "is not enrolled" in output:
        # Some releases of mokutil don't report requests.
        return {**found, "enrolled": False, "pending": bool(whole(system, REQUESTED))}
    return found


def signing_key(system: System, distribution: str) -> str:
    """Return the certificate's path; empty where there is none yet."""
    configured = [configured_key(text(system, path)) for path in [*reversed(_drop_ins(system)), DKMS]]
    usual = [SHIM_KEY, DKMS_KEY] if distribution == "ubuntu" else [DKMS_KEY, SHIM_KEY]
    return next(
        (path for path in [*configured, *usual, AKMODS_KEY] if path.startswith("/") and system.exists(path)), ""
    )


def _drop_ins(system: System) -> list[str]:
    return [f"{DKMS}.d/{name}" for name in names(system, f"{DKMS}.d") if name.endswith(".conf")]


def configured_key(content: str) -> str:
    """Return the certificate in a configuration of dkms; empty without one."""
    found = re.findall(r"^\s*mok_certificate=[\"']?([^\"'\s]+)", content, re.MULTILINE)
    return str(found[-1]) if found else ""
