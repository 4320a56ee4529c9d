# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of claim templates stand for one shape each, and the conditions on models are those of the extender."""

from __future__ import annotations

import json
import re

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import claim_templates as templates
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from gpushare.templates.objects import template_of
from hypothesis import given
from hypothesis import strategies as st

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789" + templates.PUNCTUATION
PATTERNS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=6), max_size=3).map(tuple)


@st.composite
def shapes(draw):
    if draw(st.booleans()):
        shares, cards = draw(st.lists(st.integers(1, 9999), min_size=1, max_size=4)), 1
    else:
        several = draw(st.booleans())
        cards = draw(st.integers(2, 4 if several else 32))
        shares = [cards * one for one in draw(st.lists(st.integers(1, 99), min_size=1, max_size=8 if several else 1))]
    return templates.Shape(tuple(shares), cards, draw(PATTERNS), draw(PATTERNS))


@given(shapes())
def test_a_name_stands_for_its_shape(shape):
    name = templates.name_of(shape)
    # As the API server wants an object's name.
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)
    assert templates.shape_of(name) == shape


@pytest.mark.parametrize(
    "name",
    [
        *("gpu-mem-", "gpu-mem-0", "gpu-mem-04", "gpu-mem-4-", "gpu-mem-x", "gpu-mem-1000000000", "other-4"),
        *("gpu-mem-4.cards-1", "gpu-mem-4.cards-3", "gpu-mem-4-3.cards-2", "gpu-mem-66.cards-33"),
        *("gpu-mem-5-5.cards-5", "gpu-mem-" + "-".join("4" * 9) + ".cards-4"),
        *(
            "gpu-mem-4.models",
            "gpu-mem-4.models-",
            "gpu-mem-4.models-x6",
            "gpu-mem-4.models-x61",
            "gpu-mem-4.without-a.models-b",
        ),
        "gpu-mem-" + "-".join("1" * 33),
        "gpu-mem-4.models-" + "a" * 250,
        *(
            "gpu-mem-007",
            "gpu-mem-7.0",
            "gpu-mem-+7",
            "gpu-mem-7 ",
            "gpu-mem-7\n",
            "gpu-mem-\u0667",
            "gpu-mem-7.cards-02",
        ),
        # Of more than a card has, and of models as admission never writes them.
        *("gpu-mem-1048577", "gpu-mem-1-1048577", "gpu-mem-2097154.cards-2"),
        *("gpu-mem-4.models-" + "-".join("a" * 17), "gpu-mem-4.models-" + "a" * 129, "gpu-mem-4.models-x0a"),
        *("gpu-mem-4.without-x22", "gpu-mem-4.models-xe9", "gpu-mem-4.models-x41"),
    ],
)
def test_other_names_stand_for_nothing(name):
    assert templates.shape_of(name) is None
    assert template_of("default", name, "GiB") is None


@given(PATTERNS.filter(len), PATTERNS, st.text(alphabet=LETTERS.upper() + LETTERS, max_size=8))
def test_conditions_on_a_model_accept_what_the_extender_accepts(models, excluded, model):
    def holds(expression):
        """What CEL finds; the model of a card that has none isn't there."""
        inner = json.loads(re.search(r"matches\((.*)\)$", expression).group(1))
        found = re.search(inner, model) is not None
        return bool(model) and (not found if "!device" in expression else found)

    # The same for RE2: the escapes are of punctuation only.
    template = template_of("default", templates.name_of(templates.Shape((4,), 1, models, excluded)), "GiB")
    selectors = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["selectors"]
    accepted = all(holds(selector["cel"]["expression"]) for selector in selectors)
    assert accepted == contract.Demand(4, models=models, excluded=excluded).accepts_model(model)


def test_memory_is_in_the_clusters_unit():
    for unit, memory in (("GiB", "4Gi"), ("MiB", "4Mi")):
        template = template_of("default", "gpu-mem-8.cards-2", unit)
        [request] = template["spec"]["spec"]["devices"]["requests"]
        assert request["exactly"]["capacity"] == {"requests": {"memory": memory}}
        assert request["exactly"]["count"] == 2
