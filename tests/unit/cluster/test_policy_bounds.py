# SPDX-License-Identifier: GPL-3.0-or-later
"""Every comprehension of an admission policy has a bound: its range is a literal list, or its size is compared first.

kube-apiserver 1.36 takes time for a comprehension that grows with the square of the entries, and its limit of costs
doesn't see that. The rules that this test reads the expressions by:

* a literal list is bounded, as is what a comprehension makes of something bounded;
* ``size(<range>)`` is compared before, in the same expression;
* or in a condition by which the policy doesn't apply to what is larger;
* or in a variable named as in GUARDS, and every expression that is evaluated asks for that variable first.
"""

from __future__ import annotations

import re

import pytest
import role_templates
from gpushare_objects import rendered

MACROS = "exists|exists_one|all|filter|map|transformList|transformMap|transformMapEntry"
COMPREHENSION = re.compile(rf"[.]({MACROS})[(]")
GUARDS = ("large", "many", "problem", "defaulted")
# What splits a text into any number of parts, or repeats one.
SPLITS = re.compile(r"[.]split[(]([^()]*)[)]")
VARIABLE = re.compile(r"variables[.]([A-Za-z]+)")


def policies():
    scheduler = {
        "scheduler_name": "s",
        "scheduler_dedicated_admission": "deny",
        "scheduler_dedicated_namespace": "n",
        "__scheduler_extender_namespace": "n",
        "__scheduler_dedicated": {"policy_api": "admissionregistration.k8s.io/v1"},
    }
    shares = {"gpushare_admission": "deny", "gpushare_admission_env_from": "deny"}
    found = [
        *rendered("rights", __gpushare_cluster={"version": "v1.36.0"}),
        *(
            one
            for claims in ("all", "asked", "none")
            for one in rendered("admission", gpushare_claims=claims, **shares)
        ),
        *(one for claims in ("all", "asked") for one in rendered("dra_admission", gpushare_claims=claims)),
        *rendered("dra"),
        *role_templates.objects("scheduler", "dedicated/policy", "dedicated/account", **scheduler),
        *role_templates.objects("hami", "policy", __hami_resource="r", __hami_scheduler_name="s"),
    ]
    return [one for one in found if one["kind"] in ("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy")]


def expressions(policy):
    """Return a policy's expressions in the order in which they are evaluated, each with its place."""
    spec = policy["spec"]
    found = [
        (f"condition {match_condition['name']}", match_condition["expression"])
        for match_condition in spec.get("matchConditions", [])
    ]
    for number, validation in enumerate(spec.get("validations", [])):
        found.append((f"validation {number}", validation["expression"]))
        if "messageExpression" in validation:
            # Evaluated whatever the expression's result is.
            found.append((f"message {number}", validation["messageExpression"]))
    found += [("mutation", mutation["jsonPatch"]["expression"]) for mutation in spec.get("mutations", [])]
    return found


def ranges(text):
    """Return each comprehension's range and its position."""
    return [(before(text, match.start()), match.start()) for match in COMPREHENSION.finditer(text)]


def before(text, end):
    """Return the operand that ends at a position: names, calls, indexes and what is in parentheses."""
    at = end
    while at > 0:
        letter = text[at - 1]
        if letter in ")]":
            opened = {")": "(", "]": "["}[letter]
            depth, at, quoted = 1, at - 1, False
            while depth:
                at -= 1
                quoted ^= text[at] == "'"
                if not quoted:
                    depth += (text[at] == letter) - (text[at] == opened)
        elif letter.isalnum() or letter in "_.?":
            at -= 1
        else:
            break
    return text[at:end]


def flat(text):
    return re.sub(r"\s+", " ", text)


def compared(path, text):
    """Whether a text compares the size of a list, alone or in a sum, with a number."""
    return bool(re.search(rf"size[(]{re.escape(path)}[)][^&|;]*?(>|<=) [0-9]", text))


