# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-extender``, with little patience, so that a test of a minute sees what else takes hours.

``--without-compare-and-swap`` (first) writes the ledger over whatever stands there. ``--as-in-a-pod FOLDER URL`` (next)
takes that service account and that API server, in the place of a kubeconfig.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpushare import extender, extender_bind, extender_ledger
from gpushare.account import Account
from gpushare.kube import Json, KubeApi


def careless(self: KubeApi, path: str, body: Json) -> Any:
    body["metadata"]["resourceVersion"] = self.get(path)["metadata"]["resourceVersion"]
    return self._json("PUT", path, body)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    KubeApi.__init__.__defaults__ = (1.0,)
    extender_ledger.STALE_SECONDS = 1.0
    extender_ledger.UNSEEN_SECONDS = 1.0
    extender_ledger.WRITE_SECONDS = 4.0
    extender_bind.SETTLE_SECONDS = 0.3
    if arguments[0] == "--without-compare-and-swap":
        del arguments[0]
        KubeApi.put = careless  # type: ignore[method-assign]
    if arguments[0] == "--as-in-a-pod":
        connection = Account(Path(arguments[1]), url=arguments[2])
        extender.from_environment = lambda _kubeconfig: KubeApi(connection)  # type: ignore[assignment]
        del arguments[:3]
    sys.exit(extender.main(arguments))
