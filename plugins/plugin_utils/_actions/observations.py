# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of what modules observe on machines, which are held where their results reach the controller.

They are compared with the module's own types (``GpuNode`` and the like): a key that is missing or unknown, a value of
another type, and a text that doesn't have its form fail the task of that machine. All plans and templates come after.
"""

from __future__ import annotations

import functools
import re
import types
import typing as t

from ...module_utils._check.virtual_node import Evidence
from ...module_utils._core.types import JsonObject
from ...module_utils._kubelet.types import KubeletDevices
from ...module_utils._node.types import GpuNode
from ...module_utils._nvml.types import NvmlFacts
from ...module_utils._scheduler.control_plane import ControlPlane

# By module, its results' keys.
OBSERVATIONS: t.Mapping[str, t.Mapping[str, t.Any]] = {
    "gpu_node_info": {"gpu_node": GpuNode},
    "control_plane_info": {"control_plane": ControlPlane, "gpu_node": GpuNode},
    "nvml_info": {"nvml": NvmlFacts, "virtual_machines": bool},
    "kubelet_devices_info": {"kubelet": KubeletDevices},
    "virtual_machines_info": {"virtual_machines": Evidence},
}
# In one observation; that of a machine with eight cards and a thousand packages has some 300,000 characters.
MOST_CHARACTERS = 16 << 20
MOST_VALUES = 500_000
# In one text; files of configuration and what daemons print have less than 64 Ki.
LONGEST_TEXT = 256 << 10
# In one number: Python converts no text to or from a longer one. Counters of machines have 64 bits.
MOST_DIGITS = 4000
LARGEST_NUMBER = 1 << 64
# In a value without a type of its own, such as a user's JSON.
MOST_LEVELS = 30
SHOWN = 60

_DIGITS = re.compile(r"\d+")

Check = t.Callable[[t.Any, str, "_Budget"], None]


class _Mistyped(Exception):
    """The sentence about a value, which names its place."""


class _Budget:
    """What is left of an observation's size."""

    def __init__(self) -> None:
        self.characters, self.values = MOST_CHARACTERS, MOST_VALUES

    def take(self, characters: int = 0) -> None:
        self.values -= 1
        self.characters -= characters
        if self.values < 0 or self.characters < 0:
            raise _Mistyped("it is larger than any machine's")


def problem(module: str, result: t.Mapping[str, t.Any]) -> str:
    """Return what is wrong with a module's observation as a sentence; empty where it is as promised.

    :param module: its name without the collection's.
    :param result: its result; a key that isn't there was not observed.
    """
    for key, promised in OBSERVATIONS.get(module, {}).items():
        if result.get(key) is None:
            continue
        try:
            _check(promised)(result[key], key, _Budget())
        except _Mistyped as error:
            return (
                f"The machine's answer isn't what {module} returns: {error}. Nothing of it is used; find out what "
                "answers there."
            )
    return ""


def prepare() -> None:
    """Make all checks, so that processes that are started later have them."""
    for promised in OBSERVATIONS.values():
        for shape in promised.values():
            _check(shape)


@functools.cache
def _check(promised: t.Any) -> Check:
    """Return the check of a type."""
    origin, arguments = t.get_origin(promised), t.get_args(promised)
    if origin is t.Annotated:
        return _formed(str(arguments[1]))
    if t.is_typeddict(promised):
        return _fields(promised)
    if origin in (t.Union, types.UnionType):
        return _any_of([_check(argument) for argument in arguments])
    if promised is t.Any or promised is JsonObject:
        return _plain
    if origin is list:
        return _list(_check(arguments[0]))
    if origin is not None and issubclass(origin, t.Mapping):
        return _mapping(_check(arguments[1]))
    return _scalar(promised)


