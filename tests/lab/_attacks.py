# SPDX-License-Identifier: GPL-3.0-or-later
"""Ways in which a pod can try to get more of a card than its share, and the expected outcomes. Pure data.

test_42_attacks.py runs them on the lab; a unit test compares the table of docs/gpushare.md.
"""

from __future__ import annotations

import dataclasses
import enum


class Outcome(enum.Enum):
    """The outcome, as the first words of the table's cell."""

    # The container runs, and has its own cards only; none where it asks for no share.
    FAILS = "**fails**"
    # It has a card that it wasn't given.
    TAKES = "sees them"
    # It has every card of the node.
    ALL = "sees all cards"
    # It isn't started, and the runtime says why.
    NO_START = "**doesn't start**"
    # The API server refuses the pod, or lets it pass with a warning that names the container, or says nothing.
    REFUSED = "**refused**"
    WARNED = "**warned of**"
    UNSEEN = "not seen"
    # Nothing that the lab could show: shown elsewhere, see ``Cell.proof``.
    ELSEWHERE = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """
    :param more: words after the outcome's.
    :param proof: a unit test that shows what this lab can't.
    """

    outcome: Outcome
    more: str = ""
    proof: str = ""

    @property
    def words(self) -> str:
        return self.outcome.value + self.more


FAILS, TAKES, ALL = Cell(Outcome.FAILS), Cell(Outcome.TAKES), Cell(Outcome.ALL)
REFUSED, UNSEEN = Cell(Outcome.REFUSED), Cell(Outcome.UNSEEN)
ALLOWED = Cell(Outcome.UNSEEN, ", allowed")
LEFT_TO_TOOLKIT = Cell(Outcome.UNSEEN, ": the toolkit's setting prevents it")
NOTHING = Cell(Outcome.ELSEWHERE, "-")
NO_MEMORY = Cell(
    Outcome.ELSEWHERE,
    "no memory of any card",
    "test_a_pod_without_a_share_gets_no_memory_of_any_card",
)
CLOSED = Cell(
    Outcome.ELSEWHERE,
    "Event; no memory of the others",
    "test_fault_20_a_toolkit_without_limits_and_a_pod_with_a_higher_one",
)
SET_BACK = Cell(
    Outcome.ELSEWHERE,
    "set back to its share, with an Event",
    "test_fault_20_a_raised_limit_is_restored_by_the_plugin",
)
HELD = Cell(Outcome.ELSEWHERE, "held to its share", "test_fault_20_the_container_sees_its_share_as_the_card")
VOID_LAST = Cell(Outcome.FAILS, ": the specification's `void` comes last")
BY_FROM = Cell(Outcome.REFUSED, " with `gpushare_admission_env_from: deny`, else not seen")
UNLIMITED = Cell(Outcome.NO_START, " where the node can't limit, else starts with it")
LIKEWISE = Cell(Outcome.FAILS, ", likewise"), Cell(Outcome.FAILS, ", likewise")
NEITHER = Cell(Outcome.NO_START, ", likewise"), Cell(Outcome.NO_START, ", likewise")
NAMED_WITH_A_SHARE = Cell(Outcome.ELSEWHERE, "no memory of the others; Event, where it asks for a share", CLOSED.proof)
MAY_UNDO = Cell(
    Outcome.ELSEWHERE,
    "may undo limits; an Event names what it holds then",
    "test_what_a_container_holds_after_it_lifted_its_limit_is_reported",
)


@dataclasses.dataclass(frozen=True)
class Try:
    """A row of the table.

    :param pod: what the pod does.
    :param plays: the ways in which the lab does it (``test_42_attacks.py`` knows them by name); all end alike.
    :param accepting: in mode ``envvar``; ``cdi`` in that mode; ``refusing`` when also the toolkit accepts nothing from
        containers without privileges; ``policy`` with ``gpushare_admission: deny``; ``limits`` where they are enforced.
    """

    pod: str
    plays: tuple[str, ...]
    envvar: Cell
    cdi: Cell
    refusing: Cell
    policy: Cell
    limits: Cell

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.envvar, self.cdi, self.refusing, self.policy, self.limits

    @property
    def tests(self) -> str:
        """Its cases of test_42_attacks.py, which has one of this name for each way of injection."""
        return "<br>".join(f"`{play}`" for play in self.plays)


COLUMNS = (
    "the pod",
    "`envvar`",
    "`cdi`",
    "`cdi` and `toolkit_accept_unprivileged: false`",
    "with `gpushare_admission: deny`",
    "where limits are enforced",
    "`test_attack`",
)

