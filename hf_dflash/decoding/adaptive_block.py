# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""How many drafts of a block are worth verifying, from what was accepted and what blocks cost so far.

The drafter proposes a whole block at one price. Verifying more of it costs more the more the target is busy (many rows, a
CPU), and the last slots are rarely accepted. Greedy output does not depend on the choice, nor does
the distribution of sampled output: its random numbers do, so a seed repeats it only by chance.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

# Weight of what was observed a block ago; about the last 50 blocks count.
_MEMORY = 0.98
# So often the whole block is verified, or the last slots would never be seen again.
_FULL_EVERY = 32
# Blocks at the start: the first two initialise what is initialised lazily, then both lengths of the cost line are seen.
_WARM_UP = 2


class AdaptiveBlockLength:
    """
    Chooses the number of drafts that emits the most tokens per second.

    Tokens of a block with m drafts: 1 + sum over k <= m of the product of the first k slots' acceptance rates. Seconds of a
    block: a line in m, fitted to the blocks so far.

    Args:
        max_drafts (`int`): block size - 1.
    """

    def __init__(self, max_drafts: int):
        self.max_drafts = max_drafts
        # Optimistic at first, so that every slot is tried.
        self.accepted = [1.0] * max_drafts
        self.tried = [1.0] * max_drafts
        self.num_blocks = 0
        # Decayed sums of 1, m, m^2, t and m t.
        self.sums = [0.0] * 5

    def choose(self) -> int:
        """Drafts to verify in the next block, 1 to `max_drafts`."""
        short = max(1, self.max_drafts // 2)
        if self.num_blocks < _WARM_UP + 4:
            return self.max_drafts if self.num_blocks % 2 == 0 else short
        if self.num_blocks % _FULL_EVERY == 0:
            return self.max_drafts
        fixed, per_draft = self._cost()
        best, best_speed, tokens, survival = 1, 0.0, 1.0, 1.0
        for drafts in range(1, self.max_drafts + 1):
            survival *= self.accepted[drafts - 1] / self.tried[drafts - 1]
            tokens += survival
            speed = tokens / (fixed + per_draft * drafts)
            if speed > best_speed:
                best, best_speed = drafts, speed
        return best

    def observe(self, num_drafts: int, num_accepted: list[int], seconds: float) -> None:
        """
        Args:
            num_drafts (`int`): drafts that were verified.
            num_accepted (`list[int]`): of each row.
            seconds (`float`): that the block took, drafter included.
        """
        self.num_blocks += 1
        for count in num_accepted:
            # A slot behind the first wrong one was not tried.
            for slot in range(min(count + 1, num_drafts)):
                self.accepted[slot] = _MEMORY * self.accepted[slot] + (slot < count)
                self.tried[slot] = _MEMORY * self.tried[slot] + 1
        if self.num_blocks > _WARM_UP:
            new = (1.0, num_drafts, num_drafts**2, seconds, num_drafts * seconds)
            self.sums = [_MEMORY * total + value for total, value in zip(self.sums, new, strict=True)]

    def _cost(self) -> tuple[float, float]:
        """Seconds of a block without drafts, and of each draft."""
        n, m, mm, t, mt = self.sums
        spread = n * mm - m * m
        per_draft = max(0.0, (n * mt - m * t) / spread) if spread > 1e-9 else 0.0
        return max((t - per_draft * m) / n, 1e-9), per_draft
