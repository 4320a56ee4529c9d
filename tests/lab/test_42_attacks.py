# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods that try to get more of a card than their share, with the real kubelet, containerd and NVIDIA runtime.

Each way of device injection is configured once; _attacks.py has the attacks and their expected outcomes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from _attacks import BY_FROM, TABLE, Outcome, Try
from _greedy import images
from _lab import ApiError, JsonObject, Lab, indices_of, until
from _pods import STRATEGIC, body, container, create, delete_pods, is_announced, plugin, plugin_page, pods, units_of

PLAYBOOK = "tests/lab/injection.yml"
SPECIFICATION = "/var/run/cdi/nvidia.yaml"
VISIBLE, LEGACY, LIMIT = "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "NVIDIA_GPU_MEMORY_LIMIT"
CUDA = "12.4.1"
# More than any card has.
TOO_MUCH = "999999"
DEBUGGED, PARAMETER = "debug: all", "?dryRun=All"
DEV = "/node-dev"


# --------------------------------------------------------------------------- what is tried


@dataclasses.dataclass(frozen=True)
class Scene:
    """The values that attacks are built from.

    :param another: the UUID of the node's last card; pods with a share get its first one.
    :param images: image names by the variable that is set in them.
    """

    lab: Lab
    node: str
    another: str
    images: Mapping[str, str]

    def pod(
        self,
        share: bool,
        env: Mapping[str, str] | None = None,
        maps: str = "",
        image: str = "",
        context: JsonObject | None = None,
        annotations: Mapping[str, str] | None = None,
        mount: tuple[str, str] | None = None,
    ) -> JsonObject:
        """A pod of one container, named when it is made.

        :param maps: a ConfigMap whose variables it takes. :param mount: path on the node, and in the container.
        """
        more: dict[str, Any] = {}
        spec: dict[str, Any] = {"restartPolicy": "Never"}
        if env:
            more["env"] = [{"name": name, "value": value} for name, value in env.items()]
        if maps:
            more["envFrom"] = [{"configMapRef": {"name": maps}}]
        if image:
            more["image"] = self.images[image]
        if context:
            more["securityContext"] = context
        if mount:
            spec["volumes"] = [{"name": "v", "hostPath": {"path": mount[0]}}]
            more["volumeMounts"] = [{"name": "v", "mountPath": mount[1]}]
        made = container(self.lab, int(share), **more)
        return body("", made, node=self.node, annotations=annotations, **spec)


ADMIN = {"capabilities": {"add": ["SYS_ADMIN"]}}
FOLDER = "/var/run/nvidia-container-devices"
NULL = ("/dev/null", f"{FOLDER}/all")
CDI = {"cdi.k8s.io/greedy": "nvidia.com/gpu=all"}
PLAYS: dict[str, Callable[[Scene], JsonObject]] = {
    "share, env: all": lambda scene: scene.pod(True, {VISIBLE: "all"}),
    "share, env: another": lambda scene: scene.pod(True, {VISIBLE: scene.another}),
    "env: all": lambda scene: scene.pod(False, {VISIBLE: "all"}),
    "env: another": lambda scene: scene.pod(False, {VISIBLE: scene.another}),
    "share, envFrom: all": lambda scene: scene.pod(True, maps="all"),
    "envFrom: all": lambda scene: scene.pod(False, maps="all"),
    "share, image: all": lambda scene: scene.pod(True, image="all"),
    "image: all": lambda scene: scene.pod(False, image="all"),
    "image: all, env: void": lambda scene: scene.pod(False, {VISIBLE: "void"}, image="all"),
    "env: CUDA_VERSION": lambda scene: scene.pod(False, {LEGACY: CUDA}),
    "envFrom: CUDA_VERSION": lambda scene: scene.pod(False, maps="legacy"),
    "image: CUDA_VERSION": lambda scene: scene.pod(False, image="legacy"),
    "image: CUDA_VERSION, env: void": lambda scene: scene.pod(False, {VISIBLE: "void"}, image="legacy"),
    "share, env: CUDA_VERSION": lambda scene: scene.pod(True, {LEGACY: CUDA}),
    "share, image: CUDA_VERSION": lambda scene: scene.pod(True, image="legacy"),
    "share, env: limit": lambda scene: scene.pod(True, {LIMIT: TOO_MUCH}),
    "share, envFrom: limit": lambda scene: scene.pod(True, maps="limit"),
    "share, image: limit": lambda scene: scene.pod(True, image="limit"),
    "share, mount": lambda scene: scene.pod(True, mount=NULL),
    "mount": lambda scene: scene.pod(False, mount=NULL),
    # The toolkit cleans the path and compares its beginning, and kubelet makes it absolute.
    "mount: slashes": lambda scene: scene.pod(False, mount=(NULL[0], "/var//run/./nvidia-container-devices/all")),
    "mount: dots": lambda scene: scene.pod(False, mount=(NULL[0], f"/srv/..{FOLDER}/all/")),
    "mount: joined": lambda scene: scene.pod(False, mount=(NULL[0], f"{FOLDER}all")),
    "mount: relative": lambda scene: scene.pod(False, mount=(NULL[0], f"{FOLDER}/all".lstrip("/"))),
    "mount: cdi": lambda scene: scene.pod(False, mount=(NULL[0], f"{FOLDER}/cdi/nvidia.com/gpu/all")),
    "share, annotation": lambda scene: scene.pod(True, annotations=CDI),
    "annotation": lambda scene: scene.pod(False, annotations=CDI),
    # The pod is harmless: what is added to it isn't.
    "debug: all": lambda scene: scene.pod(False),
    "share, /dev": lambda scene: scene.pod(True, mount=("/dev", DEV)),
    "env: all, SYS_ADMIN": lambda scene: scene.pod(False, {VISIBLE: "all"}, context=ADMIN),
    "share, env: all, SYS_ADMIN": lambda scene: scene.pod(True, {VISIBLE: "all"}, context=ADMIN),
    "privileged": lambda scene: scene.pod(False, context={"privileged": True}),
    "share, privileged": lambda scene: scene.pod(True, context={"privileged": True}),
}
MAPS = {"all": {VISIBLE: "all"}, "legacy": {LEGACY: CUDA}, "limit": {LIMIT: TOO_MUCH}}


