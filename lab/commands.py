# SPDX-License-Identifier: GPL-3.0-or-later
"""Run `up`, `down` and `status`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lab import (
    aptsources,
    build,
    cluster,
    components,
    engine,
    hardware,
    host,
    images,
    network,
    nodeimage,
    nodes,
    publish,
    repository,
    rootfs,
    state,
)
from lab.engine import LABEL, NAME, Engine
from lab.paths import CHECKOUT, LAB, only_one
from lab.settings import Settings, differences, parse
from lab.shell import LabError, each, say, step

REMEDY = "run `python -m lab down` and then `python -m lab up`"


def up(flags: Mapping[str, str | None]) -> None:
    """Start the lab; change nothing when it is up."""
    wanted, given = parse(os.environ, flags)
    # Validate before anything is created.
    build.kubernetes(wanted.kubernetes_version)
    host.prepare(need_engine=engine.find() is None)
    with only_one():
        found = engine.find()
        refuse_foreign(found)
        known = state.read()
        if known and known.get("phase") == "up":
            _keep(known, wanted, given)
            return
        laid = known if known and known.get("phase") == "machines" else None
        if laid:
            wanted = _beside_machines(laid, wanted, given)
        elif known or (found and found.containers()):
            say("removing the remains of an interrupted `up`")
            remove()
        _create(wanted, "subnet" in given, laid)


def _beside_machines(known: state.State, wanted: Settings, given: set[str]) -> Settings:
    """Return the settings of a cluster beside machines that are up: they share network and repository."""
    shared = {name: known["settings"][name] for name in ("subnet", "driver_version")}
    other = differences(shared, wanted, given & set(shared))
    if other:
        sentence = "; ".join(other)
        raise LabError(f"machines are up with other values ({sentence}); run `python -m lab machine down` first.")
    return replace(wanted, **shared)


def _keep(known: state.State, wanted: Settings, given: set[str]) -> None:
    """Handle a lab that is or was up: leave it, start it again, or name the remedy."""
    other = differences(known["settings"], wanted, given)
    if other:
        raise LabError(f"the lab is up with other values ({'; '.join(other)}); run `python -m lab down` first.")
    host.raise_limits()
    found = engine.ensure()
    running = found.containers()
    expected = [*(node["container"] for node in known["nodes"].values()), repository.CONTAINER]
    lost = [name for name in expected if name not in running]
    if lost:
        raise LabError(f"containers of the lab are missing: {', '.join(lost)}; {REMEDY}.")
    settings = Settings(**known["settings"])
    first = known["nodes"]["cp1"]["container"]
    names = settings.node_names()
    stopped = [name for name in expected if not running[name]]
    if stopped:
        try:
            with step(f"starting {', '.join(stopped)} again"):
                found.docker("start", *stopped)
                nodes.wait_until_reachable({name: node["address"] for name, node in known["nodes"].items()})
            cluster.wait_until_ready(found, first, names, settings.control_planes)
        except LabError as error:
            raise LabError(f"the lab does not start again ({error}); {REMEDY}.") from None
    elif not set(names) <= cluster.Api(found, first).ready_nodes():
        say("the API doesn't answer or a node isn't Ready; waiting")
        try:
            cluster.wait_until_ready(found, first, names, settings.control_planes, 120)
        except LabError as error:
            raise LabError(f"the lab is broken ({error}); {REMEDY}.") from None
    images.ensure(found)
    say(f"the lab is up: {', '.join(names)}")


def _create(wanted: Settings, fixed_subnet: bool, laid: state.State | None) -> None:
    source = aptsources.read_machine()
    # One waits for the network, the other for the processor: run both in parallel.
    folders: dict[str, Path] = {}
    systems: dict[str, Path] = {}

    def compile_all() -> None:
        folders.update(build.build_all(wanted.kubernetes_version))

    def debootstrap_all() -> None:
        systems["node"] = rootfs.rootfs("node", rootfs.CLUSTER_PACKAGES, source)
        systems["base"] = rootfs.rootfs("base", rootfs.BASE_PACKAGES, source)

    each(lambda work: work(), [compile_all, debootstrap_all])
    archives = components.archives(folders["kubernetes"], folders["etcd"], systems["base"], wanted.kubernetes_version)

    host.raise_limits()
    running = engine.ensure()
    subnet = wanted.subnet if laid else free_subnet(wanted, fixed_subnet)
    known = {**_plan(wanted, subnet, running, source.suite), "machines": laid["machines"] if laid else {}}
    state.write(known)
    image = nodeimage.node_image(running, systems["node"], folders)
    if not laid:
        running.make_network(subnet, known["gateway"])
    table = {"gateway": known["gateway"], "repository": known["repository"]["address"]}
    table.update({name: node["address"] for name, node in known["nodes"].items()})
    cidrs = {name: node["pod_cidr"] for name, node in known["nodes"].items()}
    made = [
        nodes.Node(
            name,
            node["address"],
            len(node["cards"]),
            cluster.node_files(name, cidrs, table, archives.pause),
        )
        for name, node in known["nodes"].items()
    ]
    control_planes = wanted.control_plane_names()

    def kubernetes() -> None:
        images_of = {node.name: image for node in made}
        others = {name: machine["address"] for name, machine in known["machines"].items()}
        nodes.bring_up(running, images_of, made, table, (wanted.card_mib, wanted.driver_version), others)
        cluster.load_images(running, made, set(control_planes), archives)
        cluster.form(running, made, control_planes, wanted.kubernetes_version)
        cluster.wait_until_ready(running, made[0].container, wanted.node_names(), wanted.control_planes)

    def beside() -> None:
        _link_kubectl(folders["kubernetes"])
        _fill_repository(known, folders["toolkit"])
        repository.ensure(running, image, known["repository"]["address"])
        images.ensure(running)

    each(lambda work: work(), [kubernetes, beside])
    state.write({**known, "phase": "up"})
    say(f"the lab is up: {', '.join(wanted.node_names())}; export KUBECONFIG={cluster.KUBECONFIG}")


def free_subnet(wanted: Settings, fixed: bool) -> str:
    """Return a network for the lab that this machine doesn't use."""
    used = network.routed_networks(json.loads(engine.used_networks()))
    return network.free_subnet(wanted.subnet, used, fixed)


