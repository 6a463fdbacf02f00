"""How nvgpu hands out GPU addresses: a buddy allocator (common/mm/allocators/buddy_allocator.c in its sources).

A range is cut, from its base upward, into the largest power-of-two blocks that fit. Each order has a list, last in
first out; an allocation takes the head of the smallest order that has one and splits it, keeping the left half.
"""

from __future__ import annotations

PAGE = 4096


class Full(Exception):
    pass


class Buddy:
    """Pages of [base, end)."""

    def __init__(self, base: int, end: int):
        self.base, self.end = base, end
        self._free: dict[int, list[int]] = {order: [] for order in range(48)}  # page numbers from base
        self._taken: dict[int, tuple[int, ...]] = {}  # address: the blocks' orders
        at, pages = 0, (end - base) // PAGE
        while at < pages:
            order = (pages - at).bit_length() - 1
            self._free[order].append(at)
            at += 1 << order

    def alloc(self, size: int) -> int:
        """The address of `size` bytes, rounded up to a power of two of pages."""
        need = max(0, (-(-size // PAGE) - 1).bit_length())
        order = next((o for o in range(need, 48) if self._free[o]), None)
        if order is None:
            raise Full
        block = self._free[order].pop()
        while order > need:
            order -= 1
            self._free[order].append(block + (1 << order))
        self._taken[address := self.base + block * PAGE] = (need,)
        return address

    def alloc_fixed(self, address: int, size: int) -> None:
        """Exactly these pages; Full where one of them is taken or out of range."""
        first, last = (address - self.base) // PAGE, (address + size - self.base) // PAGE
        if address < self.base or address + size > self.end:
            raise Full
        wanted, orders, at = [], [], first
        while at < last:
            order = min((at & -at).bit_length() - 1 if at else 47, (last - at).bit_length() - 1)
            wanted.append((at, order))
            at += 1 << order
        undo = {order: list(blocks) for order, blocks in self._free.items()}
        for block, order in wanted:
            if not self._carve(block, order):
                self._free = undo
                raise Full
            orders.append(order)
        self._taken[address] = tuple(orders)

    def free(self, address: int) -> None:
        at = (address - self.base) // PAGE
        for order in self._taken.pop(address):
            block, size = at, order
            while (buddy := block ^ (1 << size)) in self._free[size]:
                self._free[size].remove(buddy)
                block, size = min(block, buddy), size + 1
            self._free[size].append(block)
            at += 1 << order

    def _carve(self, block: int, order: int) -> bool:
        """Takes one block out of the free one that holds it."""
        for size in range(order, 48):
            holder = block >> size << size
            if holder in self._free[size]:
                self._free[size].remove(holder)
                while size > order:
                    size -= 1
                    half = holder + (1 << size)
                    self._free[size].append(holder if block >= half else half)
                    holder = half if block >= half else holder
                return True
        return False
