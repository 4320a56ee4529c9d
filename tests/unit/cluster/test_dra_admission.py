# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods that ask for aliyun.com/gpu-mem get a claim by template, or one sentence, on a real API server."""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import claim_templates as templates
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claims import pod_claims
from gpushare.templates.objects import template_of
from gpushare_objects import rendered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_cluster import until
from real_apiserver import own_api_server

MEMORY = contract.RESOURCE_MEMORY
PODS = "/api/v1/namespaces/default/pods?dryRun=All"


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        started.apply(*rendered("dra_admission"))
        # A new policy is in effect a moment later.
        until(lambda: "resourceClaims" in started.ask("POST", PODS, pod(container("c", 1)))[1])
        until(lambda: started.ask("POST", PODS, pod(container("c", 1), nodeName="n"))[0] == 403)
        yield started


def container(name, units=None, requests=None, claims=None, **more):
    resources = {
        **({} if units is None else {"limits": {MEMORY: units}}),
        **({} if requests is None else {"requests": {MEMORY: requests}}),
        **({} if claims is None else {"claims": claims}),
    }
    return {"name": name, "image": "i", **({"resources": resources} if resources else {}), **more}


def sidecar(name, units=None, **more):
    return container(name, units, restartPolicy="Always", **more)


def pod(*containers, annotations=None, **spec):
    metadata = {"name": "p", **({"annotations": annotations} if annotations else {})}
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


def created(server, wanted):
    """Return the specification of a new pod, or the API server's refusal as status and text."""
    status, text = server.ask("POST", PODS, wanted)
    answer = json.loads(text)
    return answer["spec"] if status == 201 else (status, answer["message"])


# --------------------------------------------------------------------------- what a pod becomes, as a model


def claim_of(wanted):
    """Return the shape of a pod's claim, and the request of each container that asks.

    :raises ContractError: there is none.
    """
    demand = contract.demand(wanted)
    if demand.placement == "spread":
        raise contract.ContractError("spread")
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789" + templates.PUNCTUATION)
    if any(set(pattern) - allowed for pattern in (*demand.models, *demand.excluded)):
        raise contract.ContractError("characters")
    spec = wanted["spec"]
    inits = spec.get("initContainers", [])
    shares, places = [], {}
    for one in [each for each in inits if "restartPolicy" in each] + spec["containers"]:
        if contract.container_units(one):
            places[one["name"]] = len(shares)
            shares.append(contract.container_units(one))
    own = [container["name"] for container in spec["containers"] if container["name"] in places]
    before = [one for one in inits if "restartPolicy" not in one and contract.container_units(one)]
    if before:
        needed = max(map(contract.container_units, before))
        if own:
            place = max((places[name] for name in own), key=lambda at: (shares[at], -at))
            shares[place] = max(shares[place], needed)
        else:
            place = len(shares)
            shares.append(needed)
        places.update({one["name"]: place for one in before})
    shape = templates.Shape(tuple(shares), demand.count, demand.models, demand.excluded)
    if sum(shares) != contract.pod_units(wanted) or not shape.possible:
        raise contract.ContractError("no claim can say it")
    return shape, places


def turned(wanted):
    """Return the specification that a pod gets."""
    spec = copy.deepcopy(wanted["spec"])
    if not contract.pod_units(wanted):
        return spec
    shape, places = claim_of(wanted)
    claim = {"name": "gpu-mem", "resourceClaimTemplateName": templates.name_of(shape)}
    spec["resourceClaims"] = [*spec.get("resourceClaims", []), claim]
    for container in spec["containers"] + spec.get("initContainers", []):
        if container["name"] in places:
            request = f"gpu-{places[container['name']]}"
            several = [f"-{card}" for card in range(shape.cards)] if min(shape.cards, len(shape.shares)) > 1 else [""]
            requests = [{"name": "gpu-mem", "request": f"{request}{card}"} for card in several]
            container["resources"]["claims"] = [*container["resources"].get("claims", []), *requests]
            for field in ("limits", "requests"):
                container["resources"].get(field, {}).pop(MEMORY, None)
    return spec


