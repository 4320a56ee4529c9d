# SPDX-License-Identifier: GPL-3.0-or-later
"""Turns, limits and memory of the server of templates: what it does next, with a clock of the test's own."""

from __future__ import annotations

import itertools
import json
import re
import time
import tracemalloc
import types
import typing as t
from collections import Counter
from pathlib import Path

import pytest
from gpushare.api.client import KubeError
from gpushare.shared._contracts import claim_templates as contract
from gpushare.shared._core.types import JsonObject
from gpushare.templates import keeper, rows, state
from gpushare.templates.command import parse
from gpushare.templates.keeper import Keeper
from gpushare.templates.rows import Waiting
from gpushare.templates.state import Code, State

# What docs/gpushare.md says; test_the_largest_template_in_etcd has the size of a template.
LARGEST_STORED_KIB, ETCD_MIB = 9, 48
LARGEST = contract.Shape((4 << 20,) * 8, 4, ("a" * 78,), ("a" * 79,))


class World:
    """A leader with an API server that makes and deletes at once; the clock passes while it waits for its rate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_namespace: int = 64) -> None:
        self.now, self.end = 1000.0, float("inf")
        monkeypatch.setattr(keeper.time, "monotonic", lambda: self.now)
        self.made: list[tuple[str, str]] = []
        self.made_at: dict[tuple[str, str], float] = {}
        self.deleted: list[tuple[str, str]] = []
        self.told: list[tuple[str, str, str]] = []
        self.results: list[str] = []
        # Requests that are refused, by namespace and name; of a namespace with an empty name.
        self.refused: dict[tuple[str, str], KubeError] = {}
        self.times: list[float] = []
        self.on_request: t.Callable[[], None] = lambda: None
        events: t.Any = types.SimpleNamespace(pod=lambda space, name, *rest: self.told.append((space, name, rest[-1])))
        api: t.Any = self
        self.keeper = Keeper(
            api, "GiB", lambda: self.now <= self.end, events, self.results.append, per_namespace=per_namespace
        )
        self.keeper._stopped = t.cast(t.Any, types.SimpleNamespace(is_set=lambda: False, wait=self._wait))
        for mirror in (self.keeper.pods, self.keeper.templates):
            mirror._synced.set()

    def _wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def post(self, path: str, body: JsonObject) -> JsonObject:
        key = (path.split("/")[5], body["metadata"]["name"])
        self._request(key)
        self.made.append(key)
        self.made_at[key] = self.now
        self.shows({**body, "metadata": {**body["metadata"], "namespace": key[0]}})
        return body

    def delete(self, path: str) -> JsonObject:
        key = (path.split("/")[5], path.split("/")[7])
        self._request(key)
        self.deleted.append(key)
        self.keeper.templates._put("/".join(key), None)
        return {}

    def _request(self, key: tuple[str, str]) -> None:
        self.times.append(self.now)
        self.on_request()
        if error := self.refused.get(key) or self.refused.get((key[0], "")):
            raise error

    def shows(self, template: JsonObject) -> None:
        self.keeper.templates._upsert(template)

    def waits(self, space: str, name: str, *templates: t.Any, made: int = 0) -> None:
        """Let a pod wait.

        :param templates: their names, or units.
        :param made: of how many the claims are made.
        """
        wanted = [template if isinstance(template, str) else f"gpu-mem-{template}" for template in templates]
        self.keeper.pods._upsert(pod(space, name, wanted, made))

    def goes(self, space: str, name: str) -> None:
        self.keeper.pods._put(f"{space}/{name}", None)

    def passes(self, seconds: float) -> None:
        """Work until so much time has passed."""
        self.end = self.now + seconds
        while self.now <= self.end:
            self.keeper.work()
            self.now += max(0.01, self.keeper.state.seconds(1.0))
        self.end = float("inf")

    def there(self) -> Counter[str]:
        """Return the number of templates by namespace."""
        return Counter(template.namespace for template in self.keeper.templates.items())


def pod(space: str, name: str, templates: t.Sequence[str], made: int = 0) -> JsonObject:
    claims = [
        {"name": f"c{number}", "resourceClaimTemplateName": template} for number, template in enumerate(templates)
    ]
    statuses = [{"name": f"c{number}", "resourceClaimName": f"x{number}"} for number in range(made)]
    metadata = {"namespace": space, "name": name, "uid": f"uid-of-{space}-{name}", "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {"resourceClaims": claims}, "status": {"resourceClaimStatuses": statuses}}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


# --------------------------------------------------------------------------- of a pod


@pytest.mark.parametrize("many", [9, 4500])
def test_a_pod_with_too_many_names_gets_none_and_an_event(world: World, many: int) -> None:
    world.waits("a", "eight", *range(1, 9))
    world.waits("b", "many", *range(1, many + 1))
    world.passes(1)
    assert sorted(world.made) == [("a", f"gpu-mem-{units}") for units in range(1, 9)]
    [(space, name, text)] = world.told
    assert (space, name) == ("b", "many") and text.startswith("PodTemplateLimit: ") and "more than 8" in text
    # The same name for several claims is one template.
    world.waits("c", "same", *[5] * 20)
    world.passes(1)
    assert world.made[-1] == ("c", "gpu-mem-5")


def test_what_is_kept_of_a_pod_is_bounded() -> None:
    claims = [f"gpu-mem-{number}" for number in range(1, 4501)]
    large = pod("a", "p", claims)
    large["spec"]["imagePullSecrets"] = [{"name": "x"}] * 1000
    row = rows.waiting(large)
    assert row is not None and row.has_too_many and row.templates == row.needed == ()
    # Names that only look like one of this kind aren't looked at for long.
    row = rows.waiting(pod("a", "p", ["gpu-mem-1", *(f"gpu-mem-0{number}" for number in range(64))]))
    assert row is not None and row.has_too_many
    assert rows.waiting(pod("a", "p", [f"other-{number}" for number in range(4500)])) is None
    row = rows.waiting(pod("a", "p", ["gpu-mem-1", "gpu-mem-2", "gpu-mem-1", "gpu-mem-007", "mine"], 2))
    assert row is not None and (row.templates, row.needed) == (("gpu-mem-1", "gpu-mem-2"), ("gpu-mem-1",))


# --------------------------------------------------------------------------- of a namespace


def test_a_namespace_has_so_many_templates_at_most(world: World) -> None:
    for number in range(30):
        world.waits("greedy", f"p{number}", *range(8 * number + 1, 8 * number + 9))
    world.passes(120)
    assert world.there() == {"greedy": 64} and not world.deleted
    # Each pod has its first one before any has its second one.
    assert {name for _space, name in world.made} >= {f"gpu-mem-{8 * number + 1}" for number in range(30)}
    assert world.told and all(text.startswith("NamespaceTemplateLimit: template gpu-mem-") for *_n, text in world.told)
    # Others don't feel it.
    world.waits("small", "p", 4)
    world.passes(0.1)
    assert world.made[-1] == ("small", "gpu-mem-4")


def test_a_template_goes_for_another_one_when_its_claims_are_made(world: World) -> None:
    """However many different pods wait for cards: a template is needed until the claim is made by it."""
    for number in range(1, 65):
        world.waits("a", f"p{number}", number)
    world.passes(60)
    assert len(world.made) == 64
    world.waits("a", "late", 100)
    world.passes(10)
    assert not world.deleted
    world.waits("a", "p7", 7, made=1)
    world.waits("a", "p8", 8, made=1)
    world.passes(1)
    assert world.deleted == [("a", "gpu-mem-7")] and world.made[-1] == ("a", "gpu-mem-100")
    # One that no pod names goes before.
    world.goes("a", "p9")
    world.waits("a", "later", 101)
    world.passes(1)
    assert world.deleted[1:] == [("a", "gpu-mem-9")] and world.made[-1] == ("a", "gpu-mem-101")
    # Kubernetes makes a claim again that somebody has deleted, so the template comes back where there is room.
    world.goes("a", "later")
    world.passes(state.UNUSED_SECONDS + 10)
    assert ("a", "gpu-mem-101") in world.deleted and world.made[-1] == ("a", "gpu-mem-7")
    assert world.there() == {"a": 64}


def test_an_unused_template_waits_for_the_next_pod_where_there_is_room(world: World) -> None:
    world.waits("a", "p", 4)
    world.passes(1)
    world.goes("a", "p")
    world.passes(state.UNUSED_SECONDS - 10)
    assert not world.deleted
    world.waits("a", "q", 4)
    world.passes(20)
    world.goes("a", "q")
    world.passes(state.UNUSED_SECONDS - 10)
    assert not world.deleted
    world.passes(20)
    assert world.deleted == [("a", "gpu-mem-4")] and len(world.made) == 1


def test_pods_that_come_and_go_have_few_templates_made(world: World) -> None:
    """Two a second, and 32 at once."""
    units = itertools.count(1)
    for _turn in range(600):
        world.waits("churn", "p", *(next(units) for _each in range(8)))
        world.passes(0.2)
        world.goes("churn", "p")
    seconds = world.now - 1000
    assert len(world.made) <= state.BURST + state.RATE * seconds and world.there()["churn"] <= 64
    # Not by removing all that is left, either.
    world.passes(state.UNUSED_SECONDS + 60)
    assert not world.there() and not world.keeper.state._spaces


# --------------------------------------------------------------------------- of the cluster


def fifty_namespaces(world: World, first: int = 0) -> None:
    for number in range(50):
        for each in range(20):
            world.waits(f"tenant-{first + number}", f"p{each}", *range(8 * each + 1, 8 * each + 9))


@pytest.mark.parametrize("age", [0, 5, 300, 900])
def test_fifty_namespaces_of_a_tenant_delay_another_by_seconds(world: World, age: float) -> None:
    fifty_namespaces(world)
    if age:
        world.passes(age)
    began = world.now
    world.waits("victim", "p", 4)
    world.passes(15)
    assert world.made_at["victim", "gpu-mem-4"] - began < 10
    assert sum(world.there().values()) <= state.MOST_TEMPLATES


def test_requests_and_etcds_history_are_bounded(world: World) -> None:
    """Of fifty namespaces whose pods come and go: what etcd has with what it keeps until it is compacted."""
    turns = itertools.count()

    def churn() -> None:
        turn = next(turns)
        first = 1 + turn * 8 % 900_000
        world.waits(f"tenant-{turn % 50}", f"p{turn % 500}", *range(first, first + 8))

    world.on_request = churn
    churn()
    world.passes(1100)
    # kube-apiserver compacts every five minutes what is older than five minutes.
    within = [when for when in world.times if when >= world.now - 600]
    assert 5000 < len(within) <= keeper.RATE * 600 + keeper.BURST
    assert state.MOST_TEMPLATES - 2 <= sum(world.there().values()) <= state.MOST_TEMPLATES
    # Each new one takes the place of another one.
    revisions = state.MOST_TEMPLATES + len(within) / 2 + 10
    assert sum(at >= world.now - 600 for at in world.made_at.values()) + state.MOST_TEMPLATES <= revisions
    assert revisions * LARGEST_STORED_KIB / 1024 < ETCD_MIB


def test_the_namespace_with_the_most_gives_one_up_where_the_cluster_is_full(world: World) -> None:
    fifty_namespaces(world)
    world.passes(600)
    assert sum(world.there().values()) == state.MOST_TEMPLATES
    world.waits("victim", "p", 4)
    world.waits("victim", "q", 5)
    world.passes(2)
    assert world.there()["victim"] == 2 and sum(world.there().values()) == state.MOST_TEMPLATES
    # They don't take them back from one another for ever.
    before = len(world.times)
    world.passes(300)
    assert len(world.times) - before < 20
    assert any(text.startswith("ClusterTemplateLimit: ") for *_n, text in world.told)


def test_templates_that_others_label_as_ours_take_nobodys_room(world: World) -> None:
    """Who may create templates can have more than the server would make."""
    for number in range(1, 3001):
        template = rows.filled("forger", f"gpu-mem-{number}", "GiB")
        world.shows(template)
    world.waits("victim", "p", 4)
    world.passes(0.5)
    assert ("victim", "gpu-mem-4") in world.made
    world.passes(400)
    assert world.there() == {"victim": 1, "forger": 64}


# --------------------------------------------------------------------------- refusals

QUOTA = KubeError(403, "Forbidden", "exceeded quota")


def test_a_namespace_that_refuses_keeps_no_other_waiting(world: World) -> None:
    """A quota, a namespace that ends, a right that is missing, a template of the owner's."""
    for number, (status, reason) in enumerate(
        ((403, "Forbidden"), (409, "AlreadyExists"), (409, "Conflict"), (404, "NotFound"), (500, "InternalError"))
    ):
        world.refused[f"bad-{number}", ""] = KubeError(status, reason, reason)
        for each in range(20):
            world.waits(f"bad-{number}", f"p{each}", *range(8 * each + 1, 8 * each + 9))
    world.passes(300)
    # Each of 160 names once in a minute at most, and two of a namespace in a second.
    assert len(world.times) <= 5 * (state.BURST + state.RATE * 310)
    began = world.now
    world.waits("victim", "p", 4)
    world.passes(1)
    assert world.made == [("victim", "gpu-mem-4")] and world.now - began < 2
    told = {text.partition(":")[0] for *_n, text in world.told}
    assert told == {Code.API} and not [one for one in world.told if one[0] == "bad-1"]
    # Its end is noticed.
    world.refused.clear()
    world.passes(120)
    assert world.there()["bad-0"] == 64


