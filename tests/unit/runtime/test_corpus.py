# SPDX-License-Identifier: GPL-3.0-or-later
"""Apply the corpus of configurations, validate each result by the real containerd and dockerd, and compare the page.

One file, because each process that needs the results computes them again.
"""

from __future__ import annotations

import re
from pathlib import Path

import corpus_containerd
import corpus_others
import pytest
import real_containerd
import real_dockerd
import runtimes_page
from runtime_kit import ABSENT


def names(cells: tuple[tuple[corpus_containerd.Row, str], ...]) -> list[tuple[str, str]]:
    return [(row.name, release) for row, release in cells]


@pytest.mark.parametrize(("name", "release"), names(corpus_containerd.sample(real_containerd.USUAL)))
def test_containerd(name: str, release: str) -> None:
    """Each configuration on one of the usual releases, and on both where they refuse it."""
    check_containerd(name, release, real_containerd.USUAL, whole=False)


@pytest.mark.long
@pytest.mark.parametrize(("name", "release"), names(corpus_containerd.product(real_containerd.RELEASES)))
def test_every_release_of_containerd(name: str, release: str) -> None:
    """Four more releases are downloaded or built."""
    check_containerd(name, release, real_containerd.RELEASES)


def check_containerd(name: str, release: str, releases: tuple[str, ...], whole: bool = True) -> None:
    real_containerd.of(release)
    cell = corpus_containerd.results(releases, whole=whole)[name, release]
    words = cell.row.refused.get(release, "")
    assert bool(cell.ours.refused) == bool(words), cell.ours.refused or corpus_containerd.explain(cell)
    assert re.search(words, cell.ours.refused)
    assert cell.ours.wrong == [], corpus_containerd.explain(cell)


@pytest.mark.parametrize("release", real_containerd.USUAL)
def test_a_removal_keeps_the_kubelets_cri(release: str, tmp_path: Path) -> None:
    real_containerd.of(release)
    row = next(one for one in corpus_containerd.rows() if one.name == "docker-ce-stock-enable")
    node = corpus_containerd.Node(row, release, tmp_path / "node")
    corpus_containerd.drive(node, row.options())
    planned = corpus_containerd.drive(node, ABSENT, serves_kubelet=True)
    assert len(planned.warnings) == 1 and "disabled_plugins = []\n" in node.texts()[corpus_containerd.MAIN].decode()
    assert corpus_containerd.drive(node, ABSENT, serves_kubelet=True).plan.empty


def test_the_corpus_is_valid() -> None:
    assert len(corpus_containerd.rows()) >= 60
    for row in corpus_containerd.rows():
        assert set(row.releases) <= set(real_containerd.RELEASES) and set(row.refused) <= set(row.releases), row.name


@pytest.mark.parametrize("name", [row.name for row in corpus_others.rows("docker")])
def test_docker(name: str) -> None:
    if not real_dockerd.binaries():
        pytest.skip("no dockerd with --validate on this machine")
    check(corpus_others.results("docker")[name])


@pytest.mark.parametrize("name", [row.name for row in corpus_others.rows("crio")])
def test_crio(name: str) -> None:
    check(corpus_others.results("crio")[name])


def check(cell: corpus_others.Cell) -> None:
    assert bool(cell.ours.refused) == bool(cell.row.refused), cell.ours.refused or cell.ours.files
    assert re.search(cell.row.refused, cell.ours.refused)
    assert cell.ours.wrong == [], cell.ours.files


@pytest.mark.long
def test_the_page_is_current() -> None:
    """Regenerate it by ``python tests/unit/runtime/runtimes_page.py``; it needs every release and nvidia-ctk."""
    if reason := runtimes_page.missing():
        pytest.skip(reason)
    assert runtimes_page.PAGE.read_text() == runtimes_page.page()


@pytest.mark.long
def test_faults_of_nvidia_ctk_are_detected() -> None:
    if not corpus_containerd.nvidia_ctk():
        pytest.skip("no nvidia-ctk on this machine")
    found = {
        word
        for cell in corpus_containerd.results(real_containerd.RELEASES, compare=True).values()
        if cell.theirs
        for word in cell.theirs.wrong
    }
    words = ("doesn't start", "comments lost", "without SystemdCgroup", "other settings changed", "stays disabled")
    assert [word for word in words if not any(word in wrong for wrong in found)] == []
