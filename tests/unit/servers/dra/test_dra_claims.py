# SPDX-License-Identifier: GPL-3.0-or-later
"""What a claim in the API gives its pods of this node's cards."""

from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest
from dra_kit import NODE, make_claim, result, uid
from gpushare.dra import claims
from gpushare.dra.claims import Claim, ClaimRefused, Pod, Share
from gpushare.shared._contracts import gpushare as contract
from hypothesis import given
from hypothesis import strategies as st

CARD = contract.Card(0, "GPU-AAAA-1", 0, 16384, 15, model="A", reserved_mib=384)
DEVICE = "gpu-aaaa-1"


def test_a_claim_of_several_requests_and_drivers() -> None:
    obj = make_claim(
        1,
        result(DEVICE, "4Gi"),
        result(DEVICE, "512Mi", request="gpu/small", shareID=None),
        {"request": "nic", "driver": "nic.example", "pool": "fabric", "device": "nic0"},
        pods=(7, 8),
        config=[{"source": "FromClaim", "opaque": {"driver": "nic.example", "parameters": {}}}],
    )
    obj["status"]["reservedFor"].append({"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g"})
    found = claims.parse(obj, uid(1), NODE)
    assert found.shares == (Share("gpu", DEVICE, uid(0xFFFF), 4096), Share("gpu", DEVICE, "", 512))
    assert found.pods == (Pod("pod7", uid(0x1007)), Pod("pod8", uid(0x1008)))
    assert (found.key, found.mib()) == ("default/claim1", {DEVICE: 4608})
    assert claims.from_json(json.loads(json.dumps(claims.to_json(found)))) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["metadata"].update(uid="other"), "ClaimReplaced: claim default/claim1 has the UID other now"),
        (lambda one: one["status"].pop("allocation"), "ClaimNotAllocated: claim default/claim1 isn't allocated"),
        (lambda one: one.pop("status"), "ClaimNotAllocated: claim default/claim1 isn't allocated"),
        (
            lambda one: results(one)[0].update(pool="gpu2"),
            "ClaimOfOtherNode: .* of pool gpu2, and this is",
        ),
        (lambda one: results(one)[0].update(adminAccess=True), "UnsupportedClaim: .* administrative access"),
        (lambda one: results(one)[0].pop("consumedCapacity"), "InvalidAllocation: .* None of the capacity memory"),
        (lambda one: results(one)[0].update(consumedCapacity={"memory": "0"}), "InvalidAllocation: .* '0'"),
        (lambda one: results(one)[0].update(consumedCapacity={"memory": "1000k"}), "InvalidAllocation: .* '1000k'"),
        (
            lambda one: one["status"]["allocation"]["devices"].update(
                config=[{"source": "FromClass", "opaque": {"driver": claims.DRIVER, "parameters": {}}}]
            ),
            r"UnsupportedClaim: .* has a configuration for gpu.kubegpu.share \(source FromClass\)",
        ),
    ],
)
def test_a_claim_that_cannot_be_prepared(change: t.Callable[[t.Any], object], message: str) -> None:
    obj = make_claim(1, result(DEVICE, "4Gi"))
    change(obj)
    with pytest.raises(ClaimRefused, match=f"^{message}"):
        claims.parse(obj, uid(1), NODE)


def results(claim: t.Any) -> t.Any:
    return claim["status"]["allocation"]["devices"]["results"]


def of(number: int, mib: int, device: str = DEVICE) -> Claim:
    return Claim(uid(number), "default", f"claim{number}", (Share("gpu", device, "", mib),))


def test_a_card_is_not_given_twice() -> None:
    """The API has lost a pod that was deleted by force, and kubelet hasn't ended its processes yet."""
    claims.check_room(of(3, 8000), [CARD], [of(1, 4000), of(2, 4000), of(4, 16000, "gpu-b")])
    with pytest.raises(
        ClaimRefused,
        match=r"^CardFull: claim default/claim3 is allocated 8001 MiB of card 0, and 8000 of its 16000 MiB are free, "
        r"since claims of pods that haven't ended \(2\) hold 8000 MiB; kubelet tries again",
    ) as refused:
        claims.check_room(of(3, 8001), [CARD], [of(1, 4000), of(2, 4000)])
    assert refused.value.holders == {uid(1), uid(2)} and "claim1" not in str(refused.value)
    assert refused.value.fields["holders"] == ["default/claim1", "default/claim2"]
    twice = dataclasses.replace(of(3, 8000), shares=of(3, 8000).shares * 2 + of(3, 1).shares)
    with pytest.raises(ClaimRefused, match=r"^CardFull: .* 16000 of its 16000 MiB are free"):
        claims.check_room(twice, [CARD], [])


def test_a_card_that_is_not_given_to_pods() -> None:
    claims.check_there(of(1, 1024), [CARD])
    with pytest.raises(
        ClaimRefused, match=r"^UnknownCard: claim default/claim1 has a part of card gpu-b, and .* no such"
    ):
        claims.check_there(of(1, 1024, "gpu-b"), [CARD])
    gone = dataclasses.replace(CARD, healthy=False, code="CardLost", reason="NVML doesn't answer for it")
    with pytest.raises(ClaimRefused, match=r"^CardLost: .* card 0 \(GPU-AAAA-1\): NVML .*; if it .* delete the pod"):
        claims.check_there(of(1, 1024), [gone])
    lost = dataclasses.replace(CARD, healthy=False, code="XIDError", reason="XID 79 (the card has fallen off the bus)")
    with pytest.raises(ClaimRefused, match=r"^XIDError: claim default/claim1: card 0 \(GPU-AAAA-1\) XID 79"):
        claims.check_room(of(1, 1024), [lost], [])


anything: st.SearchStrategy[t.Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["uid", "shares", "pods", "x"]), inner),
    max_leaves=8,
)


@given(anything)
def test_a_record_of_any_content_is_none_or_readable(value: t.Any) -> None:
    try:
        found = claims.from_json(value)
    except ValueError:
        return
    assert claims.from_json(json.loads(json.dumps(claims.to_json(found)))) == found


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "../../etc", "-a", "a" * 64, "a\n", "a\0"])
def test_a_uid_names_a_file_of_ours(bad: str) -> None:
    assert claims.valid_uid(uid(1)) and not claims.valid_uid(bad)
