# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""One card as NVML describes it: identity, memory, MIG, health. No I/O."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._nvml_asking import MIB, Asking
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_words import (
    FUNCTION_NOT_FOUND,
    NOT_FOUND,
    NOT_SUPPORTED,
    Refused,
)

Json = t.Dict[str, t.Any]

UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,90}")
PCI = re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F]")
# nvmlComputeMode_t, in its order.
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
MIG_MODES = ("disabled", "enabled")
# NVML_GPU_RECOVERY_ACTION_*, in their order.
RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
# nvmlMemoryErrorType_t and nvmlEccCounterType_t.
UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
# No card has been made that can be divided into more.
MOST_MIG_DEVICES = 64


@dataclasses.dataclass(frozen=True)
class MigDevice:
    """A MIG device, with the handle that its processes are asked by."""

    handle: t.Any
    uuid: str
    index: int
    gi: int | None
    ci: int | None
    total_mib: int | None
    used_mib: int | None

    def row(self) -> Json:
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del row["handle"]
        return row


def blank(index: int, problem: str) -> Json:
    """A card of which nothing is known but its place."""
    return {
        "index": index,
        "minor": None,
        "uuid": "",
        "pci": "",
        "name": "",
        "problem": problem,
        "memory": None,
        "mig": {"mode": "unknown", "pending": "unknown", "devices": []},
        "compute_mode": "unknown",
        "health": {
            "ecc_uncorrected_volatile": None,
            "ecc_uncorrected_aggregate": None,
            "row_remap": None,
            "retired_pages_pending": None,
            "recovery_action": None,
            "xids": None,
        },
        "processes": None,
        "limits": None,
    }


def identify(asking: Asking, handle: t.Any, card: Json) -> None:
    """Fill in who the card is.

    :raises Refused: it is lost, as with all of these.
    """
    card["uuid"] = asking.text("its UUID", "nvmlDeviceGetUUID", handle)
    if card["uuid"] and not UUID.fullmatch(card["uuid"]):
        asking.doubt(f"its UUID can't be {card['uuid']!r}")
        card["uuid"] = ""
    card["name"] = asking.text("its name", "nvmlDeviceGetName", handle)
    card["minor"] = asking.number("its minor number", "nvmlDeviceGetMinorNumber", handle)
    card["pci"] = _pci(asking, handle)
    told = asking.number("its index", "nvmlDeviceGetIndex", handle)
    if told not in (None, card["index"]):
        asking.doubt(f"NVML lists it at index {card['index']} and gives its index as {told}")


def _pci(asking: Asking, handle: t.Any) -> str:
    answer = asking.call("its PCI address", "nvmlDeviceGetPciInfo_v3", handle)
    try:
        address = getattr(answer, "busId", None)
    except ValueError:
        # nvidia-ml-py decodes the text when it is looked at.
        address = None
    if isinstance(address, bytes):
        address = address.decode("ascii", "replace")
    if answer is not None and not (isinstance(address, str) and PCI.fullmatch(address.upper())):
        asking.doubt("its PCI address isn't one")
        return ""
    return address.upper() if isinstance(address, str) else ""


