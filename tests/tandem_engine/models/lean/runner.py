"""Drives a decoder in tests: block tables, steps, greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tandem_engine.execution.model import ignore
from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.ops.base import KVPool, Run
from tests.tandem_engine.steps import step_of

Piece = tuple[int, int, int]
"""Request, first token, end."""


@dataclass
class Runner:
    """Runs requests' tokens through a decoder in any pieces; the pool begins with arbitrary contents."""

    decoder: Decoder
    block_size: int = 16
    num_blocks: int = 64
    token_ids: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.decoder.config
        elements = config.num_layers * 2 * config.num_kv_heads * config.head_dim * self.block_size
        rows = torch.full((self.num_blocks, elements), 7.0)
        self.pool = KVPool(rows, config.num_layers, config.num_kv_heads, config.head_dim, self.block_size)
        self._free = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
        self._tables: list[list[int]] = []

    def add(self, token_ids: Sequence[int]) -> int:
        """Return the new request's number."""
        self.token_ids.append(list(token_ids))
        self._tables.append([])
        return len(self.token_ids) - 1

    @torch.inference_mode()
    def step(
        self, pieces: Sequence[Piece], *, last_only: bool = False, kv_written: Callable[[], None] = ignore
    ) -> torch.Tensor:
        """Compute some tokens and return the logits of all, or of each piece's last."""
        ids: list[int] = []
        positions: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        runs: list[Run] = []
        last_rows: list[int] = []
        for request, start, end in pieces:
            table = self._tables[request]
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            blocks = torch.tensor(table)
            place = torch.arange(start, end)
            runs.append(Run(len(ids), start, end - start, blocks))
            ids += self.token_ids[request][start:end]
            last_rows.append(len(ids) - 1)
            positions.append(place)
            slots.append(blocks[place // self.block_size] * self.block_size + place % self.block_size)
        step = step_of(self.decoder.ops, torch.cat(positions), torch.cat(slots), runs)
        rows = torch.tensor(last_rows) if last_only else torch.arange(len(ids))
        return self.decoder.forward(torch.tensor(ids), step, self.pool, rows, kv_written)

    def logits(self, steps: Sequence[Sequence[Piece]]) -> list[torch.Tensor]:
        """Run steps and return each request's logits, [num_tokens, vocab_size], in the tokens' order."""
        by_request: list[list[torch.Tensor]] = [[] for _ in self.token_ids]
        for pieces in steps:
            parts = torch.split(self.step(pieces), [end - start for _, start, end in pieces])
            for (request, _, _), part in zip(pieces, parts, strict=True):
                by_request[request].append(part)
        return [torch.cat(parts) for parts in by_request]

    def decode_greedily(self, num_tokens: int) -> list[list[int]]:
        """Answer all requests side by side; runs each request's last token again to get its logits."""
        answers: list[list[int]] = [[] for _ in self.token_ids]
        for _ in range(num_tokens):
            pieces = [(request, len(ids) - 1, len(ids)) for request, ids in enumerate(self.token_ids)]
            for answer, ids, token in zip(
                answers, self.token_ids, self.step(pieces, last_only=True).argmax(-1).tolist(), strict=True
            ):
                answer.append(token)
                ids.append(token)
        return answers


def cut(lengths: Sequence[int], seed: int) -> list[list[Piece]]:
    """Return steps that advance requests by random pieces, side by side, until all their tokens are computed."""
    generator = torch.Generator().manual_seed(seed)
    done = [0] * len(lengths)
    steps: list[list[Piece]] = []
    while any(place < length for place, length in zip(done, lengths, strict=True)):
        pieces: list[Piece] = []
        for request, length in enumerate(lengths):
            draw = int(torch.randint(0, 20, (1,), generator=generator))
            end = min(length, done[request] + (1 if draw < 5 else draw))
            if end > done[request] and draw % 4:
                pieces.append((request, done[request], end))
                done[request] = end
        if pieces:
            steps.append(pieces)
    return steps
