# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the pages of ``docs/reference`` from the code's own tables, so that they can't differ from it."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import typing as t
from pathlib import Path

import drawing
import yaml

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = "ansible_collections.kubegpu.share.plugins"


def code(name: str) -> t.Any:
    """Import a file of the collection's code."""
    if str(ROOT / ".collections") not in sys.path:
        sys.path.insert(0, str(ROOT / ".collections"))
    return importlib.import_module(f"{PLUGINS}.{name}")


FINDINGS = """\
Findings of preflight
+++++++++++++++++++++

Preflight prints each with its id, its hosts and what to do; a problem stops the run. Those of the first list can't be
ignored. Those of the second can, if you know better: ``preflight_ignore: [boot-full, card-lost@gpu7]``.

{}
May be ignored
--------------

{}"""


def preflight_findings() -> str:
    """Return the page of what preflight can find."""
    preflight = code("module_utils._preflight.evaluate")
    groups = (preflight.INPUT, preflight.described())
    return FINDINGS.format(*("".join(f"``{id}``\n    {text}\n\n" for id, text in group.items()) for group in groups))


@dataclasses.dataclass(frozen=True)
class Symptom:
    """What somebody sees who doesn't know the cause.

    :param first: what to look at first.
    :param checks: ids of verify.yml's checks.
    :param codes: the servers' reason codes.
    :param findings: ids of preflight.
    """

    title: str
    first: str
    checks: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


SYMPTOMS = (
    Symptom(
        "A run stops before it changes anything",
        "Read preflight's list above the failure: each entry names the hosts or the variable, with its file and line, "
        "and the last line says what to do.",
        findings=(
            *("wrong-value", "unknown-variable", "missing-value", "missing-file"),
            *("unreachable", "not-root", "no-escalation", "no-facts", "mirror-missing"),
        ),
    ),
    Symptom(
        "A pod with a share stays Pending",
        "`kubectl describe pod NAME`: see the Event `FailedScheduling`. `Insufficient aliyun.com/gpu-mem` is "
        "Kubernetes' own reason: a whole node has too few free units, or announces none. A reason code is the "
        "extender's, which looks at single cards.",
        ("S1", "S2", "S4", "C6", "G11"),
        (
            "NodeUnknown",
            "NoGPUMemory",
            "NoHealthyCard",
            "NoMatchingModel",
            "CardTooSmall",
            "InsufficientGPUMemory",
            "InvalidAnnotation",
            "NotReady",
            "StaleState",
        ),
    ),
    Symptom(
        "kube-scheduler chooses a node for a pod, and the pod isn't bound (Event GPUMemoryRefused)",
        "The Event's message begins with the reason code. kube-scheduler tries the pod again by itself. Act if the "
        "Event repeats for minutes.",
        ("S1", "G5"),
        (
            "PodNotFound",
            "PodReplaced",
            "PodTerminating",
            "PodFinished",
            "PodBoundElsewhere",
            "BindInProgress",
            "Conflict",
            "KubernetesAPIError",
            "LedgerUnavailable",
            "LedgerFull",
            "OutcomeUnknown",
        ),
    ),
    Symptom(
        "A pod fails on its node (UnexpectedAdmissionError), or waits in ContainerCreating",
        "`kubectl describe pod NAME`: kubelet's Event has the device plugin's reason code. `kubectl -n "
        "gpushare-system logs` of the plugin's pod on that node has more.",
        ("C4", "G5", "G8", "G12"),
        ("UnknownDeviceID", "UnequalShares", "CDIUnavailable", "InsufficientGPUMemory"),
        ("runtime-refused", "device-nodes", "legacy-mode", "cdi-stale", "mandatory-access"),
    ),
    Symptom(
        "A node announces no GPU memory, or less than before",
        "`kubectl get node NAME -o yaml`: the annotation `kubegpu.share/cards` has each card's state with its "
        "reason code. `nvidia-smi` on the node shows whether the driver still has the card.",
        ("S1", "S4", "C6", "C9", "G1", "G2", "G11"),
        (
            *("CardLost", "Excluded", "FabricNotReady", "MIGEnabled", "RecoveryRequired", "RowRemapFailed"),
            *("UnifiedMemory", "XIDError", "MemoryLimitUnavailable"),
        ),
        ("card-lost", "driver-fails", "driver-mismatch", "kernel-without-module", "foreign-plugin", "fabric-manager"),
    ),
    Symptom(
        "A pod gets less GPU memory than its share (CUDA: out of memory)",
        "`kubectl describe node NAME`: Events name who holds the card's memory. `nvidia-smi` on the node lists the "
        "processes.",
        ("C2", "C3", "C7", "G9", "S5"),
        ("MemoryLimitExceeded", "ForeignMemoryHeld", "UnaccountedMemoryHeld"),
    ),
    Symptom(
        "A pod sees cards that it wasn't given",
        "Run `playbooks/verify.yml`. It compares the containers' device nodes with kubelet's allocations.",
        ("C8", "C3", "G7", "G12", "S3"),
        ("ForeignMemoryHeld",),
    ),
    Symptom(
        "Shares aren't enforced as limits",
        "`kubectl get node NAME -o yaml`: the annotation `kubegpu.share/memory-limit` has the reason, and in "
        "`kubegpu.share/cards` each card has its own.",
        ("S5", "G9"),
        ("MemoryLimitFailed", "MemoryLimitUnavailable"),
        ("memory-limit",),
    ),
    Symptom(
        "inspect.yml, kubectl and nvidia-smi show different numbers",
        "Run `playbooks/verify.yml`: it names the pod and the card on which the sources differ. It doesn't report "
        "differences that disappear within half a minute.",
        ("C1", "C5", "C7", "G2", "G3", "G4", "G6", "G10"),
    ),
    Symptom(
        "After an upgrade, or another tool's run, new pods get no card",
        "Run `playbooks/verify.yml` to see what was overwritten, and `playbooks/site.yml` to restore it.",
        ("S2", "S1", "G3", "C4"),
        (),
        ("driver-mismatch", "toolkit-skew", "runtime-warning", "cdi-stale"),
    ),
)


