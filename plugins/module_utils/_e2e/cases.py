# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cases of a suite, as data: pods, what becomes of them, what that proves and by what evidence. No I/O.

A user's cases have the same form. Numbers of pods are computed from what is free on the node, so that a case holds on
any node.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject

# What a case observes; ``silicon`` is what no simulated card can show.
EVIDENCE = ("scheduling", "admission", "annotation", "environment", "device nodes", "NVML", "exit code", "silicon")
# Commands that the user names: one that allocates memory, and one that computes.
ALLOCATE, COMPUTE = ("allocate",), ("compute",)
# What ALLOCATE ends with where CUDA refuses memory, by its CUDA_ERROR_OUT_OF_MEMORY. No shell, Python, signal or
# nvidia-smi ends a program with it, so that nothing else is taken for a refusal.
OUT_OF_MEMORY = 102


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    :param proves: what follows if it passes.
    :param evidence: of ``EVIDENCE``.
    :param limits: of each pod's container.
    :param more: pods beyond those that fit, which have to wait.
    :param at_most: pods that are created, where fewer than fit show the same; 0 for no limit.
    :param beyond_cards: one pod more than the node has cards is created, where that many fit.
    :param reason: word of the scheduler for pods that wait; empty for any.
    :param refused: kubelet ends the pods for a reason that contains this; empty where they run.
    :param command: run in the first pod; ``allocate`` and ``compute`` for the commands that the user names.
    :param status: exit status with which the command has to end.
    :param shows: text in the command's output; empty for none.
    :param finds: regular expression of lines in the output, which has to match ``times``; empty for none.
    :param times: lines that match ``finds``.
    :param distinct: the command runs in every pod: all outputs differ, or with false two are alike; None for one pod.
    :param kinds: what the node has to be, as the suite names it; empty for any node.
    :param suite: the only suite that has it; empty for each.
    """

    id: str
    title: str
    proves: str
    evidence: tuple[str, ...]
    limits: t.Mapping[str, int]
    more: int = 0
    at_most: int = 0
    beyond_cards: bool = False
    reason: str = ""
    refused: str = ""
    command: tuple[str, ...] = ()
    status: int = 0
    shows: str = ""
    finds: str = ""
    times: int = 1
    distinct: bool | None = None
    kinds: tuple[str, ...] = ()
    suite: str = ""

    def mismatch(self, output: str) -> str:
        """Return how an output differs from what the case expects; empty where it doesn't."""
        if self.shows and self.shows not in output:
            return f"not {self.shows}"
        lines = [line.strip() for line in output.splitlines() if self.finds and re.search(self.finds, line)]
        if self.finds and len(lines) != self.times:
            return f"{len(lines)} lines of {self.finds}, not {self.times}"
        return ""


def parse(given: t.Sequence[JsonObject]) -> list[Case]:
    """Return a user's cases.

    :raises BadInput: a case isn't of this form.
    """
    cases = []
    for number, row in enumerate(given, 1):
        try:
            fields: JsonObject = dict(row)
            fields.update({key: tuple(row[key]) for key in ("evidence", "command", "kinds") if key in row})
            fields["limits"] = {str(key): int(value) for key, value in row["limits"].items()}
            case = Case(**fields)
            re.compile(case.finds)
        except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
            raise BadInput(f"cases: number {number} isn't a case: {error}") from error
        unknown = sorted(set(case.evidence) - set(EVIDENCE))
        if unknown or not case.evidence:
            raise BadInput(f"cases: {case.id}: evidence is one or more of {', '.join(EVIDENCE)}, not {unknown}")
        cases.append(case)
    if len({case.id for case in cases}) != len(cases):
        raise BadInput("cases: two of them have the same id")
    return cases