def memory(asking: Asking, handle: t.Any) -> Json | None:
    """The card's memory in MiB; what driver and firmware keep is in ``used`` where the driver doesn't tell it apart."""
    answer = asking.ask("its memory", lambda: asking.nvml.memory(handle))
    if answer is None:
        return None
    total, used, free = (asking.whole(f"its {key} memory", answer.get(key)) for key in ("total", "used", "free"))
    reserved = asking.whole("its reserved memory", answer.get("reserved"))
    if total is None or used is None or free is None:
        return None
    if not total or max(used, free, reserved or 0) > total:
        asking.doubt(f"its memory can't be {used // MIB} MiB used and {free // MIB} MiB free of {total // MIB} MiB")
        return None
    mib = None if reserved is None else reserved // MIB
    return {"total_mib": total // MIB, "used_mib": used // MIB, "free_mib": free // MIB, "reserved_mib": mib}


def mig(asking: Asking, handle: t.Any) -> tuple[Json, list[MigDevice]]:
    """MIG mode, and the MIG devices with their handles."""
    state: Json = {"mode": "unknown", "pending": "unknown", "devices": []}
    try:
        current, pending = asking.nvml.ask("nvmlDeviceGetMigMode", handle)
    except Refused as refused:
        if refused.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            # Drivers without the question are older than MIG.
            state["mode"] = state["pending"] = "unsupported"
        else:
            asking.refused(refused, "its MIG mode")
        return state, []
    except (TypeError, ValueError):
        asking.doubt("its MIG mode isn't one")
        return state, []
    for key, value in (("mode", current), ("pending", pending)):
        number = asking.whole("its MIG mode", value)
        if number is not None and number < len(MIG_MODES):
            state[key] = MIG_MODES[number]
        elif number is not None:
            asking.doubt(f"its MIG mode can't be {number}")
    devices = _mig_devices(asking, handle) if state["mode"] == "enabled" else []
    state["devices"] = [one.row() for one in devices]
    return state, devices


def _mig_devices(asking: Asking, handle: t.Any) -> list[MigDevice]:
    most = asking.number("its number of MIG devices", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    if most > MOST_MIG_DEVICES:
        asking.doubt(f"it can't have {most} MIG devices")
    found: list[MigDevice] = []
    for index in range(min(most, MOST_MIG_DEVICES)):
        try:
            device = asking.nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        except Refused as refused:
            # Places without a device are skipped.
            if refused.code != NOT_FOUND:
                asking.refused(refused, f"MIG device {index}")
            continue
        found.append(_mig_device(asking, device, index))
    return found


def _mig_device(asking: Asking, device: t.Any, index: int) -> MigDevice:
    name = f"MIG device {index}'s"
    uuid = asking.text(f"{name} UUID", "nvmlDeviceGetUUID", device)
    if uuid and not UUID.fullmatch(uuid):
        asking.doubt(f"{name} UUID can't be {uuid!r}")
        uuid = ""
    answer = asking.ask(f"{name} memory", lambda: asking.nvml.memory(device)) or {}
    total, used = (asking.whole(f"{name} memory", answer.get(key)) for key in ("total", "used"))
    if total is not None and used is not None and used > total:
        asking.doubt(f"{name} memory can't be {used // MIB} MiB used of {total // MIB} MiB")
        total = used = None
    return MigDevice(
        handle=device,
        uuid=uuid,
        index=index,
        gi=asking.number(f"{name} GPU instance", "nvmlDeviceGetGpuInstanceId", device),
        ci=asking.number(f"{name} compute instance", "nvmlDeviceGetComputeInstanceId", device),
        total_mib=None if total is None else total // MIB,
        used_mib=None if used is None else used // MIB,
    )


def compute_mode(asking: Asking, handle: t.Any) -> str:
    number = asking.number("its compute mode", "nvmlDeviceGetComputeMode", handle)
    if number is not None and number >= len(COMPUTE_MODES):
        asking.doubt(f"its compute mode can't be {number}")
        return "unknown"
    return "unknown" if number is None else COMPUTE_MODES[number]


def health(asking: Asking, handle: t.Any) -> Json:
    """What NVML tells of the card's health; past Xids it doesn't."""
    ecc = "nvmlDeviceGetTotalEccErrors"
    retired = asking.number("its retired pages", "nvmlDeviceGetRetiredPagesPendingStatus", handle)
    action = asking.whole(
        "its recovery action",
        asking.ask("its recovery action", lambda: asking.nvml.field(handle, RECOVERY_FIELD)),
    )
    known = action is not None and action < len(RECOVERY_ACTIONS)
    return {
        "ecc_uncorrected_volatile": asking.number("its ECC errors", ecc, handle, UNCORRECTED, VOLATILE),
        "ecc_uncorrected_aggregate": asking.number("its ECC errors", ecc, handle, UNCORRECTED, AGGREGATE),
        "row_remap": _row_remap(asking, handle),
        "retired_pages_pending": None if retired is None else bool(retired),
        # A newer driver may know actions that have no name here.
        "recovery_action": None if action is None else RECOVERY_ACTIONS[action] if known else f"action_{action}",
    }


def _row_remap(asking: Asking, handle: t.Any) -> Json | None:
    answer = asking.call("its remapped rows", "nvmlDeviceGetRemappedRows", handle)
    if answer is None:
        return None
    if not isinstance(answer, (tuple, list)) or len(answer) != 4:
        asking.doubt("its remapped rows aren't four numbers")
        return None
    rows = [asking.whole("its remapped rows", one) for one in answer]
    if None in rows:
        return None
    return {"correctable": rows[0], "uncorrectable": rows[1], "pending": bool(rows[2]), "failed": bool(rows[3])}
