"""orin-chat with the synthetic model behind it, as a program of its own:

python -m tests.app.synthetic_cli '{"rate": 20, "tokens": 30}' ARGUMENTS...
"""

import json
import sys

import engine.protocol.client
import engine.protocol.launch
from app.main import main
from tests import synthetic

if __name__ == "__main__":
    behaviour = json.loads(sys.argv[1])
    engine.protocol.client.LocalEngine = lambda options, **_: synthetic.engine(**behaviour)  # type: ignore[assignment, misc]
    engine.protocol.launch.launch = lambda: None
    sys.exit(main(sys.argv[2:]))