def named(play: str) -> str:
    return "try-" + re.sub(r"[^a-z]+", "-", play.lower()).strip("-")


def debugger(lab: Lab) -> JsonObject:
    """Return the ephemeral container that ``kubectl debug`` adds to a pod."""
    one = container(lab, 0, "debugger", env=[{"name": VISIBLE, "value": "all"}])
    return {"spec": {"ephemeralContainers": [one]}}


# --------------------------------------------------------------------------- what comes of it


@dataclasses.dataclass(frozen=True)
class Result:
    """
    :param started: whether its container ran; else ``message`` is why not.
    :param seen: N of each /dev/nvidiaN that its processes have, ``own`` of those that it was given.
    :param warnings: the API server's warnings of our policies when it was made.
    """

    started: bool
    message: str
    seen: frozenset[int]
    own: frozenset[int]
    warnings: tuple[str, ...]


def ours(lab: Lab) -> tuple[str, ...]:
    """Return the warnings of this project's policies in the last answer."""
    return tuple(warning for warning in lab.api.warnings if "gpushare-" in warning)


def visible(lab: Lab, node: str) -> dict[str, set[int]]:
    """Return the minors of card device nodes that each pod's (UID) processes have, read from the node."""
    script = (
        "for p in /proc/[0-9]*; do"
        ' [ "$(cat $p/comm 2>/dev/null)" = sleep ] || continue;'
        " u=$(grep -o 'pod[0-9a-f]\\{8\\}[_-][0-9a-f_-]\\{27\\}' $p/cgroup 2>/dev/null | head -n 1);"
        ' [ -z "$u" ] || echo "$u $(cd $p/root/dev && echo nvidia[0-9]*)"; done; true'
    )
    found: dict[str, set[int]] = {}
    for line in lab.ssh(node, script).splitlines():
        uid, *words = line.split()
        minors = {int(word[6:]) for word in words if word[6:].isdigit()}
        found.setdefault(uid.removeprefix("pod").replace("_", "-"), set()).update(minors)
    return found


def openable(lab: Lab, namespace: str, name: str, minors: Sequence[int]) -> set[int]:
    """Return which of the node's devices a container's device cgroup lets it open.

    There is no driver behind them here, so that opening an allowed one fails with another error.
    """
    found = set()
    for minor in minors:
        said = lab.inside(namespace, name, "c0", "sh", "-c", f": <{DEV}/nvidia{minor}", check=False)
        assert "Operation not permitted" in said or "No such device" in said, said
        if "No such device" in said:
            found.add(minor)
    return found


def words_of(pod: JsonObject) -> str:
    """Return why a pod's containers don't run."""
    texts = []
    for status in pod["status"].get("containerStatuses", []):
        texts += [str(state.get("message", "")) for state in status["state"].values()]
    return " ".join(filter(None, texts))


