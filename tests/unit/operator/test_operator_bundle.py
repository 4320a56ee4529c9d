# SPDX-License-Identifier: GPL-3.0-or-later
"""The operator's bundle and catalog: the real validators, the real opm and a real API server judge them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from own_cluster import until
from real_apiserver import Refused, api_server

from lab import build
from lab.shell import LabError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "operator"))

import bundle as subject
import schema

__all__ = ["api_server"]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
KUBERNETES = build.SETS["kubernetes"].version
OPERATOR, SERVERS, SCHEDULER, BUNDLE = (
    f"registry.example.org:5000/kubegpu/{name}@sha256:{letter * 64}"
    for name, letter in (("kubegpu-operator", "a"), ("gpushare", "b"), ("kube-scheduler", "c"), ("bundle", "d"))
)
RELEASE = subject.Release(
    "1.4.2", OPERATOR, SERVERS, {"kube-scheduler": SCHEDULER}, "registry.example.org:5000/kubegpu/catalog:stable"
)


def program(tools):
    try:
        return build.built(tools) / tools.binaries[0]
    except (LabError, OSError) as error:
        pytest.skip(str(error))


def judge(folder):
    """What the validators of operator-framework/api say of a bundle's folder: exit code, findings, error output."""
    done = subprocess.run(
        [program(build.OPERATOR_API), folder, KUBERNETES], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout or "[]"), done.stderr


def opm(*words):
    return subprocess.run([program(build.OPM), *map(str, words)], capture_output=True, text=True, check=False)


def load(folder, name):
    [path] = folder.rglob(name)
    return path, yaml.load(path.read_text(), LOADER)


def all_of(text):
    return list(yaml.load_all(text, LOADER))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operator")
    subject.write_bundle(RELEASE, folder)
    _path, csv = load(folder, subject.VERSION_FILE)
    subject.write_catalog(subject.catalog(csv, BUNDLE), folder)
    subject.write_install(RELEASE, folder)
    return folder


@pytest.fixture
def written(made, tmp_path):
    """The folder of a bundle, its catalog and what installs them, to be damaged."""
    return shutil.copytree(made, tmp_path / "written")


# ----------------------------------------------------------------- what it contains


def test_every_image_is_named_by_its_digest_and_reaches_the_operator(written):
    _path, csv = load(written, subject.VERSION_FILE)
    related = {one["name"]: one["image"] for one in csv["spec"]["relatedImages"]}
    assert related == {"operator": OPERATOR, "gpushare": SERVERS, "kube-scheduler": SCHEDULER}
    [made] = csv["spec"]["install"]["spec"]["deployments"]
    [container] = made["spec"]["template"]["spec"]["containers"]
    assert container["image"] == OPERATOR
    variables = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("RELATED_IMAGE_")}
    assert variables == {
        "RELATED_IMAGE_OPERATOR": OPERATOR,
        "RELATED_IMAGE_GPUSHARE": SERVERS,
        "RELATED_IMAGE_KUBE_SCHEDULER": SCHEDULER,
    }
    _path, extension = load(written / "install", "catalogsource.yml")
    assert extension["spec"]["image"] == RELEASE.catalog


def test_annotations_say_what_openshift_asks_for(written):
    _path, csv = load(written, subject.VERSION_FILE)
    said = csv["metadata"]["annotations"]
    features = {name.rpartition("/")[2]: value for name, value in said.items() if name.startswith("features.")}
    assert len(features) == 10 and features["disconnected"] == "true" and set(features.values()) == {"true", "false"}
    assert said["olm.skipRange"] == ">=1.0.0 <1.4.2"
    modes = {one["type"]: one["supported"] for one in csv["spec"]["installModes"]}
    assert modes == {"OwnNamespace": False, "SingleNamespace": False, "MultiNamespace": False, "AllNamespaces": True}
    _path, about = load(written, "annotations.yaml")
    assert about["annotations"]["com.redhat.openshift.versions"] == "v4.15"
    recipe = (written / "bundle.Dockerfile").read_text()
    labels = dict(re.findall(r'^LABEL (\S+)="(.*)"$', recipe, re.MULTILINE))
    assert labels == about["annotations"]
    copied = [line.split()[1] for line in recipe.splitlines() if line.startswith("COPY ")]
    files = {str(path.relative_to(written)) for path in (written / "bundle").rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(written)) for one in copied for path in (written / one).rglob("*")}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"operator": "registry.example.org/kubegpu-operator:1.4.2"}, "the image operator is 'registry"),
        ({"servers": f"gpushare@sha256:{'A' * 64}"}, "the image gpushare is"),
        ({"others": {"Kube_Scheduler": SCHEDULER}}, "an image is called 'Kube_Scheduler'"),
        ({"version": "1.4"}, "the version is '1.4'"),
    ],
)
def test_what_no_cluster_could_pull_is_refused(tmp_path, given, said):
    release = subject.Release(**{"version": "1.4.2", "operator": OPERATOR, "servers": SERVERS, **given})
    with pytest.raises(subject.Refused, match=re.escape(said)):
        subject.write_bundle(release, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_account_without_rights_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "ROOT", tmp_path)
    monkeypatch.setattr(subject, "HERE", tmp_path)
    (tmp_path / "rights.yml").write_text("---\n[]\n")
    for name in ("rights.yml", "none.yml"):
        with pytest.raises(subject.Refused, match=f"{name} has no rules"):
            subject.rules_of(name)


