"""The vectors of latent attention (`engine.description.attention.LatentAttention`) as attention reads them.

A vector has its rotated elements in two halves, each before one of the latent elements: so those of a pair are half a
vector apart, as in other heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinygrad import UOp


@dataclass(frozen=True)
class LatentHeads:
    """`heads` whose vectors have `latent` and `rotated` elements. A query's latent elements are made of `plain` ones,
    and a result's `values` elements of the latent ones that a head attends to. `eps` is that of norms."""

    heads: int
    latent: int
    rotated: int
    plain: int
    values: int
    eps: float

    @property
    def dim(self) -> int:
        return self.latent + self.rotated

    @property
    def rows(self) -> int:
        """Elements of a token's queries and its key."""
        return (self.heads + 1) * self.dim

    @property
    def name(self) -> str:
        return f"{self.heads}_{self.latent}_{self.rotated}_{self.plain}_{self.values}"

    def latent_place(self, e: UOp) -> UOp:
        """Where a vector has a latent element."""
        half = self.latent // 2
        return e // half * (self.dim // 2) + self.rotated // 2 + e % half

    def rotated_place(self, e: UOp) -> UOp:
        """Where a vector has a rotated element."""
        half = self.rotated // 2
        return e // half * (self.dim // 2) + e % half