TABLE = (
    Try(
        "asks for a share, and sets `NVIDIA_VISIBLE_DEVICES=all`, or another card's UUID, in `env`",
        ("share, env: all", "share, env: another"),
        TAKES, VOID_LAST, FAILS, REFUSED, CLOSED,
    ),
    Try(
        "the same, and asks for no share",
        ("env: all", "env: another"),
        TAKES, TAKES, FAILS, REFUSED, NO_MEMORY,
    ),
    Try(
        "asks for a share, and sets it by `envFrom`",
        ("share, envFrom: all",),
        TAKES, VOID_LAST, FAILS, BY_FROM, CLOSED,
    ),
    Try(
        "the same, and asks for no share",
        ("envFrom: all",),
        TAKES, TAKES, FAILS, BY_FROM, NO_MEMORY,
    ),
    Try(
        "asks for no share, and sets `CUDA_VERSION` without `NVIDIA_VISIBLE_DEVICES` in `env`",
        ("env: CUDA_VERSION",),
        ALL, ALL, FAILS, REFUSED, NO_MEMORY,
    ),
    Try(
        "the same by `envFrom`",
        ("envFrom: CUDA_VERSION",),
        ALL, ALL, FAILS, BY_FROM, NO_MEMORY,
    ),
    Try(
        "the same in its image",
        ("image: CUDA_VERSION",),
        ALL, ALL, FAILS, LEFT_TO_TOOLKIT, NO_MEMORY,
    ),
    Try(
        "the same in its image, and says `NVIDIA_VISIBLE_DEVICES=void` in `env`",
        ("image: CUDA_VERSION, env: void",),
        FAILS, FAILS, FAILS, ALLOWED, NOTHING,
    ),
    Try(
        "asks for a share, and has `CUDA_VERSION` in `env` or in its image",
        ("share, env: CUDA_VERSION", "share, image: CUDA_VERSION"),
        Cell(Outcome.FAILS, ": the plugin sets the other variable"), FAILS, FAILS, ALLOWED, HELD,
    ),
    Try(
        "asks for a share, and its image sets `NVIDIA_VISIBLE_DEVICES`",
        ("share, image: all",),
        Cell(Outcome.FAILS, ": the plugin's value wins"), FAILS, FAILS, UNSEEN, HELD,
    ),
    Try(
        "the same, and asks for no share (CUDA's images do)",
        ("image: all",),
        ALL, ALL, FAILS, LEFT_TO_TOOLKIT, NO_MEMORY,
    ),
    Try(
        "the same, and says `NVIDIA_VISIBLE_DEVICES=void` in `env`",
        ("image: all, env: void",),
        FAILS, FAILS, FAILS, ALLOWED, NOTHING,
    ),
    Try(
        "asks for a share, and sets `NVIDIA_GPU_MEMORY_LIMIT` higher in `env`",
        ("share, env: limit",),
        UNLIMITED, *NEITHER, REFUSED, SET_BACK,
    ),
    Try(
        "the same by `envFrom`",
        ("share, envFrom: limit",),
        UNLIMITED, *NEITHER, BY_FROM, SET_BACK,
    ),
    Try(
        "the same in its image",
        ("share, image: limit",),
        Cell(Outcome.NO_START, " where the node can't limit, else the plugin's value wins"), *NEITHER, UNSEEN, HELD,
    ),
    Try(
        "mounts `/dev/null` under `/var/run/nvidia-container-devices`, however the path is written",
        ("share, mount", "mount", "mount: slashes", "mount: dots", "mount: joined", "mount: relative", "mount: cdi"),
        Cell(Outcome.FAILS, " unless the toolkit accepts volume mounts"), *LIKEWISE, REFUSED, NAMED_WITH_A_SHARE,
    ),
    Try(
        "has an annotation `cdi.k8s.io/…` or `nvidia.cdi.k8s.io/…`",
        ("share, annotation", "annotation"),
        Cell(Outcome.FAILS, " unless the runtime passes it on, as CRI-O does, or an NRI plugin reads it"), *LIKEWISE,
        Cell(Outcome.REFUSED, ", later changes too"), NAMED_WITH_A_SHARE,
    ),
    Try(
        "is debugged (`kubectl debug`) with such a variable",
        ("debug: all",),
        TAKES, TAKES, FAILS, REFUSED, NO_MEMORY,
    ),
    Try(
        "mounts the node's `/dev`",
        ("share, /dev",),
        Cell(Outcome.FAILS, ": it may open its own card's devices only"), FAILS, FAILS, UNSEEN, HELD,
    ),
    Try(
        "has `SYS_ADMIN`, asks for no share, and sets `NVIDIA_VISIBLE_DEVICES` in `env`",
        ("env: all, SYS_ADMIN",),
        TAKES, TAKES, TAKES, REFUSED, MAY_UNDO,
    ),
    Try(
        "has `SYS_ADMIN`, asks for a share, and sets it likewise",
        ("share, env: all, SYS_ADMIN",),
        TAKES, VOID_LAST, VOID_LAST, REFUSED, MAY_UNDO,
    ),
    Try(
        "is privileged, and asks for a share",
        ("share, privileged",),
        ALL, ALL, ALL, Cell(Outcome.WARNED, " by name: no share holds it"), MAY_UNDO,
    ),
    Try(
        "is privileged, and asks for no share",
        ("privileged",),
        ALL, ALL, ALL, Cell(Outcome.UNSEEN, "; an Event and verify name it"), MAY_UNDO,
    ),
)  # fmt: skip


def page() -> list[str]:
    """Return the lines of the table in docs/gpushare.md."""
    rows = [COLUMNS, *((one.pod, *(cell.words for cell in one.cells), one.tests) for one in TABLE)]
    head, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|" + "---|" * len(COLUMNS), *lines]
