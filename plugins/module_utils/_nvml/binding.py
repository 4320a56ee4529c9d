# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapter to NVML through nvidia-ml-py (pynvml): its functions, its return codes, and queries whose errors are kept.

Source: nvidia-ml-py 13.580, ``NVML_ERROR_*``, and the texts of driver 580.159.04's library, which give no advice.

A faulty driver can hang or crash either: only the worker process of ``worker`` uses this file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import os
import sys
import types
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


MIB = 1 << 20
# NVML_VALUE_NOT_AVAILABLE as an unsigned long long; real values are far smaller.
NOT_AVAILABLE = (1 << 64) - 1
MAX_NUMBER = 1 << 62
MAX_TEXT = 256
MAX_PROBLEMS = 12


class Nvml(t.Protocol):
    """The library; every call raises NvmlRefused only. Handles are opaque."""

    def call(self, function: str, *arguments: t.Any) -> t.Any:
        """Call a function of nvidia-ml-py; invalid UTF-8 is replaced by U+FFFD."""

    def memory(self, handle: t.Any) -> t.Mapping[str, t.Any]:
        """Return ``total``, ``used``, ``free`` in bytes and, with version 2 of the function, ``reserved``."""

    def field(self, handle: t.Any, name: str) -> t.Any:
        """Return an unsigned field of ``nvmlDeviceGetFieldValues``, by the name of its constant."""

    def fabric(self, handle: t.Any) -> tuple[t.Any, t.Any]:
        """Return state and status of a card's registration with its NVSwitches (driver branch 530 and newer)."""

    def limit(self, handle: t.Any, folder: str) -> tuple[t.Any, t.Any, t.Any]:
        """Return a cgroup's soft limit, hard limit and used memory in bytes, by its path in sysfs."""

    def has(self, function: str) -> bool:
        """Return whether the driver's library has this function."""


class Query:
    """Queries about one card, or about the system.

    A missing or unsupported function is no problem: its value is None. If the card is lost, the exception is raised.

    :param of_card: whether they are about a card; a query about the system only adds a lost card to the problem.
    """

    def __init__(self, nvml: Nvml, of_card: bool = True) -> None:
        self.nvml = nvml
        self._of_card = of_card
        self._refused: dict[tuple[int, str], list[str]] = {}
        self._implausible: list[str] = []

    def attempt(self, subject: str, function_call: t.Callable[[], t.Any]) -> t.Any:
        """Call a function; None if it is refused.

        :param subject: what it reads, for the problem.
        :raises NvmlRefused: the card is lost.
        """
        try:
            return function_call()
        except NvmlRefused as refused:
            if refused.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                self.add_refusal(refused, subject)
            return None

    def call(self, subject: str, function: str, *arguments: t.Any) -> t.Any:
        """Call a function of the library by its name; None if it is refused."""
        return self.attempt(subject, lambda: self.nvml.call(function, *arguments))

    def text(self, subject: str, function: str, *arguments: t.Any) -> str:
        """Read a string; empty if there is none."""
        answer = self.call(subject, function, *arguments)
        if answer is None:
            return ""
        if not isinstance(answer, str):
            self.add_implausible(f"{subject} isn't a string")
            return ""
        shown = printable(answer)
        if shown != answer:
            self.add_implausible(f"{subject} has unprintable characters")
        return shown

    def number(self, subject: str, function: str, *arguments: t.Any) -> int | None:
        """Read a whole number; None if there is none."""
        return self.whole(subject, self.call(subject, function, *arguments))

    def whole(self, subject: str, answer: t.Any) -> int | None:
        """Validate a whole number from 0; "not available" and None are None, other values are implausible."""
        if answer is None or answer == NOT_AVAILABLE:
            return None
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer <= MAX_NUMBER:
            self.add_implausible(f"{subject} can't be {printable(str(answer))[:40]}")
            return None
        return answer

    def add_refusal(self, refused: NvmlRefused, subject: str) -> None:
        """Add a refusal to the problem; equal ones become one sentence.

        :raises NvmlRefused: the card is lost.
        """
        if refused.code == LOST and self._of_card:
            raise refused
        self._refused.setdefault((refused.code, refused.text), []).append(subject)

    def add_implausible(self, text: str) -> None:
        """Add an implausible value to the problem."""
        if text not in self._implausible:
            self._implausible.append(text)

    def problem(self, last: NvmlRefused | None = None) -> str:
        """Return all problems as text; empty if there are none.

        :param last: the refusal that ended the queries.
        """
        sentences = [describe(last)] if last else []
        sentences += [describe(NvmlRefused(code, text), subjects) for (code, text), subjects in self._refused.items()]
        sentences += self._implausible[:MAX_PROBLEMS]
        if len(self._implausible) > MAX_PROBLEMS:
            sentences.append(f"and {len(self._implausible) - MAX_PROBLEMS} more")
        return "; ".join(sentences)


def printable(text: str) -> str:
    """Replace unprintable characters, and truncate a text that is longer than any name."""
    shown = "".join(
        character if character.isprintable() and character != "\ufffd" else "?" for character in text[:MAX_TEXT]
    )
    return shown + "…" if len(text) > MAX_TEXT else shown


