# SPDX-License-Identifier: GPL-3.0-or-later
"""Configurations of containerd from practice, changed by this collection and by nvidia-ctk, and their validation.

``corpus/containerd/<name>/`` holds the files under their paths and ``meta.yml``::

    what: a sentence
    origin: where such a file comes from
    releases: [...]        # of containerd; all where it isn't given
    generate: default      # the file is what that containerd prints
    replace: {old: new}    # in a generated file
    spelling: [crlf, bom, latin-1]
    present: [...]         # paths that exist on the node
    options: {...}         # of the role beside its defaults
    refused: [{releases: [...], words: a pattern}]   # all others are configured
    systemd_cgroup: ...    # what nvidia has to have
    runtimes: [...]        # what there is in the end
    takes_effect: [...]    # the user's keys that containerd ignores without a table of runtimes

Every ``/etc/containerd`` in them becomes a folder of the test's own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
import typing as t
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import real_containerd
import real_parts
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._documents.toml_editor import MARK
from ansible_collections.kubegpu.share.plugins.module_utils._host.file_transaction import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.common import RuntimePlan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_apply import (
    CRI_PARTS,
    SETTINGS,
    ContainerdEngine,
)
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_plan import make_plan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.engine import ConfigUpdate

from lab.paths import cache_root

CORPUS = Path(__file__).parent / "corpus" / "containerd"
BINARY = "/usr/bin/nvidia-container-runtime"
ETC = "/etc/containerd"
MAIN = f"{ETC}/config.toml"
RECORD = "/record"
Flat = dict[tuple[str, ...], t.Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration; ``refused`` are the words with which it has to be refused, by release."""

    name: str
    what: str
    releases: tuple[str, ...]
    refused: dict[str, str]
    meta: dict[str, t.Any]

    def options(self, present: bool = True) -> Options:
        return Options(present=present, binary=BINARY, **self.meta.get("options", {}))

    def texts(self, release: str) -> dict[str, bytes]:
        found = {path: text.decode() for path, text in texts_in(CORPUS / self.name).items() if path != "/meta.yml"}
        if "generate" in self.meta:
            found[MAIN] = default_of(release)
            for old, new in self.meta.get("replace", {}).items():
                found[MAIN] = found[MAIN].replace(old, new)
        return {path: spelled(text, self.meta.get("spelling", [])) for path, text in found.items()}


