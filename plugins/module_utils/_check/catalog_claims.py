# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and messages of the checks of claims, where kube-scheduler allocates the shares (DRA). No I/O."""

from __future__ import annotations

from .catalog_gpushare import GPUSHARE_CHECKS
from .invariant import Invariant

# A waiting pod has its claim's template in a moment, and its claim in another.
WAITING_SECONDS = 60

_SHARES = GPUSHARE_CHECKS["G9"]
_REPLACE = "delete the pod, so that a new one is scheduled and admitted"
_DRIVER = "read the log of gpushare-dra-driver on the node"
_ENDED = "delete these pods, or let kubelet end them if they were deleted by force; find out who removed the claim"

CLAIMS_CHECKS = {
    "D1": Invariant(
        "The cards in the node's ResourceSlices are NVML's",
        "each device with NVML by UUID: MiB, without what driver, firmware and gpushare_reserved_memory keep, in whole "
        "units",
        "FAIL; WARN where more or less is offered than there is for pods",
        f"{_DRIVER}; it writes the slices again when it is restarted",
        {
            "no_data": "the cards in slices can't be compared with NVML's: {why}",
            "not_in_slice": "the machine has GPU {uuid}, and no slice offers it",
            "not_on_machine": "a slice offers card {card} ({uuid}), and the machine doesn't have it",
            "unidentified": "whether card {card} ({uuid}) exists is unknown: {why}",
            "size_unknown": "the size of card {card} can't be compared: {why}",
            "size_differs": "card {card} has {mib} MiB, and its slice offers {offered} MiB",
            "reserve_shared": "{expected} MiB of card {card} are for pods, and its slice offers {offered} MiB",
            "smaller": "{expected} MiB of card {card} are for pods, and its slice offers only {offered} MiB",
        },
        {
            "reserve_shared": "it is offered no more once the claims that hold the card's last units are gone",
            "smaller": f"compare gpushare_reserved_memory with the option --reserved-memory; {_DRIVER}",
        },
    ),
    "D2": Invariant(
        "The node's ResourceSlices are one complete pool",
        "their number, generation and names with each other",
        "FAIL",
        f"{_DRIVER}; it writes the slices again when it is restarted",
        {
            "incomplete": "{there} of {count} slices of the newest generation are there, so kube-scheduler allocates "
            "no card of the node",
            "named_twice": "two devices of the node have the name {device}",
            "other_pool": "a slice belongs to the pool {pool}, and claims are prepared from the node's own pool only",
        },
    ),
    "D3": Invariant(
        "Claims have no more of a card than its memory",
        "the sum of consumedCapacity of all claims with the card's capacity",
        "FAIL",
        "delete one of the pods that use these claims; report it, since kube-scheduler mustn't allocate that",
        {
            "overcommitted": "claims have {held} MiB of card {card} ({uuid}), of which {offered} MiB are offered",
            "no_amount": "claim {claim} is allocated card {card} ({uuid}) without an amount of memory",
            "unknown_card": "claims ({claims}) have the device {device}, which no slice of the node offers",
        },
        {
            "no_amount": "switch the feature DRAConsumableCapacity on in kube-scheduler, and delete the claim's pod",
            "unknown_card": f"delete the pods of these claims if the card was removed; {_DRIVER}",
        },
    ),
    "D4": Invariant(
        "Every running pod with a share has a claim on its node",
        "the pod's claims with their allocation and reservation",
        "FAIL",
        _REPLACE,
        {
            "missing": "the pod runs, and its claim {claim} doesn't exist",
            "not_allocated": "the pod runs, and its claim {claim} isn't allocated",
            "not_reserved": "the pod runs, and its claim {claim} isn't reserved for it: another pod may get its memory",
            "other_node": "the pod runs on {node}, and its claim {claim} has a card of {other}",
        },
    ),
    "D5": Invariant(
        "Each claim of a running pod is prepared on its node, and no other",
        "the claim's allocation with the driver's record (MiB, card, share) and with its CDI specification",
        "FAIL",
        f"{_DRIVER}, and restart it",
        {
            "no_data": "what is prepared for {pods} is unknown: {why}",
            "no_data_node": "what is prepared on the node is unknown: {why}",
            "not_recorded": "the pod runs, and the driver has no record of claim {claim}",
            "record_unreadable": "the record of claim {claim} can't be read: {why}",
            "record_differs": "the record of claim {claim} has other shares than its allocation",
            "not_specified": "the pod runs, and claim {claim} has no CDI specification: its next container can't start",
            "specification_unreadable": "the CDI specification of claim {claim} can't be read: {why}",
            "specification_differs": "the CDI specification of claim {claim} isn't the one in the driver's record",
            "other_card": "the CDI specification of claim {claim} gives {visible}, and it is allocated {cards}",
            "other_units": "the CDI specification of claim {claim} says {units} units, and it is allocated {expected}",
            "leaked_specification": "there is a CDI specification of claim {uid_of_claim}, of which the driver has no "
            "record",
        },
        {
            "record_differs": _REPLACE,
            "other_card": _REPLACE,
            "other_units": _REPLACE,
        },
    ),
    "D6": Invariant(
        "kubelet lists the claims of running pods",
        "PodResources' dynamic resources (pool, device, share) with each claim's allocation",
        "FAIL; WARN for a pod that the API doesn't have",
        _REPLACE,
        {
            "no_data": "the claims that kubelet lists of {pods} are unknown: {why}",
            "not_listed": "the pod runs with a claim, and kubelet lists none",
            "differs": "kubelet lists other cards of the pod's claims than they are allocated",
            "unknown_pod": "kubelet lists a claim of pod {name}, which isn't on this node in the API",
        },
        {"unknown_pod": "wait until kubelet has ended the pod, or read kubelet's log"},
    ),
    "D7": Invariant(
        "No pod uses more than its claims",
        "memory of the pod's processes and of its control groups with its claims, per card; the driver's limits too",
        "WARN; FAIL where the card's slice promises that limits are enforced",
        _SHARES.action,
        {**_SHARES.messages, "no_data": "the memory that {pods} use is unknown: {why}"},
        {
            "over_enforced_share": f"delete the pod; {_DRIVER}",
            "limit_raised": "find out who raised it: the pod is privileged or has SYS_ADMIN; the driver restores the "
            "limit",
            "limit_missing": _DRIVER,
        },
    ),
    "D8": Invariant(
        "Every claim that holds memory has a pod, and every waiting pod gets its claim",
        "claims with the pods that they are reserved for; pods that wait for more than "
        f"{WAITING_SECONDS} seconds with templates and claims",
        "FAIL; WARN for templates that nothing sweeps; UNKNOWN where claims can't be read",
        "read kube-controller-manager's log (resourceclaim-controller); delete the claim if no pod needs it",
        {
            "no_data": "slices and claims are unknown: {why}",
            "unused": "claim {claim} holds memory, and no pod uses it",
            "owner_gone": "claim {claim} was made for pod {owner}, which doesn't exist any more",
            "template_missing": "the pod waits for template {template}, which doesn't exist",
            "claim_not_made": "the pod waits for a claim by template {template}, which exists",
            "templates_left": "{number} templates are left that no pod names, and gpushare-dra-templates doesn't run, "
            "which would sweep them: {templates}",
        },
        {
            "no_data": "let this user list ResourceSlices and ResourceClaims (playbooks/readonly_access.yml)",
            "template_missing": "read the Events of the pod, and the log of gpushare-dra-templates; run site.yml again",
            "claim_not_made": "read kube-controller-manager's log (resourceclaim-controller)",
            "templates_left": "run site.yml again, or uninstall.yml, which deletes them",
        },
    ),
    "D9": Invariant(
        "A card with a problem is tainted, and no other",
        "the taint gpu.kubegpu.share/unhealthy with NVML",
        "FAIL; WARN for a card that is back, and for pods on a tainted card",
        _DRIVER,
        {
            "no_data": "the cards' health is unknown: {why}",
            "not_tainted": "NVML reports a problem of {gpu} ({why}), and its slice gives it to pods",
            "divided": "MIG is on for {gpu}, and its slice gives the whole card to pods",
            "still_tainted": "{gpu} is tainted ({code}), and NVML reports no problem of it",
            "holds_unhealthy": "the pod holds card {card}, which is tainted: {code}",
        },
        {"holds_unhealthy": "delete the pod, so that a new one gets another card"},
    ),
    "D10": Invariant(
        "The objects that turn pods into claims are there, as site.yml wrote them",
        "DeviceClass, admission policies and bindings: existence, who owns their fields, what bindings do",
        "FAIL; UNKNOWN where they can't be read",
        "run site.yml again",
        {
            "no_data": "whether {object} is as site.yml wrote it is unknown: {why}",
            "missing": "{object} doesn't exist",
            "changed": "{object} was changed by {managers}",
            "other_action": "{object} doesn't deny what its policy finds",
            "other_policy": "{object} names policy {policy}, and should name {expected}",
        },
        {"no_data": "let this user read the object (playbooks/readonly_access.yml), or compare with site.yml --check"},
    ),
    "D11": Invariant(
        "What is prepared of a card is allocated in the API, and no more than the card has",
        "the driver's record of each claim with the claim of its UID and its card; the sum of the records with the "
        "card's memory; the taint gpu.kubegpu.share/memory-without-claim with what isn't allocated",
        "FAIL; WARN for a taint without such a claim; UNKNOWN where records or claims can't be read",
        f"{_DRIVER}, and restart it",
        {
            "no_data": "what is prepared on the node, or allocated in the API, is unknown: {why}",
            "record_unreadable": "what a prepared claim holds is unknown: {why}",
            "claim_gone": "{mib} MiB of card {card} ({uuid}) are prepared for claim {claim}, which the API doesn't "
            "have any more; it is used by {pods}",
            "not_allocated": "{mib} MiB of card {card} ({uuid}) are prepared for claim {claim}, which isn't allocated "
            "that card any more; it is used by {pods}",
            "overprepared": "{held} MiB of card {card} ({uuid}) are prepared for claims, and it has {offered} MiB",
            "not_tainted": "kube-scheduler may give memory of card {card} ({uuid}) to others that a pod without an "
            "allocated claim holds: the card isn't tainted",
            "still_tainted": "card {card} ({uuid}) is tainted ({code}), and no pod without an allocated claim holds "
            "memory of it",
        },
        {
            "claim_gone": _ENDED,
            "not_allocated": _ENDED,
            "overprepared": "delete one of the pods that use these claims; report it, since the driver mustn't prepare "
            "that",
        },
    ),
}
