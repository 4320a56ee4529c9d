# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the operator's bundle, its catalog and the objects with which OLM installs it, of both generations of OLM.

Everything is made from ``config``, ``rights.yml``, ``rights_namespace.yml`` and galaxy.yml; images are named by digest.
``operator/publish.py`` calls it with the digests of what it has put into a registry.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import re
import shutil
import sys
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

import schema
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGE = "kubegpu-operator"
ACCOUNT = "kubegpu-operator"
NAMESPACE = "kubegpu-operator"
CHANNEL = "stable"
# Of the servers' image, by the name of which the operator reads its reference in the variable RELATED_IMAGE_GPUSHARE.
SERVERS = "gpushare"
# Releases from this one on are upgraded to each later one directly.
FIRST = "1.0.0"
# Custom resources with rules, and admission policies of the first version that has them by default.
KUBERNETES = "1.28.0"
OPENSHIFT = "v4.15"
ARCHITECTURES = ("amd64", "arm64")
# What OpenShift's console shows and filters by; each has to be said.
FEATURES = {
    "disconnected": True,
    "fips-compliant": False,
    "proxy-aware": False,
    "tls-profiles": False,
    "token-auth-aws": False,
    "token-auth-azure": False,
    "token-auth-gcp": False,
    "cnf": False,
    "cni": False,
    "csi": False,
}
# What a GPUShare makes, as the console lists it.
MADE = (
    ("v1", "Namespace"),
    ("v1", "ConfigMap"),
    ("v1", "Secret"),
    ("v1", "ServiceAccount"),
    ("v1", "Service"),
    ("apps/v1", "DaemonSet"),
    ("apps/v1", "Deployment"),
    ("rbac.authorization.k8s.io/v1", "ClusterRole"),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"),
)
EXAMPLE = {"gpushareNodes": ["gpu-1", "gpu-2"], "gpushareAllocation": "auto"}
SCORECARD = "quay.io/operator-framework/scorecard-test:v1.42.0"
SUITES = {
    "basic": ("basic-check-spec",),
    "olm": (
        "olm-bundle-validation",
        "olm-crds-have-validation",
        "olm-crds-have-resources",
        "olm-spec-descriptors",
        "olm-status-descriptors",
    ),
}
VERSION_FILE = f"{PACKAGE}.clusterserviceversion.yaml"
CATALOG_FILE = f"{PACKAGE}/catalog.yaml"
ADMISSION = "admission.yml"
DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

Json = dict[str, t.Any]


class Refused(Exception):
    """A bundle can't be made of what was given; the message says why and what to do."""


@dataclass(frozen=True)
class Release:
    """What a bundle is of.

    :param operator: the operator's image, by digest.
    :param servers: the servers' image, by digest.
    :param others: further images by digest that nodes pull, by their names (``kube-scheduler``).
    :param catalog: the catalog's image, as a cluster polls it.
    :param catalogs: the namespace of catalogs that hold for all namespaces.
    """

    version: str
    operator: str
    servers: str
    others: t.Mapping[str, str] = field(default_factory=dict)
    catalog: str = ""
    catalogs: str = "openshift-marketplace"

    @property
    def name(self) -> str:
        return f"{PACKAGE}.v{self.version}"

    @property
    def skips(self) -> str:
        """The releases that this one follows directly."""
        return f">={FIRST} <{self.version}"

    @property
    def images(self) -> dict[str, str]:
        """All images by their names; the variables of the operator's pod are called by them."""
        return {"operator": self.operator, SERVERS: self.servers, **self.others}

    def check(self) -> None:
        """Refuse what no cluster could pull by digest.

        :raises Refused: an image has no digest, or a name can't be a variable's.
        """
        check_images(self.images)
        if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", self.version):
            raise Refused(f"the version is {self.version!r}, which isn't MAJOR.MINOR.PATCH")


def check_images(images: t.Mapping[str, str]) -> None:
    """Refuse images that aren't named by digest.

    :param images: by their names in the bundle.
    :raises Refused: an image has no digest, or a name can't be a variable's.
    """
    for name, image in images.items():
        if not NAME.fullmatch(name):
            raise Refused(f"an image is called {name!r}: use lower-case letters, digits and hyphens")
        if not DIGEST.fullmatch(image):
            raise Refused(f"the image {name} is {image!r}: name it by its digest, NAME@sha256:...")