def essence(spec):
    """What the policies may change of a pod."""

    def resources(one):
        given = one.get("resources", {})
        asked = [str(given[field][MEMORY]) for field in ("limits", "requests") if MEMORY in given.get(field, {})]
        # The API server itself adds the request where only a limit is given.
        return [one["name"], given.get("claims", []), sorted({*asked})]

    lists = [[resources(one) for one in spec.get(name, [])] for name in ("containers", "initContainers")]
    return [spec.get("resourceClaims", []), *lists]


def test_a_pod_without_a_share_is_left_alone(server):
    other = pod(container("c", resources={"limits": {"cpu": "1"}}), annotations={"kubegpu.share/placement": "spread"})
    assert "claims" not in json.dumps(created(server, other))


SHAPES = {
    "one container": pod(container("c", 4)),
    "a text": pod(container("c", "4")),
    "thousands": pod(container("c", "4k")),
    "binary": pod(container("c", "1Ki")),
    "an exponent": pod(container("c", "1e1")),
    "the request too": pod(container("c", 4, 4)),
    "the request in another way": pod(container("c", "4k", 4000)),
    "zero": pod(container("c", 0)),
    "zero beside a share": pod(container("c", 4), container("d", 0)),
    "other resources": pod(container("c", 4)),
    "two containers": pod(container("c", 4), container("d", 2)),
    "the second of two": pod(container("c"), container("d", 2)),
    "an init container": pod(container("c", 4), initContainers=[container("i", 2)]),
    "a larger init container": pod(container("c", 4), initContainers=[container("i", 6)]),
    "an init container alone": pod(container("c"), initContainers=[container("i", 6)]),
    "init containers before two": pod(container("c", 2), container("d", 4), initContainers=[container("i", 4)]),
    "a sidecar": pod(container("c", 4), initContainers=[sidecar("s", 1)]),
    "a sidecar alone": pod(container("c"), initContainers=[sidecar("s", 1)]),
    "a sidecar before a larger init container": pod(
        container("c", 4), initContainers=[sidecar("s", 1), container("i", 6), sidecar("t")]
    ),
    "claims of its own": pod(
        container("c", 4, claims=[{"name": "nic"}]), resourceClaims=[{"name": "nic", "resourceClaimName": "nic"}]
    ),
    "a claim of another container": pod(
        container("c", 4),
        container("d", claims=[{"name": "nic", "request": "r"}]),
        resourceClaims=[{"name": "nic", "resourceClaimTemplateName": "nic"}],
    ),
    "several cards": pod(container("c", 4), annotations={contract.POD_CARD_COUNT: "2"}),
    "several cards, with an init container": pod(
        container("c", 4), annotations={contract.POD_CARD_COUNT: "02"}, initContainers=[container("i", 4)]
    ),
    "several cards for several containers": pod(
        container("c", 4),
        container("d", 2, claims=[{"name": "nic"}]),
        annotations={contract.POD_CARD_COUNT: "2"},
        initContainers=[container("i", 2), sidecar("s", 6)],
        resourceClaims=[{"name": "nic", "resourceClaimName": "nic"}],
    ),
    "the most requests of one claim": pod(
        *(container(f"c{n}", 4, claims=[{"name": "nic"}]) for n in range(8)),
        annotations={contract.POD_CARD_COUNT: "4", contract.POD_MODELS: "*A100*, NVIDIA H100*"},
        resourceClaims=[{"name": "nic", "resourceClaimName": "nic"}],
    ),
    "binpack": pod(container("c", 4), annotations={contract.POD_PLACEMENT: "binpack"}),
    "models": pod(container("c", 4), annotations={contract.POD_MODELS: "*A100*, NVIDIA H100*"}),
    "models with an x": pod(container("c", 4), annotations={contract.POD_MODELS: "NVIDIA RTX 6000 (Max-Q)?"}),
    "all wishes": pod(
        container("c", 8),
        annotations={
            contract.POD_CARD_COUNT: "4",
            contract.POD_MODELS: "*A100-SXM4*",
            contract.POD_EXCLUDE_MODELS: "*40GB,x.y_z/+",
        },
    ),
}


