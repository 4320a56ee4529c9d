# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's command line: what it comes to, and changes of it."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._boot import words
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("argument", "line", "effective", "conflict"),
    [
        ("intel_iommu=on", "ro quiet", False, ""),
        ("intel_iommu=on", "ro intel_iommu=on", True, ""),
        ("intel_iommu=on", 'ro "intel_iommu=on"', True, ""),
        ("intel_iommu=on", "ro intel_iommu=on,sm_on", True, ""),
        ("intel_iommu=on", "ro intel_iommu=igfx_off", False, ""),
        ("intel_iommu=on", "intel_iommu=off", False, "intel_iommu=off"),
        ("intel_iommu=on", "intel_iommu=on intel_iommu=off", False, "intel_iommu=off"),
        ("intel_iommu=on", "intel_iommu=off intel_iommu=on", True, ""),
        ("intel_iommu=on", "iommu=off intel_iommu=on", False, "iommu=off"),
        ("intel_iommu=on", "iommu=pt", False, ""),
        ("intel_iommu=on", "xintel_iommu=on", False, ""),
        ("intel-iommu=on", "intel_iommu=on", True, ""),
        # What follows -- is init's, and isn't among the kernel's words.
        ("intel_iommu=on", "ro -- intel_iommu=on", False, ""),
        ("iommu=pt", "iommu=nopt", False, "iommu=nopt"),
        ("iommu=pt", "iommu.passthrough=0", False, "iommu.passthrough=0"),
        ("iommu=pt", "iommu=force,pt", True, ""),
        ("default_hugepagesz=1G", "default_hugepagesz=2M", False, "default_hugepagesz=2M"),
        ("default_hugepagesz=1G", "default_hugepagesz=2M default_hugepagesz=1G", True, "default_hugepagesz=2M"),
        ("console=ttyS0", "console=tty0", False, ""),
        ("console=ttyS0", "console=ttyS0 console=tty0", True, ""),
        ("nosmt", "nosmt=force", False, "nosmt=force"),
        ("vfio-pci.ids=10de:2236", "vfio_pci.ids=10de:2236", True, ""),
    ],
)
def test_effect_and_conflict(argument: str, line: str, effective: bool, conflict: str) -> None:
    found = words.of_kernel(words.split(line))
    assert (words.effective(argument, found), words.conflict(argument, found)) == (effective, conflict)


@pytest.mark.parametrize(
    ("line", "table", "off"),
    [
        ("ro quiet iommu=pt intel_iommu=on", "DMAR", ""),
        ("intel_iommu=off", "DMAR", "intel_iommu=off"),
        ("intel_iommu=off", "IVRS", ""),
        ("intel_iommu=off intel_iommu=on", "DMAR", ""),
        ("amd_iommu=off", "IVRS", "amd_iommu=off"),
        ("amd_iommu=off", "DMAR", ""),
        ("iommu=off", "DMAR", "iommu=off"),
        ("iommu=off", "", "iommu=off"),
        ("amd_iommu=fullflush", "IVRS", ""),
    ],
)
def test_what_turns_the_iommu_off(line: str, table: str, off: str) -> None:
    assert words.switched_off(words.split(line), table) == off


def test_words_are_split_as_by_the_kernel() -> None:
    line = 'ro dyndbg="file x.c +p" "foo=a b"\tquiet  ds=nocloud;s=/x -- single'
    split = ["ro", 'dyndbg="file x.c +p"', '"foo=a b"', "quiet", "ds=nocloud;s=/x", "--", "single"]
    assert words.split(line) == split
    assert words.value_of('"foo=a b"') == words.value_of('foo="a b"') == "a b"


@pytest.mark.parametrize(
    ("line", "added"),
    [
        ("ro quiet", "ro quiet iommu=pt"),
        ("ro quiet \n", "ro quiet iommu=pt \n"),
        ("", "iommu=pt"),
        ("ro -- single", "ro iommu=pt -- single"),
        ('ro "a -- b"', 'ro "a -- b" iommu=pt'),
    ],
)
def test_arguments_are_added_where_the_kernel_sees_them(line: str, added: str) -> None:
    assert words.add(line, ["iommu=pt"]) == added
    assert words.remove(added, ["iommu=pt"]).strip() == line.strip()


WORDS = st.lists(
    st.sampled_from(["ro", "quiet", "root=UUID=2f5a", "console=ttyS0", '"a b"', 'x="1 2"', "$tuned_params", "iommu=on"])
)
BLANKS = st.sampled_from([" ", "  ", "\t"])


@given(WORDS, BLANKS, st.sampled_from(["", " ", "\n", " -- single"]))
def test_what_is_added_is_removed_and_nothing_else(before: list[str], blank: str, end: str) -> None:
    line = blank.join(before) + end
    added = words.add(line, ["intel_iommu=on", "iommu=pt"])
    assert words.of_kernel(words.split(added)) == [*before, "intel_iommu=on", "iommu=pt"]
    assert words.split(words.remove(added, ["intel_iommu=on", "iommu=pt"])) == words.split(line)
    assert words.remove(line, ["intel_iommu=on"]) == line
