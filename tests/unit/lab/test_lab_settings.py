# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's parameters: defaults, given values, and refusals that name the variable."""

from __future__ import annotations

import pytest

from lab.settings import HELP, Settings, differences, parse
from lab.shell import LabError


def test_defaults() -> None:
    settings, given = parse({})
    assert settings == Settings()
    assert given == set()
    assert settings.node_names() == ["cp1", "cp2", "cp3", "gpu1", "gpu2"]
    assert parse({"LAB_CONTROL_PLANES": "1"})[0].node_names() == ["cp1", "gpu1", "gpu2"]


def test_flags_override_the_environment_and_empty_is_not_given() -> None:
    settings, given = parse({"LAB_CARDS": "4", "LAB_GPU_NODES": "3", "LAB_CARD_MIB": ""}, {"cards": "8"})
    assert (settings.cards, settings.gpu_nodes, settings.card_mib) == (8, 3, 16640)
    assert given == {"cards", "gpu_nodes"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LAB_GPU_NODES", "0"),
        ("LAB_GPU_NODES", "10"),
        ("LAB_GPU_NODES", "two"),
        ("LAB_CARDS", "17"),
        ("LAB_CARD_MIB", "16GiB"),
        ("LAB_CARD_MIB", "99999999999"),
        ("LAB_CONTROL_PLANES", "2"),
        ("LAB_DRIVER_VERSION", "latest"),
        ("LAB_DRIVER_VERSION", "580"),
        ("LAB_KUBERNETES_VERSION", "v1.36.3"),
        ("LAB_KUBERNETES_VERSION", "1.36"),
        ("LAB_SUBNET", "172.30.77.0/16"),
        ("LAB_SUBNET", "8.8.8.0/24"),
        ("LAB_SUBNET", "here"),
    ],
)
def test_invalid_values_are_refused_by_the_variables_name(name: str, value: str) -> None:
    with pytest.raises(LabError) as refusal:
        parse({name: value})
    message = str(refusal.value)
    assert message.startswith(f"{name} is {value!r}") or message.startswith(f"{name} is {int(value)}")
    assert "\n" not in message


def test_every_setting_is_documented() -> None:
    assert set(HELP) == set(Settings().as_dict())


def test_only_given_values_are_compared_with_a_running_lab() -> None:
    running = Settings(cards=4, gpu_nodes=3).as_dict()
    assert differences(running, Settings(), set()) == []
    assert differences(running, Settings(cards=4), {"cards"}) == []
    assert differences(running, Settings(cards=2), {"cards"}) == ["LAB_CARDS is 2 but the running lab has 4"]
