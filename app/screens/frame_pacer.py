"""Decides when the next frame is drawn, so that keys do not wait for drawing."""

import os
import time

FRAME_S = 0.2 if "SSH_CONNECTION" in os.environ else 0.1
"""Text drawn more often cannot be read, and takes too much of a slow line."""
MAX_FRAME_S = 1.0
MAX_SHARE = 0.2
"""The share of a core that drawing may take. Where it would take more, frames are further apart, up to MAX_FRAME_S."""
TICK_S = FRAME_S / 4
"""How often `FramePacer.is_due` is asked."""
REST_S = 0.25
"""The same while nobody types and the engine is idle: a chat that is open all day takes less of a battery."""
AFTER_KEY_S, TYPING_S, MAX_TYPING_FRAME_S = 0.03, 0.2, 0.5
"""While keys are less than TYPING_S apart, a frame is drawn just after a key has been shown (AFTER_KEY_S), because the
next key is least likely then. MAX_TYPING_FRAME_S is the longest time between such frames."""
IDLE_S = 2.0
"""A user who has pressed no key for so long will hardly press one in the next tenths of a second."""


class FramePacer:
    def __init__(self) -> None:
        self._frame_at = self._frame_cpu_s = 0.0
        self._key_at = time.monotonic()

    def key_pressed(self) -> None:
        self._key_at = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether no key was pressed for IDLE_S."""
        return time.monotonic() - self._key_at > IDLE_S

    def is_due(self) -> bool:
        """Whether to draw a frame now. Call it from the thread that draws, since it reads that thread's CPU time."""
        now, cpu_s = time.monotonic(), time.thread_time()
        since_frame, since_key = now - self._frame_at, now - self._key_at
        if since_frame < max(FRAME_S - TICK_S / 2, min(MAX_FRAME_S, (cpu_s - self._frame_cpu_s) / MAX_SHARE)):
            return False
        is_after_key = AFTER_KEY_S < since_key < AFTER_KEY_S + 2 * TICK_S
        if since_key < TYPING_S and not is_after_key and since_frame < MAX_TYPING_FRAME_S:
            return False
        self._frame_at, self._frame_cpu_s = now, cpu_s
        return True