def _fields(promised: t.Any) -> Check:
    hints = t.get_type_hints(promised, include_extras=True)
    checks = {name: _check(hint) for name, hint in hints.items()}
    required = promised.__required_keys__

    def check(value: t.Any, place: str, budget: _Budget) -> None:
        if not isinstance(value, dict):
            raise _Mistyped(f"{place} is {_named(value)}, not a dictionary")
        budget.take()
        for name in required:
            if name not in value:
                raise _Mistyped(f"{place} has no {name}")
        for name, item in value.items():
            if name not in checks:
                raise _Mistyped(f"{place} has the unknown key {_shown(name)}")
            checks[name](item, f"{place}.{name}", budget)

    return check


def _any_of(checks: t.Sequence[Check]) -> Check:
    def check(value: t.Any, place: str, budget: _Budget) -> None:
        problems = []
        for check in checks:
            try:
                return check(value, place, budget)
            except _Mistyped as error:
                problems.append(error)
        raise problems[0]

    return check


def _list(item: Check) -> Check:
    def check(value: t.Any, place: str, budget: _Budget) -> None:
        if not isinstance(value, list):
            raise _Mistyped(f"{place} is {_named(value)}, not a list")
        budget.take()
        for number, member in enumerate(value):
            item(member, f"{place}[{number}]", budget)

    return check


def _mapping(item: Check) -> Check:
    def check(value: t.Any, place: str, budget: _Budget) -> None:
        if not isinstance(value, dict):
            raise _Mistyped(f"{place} is {_named(value)}, not a dictionary")
        budget.take()
        for name, member in value.items():
            _text(name, place, budget)
            item(member, f"{place}.{_shown(name)}", budget)

    return check


def _scalar(promised: t.Any) -> Check:
    if promised is str:
        return _text
    accepted = (int, float) if promised is float else promised

    def check(value: t.Any, place: str, budget: _Budget) -> None:
        budget.take()
        if not isinstance(value, accepted) or (isinstance(value, bool) and promised is not bool):
            raise _Mistyped(f"{place} is {_named(value)}, not {getattr(promised, '__name__', promised)}")
        _bounded(value, place)

    return check


def _text(value: t.Any, place: str, budget: _Budget) -> None:
    if not isinstance(value, str):
        raise _Mistyped(f"{place} is {_named(value)}, not text")
    budget.take(len(value))
    if len(value) > LONGEST_TEXT:
        raise _Mistyped(f"{place} is longer than any machine's")
    if len(value) > MOST_DIGITS and any(len(digits) > MOST_DIGITS for digits in _DIGITS.findall(value)):
        raise _Mistyped(f"{place} has a number that is longer than any machine's")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Mistyped(f"{place} isn't valid text") from None


def _bounded(value: t.Any, place: str) -> None:
    # Not a number compares as false.
    if isinstance(value, (int, float)) and not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise _Mistyped(f"{place} is a number that no machine has")


def _formed(form: str) -> Check:
    pattern = re.compile(form)

    def check(value: t.Any, place: str, budget: _Budget) -> None:
        _text(value, place, budget)
        if not pattern.fullmatch(value):
            raise _Mistyped(f"{place} is {_shown(value)}, which doesn't have the form {form}")

    return check


def _plain(value: t.Any, place: str, budget: _Budget, levels: int = MOST_LEVELS) -> None:
    """Check a value without a type of its own: it is bounded."""
    if not levels:
        raise _Mistyped(f"{place} is nested too deep")
    if isinstance(value, str):
        return _text(value, place, budget)
    budget.take()
    _bounded(value, place)
    if isinstance(value, dict):
        for name, item in value.items():
            _text(name, place, budget)
            _plain(item, place, budget, levels - 1)
    elif isinstance(value, list):
        for item in value:
            _plain(item, place, budget, levels - 1)
    return None


def _named(value: t.Any) -> str:
    """Return a type for people."""
    names = {dict: "a dictionary", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "a number")


def _shown(value: t.Any) -> str:
    """Return a text of the machine's for a sentence: printable and short."""
    return ascii(str(value)[:SHOWN])