def texts_in(root: Path) -> dict[str, bytes]:
    return {str(path).removeprefix(str(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def put(root: Path, texts: dict[str, bytes]) -> None:
    """Write these files, and remove all others."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, text in texts.items():
        path = Path(f"{root}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def spelled(text: str, ways: list[str]) -> bytes:
    text = text.replace("\n", "\r\n") if "crlf" in ways else text
    return text.encode("latin-1" if "latin-1" in ways else "utf-8-sig" if "bom" in ways else "utf-8")


@cache
def rows() -> tuple[Row, ...]:
    found = []
    for path in sorted(CORPUS.glob("*/meta.yml")):
        meta = yaml.safe_load(path.read_text())
        refused = {release: one["words"] for one in meta.get("refused", []) for release in one["releases"]}
        releases = tuple(meta.get("releases", real_containerd.RELEASES))
        found.append(Row(path.parent.name, meta["what"], releases, refused, meta))
    return tuple(found)


@cache
def default_of(release: str) -> str:
    binary = real_containerd.find(release)
    return subprocess.run([binary, "config", "default"], capture_output=True, text=True, check=True).stdout


@cache
def _identity(binary: str) -> str:
    status = os.stat(binary)
    return f"{binary} {status.st_size} {status.st_mtime_ns}"


class Node(real_containerd.Machine):
    """A simulated node with a real containerd, whose dump of the same files is cached."""

    def __init__(self, row: Row, release: str, root: Path) -> None:
        self.release, self.root = release, root
        self.binary = real_containerd.find(release)
        self._present = row.meta.get("present", [])
        self.put(row.texts(release))
        super().__init__(self.binary, f"{root}{MAIN}")

    def put(self, texts: dict[str, bytes]) -> None:
        here = f"{self.root}{ETC}".encode()
        put(self.root, {path: text.replace(ETC.encode(), here) for path, text in texts.items()})

    def texts(self) -> dict[str, bytes]:
        here = f"{self.root}{ETC}".encode()
        return {path: text.replace(here, ETC.encode()) for path, text in texts_in(self.root).items()}

    def exists(self, path: str) -> bool:
        return path == BINARY or path in self._present or super().exists(path)

    def observe(self) -> dict[str, t.Any]:
        seen = containerd.observe(self)
        assert seen is not None
        return seen

    def dump(self) -> tuple[str, str]:
        return containerd.dump(self, self.binary, f"{self.root}{MAIN}")

    def _run_it(self, argv, data=None, environ_update=None):  # type: ignore[no-untyped-def]
        if "config" not in argv:
            return super()._run_it(argv, data, environ_update)
        # The record has times, and containerd doesn't read it.
        read = (text for text in self.texts().items() if not text[0].startswith(RECORD))
        parts = [_identity(self.binary), argv[-1], *(repr(one) for one in read)]
        kept = cache_root() / "dumps" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        if not kept.exists():
            answer = super()._run_it(argv, data, environ_update)
            kept.parent.mkdir(parents=True, exist_ok=True)
            fresh = kept.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(answer).replace(str(self.root), "@ROOT@"))
            fresh.rename(kept)
        return tuple(json.loads(kept.read_text().replace("@ROOT@", str(self.root))))


@dataclasses.dataclass
class Outcome:
    """What became of one configuration on one release.

    :param refused: the message of the refusal; empty where the files were changed.
    :param wrong: what is wrong with the result, in a few words each; none where it is right.
    """

    refused: str = ""
    wrong: list[str] = dataclasses.field(default_factory=list)
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    cri: dict[str, t.Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Cell:
    """One configuration on one release: ours, and NVIDIA's tool beside it."""

    row: Row
    release: str
    before: dict[str, bytes]
    ours: Outcome
    theirs: Outcome | None = None


@cache
def nvidia_ctk() -> str:
    try:
        return str(real_parts.built("toolkit") / "nvidia-ctk")
    except real_parts.Missing:
        return ""


def product(releases: tuple[str, ...]) -> tuple[tuple[Row, str], ...]:
    """Return every configuration with each of these releases that it is for."""
    return tuple((row, release) for row in rows() for release in row.releases if release in releases)


def sample(releases: tuple[str, ...]) -> tuple[tuple[Row, str], ...]:
    """Return every configuration with one of these releases, in turn, and with all that refuse it."""
    found = []
    for number, row in enumerate(rows()):
        able = [release for release in releases if release in row.releases]
        one = able[number % len(able)] if able else ""
        found += [(row, release) for release in able if release == one or release in row.refused]
    return tuple(found)


@cache
def results(releases: tuple[str, ...], compare: bool = False, whole: bool = True) -> dict[tuple[str, str], Cell]:
    """Apply the corpus to releases of containerd.

    :param compare: apply it by nvidia-ctk too.
    :param whole: every configuration to each release; otherwise the sample.
    :returns: the cells of all available releases.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Downloads and builds happen before the processes start.
        if compare:
            nvidia_ctk()
        available = [release for release in releases if there(release)]
        chosen = (product if whole else sample)(releases)
        cells = [(row, release, Path(folder), compare) for row, release in chosen if release in available]
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
            return {
                (cell.row.name, cell.release): cell
                for cell in pool.map(configured, *zip(*cells, strict=True), chunksize=8)
            }


def there(release: str) -> bool:
    with contextlib.suppress(real_parts.Missing):
        return bool(real_containerd.find(release))
    return False


def configured(row: Row, release: str, folder: Path, compare: bool = False) -> Cell:
    """Configure one row on one release, and validate the result.

    :param folder: for the node's files, which are removed.
    :param compare: configure it by nvidia-ctk too.
    """
    root = folder / f"{row.name}-{release}"
    node = Node(row, release, root)
    before = node.texts()
    dumped = node.dump()[0]
    cell = Cell(row, release, before, _ours(node, row, before, dumped))
    if compare and nvidia_ctk():
        node.put(before)
        cell.theirs = _nvidia_ctk(node, row, before, dumped)
    shutil.rmtree(root, ignore_errors=True)
    return cell


def drive(node: Node, options: Options, serves_kubelet: bool = False) -> RuntimePlan:
    """Plan and apply as the action plugin and the module do: with containerd's validation and the guard of losses.

    :param serves_kubelet: the node's kubelet uses this containerd.
    :raises BadInput: it is refused; no file was changed.
    :raises NotInEffect: it was rolled back.
    """
    planned = make_plan(options, node.observe(), serves_kubelet)
    if not planned.plan.empty:
        engine = ContainerdEngine(node, options, planned.expected, planned.users_default)
        engine.record = f"{node.root}{RECORD}/containerd.json"
        ConfigUpdate(node, engine, timeout=0).run(replacements(planned.files))
    return planned


def _ours(node: Node, row: Row, before: dict[str, bytes], dumped: str) -> Outcome:
    try:
        drive(node, row.options())
    except ShareError as error:
        wrong = [] if node.texts() == before else ["changes files and refuses"]
        if not isinstance(error, BadInput):
            wrong.append(f"is rolled back: {error}")
        return Outcome(refused=str(error).replace(f"{node.root}/", "/"), wrong=wrong)
    after = node.texts()
    outcome = validate(node, row, before, dumped)
    outcome.wrong += _foreign_lines(before, after)
    less, absent = dataclasses.replace(row.options(), default=False, cdi=False), Options(present=False)
    try:
        if not drive(node, row.options()).plan.empty:
            outcome.wrong.append("a second run changes something")
        drive(node, absent)
        if node.texts() != before:
            outcome.wrong.append("the removal doesn't restore the files")
        elif not drive(node, absent).plan.empty:
            outcome.wrong.append("a second removal changes something")
        node.put(before)
        drive(node, less)
        direct = node.texts()
        node.put(after)
        drive(node, less)
        if node.texts() != direct:
            outcome.wrong.append("set_default and cdi aren't taken back")
        drive(node, absent)
        if node.texts() != before:
            outcome.wrong.append("the removal after set_default: false doesn't restore the files")
    except ShareError as error:
        outcome.wrong.append(f"a later run fails: {error}")
    return outcome


def _nvidia_ctk(node: Node, row: Row, before: dict[str, bytes], dumped: str) -> Outcome:
    etc = f"{node.root}{ETC}"
    options = (f"--config={etc}/config.toml", f"--drop-in-config={etc}/conf.d/99-nvidia.toml")
    refused = run_nvidia_ctk(node.root, "containerd", *options)
    if refused:
        return Outcome(refused=refused, wrong=[] if node.texts() == before else ["and leaves changed files"])
    outcome = validate(node, row, before, dumped)
    outcome.wrong += lost_comments(before, node.texts())
    return outcome


def run_nvidia_ctk(root: Path, runtime: str, *options: str) -> str:
    """Configure a runtime by NVIDIA's tool; return its error, or nothing."""
    command = [nvidia_ctk(), "runtime", "configure", f"--runtime={runtime}", *options, "--set-as-default"]
    command += ["--cdi.enabled", f"--nvidia-runtime-path={BINARY}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if not done.returncode:
        return ""
    words = "panics" if "panic:" in done.stderr else done.stderr.strip().splitlines()[-1].replace(f"{root}/", "/")
    return re.sub(r'^.*?level=\w+ msg="?|"$', "", words)


def lost_comments(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    lost = sum((comments(before) - comments(after)).values())
    return [f"{lost} comment{'s' if lost > 1 else ''} lost"] if lost else []


def validate(node: Node, row: Row, before: dict[str, bytes], dumped: str) -> Outcome:
    """Compare what the real containerd reads from the files now with what it read before."""
    text, error = node.dump()
    outcome = Outcome(files=node.texts())
    if error or not text:
        words = error.rpartition(": ")[2] if error.startswith("containerd: failed") else error
        outcome.wrong.append(f"containerd doesn't start: {words}")
        return outcome
    was, now = tomllib.loads(dumped) if dumped else {}, tomllib.loads(text)
    outcome.cri = cri = cri_of(now)
    old = cri_of(was)
    tables = cri.get("containerd", {})
    disabled = [
        disabled_plugin
        for disabled_plugin in now.get("disabled_plugins") or []
        if disabled_plugin == "cri" or ".cri" in disabled_plugin
    ]
    if disabled or not cri:
        outcome.wrong.append("the CRI stays disabled")
        return outcome
    name = "default" if tables.get("default_runtime", {}).get("runtime_type") else tables.get("default_runtime_name")
    if name != "nvidia":
        outcome.wrong.append(f"the default is {name or 'none'}")
    elif old_setting := [key for key, table in (("systemd_cgroup", cri), ("no_pivot", tables)) if table.get(key)]:
        outcome.wrong.append(f"the CRI doesn't load: {old_setting[0]}")
    ours = tables.get("runtimes", {}).get("nvidia")
    if ours is None:
        outcome.wrong.append("no runtime nvidia: the CRI doesn't load" if name == "nvidia" else "no runtime nvidia")
        return outcome
    if ours.get("runtime_engine") and ours.get("runtime_type") != "io.containerd.runtime.v1.linux":
        outcome.wrong.append("the CRI doesn't load: runtime_engine")
    if ours.get("runtime_type") not in containerd.RUNC_SHIMS:
        outcome.wrong.append(f"nvidia by the shim {ours.get('runtime_type')}")
    binaries = {value for key, value in ours.get("options", {}).items() if key.lower() == "binaryname"}
    if binaries != {BINARY}:
        outcome.wrong.append(f"nvidia runs {' or '.join(sorted(map(str, binaries))) or 'nothing of NVIDIA'}")
    runc = tables.get("runtimes", {}).get("runc", {})
    wanted = row.meta.get("systemd_cgroup")
    if wanted is None:
        wanted = _systemd(runc) == {True} if runc.get("runtime_type") in containerd.RUNC_SHIMS else None
    if (wanted is not None and _systemd(ours) - {wanted}) or (wanted and not _systemd(ours)):
        outcome.wrong.append(f"nvidia {'without' if wanted else 'with'} SystemdCgroup")
    if "runtimes" in row.meta and sorted(tables["runtimes"]) != row.meta["runtimes"]:
        outcome.wrong.append(f"the runtimes are {', '.join(sorted(tables['runtimes']))}")
    if dumped:
        # Of files that containerd couldn't read there are no settings that could be lost.
        hidden = not old or bool(row.meta.get("options", {}).get("enable_cri"))
        outcome.wrong += _lost(was, now, hidden, row.meta.get("takes_effect", []))
    return outcome


def _systemd(runtime: dict[str, t.Any]) -> set[bool]:
    return {bool(value) for key, value in runtime.get("options", {}).items() if key.lower() == "systemdcgroup"}


def cri_of(dump: dict[str, t.Any]) -> dict[str, t.Any]:
    plugins = dump.get("plugins", {})
    return dict(plugins.get(containerd.CRI_PLUGIN[3]) or plugins.get(containerd.CRI_PLUGIN[2]) or {})


def _lost(was: dict[str, t.Any], now: dict[str, t.Any], hidden: bool, takes_effect: list[str]) -> list[str]:
    """List changed settings of others.

    :param was: the dump before.
    :param now: the dump after.
    :param hidden: the CRI plugin was disabled before.
    :param takes_effect: keys of the user's that containerd ignores before the change.
    """
    plugins = (containerd.CRI_PLUGIN[3], containerd.CRI_PLUGIN[2])
    ours = {("imports",), ("version",)} | ({("disabled_plugins",)} if hidden else set())
    ours |= {("plugins", plugin, *key) for plugin in plugins for key in SETTINGS}
    tables = [("plugins", plugin, "containerd", "runtimes", "nvidia") for plugin in plugins]
    if hidden:
        tables += [("plugins", cri_part) for cri_part in CRI_PARTS]

    def theirs(tree: dict[str, t.Any]) -> Flat:
        return {
            path: value
            for path, value in _flat(tree).items()
            if path not in ours
            and not any(path[: len(table)] == table for table in tables)
            and value not in ("", 0, [], {})
        }

    old, new = theirs(was), theirs(now)
    changed = sorted({path for path in {*old, *new} if old.get(path) != new.get(path) and path[-1] not in takes_effect})
    if not changed:
        return []
    names = list(dict.fromkeys(".".join(path[-2:] if path[-1] == "SystemdCgroup" else path[-1:]) for path in changed))
    shown = ", ".join(names[:3]) + (", …" if names[3:] else "")
    return [f"{len(changed)} other setting{'s' if changed[1:] else ''} changed ({shown})"]


def _flat(tree: t.Any, path: tuple[str, ...] = ()) -> Flat:
    if not isinstance(tree, dict):
        return {path: tree}
    found: Flat = {}
    for key, value in tree.items():
        found.update(_flat(value, (*path, key)))
    return found


_PIECES = re.compile(r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)


def comments(files: dict[str, bytes]) -> collections.Counter[str]:
    """Count the comments of all files, without what this collection has added to them."""
    found: collections.Counter[str] = collections.Counter()
    for text in files.values():
        pieces = (match.group() for match in _PIECES.finditer(text.decode(errors="replace")))
        found.update(piece.partition(MARK)[0].rstrip() for piece in pieces if piece.startswith("#"))
    return found


def _foreign_lines(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """List changed lines outside of our keys."""
    wrong = [f"{path} is gone" for path in before if path not in after]
    for path in before.keys() & after.keys():
        lines = changed_lines(before[path].decode(errors="replace"), after[path].decode(errors="replace"))
        wrong += [f"changed in {path}: {line!r}" for line in lines]
    return wrong


def changed_lines(old: str, new: str) -> Iterator[str]:
    """Yield lines of the old text that the new one lacks, except keys of ours with our note beside them."""
    a, b = old.splitlines(), new.splitlines()
    for kind, a1, a2, b1, b2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind in ("equal", "insert"):
            continue
        instead = b[b1:b2]
        for line in a[a1:a2]:
            key = line.partition("=")[0].strip()
            noted = [one for one in instead if MARK in one and key and one.partition("=")[0].strip() == key]
            longer = [one for one in instead if one.startswith(line.rstrip().rstrip("]")) and "kubegpu" in one]
            within = [one for one in b if f"{MARK}, was" in one and line.strip() in one]
            comma = [
                one for one in instead if one in (f"{line},", line.replace(" #", ", #", 1), line.replace("'", "',", 2))
            ]
            if line.strip() and not noted and not longer and not within and not comma:
                yield line


def explain(cell: Cell) -> str:
    """Return the files of a cell, for a failed assertion."""
    return "\n".join(f"--- {path}\n{text.decode(errors='replace')}" for path, text in cell.ours.files.items())
