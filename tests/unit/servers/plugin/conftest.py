# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes with a device plugin, stopped after the test."""

from __future__ import annotations

import typing as t

import pytest
from plugin_fakes import Node


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[t.Callable[..., Node]]:
    # A short folder: the path of a unix socket has 107 characters at most.
    root = tmp_path_factory.mktemp("k")
    made: list[Node] = []

    def build(*cards: t.Any, **options: t.Any) -> Node:
        made.append(Node(root, *cards, **options))
        return made[-1]

    yield build
    for one in made:
        one.down()


@pytest.fixture
def node(make: t.Callable[..., Node]) -> Node:
    """A node of two cards whose plugin is registered."""
    return make().up()
