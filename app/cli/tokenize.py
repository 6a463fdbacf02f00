"""`orin-chat tokenize`: a model file's tokenizer by itself, to be compared with others."""

import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from app.chat.settings import Settings
from app.cli import options
from app.cli.model_file import model_path
from engine.errors import UsageError
from engine.formats.gguf import GGUF
from engine.formats.tokens.tokenizer import Tokenizer


def run(arguments: Sequence[str], settings: Settings) -> int:
    """Writes tokens to standard output, a line each, and returns the exit code. The model's file needs no weights.

    --json writes one object, {"ids": [int], "pieces": [str]}. --jsonl reads a JSON string from each line and writes
    such an object for each, or {"error": str} if the line is no JSON string; then the exit code is 2. Nothing is added
    to the text: no BOS, no EOS, no chat template. A piece that is part of a character shows as U+FFFD. Raises
    UsageError and ModelFileError."""
    parser = options.Parser("tokenize", "What a model's tokenizer makes of a text.")
    add = parser.add_argument
    add("text", nargs="?", metavar="TEXT", help="the text (standard input without it)")
    add("--model", metavar="FILE", help="a GGUF file; one with a vocabulary alone will do")
    add("--special", action="store_true", help="read special tokens where they are written in the text")
    add("--json", action="store_true", help='write {"ids": [...], "pieces": [...]}')
    add(
        "--jsonl", action="store_true", help="one JSON string a line on standard input, one object a line out"
    )
    args = parser.parse_args(arguments)
    if args.jsonl and args.text is not None:
        raise UsageError("--jsonl reads standard input and takes no TEXT.")
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # bytes that are not text are no error
            stream.reconfigure(errors=errors)
    with GGUF(model_path(args.model, settings)) as gguf:
        tokenizer = Tokenizer(gguf)

    def tokens(text: str) -> dict[str, Any]:
        ids = tokenizer.encode(text, special=args.special)
        return {"ids": ids, "pieces": [tokenizer.piece(id).decode("utf-8", "replace") for id in ids]}

    if args.jsonl:
        exit_code = 0
        for line in sys.stdin:
            try:
                is_text = isinstance(value := json.loads(line), str)
                result = tokens(value) if is_text else {"error": "This line is no JSON string."}
            except (ValueError, RecursionError):
                result = {"error": "This line is not JSON."}
            if "error" in result:
                exit_code = 2
            print(json.dumps(result), flush=True)
        return exit_code

    result = tokens(sys.stdin.read() if args.text is None else args.text)
    if args.json:
        print(json.dumps(result))
    else:
        for id, piece in zip(result["ids"], result["pieces"], strict=True):
            print(f"{id:>8}  {json.dumps(piece, ensure_ascii=not piece.isprintable())}")
    return 0
