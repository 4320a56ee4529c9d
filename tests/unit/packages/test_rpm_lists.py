# SPDX-License-Identifier: GPL-3.0-or-later
"""What anybody may have written into a repository's repomd.xml."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._mirrors import rpm_lists

REPOMD = (
    '<repomd xmlns="http://linux.duke.edu/metadata/repo"><data type="primary"><location href="&a;"/>'
    '<checksum type="sha256">00</checksum></data></repomd>'
)


@pytest.mark.parametrize("before", ["", f"<!--{'x' * 100_000}-->", "\n" * 100_000])
def test_entities_are_refused_wherever_they_are_declared(before):
    with pytest.raises(ShareError, match=r"repomd\.xml declares entities"):
        rpm_lists.data(f'{before}<!DOCTYPE r [<!ENTITY a "repodata/x">]>{REPOMD}', "the repository")
    [row] = rpm_lists.data(before.strip() + REPOMD.replace("&a;", "repodata/x"), "the repository")
    assert row.path == "repodata/x"
