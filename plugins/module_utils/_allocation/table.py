# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the allocation of a cluster, and write it as a module's result."""

from __future__ import annotations

import datetime
import json
import sys
import typing as t

from ansible.module_utils.common import warnings

from .._contracts.model import UNFINISHED
from .._contracts.virtual import CLASSES
from .._core.columns import columns
from .._core.types import JsonObject
from .._core.untrusted import line
from .._kube.errors import KubeError
from .._kube.stream import Streams, Wanted, listed, uncollected
from . import claims
from .compute import assemble, percent
from .machines import machine_of
from .nodes import read_node
from .pods import (
    DRA,
    HAMI,
    MARKERS,
    NVIDIA,
    VIRTUAL,
    Allocation,
    BackendEntry,
    BackendTotals,
    Claim,
    NodeEntry,
    PodEntry,
    PodReader,
)
from .virtual import device_name, holder_name, holder_text

if t.TYPE_CHECKING:
    from .._kube.api import Client, Kube

NO_NODES = (
    "No node advertises shared GPU memory (aliyun.com/gpu-mem, or a ResourceSlice of gpu.kubegpu.share): nothing is "
    "installed yet, or neither device plugin nor DRA driver runs.\n"
)
TABLES = ("table", "wide")
BAR = 10
# Of names, in the narrow table only.
LONGEST = 48
TOTALS_OF = {
    DRA: "GPU memory by claims",
    HAMI: "GPU memory of HAMi's nodes",
    NVIDIA: "GPUs of NVIDIA's plugin",
    VIRTUAL: "cards and vGPUs for virtual machines",
    "": "GPU memory of the cluster",
}


def report(
    kube: Client, tables: t.Sequence[str], now: datetime.datetime, machines: t.Mapping[str, t.Any] | None = None
) -> JsonObject:
    """Read the allocation, and say of which cluster and when.

    :param tables: names of ``TABLES``.
    :param now: the time, in UTC.
    :param machines: what role inspect has collected, by the name of the node.
    """
    return {**collect(kube, tables, machines), "cluster": kube.server, "time": now.strftime("%Y-%m-%dT%H:%M:%SZ")}


def collect(
    kube: Kube | Streams, tables: t.Sequence[str] = ("table",), machines: t.Mapping[str, t.Any] | None = None
) -> JsonObject:
    """Read the allocation from the cluster, as data and as tables, each a tuple of texts to print in this order.

    :param tables: names of ``TABLES``.
    :param machines: see ``report``.
    """
    with uncollected():
        allocation = _assembled(kube, machines or {})
        formatted = {name: blocks(allocation, wide=name == "wide") for name in TABLES if name in tables}
    return {**allocation, **formatted, "requests": dict(kube.requests)}


def _assembled(kube: Kube | Streams, machines: t.Mapping[str, t.Any]) -> Allocation:
    # What pods hold is freed before the tables are made.
    nodes, pods = listed(kube, Wanted("Node", read_node), Wanted("Pod", PodReader(), UNFINISHED, MARKERS))
    # After the pods: what a pod that is missing there holds is a row of its own.
    by_claims = claims.read(kube) if claims.may_exist(nodes, pods) else claims.Read()
    observed = {name: machine_of(given) for name, given in machines.items()}
    return assemble(nodes, pods, by_claims, _handlers(kube, pods), observed)


def _handlers(kube: Kube | Streams, claims: t.Iterable[Claim]) -> dict[str, str] | None:
    """Return the handlers of RuntimeClasses by name where a pod names one; None where they can't be read."""
    if not any(claim.holder.get("runtime_class") or claim.entry.get("runtime_class") for claim in claims):
        return {}

    def keep(raw: t.Any) -> list[tuple[str, str]]:
        return [(str(raw["metadata"]["name"]), str(raw["handler"]))]

    try:
        [rows] = listed(kube, Wanted(CLASSES[1], keep, api_version=CLASSES[0]))
    except KubeError as error:
        if error.status != 403:
            raise
        return None
    return dict(rows)


def table(allocation: Allocation, wide: bool = False) -> str:
    """Format the nodes with their cards and pods, then the Pending pods, then the totals.

    :param wide: include UUIDs, states and containers, and truncate nothing.
    """
    return "".join(blocks(allocation, wide))


def blocks(allocation: Allocation, wide: bool) -> tuple[str, ...]:
    """Return the table in parts, which in a large cluster are too much to be in memory twice."""
    if not allocation["nodes"]:
        return (NO_NODES, _waiting(allocation["waiting"]))
    parts = ["".join(_blocks(node, wide)) for node in allocation["nodes"]]
    rule = "-" * max(max(map(len, part.splitlines())) for part in parts) + "\n"
    ruled = (text for part in parts for text in (part, rule))
    return (*ruled, _waiting(allocation["waiting"]), *_totals(allocation))


