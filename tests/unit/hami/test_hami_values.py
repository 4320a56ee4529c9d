# SPDX-License-Identifier: GPL-3.0-or-later
"""The values of HAMi's chart: variables, nodes, values of 4paradigm's time, and what a chart ignores."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._hami import chart, legacy
from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import release
from ansible_collections.kubegpu.share.plugins.module_utils._hami.values import plan

ROLE = Path(__file__).resolve().parents[3] / "roles" / "hami"
CHART_VALUES = yaml.safe_load((Path(__file__).parent / "standin_chart" / "values.yaml").read_text())
# All values of 4paradigm's chart at its last commit (da7d4ed), by their paths.
FORMER = (Path(__file__).parent / "former_values.txt").read_text().split()


def options(**variables):
    """The role's defaults as vars/main.yml passes them, with some variables set."""
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    names = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())["__hami_options"]
    found = {name: defaults[f"hami_{name}"] for name in names}
    return {**found, "nodes": ["gpu1"], "injection": "default", **variables}


def a_cluster(**changes):
    return {
        "version": "v1.36.3",
        "nodes": [],
        "facts": {},
        "runtime_classes": [],
        "chart_values": CHART_VALUES,
        "others": [],
        "release": {},
        "assume_runtime": False,
        **changes,
    }


def codes(findings):
    return [(finding["code"], finding["path"]) for finding in findings]


# --------------------------------------------------------------------------- 4paradigm's time


@pytest.mark.parametrize("path", FORMER)
def test_every_value_of_4paradigms_time_has_a_place_or_a_sentence(path):
    sentinel = "registry.example.com/one:2" if path.endswith(("mage", "mageNew")) else ["kept"]
    given = {}
    chart.put(given, path, sentinel)
    done = legacy.translate(given)
    if path in legacy.GONE:
        assert codes(done.problems) == [("value_gone", path)] and done.problems[0]["message"].startswith(f"{path}: ")
    elif path in legacy.VARIABLES:
        assert done.values == {} and list(done.variables.values()) == [sentinel]
    elif any(path == one or path.startswith(f"{one}.") for one in legacy.SAME):
        assert (done.values, done.notes) == (given, [])
    else:
        # Moved: nothing is at the former place, and the note names the new one.
        assert len(done.notes) == 1 and done.values != given
        for place, _value in chart.leaves(done.values):
            assert chart.get(CHART_VALUES, place) is not chart.MISSING, place


def test_former_values_keep_their_meaning():
    given = {
        "version": "v2.3.8",
        "imagePullSecrets": [{"name": "one"}],
        "scheduler": {
            "defaultMem": 5000,
            "kubeScheduler": {"image": "registry.example.com:5000/kube-scheduler", "imageTag": "v1.36.1"},
            "mutatingWebhookConfiguration": {"failurePolicy": "Fail"},
        },
        "devicePlugin": {"monitorimage": "example.com/monitor:3", "nvidianodeSelector": {"gpu": "on"}},
    }
    done = legacy.translate(given)
    assert done.variables == {"default_memory": 5000} and not done.problems
    assert done.values == {
        "global": {"imageTag": "v2.3.8", "imagePullSecrets": ["one"]},
        "scheduler": {
            "kubeScheduler": {
                "image": {"registry": "", "repository": "registry.example.com:5000/kube-scheduler", "tag": "v1.36.1"}
            },
            "admissionWebhook": {"failurePolicy": "Fail"},
        },
        "devicePlugin": {
            "monitor": {"image": {"registry": "", "repository": "example.com/monitor", "tag": "3"}},
            "nvidiaNodeSelector": {"gpu": "on"},
        },
    }


# --------------------------------------------------------------------------- values