# ----------------------------------------------------------------- the validators, also on damaged copies


def test_the_validators_find_nothing(written):
    assert judge(written / "bundle") == (0, [], "")


def edit(name, change):
    """Return a damage of one of the bundle's files."""

    def damage(folder):
        path, document = load(folder, name)
        change(document)
        path.write_text(json.dumps(document))

    return damage


CSV, CRD = subject.VERSION_FILE, "gpushares.kubegpu.share.crd.yaml"


def csv(change):
    return edit(CSV, lambda one: change(one["spec"]))


def noted(change):
    return edit(CSV, lambda one: change(one["metadata"]["annotations"]))


def crd(change):
    return edit(CRD, lambda one: change(one["spec"]))


def account_manifest(folder):
    document = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": subject.ACCOUNT}}
    (folder / "manifests" / "account.yaml").write_text(yaml.safe_dump(document))


def containers(spec):
    return spec["install"]["spec"]["deployments"][0]["spec"]["template"]["spec"]["containers"]


DAMAGES = {
    # What is damaged: the validator that says so, a part of its sentence; without a validator the bundle isn't one.
    "no definition": (lambda folder: load(folder, CRD)[0].unlink(), "Bundle", "not found in bundle"),
    "a definition that nobody owns": (csv(lambda one: one.pop("customresourcedefinitions")), "Bundle", "not defined"),
    "another version of the definition": (
        csv(lambda one: one["customresourcedefinitions"]["owned"][0].update(version="v1")),
        "Bundle",
        "not found in bundle",
    ),
    "the account as a manifest": (account_manifest, "Bundle", "invalid service account"),
    "an image that is none": (
        csv(lambda one: one["relatedImages"].append({"name": "x", "image": "A@B"})),
        "Bundle",
        "invalid image pullspec",
    ),
    "an empty image": (
        csv(lambda one: one["relatedImages"].append({"name": "x", "image": ""})),
        "Bundle",
        "empty image",
    ),
    "no install modes": (csv(lambda one: one.pop("installModes")), "ClusterServiceVersion", "install modes not found"),
    "no install mode that is supported": (
        csv(lambda one: one["installModes"].pop()),
        "ClusterServiceVersion",
        "none of InstallModeTypes are supported",
    ),
    "no oldest Kubernetes": (csv(lambda one: one.pop("minKubeVersion")), "ClusterServiceVersion", "minKubeVersion"),
    "a Kubernetes that is none": (
        csv(lambda one: one.update(minKubeVersion="new")),
        "ClusterServiceVersion",
        "invalid value: new",
    ),
    "no example": (
        noted(lambda one: one.pop("alm-examples")),
        "ClusterServiceVersion",
        "example annotations not found",
    ),
    "an example of something else": (
        noted(lambda one: one.update({"alm-examples": '[{"apiVersion": "v1", "kind": "Pod"}]'})),
        "ClusterServiceVersion",
        "example must have a provided API",
    ),
    "an example that isn't JSON": (
        noted(lambda one: one.update({"alm-examples": "[{"})),
        "ClusterServiceVersion",
        "invalid example",
    ),
    "a name that is no name": (
        edit(CSV, lambda one: one["metadata"].update(name="Kubegpu Operator")),
        "ClusterServiceVersion",
        "is invalid",
    ),
    "a name without the version": (
        edit(CSV, lambda one: one["metadata"].update(name="kubegpu-operator")),
        "GoodPractices",
        "versioning",
    ),
    "no requests": (csv(lambda one: containers(one)[0].pop("resources")), "GoodPractices", "resource requests"),
    "an undescribed resource": (
        csv(lambda one: one["customresourcedefinitions"]["owned"][0].pop("description")),
        "GoodPractices",
        "empty description",
    ),
    "rights to make definitions": (
        csv(
            lambda one: one["install"]["spec"]["clusterPermissions"][0]["rules"].append(
                {
                    "apiGroups": ["apiextensions.k8s.io"],
                    "resources": ["customresourcedefinitions"],
                    "verbs": ["create"],
                }
            )
        ),
        "GoodPractices",
        "permissions to create CRD",
    ),
    "a channel of an unknown kind": (
        edit(
            "annotations.yaml",
            lambda one: one["annotations"].update({"operators.operatorframework.io.bundle.channels.v1": "x"}),
        ),
        "GoodPractices",
        "naming convention",
    ),
    "a category that OperatorHub doesn't have": (
        noted(lambda one: one.update(categories="Cards")),
        "StandardCategories",
        "Cards",
    ),
    "a capability that nobody defined": (
        noted(lambda one: one.update(capabilities="Everything")),
        "StandardCapabilities",
        "Everything",
    ),
    "an icon that is none": (
        csv(lambda one: one["icon"][0].update(mediatype="text/plain")),
        "OperatorHubV2",
        "mediatype",
    ),
    "an address that is none": (
        csv(lambda one: one["maintainers"][0].update(email="x")),
        "OperatorHubV2",
        "email x is invalid",
    ),
    "no provider": (csv(lambda one: one.pop("provider")), "OperatorHubV2", "rovider"),
    "a scope that there isn't": (crd(lambda one: one.update(scope="World")), "CustomResourceDefinition", "scope"),
    "a definition without a version that is stored": (
        crd(lambda one: one["versions"][0].update(storage=False)),
        "CustomResourceDefinition",
        "storage",
    ),
    "no ClusterServiceVersion": (lambda folder: load(folder, CSV)[0].unlink(), "", ""),
    "broken YAML": (lambda folder: load(folder, CSV)[0].write_text("a: [b"), "", ""),
    "an empty folder": (lambda folder: shutil.rmtree(folder / "manifests"), "", ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_validators_see_each_damage(written, damage):
    change, validator, said = DAMAGES[damage]
    change(written / "bundle")
    code, found, error = judge(written / "bundle")
    if not validator:
        assert (code, found) == (2, []) and error
        return
    assert [one["detail"] for one in found if one["validator"] == validator and said in one["detail"]], found
    # A warning isn't an error: the run of the validators ends with 1 for errors alone, and CI takes neither.
    assert code == int(any(one["level"] == "Error" for one in found))


# ----------------------------------------------------------------- the catalog, by the real opm


def test_opm_takes_the_catalog(written):
    done = opm("validate", written / "catalog")
    assert done.returncode == 0, done.stderr
    rendered = opm("render", written / "catalog", "--output=json")
    decoder, text, parts = json.JSONDecoder(), rendered.stdout.strip(), []
    while text:
        part, end = decoder.raw_decode(text)
        parts.append(part)
        text = text[end:].strip()
    assert parts == (all_of(next((written / "catalog").rglob("*.yaml")).read_text()))


# What OLM asks a catalog's pod: the package, and a bundle of it. Fields of protobuf 1, 2, 3 with a text each.
ASK = """
import grpc, sys
address = grpc.insecure_channel("127.0.0.1:50051")
grpc.channel_ready_future(address).result(timeout=30)
def ask(method, *texts):
    fields = [bytes([number << 3 | 2, len(text)]) + text.encode() for number, text in enumerate(texts, 1)]
    call = address.unary_unary(f"/api.Registry/{method}", request_serializer=None, response_deserializer=None)
    return call(b"".join(fields), timeout=10)
package, channel, name = sys.argv[1:]
sys.stdout.buffer.write(ask("GetPackage", package) + ask("GetBundle", package, channel, name))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="opm listens on all addresses, so it gets a network of its own")
def test_opm_serves_the_catalog_as_olm_asks_for_it(written, tmp_path):
    serve = [program(build.OPM), "serve", written / "catalog", "--pprof-addr=", f"--termination-log={tmp_path / 'log'}"]
    ask = [sys.executable, "-c", ASK, subject.PACKAGE, subject.CHANNEL, RELEASE.name]
    script = f"ip link set lo up; {shlex.join(map(str, serve))} & {shlex.join(ask)}; code=$?; kill $!; wait; exit $code"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    for expected in (RELEASE.name, subject.CHANNEL, BUNDLE, RELEASE.skips):
        assert expected.encode() in done.stdout, done.stdout


def part(number, change):
    """Return a damage of one part of the catalog: 0 is the package, 1 the channel, 2 the bundle."""

    def damage(folder):
        [path] = folder.rglob("catalog.yaml")
        parts = all_of(path.read_text())
        change(parts[number])
        path.write_text("".join(f"---\n{json.dumps(one)}\n" for one in parts))

    return damage


CATALOG_DAMAGES = {
    "no default channel": (part(0, lambda one: one.pop("defaultChannel")), "default channel must be set"),
    "a default channel that isn't there": (part(0, lambda one: one.update(defaultChannel="x")), 'invalid channel.*"x'),
    "a channel without entries": (part(1, lambda one: one.update(entries=[])), "not found in any channel"),
    "an entry without a bundle": (part(1, lambda one: one["entries"][0].update(name="x")), "not found in any"),
    "an entry of another bundle": (part(1, lambda one: one["entries"].append({"name": "x"})), "no olm.bundle blobs"),
    "a bundle of no package": (part(2, lambda one: one.update(package="x")), "unknown package"),
    "a bundle without properties": (part(2, lambda one: one.update(properties=[])), "olm.package"),
    "a bundle of another version": (
        part(2, lambda one: one["properties"][1]["value"].update(version="x")),
        "version|semver",
    ),
    "no catalog": (lambda folder: shutil.rmtree(folder), "."),
    "broken YAML": (lambda folder: next(folder.rglob("*.yaml")).write_text("a: [b"), "."),
}


@pytest.mark.parametrize("damage", CATALOG_DAMAGES)
def test_opm_sees_each_damage(written, damage):
    change, said = CATALOG_DAMAGES[damage]
    change(written / "catalog")
    done = opm("validate", written / "catalog")
    assert done.returncode != 0
    assert re.search(said, done.stderr, re.IGNORECASE), done.stderr


def test_a_catalog_keeps_the_bundles_of_earlier_releases(written, tmp_path):
    older = subject.bundles_of(next((written / "catalog").rglob("*.yaml")))
    new = subject.Release("1.5.0", OPERATOR, SERVERS)
    subject.write_bundle(new, tmp_path / "new")
    _path, csv = load(tmp_path / "new", subject.VERSION_FILE)
    subject.write_catalog(subject.catalog(csv, BUNDLE.replace("d", "e"), older), tmp_path / "new")
    [file] = (tmp_path / "new" / "catalog").rglob("*.yaml")
    _package, channel, *bundles = all_of(file.read_text())
    assert channel["entries"] == [
        {"name": "kubegpu-operator.v1.4.2", "skipRange": ">=1.0.0 <1.4.2"},
        {
            "name": "kubegpu-operator.v1.5.0",
            "replaces": "kubegpu-operator.v1.4.2",
            "skipRange": ">=1.0.0 <1.5.0",
        },
    ]
    assert [subject.version_in(one) for one in bundles] == ["1.4.2", "1.5.0"]
    assert opm("validate", tmp_path / "new" / "catalog").returncode == 0
    with pytest.raises(subject.Refused, match="called alike"):
        subject.catalog(csv, BUNDLE, subject.bundles_of(file))
    with pytest.raises(subject.Refused, match="name it by its digest"):
        subject.catalog(csv, "registry.example.org/bundle:1", older)


@pytest.mark.parametrize("text", ["", "---\na: b\n", "{", "---\nschema: olm.bundle\npackage: kubegpu-operator\n"])
def test_a_catalog_of_others_is_refused(tmp_path, text):
    (tmp_path / "catalog.yaml").write_text(text)
    with pytest.raises(subject.Refused, match="isn't a catalog of kubegpu-operator"):
        subject.bundles_of(tmp_path / "catalog.yaml")


# ----------------------------------------------------------------- a real API server, with OLM's own definitions


CATALOGS = RELEASE.catalogs
KINDS = ("catalogsources", "clusterserviceversions", "operatorgroups", "subscriptions")


def definitions():
    """OLM's definitions, of the module that the validators are built of."""
    module = build.OPERATOR_API.module
    try:
        go = build.find_go()
    except LabError as error:
        pytest.skip(str(error))
    asked = [go, "mod", "download", "-json", f"{module}@v{build.OPERATOR_API.version}"]
    done = subprocess.run(asked, cwd=build.OPERATOR_API.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{module} can't be had: {done.stderr or done.stdout}")
    folder = Path(json.loads(done.stdout)["Dir"]) / "crds"
    return [folder / f"operators.coreos.com_{name}.yaml" for name in KINDS]


@pytest.fixture(scope="module")
def olm(api_server):
    api_server.install(*definitions(), schema.CRD)
    return api_server


def objects(folder, *names):
    return [one for name in names for one in all_of(next(folder.rglob(name)).read_text())]


def test_the_api_server_takes_everything_that_olm_is_given(olm, written):
    for name in (CATALOGS, subject.NAMESPACE):
        olm.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    for one in objects(written, "catalogsource.yml", "subscription.yml"):
        olm.apply(one, dry_run=True)
    [version] = objects(written, subject.VERSION_FILE)
    version["metadata"]["namespace"] = subject.NAMESPACE
    olm.apply(version, dry_run=True)
    [example] = json.loads(version["metadata"]["annotations"]["alm-examples"])
    olm.apply(example, dry_run=True)
    version["spec"]["installModes"][0]["supported"] = "yes"
    with pytest.raises(Refused, match="supported"):
        olm.apply(version, dry_run=True)


def test_the_objects_without_olm_are_taken_and_the_pods_are_restricted(api_server, written):
    made = objects(written, "without-olm.yml")
    for one in made:
        api_server.apply(one)
    [deployment] = [one for one in made if one["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 2
    pod = {"apiVersion": "v1", "kind": "Pod", **deployment["spec"]["template"]}
    pod["metadata"] = {**pod["metadata"], "name": "one", "namespace": subject.NAMESPACE}
    api_server.apply(pod, dry_run=True)
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(Refused, match="violates PodSecurity"):
        api_server.apply(pod, dry_run=True)


def test_a_resource_takes_no_settings_of_the_engine_by_annotations(api_server, written):
    collection, engines = "/apis/kubegpu.share/v1alpha1/gpushares", "ansible.sdk.operatorframework.io"
    made = {"apiVersion": "kubegpu.share/v1alpha1", "kind": "GPUShare", "spec": {"gpushareNodes": ["n"]}}
    there = {f"{engines}/reconcile-period": "x"}

    def send(annotations, method="POST", **more):
        path = f"{collection}/cluster" if method == "PUT" else collection
        about = {"name": "cluster", "annotations": annotations, **more}
        return api_server.ask(method, f"{path}?dryRun=All", {**made, "metadata": about})[0]

    api_server.apply(yaml.safe_load(schema.CRD.read_text()))
    until(lambda: api_server.ask("GET", collection)[0] == 200)
    api_server.ask("DELETE", f"{collection}/cluster")
    # Before there was a policy.
    old = api_server.request("POST", collection, {**made, "metadata": {"name": "cluster", "annotations": there}})
    version = {"resourceVersion": old["metadata"]["resourceVersion"]}
    for one in objects(written, subject.ADMISSION):
        api_server.apply(one)
    # It is in effect a moment later.
    until(lambda: send({f"{engines}/verbosity": "9223372036854775807"}) == 403)
    assert send({**there, f"{engines}/verbosity": "1"}, "PUT", **version) == 403
    assert send({f"{engines}/reconcile-period": "y"}, "PUT", **version) == 403
    assert send({**there, "example.org/note": "x"}, "PUT", finalizers=["kubegpu.share/uninstall"], **version) == 200
    assert send({}, "PUT", **version) == 200 and send({"example.org/note": "x"}) == 409
    without_policies(api_server, written)
    api_server.request("DELETE", f"{collection}/cluster")


def without_policies(api_server, written):
    """Remove the admission policies: other tests use the server, too."""
    for one in reversed(objects(written, subject.ADMISSION)):
        kind = {"Binding": "policybindings"}.get(one["kind"][-7:], "policies")
        path = f"/apis/admissionregistration.k8s.io/v1/validatingadmission{kind}/{one['metadata']['name']}"
        api_server.request("DELETE", path)


def test_the_account_writes_only_where_its_servers_are(api_server, written):
    """Its rights are for all namespaces, since it makes its own; so are those that it holds for the servers."""
    user = f"system:serviceaccount:{subject.NAMESPACE}:{subject.ACCOUNT}"
    for one in objects(written, "without-olm.yml"):
        if one["kind"] in ("Namespace", "ClusterRole", "ClusterRoleBinding"):
            api_server.apply(one)
    for name in ("gpushare-scheduler", "gpushare-system"):
        api_server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    for one in objects(written, subject.ADMISSION):
        api_server.apply(one)

    def asks(namespace, path, name, how="", method="POST", **more):
        at = f"/api/v1/namespaces/{namespace}/{path}"
        status, text = api_server.ask(method, at + how, {"metadata": {"name": name}, **more}, user=user)
        assert status in (201, 404) or "the operator's account" in text, text
        return status

    try:
        until(lambda: asks("default", "configmaps", "x", "?dryRun=All") == 403)
        assert asks("kube-system", "configmaps", "x") == 403
        assert asks("kube-system", "configmaps", "kubegpu-share") == 201
        assert asks("gpushare-scheduler", "configmaps", "x") == 201
        api_server.ask("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": "theirs"}})
        assert asks("default", "configmaps/theirs", "theirs", method="DELETE") == 403
        pod = {"spec": {"containers": [{"name": "c", "image": "i"}], "automountServiceAccountToken": False}}
        assert asks("gpushare-system", "pods", "p", **pod) == 403
        api_server.ask("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        assert asks("default", "pods", "p", "?dryRun=All", **pod) == 201
        api_server.request("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": "q"}, **pod})
        target = {"target": {"kind": "Node", "name": "n"}}
        assert asks("default", "pods/q/binding", "q", **target) == 403
        assert asks("default", "pods/q/eviction", "q", apiVersion="policy/v1", kind="Eviction") == 403
    finally:
        without_policies(api_server, written)


def test_the_installer_may_grant_what_the_operator_gets_and_no_more(api_server, written, monkeypatch):
    user = f"system:serviceaccount:{subject.NAMESPACE}:{subject.PACKAGE}-installer"
    group = {"apiGroup": "rbac.authorization.k8s.io"}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "granted"}}
    binding = {**role, "kind": "ClusterRoleBinding", "roleRef": {**group, "kind": "ClusterRole", "name": "granted"}}
    for one in objects(written, "clusterextension.yml"):
        if one["kind"] != "ClusterExtension":
            api_server.apply(one)
    rules = [*subject.rules_of("rights.yml"), *subject.rules_of("rights_namespace.yml")]
    until(lambda: api_server.may(user, "create", "clusterroles", group=group["apiGroup"]))
    api_server.apply({**role, "rules": rules}, user=user)
    api_server.apply(binding, user=user)
    wanted = ("Service", "PodDisruptionBudget", "Deployment", "CustomResourceDefinition", "ServiceAccount")
    made = [one for one in objects(written, "without-olm.yml") if one["kind"] in wanted]
    assert len(made) == len(wanted)
    for one in made:
        api_server.apply(one, user=user)
    # Of rights that don't contain everything.
    small = [{"apiGroups": ["example.org"], "resources": ["things"], "verbs": ["get"]}]
    monkeypatch.setattr(subject, "rules_of", lambda _name: small)
    [fewer] = [one for one in subject.olm1(RELEASE)["clusterextension.yml"] if one["kind"] == "ClusterRole"]
    api_server.apply(fewer)
    until(lambda: not api_server.may(user, "delete", "things", group="example.org"))
    api_server.apply({**role, "rules": small}, user=user)
    more = [{**small[0], "verbs": ["get", "delete"]}]
    with pytest.raises(Refused, match="attempting to grant RBAC permissions not currently held"):
        api_server.apply({**role, "rules": more}, user=user)
