# SPDX-License-Identifier: GPL-3.0-or-later
"""What the programs that make pictures and pages share: the SVG around a drawing, and writing or checking a file."""

from __future__ import annotations

import argparse
import typing as t
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def svg(size: tuple[int, int], style: str, arrow: str, lines: t.Iterable[str]) -> str:
    """Return a picture on white ground.

    :param size: width and height, in pixels.
    :param arrow: the colour of the arrowhead, which ``style`` names as ``url(#end)``.
    :param lines: the drawing, in SVG.
    """
    width, height = size
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    marker = (
        '<marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{arrow}"/></marker>'
    )
    ground = f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{style}</style>", f"<defs>{marker}</defs>", ground, *lines, "</svg>"]) + "\n"


def main(description: str | None, files: t.Mapping[str, t.Callable[[], str]]) -> int:
    """Write what is made, or with ``--check`` compare it with the files.

    :param files: what makes each file of ``docs``, as text.
    :returns: the exit status.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file isn't current")
    check = parser.parse_args().check
    stale = False
    for name, make in files.items():
        file, text = DOCS / name, make()
        if not check:
            file.write_text(text)
            continue
        current = file.exists() and file.read_text() == text
        stale |= not current
        print(f"docs/{name}: {'current' if current else 'not current; run `make docs`'}")
    return int(stale)