NAME = "libnvidia-ml.so.1"
# Directories that the linker doesn't search: the GPU operator's driver container, GKE's, WSL's.
FOLDERS = (
    "/run/nvidia/driver/usr/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "/home/kubernetes/bin/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
)
INVALID_ARGUMENT, VERSION_MISMATCH = 2, 25
# The member of nvmlValue_t by nvmlValueType_t, of unsigned whole numbers.
MEMBERS = {1: "uiVal", 2: "ulVal", 3: "ullVal"}


def load(binding: str | None) -> t.Any:
    """Import nvidia-ml-py: the file that was copied from the controller, or else the node's own.

    :raises NvmlRefused: neither can be imported.
    """
    sys.dont_write_bytecode = True
    reason = ""
    if binding:
        try:
            return _of_file(binding)
        except Exception as error:
            # Third-party code may raise anything; the node's own may work.
            reason = f" ({type(error).__name__}: {error})"
    try:
        return importlib.import_module("pynvml")
    except Exception as error:
        copied = f"the controller's copy can't be imported{reason}" if binding else "the controller has none to copy"
        raise NvmlRefused(
            BROKEN,
            f"NVML can't be called: nvidia-ml-py isn't on this node, and {copied}. Install nvidia-ml-py with pip on "
            "the controller, in the environment of ansible-core.",
        ) from error


def _of_file(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} isn't a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["pynvml"]
        raise
    return module


class Library:
    """The initialised library.

    :param module: nvidia-ml-py.
    :param folders: searched if the linker doesn't find the library.
    :raises NvmlRefused: it isn't found, or can't be initialised.
    """

    def __init__(self, module: t.Any, folders: t.Sequence[str] = FOLDERS) -> None:
        # nvidia-ml-py has no types; only this class uses it.
        self._module = module
        try:
            self.call("nvmlInit")
        except NvmlRefused as refused:
            path = next((path for path in (f"{folder}/{NAME}" for folder in folders) if os.path.exists(path)), None)
            if refused.code != LIBRARY_NOT_FOUND or path is None:
                raise
            try:
                self._module.nvmlLib = ctypes.CDLL(path)
            except OSError as error:
                raise NvmlRefused(BROKEN, f"NVML's library can't be loaded: {error}") from error
            self.call("nvmlInit")

    def call(self, function: str, *arguments: t.Any) -> t.Any:
        try:
            return getattr(self._module, function)(*arguments)
        except self._module.NVMLError as error:
            raise NvmlRefused(_code(error)) from error
        except UnicodeDecodeError as error:
            return error.object.decode("utf-8", "replace")
        except AttributeError as error:
            # The node's own binding may be too old for it.
            raise NvmlRefused(FUNCTION_NOT_FOUND) from error
        except Exception as error:
            # For example MemoryError, if NVML reports an implausible number of entries.
            raise NvmlRefused(BROKEN, f"nvidia-ml-py failed with {type(error).__name__}") from error

    def memory(self, handle: t.Any) -> t.Mapping[str, t.Any]:
        try:
            version = getattr(self._module, "nvmlMemory_v2", None)
            if version is None:
                raise NvmlRefused(FUNCTION_NOT_FOUND)
            answer, keys = self.call("nvmlDeviceGetMemoryInfo", handle, version), ("total", "used", "free", "reserved")
        except NvmlRefused as refused:
            if refused.code not in (INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, VERSION_MISMATCH, BROKEN):
                raise
            answer, keys = self.call("nvmlDeviceGetMemoryInfo", handle), ("total", "used", "free", "")
        return {key: getattr(answer, key, None) for key in keys if key}

    def field(self, handle: t.Any, name: str) -> t.Any:
        number = getattr(self._module, name, None)
        if number is None:
            raise NvmlRefused(FUNCTION_NOT_FOUND)
        answers = self.call("nvmlDeviceGetFieldValues", handle, [number])
        try:
            code, kind, value = int(answers[0].nvmlReturn), int(answers[0].valueType), answers[0].value
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise NvmlRefused(BROKEN, "the field has no value") from error
        if code or kind not in MEMBERS:
            # A driver that doesn't know the field reports an invalid argument.
            raise NvmlRefused(NOT_SUPPORTED if code in (0, INVALID_ARGUMENT) else code)
        return getattr(value, MEMBERS[kind], None)

    def fabric(self, handle: t.Any) -> tuple[t.Any, t.Any]:
        make = getattr(self._module, "c_nvmlGpuFabricInfo_t", None)
        if make is None:
            raise NvmlRefused(FUNCTION_NOT_FOUND)
        answer = make()
        self.call("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(answer))
        return answer.state, answer.status

    def limit(self, handle: t.Any, folder: str) -> tuple[t.Any, t.Any, t.Any]:
        make = getattr(self._module, "c_nvmlGetMemoryLimits_v1_t", None)
        if make is None:
            raise NvmlRefused(FUNCTION_NOT_FOUND)
        answer = make(nameSpace=os.fsencode(folder))
        try:
            self.call("nvmlDeviceGetMemoryLimits_v1", handle, answer)
        except NvmlRefused as refused:
            if not os.path.isdir(folder):
                raise NvmlRefused(NOT_FOUND) from refused
            raise
        return answer.softLimit, answer.hardLimit, answer.currentUsed

    def has(self, function: str) -> bool:
        # ctypes looks the function up in the library.
        return hasattr(self._module, function) and hasattr(self._module.nvmlLib, function)


def _code(error: t.Any) -> int:
    try:
        return int(error.value)
    except (AttributeError, TypeError, ValueError):
        return BROKEN
