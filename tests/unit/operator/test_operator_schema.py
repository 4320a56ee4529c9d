# SPDX-License-Identifier: GPL-3.0-or-later
"""The schema of GPUShare: what it is made of, what the engine makes of its names, what a real API server accepts."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from own_cluster import until
from real_apiserver import MERGE, Refused, api_server, own_api_server

from lab import build
from lab.shell import LabError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "operator"))

import schema as subject

ROOT = subject.ROOT

__all__ = ["api_server"]

# Where the engine's own rule is: the module that the operator's image is built of.
ENGINE = ROOT / "lab" / "go" / "ansible-operator"
TEMPLATES = (
    "{{ 1 }}",
    "a{{ lookup('pipe', 'id') }}",
    "{% if 1 %}",
    "{# #}",
    "a\n{{ 1 }}",
    "a\n",
    "!unsafe a",
    "$(id)",
    "`id`",
)


def crd():
    return yaml.safe_load(subject.CRD.read_text())


def schema_of(document):
    return document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def spec_of(document):
    return schema_of(document)["properties"]["spec"]


def walk(schema, path=""):
    """Yield every schema below one, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")


# ----------------------------------------------------------------- what it is made of


def test_the_definition_is_current_and_every_option_is_decided():
    assert subject.CRD.read_text() == subject.current(), "run python operator/schema.py"


@pytest.fixture
def small():
    """A list of options and argument specifications that fit."""
    listing = {
        "texts": {"name": {"pattern": "^[a-z]*$", "maxLength": 5}},
        "allowed": {"_shared": {}, "role": {"role_name": {"text": "name"}}},
        "rules": [],
        "excluded": {"roles": {"machine": "no machine"}, "options": {"role_state": "removal"}},
    }
    text = {"type": "str", "description": "Any."}
    specs = {
        "_shared": {},
        "machine": {"machine_user": text},
        "role": {"role_name": dict(text), "role_state": dict(text)},
    }
    return listing, specs


def new_option(listing, specs):
    specs["role"]["role_new"] = {"type": "int", "description": "New."}


def gone_option(listing, specs):
    del specs["role"]["role_name"]


def gone_excluded(listing, specs):
    del specs["role"]["role_state"]


def new_role(listing, specs):
    specs["other"] = {"other_name": {"type": "str", "description": "New."}}


def gone_role(listing, specs):
    del specs["machine"]


def both_lists(listing, specs):
    listing["excluded"]["options"]["role_name"] = "why"


def no_reason(listing, specs):
    listing["excluded"]["options"]["role_state"] = " "


def state(listing, specs):
    listing["allowed"]["role"]["role_state"] = listing["excluded"]["options"].pop("role_state")
    listing["allowed"]["role"]["role_state"] = {"text": "name"}


def any_text(listing, specs):
    listing["allowed"]["role"]["role_name"] = {}


def any_number(listing, specs):
    specs["role"]["role_name"]["type"] = "int"


def any_mapping(listing, specs):
    specs["role"]["role_name"]["type"] = "dict"


def any_length(listing, specs):
    specs["role"]["role_name"] |= {"type": "list", "elements": "str"}


def any_mappings(listing, specs):
    specs["role"]["role_name"] |= {"type": "list", "elements": "dict"}
    listing["allowed"]["role"]["role_name"] = {"most": 2}


def changed_key(listing, specs):
    any_mappings(listing, specs)
    specs["role"]["role_name"]["options"] = {"someKey": {"type": "bool", "description": "Any."}}


def digits(listing, specs):
    specs["role"]["role_k8s"] = specs["role"].pop("role_name")
    listing["allowed"]["role"] = {"role_k8s": {"text": "name"}}


def misspelt(listing, specs):
    listing["allowed"]["role"]["role_name"]["maximum"] = 3


