# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fields that kube-scheduler decodes from its configuration files, by version. Pure tables."""

from __future__ import annotations

import dataclasses
import typing as t

# The newest minor version whose fields are listed below; a newer one may have more.
KNOWN_UP_TO = 37

# "args" are a plugin's arguments, whose fields depend on the plugin's name beside them; "any" isn't decoded.
Kind = t.Literal["string", "bool", "int32", "int64", "float", "duration", "pointer to duration", "bytes", "args", "any"]
Shape = t.Union[Kind, "ListOf", "MapOf", "Struct"]


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list."""

    item: Shape


@dataclasses.dataclass(frozen=True)
class MapOf:
    """A mapping with arbitrary keys."""

    value: Shape


@dataclasses.dataclass(frozen=True)
class Since:
    """A field since minor version ``minor`` or, with ``only``, of these versions of the configuration only."""

    shape: Shape
    minor: int = 0
    only: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Struct:
    """A mapping with fields; with ``fold`` their names may be written in lower and upper case."""

    fields: t.Mapping[str, Shape | Since]
    fold: bool = False

    def of(self, minor: int, version: str) -> dict[str, Shape]:
        """Return the fields that kube-scheduler 1.``minor`` reads in this version of the configuration."""
        fields: dict[str, Shape] = {}
        for name, field in self.fields.items():
            if not isinstance(field, Since):
                fields[name] = field
            elif minor >= field.minor and (not field.only or version in field.only):
                fields[name] = field.shape
        return fields


def _fields(shape: Shape | Since, *names: str) -> dict[str, Shape | Since]:
    """Return fields of one shape."""
    return dict.fromkeys(names, shape)


# --------------------------------------------------------------------------- of Kubernetes' other types

_STRINGS = ListOf("string")
_REQUIREMENTS = ListOf(Struct({"key": "string", "operator": "string", "values": _STRINGS}))
_LABEL_SELECTOR = Struct({"matchLabels": MapOf("string"), "matchExpressions": _REQUIREMENTS})
_NODE_SELECTOR_TERM = Struct({"matchExpressions": _REQUIREMENTS, "matchFields": _REQUIREMENTS})
_NODE_AFFINITY = Struct(
    {
        "requiredDuringSchedulingIgnoredDuringExecution": Struct({"nodeSelectorTerms": ListOf(_NODE_SELECTOR_TERM)}),
        "preferredDuringSchedulingIgnoredDuringExecution": ListOf(
            Struct({"weight": "int32", "preference": _NODE_SELECTOR_TERM})
        ),
    }
)
_SPREAD_CONSTRAINT = Struct(
    {
        **{
            "maxSkew": "int32",
            "topologyKey": "string",
            "whenUnsatisfiable": "string",
            "labelSelector": _LABEL_SELECTOR,
        },
        "minDomains": Since("int32", 24),
        **_fields(Since("string", 25), "nodeAffinityPolicy", "nodeTaintsPolicy"),
        "matchLabelKeys": Since(_STRINGS, 25),
    }
)

# --------------------------------------------------------------------------- plugins' arguments

_RESOURCES = ListOf(Struct({"name": "string", "weight": "int64"}))
_SHAPE = ListOf(Struct({"utilization": "int32", "score": "int32"}))
_SCORING_STRATEGY = Struct(
    {"type": "string", "resources": _RESOURCES, "requestedToCapacityRatio": Struct({"shape": _SHAPE})}
)
_TYPE = _fields("string", "apiVersion", "kind")
# Older releases take the list of constraints as it is.
DEFAULTING_TYPE_SINCE = 20
_OLD = ("v1beta1",)


@dataclasses.dataclass(frozen=True)
class _Plugin:
    fields: t.Mapping[str, Shape | Since]
    since: int = 0
    only: tuple[str, ...] = ()


_PLUGINS: dict[str, _Plugin] = {
    "DefaultPreemption": _Plugin({"minCandidateNodesPercentage": "int32", "minCandidateNodesAbsolute": "int32"}),
    "InterPodAffinity": _Plugin(
        {"hardPodAffinityWeight": "int32", "ignorePreferredTermsOfExistingPods": Since("bool", 27)}
    ),
    "NodeAffinity": _Plugin({"addedAffinity": _NODE_AFFINITY}),
    "NodeResourcesFit": _Plugin(
        {
            **_fields(_STRINGS, "ignoredResources", "ignoredResourceGroups"),
            "scoringStrategy": Since(_SCORING_STRATEGY, 21),
        }
    ),
    "NodeResourcesBalancedAllocation": _Plugin({"resources": _RESOURCES}, since=21),
    "PodTopologySpread": _Plugin(
        {"defaultConstraints": ListOf(_SPREAD_CONSTRAINT), "defaultingType": Since("string", DEFAULTING_TYPE_SINCE)}
    ),
    "VolumeBinding": _Plugin({"bindTimeoutSeconds": "int64", "shape": Since(_SHAPE, 21)}),
    "DynamicResources": _Plugin(
        {"filterTimeout": "pointer to duration", "bindingTimeout": Since("pointer to duration", 35)}, since=34
    ),
    "NodeLabel": _Plugin(
        _fields(_STRINGS, "presentLabels", "absentLabels", "presentLabelsPreference", "absentLabelsPreference"),
        only=_OLD,
    ),
    "NodeResourcesLeastAllocated": _Plugin({"resources": _RESOURCES}, only=_OLD),
    "NodeResourcesMostAllocated": _Plugin({"resources": _RESOURCES}, only=_OLD),
    "RequestedToCapacityRatio": _Plugin({"shape": _SHAPE, "resources": _RESOURCES}, only=_OLD),
    "ServiceAffinity": _Plugin(_fields(_STRINGS, "affinityLabels", "antiAffinityLabelsPreference"), only=_OLD),
}


def args_of(plugin: str, minor: int, version: str) -> Struct | None:
    """Return the arguments of a plugin; None where kube-scheduler doesn't decode them, as for an out-of-tree plugin."""
    known = _PLUGINS.get(plugin)
    if known is None or minor < known.since or (known.only and version not in known.only):
        return None
    return Struct({**_TYPE, **known.fields})