def _link_kubectl(folder: Path) -> None:
    """Link a kubectl of the cluster's version into .lab/bin."""
    link = LAB / "bin" / "kubectl"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder / "kubectl")


def shared_state(wanted: Settings, subnet: str, running: Engine, suite: str) -> state.State:
    """Return the state that a cluster and machines without one share: network, repository, SSH."""
    table = network.addresses(subnet, [], [])
    return {
        "format": 2,
        "phase": "starting",
        "settings": {**wanted.as_dict(), "subnet": subnet},
        "gateway": table["gateway"],
        "repository": {"address": table["repository"], "url": repository.url(table["repository"])},
        "ssh": {
            "user": "root",
            "key": str(nodes.KEY.relative_to(CHECKOUT)),
            "known_hosts": str(nodes.KNOWN_HOSTS.relative_to(CHECKOUT)),
        },
        "docker_host": running.host,
        "suite": suite,
        "nodes": {},
        "machines": {},
    }


def _plan(wanted: Settings, subnet: str, running: Engine, suite: str) -> state.State:
    """Return everything that is known before anything is created."""
    table = network.addresses(subnet, wanted.control_plane_names(), wanted.gpu_node_names())
    cidrs = network.pod_cidrs(wanted.node_names())
    relative = LAB.relative_to(CHECKOUT)
    return {
        **shared_state(wanted, subnet, running, suite),
        "api": f"https://{table['cp1']}:6443",
        "kubeconfig": str(relative / "kubeconfig"),
        "gpushare_image": images.reference(),
        "versions": {name: tools.version for name, tools in build.SETS.items()}
        | {"kubernetes": wanted.kubernetes_version},
        "base_image": components.BASE_IMAGE,
        "nodes": {
            name: {
                "role": "control_plane" if name in wanted.control_plane_names() else "gpu_node",
                "address": table[name],
                "pod_cidr": cidrs[name],
                "container": f"{NAME}-{name}",
                "cards": _cards(name, wanted),
                **(
                    {"hardware": str(relative / "nodes" / name / "hardware")} if name in wanted.gpu_node_names() else {}
                ),
            }
            for name in wanted.node_names()
        },
    }