def foreign_choice(listing, specs):
    specs["role"]["role_name"]["choices"] = ["a"]
    listing["allowed"]["role"]["role_name"] = {"choices": ["b"]}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (new_option, "role_new is in neither list"),
        (gone_option, "role_name, which role role doesn't have"),
        (gone_excluded, "role_state, which no role has"),
        (new_role, "other_name is in neither list"),
        (gone_role, "the role machine, which isn't there"),
        (both_lists, "role_name is in both lists"),
        (no_reason, "excludes role_state without a reason"),
        (state, "role_state is never a resource's to set"),
        (any_text, "role_name is any text"),
        (any_number, "role_name is any number"),
        (any_mapping, "role_name is a dict"),
        (any_length, "role_name may have any number of entries"),
        (any_mappings, "role_name is a list of any mappings"),
        (changed_key, "role_name has someKey, of which the engine makes some_key"),
        (digits, "roleK8s isn't words of letters"),
        (misspelt, "maximum of role_name, which means nothing"),
        (foreign_choice, "role_name has no choice b"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_not_decided_is_no_schema(small, damage, said):
    listing, specs = small
    assert spec_of(subject.definition(listing, specs))["properties"].keys() == {"roleName"}
    damage(listing, specs)
    with pytest.raises(subject.Undecided, match=re.escape(said)):
        subject.definition(listing, specs)


def test_every_value_is_bounded_and_no_text_is_a_template():
    texts = 0
    for path, one in walk(spec_of(crd())):
        assert "x-kubernetes-preserve-unknown-fields" not in one and "additionalProperties" not in one, path
        assert "default" not in one, path
        kind = one["type"]
        if kind == "array":
            assert one["maxItems"], path
        elif kind == "object":
            assert one["properties"], path
        elif kind == "integer":
            assert one["minimum"] < one["maximum"], path
        elif kind == "string" and "enum" not in one:
            texts += 1
            assert one["maxLength"], path
            # As Go's regular expressions read it, where $ is the end of the text alone.
            pattern = re.compile(one["pattern"].removesuffix("$") + r"\Z")
            assert not [text for text in TEMPLATES if pattern.search(text)], path
        else:
            assert kind == "boolean" or "enum" in one, path
    assert texts > 15


def test_descriptions_are_plain_text_in_the_words_of_the_resource():
    options = subject.allowed(subject.listed(), subject.specifications())
    for path, one in walk(spec_of(crd())):
        if path and not path.endswith("[]"):
            assert not re.search(r"\b[A-Z]{1,2}\(", one["description"]), path
            assert not [name for name in options if re.search(rf"\b{name}\b", one["description"])], path
    assert subject.plain(["V(a) of O(role_x=dra), C(x(y\\)z)", "M(a.b.c) L(the page,https://a/b)"], {"role_x"}) == (
        '"a" of roleX: dra, x(y)z\na.b.c the page'
    )


# ----------------------------------------------------------------- what the engine makes of the names

PROGRAM = """package main

import (
	"bufio"
	"fmt"
	"os"

	"{module}/paramconv"
)

func main() {{
	names := bufio.NewScanner(os.Stdin)
	for names.Scan() {{
		fmt.Println(paramconv.ToSnake(names.Text()))
	}}
}}
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """What the engine's own rule makes of names: its source of the module's download, compiled."""
    folder = tmp_path_factory.mktemp("engine")
    try:
        go = build.find_go()
    except LabError as error:
        pytest.skip(str(error))
    listed = [go, "list", "-mod=mod", "-m", "-f", "{{.Dir}}", "github.com/operator-framework/ansible-operator-plugins"]
    for name in ("go.mod", "go.sum"):
        (folder / name).write_bytes((ENGINE / name).read_bytes())
    subprocess.run(
        [go, "mod", "download", "github.com/operator-framework/ansible-operator-plugins"], cwd=folder, check=True
    )
    source = subprocess.run(listed, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    (folder / "paramconv").mkdir()
    rule = Path(source) / "internal" / "ansible" / "paramconv" / "paramconv.go"
    (folder / "paramconv" / "paramconv.go").write_bytes(rule.read_bytes())
    (folder / "main.go").write_text(PROGRAM.format(module="kubegpu.share/lab/ansible-operator"))
    subprocess.run([go, "build", "-mod=mod", "-o", "rule", "."], cwd=folder, check=True)

    def convert(names):
        given = "".join(f"{name}\n" for name in names)
        done = subprocess.run([folder / "rule"], input=given, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return convert


def test_the_engine_makes_the_variables_of_the_fields(engine):
    """Keys of nested mappings are converted, too; they have to stay what they are."""
    assert engine(["tolerationSeconds", "imageURL", "a8s"]) == ["toleration_seconds", "image_url", "a8s"]
    options = subject.allowed(subject.listed(), subject.specifications())
    fields = spec_of(crd())["properties"]
    assert engine(fields) == list(options)
    nested = {path.rpartition(".")[2] for path, one in walk(spec_of(crd())) if "[]." in path}
    assert nested == {"key", "operator", "value", "effect"}
    assert engine(sorted(nested)) == sorted(nested)


# ----------------------------------------------------------------- a real API server

GOOD = {
    "gpuExclude": ["GPU-5a4d7f2e-1f0b-4a6e-9a51-2f8f3a0c6b11", "0000:3b:00.0", "NVIDIA T400*", "NVIDIA A100 (80GB)?"],
    "gpushareNodes": ["gpu-1", "ip-10-0-0-1.eu-west-1.compute.internal"],
    "gpushareMemoryLimit": "off",
    "gpushareTolerations": [
        {"operator": "Exists"},
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
    ],
    "gpushareIgnoreXids": [13, 31],
    "preflightIgnore": ["boot-full", "card-lost@gpu7", "claims-preemption@gpushare_allocation"],
    "verifyAllowedPods": ["monitoring/dcgm-exporter-*", "*/x"],
    "verifyAllowedProcesses": ["nvidia-persistenced", "/usr/bin/X"],
}
TOLERATION = "spec.gpushareTolerations[0]"
BAD = [
    ({"gpushareNodes": None}, "spec.gpushareNodes: Required value"),
    ({"gpushareNodes": []}, "spec.gpushareNodes in body should have at least 1 items"),
    ({"gpushareNodes": ["a", "a"]}, "spec.gpushareNodes[1]: Duplicate value"),
    ({"gpushareNodes": ["{{ lookup('pipe', 'id') }}"]}, "spec.gpushareNodes[0] in body should match"),
    ({"gpushareNodes": ["a\n"]}, "spec.gpushareNodes[0] in body should match"),
    ({"gpushareNodes": "a"}, "must be of type array"),
    ({"gpushareMemoryUnit": "TiB"}, 'supported values: "GiB", "MiB"'),
    ({"gpusharePreemption": "yes"}, "must be of type boolean"),
    ({"gpushareMemoryLimit": False}, "must be of type string"),
    ({"gpushareTemplatesPerNamespace": 2049}, "less than or equal to 2048"),
    ({"gpushareReservedMemory": 1.5}, "must be of type integer"),
    ({"schedulerMode": "static_pod"}, 'supported values: "auto", "dedicated"'),
    ({"schedulerMode": "openshift"}, 'supported values: "auto", "dedicated"'),
    ({"gpushareTolerations": [{"effect": "NoSchedule"}]}, f"{TOLERATION}: Invalid value: an entry without a key"),
    ({"gpushareTolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "Exists takes no value"),
    ({"gpushareTolerations": [{"key": "a", "effect": ""}]}, "Unsupported value"),
    ({"gpushareAllocation": "dra", "schedulerMode": "dedicated"}, "leave schedulerMode out"),
    ({"gpushareAllocation": "dra", "gpushareExtenderMetrics": True}, "leave gpushareExtenderMetrics out"),
    # Not fields: what is asked for mustn't be dropped in silence by a client that asks for strictness.
    ({"gpushareState": "absent"}, 'unknown field "spec.gpushareState"'),
    ({"gpushare_state": "absent"}, 'unknown field "spec.gpushare_state"'),
    ({"gpuKubeconfig": {"clusters": []}}, 'unknown field "spec.gpuKubeconfig"'),
    ({"ansiblePythonInterpreter": "/bin/sh"}, 'unknown field "spec.ansiblePythonInterpreter"'),
    ({"uninstallWithPods": True}, 'unknown field "spec.uninstallWithPods"'),
    ({"gpushareTolerations": [{"key": "a", "tolerationSeconds": 3}]}, "gpushareTolerations[0].tolerationSeconds"),
]


def resource(spec, name="cluster"):
    return {"apiVersion": "kubegpu.share/v1alpha1", "kind": "GPUShare", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def served(api_server):
    api_server.install(subject.CRD)
    return api_server


COLLECTION = "/apis/kubegpu.share/v1alpha1/gpushares"


def test_the_api_server_serves_the_definition_and_keeps_what_it_is_given(served):
    stored = served.request("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gpushares.kubegpu.share")
    conditions = {one["type"]: one["status"] for one in stored["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"
    # The annotation of kubectl apply has at most 262,144 bytes, a bundle at most 1 MiB.
    assert len(json.dumps(crd())) < 100_000
    served.apply(resource(GOOD))
    served.apply(resource({"gpushareNodes": [f"gpu-{n}" for n in range(5000)]}))
    served.apply(resource(GOOD))
    assert served.request("GET", f"{COLLECTION}/cluster")["spec"] == GOOD
    shown = served.kubectl("get", "gsh", "cluster").stdout.splitlines()[0]
    assert shown.split() == ["NAME", "AVAILABLE", "PROGRESSING", "DEGRADED", "REASON", "AGE"]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[said[:40] for _change, said in BAD])
def test_the_api_server_refuses(served, change, said):
    spec = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    served.ask("DELETE", f"{COLLECTION}/cluster")
    with pytest.raises(Refused) as refused:
        served.request("POST", f"{COLLECTION}?dryRun=All&fieldValidation=Strict", resource(spec))
    assert said in str(refused.value)
    assert refused.value.status in (400, 422)


def test_what_no_option_is_does_not_come_in(served):
    """A client that doesn't ask for strictness gets its resource, without what the schema doesn't have."""
    hostile = copy.deepcopy(GOOD) | {"gpushare_state": "absent", "gpushareState": "absent", "ansibleConnection": "ssh"}
    hostile["gpushareTolerations"][0]["vars"] = {"ansible_become": True}
    given = {
        **resource(hostile),
        "status": {"conditions": [], "owner": "x"},
        "vars": {"gpushare_state": "absent"},
    }
    served.ask("DELETE", f"{COLLECTION}/cluster")
    kept = served.request("POST", f"{COLLECTION}?fieldValidation=Ignore", given)
    assert kept["spec"] == GOOD
    assert kept.keys() == {"apiVersion", "kind", "metadata", "spec"}


def test_a_cluster_has_one_resource_and_those_from_before_that_rule_can_be_deleted():
    former = crd()
    rules = schema_of(former).pop("x-kubernetes-validations")
    assert rules
    status = {"status": {"observedGeneration": 1}}
    with own_api_server() as server:
        server.apply(former)
        until(lambda: server.ask("GET", COLLECTION)[0] == 200)
        for name in ("seen", "unseen"):
            made = resource(GOOD, name)
            made["metadata"]["finalizers"] = ["kubegpu.share/uninstall"] if name == "seen" else []
            server.request("POST", COLLECTION, made)
        server.request("PATCH", f"{COLLECTION}/seen/status", status, MERGE)
        server.install(subject.CRD)
        until(lambda: server.ask("POST", f"{COLLECTION}?dryRun=All", resource(GOOD, "other"))[0] == 422)
        for metadata in ({"name": "other"}, {"generateName": "cluster"}):
            with pytest.raises(Refused, match="call it cluster"):
                server.request("POST", COLLECTION, {**resource(GOOD), "metadata": metadata, **status})
        server.request("POST", COLLECTION, resource(GOOD))
        # The operator has taken care of the first; the second has nothing that would keep it.
        server.request("PATCH", f"{COLLECTION}/seen", {"spec": {"gpushareNodes": ["b"]}}, MERGE)
        server.request("DELETE", f"{COLLECTION}/seen")
        server.request("PATCH", f"{COLLECTION}/seen", {"metadata": {"finalizers": None}}, MERGE)
        with pytest.raises(Refused, match="call it cluster"):
            server.request("PATCH", f"{COLLECTION}/unseen", {"metadata": {"finalizers": ["a/b"]}}, MERGE)
        server.request("DELETE", f"{COLLECTION}/unseen")
        assert [one["metadata"]["name"] for one in server.request("GET", COLLECTION)["items"]] == ["cluster"]


def test_the_status_is_a_subresource(served):
    served.apply(resource(GOOD))
    condition = {"type": "Degraded", "status": "True", "reason": "taint_servers", "message": "node a has a taint"}
    condition |= {"lastTransitionTime": "2026-11-29T20:00:00Z", "observedGeneration": 1}
    patch = {"status": {"observedGeneration": 1, "conditions": [condition]}}
    one = f"{COLLECTION}/cluster"
    assert "status" not in served.request("PATCH", one, patch, MERGE)
    changed = {**patch, "spec": {"gpushareNodes": ["b"]}}
    done = served.request("PATCH", f"{one}/status", changed, MERGE)
    assert done["status"] == patch["status"]
    assert done["spec"] == GOOD
    bad = {"status": {"conditions": [{**condition, "status": "yes"}]}}
    with pytest.raises(Refused, match='supported values: "True", "False", "Unknown"'):
        served.request("PATCH", f"{one}/status", bad, MERGE)
    row = served.kubectl("get", "gsh", "cluster", "--no-headers").stdout.split()
    assert row[:3] == ["cluster", "True", "taint_servers"]


@pytest.mark.long
def test_the_oldest_api_server_serves_the_definition():
    with own_api_server(release="1.29") as server:
        server.install(subject.CRD)
        server.apply(resource(GOOD))
        with pytest.raises(Refused, match="leave schedulerMode out"):
            server.apply(resource({**GOOD, "gpushareAllocation": "dra", "schedulerMode": "dedicated"}))
