# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which cards a pod was given, as kubelet says, or else its annotations; and who needs no grant. No I/O."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils import _hami as hami
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import HAMI, Entry, Node, Pod
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_snapshot import VISIBLE
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card
from ansible_collections.kubegpu.share.plugins.module_utils._nvidia_plugin import is_one

NOTHING = ("", "void", "none")
NO_GPU = "no-gpu-has"
# Classes of CDI devices that come with a card and are none.
BESIDE = ("gds", "mofed", "gdrcopy", "imex-channel")
MIG_PLACE = re.compile("[0-9]{1,4}:[0-9]{1,4}")
# Labels by which the stacks' own pods are told; a stack's device plugin, and what else of them may touch cards.
PLUGINS: t.Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpushare": (
        ("component", "gpushare-device-plugin"),
        ("name", "gpushare-device-plugin-ds"),
        ("app.kubernetes.io/name", "gpushare-device-plugin"),
    ),
    "HAMi": (("app.kubernetes.io/component", "hami-device-plugin"),),
    "NVIDIA": (
        ("name", "nvidia-device-plugin-ds"),
        ("app", "nvidia-device-plugin-daemonset"),
        ("app.kubernetes.io/name", "nvidia-device-plugin"),
    ),
}
HELPERS: tuple[tuple[str, str], ...] = (
    ("app", "nvidia-dcgm-exporter"),
    ("app", "nvidia-dcgm"),
    ("app", "nvidia-operator-validator"),
    ("app", "nvidia-mig-manager"),
    ("app", "nvidia-driver-daemonset"),
    ("app", "nvidia-container-toolkit-daemonset"),
    ("app", "gpu-feature-discovery"),
    ("app", "nvidia-device-plugin-mps-control-daemon"),
    ("app.kubernetes.io/name", "dcgm-exporter"),
    ("app.kubernetes.io/name", "gpu-feature-discovery"),
)
MPS_DAEMON = "mps-control-daemon"


@dataclasses.dataclass(frozen=True)
class Given:
    """The cards (or MIG devices) of a pod by UUID, and who says so; ``uuids`` is None where nobody tells.

    :param strange: what names no card, in kubelet's words.
    """

    uuids: frozenset[str] | None
    source: str
    strange: tuple[str, ...] = ()


def plugin_of(pod: Pod) -> str:
    """Whose device plugin a pod is; empty for any other pod."""
    if MPS_DAEMON in pod.key:
        return ""
    return next((who for who, labels in PLUGINS.items() if any(pod.labels.get(k) == v for k, v in labels)), "")


def may_use_cards(pod: Pod, patterns: t.Iterable[str]) -> bool:
    """A pod that needs no grant: a stack's own, or one that the user allows."""
    if plugin_of(pod) or MPS_DAEMON in pod.key or any(pod.labels.get(key) == value for key, value in HELPERS):
        return True
    return any(fnmatch.fnmatchcase(pod.key, pattern) for pattern in patterns)


def gpu_requests(requests: t.Mapping[str, int]) -> dict[str, int]:
    """The resources among these that kubelet hands out cards for."""
    return {
        name: number
        for name, number in requests.items()
        if number > 0 and (name == contract.RESOURCE_MEMORY or is_one(name))
    }


def asks_for_card(pod: Pod) -> bool:
    return any(gpu_requests(one.requests) for one in pod.containers)


def wanted(pod: Pod) -> list[tuple[str, str, int]]:
    """Container, resource and number of all that kubelet must have given out, without plain init containers."""
    return [
        (one.name, resource, number)
        for one in pod.containers
        if not one.init
        for resource, number in gpu_requests(one.requests).items()
    ]


def entries_of(node: Node, pod: Pod) -> list[Entry]:
    """What kubelet's checkpoint has of a pod's cards."""
    return [one for uid in sorted(pod.uids) for one in node.kubelet.of(uid) if gpu_requests({one.resource: 1})]


def own_cards(node: Node, ids: t.Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """Units by card (UUID) of IDs that our plugin makes, and the IDs that name no card of the node."""
    found: dict[str, int] = {}
    strange: list[str] = []
    known: dict[str, Card | None] = {}
    for one in ids:
        try:
            short = contract.card_of_device_id(one)
        except contract.ContractError:
            strange.append(one)
            continue
        if short not in known:
            known[short] = contract.card_by_short(node.cards, short)
        card = known[short]
        if card is None:
            strange.append(one)
        else:
            found[card.uuid] = found.get(card.uuid, 0) + 1
    return found, strange


def visible(node: Node, entry: Entry) -> Given:
    """What the answer to kubelet shows to the container: ``NVIDIA_VISIBLE_DEVICES``, or CDI devices.

    The variable is an index, a UUID, ``void`` where CDI does it, or upstream's word that there was no card.
    """
    value = (entry.envs or {}).get(VISIBLE)
    names = [] if value is None or value in NOTHING else value.split(",")
    source = VISIBLE
    cards = [one for one in entry.cdi if one.partition("=")[0].rpartition("/")[2] not in BESIDE]
    if not names and cards:
        names, source = [one.rpartition("=")[2] for one in cards], "CDI devices"
    # NVIDIA's plugin may name them by mounts that aren't read here, and MIG devices by their place.
    if entry.envs is None or not names or any(one.startswith("/") or MIG_PLACE.fullmatch(one) for one in names):
        return Given(None, source)
    found: set[str] = set()
    strange = []
    for one in (name.strip() for name in names):
        gpu = node.nvml.at(int(one)) if one.isascii() and one.isdigit() and len(one) < 5 else None
        if one == "all":
            found |= {gpu.uuid for gpu in node.nvml.gpus}
        elif one.startswith(("GPU-", "MIG-")):
            found.add(one)
        elif gpu is not None:
            found.add(gpu.uuid)
        else:
            strange.append(shorten(one))
    return Given(frozenset(found), source, tuple(strange))


def entry_cards(node: Node, entry: Entry) -> Given:
    """The cards that kubelet's entry of a container stands for."""
    if entry.resource == contract.RESOURCE_MEMORY and node.ours:
        units, strange = own_cards(node, entry.ids)
        if units and not strange:
            return Given(frozenset(units), "kubelet's device IDs")
    if entry.resource != contract.RESOURCE_MEMORY and HAMI not in node.backends:
        named = frozenset(one.partition("::")[0] for one in entry.ids)
        if named and all(one.startswith(("GPU-", "MIG-")) for one in named):
            return Given(named, "kubelet's device IDs")
    return visible(node, entry)


def given(node: Node, pod: Pod) -> Given:
    """The cards of a pod: by kubelet's word, else by its annotations."""
    found: set[str] = set()
    source = ""
    for entry in entries_of(node, pod):
        one = entry_cards(node, entry)
        if one.uuids:
            found |= one.uuids
            source = one.source
    if found:
        return Given(frozenset(found), source)
    by_index = {card.index: card.uuid for card in node.cards}
    held = [by_index.get(index, "") for index in contract.shares(pod.json)]
    if held and all(held):
        return Given(frozenset(held), "annotations")
    try:
        devices = [uuid for one in hami.allocated(pod.annotations.get(hami.POD_ALLOCATED, "")) for uuid, *_rest in one]
    except hami.HamiError:
        devices = []
    return Given(frozenset(devices) or None, "annotations")


def resolved(node: Node, uuids: t.Iterable[str]) -> frozenset[str]:
    """The physical cards of cards and MIG devices; one that NVML doesn't know stays as it is."""
    found = set()
    for uuid in uuids:
        gpu = node.nvml.gpu(uuid)
        found.add(gpu.uuid if gpu else uuid)
    return frozenset(found)
