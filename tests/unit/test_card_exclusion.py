# SPDX-License-Identifier: GPL-3.0-or-later
"""Which card an entry of gpu_exclude names, and how the servers get the entries."""

from __future__ import annotations

import time

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import card_exclusion as exclusion
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import card_exclusions

UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    "entry", ["0000:3b:00.0", "3B:00.0", "00000000:3B:00.0", UUID.upper(), "NVIDIA T400*", "t400 4gb"]
)
def test_entries_that_name_a_card(entry: str) -> None:
    found = exclusion.parse([entry])
    assert found.of("00000000:3B:00.0", UUID, "NVIDIA T400 4GB")
    assert not found.of("0000:3c:00.0", UUID.replace("a", "b"), "NVIDIA L4")


def test_a_name_with_brackets_is_named_as_it_is() -> None:
    found = exclusion.parse(["NVIDIA [Quadro] T400*", "[z-a]x"])
    assert found.of("0000:3b:00.0", UUID, "NVIDIA [Quadro] T400 4GB") and found.of("0000:3b:00.0", UUID, "[z-a]x")
    assert not any(found.of("0000:3b:00.0", UUID, name) for name in ("NVIDIA Q T400", "NVIDIA [Q] T400", "zx"))


def test_cards_of_other_domains_are_others() -> None:
    """A bridge for virtual machines or NVMe has a domain of its own above 0xffff."""
    found = exclusion.parse(["00010000:3B:00.0"])
    assert found.addresses == ("10000:3b:00.0",) == exclusion.parse(["10000:3b:00"]).addresses
    assert found.of("10000:3b:00.0") and found.of("00010000:3b:00.0") and not found.of("0000:3b:00.0")


def test_any_pattern_is_compared_at_once() -> None:
    found = exclusion.parse([f"{'*a' * 100}b{number}" for number in range(exclusion.MOST_ENTRIES)])
    begun = time.process_time()
    assert not any(found.of("0000:3b:00.0", UUID, "a" * length) for length in (96, 1000))
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("entry", ["1", "", "*", "GPU-123", "3b:0", "MIG-aaaaaaaa", "a{b}", None, 3])
def test_unusable_entries_are_refused(entry: object) -> None:
    with pytest.raises(BadInput, match="gpu_exclude: "):
        exclusion.parse([entry])


def test_each_node_reads_its_own_entries() -> None:
    # A survey of AWX has text.
    hostvars = {"a": {"gpu_exclude": ["3b:00.0"]}, "b": {"gpu_exclude": "0000:3b:00.0, 3b:00.0"}, "c": {}}
    values = card_exclusions(hostvars, ["a", "b", "c"])
    assert len(values) == 1
    assert exclusion.of_node("a", values).entries == exclusion.of_node("b", values).entries == ("0000:3b:00.0",)
    assert exclusion.of_node("c", values).entries == ()
    with pytest.raises(BadInput):
        exclusion.of_node("a", ["{}"])


def test_nodes_that_are_no_hosts_have_the_entries_of_the_play() -> None:
    hostvars = {"gpu1": {"gpu_node_name": "node1", "gpu_exclude": [UUID]}}
    values = card_exclusions(hostvars, ["gpu1"], ["node1", "node2"], "NVIDIA T400*")
    assert exclusion.of_node("node1", values).entries == (UUID.lower(),)
    assert exclusion.of_node("node2", values).entries == ("nvidia t400*",)


def test_an_argument_stays_below_the_kernels_limit() -> None:
    names = [f"{number:03d}." + "a" * 249 for number in range(2 * exclusion.MOST_NODES)]
    made = exclusion.options(dict.fromkeys(names, exclusion.parse([UUID] * exclusion.MOST_ENTRIES)))
    assert len(made) == 2 and max(len(one) for one in made) < 128 * 1024
    assert exclusion.of_node(names[-1], made).entries == (UUID.lower(),)
