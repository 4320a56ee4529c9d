# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The values of a chart by their paths, and what a rendered chart does with them. Pure."""

from __future__ import annotations

import copy
import difflib
import typing as t

from .._core.libraries import yaml
from .._core.natural import natural
from .._core.types import JsonObject

MISSING: t.Any = object()


class Finding(t.TypedDict):
    """A problem, or a note that changes nothing.

    :ivar code: identifies it; nothing decides by the message.
    :ivar path: the value or variable concerned; empty where there is none.
    """

    code: str
    path: str
    message: str


def finding(code: str, path: str, message: str) -> Finding:
    """Return a finding."""
    return {"code": code, "path": path, "message": message}


def get(values: JsonObject, path: str) -> t.Any:
    """Return the value at a path, or ``MISSING``."""
    at: t.Any = values
    for key in path.split("."):
        if not isinstance(at, dict) or key not in at:
            return MISSING
        at = at[key]
    return at


def put(values: JsonObject, path: str, value: t.Any) -> None:
    """Set the value at a path; what isn't a map on the way is replaced by one."""
    *folders, last = path.split(".")
    at = values
    for key in folders:
        if not isinstance(at.get(key), dict):
            at[key] = {}
        at = at[key]
    at[last] = value


def take(values: JsonObject, path: str) -> t.Any:
    """Remove the value at a path and return it, or ``MISSING``; maps that become empty go with it."""
    head, _dot, rest = path.partition(".")
    if not rest:
        return values.pop(head, MISSING)
    inner = values.get(head)
    if not isinstance(inner, dict):
        return MISSING
    value = take(inner, rest)
    if value is not MISSING and not inner:
        del values[head]
    return value


def merged(base: JsonObject, over: JsonObject) -> JsonObject:
    """Merge two trees as helm does: maps by key, everything else is replaced."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = merged(below, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def leaves(values: JsonObject, above: str = "") -> t.Iterator[tuple[str, t.Any]]:
    """Yield path and value of everything that isn't a map with keys."""
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def unknown(values: JsonObject, known: JsonObject, open_maps: t.Collection[str]) -> list[Finding]:
    """Return the values that a chart doesn't have, which helm would ignore without a word.

    :param values: what is set.
    :param known: the chart's own values.
    :param open_maps: paths below which every key is allowed, such as selectors.
    """
    findings = []
    names = [path for path, _value in leaves(known)]
    for path, _value in leaves(values):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            at = ".".join(parts[:depth])
            here = get(known, at)
            if at in open_maps or (here is not MISSING and (not isinstance(here, dict) or not here)):
                break
            if here is MISSING:
                close = difflib.get_close_matches(path, names, 1)
                hint = f"; it has {close[0]}" if close else ""
                message = f"the chart has no value {path}, and helm would ignore it{hint}"
                findings.append(finding("unknown_value", path, message))
                break
    return findings


DEVICE_CONFIG = "device-config.yaml"
CONTENT = "device-config"

# Value of the chart to the key below nvidia in the device configuration.
CONFIGURED = {
    "devicePlugin.deviceSplitCount": "deviceSplitCount",
    "devicePlugin.deviceMemoryScaling": "deviceMemoryScaling",
    "devicePlugin.deviceCoreScaling": "deviceCoreScaling",
    "devicePlugin.runtimeClassName": "runtimeClassName",
}
# Value of the chart to the argument of a container that carries it.
ARGUMENTS = {
    "scheduler.forceOverwriteDefaultScheduler": "--force-overwrite-default-scheduler",
    "scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy": "--node-scheduler-policy",
    "scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy": "--gpu-scheduler-policy",
    "devicePlugin.migStrategy": "--mig-strategy",
    "devicePlugin.disablecorelimit": "--disable-core-limit",
}


class ReleasePlan(t.TypedDict):
    """What is deployed.

    :ivar release_values: the chart's values.
    :ivar defaults: of ``nvidia`` in the device configuration, which no value of the chart sets.
    :ivar runtime_class: the RuntimeClass that has to exist; empty for none.
    :ivar overwrites: whether the webhook gives HAMi's scheduler to pods that name none.
    :ivar certificate: whether the role makes the webhook's certificate.
    :ivar chart_version: the version that the chart must have.
    :ivar deployed: helm has recorded that this is deployed.
    """

    release_values: JsonObject
    certificate: bool
    chart_version: str
    deployed: bool
    defaults: dict[str, int]
    runtime_class: str
    overwrites: bool
    notes: list[Finding]
    problems: list[Finding]


class Release(t.TypedDict):
    """The values to deploy, with the device configuration where the chart has no value for it."""

    release_values: JsonObject
    problems: list[Finding]


