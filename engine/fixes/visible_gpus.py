"""tinygrad 0.14.0 on NV: CUDA_VISIBLE_DEVICES says which GPU is used, as it does on CUDA.

tinygrad takes the first GPU that the kernel's driver lists. CUDA has an order of its own, and the variable may name a
GPU in place of its number. So CUDA's library is asked which one comes first, where there is one. The address on the PCI
bus tells which card that is."""

import os
from typing import Any

from tinygrad.runtime import ops_nv

from engine.devices import cuda_driver
from engine.fixes import once

_PLACE = "domain", "bus", "slot"
_stock_filter = ops_nv.hcq_filter_visible_devices


@once("The GPUs that NV sees")
def apply() -> None:
    """Changes tinygrad in this process."""
    ops_nv.hcq_filter_visible_devices = _visible


def _visible(cards: list[Any], device: str) -> list[Any]:
    """The one of the driver's `cards` (nv_ioctl_card_info_t) that is the first GPU in CUDA's order; none if that has
    none."""
    cards = _stock_filter(cards, device)
    if "CUDA_VISIBLE_DEVICES" not in os.environ or cuda_driver.library() is None:
        return cards
    first = [int(part, 16) for part in cuda_driver.pci_bus_id().partition(".")[0].split(":") if part]
    return [card for card in cards if [getattr(card.pci_info, part) for part in _PLACE] == first]
