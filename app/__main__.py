"""`python -m app` is `orin-chat`."""

import sys

from app.cli import main

sys.exit(main())