def deployed(recorded: JsonObject, values: JsonObject, defaults: t.Mapping[str, int], version: str) -> bool:
    """Return whether helm has recorded that these values are deployed, so that neither the chart nor helm is needed.

    :param recorded: the release as ``helm.release`` decodes it; empty without one.
    :param values: the planned values.
    :param defaults: of ``nvidia`` in the device configuration.
    :param version: of the chart.
    """
    if (recorded.get("status"), recorded.get("chart_version")) != ("deployed", version):
        return False
    config = _device_config(
        document for document in yaml.safe_load_all(recorded["manifest"]) if isinstance(document, dict)
    )
    section = (config or {}).get("nvidia") or {}
    if any(section.get(key) != value for key, value in defaults.items()):
        return False
    # ``release`` completes the values by the whole file where a default differs from the chart's.
    given = copy.deepcopy(recorded["values"])
    if get(values, CONTENT) is MISSING:
        take(given, CONTENT)
    return bool(given == values)


def release(rendered: str, planned: ReleasePlan) -> Release:
    """Compare a rendered chart with the plan, and complete the device configuration.

    :param rendered: the chart rendered with the planned values.
    """
    objects = [document for document in yaml.safe_load_all(rendered) if isinstance(document, dict)]
    values = copy.deepcopy(planned["release_values"])
    problems: list[Finding] = []
    config = _device_config(objects)
    if config is None:
        problems.append(finding("no_device_config", "", f"the chart renders no ConfigMap with {DEVICE_CONFIG}"))
        return {"release_values": values, "problems": problems}
    section = config.get("nvidia") or {}
    versions = sorted(
        {version for manifest in objects for version in [_chart_version(manifest)] if version}, key=natural
    )
    if versions != [planned["chart_version"]]:
        message = f"the chart is version {' and '.join(versions) or 'unknown'}, and hami_chart_version is"
        problems.append(finding("chart_version", "", f"{message} {planned['chart_version']}"))
    problems += _differences(values, section, _arguments(objects), _webhook(objects))
    wanted = {key: value for key, value in planned["defaults"].items() if value != section.get(key)}
    if wanted:
        # It replaces the chart's whole file, so that all the rest is the chart's own text.
        config["nvidia"] = {**section, **wanted}
        put(values, CONTENT, {"content": yaml.safe_dump(config, sort_keys=False)})
    return {"release_values": values, "problems": problems}


def _device_config(objects: t.Iterable[JsonObject]) -> JsonObject | None:
    for manifest in objects:
        text = (manifest.get("data") or {}).get(DEVICE_CONFIG) if manifest.get("kind") == "ConfigMap" else None
        if text:
            config = yaml.safe_load(text)
            return config if isinstance(config, dict) else None
    return None


def _chart_version(manifest: JsonObject) -> str:
    """Return the version in the label that charts set by convention, ``<name>-<version>``."""
    return str((manifest["metadata"].get("labels") or {}).get("helm.sh/chart") or "").partition("-")[2]


def _arguments(objects: t.Iterable[JsonObject]) -> list[str]:
    """Return the arguments of all containers of the workloads."""
    arguments: list[str] = []
    for manifest in objects:
        if manifest.get("kind") in ("DaemonSet", "Deployment"):
            for container in manifest["spec"]["template"]["spec"]["containers"]:
                arguments += [str(part) for part in (container.get("command") or []) + (container.get("args") or [])]
    return arguments


def _webhook(objects: t.Iterable[JsonObject]) -> JsonObject:
    webhooks = [manifest for manifest in objects if manifest.get("kind") == "MutatingWebhookConfiguration"]
    return t.cast(JsonObject, webhooks[0]["webhooks"][0]) if webhooks else {}


def _differences(
    values: JsonObject, section: JsonObject, arguments: t.Sequence[str], webhook: JsonObject
) -> list[Finding]:
    """Return the planned values that the rendered objects don't carry.

    :param section: ``nvidia`` of the device configuration.
    :param arguments: of all containers.
    :param webhook: the first one of the configuration; empty without one.
    """
    carried: list[tuple[str, t.Any, t.Any]] = [
        (path, get(values, path), section.get(key)) for path, key in CONFIGURED.items()
    ]
    for path, flag in ARGUMENTS.items():
        rendered = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{flag}=")]
        value = get(values, path)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        carried.append((path, text if value is not MISSING else MISSING, rendered[0] if rendered else None))
    policy = "scheduler.admissionWebhook.failurePolicy"
    if get(values, "scheduler.admissionWebhook.enabled") is not False:
        carried.append((policy, get(values, policy), webhook.get("failurePolicy")))
        path = "scheduler.admissionWebhook.whitelistNamespaces"
        carried.append((path, get(values, path), _exempt(webhook)))
    return [
        finding(
            "value_ignored",
            path,
            f"this version of the chart ignores {path}: it renders {used!r}, not {value!r}",
        )
        for path, value, used in carried
        if value is not MISSING and value != used
    ]


def _exempt(webhook: JsonObject) -> list[str] | None:
    for expression in ((webhook.get("namespaceSelector") or {}).get("matchExpressions")) or []:
        if expression.get("key") == "kubernetes.io/metadata.name" and expression.get("operator") == "NotIn":
            return list(expression.get("values") or [])
    return None