def reason_codes() -> dict[str, str]:
    """Return the meaning of each of the servers' reason codes, from the table in docs/gpushare.md."""
    part = (ROOT / "docs" / "gpushare.md").read_text().partition("\n## Reason codes\n")[2].partition("\n## ")[0]
    meanings = {}
    for row in part.splitlines():
        if row.startswith("| `"):
            names, _where, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
            meanings.update(dict.fromkeys(re.findall(r"`(\w+)`", names), meaning.rstrip(" |")))
    return meanings


def sentence(text: str) -> str:
    """Return a template of a message as a text: its fields are shown by their names, in italics."""
    escaped = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"\{(\w+)\}", r"*\1*", escaped)


def _symptom(symptom: Symptom, checks: t.Mapping[str, t.Any], codes: t.Mapping[str, str], found: t.Mapping) -> str:
    rows = [f"| [{id}](#{id.lower()}) | verify | {checks[id].documentation.title} |" for id in symptom.checks]
    rows += [f"| `{one}` | servers | {codes[one]} |" for one in symptom.codes]
    rows += [f"| `{one}` | preflight | {found[one]} |" for one in symptom.findings]
    table = "\n".join(["| id | reported by | meaning |", "|---|---|---|", *rows])
    return f"## {symptom.title}\n\n{symptom.first}\n\n{table}\n"


def _check(check: t.Any) -> str:
    about = check.documentation
    rows = [
        f"| `{cause}` | {sentence(text)} | {sentence(about.actions.get(cause, about.action))} |"
        for cause, text in about.messages.items()
    ]
    table = "\n".join(["| cause | found | what to do |", "|---|---|---|", *rows])
    return f"### {check.id}\n\n**{about.title}.** Levels: {about.levels}.\n\n{table}\n"


TROUBLESHOOTING = """\
# Troubleshooting by symptom

Find your symptom, follow its first sentence, and then look at its ids. Each id has its meaning here, and findings of
preflight and verify say what to do. `docs/code_tables.py` makes this page from the code's own tables.

Three programs report. **preflight** reports before anything changes ([all of its findings](preflight_findings.rst)).
The **servers** give a
[reason code](../gpushare.md#reason-codes) with each refusal, in Events, logs and metrics. **verify** compares the
API, kubelet and NVML at any time:

```
ansible-playbook -i inventory kubegpu.share.verify
```

{symptoms}
{rest}
## What verify reports

Values that a message has are in italics. Where evidence is missing (UNKNOWN), {observe}.

{checks}"""
REST = """\
## Another id

Ids that none of these symptoms has:

{}
"""


def troubleshooting() -> str:
    """Return the page of symptoms with the findings behind each.

    :raises KeyError: a symptom names an id that the code doesn't have.
    """
    checks = {check.id: check for check in code("module_utils._check.registry").CHECKS}
    preflight = code("module_utils._preflight.evaluate")
    found = {**preflight.INPUT, **preflight.described()}
    codes = {name: text.replace("](#", "](../gpushare.md#") for name, text in reason_codes().items()}
    symptoms = "\n".join(_symptom(symptom, checks, codes, found) for symptom in SYMPTOMS)
    shown = {id for symptom in SYMPTOMS for id in (*symptom.checks, *symptom.codes)}
    rest = [f"* [{id}](#{id.lower()}): {check.documentation.title}" for id, check in checks.items() if id not in shown]
    rest += [f"* `{name}`: {text}" for name, text in codes.items() if name not in shown]
    return TROUBLESHOOTING.format(
        symptoms=symptoms,
        rest=REST.format("\n".join(rest)) if rest else "",
        observe=code("module_utils._check.invariant").OBSERVE,
        checks="\n".join(map(_check, checks.values())),
    )


