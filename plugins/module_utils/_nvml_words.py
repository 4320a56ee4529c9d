# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the codes of NVIDIA's management library mean: one sentence for each. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t


class Refused(Exception):
    """NVML, or the way to it, didn't answer a question.

    :param code: NVML's return code; ``BROKEN`` where the binding itself failed, which ``words`` then says how.
    """

    def __init__(self, code: int, words: str = "") -> None:
        super().__init__(words or str(code))
        self.code = code
        self.words = words


@dataclasses.dataclass(frozen=True)
class Code:
    """One return code of ``nvmlReturn_t``.

    :param name: without ``NVML_ERROR_``.
    :param words: what ``nvmlErrorString`` says.
    :param advice: what it means, or what to do.
    """

    name: str
    words: str
    advice: str


NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, LOST = 12, 13, 15
# None of NVML's: what came back was no answer of the library at all.
BROKEN = -1

CODES: t.Mapping[int, Code] = {
    1: Code("UNINITIALIZED", "Uninitialized", "NVML was asked before it was initialised"),
    2: Code("INVALID_ARGUMENT", "Invalid Argument", "this driver doesn't take the question as it was asked"),
    3: Code("NOT_SUPPORTED", "Not Supported", "this card or driver doesn't have it"),
    4: Code("NO_PERMISSION", "Insufficient Permissions", "ask as root (become: true)"),
    5: Code("ALREADY_INITIALIZED", "Already Initialized", "NVML was initialised twice"),
    6: Code("NOT_FOUND", "Not Found", "there is no such thing, or not any more"),
    7: Code("INSUFFICIENT_SIZE", "Insufficient Size", "its answer grew while it was given; ask again"),
    8: Code("INSUFFICIENT_POWER", "Insufficient External Power", "the card's power cables aren't connected right"),
    9: Code("DRIVER_NOT_LOADED", "Driver Not Loaded", "the kernel module nvidia isn't loaded; load it, or reboot"),
    10: Code("TIMEOUT", "Timeout", "the card didn't answer the driver in time; look for Xid in the kernel's log"),
    11: Code("IRQ_ISSUE", "Interrupt Request Issue", "the kernel has a problem with the card's interrupts"),
    12: Code(
        "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found", "libnvidia-ml.so.1 isn't on this node: no driver is there"
    ),
    13: Code("FUNCTION_NOT_FOUND", "Function Not Found", "this driver is too old for it"),
    14: Code("CORRUPTED_INFOROM", "Corrupted infoROM", "the card's infoROM is damaged; the card needs repair"),
    15: Code(
        "GPU_IS_LOST", "GPU is lost", "the card fell off the bus; reboot the node, and replace the card if it recurs"
    ),
    16: Code("RESET_REQUIRED", "GPU requires reset", "reset the card, or reboot the node"),
    17: Code("OPERATING_SYSTEM", "The operating system has blocked the request", "see the kernel's log"),
    18: Code(
        "LIB_RM_VERSION_MISMATCH",
        "Driver/library version mismatch",
        "the loaded kernel module and the library are of different versions; reload the module, or reboot",
    ),
    19: Code("IN_USE", "In use by another client", "another program uses the card for itself"),
    20: Code("MEMORY", "Insufficient Memory", "the node lacks memory"),
    21: Code("NO_DATA", "No data", "the driver has no data of it"),
    22: Code("VGPU_ECC_NOT_SUPPORTED", "vGPU operation not available because ECC is on", "turn ECC off for this"),
    23: Code("INSUFFICIENT_RESOURCES", "Insufficient Resources", "the driver ran out of something other than memory"),
    24: Code("FREQ_NOT_SUPPORTED", "Frequency not supported", "the card doesn't have this clock"),
    25: Code("ARGUMENT_VERSION_MISMATCH", "Argument version mismatch", "driver and nvidia-ml-py differ on a structure"),
    26: Code("DEPRECATED", "Deprecated", "this driver doesn't answer the question any more"),
    27: Code("NOT_READY", "Not Ready", "the driver or the card is still starting; ask again in a while"),
    28: Code("GPU_NOT_FOUND", "GPU not found", "no card was found"),
    29: Code("INVALID_STATE", "Invalid state", "the card isn't in a state to answer this"),
    30: Code("RESET_TYPE_NOT_SUPPORTED", "Reset type not supported", "the card can't be reset like this"),
    999: Code("UNKNOWN", "Unknown Error", "the driver failed inside; look for NVRM in the kernel's log"),
}


def sentence(refused: Refused, whats: t.Sequence[str] = ()) -> str:
    """What was refused and what it means, in one sentence that names NVML's own error.

    :param whats: what was asked for; none for a failure of the whole library.
    """
    asked = f" when asked for {listed(whats)}" if whats else ""
    if refused.code == BROKEN and not whats:
        return refused.words
    if refused.code == BROKEN:
        return f"NVML gave no usable answer{asked}: {refused.words}"
    code = CODES.get(refused.code)
    if code is None:
        return f"NVML failed with the code {refused.code}{asked}, which isn't one that it documents"
    return f"NVML: {code.words} ({refused.code}, NVML_ERROR_{code.name}){asked}: {code.advice}"


def listed(words: t.Sequence[str]) -> str:
    """Enumerated, each once."""
    once = list(dict.fromkeys(words))
    return once[0] if len(once) == 1 else f"{', '.join(once[:-1])} and {once[-1]}"
