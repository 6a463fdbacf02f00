"""The process that merges words for `merging`: it is run with the path of a model file.

It reads and writes lines of JSON. The first is the `Merges.warning`; then each line of words is answered by one of
their token ids. It ends when nobody writes to it any more.
"""

from __future__ import annotations

import gc
import json
import sys

from engine.formats.gguf import GGUF
from engine.formats.merges import Merges
from engine.formats.vocabulary import Vocabulary


def main() -> None:
    gc.disable()  # what is made stays alive
    with GGUF(sys.argv[1]) as file:
        merges = Merges(file, Vocabulary(file))
    print(json.dumps(merges.warning), flush=True)
    for line in sys.stdin:
        print(json.dumps(merges(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
