# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML's return codes, each with its meaning or what to do. No I/O.

Source: nvidia-ml-py 13.580, ``NVML_ERROR_*``, and the texts of driver 580.159.04's library, which give no advice.
"""

from __future__ import annotations

import dataclasses
import typing as t


class NvmlRefused(Exception):
    """NVML or its binding returned an error.

    :param code: NVML's return code; ``BROKEN`` if the binding itself failed.
    :param text: how the binding failed.
    """

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text or str(code))
        self.code = code
        self.text = text


@dataclasses.dataclass(frozen=True)
class Code:
    """One return code of ``nvmlReturn_t``.

    :param name: without ``NVML_ERROR_``.
    :param text: of ``nvmlErrorString``.
    :param advice: its meaning, or what to do.
    """

    name: str
    text: str
    advice: str


NOT_SUPPORTED, NOT_FOUND = 3, 6
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, LOST = 12, 13, 15
# Not NVML's: the binding failed.
BROKEN = -1

CODES: t.Mapping[int, Code] = {
    1: Code("UNINITIALIZED", "Uninitialized", "NVML was called before its initialisation"),
    2: Code("INVALID_ARGUMENT", "Invalid Argument", "this driver doesn't accept the arguments"),
    3: Code("NOT_SUPPORTED", "Not Supported", "this card or driver doesn't support it"),
    4: Code("NO_PERMISSION", "Insufficient Permissions", "run as root (become: true)"),
    5: Code("ALREADY_INITIALIZED", "Already Initialized", "NVML was initialised twice"),
    6: Code("NOT_FOUND", "Not Found", "it doesn't exist, or not any more"),
    7: Code("INSUFFICIENT_SIZE", "Insufficient Size", "its data grew during the call; run it again"),
    8: Code("INSUFFICIENT_POWER", "Insufficient External Power", "check the card's power cables"),
    9: Code("DRIVER_NOT_LOADED", "Driver Not Loaded", "the kernel module nvidia isn't loaded; load it, or reboot"),
    10: Code("TIMEOUT", "Timeout", "the card didn't respond to the driver in time; look for Xid in the kernel's log"),
    11: Code("IRQ_ISSUE", "Interrupt Request Issue", "the kernel has a problem with the card's interrupts"),
    12: Code(
        "LIBRARY_NOT_FOUND",
        "NVML Shared Library Not Found",
        "libnvidia-ml.so.1 isn't on this node: no driver is installed",
    ),
    13: Code("FUNCTION_NOT_FOUND", "Function Not Found", "this driver is too old for it"),
    14: Code("CORRUPTED_INFOROM", "Corrupted infoROM", "the card's infoROM is damaged; the card needs repair"),
    15: Code(
        "GPU_IS_LOST", "GPU is lost", "the card fell off the bus; reboot the node, and replace the card if it recurs"
    ),
    16: Code("RESET_REQUIRED", "GPU requires reset", "reset the card, or reboot the node"),
    17: Code("OPERATING_SYSTEM", "GPU access blocked by the operating system", "read the kernel's log"),
    18: Code(
        "LIB_RM_VERSION_MISMATCH",
        "Driver/library version mismatch",
        "the loaded kernel module and the library are of different versions; reload the module, or reboot",
    ),
    19: Code("IN_USE", "In use by another client", "another program uses the card exclusively"),
    20: Code("MEMORY", "Insufficient Memory", "the node lacks memory"),
    21: Code("NO_DATA", "No data", "the driver has no data about it"),
    22: Code("VGPU_ECC_NOT_SUPPORTED", "vGPU ECC not supported", "turn ECC off for this"),
    23: Code("INSUFFICIENT_RESOURCES", "Insufficient Resources", "the driver ran out of a resource other than memory"),
    24: Code("FREQ_NOT_SUPPORTED", "Invalid Frequency", "the card doesn't have this clock"),
    25: Code(
        "ARGUMENT_VERSION_MISMATCH",
        "Argument version mismatch",
        "driver and nvidia-ml-py have different versions of a structure",
    ),
    26: Code("DEPRECATED", "Requested functionality has been deprecated", "this driver doesn't support it any more"),
    27: Code(
        "NOT_READY", "System is not in ready state", "the driver or the card is still starting; run it again later"
    ),
    28: Code("GPU_NOT_FOUND", "No supported GPUs were found", "no card was found"),
    29: Code(
        "INVALID_STATE",
        "Resource not in correct state to perform requested operation",
        "the card's state doesn't allow it",
    ),
    30: Code(
        "RESET_TYPE_NOT_SUPPORTED", "Reset type is not supported for given device", "the card can't be reset like this"
    ),
    999: Code("UNKNOWN", "Unknown Error", "internal error of the driver; look for NVRM in the kernel's log"),
}


def describe(refused: NvmlRefused, subjects: t.Sequence[str] = ()) -> str:
    """Describe a refusal with NVML's own error and the advice, in one sentence.

    :param subjects: what was read; empty for a failure of the whole library.
    """
    reading = f" when reading {enumerate_texts(subjects)}" if subjects else ""
    if refused.code == BROKEN and not subjects:
        return refused.text
    if refused.code == BROKEN:
        return f"NVML returned nothing usable{reading}: {refused.text}"
    code = CODES.get(refused.code)
    if code is None:
        return f"NVML failed with the undocumented code {refused.code}{reading}"
    return f"NVML: {code.text} ({refused.code}, NVML_ERROR_{code.name}){reading}: {code.advice}"


def enumerate_texts(texts: t.Sequence[str]) -> str:
    """Enumerate texts, each once."""
    once = list(dict.fromkeys(texts))
    return once[0] if len(once) == 1 else f"{', '.join(once[:-1])} and {once[-1]}"
