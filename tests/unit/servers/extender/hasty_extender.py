# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-extender`` with short timeouts, so that rare events occur within a test of a minute.

``--without-compare-and-swap`` (first) overwrites the ledger whatever it holds.
"""

from __future__ import annotations

import sys
from typing import Any

from gpushare.api.client import KubeApi
from gpushare.extender import bind, command, ledger
from gpushare.shared._core.types import JsonObject


def careless(self: KubeApi, path: str, body: JsonObject) -> Any:
    body["metadata"]["resourceVersion"] = self.get(path)["metadata"]["resourceVersion"]
    return self._json("PUT", path, body)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    KubeApi.__init__.__defaults__ = (1.0,)
    ledger.STALE_SECONDS = 1.0
    ledger.UNSEEN_SECONDS = 1.0
    ledger.WRITE_SECONDS = 4.0
    bind.SETTLE_SECONDS = 0.3
    if arguments[0] == "--without-compare-and-swap":
        del arguments[0]
        KubeApi.put = careless  # type: ignore[method-assign]
    sys.exit(command.main(arguments))