def version_of(tree: Path = ROOT) -> str:
    """Return the collection's version."""
    return str(yaml.safe_load((tree / "galaxy.yml").read_text())["version"])


def rules_of(name: str) -> list[Json]:
    """Return a list of PolicyRules of this folder.

    :raises Refused: there is none; an account without rights couldn't do anything.
    """
    path = HERE / name
    rules = yaml.safe_load(path.read_text()) if path.exists() else None
    if not isinstance(rules, list) or not rules:
        raise Refused(f"{path.relative_to(ROOT)} has no rules")
    return rules


# ------------------------------------------------------------------ the bundle


def deployment(release: Release) -> Json:
    """Return the operator's Deployment with the images of a release."""
    made: Json = yaml.safe_load((HERE / "config" / "deployment.yml").read_text())
    [container] = made["spec"]["template"]["spec"]["containers"]
    container["image"] = release.operator
    variables = [(f"RELATED_IMAGE_{name.upper().replace('-', '_')}", image) for name, image in release.images.items()]
    container["env"] = [*container.get("env", ()), *({"name": name, "value": image} for name, image in variables)]
    return made


def others() -> list[Json]:
    """Return what belongs to the operator's pods beside the Deployment."""
    return list(yaml.safe_load_all((HERE / "config" / "others.yml").read_text()))


def _title(name: str) -> str:
    """Return a field's name as words: ``gpushareMemoryUnit`` is "Memory unit"."""
    words = re.sub(r"([A-Z])", r" \1", name).lower().split()
    kept = words[1:] if words[0] == "gpushare" else words
    return " ".join(kept).capitalize().replace("xids", "XIDs").replace("Dra ", "DRA ").replace("Selinux", "SELinux")


def _widget(option: Json) -> list[str]:
    """Return how the console's form shows an option."""
    urn = "urn:alm:descriptor:com.tectonic.ui:"
    if "enum" in option:
        return [f"{urn}select:{choice}" for choice in option["enum"] if choice != ""]
    kinds = {"boolean": "booleanSwitch", "integer": "number", "string": "text"}
    return [f"{urn}{kinds[option['type']]}"] if option["type"] in kinds else []


def descriptors(crd: Json) -> tuple[list[Json], list[Json]]:
    """Return the descriptions of spec and status for the console."""
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    spec = [
        {
            "path": name,
            "displayName": _title(name),
            "description": option["description"].partition("\n")[0],
            **({"x-descriptors": _widget(option)} if _widget(option) else {}),
        }
        for name, option in properties["spec"]["properties"].items()
    ]
    shown = {"conditions": "io.kubernetes.conditions", "observedGeneration": "text"}
    status = [
        {
            "path": name,
            "displayName": _title(name),
            "description": field["description"],
            "x-descriptors": [f"urn:alm:descriptor:{shown[name]}"],
        }
        for name, field in properties["status"]["properties"].items()
    ]
    return spec, status