# --------------------------------------------------------------------------- KubeSchedulerConfiguration

_PLUGIN_SET = Struct(_fields(ListOf(Struct({"name": "string", "weight": "int32"})), "enabled", "disabled"))
_EXTENSION_POINTS: dict[str, int] = {
    **dict.fromkeys(("queueSort", "preFilter", "filter", "postFilter", "preScore", "score", "reserve"), 0),
    **dict.fromkeys(("permit", "preBind", "bind", "postBind"), 0),
    "multiPoint": 23,
    "preEnqueue": 26,
    "placementGenerate": 36,
    "placementScore": 36,
    "podGroupPostFilter": 37,
}
_PROFILE = Struct(
    {
        "schedulerName": "string",
        "percentageOfNodesToScore": Since("int32", 25, ("v1",)),
        "plugins": Struct({name: Since(_PLUGIN_SET, minor) for name, minor in _EXTENSION_POINTS.items()}),
        "pluginConfig": ListOf(Struct({"name": "string", "args": "args"})),
    }
)


def _extender(https: str, timeout: Shape, fold: bool) -> Struct:
    tls = {
        "insecure": "bool",
        **_fields("string", "serverName", "certFile", "keyFile", "caFile"),
        **_fields("bytes", "certData", "keyData", "caData"),
    }
    return Struct(
        {
            **_fields("string", "urlPrefix", "filterVerb", "preemptVerb", "prioritizeVerb", "bindVerb"),
            "weight": "int64",
            https: "bool",
            "tlsConfig": Struct(tls, fold),
            "httpTimeout": timeout,
            "nodeCacheCapable": "bool",
            "managedResources": ListOf(Struct({"name": "string", "ignoredByScheduler": "bool"}, fold)),
            "ignorable": "bool",
        },
        fold,
    )


CONFIGURATION = Struct(
    {
        **_TYPE,
        "parallelism": "int32",
        "leaderElection": Struct(
            {
                "leaderElect": "bool",
                **_fields("duration", "leaseDuration", "renewDeadline", "retryPeriod"),
                **_fields("string", "resourceLock", "resourceName", "resourceNamespace"),
            }
        ),
        "clientConnection": Struct(
            {**_fields("string", "kubeconfig", "acceptContentTypes", "contentType"), "qps": "float", "burst": "int32"}
        ),
        **_fields(Since("string", only=("v1beta1", "v1beta2")), "healthzBindAddress", "metricsBindAddress"),
        **_fields("bool", "enableProfiling", "enableContentionProfiling"),
        "percentageOfNodesToScore": "int32",
        **_fields("int64", "podInitialBackoffSeconds", "podMaxBackoffSeconds"),
        "profiles": ListOf(_PROFILE),
        "extenders": ListOf(_extender("enableHTTPS", "duration", False)),
        "delayCacheUntilActive": Since("bool", 28, ("v1",)),
    }
)

# v1alpha2 of 1.18: no arguments of plugins are decoded with the file, and extenders are those of a Policy.
_ALPHA_POINTS = ("queueSort", "preFilter", "filter", "preScore", "score", "reserve", "permit", "preBind", "bind")
_ALPHA_PROFILE = Struct(
    {
        "schedulerName": "string",
        "plugins": Struct(_fields(_PLUGIN_SET, *_ALPHA_POINTS, "postBind", "unreserve")),
        "pluginConfig": ListOf(Struct({"name": "string", "args": "any"})),
    }
)
ALPHA_CONFIGURATION = Struct(
    {
        **{name: field for name, field in CONFIGURATION.fields.items() if name != "parallelism"},
        **_fields("string", "healthzBindAddress", "metricsBindAddress"),
        "disablePreemption": "bool",
        "bindTimeoutSeconds": "int64",
        "profiles": ListOf(_ALPHA_PROFILE),
        "extenders": ListOf(_extender("enableHttps", "int64", True)),
    }
)

# --------------------------------------------------------------------------- Policy

_PREDICATE = {
    "serviceAffinity": Struct({"labels": _STRINGS}),
    "labelsPresence": Struct({"labels": _STRINGS, "presence": "bool"}),
}
_PRIORITY = {
    "serviceAntiAffinity": Struct({"label": "string"}),
    "labelPreference": Struct({"label": "string", "presence": "bool"}),
    "requestedToCapacityRatioArguments": Struct({"shape": _SHAPE, "resources": _RESOURCES}),
}
POLICY = Struct(
    {
        **_TYPE,
        "predicates": ListOf(Struct({"name": "string", "argument": Struct(_PREDICATE)})),
        "priorities": ListOf(Struct({"name": "string", "weight": "int64", "argument": Struct(_PRIORITY)})),
        "extenders": ListOf(_extender("enableHttps", "int64", True)),
        "hardPodAffinitySymmetricWeight": "int32",
        "alwaysCheckAllPredicates": "bool",
    }
)