SUPPORT = """\
# Support matrix

`docs/code_tables.py` makes this page from the tables that the roles themselves use. What was tested with real
components, and what from documentation only,
stands in the [README](../../README.md#what-is-supported-now).

## GPU nodes: systems, and where the driver comes from

| system | `driver_source`, with the architectures |
|---|---|
{systems}

`packages` needs the packages of `repository` in a folder. `runfile` works on each of these systems. Container
runtimes: {runtimes}; k3s and RKE2 by their own
settings. Variables: [role driver](../../roles/driver/meta/argument_specs.yml),
[role runtime](../../roles/runtime/meta/argument_specs.yml)

### What the package repositories hold

From `meta/repositories.yml`, which the roles, preflight and the plan read: what isn't there is refused before anything
changes, with what there is. A mirror (`driver_repo_url`) isn't held to it. Where no branch is named, no bound is known,
and only the node's own package lists tell.

| repository | architecture | key | branches | modules | compiled modules for kernels | said by | on |
|---|---|---|---|---|---|---|---|
{repositories}

## Schedulers

| Kubernetes | `KubeSchedulerConfiguration` that is written | read |
|---|---|---|
{schedulers}
| before 1.{config} | none: a policy file | |

* `scheduler_configuration: policy` is possible before 1.{no_policy}.
* k3s and RKE2: 1.{drop_ins} and newer, whose settings may be in several files.
* A dedicated scheduler: 1.{dedicated} and newer, of the API server's minor release or the one before.
* Admission policies, which refuse pods that name cards or another scheduler: 1.{admission} and newer (1.{beta} where
  the beta API is enabled, for a dedicated scheduler only).

## Back ends

| | set up by | inspect and verify read |
|---|---|---|
{backends}
"""


def _branches(row: t.Mapping[str, t.Any]) -> str:
    first, last = row["first"], row["last"]
    if first and first == last:
        return str(first)
    return " ".join((f"from {first}" if first else "", f"up to {last}" if last else "")).strip()


def repositories() -> list[str]:
    """Return the rows of what the repositories of drivers and of the container toolkit hold."""
    table = code("plugin_utils._pins.table")
    rows = []
    for section, whose in (("nvidia", "NVIDIA"), ("distribution", "the distribution"), ("toolkit", "NVIDIA's toolkit")):
        for name, row in table.section(section).items():
            cells = [f"{whose}: {name}", row["arch"], row["key"] and f"`{row['key']}`"]
            if section == "toolkit":
                cells += ["", "", ""]
            else:
                cells += [_branches(row), ", ".join(row["modules"]), ", ".join(row["kernels"] or ())]
            rows.append(f"| {' | '.join(cells)} | <{row['source']}> | {row['date']} |")
    return rows


def support() -> str:
    """Return the page of what is supported, from the catalogues and constants that the roles use."""
    systems, tables = [], code("plugin_utils._pins.table").driver_tables()
    for path in sorted((ROOT / "roles" / "driver" / "vars").glob("*_*.yml")):
        catalog = yaml.safe_load(path.read_text())["__driver_catalog"]
        options = code("module_utils._driver.catalog").driver_options({"tables": tables})
        node = {"distribution": {"id": catalog["sources"].get("distribution", {}).get("only", ["*"])[0]}}
        found = code("module_utils._driver.catalog").Catalog(node, catalog, options)
        known = [f"`{source}` ({', '.join(found.holds(source))})" for source in catalog["sources"]]
        systems.append(f"| {catalog['name']} | {', '.join([*known, '`packages`', '`runfile`'])} |")
    config = code("module_utils._scheduler.config")
    constants = code("module_utils._scheduler.constants")
    preflight = code("module_utils._preflight.evaluate")
    newest = [since for since, *_rest in config.API_VERSIONS]
    schedulers = []
    for (since, written, read), after in zip(config.API_VERSIONS, [None, *newest], strict=False):
        until = " and newer" if after is None else f" to 1.{after - 1}" if after - 1 > since else ""
        schedulers.append(f"| 1.{since}{until} | `{written}` | {', '.join(f'`{one}`' for one in read)} |")
    read = {name: "yes" for name in code("module_utils._check.invariant").BACKENDS.values()}
    shown = {
        "gpushare": "gpushare, this collection's servers or upstream's",
        "hami": "HAMi",
        "nvidia": "NVIDIA's device plugin",
    }
    known_backends = code("module_utils._allocation.node_backends")
    roles = {one.backend: one.role for one in known_backends.ALLOCATORS.values()}
    backends = [f"| {text} | site.yml, by role {roles[name]} | {read[name]} |" for name, text in shown.items()]
    return SUPPORT.format(
        systems="\n".join(systems),
        repositories="\n".join(repositories()),
        runtimes=", ".join(f"`{name}`" for name in preflight.RUNTIMES),
        schedulers="\n".join(schedulers),
        config=config.CONFIG_SINCE,
        no_policy=config.NO_POLICY_SINCE,
        drop_ins=code("module_utils._scheduler.embedded_plan").DROP_INS_SINCE,
        dedicated=code("module_utils._scheduler.dedicated").OLDEST,
        admission=constants.ADMISSION_SINCE,
        beta=constants.ADMISSION_BETA_SINCE,
        backends="\n".join(backends),
    )


PAGES: dict[str, t.Callable[[], str]] = {
    "reference/preflight_findings.rst": preflight_findings,
    "reference/troubleshooting.md": troubleshooting,
    "reference/support.md": support,
}


if __name__ == "__main__":
    sys.exit(drawing.main(__doc__, PAGES))
