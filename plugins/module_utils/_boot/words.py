# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's command line: its words, what they come to, and changes that keep every other byte. Pure."""

from __future__ import annotations

import re
import typing as t

# What follows it isn't the kernel's but init's.
END = "--"
# A word of the command line; a blank inside double quotes is part of it.
_WORD = re.compile(r'(?:"[^"]*"?|[^\s"])+')
# No character that a shell, GRUB's scripts or an entry of the Boot Loader Specification takes as anything else.
ARGUMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:=[A-Za-z0-9_.,:=+/@%-]*)?")
# Values of these are lists, of which the later entry of a pair counts, over all words of that name.
_PAIRS: t.Mapping[str, tuple[tuple[str, str], ...]] = {
    "intel_iommu": (("on", "off"), ("sm_on", "sm_off")),
    "iommu": (("pt", "nopt"), ("force", "off")),
}
# Names that may stand there several times, each with a meaning of its own.
SEVERAL = frozenset(
    (
        *("console", "earlycon", "earlyprintk", "hugepages", "hugepagesz", "module_blacklist", "modprobe.blacklist"),
        *("pci", "rd.driver.pre", "rd.driver.post", "rd.driver.blacklist", "video", "systemd.mask", "systemd.wants"),
        *("dyndbg", "systemd.setenv", "rd.lvm.lv", "rd.luks.uuid", "rd.md.uuid", "ip", "nameserver", "memmap"),
    )
)


def split(text: str) -> list[str]:
    """Return the words as the kernel splits them."""
    return _WORD.findall(text)


def of_kernel(words: t.Iterable[str]) -> list[str]:
    """Return the words before ``--``: the others are init's."""
    before = []
    for word in words:
        if word == END:
            break
        before.append(word)
    return before


def name_of(word: str) -> str:
    """Return a word's name; the kernel takes ``-`` and ``_`` in it as the same character."""
    return word.strip('"').partition("=")[0].replace("-", "_")


def value_of(word: str) -> str:
    """Return a word's value without its quotes; empty without one."""
    whole = word[1:-1] if len(word) > 1 and word[0] == word[-1] == '"' else word
    return whole.partition("=")[2].strip('"')


def effective(argument: str, words: t.Sequence[str]) -> bool:
    """Return whether an argument has its effect in a command line.

    :param words: of the kernel; a later one overrides an earlier one.
    """
    name, value = name_of(argument), value_of(argument)
    same = [word for word in words if name_of(word) == name]
    if name in _PAIRS:
        return not conflict(argument, words) and set(value.split(",")) <= set(_entries(same))
    values = [(value_of(word), "=" in word) for word in same]
    wanted = (value, "=" in argument)
    return wanted in values if name in SEVERAL else values[-1:] == [wanted]


def conflict(argument: str, words: t.Sequence[str]) -> str:
    """Return the word that says the opposite of an argument; empty where none does.

    :param words: of the kernel.
    """
    name, value = name_of(argument), value_of(argument)
    same = [word for word in words if name_of(word) == name]
    if name == "intel_iommu" and "on" in value.split(","):
        # Either turns off every IOMMU, wherever it stands.
        off = [word for word in words if name_of(word) == "iommu" and "off" in value_of(word).split(",")]
        if off:
            return off[-1]
    if name == "iommu" and "pt" in value.split(","):
        same += [word for word in words if name_of(word) == "iommu.passthrough"]
    if name in _PAIRS:
        return _opposite(name, value, same)
    if name in SEVERAL:
        return ""
    other = [word for word in same if (value_of(word), "=" in word) != (value, "=" in argument)]
    return other[-1] if other else ""


def _opposite(name: str, value: str, words: t.Sequence[str]) -> str:
    for word in words:
        if name_of(word) == "iommu.passthrough" and value_of(word).lower() in ("0", "n", "no", "off"):
            return word
    for pair in _PAIRS[name]:
        for wanted in set(pair).intersection(value.split(",")):
            said = [(entry, word) for word in words for entry in value_of(word).split(",") if entry in pair]
            if said and said[-1][0] != wanted:
                return said[-1][1]
    return ""


def _entries(words: t.Iterable[str]) -> list[str]:
    return [entry for word in words for entry in value_of(word).split(",")]


def switched_off(words: t.Sequence[str], table: str) -> str:
    """Return the word that turns the machine's IOMMU off; empty where none does.

    :param table: the firmware's, which says whose IOMMU it is.
    """
    found = _opposite("intel_iommu", "on", [word for word in words if name_of(word) == "intel_iommu"])
    names = ("iommu", "amd_iommu") if table == "IVRS" else ("iommu",)
    off = [word for word in words if name_of(word) in names and "off" in value_of(word).split(",")]
    return (found if table == "DMAR" else "") or (off[-1] if off else "")


def add(text: str, arguments: t.Sequence[str]) -> str:
    """Return a command line with more arguments, before ``--`` where there is one."""
    if not arguments:
        return text
    more = " ".join(arguments)
    for match in _WORD.finditer(text):
        if match.group() == END:
            return f"{text[: match.start()]}{more} {text[match.start() :]}"
    end = len(text.rstrip())
    return f"{text[:end]}{' ' if end else ''}{more}{text[end:]}"


def remove(text: str, arguments: t.Collection[str]) -> str:
    """Return a command line without the words that are one of these arguments, and without one blank of each."""
    for match in reversed(list(_WORD.finditer(text))):
        if match.group() not in arguments:
            continue
        start, end = match.span()
        if start and text[start - 1] in " \t":
            start -= 1
        elif text[end : end + 1] in (" ", "\t"):
            end += 1
        text = text[:start] + text[end:]
    return text
