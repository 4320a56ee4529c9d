# SPDX-License-Identifier: GPL-3.0-or-later
"""Every configuration of the corpus, on every real containerd that it is for."""

from __future__ import annotations

import re

import corpus_containerd as corpus
import pytest
import real_containerd

CELLS = [(row.name, release) for row in corpus.rows() for release in row.releases]


@pytest.mark.parametrize(("name", "release"), CELLS)
def test_ours_is_right(name: str, release: str) -> None:
    real_containerd.of(release)
    cell = corpus.results()[name, release]
    words = cell.row.refused.get(release, "")
    assert bool(cell.ours.refused) == bool(words), cell.ours.refused or corpus.explain(cell)
    assert re.search(words, cell.ours.refused)
    assert cell.ours.wrong == [], corpus.explain(cell)


def test_the_corpus_is_what_it_says() -> None:
    assert len(corpus.rows()) >= 60
    for row in corpus.rows():
        assert set(row.releases) <= set(real_containerd.RELEASES) and set(row.refused) <= set(row.releases), row.name