def started(pod: JsonObject) -> bool | None:
    """Test whether the pod's containers run; None while undecided."""
    statuses = [
        one for field in ("containerStatuses", "ephemeralContainerStatuses") for one in pod["status"].get(field, [])
    ]
    wanted = len(pod["spec"]["containers"]) + len(pod["spec"].get("ephemeralContainers", []))
    if len(statuses) == wanted and all("running" in status["state"] for status in statuses):
        return True
    return False if "hook" in words_of(pod) or pod["status"].get("phase") == "Failed" else None


def booked(pod: JsonObject) -> set[int]:
    """Return the indices of the cards that the extender gave to a pod.

    :raises AssertionError: it runs and isn't confirmed yet.
    """
    if not units_of(pod):
        return set()
    if started(pod):
        assert pod["metadata"]["annotations"].get("ALIYUN_COM_GPU_MEM_ASSIGNED") == "true", pod["metadata"]
    return set(indices_of(pod))


def played(
    lab: Lab, scene: Scene, minors: Mapping[int, int], own_of: Callable[[JsonObject], set[int]]
) -> dict[str, Result]:
    """Run all attacks at once, in a namespace of their own.

    :param minors: those of the node's cards by index. :param own_of: the indices of the cards that a pod was given.
    """
    warnings = {}
    with lab.api.namespace("lab-attacks") as space:
        for name, data in MAPS.items():
            lab.api.call("POST", f"/api/v1/namespaces/{space}/configmaps", {"metadata": {"name": name}, "data": data})
        for play, make in PLAYS.items():
            wanted = make(scene)
            wanted["metadata"]["name"] = named(play)
            create(lab, space, wanted)
            warnings[play] = ours(lab)
        target = f"/api/v1/namespaces/{space}/pods/{named(DEBUGGED)}/ephemeralcontainers"
        lab.api.call("PATCH", target, debugger(lab), STRATEGIC)
        warnings[DEBUGGED] = ours(lab)

        def decided() -> dict[str, JsonObject]:
            found = {one["metadata"]["name"]: one for one in lab.api.pods(space)}
            for play in PLAYS:
                pod = found[named(play)]
                assert started(pod) is not None, f"{play}: {pod['status']}"
                own_of(pod)
            return found

        found: dict[str, JsonObject] = until(decided, "each of them runs, or doesn't", 120, 1)
        looked = visible(lab, scene.node)
        results = {}
        for play in PLAYS:
            pod = found[named(play)]
            own = frozenset(minors[index] for index in own_of(pod))
            seen = looked.get(pod["metadata"]["uid"], set())
            if any(volume.get("hostPath", {}).get("path") == "/dev" for volume in pod["spec"].get("volumes", [])):
                seen = seen | openable(lab, space, pod["metadata"]["name"], list(minors.values()))
            runs = bool(started(pod))
            results[play] = Result(runs, words_of(pod), frozenset(seen), own, warnings[play])
        return results


# --------------------------------------------------------------------------- the ways to a card


def specified(lab: Lab) -> None:
    """Generate a CDI specification on each GPU node, as NVIDIA's nvidia-cdi-refresh.service does."""
    for node in lab.gpu_nodes:
        output = f"NVIDIA_CTK_CDI_OUTPUT_FILE_PATH={SPECIFICATION}"
        lab.ssh(node, f"mkdir -p {SPECIFICATION.rpartition('/')[0]} && {output} nvidia-ctk cdi generate")


def unspecified(lab: Lab) -> None:
    for node in lab.gpu_nodes:
        lab.ssh(node, f"rm -f {SPECIFICATION}")


def uses(lab: Lab, node: str, way: str) -> bool:
    """Test whether the plugin reports this way of injection, and every card is announced."""
    text = plugin_page(lab, node, "/metrics")
    now = re.findall(r'^gpushare_plugin_device_injection\{.*mode="(\w+)".*\} 1\.0$', text, re.MULTILINE)
    assert now == [way], f"{node}: {now}"
    return is_announced(lab, node, len(lab.cards(node)))


def configured(lab: Lab, way: str, *variables: str) -> None:
    """Run the roles with these variables, and wait for the plugins."""
    done = lab.playbook(PLAYBOOK, *(word for variable in variables for word in ("-e", variable)))
    assert done.rc == 0, done.out[-8000:]
    for node in lab.gpu_nodes:
        until(lambda node=node: uses(lab, node, way), f"{way} on {node}", 60)


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[None]:
    """Restore the state that site.yml had left."""
    try:
        yield
    finally:
        unspecified(lab)
        if "--device-injection=auto" in plugin(lab, lab.gpu_nodes[0])["spec"]["containers"][0]["command"]:
            for node in lab.gpu_nodes:
                until(lambda node=node: uses(lab, node, "envvar"), f"envvar on {node}", 60)
        else:
            configured(lab, "envvar")


