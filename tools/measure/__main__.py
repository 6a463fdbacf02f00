"""Measures and pictures the program: python -m tools.measure NAME ARGUMENTS...

`python -m tools.measure NAME --help` says what a measurement does. docs/measuring.md lists them.
"""

import argparse
import sys
from importlib import import_module

MEASUREMENTS = {
    "step_rates": "a model's steps beside llama.cpp's own bench",
    "batch_rates": "decode of several sequences at once beside decode of one",
    "mixed_rates": "steps of replies and pieces of a prompt beside those of replies alone",
    "guess_rates": "answers whose next tokens are guessed beside those without guesses",
    "request_rates": "what schemas, log-probabilities and penalties of some streams cost all of them",
    "product_rates": "products of prompts with matrices of every type, beside those of Q4_K",
    "schedule_rates": "schedules of decode's products within steps, and what each kernel adds to one",
    "gpu_rates": "a GPU's rates, and the tiles and schedules that follow from them",
    "chip_kernels": "every kernel that a GPU would run, compiled for it: registers, spills, shared memory",
    "picture_rates": "questions about pictures beside llama-server with the same encoder",
    "many_clients": "a server that many clients ask at once, for long: answers, errors, times and memory",
    "turn_rates": "the first token when the last message of a long conversation is edited",
    "reopen_rates": "the first token of a long conversation after a start, with its KV cache on disk",
    "batch_fidelity": "the logits of several rows beside those of each sequence alone",
    "kv_fidelity": "the logits over a quantized KV cache beside those over float16",
    "type_rates": "whole models of several types of weights, by the length of the prompt",
    "type_check": "small files whose tensors differ in type, beside the reference",
    "mixed_model": "writes a model of full size whose tensors differ in type",
    "family_model": "writes a model of full size of a newer family",
    "oracle_check": "the engine beside llama.cpp's exact answers",
    "picture_check": "pictures beside llama.cpp's exact embeddings and next tokens",
    "router_check": "the experts that the engine chooses beside those of the reference",
    "reach": "how the screen keeps up: keys and Esc under streams of text, and long chats",
    "slow_line": "how keys keep up on a slow line, and what is written",
    "screenshots": "pictures of the chat for the README",
    "tools_recording": "a file, a call of a tool and a version, as an animated picture",
    "recording": "twenty seconds of the chat as an animated picture",
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure",
        description="\n".join(f"{name:16}{what}" for name, what in MEASUREMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=MEASUREMENTS, metavar="NAME")
    name: str = parser.parse_args(arguments[:1] or ["--help"]).name
    module = import_module(f"tools.measure.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.measure {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    module.run(parser.parse_args(arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