def service_version(release: Release, crd: Json) -> Json:
    """Return the ClusterServiceVersion."""
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    example = {
        "apiVersion": f"{schema.GROUP}/{schema.VERSION}",
        "kind": schema.KIND,
        "metadata": {"name": schema.NAME},
        "spec": EXAMPLE,
    }
    made = deployment(release)
    spec, status = descriptors(crd)
    yes_no = {f"features.operators.openshift.io/{name}": str(value).lower() for name, value in FEATURES.items()}
    return {
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": release.name,
            "namespace": "placeholder",
            "labels": {f"operatorframework.io/arch.{name}": "supported" for name in ARCHITECTURES}
            | {"operatorframework.io/os.linux": "supported"},
            "annotations": {
                "alm-examples": json.dumps([example], indent=2),
                "capabilities": "Seamless Upgrades",
                "categories": "AI/Machine Learning",
                "containerImage": release.operator,
                "description": galaxy["description"],
                "olm.skipRange": release.skips,
                "operatorframework.io/suggested-namespace": NAMESPACE,
                "repository": galaxy["repository"],
                "support": "kubegpu.share",
                **yes_no,
            },
        },
        "spec": {
            "displayName": "GPU shares",
            "description": (HERE / "config" / "description.md").read_text(),
            "version": release.version,
            "minKubeVersion": KUBERNETES,
            "maturity": "alpha",
            "provider": {"name": "kubegpu.share", "url": galaxy["homepage"]},
            "maintainers": [{"name": "The kubegpu.share authors", "email": "kubegpu@users.noreply.github.com"}],
            "links": [
                {"name": "Documentation", "url": galaxy["documentation"]},
                {"name": "Source", "url": galaxy["repository"]},
            ],
            "keywords": ["gpu", "nvidia", "memory", "share", "scheduler", "dra"],
            "icon": [
                {
                    "base64data": base64.b64encode((HERE / "config" / "icon.svg").read_bytes()).decode(),
                    "mediatype": "image/svg+xml",
                }
            ],
            "installModes": [
                {"type": kind, "supported": kind == "AllNamespaces"}
                for kind in ("OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces")
            ],
            "customresourcedefinitions": {
                "owned": [
                    {
                        "name": crd["metadata"]["name"],
                        "version": schema.VERSION,
                        "kind": schema.KIND,
                        "displayName": "GPU share",
                        "description": "Names the nodes whose cards are shared, and how.",
                        "resources": [{"kind": kind, "name": "", "version": version} for version, kind in MADE],
                        "specDescriptors": spec,
                        "statusDescriptors": status,
                    }
                ]
            },
            "install": {
                "strategy": "deployment",
                "spec": {
                    "clusterPermissions": [{"serviceAccountName": ACCOUNT, "rules": rules_of("rights.yml")}],
                    "permissions": [{"serviceAccountName": ACCOUNT, "rules": rules_of("rights_namespace.yml")}],
                    "deployments": [
                        {"name": made["metadata"]["name"], "label": made["metadata"]["labels"], "spec": made["spec"]}
                    ],
                },
            },
            "relatedImages": [{"name": name, "image": image} for name, image in release.images.items()],
        },
    }


def labels() -> dict[str, str]:
    """Return the bundle's annotations, which are its image's labels, too."""
    prefix = "operators.operatorframework.io"
    return {
        f"{prefix}.bundle.mediatype.v1": "registry+v1",
        f"{prefix}.bundle.manifests.v1": "manifests/",
        f"{prefix}.bundle.metadata.v1": "metadata/",
        f"{prefix}.bundle.package.v1": PACKAGE,
        f"{prefix}.bundle.channels.v1": CHANNEL,
        f"{prefix}.bundle.channel.default.v1": CHANNEL,
        f"{prefix}.test.mediatype.v1": "scorecard+v1",
        f"{prefix}.test.config.v1": "tests/scorecard/",
        "com.redhat.openshift.versions": OPENSHIFT,
        "com.redhat.delivery.operator.bundle": "true",
    }


CATALOG_LABELS = {"operators.operatorframework.io.index.configs.v1": "/configs"}


def scorecard() -> Json:
    """Return what ``operator-sdk scorecard`` runs."""
    tests = [
        {"image": SCORECARD, "entrypoint": ["scorecard-test", test], "labels": {"suite": suite, "test": f"{test}-test"}}
        for suite, names in SUITES.items()
        for test in names
    ]
    return {
        "apiVersion": "scorecard.operatorframework.io/v1alpha3",
        "kind": "Configuration",
        "metadata": {"name": "config"},
        "stages": [{"parallel": True, "tests": tests}],
    }


def bundle(release: Release) -> dict[str, str]:
    """Return the bundle's files by their paths in its image.

    :raises Refused: an image isn't named by digest, or there are no rights.
    """
    release.check()
    crd = yaml.safe_load(schema.CRD.read_text())
    return {
        f"manifests/{VERSION_FILE}": schema.written(service_version(release, crd)),
        f"manifests/{crd['metadata']['name']}.crd.yaml": schema.written(crd),
        **{f"manifests/{item['metadata']['name']}.{item['kind'].lower()}.yaml": _inside(item) for item in others()},
        "metadata/annotations.yaml": schema.written({"annotations": labels()}),
        "tests/scorecard/config.yaml": schema.written(scorecard()),
    }


