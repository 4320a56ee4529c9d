# SPDX-License-Identifier: GPL-3.0-or-later
"""Decoding of kube-scheduler's configurations: what its own parser takes is taken, and nothing ends in a traceback."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.decode import Source
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.schema import CONFIGURATION

HEAD = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"


def decoded(text: str) -> JsonObject:
    return Source("/c", text).decode(CONFIGURATION, 30, "v1", strict=True).tree


@pytest.mark.parametrize(
    "tail",
    [
        "parallelism: 8\t# x\n",
        "parallelism:\t8\n",
        "parallelism: 8\n  \t# x\n",
        "parallelism: 8\n---\n",
        "parallelism: 8\n--- # x\n...\n",
    ],
)
def test_tabs_and_a_mark_at_the_end(tail: str) -> None:
    assert decoded(HEAD + tail)["parallelism"] == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + "---\na: 1\n", "line 4, can't be parsed .it holds several documents"),
        (HEAD + "\tparallelism: 8\n", "line 3, can't be parsed .found a tab|line 3, can't be parsed .found character"),
        ("# only a comment\n---\n", "it isn't a mapping"),
        (HEAD + "parallelism: 8 \a\n", "the character #x07 isn't allowed"),
        (HEAD + "<<: 8\n", "expected a mapping"),
        (HEAD + "profiles: &a [*a]\n", "profiles.* isn't a mapping|holds itself"),
        (HEAD + "parallelism: 0b_\n", "parallelism isn't a whole number"),
        (HEAD + "percentageOfNodesToScore: ._\n", "isn't a whole number"),
        (HEAD + f"parallelism: {'1' * 5000}\n", "parallelism isn't a whole number"),
        (HEAD + "a: " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("#" * (1 << 21), "has more than 1 MiB"),
    ],
)
def test_refusals_are_sentences(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=f"^/c.*({words})"):
        decoded(text)