def test_the_defaults_are_values_of_the_chart():
    planned = plan(options(), a_cluster())
    assert planned["problems"] == planned["notes"] == []
    values = planned["release_values"]
    assert values["scheduler"]["kubeScheduler"]["image"]["tag"] == "v1.36.3"
    assert values["scheduler"]["admissionWebhook"]["whitelistNamespaces"] == ["hami-system", "kube-system"]
    # helm would render 1.0 for a float.
    assert repr(values["devicePlugin"]["deviceMemoryScaling"]) == "1"
    assert (planned["certificate"], planned["overwrites"], planned["runtime_class"]) == (True, True, "")


def test_a_value_that_helm_would_ignore_is_a_problem():
    given = {
        "scheduler": {"admisionWebhook": {"failurePolicy": "Fail"}},
        "devicePlugin": {"nvidiaNodeSelector": {"any": "thing"}},
    }
    found = plan(options(values=given), a_cluster())["problems"]
    assert codes(found) == [("unknown_value", "scheduler.admisionWebhook.failurePolicy")]
    assert "it has scheduler.admissionWebhook.failurePolicy" in found[0]["message"]
    assert codes(plan(options(values={"fullnameOverride": "x"}), a_cluster())["problems"]) == [
        ("name_override", "fullnameOverride")
    ]


def test_users_values_win_and_decide_who_makes_the_certificate():
    planned = plan(options(values={"scheduler": {"certManager": {"enabled": True}, "replicas": 3}}), a_cluster())
    assert planned["release_values"]["scheduler"]["replicas"] == 3 and planned["certificate"] is False


@pytest.mark.parametrize(
    ("tag", "version", "fits"),
    [
        ("", "v1.31.1+k3s1", True),
        ("v1.30.9", "v1.31.1", True),
        ("v1.29.0", "v1.31.1", False),
        ("v1.32.0", "v1.31.1", False),
        (f"v1.31.1@sha256:{'a' * 64}", "v1.31.1", True),
        (f"v1.32.0@sha256:{'a' * 64}", "v1.31.1", False),
    ],
)
def test_kube_scheduler_fits_the_cluster(tag, version, fits):
    image = "registry.example.com/kube-scheduler" + (f":{tag}" if tag else "")
    planned = plan(options(kube_scheduler_image=image), a_cluster(version=version))
    assert planned["release_values"]["scheduler"]["kubeScheduler"]["image"]["tag"] == (tag or "v1.31.1")
    assert codes(planned["problems"]) == ([] if fits else [("scheduler_version", "scheduler.kubeScheduler.image.tag")])


def test_fields_of_newer_pods_are_noted():
    assert codes(plan(options(), a_cluster(version="v1.37.0"))["notes"]) == [("newer_kubernetes", "")]


def test_nodes_of_another_device_plugin_keep_their_pods():
    def node(name, **labels):
        return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}

    mixed = a_cluster(nodes=[node("gpu1"), node("gpu2", gpu="on"), node("nvidia1")])
    planned = plan(options(), mixed)
    assert planned["release_values"]["scheduler"]["forceOverwriteDefaultScheduler"] is planned["overwrites"] is False
    assert codes(planned["notes"]) == [("leaves_default_scheduler", "hami_overwrite_default_scheduler")]
    assert "nvidia1 announce" in planned["notes"][0]["message"]
    forced = plan(options(overwrite_default_scheduler="always"), mixed)
    assert forced["overwrites"] is True and codes(forced["notes"])[0][0] == "captures_others"
    assert plan(options(), a_cluster(nodes=mixed["nodes"][:2]))["overwrites"] is True


# --------------------------------------------------------------------------- runtimes


def facts(default="runc", handler=False, cdi=False, binaries=()):
    dump = f'default_runtime_name = "{default}"\n' + ('[plugins."x".containerd.runtimes.nvidia]\n' if handler else "")
    dump += "  enable_cdi = true\n" if cdi else ""
    return {
        "kubelet": {"runtime": "containerd"},
        "runtimes": {"containerd": {"dump": dump}},
        "toolkit": {"binaries": list(binaries)},
    }


CTK = ("/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook")


