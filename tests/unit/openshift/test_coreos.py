# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of CoreOS by /etc/os-release as OpenShift's and other releases have it."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import coreos as subject


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("rhcos", "Red Hat Enterprise Linux CoreOS 46.82.202010301241-0 (Ootpa)"),
        ("rhcos", "Red Hat Enterprise Linux CoreOS 416.94.202406172220-0"),
        ("rhel", "Red Hat Enterprise Linux CoreOS 9.6.20251013-1 (Plow)"),
        ("scos", "CentOS Stream CoreOS 9.0.20250510-0"),
        ("fedora", "Fedora CoreOS 38.20230609.3.0"),
    ],
)
def test_coreos_refused_with_host_and_name(identity, name):
    message = subject.refusal("worker-1", {"id": identity, "name": name})
    assert message.startswith(f"host worker-1 runs {name}, whose files belong to") and "machine_config" in message


@pytest.mark.parametrize(
    ("identity", "name"),
    [("rhel", "Red Hat Enterprise Linux 9.4 (Plow)"), ("debian", "Debian GNU/Linux 12 (bookworm)"), ("", "")],
)
def test_other_systems_accepted(identity, name):
    assert subject.refusal("worker-1", {"id": identity, "name": name}) == ""
