# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the custom resource definition of GPUShare, from the roles' argument specifications and ``options.yml``.

``--check`` only compares ``config/crd.yml``, and ends with 1 where it isn't current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import typing as t
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CRD = HERE / "config" / "crd.yml"
SHARED = "_shared"
GROUP, VERSION, KIND, PLURAL = "kubegpu.share", "v1alpha1", "GPUShare", "gpushares"
# The one that a cluster has. A new one has no status, since that is a subresource: those that the operator has seen
# before there was this rule can still be changed, and lose their finalizer.
NAME = "cluster"

# Whatever options.yml says: what these variables decide is never a resource's.
FORBIDDEN = re.compile(
    r"ansible_.*|_.*|.*_state|.*kubeconfig.*|.*become.*"
    r"|.*(?<!_per)_(namespace|image|folder|folders|root|host|hosts|password|token|key)"
)
SIMPLE = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}
# What a list of options may say of one, beside what the argument specification says.
RULES = frozenset(
    ("text", "items", "min", "max", "most", "least", "choices", "required", "without", "texts", "rules", "description")
)
# YAML 1.1 reads these as true and false.
BOOLEANS = frozenset(("on", "off", "yes", "no", "y", "n", "true", "false"))
# Words that the engine keeps together (internal/ansible/paramconv of ansible-operator-plugins 1.42.2).
WORDS = ("HTTP", "URL", "IP")

HEADER = "# Written by operator/schema.py from the roles' argument specifications and operator/options.yml.\n"

Json = dict[str, t.Any]


class Undecided(Exception):
    """The list of options and the argument specifications don't fit; the message names the option."""


class Option(t.NamedTuple):
    """An allowed option: the role, its argument specification, and what ``options.yml`` says of it."""

    role: str
    spec: Json
    extra: Json


# ------------------------------------------------------------------ names


def camel(name: str) -> str:
    """Return a variable's name as a field of the resource."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def snake(name: str) -> str:
    """Return the name that ansible-operator makes of a field, as far as the names that ``camel`` makes are concerned.

    :raises Undecided: the name has something of which the engine's rule makes something else.
    """
    if not re.fullmatch(r"[a-z]+([A-Z][a-z]+)*", name) or any(word in name for word in WORDS):
        raise Undecided(f"{name} isn't words of letters, of which the engine makes another name")
    return re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", name)


# ------------------------------------------------------------------ what there is, and what is allowed


def listed() -> Json:
    """Return the content of ``options.yml``."""
    return dict(yaml.safe_load((HERE / "options.yml").read_text()))


def specifications(roles: Path = ROOT / "roles") -> dict[str, dict[str, Json]]:
    """Return the argument specifications by role and option; those of no role alone are of the role ``_shared``."""
    sys.path[:0] = [path for path in (str(ROOT / ".collections"),) if path not in sys.path]
    from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight.specifications import SHARED as NO_ROLE

    # A kubeconfig is an option of many roles.
    found: dict[str, dict[str, Json]] = {SHARED: {**NO_ROLE, "gpu_kubeconfig": {"type": "raw"}}}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        own = found.setdefault(path.parts[-3], {})
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            own.update({name: spec for name, spec in (entry.get("options") or {}).items() if name not in found[SHARED]})
    return found


def allowed(listing: Json, specs: t.Mapping[str, t.Mapping[str, Json]]) -> dict[str, Option]:
    """Return the allowed options by their names.

    :raises Undecided: an option is in no list or in two, a list names what isn't there, or what is never allowed.
    """
    roles, excluded = listing["excluded"]["roles"], dict(listing["excluded"]["options"])
    found: dict[str, Option] = {}
    for role in (*listing["allowed"], *roles):
        if role not in specs:
            raise Undecided(f"options.yml names the role {role}, which isn't there")
    for role, options in specs.items():
        own = dict(listing["allowed"].get(role) or {})
        if role in roles and own:
            raise Undecided(f"options.yml allows options of the role {role} and excludes all of it")
        for name, spec in options.items():
            if role in roles:
                continue
            if (name in own) == (name in excluded):
                where = "both lists" if name in own else "neither list"
                raise Undecided(f"{name} is in {where} of operator/options.yml: allow it, or exclude it with a reason")
            if name not in own:
                excluded.pop(name)
            elif FORBIDDEN.fullmatch(name):
                raise Undecided(f"{name} is never a resource's to set")
            else:
                found[name] = Option(role, spec, own.pop(name) or {})
        if own:
            raise Undecided(f"options.yml allows {', '.join(own)}, which role {role} doesn't have")
    if excluded:
        raise Undecided(f"options.yml excludes {', '.join(excluded)}, which no role has")
    reasons = [*roles.items(), *listing["excluded"]["options"].items()]
    unreasoned = [name for name, reason in reasons if not str(reason or "").strip()]
    if unreasoned:
        raise Undecided(f"options.yml excludes {', '.join(unreasoned)} without a reason")
    return found


# ------------------------------------------------------------------ descriptions

_INSIDE = r"\(((?:[^()\\]|\\.|\([^()]*\))*)\)"
# Ansible's markup, by its letter.
_MARKUP = re.compile(rf"\b(RV|[IBCVEOMPULR]){_INSIDE}")


def plain(texts: str | t.Sequence[str], names: t.Container[str]) -> str:
    """Return a description without Ansible's markup, with the options' names as the resource has them.

    :param names: the options that the resource has.
    """

    def word(found: re.Match[str]) -> str:
        kind, inner = found[1], re.sub(r"\\(.)", r"\1", found[2])
        if kind in "LR":
            return inner.rpartition(",")[0].strip()
        if kind == "P":
            return inner.partition("#")[0].rpartition(".")[2]
        if kind == "O":
            name, equals, value = inner.partition("=")
            return f"{name.rpartition(':')[2]}: {value}" if equals else name
        return f'"{inner}"' if kind == "V" else inner

    paragraphs = [texts] if isinstance(texts, str) else texts
    text = "\n".join(re.sub(r"\s+", " ", _MARKUP.sub(word, paragraph)).strip() for paragraph in paragraphs)
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda found: camel(found[0]) if found[0] in names else found[0], text)


def description(name: str, option: Option, names: t.Container[str]) -> str:
    """Return an option's description: the text, its default, and which values need quotes."""
    lines = [plain(option.extra.get("description") or option.spec["description"], names)]
    default = option.spec.get("default")
    if default not in (None, "", []):
        lines.append(f"Default: {default if isinstance(default, str) else json.dumps(default)}")
    quoted = [choice for choice in option.spec.get("choices") or () if str(choice).lower() in BOOLEANS]
    if quoted:
        lines.append(f'Write "{quoted[0]}" with its quotes.')
    return "\n".join(lines)


