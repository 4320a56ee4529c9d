# SPDX-License-Identifier: GPL-3.0-or-later
"""Which runtime pods lose when NVIDIA's becomes the default."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.common import replaced


@pytest.mark.parametrize(
    ("name", "runtime_type", "program", "lost"),
    [
        ("runc", "io.containerd.runc.v2", "", ""),
        ("runc", "io.containerd.runtime.v1.linux", "", ""),
        ("mine", "io.containerd.runc.v2", "/opt/bin/runc-wrapper", ""),
        ("nvidia", "io.containerd.runc.v2", "/usr/bin/nvidia-container-runtime", ""),
        ("nvidia-cdi", "", "/usr/bin/nvidia-container-runtime.cdi", ""),
        ("kata", "io.containerd.kata.v2", "", "Kata"),
        ("katacc", "io.containerd.kata-cc.v2", "", "Kata"),
        ("runc", "io.containerd.kata.v2", "", "Kata"),
        ("safe", "io.containerd.runsc.v1", "", "gVisor"),
        ("safe", "io.containerd.runc.v2", "/usr/local/bin/runsc", "gVisor"),
        ("safe", "io.containerd.runc.v2", "/usr/bin/sysbox-runc", "Sysbox"),
        ("vm", "io.containerd.runc.v2", "/usr/bin/krun", "krun"),
        ("wasm", "io.containerd.spin.v2", "", "io.containerd.spin.v2"),
        # The name alone would say that nothing is lost.
        ("runc", "io.containerd.spin.v2", "", "io.containerd.spin.v2"),
        ("runc", "aws.firecracker", "", "Firecracker"),
        # CRI-O's and Docker's.
        ("kata", "vm", "/usr/bin/containerd-shim-kata-v2", "Kata"),
        ("crun", "oci", "", "crun"),
        ("crun", "oci", "/usr/bin/crun", "crun"),
        ("runc", "oci", "/usr/libexec/crio/runc", ""),
        ("runc", "", "", ""),
        ("io.containerd.runc.v2", "", "", ""),
        ("io.containerd.kata.v2", "", "", "Kata"),
        ("krun", "", "/usr/bin/krun", "krun"),
    ],
)
def test_the_runtime_that_is_replaced(name: str, runtime_type: str, program: str, lost: str) -> None:
    assert replaced(name, runtime_type, program) == lost
