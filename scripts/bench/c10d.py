"""torch's own rendezvous of N agents as threads of one process; prints its seconds.

python scripts/bench/c10d.py 64
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


def main() -> None:
    """Form once and print how long that took."""
    agents = int(sys.argv[1])
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handlers = []
    for _ in range(agents):
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=120))
        backend = C10dRendezvousBackend(store, "bench")
        handlers.append(
            DynamicRendezvousHandler.from_backend("bench", store, backend, agents, agents)
        )
    threads = [threading.Thread(target=h.next_rendezvous, daemon=True) for h in handlers]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.monotonic() - began, flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
