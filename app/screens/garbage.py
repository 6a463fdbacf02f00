"""Collects garbage while no one waits.

Python's full collections visit every object, at any time. With a reply of 50,000 tokens on the screen that takes up to
0.7 s, and a key that is pressed meanwhile waits. So they are postponed until nothing happens.
"""

import gc

_THRESHOLDS = gc.get_threshold()
_NEVER = 1 << 30


def postpone() -> None:
    """From now on, only `collect_if_due` makes full collections. They leave out what is there already."""
    gc.set_threshold(*_THRESHOLDS[:2], _NEVER)
    gc.freeze()


def collect_if_due() -> None:
    """Collects if Python would have done so by now. To be called when no reply arrives and no key is pressed. What
    survives is not visited again, until `forget_survivors`."""
    if gc.get_count()[2] > _THRESHOLDS[2]:
        gc.collect()
        gc.freeze()


def forget_survivors() -> None:
    """The next collection visits all objects. To be called when many become garbage, such as those of a chat."""
    gc.unfreeze()


def resume() -> None:
    """Ends what `postpone` began."""
    gc.set_threshold(*_THRESHOLDS)
    gc.unfreeze()
