# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/gpushare.md lists every option of extender and device plugin, with its default, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from gpushare.extender.command import parse as parse_extender
from gpushare.plugin.command import parse as parse_plugin

PAGE = (Path(__file__).parents[3] / "docs" / "gpushare.md").read_text()
SECTION = PAGE.split("\n## Command lines\n")[1].split("\nHTTP of the extender")[0]
# What the parsers add to the options.
MADE = {"tls", "metrics", "exclude"}


def rows(command: str) -> list[tuple[list[str], str]]:
    """Return the options and the default of each row of a command's table; in brackets are the roles' defaults."""
    table = SECTION.split(f"| {command} | default | |\n|---|---|---|\n")[1].split("\n\n")[0]
    cells = [row.strip("|").split(" | ") for row in table.splitlines()]
    return [(re.findall(r"`--([a-z-]+)`", cell[0]), re.sub(r"\(.*?\)", "", cell[1]).strip()) for cell in cells]


@pytest.mark.parametrize("command", ["extender", "device plugin"])
def test_every_option_is_listed_with_its_default(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    parsed: argparse.Namespace = parse_extender([]) if command == "extender" else parse_plugin(["--node-name", "n"])
    listed = [name for names, _default in rows(command) for name in names]
    assert sorted(listed) == sorted(name.replace("_", "-") for name in vars(parsed).keys() - MADE)
    for names, default in rows(command):
        said = default.split(", ")
        # What isn't a value is told in words, such as none.
        values = {name: one for name, one in zip(names, said, strict=False) if one.startswith("`")}
        assert not values or len(said) == len(names)
        for name, value in values.items():
            assert value == f"`{getattr(parsed, name.replace('-', '_'))}".removesuffix(".0") + "`", name
