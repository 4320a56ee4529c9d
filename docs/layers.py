# SPDX-License-Identifier: GPL-3.0-or-later
# ruff: noqa: E402
"""Draw the layers of ``plugins`` from the imports, as ``docs/layers.svg``, or check that the picture is current."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import drawing

from tests import layers

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 118, 44, 22, 64, 24
TITLES = {
    "module_utils": "plugins/module_utils (nodes and controller)",
    "plugin_utils": "plugins/plugin_utils (controller)",
}

Edges = dict[str, set[str]]


def package_edges(folder: str) -> Edges:
    """Return which package of a folder imports which other one of it."""
    edges: Edges = {package: set() for level in layers.LEVELS[folder] for package in level}
    for name, imports in layers.graph().items():
        for other in imports:
            if name.startswith(f"{folder}/") and other.startswith(f"{folder}/"):
                source, target = name.split("/")[1], other.split("/")[1]
                if source != target:
                    edges[source].add(target)
    return edges


def without_shortcuts(edges: Edges) -> Edges:
    """Return the edges that no longer path implies; the others would only cover the picture."""
    kept: Edges = {}
    for package, targets in edges.items():
        implied = {one for target in targets for one in layers.reached(target, edges)}
        kept[package] = targets - implied
    return kept


def size(folder: str, package: str) -> str:
    """Return how many files a package has; lines would make each change of code a change of the picture."""
    return f"{sum(path.is_relative_to(layers.PLUGINS / folder / package) for path in layers.sources())} files"


def panel(folder: str, left: int) -> tuple[list[str], int, int]:
    """Draw one folder's packages, the highest level on top.

    :param left: where the panel begins, in pixels.
    :returns: lines of SVG, and the panel's width and height in pixels.
    """
    levels = layers.LEVELS[folder]
    width = max(len(level) for level in levels) * (BOX_WIDTH + GAP_X) - GAP_X
    places: dict[str, tuple[int, int]] = {}
    top = MARGIN + 30
    for row, level in enumerate(reversed(levels)):
        begin = left + 40 + (width - len(level) * (BOX_WIDTH + GAP_X) + GAP_X) // 2
        for column, package in enumerate(level):
            places[package] = (begin + column * (BOX_WIDTH + GAP_X), top + row * (BOX_HEIGHT + GAP_Y))
    lines = [f'<text x="{left + 40}" y="{MARGIN + 8}" class="title">{escape(TITLES[folder])}</text>']
    for row in range(len(levels)):
        y = top + row * (BOX_HEIGHT + GAP_Y) + BOX_HEIGHT // 2
        lines.append(f'<text x="{left + 6}" y="{y}" class="level">{len(levels) - 1 - row}</text>')
    for package, targets in sorted(without_shortcuts(package_edges(folder)).items()):
        x, y = places[package]
        for target in sorted(targets):
            to_x, to_y = places[target]
            lines.append(
                f'<line x1="{x + BOX_WIDTH // 2}" y1="{y + BOX_HEIGHT}" x2="{to_x + BOX_WIDTH // 2}" y2="{to_y - 3}"/>'
            )
    for package, (x, y) in places.items():
        middle = x + BOX_WIDTH // 2
        lines += [
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>',
            f'<text x="{middle}" y="{y + 19}" class="name">{escape(package)}</text>',
            f'<text x="{middle}" y="{y + 35}" class="size">{escape(size(folder, package))}</text>',
        ]
    return lines, width + 60, top + len(levels) * (BOX_HEIGHT + GAP_Y) - GAP_Y + MARGIN


def drawn() -> str:
    """Return the picture as SVG."""
    lines, width, height = [], MARGIN, 0
    for folder in layers.LEVELS:
        made, panel_width, panel_height = panel(folder, width)
        lines += made
        width += panel_width + 2 * MARGIN
        height = max(height, panel_height)
    style = (
        "text{font-family:sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}.level{font-size:12px;fill:#888}"
        ".name{font-size:13px;text-anchor:middle}.size{font-size:9px;text-anchor:middle;fill:#666}"
        "rect{fill:#eef3fa;stroke:#5b7db1}line{stroke:#9aa7b8;marker-end:url(#end)}"
    )
    return drawing.svg((width, height), style, "#9aa7b8", lines)


if __name__ == "__main__":
    sys.exit(drawing.main(__doc__, {"layers.svg": drawn}))
