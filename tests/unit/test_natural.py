# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of names and versions that contain numbers."""

from __future__ import annotations

import random

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.natural import natural


@pytest.mark.parametrize(
    "ordered",
    [
        ["gpu", "gpu1", "gpu2", "gpu2-a", "gpu10", "node"],
        ["6.1.0-9-amd64", "6.1.0-10-amd64", "6.8.0-9-generic", "6.8.0-99-generic", "6.8.0-100-generic", "6.11.0-1"],
        ["5.14.0-70.13.1.el9_0.x86_64", "5.14.0-503.40.1.el9_5.x86_64", "5.14.0-570.12.1.el9_6.x86_64"],
        ["", "0", "00a", "1", "٣"],
        ["570.9", "570.133.20", "580.95.05", "580.105.08"],
    ],
)
def test_numbers_count_as_numbers(ordered: list[str]) -> None:
    mixed = ordered[:]
    random.Random(7).shuffle(mixed)
    assert sorted(mixed, key=natural) == ordered
    assert sorted("9" * 5000, key=natural) and natural("9" * 5000)
