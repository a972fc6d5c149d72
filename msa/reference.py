"""MiniMax Sparse Attention in plain PyTorch: any device, dtype, block size and head dim.

The mathematics of arXiv 2606.13392, section 3, as the kernels' tests take it: rows of queries go
through in chunks, each against all keys that its queries may see, with what was not selected
masked out; backward computes the chunks again. So memory is O(chunk * Sk), and dense, warmup and
sparse are one path. Products and sums are in fp32, in fp64 for fp64 inputs.

Nothing here checks shapes (`msa/__init__.py` does); values that would break the meaning of the
inputs (`check_places`, `check_block_indices`) are looked at here, outside what torch.compile traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}  # scores alive at a time: 8 MiB, 0.5 GiB
CACHE_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}  # of keys or values copied at a time when decoding
RANKED_BLOCKS = 512  # sorted at a time when decoding
HALF = (torch.bfloat16, torch.float16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Rows:
    """A chunk of the call's queries and the keys [lo, hi) that any of them may see."""

    index: slice  # the queries of the call
    place: Tensor  # (c,) places among the keys
    first: Tensor  # (B, c) place where each query's document starts
    lo: int
    hi: int

    def visible(self) -> Tensor:
        """(B, 1, c, hi - lo), True where the query may see the key."""
        keys = torch.arange(self.lo, self.hi, device=self.place.device)
        visible = (keys <= self.place[:, None]) & (keys >= self.first[:, :, None])
        return visible[:, None]


