"""`orin-chat`, and `python -m app`.

Ctrl+C ends the program silently from the first line on: while its modules are imported nobody could catch a
KeyboardInterrupt, so the signal itself ends the process (shells call that 130). `app.main` makes it an exception again.
"""

# The module signal around it takes as long to import as all that Python itself begins with.
import _signal  # type: ignore[import-not-found]
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from app.main import main

if __name__ == "__main__":
    sys.exit(main())
