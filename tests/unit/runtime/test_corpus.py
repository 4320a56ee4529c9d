# SPDX-License-Identifier: GPL-3.0-or-later
"""Every configuration of the corpus, judged by every real containerd and dockerd that it is for, and the page of it.

One file, because the page needs all the results, and each process that asks for them works them out anew.
"""

from __future__ import annotations

import re

import corpus_containerd
import corpus_others
import pytest
import real_containerd
import real_dockerd
import runtimes_page

CELLS = [(row.name, release) for row in corpus_containerd.rows() for release in row.releases]


@pytest.mark.parametrize(("name", "release"), CELLS)
def test_ours_is_right(name: str, release: str) -> None:
    real_containerd.of(release)
    cell = corpus_containerd.results()[name, release]
    words = cell.row.refused.get(release, "")
    assert bool(cell.ours.refused) == bool(words), cell.ours.refused or corpus_containerd.explain(cell)
    assert re.search(words, cell.ours.refused)
    assert cell.ours.wrong == [], corpus_containerd.explain(cell)


def test_the_corpus_is_what_it_says() -> None:
    assert len(corpus_containerd.rows()) >= 60
    for row in corpus_containerd.rows():
        assert set(row.releases) <= set(real_containerd.RELEASES) and set(row.refused) <= set(row.releases), row.name


@pytest.mark.parametrize("name", [row.name for row in corpus_others.rows("docker")])
def test_docker_is_right(name: str) -> None:
    if not real_dockerd.binaries():
        pytest.skip("no dockerd that can check a file on this machine")
    check(corpus_others.results("docker")[name])


@pytest.mark.parametrize("name", [row.name for row in corpus_others.rows("crio")])
def test_crio_is_right(name: str) -> None:
    check(corpus_others.results("crio")[name])


def check(cell: corpus_others.Cell) -> None:
    assert bool(cell.ours.refused) == bool(cell.row.refused), cell.ours.refused or cell.ours.files
    assert re.search(cell.row.refused, cell.ours.refused)
    assert cell.ours.wrong == [], cell.ours.files


def test_the_page_is_current() -> None:
    """Made again by ``python tests/unit/runtime/runtimes_page.py``."""
    if reason := runtimes_page.missing():
        pytest.skip(reason)
    assert runtimes_page.PAGE.read_text() == runtimes_page.page()


def test_the_judge_can_find_fault() -> None:
    if not corpus_containerd.nvidia_ctk():
        pytest.skip("no nvidia-ctk on this machine")
    found = {word for cell in corpus_containerd.results().values() if cell.theirs for word in cell.theirs.wrong}
    for words in (
        "doesn't start",
        "comments lost",
        "without SystemdCgroup",
        "other settings changed",
        "stays switched off",
    ):
        assert any(words in one for one in found), words