def _inside(made: Json) -> str:
    """Return an object as a manifest of a bundle, which OLM puts into the namespace that it installs into."""
    return schema.written(
        {**made, "metadata": {key: value for key, value in made["metadata"].items() if key != "namespace"}}
    )


def dockerfile(folders: t.Mapping[str, str], labels: t.Mapping[str, str]) -> str:
    """Return the Dockerfile of an image that has folders alone.

    :param folders: by the folder beside the Dockerfile the one in the image.
    """
    lines = ["FROM scratch", *(f"LABEL {name}={json.dumps(value)}" for name, value in labels.items())]
    return "\n".join([*lines, *(f"COPY {source} {target}" for source, target in folders.items())]) + "\n"


# ------------------------------------------------------------------ the catalog

# The fields of a ClusterServiceVersion that a catalog repeats.
METADATA = (
    ("apiServiceDefinitions", "apiservicedefinitions"),
    ("crdDescriptions", "customresourcedefinitions"),
    ("description", "description"),
    ("displayName", "displayName"),
    ("installModes", "installModes"),
    ("keywords", "keywords"),
    ("links", "links"),
    ("maintainers", "maintainers"),
    ("maturity", "maturity"),
    ("minKubeVersion", "minKubeVersion"),
    ("provider", "provider"),
)


def entry(csv: Json, image: str) -> Json:
    """Return a bundle's part of a catalog, as ``opm render`` writes it.

    :param image: the bundle's image, by digest.
    """
    spec, metadata = csv["spec"], csv["metadata"]
    about = {ours: spec[theirs] for ours, theirs in METADATA if spec.get(theirs)}
    gvk = {"group": schema.GROUP, "kind": schema.KIND, "version": schema.VERSION}
    return {
        "schema": "olm.bundle",
        "name": metadata["name"],
        "package": PACKAGE,
        "image": image,
        "properties": [
            {"type": "olm.gvk", "value": gvk},
            {"type": "olm.package", "value": {"packageName": PACKAGE, "version": spec["version"]}},
            {
                "type": "olm.csv.metadata",
                "value": {
                    "annotations": metadata["annotations"],
                    "apiServiceDefinitions": {},
                    **about,
                    "labels": metadata["labels"],
                },
            },
        ],
        "relatedImages": sorted(
            [{"name": "", "image": image}, *spec["relatedImages"]],
            key=lambda related: (related["image"], related["name"]),
        ),
    }


def bundles_of(path: Path) -> list[Json]:
    """Return the bundles of a catalog that this program wrote, in their order.

    :raises Refused: it isn't such a catalog.
    """
    try:
        parts = list(yaml.safe_load_all(path.read_text()))
        found = [part for part in parts if part["schema"] == "olm.bundle" and part["package"] == PACKAGE]
        [channel] = [part for part in parts if part["schema"] == "olm.channel" and part["name"] == CHANNEL]
        known = {release["name"]: release for release in found}
        ordered = [known[step["name"]] for step in channel["entries"]]
        for release in ordered:
            # A field that is missing is found here, and not where the next catalog is made.
            version_in(release), _value(release, "olm.csv.metadata")["annotations"]["olm.skipRange"]
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise Refused(f"{path} isn't a catalog of {PACKAGE}") from error
    if not ordered:
        raise Refused(f"{path} has no bundle of {PACKAGE}")
    return ordered


def version_in(release: Json) -> str:
    """Return the version of a catalog's bundle."""
    return str(_value(release, "olm.package")["version"])


def _value(release: Json, kind: str) -> Json:
    [found] = [each["value"] for each in release["properties"] if each["type"] == kind]
    return t.cast(Json, found)


