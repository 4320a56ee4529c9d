# SPDX-License-Identifier: GPL-3.0-or-later
"""CDI specifications that a machine has: what is read of them, and what a hostile one costs."""

from __future__ import annotations

import time

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._kata import cdi
from kata_facts import specification

PATH = "/var/run/cdi/nvidia.com-pgpu.yaml"
SHORT = 1 << 15


def test_what_the_plugin_writes_is_read():
    spec = cdi.parse(PATH, specification("12", "31"))
    assert spec is not None and spec.of_plugin
    assert (spec.kind, spec.devices) == ("nvidia.com/pgpu", ("12", "31"))


# Of each, a unit that is repeated after the kind.
HOSTILE = {
    "blank lines of two blanks": "  \n",
    "blanks in one line": " ",
    "line ends": "\n",
    "names without a value": "  name:\n",
    "paths without a value": "    path: \n",
    "blanks and tabs": " \t\n",
    "quotes": "  name: '\n",
}


def cpu_time(text):
    """Return the least CPU time of some runs, in seconds."""

    def once():
        began = time.process_time()
        assert cdi.parse(PATH, text) is not None
        return time.process_time() - began

    return min(once() for _run in range(3))


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_the_cost_grows_as_the_length_does(unit):
    """With the square of the length, 32 times the length would take 1024 times as long."""
    few, many = (f"kind: nvidia.com/pgpu\n{unit * (length // len(unit))}" for length in (SHORT, cdi.LARGEST))
    assert len(many) > 30 * len(few) and cpu_time(many) < 200 * cpu_time(few) + 0.05


def test_no_more_is_read_than_a_file_of_the_plugin_can_have():
    late = specification("12") + "\n" * cdi.LARGEST + "  name: '99'\n"
    assert cdi.parse(PATH, late).devices == ("12",)
    assert cdi.parse("/etc/cdi/a.json", "[" * (cdi.LARGEST + 1)) is None
