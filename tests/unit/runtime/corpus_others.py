# SPDX-License-Identifier: GPL-3.0-or-later
"""Configurations of Docker and CRI-O from practice, beside those of containerd.

``corpus/docker/<name>/`` and ``corpus/crio/<name>/`` are laid out as containerd's are; ``refused`` is a pattern here.
Docker's results are validated by real daemons (``dockerd --validate``); CRI-O isn't available as a
program of its own, so ``crio_merged`` implements its documented rules of merging again.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import tempfile
import tomllib
import typing as t
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import corpus_containerd
import real_dockerd
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import crio_plan, docker
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import docker_plan as runtime_docker
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from runtime_kit import ABSENT, BINARY, DAEMON_JSON, PRESENT, docker_state

CORPUS = Path(__file__).parent / "corpus"
Outcome = corpus_containerd.Outcome


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration; ``refused`` is a pattern, empty where it is configured."""

    name: str
    what: str
    meta: dict[str, t.Any]
    texts: dict[str, bytes]

    @property
    def refused(self) -> str:
        return str(self.meta.get("refused", ""))

    @property
    def wanted(self) -> Options:
        """Return the requested state, with the row's own options."""
        return dataclasses.replace(PRESENT, **self.meta.get("options", {}))


@cache
def rows(engine: str) -> tuple[Row, ...]:
    found = []
    for path in sorted((CORPUS / engine).glob("*/meta.yml")):
        meta = yaml.safe_load(path.read_text())
        texts = {
            name: corpus_containerd.spelled(text.decode(), meta.get("spelling", []))
            for name, text in corpus_containerd.texts_in(path.parent).items()
            if name != "/meta.yml"
        }
        found.append(Row(path.parent.name, meta["what"], meta, texts))
    return tuple(found)


@dataclasses.dataclass
class Cell:
    row: Row
    ours: Outcome
    theirs: Outcome | None = None


@cache
def results(engine: str, compare: bool = False) -> dict[str, Cell]:
    """Apply the corpus.

    :param compare: apply it by nvidia-ctk too.
    """
    ours, theirs = {"docker": (_ours_docker, _theirs_docker), "crio": (_ours_crio, _theirs_crio)}[engine]
    compare = compare and bool(corpus_containerd.nvidia_ctk())

    def cell_of(row: Row) -> Cell:
        return Cell(row, ours(row), theirs(row, Path(folder) / row.name) if compare else None)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        return {cell.row.name: cell for cell in pool.map(cell_of, rows(engine))}


def _nvidia_ctk(root: Path, row: Row, runtime: str, *options: str) -> tuple[dict[str, bytes], Outcome]:
    """Configure by NVIDIA's tool; return the files and its error."""
    corpus_containerd.put(root, row.texts)
    refused = corpus_containerd.run_nvidia_ctk(root, runtime, *options)
    after = corpus_containerd.texts_in(root)
    wrong = ["panics"] if refused == "panics" else []
    wrong += ["leaves changed files"] if refused and after != row.texts else []
    return after, Outcome(refused=refused, wrong=wrong)


# --------------------------------------------------------------------------- Docker


def _theirs_docker(row: Row, root: Path) -> Outcome:
    after, outcome = _nvidia_ctk(root, row, "docker", f"--config={root}{DAEMON_JSON}")
    if not outcome.refused:
        outcome.wrong = _validate_docker(row.texts.get(DAEMON_JSON), after.get(DAEMON_JSON))
    return outcome


