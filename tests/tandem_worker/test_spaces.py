"""10,000 random steps of many workers: nobody ever finds a block of another space, account, model or text.

Workers of two models, numerics classes, block sizes and degrees of exactness share the store of one host. All is real
from the Submit on: the worker's reader, the engine's admission, pools and chains, the service's block store. The test
names the content of each block; whoever finds a block reads the name.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from kv_transfer_svc.blocks.allocator import PAGE_BYTES, BlockAllocator, Extent
from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.blocks.block_store import BlockStore
from tandem.v1 import types_pb2 as pb
from tandem_engine.extents import ExtentRef, PrefixBlock
from tandem_engine.scheduling.admission import build_request
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.spaces import model_identity
from tandem_runtime.model_table import Exactness
from tandem_worker import convert
from tandem_worker.model_card import model_card
from tandem_worker.submit_reader import SubmitReader
from tests.tandem_worker.scripted_engine import ready

NUM_STEPS = 2_500
SEEDS = range(4)
NUM_POOL_BLOCKS = 40
STORE_PAGES = 200
ACCOUNTS = ("ann", "bob", "eve")
TEXTS = ([1] * 70, [1] * 53, [1] * 33 + [2] * 50, [2] * 40, [3] * 15)
"""Prompts begin with one of these, whoever asks. Fifty-two tokens of the first are a public text."""
NUM_PUBLIC_TOKENS = 52
MAX_TOKENS = 250


def name_of(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


@dataclass(eq=False)
class Live:
    """A request that runs on a worker, and what the test knows of it."""

    request: Request
    account: str
    domain: bytes
    """Who may find its blocks, besides the account: workers of one model and space, by gateways of one release."""
    num_public_tokens: int


@dataclass(eq=False)
class Worker:
    """One life of a worker: its pool is new, the host's store is not."""

    weights: str
    numerics_class: str
    block_size: int
    exactness: Exactness
    live: list[Live] = field(default_factory=list)

    def __post_init__(self) -> None:
        loaded = ready()
        model = msgspec.structs.replace(
            loaded.model, weights_digest=self.weights, numerics_class=self.numerics_class, context_length=MAX_TOKENS
        )
        layout = msgspec.structs.replace(loaded.layout, tokens_per_block=self.block_size)
        self.card = model_card(msgspec.structs.replace(loaded, model=model, layout=layout), self.exactness)
        self.layout_digest = layout_digest(self.card.layout)
        self.reader = SubmitReader(self.card)
        self.config = SchedulerConfig(NUM_POOL_BLOCKS, self.block_size, MAX_TOKENS, 100)
        self.pool = BlockPool(NUM_POOL_BLOCKS, self.block_size)
        self.kv = KVCacheManager(self.pool, self.config)
        self.content: dict[int, bytes] = {}
        """The name of what each block of the pool has."""

    @property
    def shared(self) -> tuple[str, ...]:
        """What workers must have equal to share a space, in the words of the design."""
        if self.exactness == "layout":
            return "layout", self.weights
        return "class", self.weights, self.numerics_class, str(self.block_size)