def test_a_template_that_is_being_deleted_is_waited_for(world: World) -> None:
    template = rows.filled("a", "gpu-mem-4", "GiB")
    template["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.shows(template)
    world.waits("a", "p", 4)
    world.waits("b", "p", 4)
    world.passes(60)
    assert world.made == [("b", "gpu-mem-4")] and not world.deleted
    world.keeper.templates._put("a/gpu-mem-4", None)
    world.passes(1)
    assert world.made[-1] == ("a", "gpu-mem-4")


def test_a_template_that_cannot_be_deleted_keeps_no_other(world: World) -> None:
    for number in range(1, 21):
        world.shows(rows.filled("a", f"gpu-mem-{number}", "GiB"))
    world.refused["a", "gpu-mem-1"] = KubeError(403, "Forbidden", "the policy refuses it")
    world.passes(state.UNUSED_SECONDS + 30)
    assert len(world.deleted) == 19 and world.results.count("failed") == 1
    world.passes(300)
    assert world.results.count("failed") <= 6


def test_what_the_watch_never_shows_is_made_again(world: World) -> None:
    """Somebody deletes a template before the watch has shown it."""
    shows, world.shows = world.shows, lambda template: None  # type: ignore[method-assign]
    world.waits("a", "p", 4)
    world.passes(10)
    assert len(world.made) == 1
    world.shows = shows  # type: ignore[method-assign]
    world.passes(state.SHOWN_SECONDS)
    assert len(world.made) == 2
    world.passes(100)
    assert len(world.made) == 2


def test_events_of_a_namespace_are_few(world: World) -> None:
    for number in range(2000):
        world.waits("loud", f"p{number}", *range(1, 10))
    world.waits("quiet", "p", *range(1, 10))
    world.passes(300)
    assert [one for one in world.told if one[0] == "quiet"]
    assert len(world.told) - 1 <= state.EVENT_BURST + 300 * state.EVENT_RATE + 1


# --------------------------------------------------------------------------- cost


def filled_state(spaces: int, pods: int, names: int) -> State:
    found = State("GiB", time.monotonic)
    for space, number in itertools.product(range(spaces), range(pods)):
        wanted = [f"gpu-mem-{1 + (number * names + each) % 1_000_000}" for each in range(names)]
        row = found.keep_pod(rows.waiting(pod(f"space-{space}", f"pod-{number}", wanted)), False)
        if row is not None:
            found.pod_changed(row.key, None, row)
    return found


def test_a_turn_costs_the_same_however_many_names_are_known() -> None:
    def turns(found: State) -> float:
        best = float("inf")
        for _try in range(5):
            began = time.process_time()
            for _each in range(100):
                step = found.next_step()
                assert step is not None
                found.dropped(step)
            best = min(best, time.process_time() - began)
        return best

    few, many = (filled_state(40, pods, 8) for pods in (5, 500))
    # All that there is room for.
    assert many.missing > 30 * few.missing == 30 * 1600
    assert turns(many) < 5 * turns(few) + 0.01


def test_memory_is_bounded_whatever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes that Python allocates; the process has 40 MB besides, and its cgroup 256 MiB."""
    # A quarter of what it may be shows the same.
    for name in ("SPACE_BYTES", "SHARED_BYTES", "MOST_BYTES"):
        monkeypatch.setattr(state, name, getattr(state, name) // 4)
    tracemalloc.start()
    filled, kept = State("GiB", time.monotonic), {}
    for number in range(4_000):
        space, name = f"space-{number % 10}", f"{'long' * 40}-{number}"
        wanted = tuple("gpu-mem-" + "-".join(["1"] * 28 + [str(1 + 8 * number + each)]) for each in range(8))
        row = filled.keep_pod(Waiting(str(space), name, f"{number:036}", wanted, wanted), False)
        if row is not None:
            # As the mirror does.
            kept[row.key] = row
            filled.pod_changed(row.key, None, row)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"{len(kept)} pods kept, {used >> 20} MiB, {filled._size >> 20} MiB by its own account")
    assert filled.overlooked and used < filled._size <= state.MOST_BYTES
    # A namespace with little still has room.
    row = filled.keep_pod(rows.waiting(pod("victim", "p", ["gpu-mem-4"])), False)
    assert row is not None
    for key, each in kept.items():
        filled.pod_changed(key, each, None)
    assert filled._size == 0 and not filled._spaces


def test_the_largest_template() -> None:
    """It had 18 KB where each container said the same condition on the models."""
    largest = size(rows.filled("a", contract.name_of(LARGEST), "MiB"))
    assert 8000 < largest < 8500
    for containers, cards in itertools.product(range(1, 33), range(1, 5)):
        for letter, share in itertools.product("a.*", (cards, cards << 20)):
            shape = contract.Shape((share,) * containers, cards)
            left = contract.NAME_LENGTH - len(contract.name_of(shape)) - len(".models-.without-")
            half = max(0, left // 2 // (1 if letter == "a" else 3))
            for models, excluded in (((), ()), ((letter * half,), (letter * half,)), ((letter,) * 16, (letter,) * 16)):
                one = contract.Shape(shape.shares, cards, models, excluded)
                name = contract.name_of(one)
                if one.possible and contract.shape_of(name) == one:
                    assert size(rows.filled("a", name, "MiB")) <= largest


def size(template: JsonObject) -> int:
    return len(json.dumps(template, separators=(",", ":")))


def test_the_pages_say_the_numbers_and_the_codes() -> None:
    docs = Path(__file__).parents[4] / "docs"
    claims, servers = (docs / "claims.md").read_text(), (docs / "gpushare.md").read_text()
    section = claims.split("\n## Limits of templates\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [code.value for code in Code]
    for text in (
        f"A pod may name {rows.MOST_PER_POD} different",
        f"A namespace has {state.PER_NAMESPACE} at one time",
        f"The cluster has {state.MOST_TEMPLATES}.",
        f"makes {state.RATE:.0f} templates of a namespace a second, and {state.BURST} at once",
        f"sends {keeper.RATE:.0f} requests for templates a second, and {keeper.BURST} at once",
        f"at most {contract.MOST_UNITS} units of a card and at most {contract.MOST_PATTERNS} patterns",
        f"take {state.MOST_BYTES >> 20} MiB of memory at most; those of one namespace {state.SPACE_BYTES >> 20} MiB",
        f"waits for {state.REPORT_SECONDS:.0f} seconds",
        f"{state.EVENT_BURST} Events at once, then one in {1 / state.EVENT_RATE:.0f} seconds",
    ):
        assert text in section, text
    for text in (f"at most {LARGEST_STORED_KIB} KiB in etcd", f"at most {ETCD_MIB} MiB"):
        assert text in servers, text


def test_a_wrong_number_of_templates_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).templates_per_namespace == state.PER_NAMESPACE
    for value in ("0", "2049"):
        with pytest.raises(SystemExit):
            parse(["--templates-per-namespace", value])
        assert f"--templates-per-namespace: {value} isn't from 1 to 2048" in capsys.readouterr().err
