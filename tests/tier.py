"""Which tests run, for processes that are not pytest's, and need not import it."""

import os

THOROUGH = bool(os.environ.get("ORIN_THOROUGH"))