@pytest.mark.parametrize(
    ("first", "second", "classes", "expected"),
    [
        (facts("nvidia", True), facts("nvidia", True), {}, ("", "envvar", "")),
        (facts("nvidia", True), facts(handler=True), {}, ("nvidia", "envvar", "nvidia")),
        (facts(handler=True), facts(handler=True), {"gpu": "nvidia"}, ("gpu", "envvar", "gpu")),
        (facts(cdi=True, binaries=CTK), facts(cdi=True, binaries=CTK), {}, ("", "cdi-annotations", "")),
        (None, None, {"nvidia": "nvidia"}, ("nvidia", "envvar", "nvidia")),
    ],
    ids=["default", "class", "class of others", "cdi", "unobserved"],
)
def test_containers_get_their_cards_by_what_the_nodes_have(first, second, classes, expected):
    found = {name: one for name, one in (("gpu1", first), ("gpu2", second)) if one}
    objects = [{"metadata": {"name": name}, "handler": handler} for name, handler in classes.items()]
    cluster = a_cluster(facts=found, runtime_classes=objects)
    planned = plan(options(nodes=["gpu1", "gpu2"], injection="auto"), cluster)
    plugin = planned["release_values"]["devicePlugin"]
    assert planned["problems"] == []
    assert (plugin["runtimeClassName"], plugin["deviceListStrategy"], planned["runtime_class"]) == expected
    if expected[1] != "envvar":
        assert (plugin["nvidiaHookPath"], plugin["nvidiaDriverRoot"]) == ("/usr/bin/nvidia-cdi-hook", "/")


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"gpu1": facts("nvidia", True), "gpu2": facts(cdi=True)}, "runtimes_differ"),
        ({"gpu1": facts("nvidia", True)}, "runtime_unknown"),
    ],
)
def test_an_unknown_way_is_refused(found, code):
    planned = plan(options(nodes=["gpu1", "gpu2"], injection="auto"), a_cluster(facts=found))
    assert codes(planned["problems"]) == [(code, "hami_injection")] and "gpu2" in planned["problems"][0]["message"]


def test_the_chart_gets_the_root_of_the_nodes_drivers():
    def planned(first, second="", former="", **variables):
        found = {
            name: {**facts(cdi=True, binaries=CTK), "driver": {"root": root}}
            for name, root in (("gpu1", first), ("gpu2", second))
            if root
        }
        release = {"status": "deployed", "chart_version": "0", "values": {"devicePlugin": {"nvidiaDriverRoot": former}}}
        cluster = a_cluster(facts=found, release=release if former else {})
        return plan(options(nodes=["gpu1", "gpu2"], injection="cdi", **variables), cluster)

    def root(*given, **variables):
        done = planned(*given, **variables)
        assert done["problems"] == []
        return done["release_values"]["devicePlugin"]["nvidiaDriverRoot"]

    container = "/run/nvidia/driver"
    assert root(container, container) == container
    assert root("/", "/", container) == "/"
    assert root(container) == root(container, "", container) == container
    assert root("/", container, driver_root="/opt") == "/opt"
    for given in (("/", container), ("/", "", container)):
        assert codes(planned(*given)["problems"]) == [("driver_roots", "hami_nodes")]


def test_a_run_that_observes_some_nodes_keeps_the_way_of_the_release():
    """With --limit; another way would change the pods of the others."""

    def chosen(former, observed):
        values = plan(options(nodes=["gpu1", "gpu2"], injection=former), a_cluster())["release_values"]
        recorded = {"status": "deployed", "chart_version": "0", "values": values}
        objects = [{"metadata": {"name": "nvidia"}, "handler": "nvidia"}]
        cluster = a_cluster(facts={"gpu1": observed}, release=recorded, runtime_classes=objects)
        return plan(options(nodes=["gpu1", "gpu2"], injection="auto"), cluster)["release_values"]["devicePlugin"]

    assert chosen("default", facts("nvidia", True))["runtimeClassName"] == ""
    assert chosen("class", facts("nvidia", True))["runtimeClassName"] == "nvidia"
    # What the observed node can't do isn't kept.
    assert chosen("default", facts(handler=True))["runtimeClassName"] == "nvidia"


