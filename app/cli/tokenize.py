"""`orin-chat tokenize`: a model file's tokenizer by itself, so that anyone can check it against another."""

from __future__ import annotations

import io
import json
from typing import Any, TextIO

from engine.formats.gguf import GGUF
from engine.formats.tokenizer import Tokenizer


def run(
    model: str, text: str | None, *, special: bool, as_json: bool, jsonl: bool, stdin: TextIO, stdout: TextIO
) -> int:
    """Writes the tokens of `text` (None: of all of stdin) and returns the exit code.

    With `as_json` one object, {"ids": [int], "pieces": [str]}; otherwise a line a token. With `jsonl` stdin
    has a JSON string in each line, and each is answered with such an object in a line, or with {"error": str}
    if it is no JSON string: then the exit code is 2. `special` makes names of special tokens in the text
    these tokens. Nothing is added: no BOS, no EOS, no template. A piece that is only a part of a character
    shows as U+FFFD. The file needs no weights. Raises ModelFileError.
    """
    for stream, errors in ((stdin, "replace"), (stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # bytes that are not text must not end it
            stream.reconfigure(errors=errors)
    with GGUF(model) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)

    def tokens(text: str) -> dict[str, Any]:
        ids = tokenizer.encode(text, special=special)
        return {"ids": ids, "pieces": [tokenizer.piece(id).decode("utf-8", "replace") for id in ids]}

    if jsonl:
        exit_code = 0
        for line in stdin:
            try:
                value = json.loads(line)
                answer = (
                    tokens(value) if isinstance(value, str) else {"error": "This line is no JSON string."}
                )
            except (ValueError, RecursionError):
                answer = {"error": "This line is not JSON."}
            if "error" in answer:
                exit_code = 2
            print(json.dumps(answer), file=stdout, flush=True)
        return exit_code

    found = tokens(stdin.read() if text is None else text)
    if as_json:
        print(json.dumps(found), file=stdout)
    else:
        for id, piece in zip(found["ids"], found["pieces"], strict=True):
            print(f"{id:>8}  {json.dumps(piece, ensure_ascii=not piece.isprintable())}", file=stdout)
    return 0