@pytest.fixture(scope="module")
def scene(lab: Lab, site: None) -> Iterator[Scene]:
    node = lab.gpu_nodes[-1]
    cards = lab.cards(node)
    wanted = {tag: f"{name}={value}" for tag, data in MAPS.items() for name, value in data.items()}
    with images(lab, node, wanted) as names:
        yield Scene(lab, node, cards[-1]["uuid"], names)


def by_environment(lab: Lab) -> None:
    """What ``auto`` selects without a CDI specification, as in this lab."""
    for node in lab.gpu_nodes:
        until(lambda node=node: uses(lab, node, "envvar"), f"envvar on {node}", 60)
        assert "by envvar: no CDI specification in /etc/cdi or /var/run/cdi" in lab.log(plugin(lab, node))


def by_cdi(lab: Lab) -> None:
    """What ``auto`` selects as soon as there is a specification."""
    specified(lab)
    for node in lab.gpu_nodes:
        until(lambda node=node: uses(lab, node, "cdi"), f"cdi on {node}", 60)


def refusing(lab: Lab) -> None:
    specified(lab)
    configured(lab, "cdi", "gpushare_device_injection=cdi", "toolkit_accept_unprivileged=false")


MODES: dict[str, Callable[[Lab], None]] = {"envvar": by_environment, "cdi": by_cdi, "refusing": refusing}
# What the roles have to change, and to put back, takes minutes.
IN_ORDER = ("envvar", *(pytest.param(name, marks=pytest.mark.long) for name in ("cdi", "refusing")))


@dataclasses.dataclass(frozen=True)
class Played:
    mode: str
    ordinary: Mapping[str, list[str]]
    results: Mapping[str, Result]


@pytest.fixture(scope="module", params=IN_ORDER)
def mode(lab: Lab, scene: Scene, request: pytest.FixtureRequest) -> Played:
    MODES[request.param](lab)
    minors = {card["index"]: card["minor"] for card in lab.cards(scene.node)}
    return Played(request.param, ordinary_pods(lab, scene.node), played(lab, scene, minors, booked))


def ordinary_pods(lab: Lab, node: str) -> dict[str, list[str]]:
    """Return the UUIDs that nvidia-smi lists in ordinary pods, whose shares agree everywhere."""
    several = {"kubegpu.share/card-count": "2"}
    wanted = [
        body("one", container(lab, 1), node=node),
        body("two", container(lab, 2, "c0"), container(lab, 1, "c1"), node=node),
        body("wide", container(lab, 2), node=node, annotations=several),
        body("none", container(lab), node=node),
    ]
    listed = {}
    with lab.api.namespace("lab-ordinary") as space:
        create(lab, space, wanted[-1])
        with pods(lab, space, *wanted[:-1]) as found:
            lab.api.wait_running(space, ["none"])
            cards = {card["index"]: card["uuid"] for card in lab.cards(node)}
            for pod in found:
                expected = sorted(cards[index] for index in indices_of(pod))
                for one in pod["spec"]["containers"]:
                    name = pod["metadata"]["name"]
                    said = lab.inside(space, name, one["name"], "nvidia-smi", "-L")
                    got = sorted(re.findall(r"UUID: (GPU-[0-9a-f-]+)", said))
                    assert got == expected, f"{name}/{one['name']}: {said}"
                    listed[f"{name}/{one['name']}"] = got
            seen = visible(lab, node).get(lab.api.pod(space, "none")["metadata"]["uid"])
            assert seen == set(), f"a pod that asks for nothing sees {seen}"
        delete_pods(lab, space, ["none"])
    return listed


# --------------------------------------------------------------------------- the tests


def test_ordinary_pods_see_their_own_cards_only(mode: Played) -> None:
    assert {name: len(uuids) for name, uuids in mode.ordinary.items()} == {
        "one/c0": 1,
        "two/c0": 1,
        "two/c1": 1,
        "wide/c0": 2,
    }


@pytest.mark.parametrize(("row", "play"), [pytest.param(row, play, id=play) for row in TABLE for play in row.plays])
def test_attack(lab: Lab, scene: Scene, mode: Played, row: Try, play: str) -> None:
    every = {card["minor"] for card in lab.cards(scene.node)}
    check_outcome(mode.results[play], getattr(row, mode.mode).outcome, row, every)