class Policy:
    """A policy whose expressions are read; its variables are looked up where an expression names them."""

    def __init__(self, policy):
        spec = policy["spec"]
        self.variables = {variable["name"]: flat(variable["expression"]) for variable in spec.get("variables", [])}
        self.guards = " ; ".join(self.variables[name] for name in GUARDS if name in self.variables)
        # Nothing else is evaluated for what a condition leaves out.
        conditions = [flat(match_condition["expression"]) for match_condition in spec.get("matchConditions", [])]
        self.left_out = " ; ".join(condition for condition in conditions if condition.startswith("!("))

    def unbounded(self, text, guarded=False, seen=None):
        """Return the ranges of a text that nothing bounds, with those of the variables that it names.

        :param guarded: a guard of the policy has been asked for before.
        """
        seen = set() if seen is None else seen
        found = [where for where, position in ranges(text) if not self.bounded(where, text[:position], guarded)]
        # Into a number of parts that is stated.
        found += [match.group() for match in SPLITS.finditer(text) if not re.search(", [0-9]+$", match.group(1))]
        for match in VARIABLE.finditer(text):
            key = match.group(1), guarded or self.asked(text[: match.start()])
            if key not in seen:
                seen.add(key)
                found += self.unbounded(self.variables[key[0]], key[1], seen)
        return found

    @staticmethod
    def asked(text):
        return any(f"variables.{name}" in text for name in GUARDS)

    def bounded(self, where, earlier, guarded):
        """Whether the range of a comprehension is bounded by what is evaluated before it."""
        # A literal list, or the parts of a text, whose number is compared below.
        if where.startswith("[") or SPLITS.search(where):
            return True
        known = " ; ".join([self.left_out, earlier, self.guards if guarded or self.asked(earlier) else ""])
        if where.startswith("lists.range("):
            return bool(re.search(rf"{re.escape(where[12:-1])} <= [0-9]", known))
        # A guard calls each container c.
        where = re.sub(r"^[a-zA-Z.]+\[i\](?=[.])", "c", where)
        if compared(where, known):
            return True
        inner = COMPREHENSION.search(where)
        if inner:
            return self.bounded(where[: inner.start()], earlier, guarded)
        # The lists of a sum or a choice.
        lists = (
            [where]
            if "(" not in where
            else re.findall(r"(?<!has[(])(?<![a-zA-Z.])[a-zA-Z]+(?:[.][a-zA-Z]+)+(?![a-zA-Z.])", where)
        )
        return bool(lists) and all(compared(one, known) or self.made(one) for one in lists)

    def made(self, name):
        """Whether a list is a variable made by comprehensions and literal lists; each is judged where it stands."""
        text = self.variables.get(name.removeprefix("variables."), "") if name.startswith("variables.") else ""
        return bool(COMPREHENSION.search(text)) or text.startswith("[")


ALL = [
    (f"{policy['kind'][:3]} {policy['metadata']['name']} {number}", policy) for number, policy in enumerate(policies())
]


@pytest.mark.parametrize("policy", [one for _name, one in ALL], ids=[name for name, _one in ALL])
def test_every_comprehension_is_bounded(policy):
    for place, text in expressions(policy):
        known = Policy(policy)
        if place.startswith("condition"):
            known.left_out = ""
        assert known.unbounded(flat(text)) == [], place


def test_both_kinds_of_all_roles_are_read():
    names = {name.rpartition(" ")[0] for name, _one in ALL}
    assert names == {
        "Val gpushare-annotations",
        "Val gpushare-device-plugin",
        "Val gpushare-extender",
        "Val gpushare-shares",
        "Val gpushare-privileged",
        "Mut gpushare-claims",
        "Val gpushare-claims",
        "Val gpushare-dra-driver",
        "Val gpushare-slices",
        "Val gpushare-allocated-claims",
        "Val gpushare-dra-templates",
        "Val gpushare-scheduler",
        "Val gpushare-scheduler-account",
        "Val kubegpu-share-hami",
    }
