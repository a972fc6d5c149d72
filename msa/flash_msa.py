"""flash-msa's two functions on top of this package: its arguments, its layout, its scale of the KL.

Code written for flash-msa 0.1.1 changes one import, `from msa import flash_msa_func, flash_msa_warmup_func`:

    out, kl = flash_msa_func(q_proxy, k_proxy, q, k, v, top_k, scale)
    (cross_entropy + kl).backward()

q (B, H, S, D); k, v (B, Hkv, S, D); q_proxy (B, Hp, S, D); k_proxy (B, Hpk, S, D); out (B, S, H * D). `kl` is
the mean over batch, queries and proxy heads, so add it to the loss as it is. As there, its value in the
forward is 0 and its gradient is real; `msa.sparse_attention` has the ways to the true value.

Head dims, sequence lengths and block counts that flash-msa refuses work. What it takes and this package does
not, a proxy with fewer heads than k or a top_k that is no int, is a ValueError that names the argument.
"""

from __future__ import annotations

from torch import Tensor

import msa  # its functions are looked up when they are called, so that msa/__init__ can import this file

__all__ = ["flash_msa_func", "flash_msa_warmup_func"]


def _sequence_first(**tensors: Tensor) -> dict[str, Tensor]:
    """(B, H, S, D) -> (B, S, H, D), as views."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name}: must be (batch, heads, sequence, head_dim), got {tuple(x.shape)}")
    return {name: x.transpose(1, 2) for name, x in tensors.items()}


def _rescale(out: Tensor, kl: Tensor, q_proxy: Tensor) -> tuple[Tensor, Tensor]:
    batch, proxy_heads, n_queries, _ = q_proxy.shape
    return out.flatten(2), kl / (batch * proxy_heads * n_queries)


def flash_msa_func(
    q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Sparse attention over top_k selected tokens: (out (B, S, H * D), kl 0-dim). Raises ValueError."""
    tensors = _sequence_first(q_proxy=q_proxy, k_proxy=k_proxy, q=q, k=k, v=v)
    return _rescale(*msa.sparse_attention(**tensors, top_k=top_k, scale=scale), q_proxy)


def flash_msa_warmup_func(
    q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Dense attention while the proxy learns over all visible tokens; `top_k` has no effect.

    Returns (out (B, S, H * D), kl 0-dim). Raises ValueError.
    """
    tensors = _sequence_first(q_proxy=q_proxy, k_proxy=k_proxy, q=q, k=k, v=v)
    return _rescale(*msa.warmup_attention(**tensors, scale=scale), q_proxy)
