"""The block manager: who holds which KV block, and which blocks can be shared.

It deals in block ids only. A block is free (nobody holds it), or held by one or more sequences. A full block of
committed tokens gets a digest chained over everything before it, and can be found again by a later sequence with the
same prefix, also after its holders are gone, until the block is needed for something else (least recently used first).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.types import Sequence


@dataclass(frozen=True)
class Copy:
    """KV of block ``src`` must be copied to block ``dst`` before the next forward pass; copies are done in order."""

    src: int
    dst: int


class BlockManager:
    """Allocates, shares and frees the blocks of one KV pool of ``n_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, n_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.version = [0] * n_blocks  # changes whenever a block is handed out for new content
        self._refs = [0] * n_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # next to be reused first
        self._digest: dict[int, bytes] = {}  # of every block full of committed tokens
        self._by_digest: dict[bytes, int] = {}  # the block that represents a digest

    @property
    def n_free(self) -> int:
        """Blocks that nobody holds (those that still remember a prefix included)."""
        return len(self._free)

    def blocks_for(self, n_tokens: int) -> int:
        """How many blocks hold ``n_tokens``."""
        return -(-n_tokens // self.block_size)

    def adopt_prefix(self, seq: Sequence) -> None:
        """Gives a sequence without blocks the cached blocks of its longest known prefix.

        At least the newest token is left to compute, since its logits are wanted.
        """
        if not self.prefix_caching:
            return
        known = seq.digests  # a sequence that waits for room is asked about again and again
        for i in range((len(seq.tokens) - 1) // self.block_size):
            if i == len(known):
                known.append(self._chain(known[-1] if known else _root(seq), seq.tokens, i))
            block = self._by_digest.get(known[i])
            if block is None:
                break
            self._hold(block)
            seq.blocks.append(block)
        seq.n_computed = len(seq.blocks) * self.block_size
        if seq.n_output == 0:  # one that was preempted finds its own tokens: no hits
            seq.n_cached = seq.n_computed

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares the parent's prompt blocks with a child of the same prompt, which computes the last token anew."""
        child.n_computed = child.n_cached = child.n_prompt - 1
        for block in parent.blocks[: self.blocks_for(child.n_computed)]:
            self._hold(block)
            child.blocks.append(block)

    def reserve(self, seq: Sequence, start: int, end: int) -> list[Copy] | None:
        """Makes the slots ``start .. end - 1`` of a sequence writable.

        Returns the copies to do first (a block that others hold or can find is never written to), or None, with
        nothing changed, when there are not enough free blocks.
        """
        first, last = start // self.block_size, self.blocks_for(end)
        if last == len(seq.blocks) == first + 1 and not self._is_frozen(seq.blocks[first]):
            return []  # most often: room in the newest block
        frozen = [i for i, block in enumerate(seq.blocks[first:last], first) if self._is_frozen(block)]
        if len(frozen) + max(0, last - len(seq.blocks)) > self.n_free:
            return None
        copies = []
        for i in frozen:
            copies.append(Copy(seq.blocks[i], self._take()))
            self._release(copies[-1].src)
            seq.blocks[i] = copies[-1].dst
        while len(seq.blocks) < last:
            seq.blocks.append(self._take())
        return copies

    def commit(self, seq: Sequence) -> None:
        """After a step: remembers the blocks that are now full of committed tokens, frees those past the last one."""
        kept = self.blocks_for(seq.n_computed)
        for block in reversed(seq.blocks[kept:]):
            self._release(block)
        del seq.blocks[kept:]
        if not self.prefix_caching:
            return
        full = seq.n_computed // self.block_size
        first = full
        while first > 0 and seq.blocks[first - 1] not in self._digest:
            first -= 1
        for i in range(first, full):
            digest = self._chain(self._digest[seq.blocks[i - 1]] if i else _root(seq), seq.tokens, i)
            self._digest[seq.blocks[i]] = digest
            self._by_digest.setdefault(digest, seq.blocks[i])

    def free(self, seq: Sequence) -> None:
        """Takes all blocks from a sequence; its KV has to be computed anew. The end of a prefix is reused first."""
        for block in reversed(seq.blocks):
            self._release(block)
        seq.blocks.clear()
        seq.n_computed = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the books agree with the blocks that ``sequences`` (all there are) hold."""
        refs = [0] * self.n_blocks
        for seq in sequences:
            assert len(set(seq.blocks)) == len(seq.blocks), f"sequence {seq.id} holds a block twice: {seq.blocks}"
            assert seq.n_computed <= len(seq.blocks) * self.block_size, f"sequence {seq.id} has KV outside its blocks"
            assert seq.n_computed < len(seq.tokens), f"sequence {seq.id} has no pending token"
            for block in seq.blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the blocks held"
        assert set(self._free) == {b for b in range(self.n_blocks) if refs[b] == 0}, "free list differs from refs"
        for digest, block in self._by_digest.items():
            assert self._digest.get(block) == digest, f"block {block} is found under a digest that is not its own"

    def _chain(self, parent: bytes, tokens: list[int], index: int) -> bytes:
        own = array("q", tokens[index * self.block_size : (index + 1) * self.block_size])
        return hashlib.blake2b(parent + own.tobytes(), digest_size=16).digest()

    def _is_frozen(self, block: int) -> bool:
        return self._refs[block] > 1 or block in self._digest

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free[block] = None
            if self._by_digest.get(self._digest.get(block, b"")) != block:  # nobody can find it: reuse it first
                self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest.pop(block, None)
        if digest is not None and self._by_digest.get(digest) == block:
            del self._by_digest[digest]
        self._refs[block] = 1
        self.version[block] += 1
        return block


def _root(seq: Sequence) -> bytes:
    """Where a sequence's chain of digests begins: tenants share no blocks, or one could find out another's prompts."""
    return seq.spec.tenant.encode()
