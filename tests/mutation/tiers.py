"""Bugs to plant in the tier below the device."""

from __future__ import annotations

from tests.mutation.mutant import mutant

TIER, FUZZ, ENGINE = "tests/offload/test_tier.py", "tests/offload/test_tier_fuzz.py", "tests/offload/test_engine.py"
MATRIX, RANKS = "tests/test_x_matrix_tiers.py", "tests/offload/test_ranks.py"

TIERS = (
    mutant(
        "tier-kv-without-state", "KV comes up with its state, or not at all", "weft/offload/index.py",
        "state if self._has_states else", "state if not self._states.capacity else", TIER, FUZZ,
    ),
    mutant(
        "tier-state-without-kv", "a state comes up with all KV before it, or not at all", "weft/offload/index.py",
        "if entry is None:\n                break\n", "if entry is None:\n                continue\n", TIER, FUZZ,
    ),
    mutant(
        "tier-salt-ignored", "nothing of one salt is found with another", "weft/offload/keys.py",
        'text = f"{fingerprint}\\n" if salt is None else f"{fingerprint}\\nsalt {salt}"', "text = fingerprint", TIER,
    ),
    mutant(
        "tier-no-pin-while-evicting", "making room for a restore evicts nothing that it reads",
        "weft/offload/restores.py", "        self.tier.pin(entries)  #", "        #", FUZZ, TIER,
    ),
    mutant(
        "tier-tail-page-lost", "a state comes with the KV of its partial page", "weft/offload/restores.py",
        "lease.pages[-1] if has_tail else 0", "0", FUZZ, MATRIX,
    ),
    mutant(
        "tier-keeps-nan", "what NaN has touched is dropped in both tiers", "weft/cache/manager.py",
        "            self.tier.forget(tokens[:fed], lease.salt)", "            pass", TIER,
    ),
    mutant(
        "tier-keeps-broken-stores", "what a broken step should have stored is dropped", "weft/offload/restores.py",
        "            lost.update(self.tier.broke(transfer.number))", "            pass", TIER,
    ),
    mutant(
        "tier-stores-too-late", "evicted pages are read before the step writes to them", "weft/runner/step_runner.py",
        "        if self.transfers is not None:\n            self.transfers.begin(scheduler_output)\n", "", ENGINE,
    ),
    mutant(
        "tier-stores-after-copies", "evicted states are read before forks write to their slots",
        "weft/runner/step_runner.py",
        "        self.prepare(scheduler_output)\n        if not scheduler_output.requests",
        "        self.prepare(scheduler_output)\n        if self.transfers is not None:\n"
        "            self.transfers.begin(scheduler_output)\n        if not scheduler_output.requests", MATRIX,
    ),
    mutant(
        "tier-admits-before-the-end", "a prefix enters the tree when its last copy is done", "weft/offload/restores.py",
        "if not a.outstanding and (", "if (", FUZZ,
    ),
    mutant(
        "tier-last-token-twice", "at least one token of a restored prompt is computed", "weft/offload/index.py",
        "self._size, len(keys.tokens) - 1\n", "self._size, len(keys.tokens)\n", TIER, FUZZ,
    ),
    mutant(
        "tier-checksum-unread", "changed content is rejected", "weft/offload/disk.py",
        'if zlib.crc32(content) != header["checksum"]:', "if False:", "tests/offload/test_disk.py",
    ),
    mutant(
        "tier-foreign-file", "a file of another engine or entry is rejected", "weft/offload/disk.py",
        'if (header["name"], header["fingerprint"]) != (name, fingerprint):', "if False:", "tests/offload/test_disk.py",
    ),
    mutant(
        "tier-uses-rejected", "what could not be read is not used", "weft/offload/loads.py",
        "tier.end_loading(entry, keep=not reason)", "tier.end_loading(entry, keep=True)", "tests/offload/test_disk.py",
    ),
    mutant(
        "tier-writes-in-place", "a crash leaves whole files only", "weft/offload/disk.py",
        'temporary = path.with_name(f"{name}.{os.getpid()}{TEMPORARY}")', "temporary = path",
        "tests/offload/test_disk.py",
    ),
    mutant(
        "tier-one-rank-suffices", "an entry is read when every rank has read its share", "weft/runner/file_results.py",
        "if count + 1 == self._tp.size:", "if True:", RANKS,
    ),
    mutant(
        "tier-lost-share", "an entry that a rank lacks is no entry", "weft/offload/disk_tier.py",
        "whole = set(first).intersection(*others)", "whole = set(first)", RANKS,
    ),
    mutant(
        "tier-late-rank", "a rank restores what its own copies have stored", "weft/runner/host_link.py",
        "        for event in earlier:\n            self._up.wait_event(event)\n", "",
        "tests/offload/test_host_link.py",
    ),
    mutant(
        "tier-shares-alike", "a rank reads its own share alone", "weft/offload/disk.py",
        'return fingerprint if num_ranks == 1 else f"{fingerprint}-{rank}of{num_ranks}"', "return fingerprint", RANKS,
    ),
    mutant(
        "tier-unpins-early", "a restore keeps the places that it has yet to read", "weft/offload/restores.py",
        "            self.tier.unpin(entries)\n            self._confirmed",
        "            self.tier.unpin(_entries(active.below))\n            self._confirmed", TIER, FUZZ,
    ),
    mutant(
        "tier-split-keys", "a split node keeps the keys of its own pages", "weft/cache/radix_tree.py",
        "node.page_keys[:num_keys], node.page_keys[num_keys:]", "node.page_keys[num_keys:], node.page_keys[:num_keys]",
        FUZZ,
    ),
)  # fmt: skip