@pytest.mark.parametrize("wanted", SHAPES.values(), ids=SHAPES)
def test_a_shape_of_pod_gets_its_claim(server, wanted):
    spec = created(server, wanted)
    assert isinstance(spec, dict), spec
    assert essence(spec) == essence(turned(wanted))
    # Whoever makes the template knows it by its name alone.
    names = tuple(use.template for use in pod_claims({"spec": spec}) if use.units())
    assert len(names) == (1 if contract.pod_units(wanted) else 0)
    for name in names:
        assert templates.shape_of(name) == claim_of(wanted)[0]


def wishing(units=4, /, **annotations):
    return pod(
        container("c", units), annotations={f"kubegpu.share/{k.replace('_', '-')}": v for k, v in annotations.items()}
    )


REFUSED = {
    "its node": (pod(container("c", 4), nodeName="n"), "the pod names its node, and only kube-scheduler allocates"),
    "a copy of a running pod": (
        pod(container("c", 4), resourceClaims=[{"name": "gpu-mem", "resourceClaimName": "x"}]),
        "the pod has a claim of the name gpu-mem already",
    ),
    "more units than any card": (pod(container("c", "1G")), "the quantity is no whole number from 1 to 999999999"),
    "more units than fit on a card": (pod(container("c", (1 << 20) + 1)), "no card has more than 1048576 units"),
    "more units than fit on two cards": (wishing((1 << 21) + 2, card_count="2"), "no card has more than 1048576 units"),
    "units beyond 64 bits": (pod(container("c", "16E")), "the quantity is no whole number from 1 to 999999999"),
    "a large init container before two": (
        pod(container("c", 4), container("d", 4), initContainers=[container("i", 6)]),
        "a claim would hold 10 units instead of 8",
    ),
    "a sidecar after an init container": (
        pod(container("c"), initContainers=[container("i", 6), sidecar("s", 1)]),
        "a claim would hold 7 units instead of 6",
    ),
    "33 containers": (pod(*(container(f"c{n}", 1) for n in range(33))), "more than 32 containers ask for it"),
    "spread": (wishing(placement="spread"), "kubegpu.share/placement: binpack is the only one here"),
    "another placement": (wishing(placement=""), "kubegpu.share/placement is neither binpack nor spread"),
    "no number of cards": (wishing(card_count="two"), "kubegpu.share/card-count is no number of cards from 1 to 32"),
    "no card": (wishing(card_count="0"), "kubegpu.share/card-count is no number of cards from 1 to 32"),
    "33 cards": (wishing(33, card_count="33"), "kubegpu.share/card-count is no number of cards from 1 to 32"),
    "a huge number of cards": (wishing(card_count="9" * 30), "kubegpu.share/card-count is no number of cards"),
    "units that can't be spread": (wishing(5, card_count="2"), "can't be spread equally over 2 cards"),
    "five cards for two containers": (
        pod(container("c", 5), container("d", 5), annotations={contract.POD_CARD_COUNT: "5"}),
        "kubegpu.share/card-count is at most 4 where several containers ask for memory",
    ),
    "nine containers on four cards": (
        pod(*(container(f"c{n}", 4) for n in range(9)), annotations={contract.POD_CARD_COUNT: "4"}),
        "kubegpu.share/card-count and the containers that ask make more than 32 requests of one claim",
    ),
    "no models": (wishing(models=""), "kubegpu.share/models is no list of models"),
    "an empty pattern": (wishing(exclude_models="a,,b"), "kubegpu.share/exclude-models is no list of models"),
    "17 patterns": (wishing(models=",".join("a" * 17)), "kubegpu.share/models has more than 16 patterns"),
    "a long pattern": (wishing(models="a" * 129), "kubegpu.share/models has a pattern of more than 128 characters"),
    "a quote": (wishing(models='a"b'), "kubegpu.share/models has another character than letters"),
    "another alphabet": (wishing(exclude_models="é"), "kubegpu.share/exclude-models has another character than"),
    "a name that is too long": (wishing(models="a" * 120 + "," + "b" * 120), "a name of more than 253 characters"),
}