# ------------------------------------------------------------------ schema


def _value(where: str, spec: Json, extra: Json, texts: Json, kind: str, text: str | None) -> Json:
    """Return the schema of one value that isn't a list.

    :raises Undecided: it isn't bounded.
    """
    if kind not in SIMPLE:
        raise Undecided(f"{where} is a {kind}, of which no schema can tell what it has: exclude it")
    schema: Json = {"type": SIMPLE[kind]}
    choices = extra.get("choices") or spec.get("choices")
    if choices:
        foreign = [choice for choice in choices if choice not in spec["choices"]]
        if foreign:
            raise Undecided(f"{where} has no choice {', '.join(foreign)}")
        schema["enum"] = list(choices)
    elif kind == "str":
        if text not in texts:
            raise Undecided(f"{where} is any text: name its kind in operator/options.yml")
        schema |= texts[text]
    elif kind in ("int", "float"):
        if "min" not in extra or "max" not in extra:
            raise Undecided(f"{where} is any number: give min and max in operator/options.yml")
        schema |= {"minimum": extra["min"], "maximum": extra["max"]}
        if kind == "int":
            schema["format"] = "int64"
    return schema


def _entry(name: str, option: Option, texts: Json, names: t.Container[str]) -> Json:
    """Return the schema of a mapping in a list."""
    nested, without = option.spec.get("options"), option.extra.get("without") or {}
    if not nested:
        raise Undecided(f"{name} is a list of any mappings: exclude it")
    properties = {}
    for key, spec in nested.items():
        if key in without:
            continue
        if snake(key) != key:
            raise Undecided(f"{name} has {key}, of which the engine makes {snake(key)}")
        kind = (option.extra.get("texts") or {}).get(key)
        properties[key] = {
            **_value(f"{name}.{key}", spec, {}, texts, spec["type"], kind),
            "description": plain(spec["description"], names),
        }
    stale = set(without) - set(nested)
    if stale or not properties:
        raise Undecided(f"{name} has no {', '.join(sorted(stale)) or 'options that are left'}")
    schema: Json = {"type": "object", "properties": properties}
    required = [key for key, spec in nested.items() if spec.get("required")]
    if required:
        schema["required"] = required
    if option.extra.get("rules"):
        schema["x-kubernetes-validations"] = option.extra["rules"]
    return schema


