# SPDX-License-Identifier: GPL-3.0-or-later
"""The list of all that the collection fetches has what templates, charts and plans of packages name, and no more."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import dedicated_kit
import gpushare_objects
import pytest
import role_templates
import test_openshift_templates as openshift
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import REPOSITORY, TAGS
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import needed, table
from layers import ROOT
from test_driver_choice import FACTS, GENERATIONS, SWITCHES, VARS, catalog_name, chosen, node
from test_hami_values import a_cluster, options, plan
from test_nvidia_plan import planned
from test_pins_table import CATALOGS

HERE = Path(__file__).parent


def load(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


AIRGAP, PINS = load("airgap"), load("pins")
LIST = table.listed()
VARIABLES = {name for rows in LIST.values() for row in rows.values() for name in row["variables"]}


def test_the_list_is_current():
    assert AIRGAP.main(["--check"]) == 0, "run make airgap"


# --------------------------------------------------------------------------- variables

# Names of variables by which something may be fetched, and those that look so and aren't: where, or why not.
FETCHES = re.compile(r"_(image|base|archive|runfile|chart|chart_ref|chart_repository|\w*_url|pip_args|source|\w*_dir)$")
OTHERS = {
    "acceptance_machine_image": "the user's own, of a virtual machine with a driver",
    "image_archive": "role gpushare's",
    "preflight_image": "role gpushare's",
    "preflight_image_archive": "role gpushare's",
    "preflight_extender_image": "role gpushare's",
    "preflight_device_plugin_image": "role gpushare's",
    "scheduler_extender_archive": "role gpushare's",
    "helm_release_chart": "that of the role that deploys it",
    "scheduler_extender_url": "of a server on the same machine",
    "verify_extender_url": "of a server on the same machine",
    "scheduler_patches_dir": "a folder of the machine",
    "driver_source": "chooses among the others",
    "toolkit_source": "chooses among the others",
}


def option_names():
    # Role airgap's own say where an archive is, and where its things go.
    paths = sorted(path for path in (ROOT / "roles").glob("*/meta/argument_specs.yml") if path.parts[-3] != "airgap")
    entries = [entry for path in paths for entry in yaml.safe_load(path.read_text())["argument_specs"].values()]
    return {name for entry in entries for name in entry.get("options") or {}}


def test_every_variable_that_names_what_is_fetched_is_on_the_list():
    known = option_names()
    assert {name for name in known if FETCHES.search(name)} - VARIABLES == set(OTHERS) & known
    assert known >= VARIABLES
    conditions = {name for rows in LIST.values() for row in rows.values() for name in row["when"]}
    assert conditions - known <= {
        *("backend", "scheduler", "kubernetes", "openshift", "software", "built", "helm", "module")
    }


def test_every_address_that_a_role_names_is_on_the_list():
    text = "\n".join(path.read_text() for path in (ROOT / "roles").glob("*/[dtv]*/**/*.y*ml*"))
    found = {url.rstrip("/") for url in re.findall(r"https://[a-z][^\s\"'{}`,|\\\]]*", text)}
    # Names of documentation, and of an example.
    found = {url for url in found if not re.search(r"example\.org|gpushare-extender|/docs/|github\.com", url)}
    listed = {row["url"].rstrip("/") for section in ("charts", "files") for row in LIST[section].values()}
    assert found <= listed and len(found) >= 6, found - listed


# --------------------------------------------------------------------------- packages

# Metapackages of kernels, for whose next release headers are installed.
FOLLOWED = ("linux-image-generic", "proxmox-default-kernel", "proxmox-kernel-6.8", "pve-kernel-6.2")


def matches(names, found):
    """The names of the list of which each package is one; fails for a package that is none."""
    used = set()
    for package in found:
        # A name is a text with words in braces, or the pattern that it has already.
        fitting = {name for name in names if re.fullmatch(_pattern(name), package)}
        assert fitting, f"{package} isn't on the list"
        used |= fitting
    return used


@functools.cache
def _pattern(name):
    return re.sub(r"\\\{[a-z_]+\\\}", r"[^=]*", re.escape(name)) + "$"


def versions(source):
    """The first and the last branch of each row of names."""
    last = 600
    for row in source["rows"]:
        yield from (f"{branch}.10.01" for branch in (last, max(row["since"], 470)))
        last = row["since"] - 1


def observations(release, only=None):
    """Nodes of a release: each generation of cards, with and without NVSwitches, on each architecture.

    :param only: the distributions that a source is for, of a family with one catalogue.
    """
    for generation in GENERATIONS:
        for switches in ([], SWITCHES):
            for arch in ("amd64", "arm64"):
                made = node(release, generation, nvswitches=switches)
                made["distribution"] |= {"arch": arch, **({"id": only[0]} if only else {})}
                yield made


@pytest.fixture(scope="module")
def used():
    """By row of packages, the names that a choice takes, of all choices there are."""
    found = {}
    for release, facts in FACTS.items():
        distribution = facts["gpu_node"]["distribution"]
        catalog = yaml.safe_load((VARS / catalog_name(distribution)).read_text())["__driver_catalog"]
        for source, described in catalog["sources"].items():
            _repository(release, source)
            key, row = needed.row_of(LIST, "driver", distribution, source)
            for version in versions(described):
                for observed in observations(release, described.get("only")):
                    for flavour in ("open", "proprietary"):
                        # A mirror has what its owner put there: every branch of every architecture.
                        given = {"source": source, "version": version, "flavour": flavour, "repo_url": "https://m/"}
                        choice = chosen(observed, **given)
                        names = [*choice["packages"], *choice["follows"]]
                        found.setdefault(key, set()).update(matches(row["names"], names))
        key, row = needed.row_of(LIST, "headers", distribution)
        found.setdefault(key, set()).update(matches(row["names"], headers(release, catalog)))
    return found


def headers(release, catalog):
    """The packages of headers of two kernels of each kind that the catalogue knows, and of those that follow."""
    for row in catalog["headers"]:
        made = re.sub(r"\[[+.]+\]", "+", row["kernel"]).replace("[0-9]", "1")
        kernels = [made.replace("*", f"5.14.{number}", 1).replace("*", "1") for number in (0, 1)]
        kernel = {"release": kernels[0], "installed": kernels, "headers": False}
        kernel["modules"] = {each: {"headers": False} for each in kernels}
        installed = {name: {"version": "1", "held": False} for name in FOLLOWED}
        given = {"source": "repository", "version": "580.95.05", "repo_url": "https://m/"}
        choice = chosen(node(release, "ampere", kernel=kernel, packages=installed), **given)
        yield from (name for each in choice["headers"] for name in each["packages"])


def _repository(release, source):
    """The repository of the list is the one that a node gets, with its key."""
    for arch in ("amd64", "arm64"):
        observed = node(release, "ampere")
        observed["distribution"]["arch"] = arch
        choice = chosen(observed, source=source, version="580.95.05", repo_key_sha256="pinned")
        _key, row = needed.row_of(LIST, "driver", observed["distribution"], source)
        repository = needed.repository_of(row, observed["distribution"])
        if choice["repositories"] and not choice["refusals"]:
            assert choice["repositories"][0]["url"] == repository["url"]
            assert f"key/{repository['key']}" in LIST["files"]
            assert choice["repositories"][0]["key_url"].endswith(repository["key"].rpartition("/")[2])
            pin = LIST["files"][f"key/{repository['key']}"]
            assert choice["repositories"][0]["key_sha256"] == pin["sha256"]


def test_every_package_that_a_node_may_get_is_on_the_list_and_no_other(used):
    rows = {key: row for key, row in LIST["packages"].items() if key.startswith(("driver/", "headers/"))}
    assert set(used) == set(rows), "no facts of these"
    unused = {key: sorted(set(row["names"]) - used[key]) for key, row in rows.items() if set(row["names"]) - used[key]}
    assert unused == {}
    assert {row["distribution"] for row in rows.values()} == {
        yaml.safe_load(path.read_text())["__driver_catalog"]["name"] for path in sorted(VARS.glob("*_*.yml"))
    }


@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: path.stem)
def test_compilers_and_what_enables_repositories_are_on_the_list(path):
    catalog = yaml.safe_load(path.read_text())["__driver_catalog"]
    assert LIST["packages"][f"compilers/{path.stem}"]["names"] == catalog["build"]
    for name, source in catalog["sources"].items():
        commands = [each for row in source.get("prerequisites") or () for each in row["commands"].values()]
        words = {command[-1] for each in commands for command in each if "install" in command}
        row = LIST["packages"].get(f"repositories/{path.stem}/{name}", {"names": []})
        assert {word for word in words if "://" not in word} == set(row["names"])
        assert {word for word in words if "://" in word} <= {one["url"] for one in LIST["files"].values()}


@pytest.mark.parametrize("family", ["debian", "redhat", "suse"])
@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_the_toolkits_packages_and_repository_are_on_the_list(family, arch):
    facts = {"distribution": {"family": family, "arch": arch, "id": family, "version": "1"}}
    of_family = yaml.safe_load((ROOT / f"roles/toolkit/vars/{family}.yml").read_text())
    given = {**role_templates.defaults("toolkit"), **role_templates.variables_of("toolkit", "vars"), **of_family}
    row = LIST["packages"][f"toolkit/{of_family['__toolkit_manager']}"]
    repository = role_templates.value("toolkit", "__toolkit_repository", gpu_node=facts, **given)
    listed = needed.repository_of(row, facts["distribution"])
    assert (repository["url"], repository["key_sha256"]) == (
        listed["url"],
        LIST["files"][f"key/{listed['key']}"]["sha256"],
    )
    wanted = role_templates.value("toolkit", "__toolkit_wanted", gpu_node=facts, **given)
    version = given["toolkit_version"]
    assert wanted == [name.replace("{toolkit_version}", version) for name in row["names"]]


# --------------------------------------------------------------------------- images

SANDBOX = {
    **role_templates.defaults("sandbox_device_plugin"),
    **role_templates.variables_of("sandbox_device_plugin", "vars"),
}


def test_every_image_in_a_template_is_that_of_a_variable_on_the_list():
    # Each variable has a name of its own, so that the objects show which one is taken.
    share = {
        f"gpushare_{part}image": f"example.org/gpushare_{part}image:1" for part in ("", "extender_", "device_plugin_")
    }
    own = {"scheduler_extender_image": "example.org/scheduler_extender_image:1"}
    metrics = {"gpushare_extender_metrics": True, "gpushare_device_plugin_metrics": True}
    parts = ("extender", "extender_upstream", "device_plugin", "device_plugin_upstream", "dra")
    found = {part: PINS.images_in(gpushare_objects.rendered(part, **share, **metrics)) for part in parts}
    found["dedicated/workload"] = PINS.images_in(dedicated_kit.rendered("workload", **own))
    found |= {
        f"openshift/{part}": PINS.images_in(openshift.rendered(f"openshift/{part}", **own))
        for part in ("extender", "proof")
    }
    found["plugin"] = set()
    for kind in ("kata", "kubevirt"):
        variable = f"sandbox_device_plugin_{kind}_image"
        given = {variable: f"example.org/{variable}:1", "sandbox_device_plugin_kind": kind}
        given |= {"sandbox_device_plugin_openshift": True}
        sandbox = role_templates.objects("sandbox_device_plugin", "plugin", **{**SANDBOX, **given})
        assert PINS.images_in(sandbox) == {given[variable]}
        found["plugin"] |= PINS.images_in(sandbox)
    named = {f"example.org/{name}:1" for name in VARIABLES} | {
        row["reference"].replace("{upstream}", "1.36.3") for row in LIST["images"].values()
    }
    assert all(found.values()) and set().union(*found.values()) <= named, found
    assert found["dedicated/workload"] == {own["scheduler_extender_image"], "registry.k8s.io/kube-scheduler:v1.36.3"}
    # No other template has an image, but the canary's, which takes one that the node has or that a variable names.
    paths = {
        path
        for path in (ROOT / "roles").glob("*/templates/**/*.j2")
        if re.search(r"^ *(- )?image:", path.read_text(), re.M)
    }
    names = {str(path.relative_to(ROOT / "roles")).split("/", 2)[2].removesuffix(".yml.j2") for path in paths}
    assert names == {*found, "canary", "server_parts.j2"}


@pytest.mark.parametrize("minor", [*TAGS, max(TAGS) + 1])
def test_openshifts_scheduler_is_on_the_list_by_the_clusters_version(minor):
    from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import _plugins_image

    rows = [
        row["reference"]
        for row in LIST["images"].values()
        if row["reference"].startswith(REPOSITORY) and f"1.{minor}" in row["when"]["kubernetes"]
    ]
    assert rows == [_plugins_image(minor, "4.20.3")]


def test_the_roles_give_charts_the_values_by_which_their_images_were_found():
    values = plan(options(), a_cluster())["release_values"]["scheduler"]
    image = {**values["kubeScheduler"]["image"], "tag": "v1"}
    assert {"patch": values["patch"], "kubeScheduler": {"image": image}} == PINS.VALUES["hami"]["scheduler"]
    values = planned(gfd=True)["values"]
    assert values["gfd"]["enabled"] and values["config"]["map"]
    assert set(PINS.VALUES["nvidia-device-plugin"]) == {"gfd", "nfd", "config"}


ARCHIVES = os.environ.get("KUBEGPU_CHARTS", "")


def test_a_cluster_policys_images_are_those_that_its_operator_deploys():
    """As the chart 26.7.0 has them on 2026-11-29: parts of images, some switched off, some for sandboxes only."""
    part = {"repository": "nvcr.io/nvidia/cloud-native", "image": "a", "version": "v1"}
    spec = {
        "driver": {**part, "image": "driver", "manager": {**part, "image": "manager"}},
        "dcgm": {**part, "image": "dcgm", "enabled": False},
        "vfioManager": {**part, "image": "vfio", "enabled": True},
        "sandboxWorkloads": {"enabled": False},
    }
    policy = {"kind": "ClusterPolicy", "spec": spec}
    folder = "nvcr.io/nvidia/cloud-native"
    assert PINS.images_in([policy]) == {f"{folder}/driver:v1", f"{folder}/manager:v1"}
    spec["sandboxWorkloads"]["enabled"] = True
    assert f"{folder}/vfio:v1" in PINS.images_in([policy])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(LIST["charts"]))
def test_real_helm_makes_of_the_charts_only_images_of_the_list(name, tmp_path):
    """The stand-ins name the images that the real charts named on 2026-11-29; $KUBEGPU_CHARTS is a folder of those."""
    folder = {
        "hami": "hami/standin_chart",
        "nvidia-device-plugin": "nvidia/chart",
        "dcgm-exporter": "nvidia/exporter_chart",
        "gpu-operator": "openshift/operator_chart",
    }
    helm = PINS.find_helm()
    if ARCHIVES:
        content = (Path(ARCHIVES) / f"{name}.tgz").read_bytes()
    else:
        subprocess.run([helm, "package", HERE.parent / folder[name], "-d", tmp_path], check=True, capture_output=True)
        [archive] = tmp_path.glob("*.tgz")
        content = archive.read_bytes()
    expected = {pin["url"] for pin in PINS.table.section("images").values() if pin["chart"] == name}
    found = PINS.named_images(name, content, helm)
    assert found and found <= expected
    assert not ARCHIVES or found == expected