def catalog(csv: Json, image: str, older: t.Sequence[Json] = ()) -> list[Json]:
    """Return a catalog of one package with one channel.

    :param csv: the newest bundle's ClusterServiceVersion.
    :param image: the newest bundle's image, by digest.
    :param older: the bundles of earlier releases, the oldest first.
    :raises Refused: the image isn't named by digest, or two bundles have one name.
    """
    if not DIGEST.fullmatch(image):
        raise Refused(f"the bundle's image is {image!r}: name it by its digest")
    bundles = [*older, entry(csv, image)]
    names = [release["name"] for release in bundles]
    if len(set(names)) < len(names):
        raise Refused(f"two bundles of the catalog are called alike: {', '.join(names)}")
    [icon] = csv["spec"]["icon"]
    entries = []
    for number, release in enumerate(bundles):
        # A channel has one head: each release replaces the one before, and may be reached from every older one.
        before = {"replaces": names[number - 1]} if number else {}
        skips = _value(release, "olm.csv.metadata")["annotations"]["olm.skipRange"]
        entries.append({"name": names[number], **before, "skipRange": skips})
    return [
        {
            "schema": "olm.package",
            "name": PACKAGE,
            "defaultChannel": CHANNEL,
            "description": csv["metadata"]["annotations"]["description"],
            "icon": {"base64data": icon["base64data"], "mediatype": icon["mediatype"]},
        },
        {"schema": "olm.channel", "name": CHANNEL, "package": PACKAGE, "entries": entries},
        *bundles,
    ]


def documents(parts: t.Iterable[Json]) -> str:
    """Return several YAML documents as one file."""
    return "".join(schema.written(part) for part in parts)


# ------------------------------------------------------------------ what installs it


def _namespace() -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }


def olm0(release: Release) -> dict[str, list[Json]]:
    """Return the objects for OLM's first generation, by file."""
    group = "operators.coreos.com"
    return {
        "catalogsource.yml": [
            {
                "apiVersion": f"{group}/v1alpha1",
                "kind": "CatalogSource",
                "metadata": {"name": PACKAGE, "namespace": release.catalogs},
                "spec": {
                    "sourceType": "grpc",
                    "image": release.catalog,
                    "displayName": "GPU shares",
                    "publisher": "kubegpu.share",
                    "updateStrategy": {"registryPoll": {"interval": "30m"}},
                    # The image has the catalog's files alone; OLM serves them by its own program.
                    "grpcPodConfig": {
                        "securityContextConfig": "restricted",
                        "extractContent": {"catalogDir": "/configs"},
                    },
                },
            }
        ],
        "subscription.yml": [
            _namespace(),
            {
                "apiVersion": f"{group}/v1",
                "kind": "OperatorGroup",
                "metadata": {"name": PACKAGE, "namespace": NAMESPACE},
                "spec": {},
            },
            {
                "apiVersion": f"{group}/v1alpha1",
                "kind": "Subscription",
                "metadata": {"name": PACKAGE, "namespace": NAMESPACE},
                "spec": {
                    "channel": CHANNEL,
                    "name": PACKAGE,
                    "source": PACKAGE,
                    "sourceNamespace": release.catalogs,
                    "installPlanApproval": "Automatic",
                },
            },
        ],
    }


def _installer() -> list[Json]:
    """Return the rights with which OLM's second generation installs: what it makes, and what that is granted."""
    rbac = "rbac.authorization.k8s.io"
    every = ["get", "list", "watch", "create", "update", "patch", "delete"]
    crd = f"{schema.PLURAL}.{schema.GROUP}"
    return [
        {"apiGroups": ["olm.operatorframework.io"], "resources": ["clusterextensions/finalizers"], "verbs": ["update"]},
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "verbs": ["create", "list", "watch"],
        },
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": [crd],
            "verbs": ["get", "update", "patch", "delete"],
        },
        {"apiGroups": [rbac], "resources": ["clusterroles", "clusterrolebindings"], "verbs": every},
        {"apiGroups": [rbac], "resources": ["roles", "rolebindings"], "verbs": every},
        {"apiGroups": [""], "resources": ["serviceaccounts", "services"], "verbs": every},
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": every},
        {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": every},
        # Nobody may grant what he hasn't.
        *rules_of("rights.yml"),
        *rules_of("rights_namespace.yml"),
    ]