def field(name: str, option: Option, texts: Json, names: t.Container[str]) -> Json:
    """Return an option's schema.

    :raises Undecided: the schema would accept anything.
    """
    unknown = set(option.extra) - RULES
    if unknown:
        raise Undecided(f"options.yml says {', '.join(sorted(unknown))} of {name}, which means nothing")
    kind = option.spec["type"]
    schema: Json = {"description": description(name, option, names)}
    if kind != "list":
        return schema | _value(name, option.spec, option.extra, texts, kind, option.extra.get("text"))
    if "most" not in option.extra:
        raise Undecided(f"{name} may have any number of entries: give most in operator/options.yml")
    elements = option.spec["elements"]
    if elements == "dict":
        items, how = _entry(name, option, texts, names), "atomic"
    else:
        items, how = _value(name, option.spec, option.extra, texts, elements, option.extra.get("items")), "set"
    schema |= {"type": "array", "items": items, "maxItems": option.extra["most"], "x-kubernetes-list-type": how}
    if "least" in option.extra:
        schema["minItems"] = option.extra["least"]
    return schema


STATUS: Json = {
    "type": "object",
    "description": "What the operator has done, and what it found.",
    "properties": {
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "The generation of the resource that the conditions are about.",
        },
        "conditions": {
            "type": "array",
            "description": "Available, Progressing and Degraded; the reason is the id of a finding.",
            "maxItems": 16,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type", "status", "reason", "message", "lastTransitionTime"],
                "properties": {
                    "type": {"type": "string", "maxLength": 316, "description": "Available, Progressing or Degraded."},
                    "status": {
                        "type": "string",
                        "enum": ["True", "False", "Unknown"],
                        "description": "Whether it is so.",
                    },
                    "reason": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": 1024,
                        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                        "description": "Why, as one word.",
                    },
                    "message": {
                        "type": "string",
                        "maxLength": 32768,
                        "description": "Why, as a sentence, and what to do.",
                    },
                    "lastTransitionTime": {
                        "type": "string",
                        "format": "date-time",
                        "description": "When the status changed last.",
                    },
                    "observedGeneration": {
                        "type": "integer",
                        "format": "int64",
                        "minimum": 0,
                        "description": "The generation of the resource that the condition is about.",
                    },
                },
            },
        },
    },
}
COLUMNS = (
    ("Available", "string", '.status.conditions[?(@.type=="Available")].status', 0),
    ("Progressing", "string", '.status.conditions[?(@.type=="Progressing")].status', 0),
    ("Degraded", "string", '.status.conditions[?(@.type=="Degraded")].status', 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Degraded")].reason', 0),
    ("Message", "string", '.status.conditions[?(@.type=="Degraded")].message', 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def definition(listing: Json, specs: t.Mapping[str, t.Mapping[str, Json]]) -> Json:
    """Return the custom resource definition.

    :raises Undecided: as ``allowed`` and ``field``, or a field's name wouldn't become the variable's again.
    """
    options = allowed(listing, specs)
    properties, required = {}, []
    for name, option in options.items():
        if snake(camel(name)) != name:
            raise Undecided(f"the engine makes {snake(camel(name))} of {camel(name)}, not {name}")
        properties[camel(name)] = field(name, option, listing["texts"], options)
        if option.extra.get("required"):
            required.append(camel(name))
    spec = {
        "type": "object",
        "description": "What the collection's variables say in an inventory, with their defaults.",
        "properties": properties,
        "required": required,
        "x-kubernetes-validations": listing["rules"],
    }
    schema = {
        "type": "object",
        "description": f"Shares the NVIDIA GPUs of nodes between pods by memory. A cluster has one, called {NAME}.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "The version of this schema."},
            "kind": {"type": "string", "description": f"Always {KIND}."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": STATUS,
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name == '{NAME}' || has(self.status)",
                "message": f"a cluster has one {KIND}: call it {NAME}",
            }
        ],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Cluster",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": PLURAL[:-1],
                "shortNames": ["gsh"],
            },
            "versions": [version],
        },
    }


class _Plain(yaml.SafeDumper):
    """Writes equal rows twice, and lists with the indentation that the checks of YAML ask for."""

    def ignore_aliases(self, data: t.Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def written(document: Json, header: str = "") -> str:
    """Return a manifest as YAML."""
    return f"---\n{header}{yaml.dump(document, Dumper=_Plain, sort_keys=False, width=130)}"


def current() -> str:
    """Return what ``config/crd.yml`` has to be."""
    return written(definition(listed(), specifications()), HEADER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        text = current()
    except Undecided as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.check:
        if not CRD.exists() or CRD.read_text() != text:
            print(f"{CRD.relative_to(ROOT)} isn't current: run python operator/schema.py", file=sys.stderr)
            return 1
        return 0
    CRD.parent.mkdir(exist_ok=True)
    CRD.write_text(text)
    return 0


if __name__ == "__main__":
    # The interpreter puts this folder first, and it is called like a module of the standard library's.
    sys.exit(main())
