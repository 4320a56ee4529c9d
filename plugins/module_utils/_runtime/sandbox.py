# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a user's default runtime is, which NVIDIA's runtime (a copy of runc) would replace. Pure."""

from __future__ import annotations

import posixpath
import re

from .containerd import RUNTIME_NAME

CRUN = "crun"
# Those that isolate pods by more than the kernel's namespaces.
SANDBOXES = ("Kata", "gVisor", "Sysbox", "Firecracker", "krun")
# By a word of the runtime's type or of its program's name.
_KNOWN = (
    (re.compile(r"kata|^cc-runtime"), "Kata"),
    (re.compile(r"runsc|gvisor"), "gVisor"),
    (re.compile(r"sysbox"), "Sysbox"),
    (re.compile(r"firecracker"), "Firecracker"),
    (re.compile(r"^crun\b"), CRUN),
    (re.compile(r"^krun\b"), "krun"),
    (re.compile(r"^youki\b"), "youki"),
)
# Types of runc's shims, which run any program with runc's command line.
_RUNC_SHIM = re.compile(r"^io\.containerd\.(runc\.v[0-9]+|runtime\.v1\.linux)$")
_RUNC = re.compile(r"^(docker-)?runc\b|^nvidia-container-runtime")


def replaced(name: str, runtime_type: str, program: str) -> str:
    """Return the runtime that pods without a runtime class lose when NVIDIA's runtime becomes the default.

    :param name: the default runtime's name in the configuration.
    :param runtime_type: its type in containerd, Docker or CRI-O; empty for none.
    :param program: the program that it runs; empty for the built-in one.
    :returns: what it is, like "Kata", "gVisor" or "crun", its type, or its own name; empty for runc and for
        NVIDIA's runtime.
    """
    # Docker takes a type as a name.
    kind = runtime_type or (name if name.startswith("io.containerd.") else "")
    binary = posixpath.basename(program)
    runc_shim = _RUNC_SHIM.match(kind) is not None
    # A shim of another type has a program of its own; without a type the name is the program's.
    words = [binary] if runc_shim else [binary or name] if kind in ("", "oci") else [kind, binary]
    for word in words:
        for pattern, title in _KNOWN:
            if pattern.search(word):
                return title
    if runc_shim or name in ("", RUNTIME_NAME) or (len(words) == 1 and _RUNC.search(words[0])):
        return ""
    # A shim of another kind is what is lost, whatever its runtime is called.
    return kind if kind not in ("", "oci") and not runc_shim else name