def _cards(name: str, wanted: Settings) -> list[str]:
    return [hardware.card_uuid(name, index) for index in range(wanted.cards)] if name in wanted.gpu_node_names() else []


def refuse_foreign(found: Engine | None) -> None:
    """Refuse to touch the lab of another checkout that still exists; a machine has one lab."""
    if found is None:
        return
    label = '{{.Label "kubegpu-lab.checkout"}}'
    owners = set(found.out("ps", "-a", "--filter", f"label={LABEL}", "--format", label).split("\n")) - {""}
    for owner in sorted(owners - {str(CHECKOUT)}):
        if Path(owner, "lab").exists():
            raise LabError(f"the lab of another checkout, {owner}, is up on this machine; take it down there first.")


def down() -> None:
    """Remove everything but the cache."""
    if os.geteuid() != 0:
        raise LabError("the lab must be taken down as root.")
    with only_one():
        refuse_foreign(engine.find())
        if engine.find() is None and engine.leftovers() and shutil.which("dockerd"):
            # The lab's own engine died; only an engine can remove its containers and volumes.
            engine.start()
        remove()
        say("the lab is down; its builds stay in the cache")


def remove() -> None:
    found = engine.find()
    if found:
        with step("removing the lab's containers, network and images"):
            engine.clean(found)
    host.restore_limits()
    if engine.leftovers() and (found is None or found.own):
        with step("stopping the lab's own Docker engine"):
            engine.stop()
    shutil.rmtree(LAB, ignore_errors=True)


def status() -> int:
    """Print the state of the lab; return 0 only when all of it is up."""
    known = state.read()
    if not known:
        print("The lab is down.")
        return 1
    found = engine.find()
    running = found.containers() if found else {}
    ready: set[str] = set()
    if found and "cp1" in known["nodes"] and running.get(known["nodes"]["cp1"]["container"]):
        ready = cluster.Api(found, known["nodes"]["cp1"]["container"]).ready_nodes()
    healthy = known["phase"] in ("up", "machines")
    row = "{:20} {:14} {:16} {:10} {:11} {}"
    print(row.format("NODE", "ROLE", "ADDRESS", "CONTAINER", "KUBERNETES", "SIMULATED CARDS"))
    for name, node in known["nodes"].items():
        runs, is_ready = running.get(node["container"], False), name in ready
        healthy &= runs and is_ready
        words = ("running" if runs else "stopped", "Ready" if is_ready else "not Ready", len(node["cards"]))
        print(row.format(name, node["role"], node["address"], *words))
    for name, machine in known["machines"].items():
        runs = running.get(machine["container"], False)
        healthy &= runs
        print(
            row.format(
                name, "machine", machine["address"], "running" if runs else "stopped", "-", len(machine["cards"])
            )
        )
    serving = repository.answers(known["repository"]["address"])
    healthy &= serving
    print(f"package repository {known['repository']['url']}: {'answers' if serving else 'does not answer'}")
    if "kubeconfig" in known:
        print(f"kubeconfig: {CHECKOUT / known['kubeconfig']}")
    if not healthy:
        starts = "machine up" if known["phase"] == "machines" else "up"
        print(f"Some containers are stopped; `python -m lab {starts}` starts them.")
    return 0 if healthy else 1


def _of_the_lab_that_is_up() -> state.State:
    known = state.read()
    if not known or known.get("phase") != "up":
        raise LabError("the lab is not up; `python -m lab up` does this as well.")
    return known


def image() -> None:
    """Build the servers' image again if its sources changed."""
    host.prepare(need_engine=engine.find() is None)
    with only_one():
        _of_the_lab_that_is_up()
        images.ensure(engine.ensure())


def packages() -> None:
    """Build the package repository again if the packages' sources changed."""
    host.prepare(need_engine=engine.find() is None)
    with only_one():
        known = _of_the_lab_that_is_up()
        _fill_repository(known, build.binaries("toolkit"))


def _fill_repository(known: state.State, toolkit: Path) -> None:
    wanted = publish.tree(publish.DEBIAN[known["suite"]], own=True)
    repository.fill(toolkit, known["settings"]["driver_version"], build.SETS["toolkit"].version, wanted)
