# SPDX-License-Identifier: GPL-3.0-or-later
"""Run `machine up` and `machine down`: machines without a cluster, beside a cluster's nodes or alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lab import (
    aptsources,
    build,
    engine,
    hardware,
    host,
    machines,
    network,
    nodeimage,
    nodes,
    publish,
    repository,
    state,
)
from lab.aptsources import Source
from lab.commands import free_subnet, refuse_foreign, remove, shared_state
from lab.engine import NAME, Engine
from lab.machines import Kind
from lab.paths import CHECKOUT, LAB, only_one
from lab.publish import Tree
from lab.settings import Settings, parse
from lab.shell import say, step


def up(names: list[str]) -> None:
    """Start machines; those that are up stay as they are."""
    wanted, given = parse(os.environ)
    kinds = machines.chosen(names)
    host.prepare(need_engine=engine.find() is None, rpm=any(kind.family != "debian" for kind in kinds))
    with only_one():
        found = engine.find()
        refuse_foreign(found)
        known = state.read()
        if (known and known.get("phase") == "starting") or (not known and found and found.containers()):
            say("removing the remains of an interrupted `up`")
            remove()
            known = None
        source = aptsources.read_machine()
        systems = {kind.name: machines.system(kind, source) for kind in kinds}
        host.raise_limits()
        running = engine.ensure()
        if not known:
            known = _create_shared(wanted, "subnet" in given, running, source)
        images = {name: nodeimage.imported(running, name, system) for name, system in systems.items()}
        for kind in kinds:
            _offer_packages(known, kind, source, systems[kind.name])
        repository.ensure(running, next(iter(images.values())), known["repository"]["address"])
        _bring_up(running, known, kinds, images)
        say(f"up: {', '.join(kind.name for kind in kinds)}")


def _create_shared(wanted: Settings, fixed_subnet: bool, running: Engine, source: Source) -> state.State:
    subnet = free_subnet(wanted, fixed_subnet)
    known = {**shared_state(wanted, subnet, running, source.suite), "phase": "machines"}
    state.write(known)
    running.make_network(subnet, known["gateway"])
    return known


def _tree(known: state.State, kind: Kind) -> Tree:
    return publish.tree(kind.distribution, own=kind.distribution == publish.DEBIAN[known["suite"]])


def _offer_packages(known: state.State, kind: Kind, source: Source, system: Path) -> None:
    """Return the driver and toolkit packages for a machine of this kind."""
    place = machines.sysroot(kind, source, system)
    driver, toolkit = known["settings"]["driver_version"], build.SETS["toolkit"].version
    repository.fill(build.binaries("toolkit", place), driver, toolkit, _tree(known, kind), place)


def _described(known: state.State, kind: Kind) -> dict[str, object]:
    """Return a machine's entry of the state file."""
    wanted = _tree(known, kind)
    return {
        "address": network.machine_address(known["settings"]["subnet"], machines.number(kind)),
        "container": f"{NAME}-{kind.name}",
        "group": kind.group,
        "family": kind.family,
        "services": list(kind.services),
        "cards": [hardware.card_uuid(kind.name, index) for index in range(machines.CARDS)],
        "hardware": str((LAB / "nodes" / kind.name / "hardware").relative_to(CHECKOUT)),
        "packages": repository.places(wanted),
    }


def _bring_up(running: Engine, known: state.State, kinds: list[Kind], images: dict[str, str]) -> None:
    there = running.containers()
    fresh = [kind for kind in kinds if f"{NAME}-{kind.name}" not in there]
    stopped = [kind for kind in kinds if there.get(f"{NAME}-{kind.name}") is False]
    described = {kind.name: _described(known, kind) for kind in kinds}
    known["machines"] = {**known["machines"], **described}
    state.write(known)
    made = [
        nodes.Node(
            kind.name,
            str(described[kind.name]["address"]),
            machines.CARDS,
            machines.files(kind, known["repository"]["url"]),
            kind.volumes,
            kind.services,
        )
        for kind in fresh
    ]
    if made:
        settings = known["settings"]
        table = {"gateway": known["gateway"], "repository": known["repository"]["address"]}
        others = {name: one["address"] for part in ("nodes", "machines") for name, one in known[part].items()}
        others = {name: address for name, address in others.items() if name not in images or f"{NAME}-{name}" in there}
        nodes.bring_up(running, images, made, table, (settings["card_mib"], settings["driver_version"]), others)
    if stopped:
        with step(f"starting {', '.join(kind.name for kind in stopped)} again"):
            running.docker("start", *(f"{NAME}-{kind.name}" for kind in stopped))
            addresses = {kind.name: str(described[kind.name]["address"]) for kind in stopped}
            nodes.wait_until_reachable(addresses, {kind.name: kind.services for kind in stopped})


def down(names: list[str]) -> None:
    """Remove machines; network and repository stay until `lab down`."""
    kinds = machines.chosen(names)
    with only_one():
        known, found = state.read(), engine.find()
        refuse_foreign(found)
        if not known or not found:
            say("no machine is up")
            return
        there = found.containers()
        lost = [f"{NAME}-{kind.name}" for kind in kinds if f"{NAME}-{kind.name}" in there]
        if lost:
            with step(f"removing {', '.join(lost)}"):
                found.docker("rm", "--force", "--volumes", *lost)
        for kind in kinds:
            shutil.rmtree(LAB / "nodes" / kind.name, ignore_errors=True)
            known["machines"].pop(kind.name, None)
        state.write(known)