def draw_bar(used: int, total: int) -> str:
    """Draw a card as a bar; any used unit is visible, and only a full card is drawn full."""
    if total <= 0:
        return "[" + ("#" if used > 0 else ".") * BAR + "]"
    filled = min(BAR, used * BAR // total)
    if filled == 0 and used > 0:
        filled = 1
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


# --------------------------------------------------------------------------- one node


def _blocks(node: NodeEntry, wide: bool) -> t.Iterator[str]:
    yield f"NAME:       {line(node['name'])}\nIPADDRESS:  {line(node['address'] or '-')}\n"
    if node["memory_limit"]:
        yield f"LIMIT:      {node['memory_limit']}\n"
    if wide or node["backend"] not in ("gpushare", "gpushare-upstream"):
        yield f"BACKEND:    {', '.join(node['backends']) or 'none'}\n"
    if node["problem"]:
        yield f"PROBLEM:    {line(node['problem'])}\n"
    yield _part(node, wide, node["unit"])
    for part in node["also"]:
        yield f"\nAlso {part['backend']}:\n"
        yield _part(part, wide, part["unit"])


def _part(part: BackendEntry, wide: bool, unit: str | None) -> str:
    """Format the cards and pods of one back end on a node."""
    cards, pending = part["cards"], part["pending"]
    devices = part.get("devices")
    header = ["NAMESPACE", "POD", "STATUS"]
    header += [] if devices is None else ["HOLDER"]
    header += ["STATE", "UID", "CONTAINERS"] if wide else []
    first = len(header)
    header += [f"GPU{card['index']}(Allocated)" for card in cards]
    counted = part.get("resources") is not None
    header += ["GPU(Allocated)"] if counted else ["PENDING(Allocated)"] if pending else []
    rows = [header]
    # A pod of several cards is one row, at its first card.
    lines: dict[tuple[str, str], list[str]] = {}
    problems = {}
    on_devices = [pod for device in devices or () for pod in device["pods"]]
    for place, pods in enumerate([*(card["pods"] for card in cards), [*pending, *on_devices]]):
        for pod in pods:
            key = (pod["namespace"], pod["name"])
            cells = lines.get(key)
            if cells is None:
                cells = lines[key] = _pod(pod, len(header), wide, devices is not None)
            cells[first + place] = str(int(cells[first + place]) + pod["units"])
            if pod["problem"]:
                problems[key] = pod["problem"]
    rows += lines.values()
    rows.append(["Allocated/Total", *[""] * (first - 1), *(f"{card['used']}/{card['total']}" for card in cards)])
    if counted:
        rows[-1].append(f"{part['used']}/{part['total']}")
    elif pending:
        rows[-1].append(str(sum(pod["units"] for pod in pending)))
    text = "".join(f"{row}\n" for row in _cards(part, wide))
    text += f"\n{columns(rows)}"
    text += "".join(f"{line(f'{space}/{name}: {problem}')}\n" for (space, name), problem in problems.items())
    share = f"{part['used']}/{part['total']} ({percent(part['used'], part['total'])}%)"
    return f"{text}\nAllocated/Total of the node{_of(unit)}: {share}\n"


def _cards(part: BackendEntry, wide: bool) -> t.Iterator[str]:
    """Format a line for each card: a bar, its units, and its model."""
    cards = part["cards"]
    names = [f"GPU{card['index']}" for card in cards]
    shares = [f"{card['used']}/{card['total']}" for card in cards]
    for card, name, share in zip(cards, names, shares):
        start = f"{name.ljust(max(map(len, names)))} {draw_bar(card['used'], card['total'])} "
        about = [_shortened(card["model"], wide)]
        if wide:
            about += [f"{card['memory_mib']} MiB" if card["memory_mib"] else "", card["uuid"]]
            if "slots" in card:
                about += [f"slots {card['slots_used']}/{card['slots']}", f"cores {card['cores_used']}/{card['cores']}"]
        if not card["healthy"]:
            about.append(f"UNHEALTHY: {card['reason']}" if card["reason"] else "UNHEALTHY")
        tail = line(", ".join(text for text in about if text))
        yield start + (f"{share.ljust(max(map(len, shares)))}  {tail}" if tail else share)
    for resource in part.get("resources") or []:
        share = f"{resource['used']}/{resource['capacity']}{_kind(part['gpus']) if 'gpus' in part else ''}"
        yield f"{line(resource['name'])} {draw_bar(resource['used'], resource['capacity'])} {share}"
    yield from _devices(part, wide)


def _devices(part: BackendEntry, wide: bool) -> t.Iterator[str]:
    """Format a line for each card and vGPU for virtual machines, with who has it."""
    devices = part.get("devices")
    if not devices:
        return
    rows = [["ADDRESS", "WHAT", "DRIVER", "GROUP", *(["UUID", "RESOURCE"] if wide else []), "HOLDER"]]
    for device in devices:
        group = device["iommu_group"]
        row = [device["address"], device_name(device), device["driver"] or "-", "-" if group is None else str(group)]
        row += [device["uuid"] or "-", device["resource"] or "-"] if wide else []
        rows.append([*row, holder_text(device, pods=wide)])
    yield from columns(rows).splitlines()


def _kind(gpus: JsonObject) -> str:
    """Format the node's labels of its GPUs."""
    about = [
        gpus["product"],
        f"{gpus['memory_mib']} MiB" if gpus["memory_mib"] else "",
        f"{gpus['count']} cards" if gpus["count"] is not None else "",
        f"{gpus['sharing']}, {gpus['replicas']} replicas" if gpus["sharing"] not in (None, "none") else "",
    ]
    text = line(", ".join(part for part in about if part))
    return f"  {text}" if text else ""


def _pod(pod: PodEntry, columns: int, wide: bool, with_holder: bool) -> list[str]:
    cells = [_shortened(pod["namespace"], wide), _shortened(pod["name"], wide), _status(pod)]
    cells += [holder_name(pod)] if with_holder else []
    if wide:
        held = ",".join(f"{container['name']}={container['units']}" for container in pod["containers"])
        cells += [pod["state"], pod["uid"] or "-", held or "-"]
    return [*cells, *["0"] * (columns - len(cells))]


def _status(pod: PodEntry) -> str:
    return "Terminating" if pod["terminating"] else str(pod["phase"])


# --------------------------------------------------------------------------- the cluster


def _waiting(pods: t.Sequence[PodEntry]) -> str:
    if not pods:
        return ""
    rows = [
        f"{pod['namespace']}/{pod['name']} requests {pod['units'] or 'a GPU'}: "
        f"{pod['reason'] or pod['problem'] or 'not scheduled yet'}"
        for pod in pods
    ]
    return "Waiting for a card:\n" + "".join(f"  {line(row)}\n" for row in rows)


def _totals(allocation: Allocation) -> t.Iterator[str]:
    none: BackendTotals = {
        "backend": "",
        "unit": allocation["unit"],
        "total": allocation["total"],
        "used": allocation["used"],
    }
    for totals in allocation["totals"] or [none]:
        name = TOTALS_OF.get(totals["backend"], TOTALS_OF[""])
        share = f"{totals['used']}/{totals['total']} ({percent(totals['used'], totals['total'])}%)"
        yield f"Allocated/Total {name}{_of(totals['unit'])}: {share}\n"


def _of(unit: str | None) -> str:
    return f" ({unit})" if unit else ""


def _shortened(text: str, wide: bool) -> str:
    """Truncate a long name in its middle: pods of one owner differ at the end."""
    if wide or len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 15]}...{text[-12:]}"


