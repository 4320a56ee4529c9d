# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the module returns about the chosen cards, and what the proof of their binding lacks. Pure."""

from __future__ import annotations

from .._core.types import JsonObject
from . import messages
from .model import Options, State
from .plan import reboot_required, row, wanted

# By the kernel's answer about a group. A virtual machine that has it is proof enough.
VIABLE = {"viable": True, "not_viable": False}


def report(options: Options, state: State) -> JsonObject:
    """Return the module's result beside ``changed`` and ``diff``."""
    want = wanted(options, state)
    return {
        "reboot_required": reboot_required(options, state),
        "busy": [{**hold.row(), "text": messages.sentence(hold.row())} for hold in want.busy],
        "cards": [
            {
                "address": address,
                "uuid": state.uuids.get(address) or (getattr(state.record.of(address), "uuid", "")),
                "device": f"{state.functions[address].vendor}:{state.functions[address].device}",
                "driver": state.functions[address].driver,
                "wanted": want.targets[address],
                "iommu_group": state.functions[address].group,
                "viable": VIABLE.get(state.groups.get(state.functions[address].group, "")),
                "functions": sorted(
                    other for other in want.targets if state.functions[other].group == state.functions[address].group
                ),
            }
            for address in want.cards
        ],
    }


def problems(options: Options, state: State) -> list[JsonObject]:
    """Return what the proof lacks: of functions that have to be bound now, codes with fields."""
    want = wanted(options, state)
    waiting = {state.functions[hold.address].group for hold in want.busy}
    rows = []
    for address, driver in sorted(want.targets.items()):
        function = state.functions[address]
        late = options.state == "present" and (not options.live or function.group in waiting)
        if function.driver != driver and late:
            continue
        if function.driver != driver and not (options.state == "external" and function.vfio):
            rows.append(row("not_bound", address=address, found=function.driver, wanted=driver))
            continue
        if options.state == "present" and function.override != driver:
            rows.append(row("override", address=address, found=function.override, wanted=driver))
        if not function.nodes:
            rows.append(row("no_node", address=address))
        answer = state.groups.get(function.group, "")
        if answer in ("not_viable", "unknown") and function.card:
            code = "not_viable" if answer == "not_viable" else "viable_unknown"
            rows.append(row(code, address=address, group=function.group))
    return rows