def check_outcome(result: Result, outcome: Outcome, row: Try, every: set[int]) -> None:
    """Require that an attack ended as its row says.

    :param every: the minors of all cards of the node.
    """
    if outcome is Outcome.NO_START:
        assert not result.started and "hook" in result.message, result
    else:
        assert result.started, result
    if outcome is Outcome.FAILS:
        assert result.seen == result.own, result
    elif outcome is Outcome.TAKES:
        assert result.seen - result.own, result
    elif outcome is Outcome.ALL:
        assert result.seen == every, result
    # The policy only warns here, as by default; of what it would refuse or warn of then.
    warned_of = row.policy.outcome in (Outcome.REFUSED, Outcome.WARNED) and row.policy is not BY_FROM
    assert bool(result.warnings) == warned_of, result


@pytest.mark.long
def test_explicit_cdi_without_a_specification_gives_no_card(lab: Lab, site: None) -> None:
    node = lab.gpu_nodes[0]
    # The last of the modes above, unless this test is run alone.
    if "--device-injection=cdi" not in plugin(lab, node)["spec"]["containers"][0]["command"]:
        refusing(lab)
    lab.ssh(node, f"mv {SPECIFICATION} /root/nvidia.yaml")
    try:

        def refused() -> bool:
            cards = lab.cards(node)
            assert all("no CDI specification" in card.get("reason", "") for card in cards), cards
            return lab.allocatable(node) == 0

        until(refused, "no card is given away", 60)
    finally:
        lab.ssh(node, f"mv /root/nvidia.yaml {SPECIFICATION}")
    until(lambda: uses(lab, node, "cdi"), "the cards again", 60)


@pytest.mark.long
@pytest.mark.parametrize(
    "variables",
    [("gpushare_device_injection=envvar", "toolkit_accept_unprivileged=false"), ("gpushare_admission=deny",)],
    ids=",".join,
)
def test_the_toolkit_does_not_break_ordinary_pods(lab: Lab, site: None, variables: tuple[str, ...]) -> None:
    """Without CDI no pod would get a card; the role refuses that setting, which ``deny`` has by default."""
    done = lab.playbook(PLAYBOOK, *(word for variable in variables for word in ("-e", variable)))
    assert done.rc != 0 and "set gpushare_device_injection to cdi" in done.out, done.out[-4000:]
    assert not any(sums["changed"] for sums in done.recap.values()), done.recap


# --------------------------------------------------------------------------- with the policy


@pytest.fixture(scope="module")
def denying(lab: Lab, scene: Scene) -> Iterator[str]:
    """A namespace in which the policy denies; injection by environment, though there are CDI specifications."""
    specified(lab)
    configured(
        lab,
        "envvar",
        "gpushare_device_injection=envvar",
        "gpushare_admission=deny",
        "gpushare_admission_env_from=deny",
        # Otherwise pods would get no card by environment.
        "toolkit_accept_unprivileged=true",
    )
    with lab.api.namespace("lab-policy") as space:
        create(lab, space, {**scene.pod(False), "metadata": {"name": named(DEBUGGED)}})
        until(lambda: refusal(lab, scene, space, "env: all"), "the policy is known", 60)
        yield space


def refusal(lab: Lab, scene: Scene, space: str, play: str) -> str:
    """Return the API server's reason for refusing a pod; empty if it accepts it."""
    path = f"/api/v1/namespaces/{space}/pods"
    try:
        if play == DEBUGGED:
            target = f"{path}/{named(play)}/ephemeralcontainers{PARAMETER}"
            lab.api.call("PATCH", target, debugger(lab), STRATEGIC)
        else:
            wanted = PLAYS[play](scene)
            wanted["metadata"]["name"] = named(play)
            lab.api.call("POST", path + PARAMETER, wanted)
    except ApiError as error:
        assert error.status == 403, error
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize(("row", "play"), [pytest.param(row, play, id=play) for row in TABLE for play in row.plays])
def test_attack_under_the_policy(lab: Lab, scene: Scene, denying: str, row: Try, play: str) -> None:
    said, warnings = refusal(lab, scene, denying, play), ours(lab)
    if row.policy.outcome is Outcome.REFUSED:
        who = "cdi.k8s.io/greedy" if "annotation" in play else "debugger" if play == DEBUGGED else "container c0"
        assert who in said, said or "it passes"
    else:
        assert not said, said
        assert bool(warnings) == (row.policy.outcome is Outcome.WARNED), warnings
        assert all("container c0 may do everything on its node" in warning for warning in warnings), warnings


@pytest.mark.long
def test_explicit_environment_is_used(lab: Lab, scene: Scene, denying: str) -> None:
    assert set(ordinary_pods(lab, scene.node)) == {"one/c0", "two/c0", "two/c1", "wide/c0"}
