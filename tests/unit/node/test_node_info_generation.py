# SPDX-License-Identifier: GPL-3.0-or-later
"""A GPU's generation by its PCI device id: cards of every chip, as the public id database names them."""

from __future__ import annotations

import itertools

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._node.gpus import generation

CARDS = """
kepler: 0ff2 GRID K1, 102d Tesla K80, 103f Tesla K20, 118f Tesla K10, 11e0 GTX 770M, 1287 GT 730
maxwell: 1347 940M, 1389 GRID M30, 13bd Tesla M10, 13f2 Tesla M60, 1430 Quadro M2000, 1617 GTX 980M, 1667 GTX 965M
maxwell: 174d MX130, 179c 940MX, 17fd Tesla M40
pascal: 15f7 P100 12GB, 15f9 P100 SXM2, 172f GP100GL, 1b06 GTX 1080 Ti, 1b38 Tesla P40, 1bb3 Tesla P4
pascal: 1c30 Quadro P2000, 1cb1 Quadro P1000, 1d33 Quadro P500
volta: 1db1 V100 SXM2 16GB, 1db6 V100 PCIe 32GB, 1df6 V100S
turing: 1e30 RTX 6000, 1eb8 T4, 1f02 RTX 2070, 1fb1 T600, 2182 GTX 1660 Ti, 21c4 GTX 1660 SUPER
ampere: 20b0 A100 40GB, 20b5 A100 80GB PCIe, 20b7 A30, 20f3 A800, 2204 RTX 3090, 2236 A10, 2235 A40, 2414 RTX 3060 Ti
ampere: 24b0 RTX A4000, 2531 RTX A2000, 25b6 A2
ada: 2684 RTX 4090, 26b5 L40, 26b9 L40S, 2704 RTX 4080, 27b8 L4, 2803 RTX 4060 Ti, 28b0 RTX 2000 Ada
hopper: 2321 H100 NVL, 2330 H100 SXM5, 2331 H100 PCIe, 2335 H200 SXM, 233b H200 NVL, 2342 GH200
blackwell: 2901 B200, 2941 GB200, 29bc B100, 2b00 Jetson Thor, 2b85 RTX 5090, 2bb5 RTX PRO 6000 Server
blackwell: 2c34 RTX PRO 4000, 2d04 RTX 5060 Ti, 2d83 RTX 5050, 2e12 GB10, 2f04 RTX 5070, 3182 B300, 31c2 GB300
blackwell: 3340 GB120
unknown: 06d1 Tesla C2050, 1091 Tesla M2090, 1140 610M, 1200 GTX 560 Ti, 1251 GTX 560M, 4000 newer, ffff newer
"""
ROWS = [line.split(": ") for line in CARDS.strip().splitlines()]


@pytest.mark.parametrize(("name", "card"), [(name, card) for name, cards in ROWS for card in cards.split(", ")])
def test_generation_of_a_card(name, card):
    assert generation("0x" + card.split()[0]) == name


@pytest.mark.parametrize("device", ["", "0x", "nothing", "0xzzzz"])
def test_invalid_id_is_unknown(device):
    assert generation(device) == "unknown"


def test_generations_do_not_overlap():
    blocks = sorted(gpus.BLOCKS)
    assert all(first <= last for first, last, _name in blocks)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(blocks))
