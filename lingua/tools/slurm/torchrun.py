"""torchrun without its traceback where a signal stopped it or a rank found a mistake: others report
both."""

import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    logging.disable(logging.ERROR)  # what it does; its errors are raised too
    try:
        main()
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        if (code := failed.get_first_failure()[1].exitcode) not in (2, 3):
            raise
        sys.exit(code)