class Module(t.Protocol):
    """The used part of AnsibleModule."""

    check_mode: bool
    no_log_values: set[str]

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any: ...

    def exit_json(self, **kwargs: t.Any) -> t.Any: ...

    def do_cleanup_files(self) -> t.Any: ...


class LargeResult:
    """A module whose exit_json doesn't copy a result without secrets.

    exit_json searches each value for secrets and copies it, which for many thousand values takes longer than everything
    else. This one searches the JSON text, and writes it as it is if it contains no secret.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.check_mode = module.check_mode

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any:
        return self._module.fail_json(msg=msg, **kwargs)

    def exit_json(self, **kwargs: t.Any) -> t.Any:
        # With a kubeconfig file there are no secrets to search for.
        secrets = self._module.no_log_values
        if _has_warnings() or (
            secrets and any(_contains(secret, part) for part in _parts(kwargs) for secret in secrets)
        ):
            whole = {key: "".join(value) if isinstance(value, tuple) else value for key, value in kwargs.items()}
            return self._module.exit_json(**whole)
        self._module.do_cleanup_files()
        sys.stdout.write("\n")
        sys.stdout.writelines(_parts({"changed": False, **kwargs}))
        sys.stdout.write("\n")
        raise SystemExit(0)


def _parts(result: t.Mapping[str, t.Any]) -> t.Iterator[str]:
    """Return the JSON text of a result in parts, so that it isn't in memory twice."""
    before = "{"
    for key, value in result.items():
        yield f"{before}{json.dumps(key)}: "
        before = ", "
        if isinstance(value, tuple):
            yield '"'
            yield from (json.dumps(text)[1:-1] for text in value)
            yield '"'
        elif isinstance(value, list) and value:
            yield "["
            for number, row in enumerate(value):
                yield (", " if number else "") + json.dumps(row)
            yield "]"
        else:
            yield json.dumps(value)
    yield "}"


def _contains(secret: t.Any, part: str) -> bool:
    """Return whether a text contains a secret, also in JSON's notation."""
    text = str(secret)
    return bool(text) and (text in part or json.dumps(text)[1:-1] in part)


def _has_warnings() -> bool:
    """Return whether there are warnings, which exit_json adds to the result."""
    return bool(warnings.get_warning_messages() or warnings.get_deprecation_messages())
