"""What a search found is on trial until a start of a fresh process has ended well with it.

A result that was fast within the search may still make the next start fail: kernels are compiled in another order and
beside other work there. So each start with a result that is not proved yet is counted on disk before it begins. After
MAX_STARTS of them that did not end, or one that raised an error, the result is not used any more.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from engine.cache.disk_cache import DiskCache
from engine.errors import CompilerHangsError, DeviceHangsError, OrinError

MAX_STARTS = 3  # a start may also be ended by its user
_TABLE = "results on trial"


class StartTrials:
    """The results of searches that are on trial, by keys. A key has the result in it, so that what another process
    finds for the same is on trial for itself. There is one for a process (`start_trials`)."""

    def __init__(self) -> None:
        self._own: set[Hashable] = set()  # what was found in this process, which thus proves nothing
        self._used: dict[Hashable, DiskCache] = {}  # what this process has taken, and is not proved
        self.dropped = 0  # results that failed, and are not used in this process

    def begin(self, cache: DiskCache, key: Hashable) -> None:
        """Puts a new result on trial."""
        self._own.add(key)
        cache.put(_TABLE, key, 0)

    def begin_again(self, cache: DiskCache, key: Hashable) -> None:
        """Puts a result that was proved on trial once more, since kernels have changed."""
        if key not in self._own:
            cache.put(_TABLE, key, 0)

    def may_use(self, cache: DiskCache, key: Hashable, drop: Callable[[], object]) -> bool:
        """Whether this start may use a result. For one that failed `drop` is called, once. One whose start cannot be
        counted, since the disk is full, is not used either: it could fail each time."""
        starts: int | None = cache.get(_TABLE, key)
        if starts is None or key in self._own or key in self._used:
            return True
        if starts >= MAX_STARTS:
            drop()
            cache.delete(_TABLE, key)
            self.dropped += 1
            return False
        cache.put(_TABLE, key, starts + 1)
        if cache.get(_TABLE, key) == starts:
            return False
        self._used[key] = cache
        return True

    def proved(self) -> None:
        """This start ended well."""
        for key, cache in self._used.items():
            cache.delete(_TABLE, key)
        self._used.clear()

    @contextmanager
    def start(self, restart: Callable[[], object]) -> Iterator[None]:
        """Loads a model in its body. If that fails, results on trial are not used again, and `restart` begins anew
        without them. What the user can mend (OrinError) is not their fault, but what hangs may be."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OrinError) and not isinstance(error, (CompilerHangsError, DeviceHangsError)):
                self._take_back()
                raise
            if self.failed():
                traceback.print_exc()
                restart()
            raise

    def _take_back(self) -> None:
        """Counts this start no longer."""
        for key, cache in self._used.items():
            if starts := cache.get(_TABLE, key):  # else another start has proved it meanwhile
                cache.put(_TABLE, key, starts - 1)

    def failed(self) -> bool:
        """This start failed, so that results on trial are not used again. False if it used none."""
        for key, cache in self._used.items():
            cache.put(_TABLE, key, MAX_STARTS)
        return bool(self._used)


start_trials = StartTrials()
