# SPDX-License-Identifier: GPL-3.0-or-later
"""Draw how ``site.yml`` runs, from the playbooks, how a share gets from pod to card, and who has a card in which way.

The names in the second and third are those of the contracts.

With ``--check`` nothing is written, and a picture that isn't current is an error.
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import typing as t
from html import escape
from pathlib import Path

import drawing
import yaml
from code_tables import code

ROOT = Path(__file__).resolve().parents[1]
STYLE = (
    "text{font-family:sans-serif;fill:#222}.head{font-size:14px;font-weight:bold;text-anchor:middle}"
    ".text{font-size:12px}.note{font-size:10px;fill:#666}rect{fill:#eef3fa;stroke:#5b7db1}"
    ".lane{fill:#fff;stroke:#d5dce6}line{stroke:#6b7c93;marker-end:url(#end)}.number{font-size:12px;fill:#888}"
)
ARROW = "#6b7c93"
MARGIN, HEAD, LINE = 16, 40, 15


def paragraph(at: tuple[int, int], rows: t.Iterable[str], kind: str = "text") -> list[str]:
    """Write rows of text below each other.

    :param at: left and first baseline, in pixels.
    """
    x, y = at
    return [f'<text x="{x}" y="{y + LINE * row}" class="{kind}">{escape(text)}</text>' for row, text in enumerate(rows)]


# ------------------------------------------------------------------ the order of site.yml


@dataclasses.dataclass(frozen=True)
class Play:
    """A play of a playbook: its name, the lanes on which it runs, and whether one machine follows another."""

    name: str
    lanes: tuple[str, ...]
    serial: bool


LANES = {"localhost": "controller and API", "gpu_nodes": "GPU nodes", "control_plane": "control planes"}
# Groups that a run makes, and whose machines they are.
MADE = {"kubegpu_maintenance": "gpu_nodes", "kubegpu_schedulers": "control_plane"}
LANE_WIDTH, LANE_GAP, BOX_PAD = 250, 12, 10


def plays(playbook: str) -> t.Iterator[Play]:
    """Read the plays of a playbook, and of those that it imports, in their order."""
    for play in yaml.safe_load((ROOT / "playbooks" / playbook).read_text()):
        imported = play.get("ansible.builtin.import_playbook")
        if imported:
            yield from plays(imported)
            continue
        hosts = str(play["hosts"])
        if "site_nodes_validated" in hosts or "ansible_limit" in hosts:
            # No machine has these plays where site.yml imports them without a limit.
            continue
        made = [lane for group, lane in MADE.items() if group in hosts]
        lanes = tuple(made or [lane for lane in LANES if lane in hosts] or LANES)
        yield Play(play["name"], lanes, play.get("serial") == 1)


def order_of_site() -> str:
    """Draw a box per play of ``site.yml``, over the lanes of the machines that it runs on."""
    lines: list[str] = []
    top, lefts = MARGIN + HEAD, {}
    for column, lane in enumerate(LANES):
        lefts[lane] = MARGIN + 24 + column * (LANE_WIDTH + LANE_GAP)
    boxes: list[str] = []
    for number, play in enumerate(plays("site.yml"), 1):
        left = min(lefts[lane] for lane in play.lanes)
        right = max(lefts[lane] for lane in play.lanes) + LANE_WIDTH
        rows = textwrap.wrap(play.name, (right - left - 2 * BOX_PAD) // 7)
        notes = ["one machine after the other"] if play.serial else []
        height = LINE * len(rows + notes) + 2 * BOX_PAD - 2
        boxes.append(f'<text x="{MARGIN}" y="{top + 22}" class="number">{number}</text>')
        boxes.append(
            f'<rect x="{left + 6}" y="{top}" width="{right - left - 12}" height="{height}" rx="4">'
            f"<title>{escape(play.name)}</title></rect>"
        )
        boxes += paragraph((left + 6 + BOX_PAD, top + BOX_PAD + 11), rows)
        boxes += paragraph((left + 6 + BOX_PAD, top + BOX_PAD + 11 + LINE * len(rows)), notes, "note")
        top += height + 10
    for lane, title in LANES.items():
        middle = lefts[lane] + LANE_WIDTH // 2
        lines.append(
            f'<rect x="{lefts[lane]}" y="{MARGIN}" width="{LANE_WIDTH}" height="{top - MARGIN}" rx="4" class="lane"/>'
        )
        lines.append(f'<text x="{middle}" y="{MARGIN + 24}" class="head">{escape(title)}</text>')
    width = MARGIN + 24 + len(LANES) * (LANE_WIDTH + LANE_GAP) - LANE_GAP + MARGIN
    return drawing.svg((width, top + MARGIN), STYLE, ARROW, [*lines, *boxes])


# ------------------------------------------------------------------ from pod to card

SWIM_WIDTH, STEP = 190, 62


def steps() -> tuple[tuple[str, ...], list[tuple[str, str, str]]]:
    """Return who takes part, and who sends what to whom, with the names that the servers' contract has."""
    contract = code("module_utils._contracts.gpushare")
    actors = ("pod", "kube-scheduler", "extender", "API server", "kubelet", "device plugin")
    pod, scheduler, extender, api, kubelet, plugin = actors
    return actors, [
        (plugin, kubelet, f"announces a device per unit: {contract.RESOURCE_MEMORY}"),
        (plugin, api, f"lists its cards in the node's annotation {contract.NODE_CARDS}"),
        (pod, scheduler, f"requests units of {contract.RESOURCE_MEMORY}"),
        (scheduler, extender, "filter: which of these nodes have a card with enough free memory?"),
        (scheduler, extender, "bind: this node"),
        (extender, api, f"books the card in the Lease's annotation {contract.LEDGER}"),
        (extender, api, f"binds the pod, with {contract.POD_INDEX}"),
        (kubelet, plugin, "GetPreferredAllocation: which devices? Those of the booked card"),
        (kubelet, plugin, "Allocate: gets the card's UUID, and the limit of its memory"),
        (kubelet, pod, "starts the container with its card"),
        (plugin, api, f"confirms: {contract.POD_ASSIGNED}=true"),
    ]


