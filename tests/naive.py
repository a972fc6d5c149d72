"""MSA spelled out the slow way: fp64, whole S x Sk masks, Python loops and autograd.

The yardstick of tests/test_msa.py. It shares no code with `msa/` and none of its shortcuts: nothing is cut up
or recomputed, the selection sorts Python tuples, and every gradient is autograd's. Shapes as in the package:
q (B, S, H, D), k and v (B, Sk, Hkv, D), q_proxy (B, S, Hp, D), k_proxy (B, Sk, Hpk, D).
"""

import math

import torch


def places(S, block_size, q_block=None):
    """The place of each query of the call in the keys' sequence."""
    return [
        (t // block_size if q_block is None else int(q_block[t // block_size])) * block_size + t % block_size
        for t in range(S)
    ]


def first_block(b, t, block_size, doc_start_block=None):
    """The first key block of the document of query t."""
    return 0 if doc_start_block is None else int(doc_start_block[b][t // block_size])


def visible_mask(B, S, Sk, *, block_size, doc_start_block=None, q_block=None):
    """(B, S, Sk) bool: causal, and in the query's own document."""
    mask = torch.zeros(B, S, Sk, dtype=torch.bool)
    for b in range(B):
        for t, place in enumerate(places(S, block_size, q_block)):
            mask[b, t, first_block(b, t, block_size, doc_start_block) * block_size : place + 1] = True
    return mask


def select(q_proxy, k_proxy, *, top_k, scale=None, doc_start_block=None, q_block=None, block_size=128):
    """(B, S, Hp, k) int32, one query and proxy head at a time."""
    B, S, Hp, D = q_proxy.shape
    Hpk, slots = k_proxy.shape[2], top_k // block_size
    scale = 1 / math.sqrt(D) if scale is None else scale
    picked = torch.full((B, S, Hp, slots), -1, dtype=torch.int32)
    for b in range(B):
        for h in range(Hp):
            keys = k_proxy[b, :, h // (Hp // Hpk)].double()
            scores = ((q_proxy[b, :, h].double()[:, None] * keys[None]).sum(-1) * scale).tolist()
            for t, place in enumerate(places(S, block_size, q_block)):
                local = place // block_size
                ranked = []
                for block in range(first_block(b, t, block_size, doc_start_block), local):
                    row = scores[t][block * block_size : (block + 1) * block_size]
                    best = max((s for s in row if not math.isnan(s)), default=-math.inf)
                    ranked.append((-best, block))
                order = [local] + [block for _, block in sorted(ranked)]
                for slot, block in enumerate(order[:slots]):
                    picked[b, t, h, slot] = block
    return picked


def support_mask(block_indices, visible, *, block_size):
    """(B, S, Hp, Sk) bool: the visible tokens of the selected blocks."""
    B, S, Sk = visible.shape
    mask = torch.zeros(B, S, block_indices.shape[2], Sk, dtype=torch.bool)
    for b, t, h, slot in torch.nonzero(block_indices >= 0).tolist():
        block = int(block_indices[b, t, h, slot])
        mask[b, t, h, block * block_size : (block + 1) * block_size] = True
    return mask & visible[:, :, None]


def attend(q, k, v, mask, scale=None):
    """Softmax attention under mask (B, S, Hm, Sk), Hm | H: out (B, S, H, D), probabilities (B, S, H, Sk)."""
    H, Hkv, Hm = q.shape[2], k.shape[2], mask.shape[2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs, probs = [], []
    for h in range(H):
        kv = h // (H // Hkv)
        s = scale * torch.einsum("bid,bjd->bij", q[:, :, h].double(), k[:, :, kv].double())
        p = s.masked_fill(~mask[:, :, h // (H // Hm)], -math.inf).softmax(-1)
        outs.append(torch.einsum("bij,bjd->bid", p, v[:, :, kv].double()))
        probs.append(p)
    return torch.stack(outs, 2), torch.stack(probs, 2)


def teacher_of(probs, Hp):
    """(B, S, Hp, Sk): the mean of each group's probabilities, detached."""
    B, S, H, Sk = probs.shape
    return probs.detach().reshape(B, S, Hp, H // Hp, Sk).mean(3)


def kl_terms(q_proxy, k_proxy, teacher, mask, scale=None):
    """(B, S, Hp): KL(teacher || student) of each query and proxy head, differentiable in the proxy."""
    Hp, Hpk = q_proxy.shape[2], k_proxy.shape[2]
    scale = 1 / math.sqrt(q_proxy.shape[-1]) if scale is None else scale
    terms = []
    for h in range(Hp):
        m, t = mask[:, :, h], teacher[:, :, h]
        s = scale * torch.einsum(
            "bid,bjd->bij", q_proxy[:, :, h].double(), k_proxy[:, :, h // (Hp // Hpk)].double()
        )
        log_student = s.masked_fill(~m, -math.inf).log_softmax(-1).masked_fill(~m, 0.0)
        terms.append((torch.xlogy(t, t) - t * log_student).sum(-1))
    return torch.stack(terms, 2)


def dense(q, k, v, *, scale=None, doc_start_block=None, q_block=None, block_size=128):
    B, S, Sk = q.shape[0], q.shape[1], k.shape[1]
    visible = visible_mask(B, S, Sk, block_size=block_size, doc_start_block=doc_start_block, q_block=q_block)
    return attend(q, k, v, visible[:, :, None], scale)[0]


def warmup(q, k, v, q_proxy, k_proxy, *, scale=None, doc_start_block=None, q_block=None, block_size=128):
    """out, and the KL sum of each proxy head (Hp)."""
    B, S, Sk, Hp = q.shape[0], q.shape[1], k.shape[1], q_proxy.shape[2]
    visible = visible_mask(B, S, Sk, block_size=block_size, doc_start_block=doc_start_block, q_block=q_block)
    mask = visible[:, :, None].expand(B, S, Hp, Sk)
    out, probs = attend(q, k, v, mask, scale)
    return out, kl_terms(q_proxy, k_proxy, teacher_of(probs, Hp), mask, scale).sum((0, 1))


def sparse(
    q,
    k,
    v,
    q_proxy=None,
    k_proxy=None,
    *,
    top_k=None,
    scale=None,
    doc_start_block=None,
    q_block=None,
    block_indices=None,
    block_size=128,
):
    """out, and the KL sum of each proxy head (Hp), or None without a proxy."""
    B, S, Sk = q.shape[0], q.shape[1], k.shape[1]
    where = dict(doc_start_block=doc_start_block, q_block=q_block, block_size=block_size)
    if block_indices is None:
        block_indices = select(q_proxy.detach(), k_proxy.detach(), top_k=top_k, scale=scale, **where)
    mask = support_mask(block_indices, visible_mask(B, S, Sk, **where), block_size=block_size)
    out, probs = attend(q, k, v, mask, scale)
    if q_proxy is None:
        return out, None
    return out, kl_terms(q_proxy, k_proxy, teacher_of(probs, mask.shape[2]), mask, scale).sum((0, 1))


def recall(
    q,
    k,
    q_proxy,
    k_proxy,
    block_indices,
    rows,
    *,
    scale=None,
    doc_start_block=None,
    q_block=None,
    block_size=128,
):
    """What msa.metrics.attention_recall reports, by loops over batch, row and head."""
    B, S, Sk, Hp, slots = q.shape[0], q.shape[1], k.shape[1], q_proxy.shape[2], block_indices.shape[3]
    visible = visible_mask(B, S, Sk, block_size=block_size, doc_start_block=doc_start_block, q_block=q_block)
    mask = visible[:, :, None].expand(B, S, Hp, Sk)
    _, probs = attend(q, k, k, mask, scale)
    teacher = teacher_of(probs, Hp)
    kl = kl_terms(q_proxy, k_proxy, teacher, mask, scale)
    place = places(S, block_size, q_block)
    n, hits, held, best = 0, [0.0] * Hp, [0.0] * Hp, [0.0] * Hp
    for b in range(B):
        for t in rows.tolist():
            blocks = range(first_block(b, t, block_size, doc_start_block), place[t] // block_size + 1)
            if len(blocks) <= slots:
                continue
            n += 1
            for h in range(Hp):
                mass = {
                    c: teacher[b, t, h, c * block_size : (c + 1) * block_size].sum().item() for c in blocks
                }
                true = sorted(blocks, key=lambda c: (-mass[c], c))[:slots]
                picked = [c for c in block_indices[b, t, h].tolist() if c >= 0]
                hits[h] += len(set(true) & set(picked)) / slots
                held[h] += sum(mass[c] for c in picked)
                best[h] += sum(mass[c] for c in true)

    def mean(x):
        return (
            torch.tensor(x, dtype=torch.float64) / n
            if n
            else torch.full((Hp,), math.nan, dtype=torch.float64)
        )

    full = kl[:, rows].mean((0, 1))
    return dict(
        block_recall=mean(hits), score_recall=mean(held), score_best=mean(best), kl_full=full, n_rows=n
    )
