"""`orin-chat`, and `python -m app`.

Ctrl+C ends the program silently from the first line on: while the modules of `app.main` are imported nobody could catch
a KeyboardInterrupt, so the signal itself ends the process (shells call that 130). `main` makes it an exception again.
"""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from app.main import main

if __name__ == "__main__":
    sys.exit(main())
