"""How much of a prompt is in the KV cache, and where its pieces end, so that much of it can be found later. With
recurrent states, both follow from their checkpoints."""

from __future__ import annotations

from engine.runtime.checkpoints import Checkpoints
from engine.runtime.jobs import Job
from engine.runtime.kv_blocks import BLOCK, KVBlocks


def find_known(blocks: KVBlocks, states: Checkpoints | None, sequence: int, job: Job) -> int:
    """Takes what is in the KV cache already: another conversation may just have computed what comes next in this
    one. Returns how many tokens the sequence has."""
    done = blocks.length(sequence)
    if not (wanted := job.answer.reusable):
        return done
    if states:
        n = states.find(wanted, len(wanted))
        while n > done and (known := blocks.known(sequence, wanted[:n])) < n:
            n = states.find(wanted, known)
        del wanted[max(done, n) :]
    found = blocks.match(sequence, wanted)
    if states and found > done:
        states.load(wanted, found, sequence)
    if not job.was_paused:
        job.answer.cached += found - done
    return found


def end_of_piece(states: Checkpoints | None, sequence: int, job: Job, done: int, piece: int) -> int:
    """Where a piece from `done` on ends that has about `piece` tokens."""
    end = min(done + piece, len(job.stored))
    if job.restore:
        end = min(end, job.restore.first)
    if end < len(job.stored) and end - done >= 8 * BLOCK:  # whole blocks can be shared at once
        end = end // BLOCK * BLOCK
    if job.answer.pictures:
        end = job.answer.pictures.end_of_piece(done, end)
    return states.end_of_step(done, end, job.answer.checkpoint_ends, sequence) if states else end


def keep_state(
    blocks: KVBlocks, states: Checkpoints, sequence: int, tokens: list[int], ends_turn: bool
) -> None:
    """Keeps the state of a sequence that ends. If its last step ran ahead, its token is in the KV cache too."""
    length, position = blocks.length(sequence), states.position(sequence)
    if length and position in (length, length + 1):
        blocks.commit(sequence, tokens[length:position])
        states.save(tokens[:position], ends_turn, sequence)