class Fleet:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.allocator = BlockAllocator(STORE_PAGES * PAGE_BYTES)
        self.store = BlockStore(self.allocator)
        self.workers = [
            Worker("w", "cpp", 16, "class"),
            Worker("w", "torch", 16, "class"),
            Worker("w", "cpp", 32, "layout"),
            Worker("w", "torch", 32, "layout"),
            Worker("v", "cpp", 32, "layout"),
            Worker("w", "cpp", 8, "layout"),
        ]
        self.conversations: list[tuple[Worker, str, list[int]]] = []
        """Earlier requests, with all of their tokens."""
        self.names: dict[bytes, bytes] = {}
        """The content that each key ever stood for."""
        self.owners: dict[bytes, set[tuple[str, str]]] = {}
        """Accounts and numerics classes that computed each content."""
        self.of_answers: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        self.now = 0.0

    def upgrade(self, worker: Worker) -> None:
        """Replace a worker by one of another numerics class, now and then also of other exactness."""
        other: Exactness = "layout" if worker.exactness == "class" else "class"
        exactness = self.random.choice((worker.exactness, worker.exactness, worker.exactness, other))
        numerics_class = "torch" if worker.numerics_class == "cpp" else "cpp"
        replaced = Worker(worker.weights, numerics_class, worker.block_size, exactness)
        self.workers[self.workers.index(worker)] = replaced

    def step(self) -> None:
        self.now += 1.0
        worker = self.random.choice(self.workers)
        action = self.random.random()
        if action < 0.4:
            self.arrive(worker)
        elif action < 0.415:
            self.upgrade(worker)
        elif worker.live:
            live = self.random.choice(worker.live)
            if action < 0.8:
                self.go_on(worker, live)
            else:
                self.end(worker, live)

    # --------------------------------------------------------------------------------------------- a request

    def arrive(self, worker: Worker) -> None:
        worker, account, prompt = self.a_turn(worker)
        submit, live_fields = self.submit(worker, account, prompt)
        chain = worker.reader.read(submit)
        command = convert.add_request(submit, "r", "aggregated", chain)
        live = Live(build_request(command, worker.config, arrival=0, added_ns=0), account, *live_fields)
        request = live.request
        for index, key in enumerate(request.block_hashes):
            self.knows(worker, live, index, key)
        request.prefix = self.lent(worker, live, list(submit.block_hashes))
        if not worker.kv.admit(request, request.num_tokens, len(prompt) - 1):
            self.store.release("r")
            return
        worker.live.append(live)
        for index in range(request.num_found_blocks):
            self.found(worker, live, index, worker.content[request.block_table[index]], "pool")
        indices = worker.kv.loadable(request)
        for block, source in worker.kv.load_copies(request, indices):
            worker.content[block] = self.bytes_at(source)
        worker.kv.loaded(request, indices)
        for index in indices:
            self.found(worker, live, index, worker.content[request.block_table[index]], "store")
        self.store.release("r")
        self.computed(worker, live)

    def a_turn(self, worker: Worker) -> tuple[Worker, str, list[int]]:
        """Return a prompt: a known text, or what somebody was answered, and a little more; and who sends it where."""
        account, start = self.random.choice(ACCOUNTS), self.random.choice(TEXTS)
        if self.conversations and self.random.random() < 0.7:
            before, its_account, start = self.random.choice(self.conversations)
            if self.random.random() < 0.6:
                account = its_account
            if self.random.random() < 0.6 and before in self.workers:
                worker = before
        return (
            worker,
            account,
            [*start, *self.random.choices((1, 2, 3), (8, 1, 1), k=self.random.randint(1, 12))][:MAX_TOKENS],
        )

    def submit(self, worker: Worker, account: str, prompt: list[int]) -> tuple[pb.Submit, tuple[bytes, int]]:
        """Return a gateway's Submit, with the domain and the public tokens of its blocks."""
        digest, size = worker.card.fingerprint.digest, worker.block_size
        submit = pb.Submit(
            model=pb.ModelRef(model_id="m", fingerprint=digest),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=pb.SamplingParams(max_tokens=MAX_TOKENS, top_p=1, repetition_penalty=1),
        )
        if self.random.random() < 0.15:  # of release 0.2
            root_of, grain, domain = digest, size, name_of("0.2", digest)
        else:
            grain = self.random.choice([grain for grain in (8, 16, 32) if size % grain == 0])
            root_of, domain = model_identity(worker.card.fingerprint), name_of(worker.shared)
            submit.space, submit.hash_grain = worker.reader.space, grain
        root = hash_root(root_of, grain, "", account.encode())
        hashes = hash_blocks(root, prompt, grain)
        num_public = 0
        if prompt[:NUM_PUBLIC_TOKENS] == TEXTS[0][:NUM_PUBLIC_TOKENS]:
            num_public = max(0, min(NUM_PUBLIC_TOKENS // grain, len(hashes) - 1))
        public = hash_blocks(hash_root(root_of, grain, "", b"public"), prompt[: num_public * grain], grain)
        submit.hash_root, submit.num_public_blocks = root, num_public
        submit.block_hashes.extend([*public, *hashes[num_public:]])
        if self.random.random() < 0.2:
            submit.max_found_blocks = self.random.randint(0, 6)
        if self.random.random() < 0.2:
            submit.max_left_blocks = self.random.randint(0, 6)
        return submit, (domain, num_public * grain)

    def go_on(self, worker: Worker, live: Live) -> None:
        """Write some tokens of the answer."""
        request = live.request
        answer = self.random.choices((1, 2), (40, 1), k=self.random.randint(1, 20))  # most get the same answer
        if request.num_tokens + len(answer) > MAX_TOKENS or not worker.kv.grow(
            request, request.num_tokens + len(answer)
        ):
            self.end(worker, live)
            return
        request.token_ids += answer
        self.computed(worker, live)

    def end(self, worker: Worker, live: Live) -> None:
        worker.live.remove(live)
        worker.kv.free(live.request)
        worker.pool.check()
        self.conversations.append((worker, live.account, list(live.request.token_ids)))
        del self.conversations[:-12]

    def computed(self, worker: Worker, live: Live) -> None:
        """All tokens are computed: full blocks are registered in the pool and published to the store."""
        request, size = live.request, worker.block_size
        for index in range(request.num_computed_tokens // size, request.num_tokens // size):
            name = self.expected(worker, live, index)
            worker.content[request.block_table[index]] = name
            self.owners.setdefault(name, set()).add((live.account, worker.numerics_class))
            if (index + 1) * size > request.num_prompt_tokens:
                self.of_answers.add(name)
        request.num_computed_tokens = request.num_tokens
        filled = worker.kv.register_full_blocks(request)
        for told in worker.kv.describe(request, filled):
            keys = [bytes.fromhex(each) for each in told.hashes]
            for index, key in zip(filled, keys, strict=True):
                self.knows(worker, live, index, key)
            self.publish(worker, bytes.fromhex(told.parent), keys, [worker.content[slot] for slot in told.slots])

    # ----------------------------------------------------------------------------------------------- the store

    def lent(self, worker: Worker, live: Live, keys: list[bytes]) -> dict[tuple[int, int], ExtentRef]:
        leased = self.store.lease(self.block_keys(worker, keys), "r", self.now, 60.0)
        blocks = [
            PrefixBlock(index, ExtentRef("store", each.extent.offset, each.extent.num_bytes, index, 0))
            for index, each in enumerate(leased)
            if each is not None
        ]
        return {(block.group, block.index): block.extent for block in blocks}

    def publish(self, worker: Worker, parent: bytes, keys: list[bytes], names: list[bytes]) -> None:
        own = self.block_keys(worker, keys)
        before = self.block_keys(worker, [parent])[0] if parent else None
        begun = self.store.begin(own, [PAGE_BYTES] * len(own), b"tag", self.now, parent=before)
        for key, extent, name in zip(own, begun, names, strict=True):
            if isinstance(extent, Extent):
                with self.allocator.region.view(extent.offset, 16) as view:
                    view[:] = name
                self.store.seal(key, extent, 1)

    def block_keys(self, worker: Worker, keys: Sequence[bytes]) -> list[BlockKey]:
        return [BlockKey(worker.layout_digest, 0, key) for key in keys]

    def bytes_at(self, source: ExtentRef) -> bytes:
        with self.allocator.region.view(source.offset, 16) as view:
            return bytes(view)

    # ------------------------------------------------------------------------------------------------- the laws

    def expected(self, worker: Worker, live: Live, index: int) -> bytes:
        """Return the name of what a block of a request must have."""
        end = (index + 1) * worker.block_size
        owner = "everybody" if end <= live.num_public_tokens else live.account
        return name_of(live.domain, owner, live.request.token_ids[:end])

    def knows(self, worker: Worker, live: Live, index: int, key: bytes) -> None:
        """Whoever has a key can find its block: a key is one content's."""
        name = self.expected(worker, live, index)
        assert self.names.setdefault(key, name) == name, f"{live.account} has a key of another content"

    def found(self, worker: Worker, live: Live, index: int, name: bytes, where: str) -> None:
        assert name == self.expected(worker, live, index), f"{live.account} found another's block in the {where}"
        self.counts[where] += 1
        accounts = {account for account, _ in self.owners[name]}
        classes = {numerics_class for _, numerics_class in self.owners[name]}
        self.counts["of everybody"] += live.account not in accounts
        self.counts["of another class"] += worker.numerics_class not in classes
        if worker.numerics_class not in classes:
            assert worker.exactness == "layout"
        self.counts["of an answer"] += name in self.of_answers


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_finds_a_block_of_another_space_account_model_or_text(seed: int) -> None:
    fleet = Fleet(seed)
    try:
        for _ in range(NUM_STEPS):
            fleet.step()
        fleet.store.check()
        least = {"pool": 100, "store": 100, "of everybody": 10, "of another class": 5, "of an answer": 20}
        assert all(fleet.counts[what] >= number for what, number in least.items()), fleet.counts
    finally:
        fleet.allocator.close()
