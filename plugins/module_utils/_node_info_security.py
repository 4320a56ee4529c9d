# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a machine lets run: firmware's and the kernel's checks of modules, SELinux, AppArmor. Sections as plain JSON."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._node_info_files import names, text, whole
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

EFI = "/sys/firmware/efi/efivars"
SECURE_BOOT = f"{EFI}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# shim's variable of keys that the next boot's MOK manager asks about.
REQUESTED = f"{EFI}/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23"
DKMS = "/etc/dkms/framework.conf"
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"


def secure_boot(system: System) -> bool | None:
    """Whether firmware checks signatures; None on a machine without UEFI."""
    variable = whole(system, SECURE_BOOT)
    return variable[-1] == "\x01" if variable else None


def security(system: System) -> Json:
    """SELinux's mode, empty where there is none, and whether AppArmor is on."""
    enforcing = text(system, "/sys/fs/selinux/enforce")
    mode = {"1": "enforcing", "0": "permissive"}.get(enforcing, "")
    if not mode and system.exists("/etc/selinux/config"):
        mode = "disabled"
    return {"selinux": mode, "apparmor": text(system, "/sys/module/apparmor/parameters/enabled") == "Y"}


def mok(system: System, distribution: str, checked: bool | None) -> Json:
    """The key that modules built on this machine are signed with, and whether firmware trusts it.

    :param distribution: its id.
    :param checked: whether firmware checks signatures; where it doesn't, nobody is asked about the key.
    """
    key = signing_key(system, distribution)
    seen: Json = {"key": key, "enrolled": None, "pending": None}
    if not key or not checked:
        return seen
    done = system.run(["mokutil", "--test-key", key], timeout=10)
    words = done.out + done.err
    if "is already enrolled" in words or "is already in db" in words:
        return {**seen, "enrolled": True, "pending": False}
    if "is already in the enrollment request" in words:
        return {**seen, "enrolled": False, "pending": True}
    if "is not enrolled" in words:
        # mokutil doesn't look at requests in all of its releases.
        return {**seen, "enrolled": False, "pending": bool(whole(system, REQUESTED))}
    return seen


def signing_key(system: System, distribution: str) -> str:
    """The certificate; empty where there is none yet."""
    told = [told_key(text(system, path)) for path in [*reversed(_drop_ins(system)), DKMS]]
    usual = [SHIM_KEY, DKMS_KEY] if distribution == "ubuntu" else [DKMS_KEY, SHIM_KEY]
    return next((path for path in [*told, *usual, AKMODS_KEY] if path.startswith("/") and system.exists(path)), "")


def _drop_ins(system: System) -> list[str]:
    return [f"{DKMS}.d/{name}" for name in names(system, f"{DKMS}.d") if name.endswith(".conf")]


def told_key(content: str) -> str:
    """The certificate that a configuration of dkms names."""
    found = re.findall(r"^\s*mok_certificate=[\"']?([^\"'\s]+)", content, re.MULTILINE)
    return str(found[-1]) if found else ""