def share_to_card() -> str:
    """Draw who asks whom until a container has its card."""
    actors, messages = steps()
    middles = {actor: MARGIN + column * SWIM_WIDTH + SWIM_WIDTH // 2 for column, actor in enumerate(actors)}
    bottom = MARGIN + HEAD + 20 + STEP * len(messages)
    lines = []
    for actor, x in middles.items():
        lines += [
            f'<line x1="{x}" y1="{MARGIN + HEAD}" x2="{x}" y2="{bottom}" style="stroke:#d5dce6;marker-end:none"/>',
            f'<rect x="{x - 75}" y="{MARGIN}" width="150" height="{HEAD - 8}" rx="4"/>',
            f'<text x="{x}" y="{MARGIN + 21}" class="head">{escape(actor)}</text>',
        ]
    for number, (source, target, what) in enumerate(messages, 1):
        y = MARGIN + HEAD + STEP * number - 8
        x, to_x = middles[source], middles[target]
        rows = textwrap.wrap(f"{number}. {what}", max(abs(to_x - x) // 7, 26))
        left = min(x, to_x) + 8
        lines.append(f'<line x1="{x}" y1="{y}" x2="{to_x + (-3 if to_x > x else 3)}" y2="{y}"/>')
        behind = max(map(len, rows)) * 6 + 6
        begin = y - 6 - LINE * (len(rows) - 1)
        lines.append(
            f'<rect x="{left - 3}" y="{begin - 12}" width="{behind}" height="{LINE * len(rows) + 1}" '
            'style="fill:#fff;stroke:none"/>'
        )
        lines += paragraph((left, begin), rows)
    return drawing.svg((2 * MARGIN + len(actors) * SWIM_WIDTH, bottom + MARGIN), STYLE, ARROW, lines)


# ------------------------------------------------------------------ containers, shares, virtual machines

QUESTIONS = ("Driver", "Announced", "Placed by", "Held by", "Given by")
COLUMN, CELL_PAD, QUESTION = 300, 10, 84


def ways() -> dict[str, tuple[str, ...]]:
    """Return an answer to each of ``QUESTIONS`` by who gets cards, with the names that the contracts have."""
    share, nvidia, virtual = (
        code(f"module_utils._contracts.{name}") for name in ("gpushare", "nvidia_plugin", "virtual")
    )
    labels = code("module_utils._contracts.backends")
    return {
        "containers, a card each": (
            "nvidia, by role driver or the GPU Operator",
            f"{nvidia.RESOURCE} by NVIDIA's device plugin; gpu_backend {labels.NVIDIA}",
            "kube-scheduler counts; kubelet takes any free card",
            "a container, by /dev/nvidiaN and NVIDIA's container toolkit",
            "gpu_backend of the node",
        ),
        "pods with shares": (
            "nvidia, by role driver or the GPU Operator",
            f"{share.RESOURCE_MEMORY} by this collection's device plugin, or ResourceSlices; HAMi's register",
            "the extender, kube-scheduler by claims, or HAMi's scheduler book memory of one card",
            "several pods, each with its part; the driver's limit where there is one",
            f"gpu_backend {labels.GPUSHARE} or {labels.HAMI}",
        ),
        "virtual machines": (
            "vfio-pci, by role passthrough, for a whole IOMMU group; nvidia (vGPU manager) for vGPUs of role vgpu",
            f"nvidia.com/10DE_2236 or a type by KubeVirt, {virtual.KATA_RESOURCE} by NVIDIA's sandbox device plugin; "
            f"or slices of {virtual.DRIVER}",
            "kube-scheduler counts; kubelet takes any free group or vGPU",
            "QEMU in the pod of a VirtualMachineInstance, or in one of Kata's RuntimeClass, by /dev/vfio/N",
            f"gpu_backend {', '.join(labels.VIRTUAL)}; single cards by passthrough_cards",
        ),
    }


def three_ways() -> str:
    """Draw a column for each way in which a card is used, and a row for each question about it."""
    wrapped = {title: [textwrap.wrap(text, COLUMN // 7) for text in texts] for title, texts in ways().items()}
    lines: list[str] = []
    top = MARGIN + HEAD
    for number, question in enumerate(QUESTIONS):
        height = LINE * max(len(texts[number]) for texts in wrapped.values()) + 2 * CELL_PAD
        lines += paragraph((MARGIN, top + CELL_PAD + 11), [question], "number")
        for column, texts in enumerate(wrapped.values()):
            left = MARGIN + QUESTION + column * (COLUMN + LANE_GAP)
            lines.append(f'<rect x="{left}" y="{top}" width="{COLUMN}" height="{height}" rx="4"/>')
            lines += paragraph((left + CELL_PAD, top + CELL_PAD + 11), texts[number])
        top += height + CELL_PAD
    for column, title in enumerate(wrapped):
        middle = MARGIN + QUESTION + column * (COLUMN + LANE_GAP) + COLUMN // 2
        lines.append(f'<text x="{middle}" y="{MARGIN + 24}" class="head">{escape(title)}</text>')
    width = MARGIN + QUESTION + len(wrapped) * (COLUMN + LANE_GAP) - LANE_GAP + MARGIN
    return drawing.svg((width, top + MARGIN - CELL_PAD), STYLE, ARROW, lines)


PICTURES: dict[str, t.Callable[[], str]] = {
    "site.svg": order_of_site,
    "share.svg": share_to_card,
    "ways.svg": three_ways,
}


if __name__ == "__main__":
    sys.exit(drawing.main(__doc__, PICTURES))
