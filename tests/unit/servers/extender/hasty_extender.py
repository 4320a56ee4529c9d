# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-extender`` with short timeouts, so that rare events occur within a test of a minute."""

from __future__ import annotations

import sys

from gpushare.api.client import KubeApi
from gpushare.extender import bind, command, ledger

if __name__ == "__main__":
    KubeApi.__init__.__defaults__ = (1.0,)
    ledger.STALE_SECONDS = 1.0
    ledger.UNSEEN_SECONDS = 1.0
    ledger.WRITE_SECONDS = 4.0
    bind.SETTLE_SECONDS = 0.3
    sys.exit(command.main(sys.argv[1:]))
