"""torchrun without its traceback where a signal stopped it: the run and its launcher report it."""

import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    for name in ("agent.server.api", "multiprocessing.api"):  # which signals it sends to whom
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    try:
        main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