def query_places(n_queries: int, q_block: Tensor | None, block_size: int, device: torch.device) -> Tensor:
    """(S,) place of each query among the keys."""
    place = torch.arange(n_queries, device=device)
    if q_block is not None:
        place = q_block.long()[place // block_size] * block_size + place % block_size
    return place


def check_places(
    n_queries: int, n_keys: int, q_block: Tensor | None, doc_start_block: Tensor | None, block_size: int
) -> None:
    """ValueError where `q_block` or `doc_start_block` hold values that have no meaning."""
    n_blocks = -(-n_queries // block_size)
    blocks = range(n_blocks) if q_block is None else q_block.tolist()
    if q_block is not None:
        if len(set(blocks)) != n_blocks:
            raise ValueError(f"q_block: entries must be distinct, got {blocks}")
        last_rows = n_queries - (n_blocks - 1) * block_size
        for i, block in enumerate(blocks):
            end = block * block_size + (last_rows if i == n_blocks - 1 else block_size)
            if block < 0 or end > n_keys:
                raise ValueError(
                    f"q_block: entry {i} is {block}, which puts queries at places "
                    f"{block * block_size}..{end - 1}; allowed are 0..{n_keys - 1} (k has {n_keys} keys)"
                )
    if doc_start_block is not None:
        limit = torch.tensor(blocks, device=doc_start_block.device)
        if bool(((doc_start_block < 0) | (doc_start_block > limit)).any()):
            raise ValueError(
                "doc_start_block: each entry must lie between 0 and its query block's own number "
                f"among the keys, got {doc_start_block.tolist()} for query blocks {list(blocks)}"
            )


def check_block_indices(
    block_indices: Tensor, q_block: Tensor | None, doc_start_block: Tensor | None, block_size: int
) -> None:
    """ValueError where a selection from outside is not local-first, causal, distinct, of one document."""
    _, n_queries, _, slots = block_indices.shape
    local = query_places(n_queries, q_block, block_size, block_indices.device) // block_size  # (S,)
    local = local[None, :, None, None]
    if bool((block_indices[..., :1] != local).any()):
        raise ValueError("block_indices: slot 0 must hold the block that holds the query itself")
    later = block_indices[..., 1:]
    if bool((later < -1).any()) or bool((later >= local).any()):
        raise ValueError(
            "block_indices: slots 1.. must be -1 or the number of a block strictly before the query's own"
        )
    if doc_start_block is not None:
        first = doc_start_block.repeat_interleave(block_size, 1)[:, :n_queries, None, None]
        if bool(((later >= 0) & (later < first)).any()):
            raise ValueError("block_indices: a slot names a block of another document (see doc_start_block)")
    ordered = later.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise ValueError("block_indices: the blocks of a query must be distinct")


def iterate_rows(
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    q_block: Tensor | None,
    doc_start_block: Tensor | None,
    block_size: int,
    device: torch.device,
) -> Iterator[Rows]:
    budget = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    chunk = min(n_queries, max(1, budget // (batch * heads * n_keys)))
    chunk = -(-chunk // block_size) * block_size if chunk >= block_size else chunk
    place = query_places(n_queries, q_block, block_size, device)
    first = torch.zeros(1, 1, dtype=torch.long, device=device)
    starts = None
    if doc_start_block is not None:
        first = (doc_start_block.long() * block_size).repeat_interleave(block_size, 1)  # (B, >= S)
        starts = doc_start_block.amin(0).tolist()
    blocks = None if q_block is None else q_block.tolist()
    for begin in range(0, n_queries, chunk):
        end = min(begin + chunk, n_queries)
        span = range(begin // block_size, (end - 1) // block_size + 1)
        hi = end if blocks is None else min(n_keys, max(blocks[i] + 1 for i in span) * block_size)
        lo = 0 if starts is None else min(starts[i] for i in span) * block_size
        rows = first if doc_start_block is None else first[:, begin:end]
        yield Rows(slice(begin, end), place[begin:end], rows, lo, hi)


def heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) -> (B, H, S, D), contiguous, in the dtype that products are summed in."""
    return x.transpose(1, 2).to(accumulate_dtype(x.dtype), memory_format=torch.contiguous_format)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q (B, H, c, D), k (B, Hk, n, D) with H a multiple of Hk -> q k^T (B, H, c, n)."""
    batch, heads, rows, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, dim)
    return torch.matmul(grouped, k.transpose(-1, -2)).view(batch, heads, rows, k.shape[2])


def reduce_heads(weights: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """weights (B, H, c, n), x (B, H, c, D) -> their product, summed over a key head's rows (B, Hk, n, D)."""
    batch, _, _, n_keys = weights.shape
    weights = weights.reshape(batch, kv_heads, -1, n_keys)
    return torch.matmul(weights.transpose(-1, -2), x.reshape(batch, kv_heads, -1, x.shape[-1]))


def expand_heads(weights: Tensor, v: Tensor) -> Tensor:
    """weights (B, H, c, n), v (B, Hk, n, D) -> weights v (B, H, c, D)."""
    batch, heads, rows, n_keys = weights.shape
    return torch.matmul(weights.reshape(batch, v.shape[1], -1, n_keys), v).view(batch, heads, rows, -1)


def rank_blocks(block_scores: Tensor, local: Tensor, first: Tensor, slots: int) -> Tensor:
    """Eq. 7: the local block in slot 0, then earlier blocks of the document by descending score.

    block_scores (B, Hp, c, n) of blocks 0..n-1; local, first (B or 1, c): the query's own block and
    its document's first. Equal scores go to the lower block (-0 equals +0); -inf ranks last but is picked
    while slots remain. Returns (B, c, Hp, slots) int32, -1 where blocks run out.
    """
    batch, heads, rows, n_blocks = block_scores.shape
    blocks = torch.arange(n_blocks, device=block_scores.device)
    eligible = (blocks < local[..., None]) & (blocks >= first[..., None])  # (B or 1, c, n)
    eligible = eligible[:, None].expand(batch, heads, rows, n_blocks)
    ranked = (block_scores + 0.0).masked_fill_(~eligible, -math.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    # -inf among the eligible would tie with what is not eligible: a second stable sort parts them.
    kept, by_eligible = eligible.gather(-1, order).to(torch.int8).sort(dim=-1, descending=True, stable=True)
    picked = order.gather(-1, by_eligible).masked_fill_(kept == 0, -1)[..., : slots - 1]
    out = torch.full((batch, heads, rows, slots), -1, dtype=torch.int32, device=block_scores.device)
    out[..., 0] = local[:, None].expand(batch, heads, rows)
    out[..., 1 : 1 + picked.shape[-1]] = picked
    return out.transpose(1, 2)


def max_per_block(s: Tensor, block_size: int) -> Tensor:
    """Eq. 6: (..., n * block_size) scores -> (..., n) block scores; a NaN ranks as -inf."""
    blocks = s.unflatten(-1, (-1, block_size)).amax(-1)
    if bool(blocks.isnan().any()):  # amax hands on a NaN, and its block would lose its other tokens
        blocks = s.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        blocks = blocks.unflatten(-1, (-1, block_size)).amax(-1)
    return blocks


def select(
    q_proxy: Tensor,
    k_proxy: Tensor,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    slots: int,
    scale: float,
    block_size: int,
) -> Tensor:
    """Eq. 6 and 7: block_indices (B, S, Hp, slots) int32."""
    batch, n_queries, heads, _ = q_proxy.shape
    n_keys = k_proxy.shape[1]
    check_places(n_queries, n_keys, q_block, doc_start_block, block_size)
    queries, keys = heads_first(q_proxy), heads_first(k_proxy)
    out = torch.empty(batch, n_queries, heads, slots, dtype=torch.int32, device=q_proxy.device)
    for rows in iterate_rows(
        batch, heads, n_queries, n_keys, q_block, doc_start_block, block_size, q_proxy.device
    ):
        # Only blocks strictly before the query's own are scored, and those are visible as a whole.
        n_full = (rows.hi - 1) // block_size
        s = scores(queries[:, :, rows.index], keys[:, :, : n_full * block_size])
        local, first = rows.place[None] // block_size, rows.first // block_size
        # Scaled after the max, which commutes with it.
        out[:, rows.index] = rank_blocks(max_per_block(s, block_size) * scale, local, first, slots)
    return out


def selected_tokens(block_indices: Tensor, rows: Rows, block_size: int) -> Tensor:
    """(B, Hp, c, hi - lo), True where the key lies in a block that the query selected."""
    chosen = block_indices[:, rows.index].transpose(1, 2).long()  # (B, Hp, c, k)
    n_blocks = -(-rows.hi // block_size)
    chosen = chosen.masked_fill(chosen < 0, n_blocks)  # -1 falls into a column that is cut off
    blocks = torch.zeros(*chosen.shape[:3], n_blocks + 1, dtype=torch.bool, device=chosen.device)
    blocks.scatter_(-1, chosen, True)
    return blocks[..., :n_blocks].repeat_interleave(block_size, -1)[..., rows.lo : rows.hi]


def support(block_indices: Tensor | None, rows: Rows, block_size: int) -> Tensor:
    """The tokens that a query attends to: (B, Hp or 1, c, hi - lo)."""
    if block_indices is None:
        return rows.visible()
    return selected_tokens(block_indices, rows, block_size) & rows.visible()


def mask_scores(s: Tensor, tokens: Tensor) -> Tensor:
    """s (B, H, c, n), tokens (B, Hp or 1, c, n), H a multiple of Hp: -inf outside tokens, in place."""
    grouped = s.unflatten(1, (tokens.shape[1], -1))
    grouped.masked_fill_(~tokens[:, :, None], -math.inf)
    return s


def exponentiate(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (..., n) -> (softmax times its sum, in place of s; that sum (..., 1); the logsumexp (...))."""
    top = s.amax(-1, keepdim=True)
    p = s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    return p, total, (top + total.log()).squeeze(-1)


def kl_per_head(teacher: Tensor, log_student: Tensor) -> Tensor:
    """Eq. 10 before its mean: sum over batch and rows of KL(teacher || student) (Hp,) fp64.

    teacher, log_student (B, Hp, c, n). A token that the teacher gives nothing adds nothing, and
    log_student is -inf outside the support.
    """
    cross = teacher * log_student.masked_fill(teacher == 0, 0.0)
    return (torch.xlogy(teacher, teacher) - cross).sum((0, 2, 3), dtype=torch.float64)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    scale: float,
    block_size: int,
    materialize_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eq. 8 and, if materialize_kl, eq. 9 and 10: (out, kl, lse (B, H, S), lse_proxy (B, Hp, S) or empty)."""
    batch, n_queries, heads, _ = q.shape
    n_keys, kv_heads = k.shape[1:3]
    check_places(n_queries, n_keys, q_block, doc_start_block, block_size)
    queries, keys, values = heads_first(q) * scale, heads_first(k), heads_first(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = queries.new_empty(batch, heads, n_queries)
    lse_proxy = queries.new_empty(0)
    if q_proxy is not None:
        proxy_queries, proxy_keys = heads_first(q_proxy) * scale, heads_first(k_proxy)
        lse_proxy = queries.new_empty(batch, q_proxy.shape[2], n_queries)
    kl = torch.zeros((), dtype=torch.float64, device=q.device)
    for rows in iterate_rows(batch, heads, n_queries, n_keys, q_block, doc_start_block, block_size, q.device):
        span = slice(rows.lo, rows.hi)
        tokens = support(block_indices, rows, block_size)
        s = mask_scores(scores(queries[:, :, rows.index], keys[:, :, span]), tokens)
        p, total, lse[:, :, rows.index] = exponentiate(s)
        out[:, rows.index] = expand_heads(p, values[:, :, span]).div_(total).transpose(1, 2)
        if q_proxy is not None:
            s = mask_scores(scores(proxy_queries[:, :, rows.index], proxy_keys[:, :, span]), tokens)
            lse_proxy[:, :, rows.index] = s.logsumexp(-1)
            if materialize_kl:
                teacher = p.div_(total).unflatten(1, (q_proxy.shape[2], -1)).mean(2)
                kl += kl_per_head(teacher, s - lse_proxy[:, :, rows.index, None]).sum()
    return out, kl.to(lse.dtype), lse, lse_proxy


def backward(
    grad_out: Tensor | None,
    grad_kl: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    block_indices: Tensor | None,
    doc_start_block: Tensor | None,
    q_block: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_proxy: Tensor,
    scale: float,
    block_size: int,
    need_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dq_proxy, dk_proxy, KL sum per head (Hp,)).

    The first three are empty where no grad_out arrived, the next two where no grad_kl did, and the KL sum,
    computed where need_kl asks for it, without a proxy.
    """
    batch, n_queries, heads, _ = q.shape
    n_keys, kv_heads = k.shape[1:3]
    queries, keys, values = heads_first(q) * scale, heads_first(k), heads_first(v)
    dq, dk, dv, dq_proxy, dk_proxy = (queries.new_empty(0) for _ in range(5))
    kl = torch.zeros(0, dtype=torch.float64, device=q.device)
    main, proxy = grad_out is not None, q_proxy is not None and (grad_kl is not None or need_kl)
    if main:
        grads = heads_first(grad_out)
        delta = (grads * heads_first(out)).sum(-1, keepdim=True)  # (B, H, S, 1)
        dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    if proxy:
        proxy_heads, proxy_kv_heads = q_proxy.shape[2], k_proxy.shape[2]
        proxy_queries, proxy_keys = heads_first(q_proxy) * scale, heads_first(k_proxy)
        kl = torch.zeros(proxy_heads, dtype=torch.float64, device=q.device)
        if grad_kl is not None:
            dq_proxy, dk_proxy = torch.empty_like(proxy_queries), torch.zeros_like(proxy_keys)
    for rows in iterate_rows(batch, heads, n_queries, n_keys, q_block, doc_start_block, block_size, q.device):
        at, span = rows.index, slice(rows.lo, rows.hi)
        tokens = support(block_indices, rows, block_size)
        s = mask_scores(scores(queries[:, :, at], keys[:, :, span]), tokens)
        p = s.sub_(lse[:, :, at, None]).exp_()
        if proxy:
            teacher = p.unflatten(1, (proxy_heads, -1)).mean(2)
            s = mask_scores(scores(proxy_queries[:, :, at], proxy_keys[:, :, span]), tokens)
            log_student = s.sub_(lse_proxy[:, :, at, None])
            if need_kl:
                kl += kl_per_head(teacher, log_student)
            if grad_kl is not None:
                ds = log_student.exp_().sub_(teacher)
                dq_proxy[:, :, at] = expand_heads(ds, proxy_keys[:, :, span])
                dk_proxy[:, :, span] += reduce_heads(ds, proxy_queries[:, :, at], proxy_kv_heads)
        if main:
            dv[:, :, span] += reduce_heads(p, grads[:, :, at], kv_heads)
            ds = scores(grads[:, :, at], values[:, :, span]).sub_(delta[:, :, at]).mul_(p)
            dq[:, :, at] = expand_heads(ds, keys[:, :, span])
            dk[:, :, span] += reduce_heads(ds, queries[:, :, at], kv_heads)

    def like(grad: Tensor, x: Tensor, factor: float | Tensor) -> Tensor:
        # The factor of the KL is tiny: it is applied before the result is rounded, after the products.
        return (grad * factor).transpose(1, 2).to(x.dtype).contiguous()

    if main:
        dq, dk, dv = like(dq, q, scale), like(dk, k, 1.0), like(dv, v, 1.0)  # dk's queries carry the scale
    if proxy and grad_kl is not None:
        factor = grad_kl.to(lse.dtype)
        dq_proxy, dk_proxy = like(dq_proxy, q_proxy, factor * scale), like(dk_proxy, k_proxy, factor)
    return dq, dk, dv, dq_proxy, dk_proxy, kl.to(lse.dtype)


def multiplies_as_it_is(x: Tensor) -> bool:
    """Whether `multiply` takes x without a copy of it in another dtype."""
    return x.dtype == accumulate_dtype(x.dtype) or (x.is_cuda and x.dtype in HALF)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (B, m, d) b (B, d, n), summed and returned in `accumulate_dtype(b.dtype)`."""
    if b.is_cuda and b.dtype in HALF:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)  # products of two halves are exact
    dtype = accumulate_dtype(b.dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))


def cache_chunks(x: Tensor) -> Iterator[slice]:
    """The keys of x (B, n, D), as many at a time as may be copied."""
    batch, n_keys, dim = x.shape
    step = max(1, CACHE_ELEMENTS.get(x.device.type, CACHE_ELEMENTS["cpu"]) // (batch * dim))
    for begin in range(0, n_keys, step):
        yield slice(begin, min(begin + step, n_keys))


def multiply_keys(q: Tensor, keys: Tensor) -> Tensor:
    """q (B, G, D), the keys of one head (B, n, D) -> q keys^T (B, G, n)."""
    if multiplies_as_it_is(keys):
        return multiply(q, keys.transpose(1, 2))
    out = q.new_empty(*q.shape[:2], keys.shape[1], dtype=accumulate_dtype(keys.dtype))
    for at in cache_chunks(keys):
        out[..., at] = multiply(q, keys[:, at].transpose(1, 2))
    return out


def multiply_values(p: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """p (B, G, n), 0 where hidden (B, n), and the values of one head (B, n, D) -> p values (B, G, D)."""
    out = 0.0
    for at in cache_chunks(values):
        # A cache's unused end may hold anything, and 0 times NaN is NaN.
        part = values[:, at].masked_fill(hidden[:, at, None], 0.0)
        out = out + multiply(p[..., at], part)
    return out


def best_earlier_blocks(block_scores: Tensor, local: Tensor, count: int) -> Tensor:
    """What `rank_blocks` puts behind the local block, for one query a sequence, without waiting for the GPU.

    block_scores (B, Hp, n), the query's own block local (B, 1, 1). Returns (B, Hp, min(count, n)), -1 where
    blocks run out. The best of a long row are the best of the best of its pieces: a GPU sorts short rows in
    one kernel.
    """
    n_blocks = block_scores.shape[-1]
    eligible = torch.arange(n_blocks, device=local.device) < local
    ranked = (block_scores + 0.0).masked_fill_(~eligible, -math.inf)  # -0 equals +0
    # Blocks that are not eligible come last, so that a stable order keeps them behind an eligible -inf.
    if n_blocks > RANKED_BLOCKS:
        ranked = pad(ranked, (0, -n_blocks % RANKED_BLOCKS), value=-math.inf)
        ranked, blocks = ranked.unflatten(-1, (-1, RANKED_BLOCKS)).sort(dim=-1, descending=True, stable=True)
        blocks = blocks + torch.arange(0, n_blocks, RANKED_BLOCKS, device=local.device)[:, None]
        ranked, blocks = (x[..., :count].flatten(2) for x in (ranked, blocks))
        order = ranked.sort(dim=-1, descending=True, stable=True).indices
        picked = blocks.gather(-1, order[..., :count])
    else:
        picked = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return picked.masked_fill(picked >= local, -1)


def decode_selection(
    q_proxy: Tensor, k_proxy: Tensor, place: Tensor, slots: int, scale: float, block_size: int
) -> Tensor:
    """Eq. 6 and 7 for one query a sequence: (B, Hp, at most slots), as `select`'s where there are blocks."""
    n_full = (k_proxy.shape[1] - 1) // block_size  # only blocks before the query's own are scored
    keys = k_proxy[:, : n_full * block_size].unbind(2)
    block_scores = []
    for queries, head_keys in zip(q_proxy[:, 0].chunk(len(keys), 1), keys, strict=True):
        s = multiply_keys(queries, head_keys)
        s = s.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)  # amax would hand on a NaN
        block_scores.append(s.unflatten(-1, (-1, block_size)).amax(-1))
    local = (place // block_size)[:, None, None]
    earlier = best_earlier_blocks(torch.cat(block_scores, 1) * scale, local, slots - 1)
    return torch.cat([local.expand(-1, q_proxy.shape[2], 1), earlier], -1)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    lengths: Tensor,
    slots: int | None,
    scale: float,
    block_size: int,
) -> Tensor:
    """One query a sequence, at place lengths - 1: out (B, 1, H, D). `slots` None attends densely.

    k, v and k_proxy are views of a cache, so nothing is made of all of them: dense attention copies V a chunk
    at a time, sparse attention reads k_proxy once and touches the selected blocks of K and V. No shape
    depends on data, and nothing waits for the GPU.
    """
    batch, _, heads, dim = q.shape
    n_keys, kv_heads = k.shape[1:3]
    place = lengths.long().to(q.device) - 1  # (B,)
    dtype = accumulate_dtype(q.dtype)
    if slots is None:
        hidden = torch.arange(n_keys, device=q.device) > place[:, None]  # (B, n)
        out = []
        for head, queries in enumerate(q[:, 0].chunk(kv_heads, 1)):
            s = multiply_keys(queries, k[:, :, head]).mul_(scale).masked_fill_(hidden[:, None], -math.inf)
            p, total, _ = exponentiate(s)
            out.append(multiply_values(p, v[:, :, head], hidden).div_(total))
        return torch.cat(out, 1)[:, None].to(q.dtype)
    groups = q_proxy.shape[2]
    chosen = decode_selection(q_proxy, k_proxy, place, slots, scale, block_size)
    token = chosen[..., None] * block_size + torch.arange(block_size, device=q.device)
    visible = ((chosen[..., None] >= 0) & (token <= place[:, None, None, None])).flatten(2)  # (B, Hp, n)
    token = token.flatten(2).clamp(0, n_keys - 1)
    rows = torch.arange(batch, device=q.device)[:, None, None]
    kv_head = (torch.arange(groups, device=q.device) * kv_heads // groups)[:, None]
    keys, values = k[rows, token, kv_head].to(dtype), v[rows, token, kv_head].to(dtype)  # (B, Hp, n, D)
    s = mask_scores(scores(q.to(dtype).view(batch, heads, 1, dim) * scale, keys), visible[:, :, None])
    values = values.masked_fill(~visible[..., None], 0.0)
    p, total, _ = exponentiate(s)
    return (expand_heads(p, values) / total).view(batch, 1, heads, dim).to(q.dtype)