@pytest.mark.parametrize(("wanted", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_turned_is_refused_in_one_sentence(server, wanted, sentence):
    status, text = created(server, wanted)
    assert status == 403, text
    _who, _colon, said = text.partition("aliyun.com/gpu-mem can't be turned into a claim: ")
    assert sentence in said
    assert "denied request" not in said


INVALID = {
    "a fraction": (container("c", "4500m"), "must be an integer"),
    "a negative number": (container("c", -4), "must be greater than or equal to 0"),
    "a request alone": (container("c", requests=4), "Limit must be set for non overcommitable resources"),
    "another request": (container("c", 4, 2), "must be equal to aliyun.com/gpu-mem limit of 4"),
}


@pytest.mark.parametrize(("wanted", "sentence"), INVALID.values(), ids=INVALID)
def test_the_api_server_itself_refuses_invalid_quantities(server, wanted, sentence):
    status, text = created(server, pod(wanted))
    assert (status, sentence in text) == (422, True), text


def test_the_copy_of_a_turned_pod_stays_as_it_is(server):
    """As ``kubectl debug --copy-to`` makes it."""
    turned_once = created(server, pod(container("c", 4), initContainers=[sidecar("s", 1)]))
    assert essence(created(server, {"metadata": {"name": "p"}, "spec": turned_once})) == essence(turned_once)


def test_a_bare_pod_cannot_be_applied_a_second_time(server):
    """docs/claims.md says so: what apply wants back is immutable. A Deployment's template isn't turned."""
    space = server.namespace()
    wanted = {"apiVersion": "v1", "kind": "Pod", **pod(container("c", 4)), "metadata": {"name": "bare"}}
    path = f"/api/v1/namespaces/{space}/pods/bare?fieldManager=kubectl"
    for code in (201, 422):
        status, text = server.ask("PATCH", path, wanted, content="application/apply-patch+yaml")
        assert (status, "pod updates may not change fields" in text) == (code, code == 422), text


def test_ephemeral_containers_have_no_resources(server):
    asking = {**container("e", 4), "targetContainerName": "c"}
    server.request(
        "POST", "/api/v1/namespaces/default/pods", {**pod(container("c", 4)), "metadata": {"name": "debugged"}}
    )
    path = "/api/v1/namespaces/default/pods/debugged/ephemeralcontainers"
    status, text = server.ask(
        "PATCH", path, {"spec": {"ephemeralContainers": [asking]}}, content="application/strategic-merge-patch+json"
    )
    assert (status, "Forbidden: cannot be set for an Ephemeral Container" in text) == (422, True), text


def test_a_mirror_pod_of_a_static_pod_is_left_alone(server):
    mirror = pod(container("c", 4), nodeName="n")
    mirror["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    flags = ["--as=system:node:n", "--as-group=system:nodes", "--as-group=system:authenticated"]
    server.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "nodes"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
        }
    )
    text = json.dumps({"apiVersion": "v1", "kind": "Pod", **mirror})
    done = server.kubectl("create", "--dry-run=server", "--output=json", "--filename=-", *flags, text=text)
    assert done.returncode == 0, done.stderr
    assert essence(json.loads(done.stdout)["spec"]) == [[], [["c", [], ["4"]]], []]


def test_defaults_of_a_namespace_count(server):
    """LimitRanger has added limits and requests before the policy sees the pod, and adds them once more after it."""
    namespace = server.namespace()
    limits = [{"type": "Container", "default": {MEMORY: 3}, "defaultRequest": {MEMORY: 3}}]
    server.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "r", "namespace": namespace},
            "spec": {"limits": limits},
        }
    )
    there = PODS.replace("default", namespace)
    answer = until(lambda: _with_claims(server.ask("POST", there, pod(container("c"), container("d", 4)))))
    expected = turned(pod(container("c", 3), container("d", 4)))
    for one in expected["containers"]:
        one["resources"]["limits"] = {MEMORY: "0"}
    assert essence(json.loads(answer[1])["spec"]) == essence(expected)


