# SPDX-License-Identifier: GPL-3.0-or-later
"""Every configuration of Docker and CRI-O of the corpus, and the page that shows all of the corpus."""

from __future__ import annotations

import re

import corpus_containerd
import corpus_others as corpus
import pytest
import real_dockerd
import runtimes_page


@pytest.mark.parametrize("name", [row.name for row in corpus.rows("docker")])
def test_docker_is_right(name: str) -> None:
    if not real_dockerd.binaries():
        pytest.skip("no dockerd that can check a file on this machine")
    check(corpus.results("docker")[name])


@pytest.mark.parametrize("name", [row.name for row in corpus.rows("crio")])
def test_crio_is_right(name: str) -> None:
    check(corpus.results("crio")[name])


def check(cell: corpus.Cell) -> None:
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
