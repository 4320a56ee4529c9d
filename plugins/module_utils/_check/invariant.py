# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The documentation and messages of a check. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

# What to do about missing evidence of a machine.
OBSERVE = (
    "run verify.yml with the node's machine reachable, as a user that may read kubelet's directory and query NVML; "
    "where nobody logs in, let the node's device plugin or DRA driver be asked (verify_ask_pods, gpushare_host_pid)"
)
BACKENDS = {
    **{"C": "common", "D": "dra", "G": "gpushare", "H": "hami", "K": "kata", "N": "nvidia"},
    **{"S": "servers", "V": "virtual"},
}
UNEXPECTED_ERROR = "unexpected_error"


@dataclasses.dataclass(frozen=True)
class Invariant:
    """The documentation and messages of a check.

    :param title: what holds where the check passes.
    :param compares: what is compared with what.
    :param levels: the levels of its findings.
    :param action: what to do about a FAIL or WARN; about an UNKNOWN it is to collect evidence.
    :param messages: text by cause code, with ``{fields}``.
    :param actions: by cause code, where they differ from these.
    """

    title: str
    compares: str
    levels: str
    action: str
    messages: t.Mapping[str, str]
    actions: t.Mapping[str, str] = dataclasses.field(default_factory=dict)

    def message(self, cause: str, unknown: bool) -> tuple[str, str]:
        """Return the text of a cause, and what to do about it.

        :param unknown: the finding's level is UNKNOWN.
        :raises KeyError: the check has no such cause.
        """
        if cause == UNEXPECTED_ERROR:
            text = "this check failed on what was collected ({error})"
            return text, "report it, with the arguments of gpu_allocation_check"
        return self.messages[cause], self.actions.get(cause, OBSERVE if unknown else self.action)
