# SPDX-License-Identifier: GPL-3.0-or-later
"""Names as users write them."""

from __future__ import annotations

import pytest
from role_templates import evaluated


@pytest.mark.parametrize(
    ("given", "words"),
    [("gpu1, gpu2,", ["gpu1", "gpu2"]), ("gpu1", ["gpu1"]), (["gpu1", " 7 "], ["gpu1", "7"]), ([7], ["7"]), ("", [])],
)
def test_a_list_may_be_text(given, words):
    assert evaluated("{{ given | kubegpu.share.listed }}", given=given) == words


def test_a_node_has_the_hosts_name_or_the_one_that_it_was_given():
    hostvars = {"a": {"gpu_node_name": "node-a"}, "b": {}, "c": {"gpu_node_name": ""}}
    given = {"hosts": ["a", "b", "c", "d"], "hostvars": hostvars}
    assert evaluated("{{ hosts | kubegpu.share.node_names(hostvars) }}", **given) == ["node-a", "b", "c", "d"]
