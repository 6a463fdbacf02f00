"""`python -m app` is `orin-chat`."""

import sys

from app.main import main

sys.exit(main())
