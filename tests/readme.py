# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands of README.md, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).resolve().parents[1] / "README.md"


class Block(NamedTuple):
    """The commands of one code block, without their comments.

    :param heading: that of its section.
    """

    heading: str
    commands: tuple[str, ...]


def blocks() -> list[Block]:
    """Return the blocks of commands; a block of another kind (a table, YAML) begins with no command."""
    found, heading = [], ""
    parts = re.split(r"^(## .*|```.*\n(?:.*\n)*?```)$", README.read_text(), flags=re.MULTILINE)
    for part in parts:
        if part.startswith("## "):
            heading = part.removeprefix("## ")
        elif re.match(r"```\n(?:make|python3|pip|ansible-\w+) ", part):
            lines = part.splitlines()[1:-1]
            found.append(Block(heading, tuple(re.sub(r"\s+#.*", "", line).strip() for line in lines if line.strip())))
    return found


def on_a_cluster() -> list[Block]:
    """Return the blocks with which a reader sets up a cluster of his own: install, from Git, init, site, others."""
    return [block for block in blocks() if block.heading == "Use it on your cluster"]