def _with_claims(answer):
    return answer if answer[0] == 201 and "resourceClaims" in answer[1] else None


def test_a_quota_of_the_resource_limits_nothing(server):
    """docs/claims.md says so, and what does limit; that the quota is in effect shows a resource that isn't turned."""
    namespace = server.namespace()
    by_class = f"{templates.DRIVER}.deviceclass.resource.k8s.io/devices"
    hard = {f"requests.{MEMORY}": "1", "requests.example.org/other": "1", by_class: "3"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": namespace}}
    server.apply({**quota, "spec": {"hard": hard}})
    status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/q/status"
    server.request("PATCH", path, status, content="application/merge-patch+json")
    there = PODS.replace("default", namespace)
    other = pod({"name": "c", "image": "i", "resources": {"limits": {"example.org/other": "2"}}})
    until(lambda: "exceeded quota" in server.ask("POST", there, other)[1])
    assert server.ask("POST", there, pod(container("c", 4)))[0] == 201
    # What the claims of a namespace may have in number: a share of each card for each container.
    claims = f"/apis/{templates.API_VERSION}/namespaces/{namespace}/resourceclaims"
    for name, shape, code in (
        ("one", templates.Shape((4,)), 201),
        ("three", templates.Shape((4, 2, 1)), 403),
        ("two", templates.Shape((8,), 2), 201),
    ):
        template = template_of(namespace, templates.name_of(shape), "GiB")
        answer = server.ask("POST", claims, {"metadata": {"name": name}, "spec": template["spec"]["spec"]})
        assert answer[0] == code and (code == 201 or f"exceeded quota: q, requested: {by_class}=3" in answer[1])


# --------------------------------------------------------------------------- any pod

UNITS = st.sampled_from([None, None, 0, "0", 1, 2, 4, "4", "2k", "4000m", "1e1", 6])


@st.composite
def pods(draw):
    def one(name, place):
        units = draw(UNITS)
        more = {"restartPolicy": "Always"} if place == "init" and draw(st.booleans()) else {}
        requests = units if units is not None and draw(st.booleans()) else None
        claims = [{"name": "nic"}] if with_claims and draw(st.booleans()) else None
        return container(f"{name}", units, requests, claims, **more)

    with_claims = draw(st.booleans())
    own = [one(f"c{n}", "own") for n in range(draw(st.integers(1, 3)))]
    inits = [one(f"i{n}", "init") for n in range(draw(st.integers(0, 3)))]
    wishes = {
        contract.POD_PLACEMENT: st.sampled_from(["binpack", "spread", "x"]),
        contract.POD_CARD_COUNT: st.sampled_from(["1", "2", "02", "0", "-1", "3", ""]),
        contract.POD_MODELS: st.lists(st.text(alphabet="aX0*? -.(é", max_size=4), max_size=3).map(",".join),
        contract.POD_EXCLUDE_MODELS: st.lists(st.text(alphabet="bx1*_/+'", max_size=4), max_size=3).map(",".join),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(wishes)), max_size=2, unique=True))
    more = {"resourceClaims": [{"name": "nic", "resourceClaimName": "nic"}]} if with_claims else {}
    if inits:
        more["initContainers"] = inits
    return pod(*own, annotations={key: draw(wishes[key]) for key in chosen}, **more)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(wanted=pods())