def _docker_state(text: bytes | None, error: str, was: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
    stopped = {"service_active": False, "answers": False, "default_runtime": "", "runtimes": {}, "cgroup_driver": ""}
    stopped |= {"version": "28.5.2", "live_restore": True, "error": error, "was": was, "ours": was is not None}
    return docker_state(None if text is None else docker.mask(text.decode(errors="replace")), **stopped)


def _ours_docker(row: Row) -> Outcome:
    before = row.texts.get(DAEMON_JSON)
    error = _refuses(before) if before is not None else ""
    try:
        planned = runtime_docker.make_plan(row.wanted, _docker_state(before, error))
    except BadInput as refusal:
        return Outcome(refused=str(refusal))
    after = before
    for file in planned.files:
        after = docker.unmask(file["after"], (before or b"").decode()).encode()
    outcome = Outcome(files={DAEMON_JSON: after or b""}, wrong=_validate_docker(before, after))
    was = {"text": None if before is None else docker.mask(before.decode()), "untouched": True}
    again = runtime_docker.make_plan(row.wanted, _docker_state(after, "", was))
    if again.files:
        outcome.wrong.append("a second run changes something")
    (back,) = runtime_docker.make_plan(ABSENT, _docker_state(after, "", was)).files or ({"after": None},)
    text = None if back["after"] is None else docker.unmask(back["after"], (before or b"").decode()).encode()
    if planned.files and text != before:
        outcome.wrong.append("the removal doesn't restore the file")
    return outcome


@cache
def _refuses(text: bytes) -> str:
    """Return the error with which a daemon refuses a file; nothing where all accept it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(text)
        file.flush()
        for binary in real_dockerd.binaries():
            fine, words = real_dockerd.validate(binary, file.name)
            if not fine:
                return words.splitlines()[-1].replace(file.name, DAEMON_JSON)
    return ""


def _validate_docker(before: bytes | None, after: bytes | None) -> list[str]:
    if after is None:
        return ["no daemon.json"]
    error = _refuses(after)
    if error:
        return [f"Docker doesn't start: {error.rpartition(': ')[2]}"]
    now = json.loads(after.decode("utf-8-sig"))
    was = json.loads(before.decode("utf-8-sig")) if before and before.strip() else {}
    wrong = []
    if now.get("default-runtime") != "nvidia":
        wrong.append(f"the default is {now.get('default-runtime')}")
    nvidia = (now.get("runtimes") or {}).get("nvidia", {})
    if nvidia.get("path") != BINARY:
        wrong.append(f"nvidia runs {nvidia.get('path')}")
    if (now.get("features") or {}).get("cdi") is not True:
        wrong.append("CDI is off")
    old, new = _theirs(was), _theirs(now)
    changed = sorted({key for key in {*old, *new} if old.get(key) != new.get(key)})
    if changed:
        names = ", ".join(dict.fromkeys(".".join(key[-2:]) for key in changed))
        wrong.append(f"{len(changed)} other setting{'s' if changed[1:] else ''} changed ({names})")
    return wrong


def _theirs(tree: dict[str, t.Any]) -> dict[tuple[str, ...], t.Any]:
    ours = (("default-runtime",), ("runtimes", "nvidia", "path"), ("features", "cdi"))
    return {
        path: value
        for path, value in corpus_containerd._flat(tree).items()
        if path not in ours and value not in (None, {}, [])
    }


# --------------------------------------------------------------------------- CRI-O


def crio_merged(texts: dict[str, bytes]) -> dict[str, t.Any]:
    """Merge crio.conf and then the folder by name: keys one by one, a runtime's table as a whole."""
    done: dict[str, t.Any] = {}

    def lay(over: dict[str, t.Any], under: dict[str, t.Any], path: tuple[str, ...]) -> None:
        for key, value in over.items():
            whole = path in (("crio", "runtime", "runtimes"), ("crio", "runtime", "workloads"))
            if isinstance(value, dict) and not whole:
                lay(value, under.setdefault(key, {}), (*path, key))
            else:
                under[key] = value

    for name in sorted(texts, key=lambda one: (one != "/etc/crio/crio.conf", one)):
        if name == "/etc/crio/crio.conf" or name.startswith("/etc/crio/crio.conf.d/"):
            lay(tomllib.loads(texts[name].decode("utf-8-sig")), done, ())
    return done


def _theirs_crio(row: Row, root: Path) -> Outcome:
    etc = f"{root}/etc/crio"
    options = (f"--config={etc}/crio.conf", f"--drop-in-config={etc}/crio.conf.d/99-nvidia.toml")
    after, outcome = _nvidia_ctk(root, row, "crio", *options)
    if not outcome.refused:
        outcome.wrong = _validate_crio(row, after) + corpus_containerd.lost_comments(row.texts, after)
    return outcome


def _crio_state(texts: dict[str, bytes]) -> dict[str, t.Any]:
    toolkit = texts.get("/etc/nvidia-container-runtime/config.toml")
    files = {path: text.decode(errors="replace") for path, text in texts.items() if path.startswith("/etc/crio/")}
    stopped = dict.fromkeys(("answers", "service_active", "stale", "pending", "operator"), False)
    empty = dict.fromkeys(("default_runtime", "cgroup_driver", "error"), "")
    return {
        **{"version": "1.31.0", "config_path": "/etc/crio/crio.conf", "folder": "/etc/crio/crio.conf.d"},
        **{"files": files, "flags": {}, "runtimes": {}, "on_path": [], **stopped, **empty},
        "toolkit_config": None if toolkit is None else toolkit.decode(),
        "ours": any("kubegpu" in path for path in texts),
    }


def _ours_crio(row: Row) -> Outcome:
    try:
        planned = crio_plan.make_plan(row.wanted, _crio_state(row.texts))
    except BadInput as refusal:
        return Outcome(refused=str(refusal))
    after = _with(row.texts, planned.files)
    outcome = Outcome(files=after, wrong=_validate_crio(row, after))
    outcome.wrong += [f"{path} changed" for path, text in row.texts.items() if after.get(path) != text]
    if crio_plan.make_plan(row.wanted, _crio_state(after)).files:
        outcome.wrong.append("a second run changes something")
    if _with(after, crio_plan.make_plan(ABSENT, _crio_state(after)).files) != row.texts:
        outcome.wrong.append("the removal doesn't restore the files")
    return outcome


def _with(texts: dict[str, bytes], files: t.Iterable[dict[str, t.Any]]) -> dict[str, bytes]:
    done = dict(texts)
    for file in files:
        if file["after"] is None:
            done.pop(file["path"], None)
        else:
            done[file["path"]] = file["after"].encode()
    return done


def _validate_crio(row: Row, after: dict[str, bytes]) -> list[str]:
    try:
        was, now = crio_merged(row.texts), crio_merged(after)
    except tomllib.TOMLDecodeError:
        return ["CRI-O doesn't start"]
    runtime = now.get("crio", {}).get("runtime", {})
    name, tables = runtime.get("default_runtime"), runtime.get("runtimes", {})
    wrong = [] if name == "nvidia" else [f"the default is {name}"]
    nvidia = tables.get("nvidia")
    if nvidia is None:
        return [*wrong, "no runtime nvidia"]
    if nvidia.get("runtime_path") != BINARY:
        wrong.append(f"nvidia runs {nvidia.get('runtime_path')}")
    if row.meta.get("monitor_path", nvidia.get("monitor_path")) != nvidia.get("monitor_path"):
        wrong.append("conmon isn't found: nvidia without monitor_path")
    old, new = (collections.Counter(_crio_theirs(tree)) for tree in (was, now))
    changed = sorted({key[-1] for key in {*old, *new} if old[key] != new[key]})
    return wrong + ([f"other settings changed ({', '.join(changed)})"] if changed else [])


def _crio_theirs(tree: dict[str, t.Any]) -> dict[tuple[str, ...], str]:
    return {
        path: repr(value)
        for path, value in corpus_containerd._flat(tree).items()
        if path[-1] != "default_runtime" and path[:4] != ("crio", "runtime", "runtimes", "nvidia")
    }