# --------------------------------------------------------------------------- rendered chart


def rendered(values, **changes):
    """What the stand-in's templates make of values, without helm; ``changes`` play a version that ignores some."""
    plugin, scheduler = values["devicePlugin"], values["scheduler"]
    section = {
        "defaultMemory": 0,
        "defaultCores": 0,
        "deviceSplitCount": plugin["deviceSplitCount"],
        "deviceMemoryScaling": plugin["deviceMemoryScaling"],
        "deviceCoreScaling": plugin["deviceCoreScaling"],
        "runtimeClassName": plugin["runtimeClassName"],
        **changes.get("section", {}),
    }
    command = [
        f"--force-overwrite-default-scheduler={str(scheduler['forceOverwriteDefaultScheduler']).lower()}",
        *(
            f"--{kind}-scheduler-policy={scheduler['defaultSchedulerPolicy'][f'{kind}SchedulerPolicy']}"
            for kind in ("node", "gpu")
        ),
        f"--mig-strategy={plugin['migStrategy']}",
        f"--disable-core-limit={plugin['disablecorelimit']}",
    ]
    exempt = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": scheduler["admissionWebhook"]["whitelistNamespaces"],
    }
    hook = {"failurePolicy": changes.get("policy", "Ignore"), "namespaceSelector": {"matchExpressions": [exempt]}}
    labels = {"helm.sh/chart": f"hami-{changes.get('version', '2.10.0')}"}
    config = yaml.safe_dump({"nvidia": section, "others": {"kept": True}})
    pod = {"spec": {"containers": [{"command": changes.get("command", command)}]}}
    return yaml.safe_dump_all(
        [
            {"kind": "ConfigMap", "metadata": {"labels": labels}, "data": {"device-config.yaml": config}},
            {"kind": "Deployment", "metadata": {"labels": labels}, "spec": {"template": pod}},
            {"kind": "MutatingWebhookConfiguration", "metadata": {}, "webhooks": [hook]},
        ]
    )


def test_default_memory_completes_the_charts_own_configuration():
    planned = plan(options(values={"scheduler": {"defaultMem": 5000}}), a_cluster())
    done = release(rendered(planned["release_values"]), planned)
    content = yaml.safe_load(done["release_values"]["device-config"]["content"])
    assert done["problems"] == [] and content["others"] == {"kept": True}
    assert (content["nvidia"]["defaultMemory"], content["nvidia"]["deviceSplitCount"]) == (5000, 10)
    plain = plan(options(), a_cluster())
    assert "device-config" not in release(rendered(plain["release_values"]), plain)["release_values"]


def test_a_chart_that_ignores_values_is_refused():
    planned = plan(options(failure_policy="Fail", split_count=4), a_cluster())
    text = rendered(planned["release_values"], section={"deviceSplitCount": 10}, command=[], version="2.3.0")
    assert codes(release(text, planned)["problems"]) == [
        ("chart_version", ""),
        ("value_ignored", "devicePlugin.deviceSplitCount"),
        ("value_ignored", "scheduler.forceOverwriteDefaultScheduler"),
        ("value_ignored", "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy"),
        ("value_ignored", "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy"),
        ("value_ignored", "devicePlugin.migStrategy"),
        ("value_ignored", "devicePlugin.disablecorelimit"),
        ("value_ignored", "scheduler.admissionWebhook.failurePolicy"),
    ]
    assert codes(release("", planned)["problems"]) == [("no_device_config", "")]
    several = "\n---\n".join(rendered(planned["release_values"], version=one) for one in ("2.10.0", "2.9.0"))
    assert "is version 2.9.0 and 2.10.0," in release(several, planned)["problems"][0]["message"]