def test_any_pod_gets_the_claim_of_the_model_or_one_sentence(server, wanted):
    try:
        expected = essence(turned(canonical(wanted)))
    except contract.ContractError:
        expected = 403
    found = created(server, wanted)
    if isinstance(found, tuple):
        assert (found[0], "can't be turned into a claim: " in found[1]) == (expected, True), found[1]
    else:
        assert essence(found) == expected


def canonical(wanted):
    """The quantities as the API server stores them."""
    return json.loads(json.dumps(wanted).replace('"4000m"', '"4"'))


# --------------------------------------------------------------------------- nodes of both allocations

LABEL = "kubegpu.share/allocation"


@pytest.fixture(scope="module")
def mixed(server):
    """Nodes of both allocations are there: the policies ask which one a pod is for."""
    server.apply(*rendered("dra_admission", "admission", gpushare_claims="asked", gpushare_admission="deny"))
    for name, value in (("moved", "dra"), ("stays", "extender")):
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": {LABEL: value}}})
    # Those from before are in effect for a moment more.
    until(lambda: ask(server, "default", share(spread=True))[0] == 201)
    until(lambda: "resourceClaims" not in ask(server, "default", share())[1])
    until(lambda: "resourceClaims" in ask(server, "moved", share())[1])
    until(lambda: ask(server, "moved", share(spread=True))[0] == 403)
    return server


def ask(server, namespace, wanted):
    return server.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", wanted)


def share(label=None, select=None, spread=False, **spec):
    annotations = {"kubegpu.share/placement": "spread"} if spread else None
    wanted = pod(container("c", 4), annotations=annotations, **spec)
    if label:
        wanted["metadata"]["labels"] = {LABEL: label}
    if select:
        wanted["spec"]["nodeSelector"] = {"gpushare": select}
    return wanted


@pytest.mark.parametrize(
    ("namespace", "label", "select", "claim"),
    [
        ("default", None, None, False),
        ("moved", None, None, True),
        ("stays", None, None, False),
        # The nodes that a pod selects are more than its namespace's label, and its own label more than both.
        ("default", None, "dra", True),
        ("moved", None, "true", False),
        ("default", "dra", None, True),
        ("stays", "dra", "true", True),
        ("moved", "extender", "dra", False),
        # Another value is no wish.
        ("moved", None, "other", True),
        ("default", None, "other", False),
        ("moved", "other", None, False),
    ],
)
def test_a_pod_is_turned_where_it_or_its_namespace_asks_for_it(mixed, namespace, label, select, claim):
    wanted = share(label, select)
    status, text = ask(mixed, namespace, wanted)
    assert status == 201, text
    expected = turned(wanted) if claim else wanted["spec"]
    assert essence(json.loads(text)["spec"])[0] == expected.get("resourceClaims", [])
    limits = json.loads(text)["spec"]["containers"][0]["resources"].get("limits", {})
    assert limits == ({} if claim else {"aliyun.com/gpu-mem": "4"})


def test_what_claims_cannot_do_is_refused_only_where_a_claim_is_asked_for(mixed):
    """The extender spreads."""
    assert ask(mixed, "default", share(spread=True))[0] == 201
    status, text = ask(mixed, "moved", share(spread=True))
    assert status == 403 and "aliyun.com/gpu-mem can't be turned into a claim" in text


@pytest.mark.parametrize("namespace", ["default", "moved"])
def test_the_attack_policy_knows_a_share_of_either_allocation(mixed, namespace):
    """CUDA_VERSION gives a container without a share every card."""
    env = [{"name": "CUDA_VERSION", "value": "12"}]
    until(lambda: ask(mixed, namespace, pod(container("c", env=env)))[0] == 403)
    status, text = ask(mixed, namespace, pod(container("c", 4, env=env)))
    assert status == 201, text


def test_the_api_server_has_not_panicked(server):
    """The last test of the file: a policy's expression can end a request, and with it the connection."""
    assert "panic" not in server.log().lower()
