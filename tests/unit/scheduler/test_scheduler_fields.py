# SPDX-License-Identifier: GPL-3.0-or-later
"""Fields, types and rules of a configuration: the real kube-schedulers refuse the same."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import real_scheduler
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import config as sc
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import schema as fields
from fake_machine import EXTENDER
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

HEAD = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
WORDS = {
    "apiVersion": None,
    "kind": None,
    "operator": "In",
    "type": "RequestedToCapacityRatio",
    "whenUnsatisfiable": "DoNotSchedule",
    "defaultingType": "List",
    "resourceLock": "leases",
    "topologyKey": "zone",
    "healthzBindAddress": "0.0.0.0:0",
    "metricsBindAddress": "0.0.0.0:0",
    "bindVerb": "",
}
PLUGINS = sorted(fields._PLUGINS)


def example(shape: fields.Shape, minor: int, version: str, name: str = "") -> object:
    """Return a value of a shape with all its fields."""
    if isinstance(shape, fields.Struct):
        pairs = {key: example(inner, minor, version, key) for key, inner in shape.of(minor, version).items()}
        return {key: value for key, value in pairs.items() if value is not None}
    if name == "pluginConfig":
        known = {plugin: fields.args_of(plugin, minor, version) for plugin in PLUGINS}
        return [{"name": key, "args": example(args, minor, version)} for key, args in known.items() if args]
    if isinstance(shape, fields.ListOf):
        return [example(shape.item, minor, version, name)]
    if isinstance(shape, fields.MapOf):
        return {"a": example(shape.value, minor, version)}
    kinds = {"bool": True, "int32": 1, "int64": 1, "float": 1.5, "bytes": "YQ==", "string": WORDS.get(name, "a")}
    duration = {"leaseDuration": "30s", "renewDeadline": "20s"}.get(name, "5s")
    return kinds.get(str(shape), duration)


def whole(minor: int, api: str) -> dict:  # type: ignore[type-arg]
    config = example(fields.CONFIGURATION, minor, api)
    assert isinstance(config, dict)
    return {"apiVersion": f"kubescheduler.config.k8s.io/{api}", "kind": "KubeSchedulerConfiguration", **config}


def mappings(value: object, place: str = "") -> list[str]:
    """Return the paths of all mappings with fields, deepest last."""
    if isinstance(value, list):
        return [mapping for number, item in enumerate(value) for mapping in mappings(item, f"{place}[{number}]")]
    if not isinstance(value, dict) or place.endswith("matchLabels"):
        return []
    found = [mapping for key, item in value.items() for mapping in mappings(item, f"{place}.{key}" if place else key)]
    return [place, *found]


def at(config: object, place: str) -> object:
    for key, number in re.findall(r"([A-Za-z]+)|\[(\d+)\]", place):
        config = config[int(number)] if number else config[key]  # type: ignore[index]
    return config


def refusal(text: str, minor: int = 36) -> str:
    try:
        sc.FORM.check("/c", text, minor)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("version", "api", "minor"), real_scheduler.RELEASES)
def test_real_scheduler_knows_every_field(version: str, api: str, minor: int, tmp_path: Path) -> None:
    config = whole(minor, api)
    message = real_scheduler.complaint(yaml.safe_dump(config), tmp_path, version)
    assert "unknown field" not in message and "cannot unmarshal" not in message and "invalid duration" not in message
    assert len(mappings(config)) > 30
    assert "has no field" not in refusal(yaml.safe_dump(config), minor)


@pytest.mark.parametrize(("version", "api", "minor"), real_scheduler.RELEASES)
def test_unknown_fields_refused_at_every_level(version: str, api: str, minor: int, tmp_path: Path) -> None:
    config = whole(minor, api)
    places = mappings(config)
    everywhere = copy.deepcopy(config)
    for number, place in enumerate(places):
        wrong = copy.deepcopy(config)
        at(wrong, place)[f"bogus{number}"] = 1  # type: ignore[index]
        at(everywhere, place)[f"bogus{number}"] = 1  # type: ignore[index]
        field = f"{place}.bogus{number}" if place else f"bogus{number}"
        assert re.search(rf"has no field {re.escape(field)}$", refusal(json.dumps(wrong), minor)), field
    # A kube-scheduler names only some: those outside of plugins' arguments, or those of the first arguments.
    message = real_scheduler.complaint(yaml.safe_dump(everywhere), tmp_path, version)
    assert "bogus" in message


@pytest.mark.parametrize(("version", "api", "minor"), real_scheduler.RELEASES)
def test_fields_of_other_versions_refused(version: str, api: str, minor: int, tmp_path: Path) -> None:
    newest = fields.CONFIGURATION.of(99, "v1") | fields.CONFIGURATION.of(99, "v1beta1")
    others = set(newest) - set(fields.CONFIGURATION.of(minor, api))
    points = {name for name, since in fields._EXTENSION_POINTS.items() if since > minor}
    texts = [{other: example(newest[other], 99, api, other)} for other in sorted(others)]
    texts += [{"profiles": [{"plugins": {point: {"enabled": []}}}]} for point in sorted(points)]
    assert texts
    for more in texts:
        text = yaml.safe_dump({**{key: whole(minor, api)[key] for key in ("apiVersion", "kind")}, **more})
        assert "has no field" in refusal(text, minor)
        assert real_scheduler.complaint(text, tmp_path, version) != "", f"{version} reads {more}"


PROFILE = "profiles:\n- schedulerName: a\n"
TWO = PROFILE + "- schedulerName: b\n"


def args(plugin: str, text: str) -> str:
    return f"{PROFILE}  pluginConfig:\n  - name: {plugin}\n    args: {text}\n"


def strategy(text: str) -> str:
    return args("NodeResourcesFit", f"{{scoringStrategy: {{{text}}}}}")


def managed(name: str) -> str:
    return f"extenders: [{{managedResources: [{{{name}}}]}}]\n"


PLUGIN = "profiles[0].pluginConfig[0]"
FIRST_RESOURCE = "extenders[0].managedResources[0].name"
SAME_RESOURCE = "extenders:\n" + 2 * "- managedResources:\n  - name: a.b/c\n"


@pytest.mark.parametrize(
    ("more", "line", "words"),
    [
        ("parallelism: '5'\n", 3, "parallelism isn't a whole number"),
        ("parallelism: 3000000000\n", 3, "parallelism isn't a whole number"),
        ("parallelism: 0\n", 3, "parallelism isn't greater than 0"),
        ("enableProfiling: 'true'\n", 3, "enableProfiling isn't true or false"),
        ("enableProfiling: 1\n", 3, "enableProfiling isn't true or false"),
        ("percentageOfNodesToScore: 101\n", 3, "percentageOfNodesToScore isn't between 0 and 100"),
        ("podInitialBackoffSeconds: 0\n", 3, "podInitialBackoffSeconds isn't greater than 0"),
        ("podInitialBackoffSeconds: 11\n", 3, "podInitialBackoffSeconds makes the longest"),
        ("podMaxBackoffSeconds: 0\n", 3, "podMaxBackoffSeconds makes the longest"),
        ("clientConnection:\n  kubeconfig: 5\n", 4, "clientConnection.kubeconfig isn't a string"),
        ("clientConnection: {qps: .inf}\n", 3, "clientConnection.qps isn't a number"),
        ("clientConnection: {burst: -1}\n", 3, "clientConnection.burst is negative"),
        ("clientConnection: []\n", 3, "clientConnection isn't a mapping"),
        ("leaderElection: {leaseDuration: 30}\n", 3, "leaderElection.leaseDuration isn't a duration such as 30s"),
        ("leaderElection: {leaseDuration: 30 s}\n", 3, "leaderElection.leaseDuration isn't a duration"),
        ("leaderElection: {leaseDuration: null}\n", 3, "leaderElection.leaseDuration isn't a duration"),
        ("leaderElection: {leaseDuration: 9s}\n", 3, "leaseDuration isn't greater than renewDeadline"),
        ("leaderElection: {retryPeriod: -1s}\n", 3, "leaderElection.retryPeriod is negative"),
        ("leaderElection: {resourceLock: endpoints}\n", 3, "resourceLock is 'endpoints', and kube-scheduler 1.36 has"),
        ("parallelism: 1\nparallelism: 2\n", 4, "parallelism is there twice"),
        ("profiles: [{}, {}]\n", 3, "profiles[0].schedulerName is missing"),
        (TWO + "- schedulerName: a\n", 6, "profiles[2].schedulerName is a, the same as that of"),
        (PROFILE + "  percentageOfNodesToScore: 200\n", 5, "profiles[0].percentageOfNodesToScore isn't between"),
        (PROFILE + "  plugins: {score: {enabled: [{name: x, weight: a}]}}\n", 5, "enabled[0].weight isn't a whole"),
        (PROFILE + "  plugins: {score: [x]}\n", 5, "profiles[0].plugins.score isn't a mapping"),
        (PROFILE + "  plugins: {multiPoint: {enabled: [{name: EBSLimits}]}}\n", 5, "is EBSLimits, which was removed"),
        (TWO + "  plugins: {queueSort: {enabled: [{name: PrioritySort}]}}\n", 6, "queueSort isn't that of profiles[0]"),
        (args("NodeResourcesFit", "{x: 1}"), 7, f"no field {PLUGIN}.args.x"),
        (strategy("type: Least"), 7, "type is 'Least', which isn't one"),
        (strategy(""), 7, "type is '', which isn't one of"),
        (strategy("type: RequestedToCapacityRatio"), 7, "requestedToCapacityRatio is missing"),
        (strategy("type: MostAllocated, resources: [{weight: 101}]"), 7, "resources[0].weight isn't between"),
        (args("NodeResourcesFit", "{ignoredResources: a}"), 7, "args.ignoredResources isn't a list"),
        (args("NodeResourcesFit", "{kind: PodTopologySpreadArgs}"), 7, "kind isn't NodeResourcesFitArgs"),
        (args("NodeResourcesFit", "[]"), 7, "args isn't a mapping"),
        (args("DefaultPreemption", "{minCandidateNodesPercentage: 101}"), 7, "Percentage isn't between"),
        (
            args("DefaultPreemption", "{minCandidateNodesPercentage: 0, minCandidateNodesAbsolute: 0}"),
            7,
            "Absolute is 0, as",
        ),
        (args("InterPodAffinity", "{hardPodAffinityWeight: 101}"), 7, "hardPodAffinityWeight isn't between"),
        (args("VolumeBinding", "{bindTimeoutSeconds: -1}"), 7, "bindTimeoutSeconds is negative"),
        (args("PodTopologySpread", "{defaultConstraints: [{maxSkew: 1}]}"), 7, "isn't List, and there are"),
        (
            args("PodTopologySpread", "{defaultingType: List, defaultConstraints: [{maxSkew: 0}]}"),
            7,
            "defaultConstraints[0].maxSkew isn't greater",
        ),
        (args("NodeResourcesBalancedAllocation", "{resources: [{name: a, weight: 2}]}"), 7, "weight isn't 1"),
        (args("NodeAffinity", "{addedAffinity: {required: {}}}"), 7, f"no field {PLUGIN}.args.addedAffinity.required"),
        (
            args("InterPodAffinity", "{}") + "  - name: InterPodAffinity\n",
            8,
            "profiles[0].pluginConfig[1].name is InterPodAffinity, which already has arguments",
        ),
        ("extenders:\n- prioritizeVerb: p\n", 4, "extenders[0].weight isn't greater than 0"),
        ("extenders: [{weight: a}]\n", 3, "extenders[0].weight isn't a whole number"),
        ("extenders: [{enableHTTPS: 'no'}]\n", 3, "extenders[0].enableHTTPS isn't true or false"),
        ("extenders: [{httpTimeout: 5000000000}]\n", 3, "extenders[0].httpTimeout isn't a duration"),
        ("extenders: [{tlsConfig: {certData: '***'}}]\n", 3, "extenders[0].tlsConfig.certData isn't base64"),
        ("extenders: [{tlsConfig: {certdata: YQ==}}]\n", 3, "no field extenders[0].tlsConfig.certdata"),
        (managed("name: cpu"), 3, f"{FIRST_RESOURCE} isn't the name of an extended resource"),
        (managed("name: kubernetes.io/x"), 3, f"{FIRST_RESOURCE} isn't the name of an extended resource"),
        (managed("name: a.b/c/d"), 3, f"{FIRST_RESOURCE} isn't the name of an extended resource"),
        (managed(""), 3, f"{FIRST_RESOURCE} isn't the name of an extended resource"),
        (SAME_RESOURCE, 7, "extenders[1].managedResources[0].name is a.b/c, which extenders[0] manages too"),
        (
            "extenders: [{bindVerb: a}, {bindVerb: b}]\n",
            3,
            "extenders[1].bindVerb is set, and extenders[0] has one too",
        ),
        ("extenders: [filter]\n", 3, "extenders[0] isn't a mapping"),
        ("profiles: {a: b}\n", 3, "profiles isn't a list"),
    ],
)
def test_invalid_configuration_refused_with_its_line(more: str, line: int, words: str, tmp_path: Path) -> None:
    assert re.match(rf"/c, line {line}: .*{re.escape(words)}", refusal(HEAD + more))
    assert real_scheduler.complaint(HEAD + more, tmp_path) != ""


@pytest.mark.parametrize(
    "more",
    [
        "enableProfiling: y\nparallelism: 5.0\npodMaxBackoffSeconds: 5e1\npercentageOfNodesToScore: 010\n",
        "parallelism: 0x10\npodMaxBackoffSeconds: 1_0\n",
        "parallelism: null\nprofiles: null\nextenders: ~\nleaderElection: null\nclientConnection:\n",
        "leaderElection: {leaderElect: no, leaseDuration: '0', resourceLock: endpoints}\n",
        "leaderElection: {leaseDuration: 1h1m1.5s, renewDeadline: '0'}\n",
        "profiles: [null]\nextenders: [null]\n",
        "profiles: [{schedulerName: 1:30}]\n",
        "profiles: [{schedulerName: 2001-01-01}]\n",
        "clientConnection: {qps: 5, burst: 0, contentType: ''}\n",
        "extenders:\n- &a {urlPrefix: http://a, httpTimeout: 5s}\n- <<: *a\n  filterVerb: f\n",
        "extenders:\n- urlPrefix: http://a\n  tlsConfig: {insecure: true, certData: null, serverName: a}\n",
        "extenders: [{managedResources: [{name: example.com/Thing_1.a, ignoredByScheduler: on}], weight: 9e3}]\n",
        args("NodeResourcesFit", "{apiVersion: kubescheduler.config.k8s.io/v1, kind: NodeResourcesFitArgs}"),
        strategy("type: LeastAllocated, resources: [{name: cpu}]"),
        args("InterPodAffinity", "null"),
        args("PodTopologySpread", "{defaultingType: System, defaultConstraints: []}"),
        TWO + "  plugins: {queueSort: {enabled: []}, score: {disabled: [{name: '*'}]}}\n",
    ],
)
def test_valid_configuration_accepted(more: str, tmp_path: Path) -> None:
    assert real_scheduler.complaint(HEAD + more, tmp_path) == ""
    assert refusal(HEAD + more) == ""


SPREAD = "{defaultConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]}"


def test_constraints_of_1_19_need_no_defaulting_type() -> None:
    text = HEAD.replace("/v1\n", "/v1beta1\n") + args("PodTopologySpread", SPREAD)
    assert refusal(text, minor=19) == ""
    assert "defaultingType isn't List" in refusal(text, minor=20)
    named = text.replace("{defaultC", "{defaultingType: List, defaultC")
    assert "no field profiles[0].pluginConfig[0].args.defaultingType" in refusal(named, minor=19)
    assert refusal(named, minor=20) == ""


def test_arguments_of_foreign_plugins_accepted() -> None:
    assert refusal(HEAD + args("Coscheduling", "{permitWaitingTimeSeconds: 10, kind: AnyArgs}")) == ""


def test_text_with_leading_brace_is_json(tmp_path: Path) -> None:
    text = "{apiVersion: kubescheduler.config.k8s.io/v1,\n kind: KubeSchedulerConfiguration}\n"
    assert re.search("^/c, line 1, can't be parsed", refusal(text))
    assert "json parse error" in real_scheduler.complaint(text, tmp_path)
    top = yaml.safe_load(HEAD)
    text = json.dumps({**top, "parallelism": 5.0}, indent="\t")
    assert refusal(text) == "/c, line 4: parallelism isn't a whole number"
    assert "parallelism" in real_scheduler.complaint(text, tmp_path)


HEADS = ("apiVersion", "kind")
NUMBERS = st.sampled_from([0, 1, 1, 1, 5, 50, 100, 101, -1])
STRINGS = st.sampled_from(["a", "b", "example.com/x", "x y", "yes", "5", "", "#", "a: b"])
DURATIONS = st.sampled_from(["30s", "1m", "1h0.5m", "0", "5"])


def anything(shape: fields.Shape, name: str = "") -> st.SearchStrategy[object]:
    """Values of a shape of 1.36, now and then such as kube-scheduler refuses."""
    if name == "extenders":
        return st.lists(anything(shape.item), max_size=2, unique_by=str).map(distinct)  # type: ignore[union-attr]
    if isinstance(shape, fields.Struct):
        known = {key: anything(inner, key) for key, inner in shape.of(36, "v1").items() if key not in HEADS}
        must = [key for key in ("name", "schedulerName", "urlPrefix", "key", "operator") if key in known]
        if "args" in known:
            return st.sampled_from(PLUGINS).flatmap(configured)
        return some(known, *must)
    if isinstance(shape, fields.ListOf):
        return st.lists(anything(shape.item, name), max_size=2)
    if isinstance(shape, fields.MapOf):
        return st.just({"a": "b"})
    if shape == "string":
        return STRINGS if WORDS.get(name, "a") == "a" else st.sampled_from([WORDS[name]] * 4 + ["b"])
    kinds = {"bool": st.booleans(), "float": st.sampled_from([1.5, 2, 0]), "bytes": st.just("YQ==")}
    return kinds.get(str(shape), DURATIONS if "duration" in str(shape) else NUMBERS)


def some(known: dict[str, st.SearchStrategy[object]], *must: str) -> st.SearchStrategy[object]:
    """Mappings with these keys and up to three others."""
    few = st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True)
    return few.flatmap(lambda keys: st.fixed_dictionaries({key: known[key] for key in dict.fromkeys([*must, *keys])}))


def configured(plugin: str) -> st.SearchStrategy[object]:
    args = fields.args_of(plugin, 36, "v1")
    return st.fixed_dictionaries({"name": st.just(plugin), "args": anything(args) if args else st.just({"own": [1]})})


def distinct(extenders: list[dict]) -> list[dict]:  # type: ignore[type-arg]
    """One resource is managed by one extender, and none of them binds."""
    for number, extender in enumerate(extenders):
        extender.pop("bindVerb", None)
        if extender.get("managedResources"):
            extender["managedResources"] = [{"name": f"example.com/x{number}"}]
    return extenders


TOP = {key: anything(inner, key) for key, inner in fields.CONFIGURATION.of(36, "v1").items() if key not in HEADS}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=some(TOP), style=st.sampled_from(["block", "flow", "indented", "comments", "json", "tabs"]))
def test_merge_of_accepted_configuration_stays_accepted(  # type: ignore[no-untyped-def]
    config, style, tmp_path: Path
) -> None:
    # An empty list of extenders is as good as none, and goes with ours.
    if not config.get("extenders", [1]):
        del config["extenders"]
    config = {**yaml.safe_load(HEAD), **config}
    if style in ("json", "tabs"):
        text = json.dumps(config, indent=2 if style == "json" else "\t")
    else:
        text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None if style == "flow" else False)
    if style == "indented":
        text = "---\n" + text.replace("\n  ", "\n    ")
    if style == "comments":
        text = "".join(f"# above {number}\n{line}\n" for number, line in enumerate(text.splitlines()))
    message = real_scheduler.complaint(text, tmp_path)
    event("refused" if message else "accepted")
    if message:
        return
    done = sc.FORM.merged("/c", text, 36, EXTENDER)
    assert real_scheduler.complaint(done, tmp_path) == ""
    assert yaml.safe_load(done.replace("\t", " "))["extenders"][:-1] == config.get("extenders", [])
    assert sc.FORM.merged("/c", done, 36, EXTENDER) == done
    assert sc.FORM.without("/c", done) == text
