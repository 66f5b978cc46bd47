"""The blocks of the slow scheduler: objects without numbers or reference counts; all tables are searched instead.

There are two pools, "device" and "host". A sequence has a table for each group of layers, with `None` for freed blocks.
Free cached blocks are in a list, least recently freed first; the first is evicted when no other is free.

A page is `block_size` tokens, and the blocks that hold them in every group of layers. Caching begins and ends at pages:
a block's key is its place, the salt, and all tokens up to its page's end. A page is named by the first group's last
key.
"""

from fractions import Fraction
from itertools import chain, takewhile
from math import inf

from slow_groups import Block, Key, SlowGroup, SlowSequence, Table

from scheduler_service.core import PreemptionMode, SchedulerConfig
from scheduler_service.core.blocks import states
from scheduler_service.core.config import LayerGroup


class SlowBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.layers = config, config.groups
        self.running: list[SlowGroup] = []
        self.swapped: list[SlowGroup] = []
        self.plan: list[tuple[SlowSequence, int, int]] = []  # sequence, tokens, copies on write
        self.let_go: dict[str, list[Block]] = {"device": [], "host": []}
        self.has_states = any(layers.has_states for layers in self.layers)
        self.has_copied_states: list[SlowSequence] = []  # in this step
        self.left: list[Block] = []  # states that were found, and are copied in this step
        self.kept: list[tuple[SlowSequence, int, list[Block]]] = []  # states for the cache, after so many pages

    def sequences(self) -> list[SlowSequence]:
        """All sequences that may have tables."""
        groups = self.running + self.swapped
        return [sequence for g in groups for sequence in [*g.sequences, g.encoder] if sequence]

    def tables(self, pool: str) -> list[Table]:
        return [table for sequence in self.sequences() for table in getattr(sequence, pool) or []]

    def holders(self, block: Block | None) -> int:
        in_tables = sum(block in table for table in self.tables("device") + self.tables("host"))
        return in_tables + (block in self.kept_aside()) if block else 0

    def kept_aside(self) -> list[Block]:
        """Blocks with states that are in no table."""
        return self.left + [block for _, _, blocks in self.kept for block in blocks]

    def held(self, pool: str, but_by: list[SlowGroup] | None = None) -> set[Block]:
        """Blocks in any table, or in one of another group."""
        groups = [group for group in self.running + self.swapped if group not in (but_by or [])]
        sequences = [sequence for g in groups for sequence in [*g.sequences, g.encoder] if sequence]
        tables = [table for sequence in sequences for table in getattr(sequence, pool) or ()]
        aside = self.kept_aside() if pool == "device" else []
        return {block for table in [*tables, aside] for block in table} - {None}

    @property
    def num_free(self) -> int:
        return self.config.num_device_blocks - len(self.held("device"))

    @property
    def num_host_free(self) -> int:
        return self.config.num_host_blocks - len(self.held("host"))

    @property
    def num_reserved(self) -> int:
        """Blocks that admission leaves free for running groups."""
        return int(self.config.watermark * self.config.num_device_blocks) if self.running else 0

    def new_block(self, pool: str) -> Block:
        num_free = self.num_free if pool == "device" else self.num_host_free
        assert num_free
        if num_free == len(self.let_go[pool]):
            self.let_go[pool].pop(0).key = None
        return Block()

    def drop_blocks(self, table: Table, end: int | None = None, pool: str = "device") -> None:
        """Free a table's first blocks, the last of them first."""
        for index in reversed(range(len(table) if end is None else end)):
            block, table[index] = table[index], None
            if block and block.key and block.is_found and not self.holders(block):
                self.let_go[pool].append(block)

    def drop_tables(self, sequence: SlowSequence, pool: str = "device") -> None:
        self.release_kept([one for one in self.kept if one[0] is sequence])
        for table in getattr(sequence, pool) or ():
            self.drop_blocks(table, pool=pool)
        if pool == "device" and self.has_states and self.config.prefix_caching:
            last = sequence.kept_page or (sequence.num_prompt_tokens - 1) // self.config.block_size
            for block in self.free_states(sequence, sequence.num_shared) + self.free_states(sequence, last):
                self.let_go["device"].remove(block)  # evicted no earlier than those
                self.let_go["device"].append(block)

    def free_states(self, sequence: SlowSequence, num_pages: int) -> list[Block]:
        """The free cached blocks with the states after a sequence's first pages."""
        numbers = [number for number, layers in enumerate(self.layers) if layers.has_states]
        found = [self.find(self.key_of(sequence, number, num_pages - 1)) for number in numbers if num_pages]
        return [block for block in found if block in self.let_go["device"]]

    def drop_behind_windows(self, sequence: SlowSequence) -> None:
        """Free the blocks that no token attends to after those that no draft's rejection takes back."""
        for layers, table in zip(self.layers, sequence.device or (), strict=False):
            if layers.has_states:
                continue
            self.drop_blocks(table, self.first_needed(layers, sequence.computed - sequence.num_drafted))

    # ---- sizes, in blocks of a group of layers

    def blocks_for(self, layers: LayerGroup, num_tokens: int) -> int:
        return -(-num_tokens // layers.room)

    def entries_for(self, layers: LayerGroup, num_tokens: int) -> int:
        """Entries of a table for these tokens and the drafts behind them."""
        return self.blocks_for(layers, num_tokens + self.config.num_lookahead_slots)

    def first_needed(self, layers: LayerGroup, num_tokens: int) -> int:
        """The first block that tokens after these attend to."""
        if layers.chunked:
            return max(range(0, num_tokens + 1, layers.window)) // layers.block_size
        return max(0, num_tokens - layers.window + 1) // layers.block_size if layers.window else 0

    def longest_chunk(self) -> int:
        """With a window, a long prompt's tokens and an image behind them; otherwise a whole step."""
        step, long = self.config.max_num_batched_tokens, self.config.max_prefill_chunk
        if not long or not any(layers.window for layers in self.layers):
            return step
        if self.config.images_attend_both_ways:
            long += min(self.config.encoder_cache_size, step - (self.config.max_num_seqs - 1))
        return min(step, long)

    def most_in_window(self, layers: LayerGroup) -> int:
        """Blocks that a chunk and the window before it touch if they begin with the last slot of a block."""
        chunk = self.longest_chunk() + self.config.num_lookahead_slots
        return self.blocks_for(layers, layers.block_size - 1 + layers.window - 1 + chunk)

    def in_window(self, layers: LayerGroup, num_blocks: int) -> int:
        return min(num_blocks, self.most_in_window(layers)) if layers.window else num_blocks

    def first_entries(self, layers: LayerGroup, sequence: SlowSequence, num_cached: int = 0) -> int:
        """Entries of a new table whose first tokens are cached."""
        needed = self.entries_for(layers, len(sequence.token_ids))
        if not layers.window:
            return needed
        return min(needed, self.first_needed(layers, num_cached) + self.most_in_window(layers))

    def blocks_of(self, group: SlowGroup) -> int:
        """Blocks of all sequences; those of the prompt that a follower always shares with the leader count once."""
        leader, *followers = group.live
        needed = self.blocks_for(self.layers[0], len(group.encoder_tokens))
        for layers in self.layers:
            needed += self.first_entries(layers, leader)
            for follower in followers:
                own = self.entries_for(layers, len(follower.token_ids)) - self.num_shared(layers, follower)
                needed += self.in_window(layers, own)
        return needed

    def num_shared(self, layers: LayerGroup, follower: SlowSequence) -> int:
        """Full blocks that a follower shares: the prompt's, or one token less if its first output is not sampled."""
        return min(len(follower.group.prompt) - self.has_states, len(follower.token_ids) - 1) // layers.room

    def never_fits(self, group: SlowGroup) -> bool:
        """Whether all outputs at their longest exceed the empty pool."""
        prompt, config = len(group.prompt), self.config
        longest = max(min(prompt + group.sampling.max_tokens, config.max_sequence_tokens), prompt + 1)
        sequences = list(group.live)
        while len(sequences) < group.num_seqs:  # beams, which go on from the whole prompt
            sequences.append(SlowSequence(group, 0, [*group.prompt, 0]))
        in_all = self.blocks_for(self.layers[0], len(group.encoder_tokens))
        for layers in self.layers:
            in_prompt = prompt // layers.room
            needed = self.in_window(layers, in_prompt)
            for number, sequence in enumerate(sequences):
                own = self.entries_for(layers, max(len(sequence.token_ids), longest - 1))
                own -= self.num_shared(layers, sequence) if number else in_prompt
                needed += self.in_window(layers, own)
            if layers.window:
                needed = min(needed, len(sequences) * self.most_in_window(layers))
            in_all += needed
        return in_all > config.num_device_blocks

    # ---- the prefix cache

    def in_page(self, number: int) -> int:
        """Blocks of a page in a group of layers."""
        return self.config.block_size // (self.layers[number].block_size or self.config.block_size)

    def key_of(self, sequence: SlowSequence, number: int, index: int) -> Key:
        """The key of a block in a group of layers, which includes the encoder's input."""
        tokens = tuple(sequence.token_ids[: (index // self.in_page(number) + 1) * self.config.block_size])
        of_group = sequence.group.root, tuple(sequence.group.encoder_tokens)
        images = tuple(image for image in sequence.group.images if image.start < len(tokens))
        return (index, number, *of_group, "of the encoder" if sequence.is_encoder else tokens, images)

    def key_of_page(self, sequence: SlowSequence, page: int) -> Key:
        return self.key_of(sequence, 0, (page + 1) * self.in_page(0) - 1)

    def last_of_pages(self, sequence: SlowSequence, num_pages: int) -> Block | None:
        """The block that names the last of a sequence's first pages, unless it is behind the window."""
        if not num_pages or self.layers[0].has_states:
            return None
        return (sequence.device or sequence.host)[0][num_pages * self.in_page(0) - 1]

    def is_withdrawn(self, sequence: SlowSequence, num_pages: int) -> bool:
        last = self.last_of_pages(sequence, num_pages)
        return num_pages > 0 and (sequence.is_stale or (last is not None and last.key is None))

    def find(self, key: Key | None, pool: str = "device") -> Block | None:
        there = chain(*self.tables(pool), self.let_go[pool]) if key else ()
        return next((block for block in there if block and block.key == key and block.is_found), None)

    def most_cached(self, sequence: SlowSequence) -> int:
        """Pages that may be found: the last token is computed for its logits."""
        return (len(sequence.token_ids) - 1) // self.config.block_size if self.config.prefix_caching else 0

    def cached(self, sequence: SlowSequence) -> tuple[int, list[Table]]:
        """The pages of the longest prefix of which all groups of layers have the blocks that later tokens attend to,
        and those blocks."""
        shared: int | None = None
        for num_pages in range(self.most_begun_with(sequence), -1, -1):
            tables = [self.cached_table(sequence, number, num_pages) for number in range(len(self.layers))]
            lacks = [layers.has_states for layers, table in zip(self.layers, tables, strict=True) if table is None]
            if all(lacks) and shared is None:
                shared = num_pages
            if not lacks:
                sequence.num_shared = shared
                return num_pages, tables
        raise AssertionError("no block is lacking of no tokens")

    def most_begun_with(self, sequence: SlowSequence) -> int:
        """Pages that a sequence may begin with so that the others of its group can share what they need of it."""
        most = self.most_cached(sequence)
        if self.has_states and len(sequence.group.live) > 1:  # its states are shared before the last prompt token
            most = min(most, max(0, len(sequence.group.prompt) - 2) // self.config.block_size)
        elif any(layers.window for layers in self.layers) and len(sequence.group.live) > 1:  # others share its windows
            at_fork = min(len(sequence.group.prompt), *(len(other.token_ids) - 1 for other in sequence.group.live))
            most = min(most, at_fork // self.config.block_size)
        return most

    def cached_table(self, sequence: SlowSequence, number: int, num_pages: int) -> Table | None:
        if self.layers[number].has_states:
            found = [self.find(self.key_of(sequence, number, page)) for page in range(num_pages)][-1:]
            return None if None in found else found
        start = self.first_needed(self.layers[number], num_pages * self.config.block_size)
        places = range(start, num_pages * self.in_page(number))
        found = [self.find(self.key_of(sequence, number, index)) for index in places]
        return None if None in found else [None] * start + found

    def num_in_run(self, sequence: SlowSequence, known: int) -> int:
        """Leading pages whose names are cached. Those that were found before count while the last of them is."""
        if not known or self.find(self.key_of_page(sequence, known - 1)) is None:
            known = 0
        pages = range(known, self.most_cached(sequence))
        return known + sum(1 for _ in takewhile(lambda page: self.find(self.key_of_page(sequence, page)), pages))

    def cached_encoder(self, group: SlowGroup) -> Table:
        """All of an encoder's blocks, or none."""
        found: Table = []
        if group.encoder and self.config.prefix_caching:
            num_blocks = self.blocks_for(self.layers[0], len(group.encoder_tokens))
            found = [self.find(self.key_of(group.encoder, 0, index)) for index in range(num_blocks)]
        return [] if None in found else found

    def expected(self) -> set[Key]:
        """Names of pages that running sequences will compute."""
        return {
            self.key_of_page(other, page)
            for group in self.running
            for other in group.live
            for page in range(other.num_offered, other.num_expected)
        }

    def awaited(self, sequence: SlowSequence, num_cached: int) -> Key | None:
        """The name behind the cached ones, if its page is expected."""
        if num_cached >= self.most_cached(sequence):
            return None
        key = self.key_of_page(sequence, num_cached)
        return key if key in self.expected() else None

    def offer(self, sequence: SlowSequence, num_tokens: int) -> list[Block]:
        """Cache the full pages of computed tokens, unless their keys are cached already. Returns their blocks."""
        pool = "device" if sequence.device is not None else "host"
        tables, start = getattr(sequence, pool), sequence.num_offered
        end = num_tokens // self.config.block_size
        if sequence.is_encoder:  # whose last block never has more in it
            end = self.blocks_for(self.layers[0], num_tokens)
        if tables is None or not self.config.prefix_caching or end <= start:
            return []
        if self.is_withdrawn(sequence, start):
            sequence.num_expected = 0  # what is behind a withdrawn block is not found
            return []
        sequence.num_offered, offered = end, []
        for number, table in enumerate(tables):
            if self.layers[number].has_states:
                continue
            for index in range(start * self.in_page(number), min(len(table), end * self.in_page(number))):
                if table[index]:
                    self.name(table[index], self.key_of(sequence, number, index), pool)
                    offered.append(table[index])
        return offered

    def name(self, block: Block, key: Key | None, pool: str) -> None:
        if block.key is None and key:
            block.is_found = self.find(key, pool) is None
            block.key = key

    def reset_prefix_cache(self) -> int:
        """Returns the number of device blocks that were cached."""
        self.release_kept([*self.kept], is_sound=False)
        held = {pool: [block for table in self.tables(pool) for block in table if block] for pool in self.let_go}
        for sequence in self.sequences():
            sequence.is_stale = bool(sequence.device or sequence.host)
        found = {b for b in held["device"] + self.let_go["device"] if b.key and b.is_found}
        for block in held["device"] + held["host"]:
            block.key = None
        self.let_go = {"device": [], "host": []}
        return len(found)

    def fork(self, parent: SlowSequence, child: SlowSequence, num_tokens: int) -> None:
        pairs = zip(self.layers, parent.device, strict=True)
        child.device = [table[: self.blocks_for(layers, num_tokens)] for layers, table in pairs]
        child.computed = child.stored = num_tokens
        child.is_stale = parent.is_stale
        child.parent = parent
        child.num_offered = min(parent.num_offered, num_tokens // self.config.block_size)

    def planned(self, sequence: SlowSequence) -> int:
        """Tokens that the step computes of the sequence, as planned so far."""
        return sum(num_tokens for other, num_tokens, _ in self.plan if other is sequence)

    def written(self, sequence: SlowSequence, layers: LayerGroup, num_tokens: int) -> range:
        """The blocks that these tokens and drafts are written to, behind what the step has planned already."""
        start = (sequence.computed + self.planned(sequence)) // layers.room
        return range(start, self.entries_for(layers, sequence.computed + num_tokens))

    def num_new_blocks(
        self, chunks: list[tuple[SlowSequence, int]], moved: dict[SlowSequence, list[Table]] | None = None
    ) -> int:
        """Blocks to add, and a copy for every writer of a shared block but the last, tried on lists."""
        tables = {s: s.device or [] for s in self.sequences()} | (moved or {})
        tables = {s: [[*table] for table in its_tables] for s, its_tables in tables.items()}
        num_new = 0
        for sequence, num_tokens in chunks:
            for layers, table in zip(self.layers, tables[sequence], strict=True):
                if sequence.is_encoder:
                    continue  # it has all of its blocks
                for index in self.written(sequence, layers, num_tokens):
                    if index >= len(table):
                        table.append(Block())
                        num_new += 1
                    elif sum(table[index] in other for its_tables in tables.values() for other in its_tables) > 1:
                        table[index] = Block()
                        num_new += 1
        return num_new

    def append_slots(self, sequence: SlowSequence, num_tokens: int) -> int:
        """Returns the number of copies. An encoder's and planned tokens' blocks exist already."""
        num_copies = 0
        for layers, table in zip(self.layers, sequence.device, strict=True):
            if sequence.is_encoder:
                continue
            for index in self.written(sequence, layers, num_tokens):
                if index >= len(table):
                    table.append(self.new_block("device"))
                elif self.holders(table[index]) > 1:
                    table[index] = self.new_block("device")
                    num_copies += 1
                    if layers.has_states:
                        self.has_copied_states.append(sequence)
                elif not layers.has_states:
                    table[index].key = None
        return num_copies

    # ---- states, of which a sequence has one block in each group

    def due(self, sequence: SlowSequence) -> int:
        """Tokens up to where states are forked, or where they will be kept."""
        stops = [sequence.computed + sequence.uncomputed]
        if self.has_states and sequence.uncomputed > 1:
            if self.shares_states(sequence):
                stops.append(sequence.num_prompt_tokens - 1)
            stops.append(self.most_cached(sequence) * self.config.block_size)
            stops.append(min(sequence.num_shared, self.most_cached(sequence)) * self.config.block_size)
        return min([stop for stop in stops if stop > sequence.computed], default=sequence.computed) - sequence.computed

    def keep_states(self, sequence: SlowSequence) -> int:
        """Keep a sequence's states after a whole page for the cache, and let it go on with copies. Returns the number
        of copies."""
        page = self.config.block_size
        blocks = [table[0] for layers, table in zip(self.layers, sequence.device, strict=True) if layers.has_states]
        is_found, start = blocks[0].key is not None, sequence.computed
        if not is_found:
            is_place = start == self.most_cached(sequence) * page
            if start >= sequence.num_prompt_tokens and sequence.uncomputed <= 1:
                is_place = start // page % max(1, states.OUTPUT_SPACING // page) == 0
            is_place = is_place or start == sequence.num_shared * page
            is_place = is_place and start and start % page == 0 and self.config.prefix_caching
            if not is_place or any(other is sequence for other, _, _ in self.kept):
                return 0
        watermark = int(self.config.watermark * self.config.num_device_blocks)
        if self.num_free - len(blocks) < watermark:
            for block in blocks:
                block.key = None
            return 0
        if is_found:
            self.left += blocks
        else:
            self.kept.append((sequence, start // page, blocks))
        for layers, table in zip(self.layers, sequence.device, strict=True):
            if layers.has_states:
                table[0] = None  # held aside now
                table[0] = self.new_block("device")
        return len(blocks)

    def await_states(self, waiting: SlowSequence) -> tuple[int, Key | None]:
        """The pages of the longest prefix whose states another sequence will keep, which may be told to do so."""
        best, keeper, size = 0, None, self.config.block_size
        for other in [sequence for sequence, _, _ in self.kept] + [group.live[0] for group in self.running]:
            keeps = [num_pages for sequence, num_pages, _ in self.kept if sequence is other]
            if other.device is None or (other.uncomputed <= 1 and not keeps):
                continue
            common = self.num_common(waiting, other)
            stops = [other.num_shared, self.most_cached(other)] * (self.most_cached(other) > 0)
            if self.shares_states(other):
                stops.append((other.num_prompt_tokens - 1) / size)
            is_free = not other.num_shared or other.num_shared * size < other.computed
            is_ahead = other.computed + self.planned(other) <= common * size
            is_there = other.computed == common * size
            will_keep = common in stops if is_there else is_ahead and (is_free or common in stops)
            if common > best and (common in keeps or will_keep):
                best, keeper = common, other
        if keeper is None or best <= self.cached(waiting)[0]:
            return 0, None
        if not keeper.num_shared or keeper.num_shared * size < keeper.computed:
            keeper.num_shared = best
        return best, self.key_of_page(waiting, best - 1)

    def num_common(self, one: SlowSequence, other: SlowSequence) -> int:
        """Leading pages with the same tokens."""
        pages = range(min(self.most_cached(one), self.most_cached(other)))
        pairs = ((self.key_of_page(one, page), self.key_of_page(other, page)) for page in pages)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def shares_states(self, leader: SlowSequence) -> bool:
        """Whether followers will share the states before the last prompt token."""
        return any(other.device is None for other in leader.group.live)

    def let_states_go(self) -> None:
        """At the end of a step: those that were copied, and those with known tokens, which are found from now on."""
        left, self.left = self.left, []
        self.drop_blocks(left[::-1])
        self.release_known()

    def release_known(self) -> None:
        """Release states whose tokens are known."""
        self.release_kept([one for one in self.kept if one[0].stored >= one[1] * self.config.block_size])

    def release_kept(self, kept: list[tuple[SlowSequence, int, list[Block]]], *, is_sound: bool = True) -> None:
        for one in kept:
            sequence, num_pages, blocks = one
            self.kept.remove(one)
            is_offered = is_sound and sequence.stored >= num_pages * self.config.block_size
            numbers = [number for number, layers in enumerate(self.layers) if layers.has_states]
            if is_offered and not self.is_withdrawn(sequence, num_pages):
                for number, block in zip(numbers, blocks, strict=True):
                    self.name(block, self.key_of(sequence, number, num_pages - 1), "device")
            self.drop_blocks(blocks[::-1])
            if is_offered and num_pages * self.config.block_size > sequence.num_prompt_tokens:
                for block in self.free_states(sequence, sequence.kept_page or 0):
                    self.let_go["device"].remove(block)
                    block.key = None
                sequence.kept_page = num_pages

    def filled_blocks(self, sequence: SlowSequence, tables: list[Table]) -> list[Block]:
        """The blocks with tokens in them."""
        pairs = zip(self.layers, tables, strict=False)
        filled = [table[: self.blocks_for(layers, sequence.computed)] for layers, table in pairs]
        return [block for table in filled for block in table if block]

    def mode_for(self, group: SlowGroup) -> PreemptionMode:
        config = self.config
        tables = [table for s in group.live_and_encoder for table in s.device or ()]
        contents = {block.key or block for table in tables for block in table if block}
        num_taken = sum(self.find_content(content, "host") not in self.held("host") for content in contents)
        if config.preemption_mode is PreemptionMode.RECOMPUTE or num_taken > self.num_host_free:
            return PreemptionMode.RECOMPUTE
        copies, tokens = self.num_swap_copies(group), self.num_tokens_to_recompute(group)
        swap_speed, prefill_speed = config.swap_bytes_per_second, config.prefill_tokens_per_second
        swap = Fraction(copies * config.block_bytes, swap_speed) if swap_speed else inf
        recompute = Fraction(tokens, prefill_speed) if prefill_speed else inf if tokens else 0
        swaps = config.preemption_mode is PreemptionMode.SWAP or swap < recompute
        return PreemptionMode.SWAP if swaps else PreemptionMode.RECOMPUTE

    def find_content(self, content: Block | Key, pool: str) -> Block | None:
        return None if isinstance(content, Block) else self.find(content, pool)

    def num_swap_copies(self, group: SlowGroup) -> int:
        """Blocks to copy out that the host lacks, and those to copy back that no other group keeps."""
        num_copies, seen = 0, []
        for sequence in group.live_and_encoder:
            for block in self.filled_blocks(sequence, sequence.device or []):
                content = block.key or block
                if content not in seen:
                    seen.append(content)
                    num_copies += self.find_content(content, "host") is None
                    num_copies += self.find_content(content, "device") not in self.held("device", but_by=[group])
        return num_copies

    def num_tokens_to_recompute(self, group: SlowGroup) -> int:
        leader, *followers = group.live
        held, encoded = self.held("device", but_by=[group]), self.cached_encoder(group)

        def is_kept(number: int, num_pages: int) -> bool:
            """Whether others hold what tokens after these pages attend to. States are cached without a holder."""
            table = self.cached_table(leader, number, num_pages)
            return table is not None and (self.layers[number].has_states or {*table} <= held | {None})

        numbers = range(len(self.layers))
        pages = [n for n in range(self.most_begun_with(leader) + 1) if all(is_kept(number, n) for number in numbers)]
        kept = pages[-1] * self.config.block_size
        in_outputs = max(0, leader.computed - kept) + sum(max(0, f.computed - f.num_prompt_tokens) for f in followers)
        if group.encoder is None or (encoded and all(block in held for block in encoded)):
            return in_outputs
        return in_outputs + group.encoder.computed

    def num_blocks_back(self, group: SlowGroup, *, alone: bool) -> int:
        """Free blocks that a swapped group needs to return and go on, alone or now."""
        back: dict[SlowSequence, list[Table]] = {}
        arrived: dict[Block | Key, Block] = {}
        for sequence in group.live_and_encoder:
            if sequence.host is not None:
                back[sequence] = [[*table] for table in sequence.host]
                for table in back[sequence]:
                    for index, block in enumerate(table):
                        there = self.find(block.key) if block and not alone else None
                        table[index] = there or (block and arrived.setdefault(block.key or block, block))
        there_already = set() if alone else self.held("device")
        all_back = {block for tables in back.values() for table in tables for block in table}
        num_back = len(all_back - {None} - there_already)
        chunks = [(sequence, min(sequence.uncomputed, self.longest_chunk())) for sequence in back]
        if alone:
            others = {sequence: [] for sequence in self.sequences() if sequence not in back}
            return num_back + self.num_new_blocks(chunks, back | others)
        return num_back + self.num_new_blocks(chunks, back)

    def move(self, group: SlowGroup, *, to_host: bool) -> list[Block]:
        """Returns the targets of copied blocks: those with tokens that are not there already, each once."""
        source, target = ("device", "host") if to_host else ("host", "device")
        sequences = [sequence for sequence in group.live_and_encoder if getattr(sequence, source) is not None]
        for sequence in sequences:  # what is there is held before anything is given up for the rest
            there = [[block and self.find(block.key, target) for block in table] for table in getattr(sequence, source)]
            setattr(sequence, target, there)
            found = [block for table in there for block in table]
            self.let_go[target] = [block for block in self.let_go[target] if block not in found]
        copy_of: dict[Block, Block] = {}
        copies: list[Block] = []
        for number in range(len(self.layers)):
            for sequence in sequences:
                if number >= len(getattr(sequence, source)):
                    continue  # an encoder has one table
                filled = self.filled_blocks(sequence, getattr(sequence, source))
                table = getattr(sequence, target)[number]
                for index, block in enumerate(getattr(sequence, source)[number]):
                    if block and table[index] is None:
                        table[index] = self.find(block.key, target) or copy_of.get(block)
                    if block and table[index] is None:
                        table[index] = copy_of[block] = self.new_block(target)
                        self.name(copy_of[block], block.key, target)
                        copies += [copy_of[block]] if block in filled else []
        for number in range(len(self.layers)):
            for sequence in sequences:
                for table in getattr(sequence, source)[number : number + 1]:
                    self.drop_blocks(table, pool=source)
        for sequence in sequences:
            setattr(sequence, source, None)
            sequence.is_table_known = False
        return copies