def olm1(release: Release) -> dict[str, list[Json]]:
    """Return the objects for OLM's second generation, by file."""
    group, installer = "olm.operatorframework.io/v1", f"{PACKAGE}-installer"
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": installer}
    return {
        "clustercatalog.yml": [
            {
                "apiVersion": group,
                "kind": "ClusterCatalog",
                "metadata": {"name": PACKAGE},
                "spec": {
                    "source": {"type": "Image", "image": {"ref": release.catalog, "pollIntervalMinutes": 30}},
                },
            }
        ],
        "clusterextension.yml": [
            _namespace(),
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": installer, "namespace": NAMESPACE},
            },
            {
                "apiVersion": f"{rbac}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": installer},
                "rules": _installer(),
            },
            {
                "apiVersion": f"{rbac}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": installer},
                "roleRef": role,
                "subjects": [{"kind": "ServiceAccount", "name": installer, "namespace": NAMESPACE}],
            },
            {
                "apiVersion": group,
                "kind": "ClusterExtension",
                "metadata": {"name": PACKAGE},
                "spec": {
                    "namespace": NAMESPACE,
                    "serviceAccount": {"name": installer},
                    "source": {
                        "sourceType": "Catalog",
                        "catalog": {"packageName": PACKAGE, "channels": [CHANNEL]},
                    },
                },
            },
        ],
    }


def without_olm(release: Release) -> list[Json]:
    """Return everything of the bundle as objects that kubectl applies, for a cluster without OLM and for tests."""
    rbac = "rbac.authorization.k8s.io"
    subject = [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}]
    inside = {"name": ACCOUNT, "namespace": NAMESPACE}
    return [
        _namespace(),
        yaml.safe_load(schema.CRD.read_text()),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(inside)},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": ACCOUNT},
            "rules": rules_of("rights.yml"),
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": ACCOUNT},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": ACCOUNT},
            "subjects": subject,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": dict(inside),
            "rules": rules_of("rights_namespace.yml"),
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": dict(inside),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": ACCOUNT},
            "subjects": copy.deepcopy(subject),
        },
        *others(),
        deployment(release),
    ]


# ------------------------------------------------------------------ files


def write_bundle(release: Release, out: Path) -> None:
    """Write the bundle's folder and its Dockerfile, in place of an older one."""
    files = bundle(release)
    _fresh(out / "bundle", files)
    folders = {f"bundle/{name}": f"/{name}/" for name in ("manifests", "metadata", "tests/scorecard")}
    (out / "bundle.Dockerfile").write_text(dockerfile(folders, labels()))


def write_catalog(parts: t.Sequence[Json], out: Path) -> None:
    """Write the catalog's folder and its Dockerfile, in place of an older one."""
    _fresh(out / "catalog", {CATALOG_FILE: documents(parts)})
    (out / "catalog.Dockerfile").write_text(dockerfile({"catalog": "/configs"}, CATALOG_LABELS))


def write_install(release: Release, out: Path) -> None:
    """Write the objects that install it."""
    # OLM takes no admission policies in a bundle.
    policies = list(yaml.safe_load_all((HERE / "config" / ADMISSION).read_text()))
    objects = {**olm0(release), **olm1(release), "without-olm.yml": without_olm(release), ADMISSION: policies}
    _fresh(out / "install", {name: documents(parts) for name, parts in objects.items()})


def _fresh(folder: Path, files: t.Mapping[str, str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def pair(text: str) -> tuple[str, str]:
    """Parse ``NAME=IMAGE``.

    :raises argparse.ArgumentTypeError: it is something else.
    """
    name, equals, image = text.partition("=")
    if not equals or not name or not image:
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=IMAGE")
    return name, image


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operator-image", required=True, help="NAME@sha256:...")
    parser.add_argument("--servers-image", required=True, help="NAME@sha256:...")
    parser.add_argument("--image", action="append", default=[], type=pair, metavar="NAME=IMAGE", help="another one")
    parser.add_argument("--version", default=version_of())
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "operator")
    given = parser.parse_args()
    try:
        release = Release(given.version, given.operator_image, given.servers_image, dict(given.image))
        write_bundle(release, given.out)
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.out / 'bundle'}, for an image by {given.out / 'bundle.Dockerfile'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
