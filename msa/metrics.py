"""How good a selection is: block recall, score recall and the full-support KL, on sampled query rows.

Both recalls are arXiv 2606.13392's measures of the proxy. The cost is rows * Sk, not S * Sk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msa import reference


@torch.no_grad()
def attention_recall(
    q: Tensor,
    k: Tensor,
    q_proxy: Tensor,
    k_proxy: Tensor,
    block_indices: Tensor,
    rows: Tensor,
    *,
    scale: float | None = None,
    doc_start_block: Tensor | None = None,
    q_block: Tensor | None = None,
    block_size: int = 128,
) -> dict[str, Tensor]:
    """Compares a selection with the attention that it stands for, on the query rows `rows` (R,) int64.

    The teacher is the mean over a group's heads of their softmax over all visible tokens; a block's mass is
    the teacher's sum over its tokens. The recalls are means over the (batch, row) pairs that see more blocks
    than there are slots (shorter rows hold everything and would flatter), NaN where there is none:
        block_recall (Hp,): share of the k blocks of largest mass (ties to the lower) that were picked;
        score_recall (Hp,): mass that the picked blocks hold;  score_best (Hp,): mass of the best k blocks;
        kl_full (Hp,): mean over batch and rows of KL(teacher || student) over all visible tokens, in nats;
        n_rows (): the number of pairs that counted for the recalls.
    Shapes as in `msa.sparse_attention`; block_indices (B, S, Hp, k).
    """
    batch, n_queries, heads, dim = q.shape
    n_keys, slots, proxy_heads = k.shape[1], block_indices.shape[3], q_proxy.shape[2]
    scale = dim**-0.5 if scale is None else scale
    place = reference.query_places(n_queries, q_block, block_size, q.device)[rows]  # (R,)
    first_block = torch.zeros(1, 1, dtype=torch.long, device=q.device)
    if doc_start_block is not None:
        first_block = doc_start_block.long()[:, rows // block_size]  # (B, R)
    first_block = first_block.expand(batch, rows.numel())
    keys, proxy_keys = reference.heads_first(k), reference.heads_first(k_proxy)

    def measure(part: slice) -> tuple[Tensor, Tensor]:
        """Of a part of the rows: KL (Hp,) and block recall, score recall, best score, each (B, Hp, r)."""
        here, at, first = rows[part], place[part], first_block[:, part]
        visible = reference.Rows(slice(None), at, first * block_size, 0, n_keys).visible()  # (B, 1, r, n)
        s = reference.scores(reference.heads_first(q[:, here]) * scale, keys)
        p, total, _ = reference.exponentiate(reference.mask_scores(s, visible))
        teacher = (p / total).unflatten(1, (proxy_heads, -1)).mean(2)  # (B, Hp, r, n)
        s = reference.scores(reference.heads_first(q_proxy[:, here]) * scale, proxy_keys)
        s = reference.mask_scores(s, visible)
        kl = reference.kl_per_head(teacher, s - s.logsumexp(-1, keepdim=True))
        n_blocks = -(-n_keys // block_size)
        padded = torch.nn.functional.pad(teacher, (0, n_blocks * block_size - n_keys))
        mass = padded.unflatten(-1, (n_blocks, block_size)).sum(-1)  # (B, Hp, r, n_blocks)
        picked = torch.zeros(*mass.shape[:3], n_blocks + 1, dtype=torch.bool, device=q.device)
        chosen = block_indices[:, here].transpose(1, 2).long()
        picked.scatter_(-1, chosen.masked_fill(chosen < 0, n_blocks), True)
        picked = picked[..., :n_blocks]
        k_best = min(slots, n_blocks)
        best = mass.sort(dim=-1, descending=True, stable=True).indices[..., :k_best]
        hits = picked.gather(-1, best).double().mean(-1)
        return kl, torch.stack(
            (hits, (mass * picked).sum(-1).double(), mass.gather(-1, best).sum(-1).double())
        )

    # A few rows at a time: at a million keys 16 heads' scores of one row take 64 MiB.
    step = max(1, reference.CHUNK_ELEMENTS.get(q.device.type, 2**21) // (batch * heads * n_keys))
    parts = [measure(slice(i, i + step)) for i in range(0, rows.numel(), step)]
    kl_full = sum(kl for kl, _ in parts) / (batch * rows.numel())
    measured = torch.cat([values for _, values in parts], -1)  # (3, B, Hp, R)
    n_visible = place // block_size - first_block + 1  # (B, R)
    counts = (n_visible > slots)[:, None].double()  # (B, 1, R)
    n_rows = counts.sum()
    means = ((measured * counts).sum((1, 3)) / n_rows).float()  # 0 / 0 is the NaN we want
    names = ("block_recall", "score_recall", "score_best")
    return {**dict(zip(names, means, strict=True)), "kl_full": kl_full.float(), "n_rows": n_rows}
