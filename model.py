"""A Qwen3-shaped GQA transformer whose attention is MiniMax Sparse Attention.

Parameter names and RoPE layout are those of Hugging Face's Qwen3, so dense checkpoints load one to one:

    python sample.py --out_dir=out/quickstart --export=qwen3_folder     # for from_pretrained

Beside q, k, v stands the proxy (the paper's Index Branch): q_proxy and k_proxy, projected from the detached
input, so that the KL trains the proxy alone and the language-model loss never reaches it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import msa
from configs import ACTIVATIONS, Config, Stage, from_dict
from msa.metrics import attention_recall

IGNORE = -100  # the label of a position without one
ROPE_ROWS = 2**16  # positions whose fp64 angles exist at a time


class Output(NamedTuple):
    """What a forward gives: the first three by what was asked for, None otherwise."""

    nll: Tensor | None  # (B, S) fp32, in nats; 0 where there is no label
    correct: Tensor | None  # (B, S) bool, the likeliest token is the label; only without gradients
    logits: Tensor | None  # (B, V)
    kl: Tensor  # 0-dim fp32, summed over layers (see msa.sparse_attention)


class Linear(nn.Linear):
    """No bias; the weight stays in fp32 for the optimizer and takes part in the input's dtype."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_table(position: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """position (B or 1, S) -> cos, sin (B or 1, S, 1, D / 2) fp32.

    Angles are taken in fp64: in fp32 they are off by 0.06 at position 1M.
    """
    rate = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position.device) / head_dim
    rate = theta**-rate
    cos, sin = (torch.empty(*position.shape, 1, head_dim // 2, device=position.device) for _ in range(2))
    for begin in range(0, position.shape[1], ROPE_ROWS):
        part = slice(begin, begin + ROPE_ROWS)
        angle = position[:, part].double()[..., None, None] * rate
        cos[:, part], sin[:, part] = angle.cos(), angle.sin()
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x (B, S, H, D), in fp32; the first half of D pairs with the second, as in Qwen3."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of every layer, the proxy's keys among them, for sequences of different lengths."""

    def __init__(
        self, config: Config, batch: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        def new(heads: int, layers: range) -> dict[int, Tensor]:
            shape = (batch, size, heads, config.head_dim)
            return {i: torch.zeros(shape, device=device, dtype=dtype) for i in layers}

        self.k = new(config.n_kv_head, range(config.n_layer))
        self.v = new(config.n_kv_head, range(config.n_layer))
        self.k_proxy = new(config.n_proxy_kv_head, range(config.dense_layers, config.n_layer))
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # (B,) tokens held
        self.longest = 0  # the largest of them, known without waiting for the device
        self.size = size

    def grow(self, size: int) -> None:
        """Room for `size` tokens a sequence; layer by layer, so that little is there twice."""
        for cache in (self.k, self.v, self.k_proxy):
            for layer, held in cache.items():
                cache[layer] = F.pad(held, (0, 0, 0, 0, 0, size - self.size))
        self.size = size

    def write(self, cache: dict[int, Tensor], layer: int, x: Tensor) -> Tensor:
        """Puts x (B, S, heads, D) behind what layer `layer` holds; returns what is in use of it.

        Of a single token on a GPU all that there is room for: its shape is the same for the next token, so
        that a CUDA graph of a step may be replayed.
        """
        held, end = cache[layer], self.longest + x.shape[1]
        if x.shape[1] == 1:
            held[torch.arange(x.shape[0], device=x.device), self.lengths] = x[:, 0]
            return held if held.is_cuda else held[:, :end]
        held[:, self.longest : end] = x
        return held[:, :end]


# ---- token-wise work: a chunk of rows at a time ------------------------------------------------------


def by_rows(
    function: Callable[..., tuple[Tensor, ...]],
    chunk: int,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    recompute: bool = False,
    undefined: bool = False,
) -> tuple[Tensor, ...]:
    """function(*rows), whose outputs have rows as its inputs do, for `chunk` rows at a time.

    What is alive in between, and the shapes that torch.compile sees, then don't depend on the length.
    recompute: backward keeps `rows` alone and computes each chunk again; weights: the parameters that
    `function` may use. undefined: nobody reads the output, shaped like rows[0], so it is not computed.
    """
    if recompute and torch.is_grad_enabled():
        return _ByRows.apply(function, chunk, undefined, len(rows), *rows, *weights)
    return _in_chunks(function, chunk, rows)


def _in_chunks(function: Callable, chunk: int, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    n = rows[0].shape[0]
    if n <= chunk:
        return function(*rows)
    if torch.is_grad_enabled():
        parts = [function(*part) for part in zip(*(x.split(chunk) for x in rows), strict=True)]
        return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))
    whole: list[Tensor] = []
    for begin in range(0, n, chunk):  # into place: a concatenation would hold everything twice
        outputs = function(*(x[begin : begin + chunk] for x in rows))
        whole = whole or [x.new_empty(n, *x.shape[1:]) for x in outputs]
        for x, part in zip(whole, outputs, strict=True):
            x[begin : begin + chunk] = part
    return tuple(whole)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, chunk, undefined, n_rows, *tensors):
        rows = tensors[:n_rows]
        ctx.save_for_backward(*rows)
        ctx.function, ctx.chunk, ctx.weights = function, chunk, tensors[n_rows:]
        ctx.set_materialize_grads(False)
        return (torch.empty_like(rows[0]),) if undefined else _in_chunks(function, chunk, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        rows, weights, chunk = ctx.saved_tensors, ctx.weights, ctx.chunk
        needs = ctx.needs_input_grad[4:]
        sums: list[Tensor | None] = [None] * len(needs)
        if all(g is None for g in grads):
            return None, None, None, None, *sums
        # The last chunk first, as autograd itself would add them up.
        for begin in reversed(range(0, rows[0].shape[0], chunk)):
            part = slice(begin, begin + chunk)
            own = [x[part].detach().requires_grad_(need) for x, need in zip(rows, needs, strict=False)]
            with torch.enable_grad():
                outputs = ctx.function(*own)
            asked = zip(outputs, grads, strict=True)
            asked = [(x, g[part]) for x, g in asked if g is not None and x.requires_grad]
            if not asked:  # all that needs a gradient feeds other outputs
                break
            wanted = [i for i, need in enumerate(needs) if need]
            found = torch.autograd.grad(
                [x for x, _ in asked],
                [(*own, *weights)[i] for i in wanted],
                [g for _, g in asked],
                allow_unused=True,
            )
            for i, g in zip(wanted, found, strict=True):
                if g is None:
                    continue
                if i >= len(rows):  # in fp32, also where FSDP hands over bfloat16
                    sums[i] = g.float() if sums[i] is None else sums[i].add_(g)
                elif g.shape == rows[i].shape:
                    sums[i] = g
                else:
                    if sums[i] is None:
                        sums[i] = g.new_empty(rows[i].shape)
                    sums[i][part] = g
        for i, weight in enumerate(weights, len(rows)):
            if sums[i] is not None:
                sums[i] = sums[i].to(weight.dtype)
        return None, None, None, None, *sums


class HostCopies:
    """Layer inputs that wait for backward in pinned host memory, copied beside the computation.

    Under `take(x)` what autograd saves of x itself is copied away; when backward asks for one, the copy back
    of the one before it, which is next, starts too.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.packed: list[_HostCopy] = []

    def take(self, x: Tensor) -> torch.autograd.graph.saved_tensors_hooks:
        self.let_go(but=1)
        pointer, shape = x.data_ptr(), x.shape  # autograd keeps pack, which must not keep x

        def pack(saved: Tensor) -> Tensor | _HostCopy:
            if saved.data_ptr() != pointer or saved.shape != shape:
                return saved
            copy = _HostCopy(saved, self.stream, len(self.packed))
            self.packed.append(copy)
            return copy

        def unpack(packed: Tensor | _HostCopy) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            packed.fetch()
            if packed.place > 0:
                self.packed[packed.place - 1].fetch()
            return packed.get()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def let_go(self, but: int = 0) -> None:
        """Of the inputs that are copied, but for the last: the computation may take their memory."""
        for copy in self.packed[: len(self.packed) - but]:
            copy.let_go()

    def turn(self) -> None:
        """Forward is over: what backward will ask for first comes back while the loss is computed."""
        self.let_go()
        if self.packed:
            self.packed[-1].fetch()


class _HostCopy:
    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, place: int) -> None:
        self.device, self.stream, self.place = x.device, stream, place
        self.back: Tensor | None = None
        self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=stream is not None)
        self.done = self.copy(self.host, x)
        self.leaving: Tensor | None = x  # its memory must not be taken before it is copied

    def copy(self, to: Tensor, x: Tensor) -> torch.cuda.Event | None:
        """On the stream of the copies, behind what the computation has asked for so far."""
        if self.stream is None:
            to.copy_(x)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(x, non_blocking=True)
        return self.stream.record_event()

    def wait(self) -> None:
        """The computation waits for the copy, the host does not."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def let_go(self) -> None:
        if self.leaving is not None:
            self.wait()
            self.leaving = None

    def fetch(self) -> None:
        """Starts the copy back, unless it is under way."""
        if self.back is None:
            # Of the computation's own memory: it is used and freed there.
            self.back = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self.done = self.copy(self.back, self.host)

    def get(self) -> Tensor:
        """What `fetch` brought, once."""
        self.wait()
        back, self.back = self.back, None
        return back


# ---- the layers -------------------------------------------------------------------------------------


class Context(NamedTuple):
    """What every layer of one forward needs beside its input."""

    cos: Tensor  # (B * S, 1, D / 2)
    sin: Tensor
    attention: str  # "dense", "warmup" or "sparse"
    activations: str  # "all", "attention", "input" or "offload"
    doc_start_block: Tensor | None = None
    cache: KVCache | None = None
    q_block: Tensor | None = None  # of a piece of the prompts, which goes behind what the cache holds
    report: list | None = None  # layers append their recalls and KL here
    report_rows: Tensor | None = None  # (R,) sampled query rows


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        d, dim, eps = config.d_model, config.head_dim, config.norm_eps
        self.layer, self.head_dim = layer, dim
        self.block_size, self.top_k = config.block_size, config.top_k
        self.has_proxy = layer >= config.dense_layers
        self.q_proj = Linear(d, config.n_head * dim)
        self.k_proj = Linear(d, config.n_kv_head * dim)
        self.v_proj = Linear(d, config.n_kv_head * dim)
        self.o_proj = Linear(config.n_head * dim, d)
        self.q_norm, self.k_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        if self.has_proxy:
            self.q_proxy_proj = Linear(d, config.n_proxy_head * dim)
            self.k_proxy_proj = Linear(d, config.n_proxy_kv_head * dim)
            self.q_proxy_norm, self.k_proxy_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def heads(self, x: Tensor, proj: Linear, norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        """(N, d) -> normed and rotated heads (N, H, D)."""
        return rotate(norm(proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, d) -> q (N, H, D), k and v (N, Hkv, D)."""
        q = self.heads(x, self.q_proj, self.q_norm, cos, sin)
        k = self.heads(x, self.k_proj, self.k_norm, cos, sin)
        return q, k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def project_proxy(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, d), detached -> q_proxy (N, Hp, D), k_proxy (N, Hpk, D)."""
        x = x.detach()
        q_proxy = self.heads(x, self.q_proxy_proj, self.q_proxy_norm, cos, sin)
        return q_proxy, self.heads(x, self.k_proxy_proj, self.k_proxy_norm, cos, sin)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_proxy: Tensor | None,
        k_proxy: Tensor | None,
        context: Context,
        kl_probe: Tensor | None,
        block_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(B, S, H, D) each -> out (B, S, H, D), kl. block_indices: what was selected before, if it was."""
        mode = context.attention if self.has_proxy else "dense"
        shared = {
            "doc_start_block": context.doc_start_block,
            "q_block": context.q_block,
            "block_size": self.block_size,
        }
        if context.cache is not None:
            cache = context.cache
            k, v = cache.write(cache.k, self.layer, k), cache.write(cache.v, self.layer, v)
            if self.has_proxy:
                k_proxy = cache.write(cache.k_proxy, self.layer, k_proxy)
            if q.shape[1] == 1:
                sparse = {"q_proxy": q_proxy, "k_proxy": k_proxy, "top_k": self.top_k}
                out = msa.decode_attention(
                    q,
                    k,
                    v,
                    lengths=cache.lengths + 1,
                    block_size=self.block_size,
                    **(sparse if mode == "sparse" else {}),
                )
                return out, q.new_zeros((), dtype=torch.float32)
        if context.report is not None and q_proxy is not None:
            context.report.append(self.report(q, k, v, q_proxy, k_proxy, context.report_rows, shared))
        if mode == "dense":
            return msa.dense_attention(q, k, v, **shared), q.new_zeros((), dtype=torch.float32)
        if mode == "warmup":
            return msa.warmup_attention(q, k, v, q_proxy, k_proxy, kl_probe=kl_probe, **shared)
        selection = {"top_k": self.top_k} if block_indices is None else {"block_indices": block_indices}
        return msa.sparse_attention(q, k, v, q_proxy, k_proxy, kl_probe=kl_probe, **selection, **shared)

    def report(self, q, k, v, q_proxy, k_proxy, rows: Tensor, shared: dict) -> dict[str, Tensor]:
        """The recalls and both KLs of this layer: what the sparse mode does, or would do, here and now."""
        indices = msa.select_blocks(q_proxy, k_proxy, top_k=self.top_k, **shared)
        _, kl = msa.sparse_attention(
            q, k, v, q_proxy, k_proxy, block_indices=indices, materialize_kl=True, **shared
        )
        recall = attention_recall(q, k, q_proxy, k_proxy, indices, rows, **shared)
        return {"kl_selected": kl, **recall}


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_mlp)
        self.up_proj = Linear(config.d_model, config.d_mlp)
        self.down_proj = Linear(config.d_mlp, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention between two token-wise parts, `project` and `finish`, which run a chunk of rows at a time."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.chunk = config.row_chunk

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x (N, d) -> q, k, v."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def project_all(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x (N, d) -> q, k, v, q_proxy, k_proxy."""
        x = self.input_layernorm(x)
        return *self.self_attn.project(x, cos, sin), *self.self_attn.project_proxy(x, cos, sin)

    def project_proxy(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x (N, d) -> q_proxy, k_proxy."""
        return self.self_attn.project_proxy(self.input_layernorm(x), cos, sin)

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        """x (N, d), attended (N, H * D) -> the layer's output (N, d)."""
        x = x + self.self_attn.o_proj(attended)
        return (x + self.mlp(self.post_attention_layernorm(x)),)

    def compile_rows(self, **options) -> None:
        """torch.compile for the token-wise parts; attention between them has kernels of its own."""
        for name in ("project", "project_all", "project_proxy", "finish"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False, **options))

    def body(
        self,
        x: Tensor,
        block_indices: Tensor | None,
        context: Context,
        kl_probe: Tensor | None,
        for_backward: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """for_backward: this runs once more for what backward needs, and nobody reads the output."""
        attention, recompute = self.self_attn, context.activations != "all"
        rows = x.flatten(0, 1)
        weights = list(self.parameters()) if recompute else ()
        # With a cache the proxy's keys are kept whatever the mode, so that decoding may turn sparse.
        with_proxy = attention.has_proxy and (context.attention != "dense" or context.cache is not None)
        project = self.project_all if with_proxy else self.project
        tensors = (rows, context.cos, context.sin)
        heads = by_rows(project, self.chunk, tensors, weights, recompute=recompute)
        heads = [y.unflatten(0, x.shape[:2]) for y in heads]
        q, k, v, q_proxy, k_proxy = heads if with_proxy else (*heads, None, None)
        out, kl = attention(q, k, v, q_proxy, k_proxy, context, kl_probe, block_indices)
        tensors = (rows, out.flatten(2).flatten(0, 1))
        options = {"recompute": recompute, "undefined": for_backward}
        (y,) = by_rows(self.finish, self.chunk, tensors, weights, **options)
        return y.view_as(x), kl

    def forward(self, x: Tensor, context: Context, kl_probe: Tensor | None) -> tuple[Tensor, Tensor]:
        if context.activations in ("all", "attention") or not torch.is_grad_enabled():
            return self.body(x, None, context, kl_probe)
        indices = None
        if context.attention == "sparse" and self.self_attn.has_proxy:
            # Selecting is quadratic in the length: done once, and kept.
            with torch.no_grad():
                tensors = (x.flatten(0, 1), context.cos, context.sin)
                proxies = by_rows(self.project_proxy, self.chunk, tensors, ())
                q_proxy, k_proxy = (y.unflatten(0, x.shape[:2]) for y in proxies)
                indices = msa.select_blocks(
                    q_proxy,
                    k_proxy,
                    top_k=self.self_attn.top_k,
                    doc_start_block=context.doc_start_block,
                    block_size=self.self_attn.block_size,
                )
                del proxies, q_proxy, k_proxy
        calls = itertools.count()

        def run(x: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.body(x, indices, context, kl_probe, for_backward=next(calls) > 0)

        return checkpoint(run, x, indices, use_reentrant=False, preserve_rng_state=False)


class Transformer(nn.Module):
    """Built from the model fields of `Config` (vocab_size set), initialised from `seed` alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.d_model),
                "layers": nn.ModuleList(Layer(config, i) for i in range(config.n_layer)),
                "norm": RMSNorm(config.d_model, config.norm_eps),
            }
        )
        self.lm_head = Linear(config.d_model, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight
        if self.lm_head.weight.device.type != "meta":
            self.init_weights(config.seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal with 0.02; what writes into the residual stream is smaller by its number of writers."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * self.config.n_layer) ** 0.5 if writes else 0.02
                param.copy_(torch.empty(param.shape).normal_(0, std, generator=generator))

    def compile_rows(self, **options) -> None:
        """torch.compile for all that is token-wise: once a run, since chunks have one shape."""
        for layer in self.model["layers"]:
            layer.compile_rows(**options)
        self.learn_from = torch.compile(self.learn_from, dynamic=False, **options)

    def learn_from(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """The last layer's x (N, d), labels (N,) -> nll (N,) fp32, 0 where the label is -100."""
        logits = self.lm_head(self.model["norm"](x)).float()
        return (F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none"),)

    def compare(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and whether the likeliest token is the label (N,) bool."""
        logits = self.lm_head(self.model["norm"](x)).float()
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        return nll, logits.argmax(-1) == labels

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        attention: str,
        activations: str = "all",
        rope_theta: float | None = None,
        doc_start_block: Tensor | None = None,
        kl_probe: Tensor | None = None,
        cache: KVCache | None = None,
        prompt_lengths: Tensor | None = None,
        report: list | None = None,
        report_rows: Tensor | None = None,
    ) -> Output:
        """tokens, labels (B, S) -> Output: nll with labels, otherwise the logits of each last token.

        attention: "dense", "warmup" or "sparse"; rope_theta: Config.rope_theta by default.
        activations: what layers keep for backward; "all"; "attention": their input, and what attention takes
            and gives; "input": that and the selection; "offload": the same, with the inputs in host memory.
            The rest is computed again.
        doc_start_block (B, ceil(S / block_size)) int32: borders of documents; positions start again there.
        kl_probe (layers, Hp): its gradient receives the KL sums of the layers.
        cache: with S = 1 decodes one token a sequence; otherwise tokens are the next piece of the prompts of
            prompt_lengths (B,) tokens (all of them by default), padded on the right; pieces but the last are
            whole blocks. Logits are those of a prompt's last token in the piece that holds it.
        report: a list that receives, from each layer with a proxy, its KL and recalls on report_rows (R,).
        """
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations: {activations!r} is none of {', '.join(ACTIVATIONS)}")
        batch, length = tokens.shape
        block_size, device = self.config.block_size, tokens.device
        position = torch.arange(length, device=device)[None]  # (1, S)
        q_block = None
        if doc_start_block is not None:
            position = position - block_size * doc_start_block.repeat_interleave(block_size, 1)[:, :length]
        if cache is not None:
            if doc_start_block is not None:
                raise ValueError("doc_start_block: a cache holds one document a sequence, leave it out")
            end = cache.longest + length
            if end > cache.size:
                raise ValueError(f"tokens: the cache has room for {cache.size} tokens a sequence")
            if length == 1:
                position = cache.lengths[:, None]
            elif cache.longest % block_size:
                raise ValueError(
                    f"tokens: a piece of {length} tokens begins with a block, and the cache holds "
                    f"{cache.longest} a sequence; give whole blocks of {block_size} before it"
                )
            elif cache.longest:
                position = position + cache.longest
                blocks = range(cache.longest // block_size, -(-end // block_size))
                q_block = torch.arange(blocks.start, blocks.stop, dtype=torch.int32, device=device)
        table = rope_table(position, self.config.head_dim, rope_theta or self.config.rope_theta)
        cos, sin = (x.expand(batch, -1, -1, -1).flatten(0, 1) for x in table)
        context = Context(
            cos, sin, attention, activations, doc_start_block, cache, q_block, report, report_rows
        )

        with record_function("embedding"):
            x = self.model["embed_tokens"](tokens).to(self.compute_dtype)  # (B, S, d)
        kl = x.new_zeros((), dtype=torch.float32)
        copies = HostCopies(device) if activations == "offload" and torch.is_grad_enabled() else None
        for i, layer in enumerate(self.model["layers"]):
            # The last one's input is the first that backward asks for.
            moves = copies is not None and i + 1 < self.config.n_layer
            with copies.take(x) if moves else contextlib.nullcontext():
                x, layer_kl = layer(x, context, None if kl_probe is None else kl_probe[i])
            kl = kl + layer_kl
        if copies is not None:
            copies.turn()

        if labels is not None:
            head = self.compare
            weights: list[Tensor] = []
            if torch.is_grad_enabled():
                head, weights = self.learn_from, [self.model["norm"].weight, self.lm_head.weight]
            rows = (x.flatten(0, 1), labels.flatten())
            with record_function("loss"):
                nll, *correct = by_rows(head, self.config.loss_chunk, rows, weights, recompute=True)
            return Output(nll.view_as(labels), correct[0].view_as(labels) if correct else None, None, kl)
        if cache is None:
            last = torch.full((batch,), length - 1, device=device)
        elif length == 1:
            last = torch.zeros_like(cache.lengths)
            cache.lengths += 1
            cache.longest += 1
        else:
            begin, cache.longest = cache.longest, end
            cache.lengths[:] = end if prompt_lengths is None else prompt_lengths.clamp(max=end)
            last = (cache.lengths - 1 - begin).clamp(min=0)
        x = x[torch.arange(batch, device=device), last]  # (B, d)
        return Output(None, None, self.lm_head(self.model["norm"](x)).float(), kl)


def count_parameters(config: Config) -> tuple[int, int]:
    """Of all of a model, and of its layers, without making one: that takes a second for 24 layers."""
    c = config
    heads = c.n_head + 2 * c.n_kv_head + c.n_head  # of q, k, v and o
    layer = c.d_model * (heads * c.head_dim + 3 * c.d_mlp) + 2 * c.d_model + 2 * c.head_dim
    proxy = c.d_model * (c.n_proxy_head + c.n_proxy_kv_head) * c.head_dim + 2 * c.head_dim
    layers = c.n_layer * layer + (c.n_layer - c.dense_layers) * proxy
    tables = 1 if c.tie_embeddings else 2
    return layers + tables * c.vocab_size * c.d_model + c.d_model, layers


def is_proxy(name: str) -> bool:
    """Whether a parameter belongs to the proxy."""
    return "_proxy_" in name


# ---- Qwen3 folders --------------------------------------------------------------------------------


def qwen3_config(config: Config, rope_theta: float, context: int) -> dict:
    """The config.json with which transformers builds the dense twin of this model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "torch_dtype": "float32",
    }


_QWEN3_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"),
)


def save_qwen3(
    state: dict[str, Tensor], config: Config, folder: str | Path, rope_theta: float, context: int
) -> None:
    """Writes config.json, model.safetensors and, since a Qwen3 has no place for it, proxy.safetensors.

    They are written beside and renamed together; an OSError where the disk refuses leaves what was there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    dense = {n: w.contiguous() for n, w in state.items() if not is_proxy(n)}
    if config.tie_embeddings:
        dense.pop("lm_head.weight", None)
    proxy = {n: w.contiguous() for n, w in state.items() if is_proxy(n)}
    text = json.dumps(qwen3_config(config, rope_theta, context), indent=2)
    files = {"model.safetensors": dense} | ({"proxy.safetensors": proxy} if proxy else {})
    names = [*files, "config.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in files.items():
            save_file(tensors, folder / f"{name}.new", metadata={"format": "pt"})
        (folder / "config.json.new").write_text(text + "\n")
        for name in names:
            os.replace(folder / f"{name}.new", folder / name)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            for name in names:
                (folder / f"{name}.new").unlink(missing_ok=True)
        raise OSError(f"cannot write {folder}: {error}; see that it may be written and has space") from error


def load_qwen3(folder: str | Path, config: Config) -> dict[str, Tensor]:
    """The weights of a Qwen3 folder (any number of safetensors files), checked against `config`.

    A ValueError names every field of `config` that the folder's config.json contradicts.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        theirs = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"init_from: {folder}/config.json is no JSON ({error}); get it again") from error
    if theirs.get("model_type") != "qwen3":
        raise ValueError(
            f"init_from: {folder} holds a {theirs.get('model_type')!r}, only 'qwen3' can be loaded"
        )
    lacking = [key for key in _QWEN3_KEYS if key not in theirs]
    if lacking:
        raise ValueError(f"init_from: {folder}/config.json lacks {', '.join(lacking)}; get it again")
    heads = theirs["num_attention_heads"]
    parameters = theirs.get("rope_parameters") or {}
    fields = {
        "vocab_size": theirs["vocab_size"],
        "d_model": theirs["hidden_size"],
        "d_mlp": theirs["intermediate_size"],
        "n_layer": theirs["num_hidden_layers"],
        "n_head": heads,
        "n_kv_head": theirs["num_key_value_heads"],
        "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
        "norm_eps": theirs["rms_norm_eps"],
        "rope_theta": theirs.get("rope_theta") or parameters.get("rope_theta"),
        "tie_embeddings": theirs["tie_word_embeddings"],
    }
    wrong = {f: value for f, value in fields.items() if getattr(config, f) != value}
    if wrong:
        say = " ".join(f"--{f}={value}" for f, value in wrong.items())
        raise ValueError(f"init_from: the shape of {folder} differs from the config's; set {say}")
    scaling = theirs.get("rope_scaling") or parameters.get("rope_type", "default") != "default"
    if theirs.get("attention_bias") or theirs.get("use_sliding_window") or scaling:
        raise ValueError(
            f"init_from: {folder} uses attention_bias, use_sliding_window or RoPE scaling; we have none"
        )
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")) + sorted(folder.glob("proxy.safetensors")):
        try:
            state.update(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"init_from: {file} is cut short or damaged ({error}); get it again") from error
    if not state:
        raise ValueError(f"init_from: {folder} holds no model*.safetensors")
    return {name: weight.float() for name, weight in state.items()}


def load_weights(
    model: Transformer, state: dict[str, Tensor], source: str, argument: str = "init_from"
) -> list[str]:
    """Copies `state` in; a proxy that `state` lacks keeps its initialisation. Returns those names.

    A ValueError names `argument` and `source` where the weights are of another model.
    """
    state = dict(state)
    if model.config.tie_embeddings:
        state.pop("lm_head.weight", None)
    own = dict(model.named_parameters())
    for name, weight in state.items():
        if name in own and weight.shape != own[name].shape:
            raise ValueError(
                f"{argument}: {name} is {tuple(weight.shape)} in {source}, {tuple(own[name].shape)} here; "
                "set the fields of the model as they were there"
            )
    unknown = [n for n in state if n not in own and not is_proxy(n)]
    missing = [n for n in own if n not in state]
    lacking = [n for n in missing if not is_proxy(n)]
    if unknown or lacking:
        raise ValueError(
            f"{argument}: {source} lacks {lacking[:5]} and has unknown {unknown[:5]}; set the fields of the "
            "model as they were there"
        )
    with torch.no_grad():
        for name, weight in state.items():
            if name in own:
                own[name].copy_(weight)
    return missing


class Run(NamedTuple):
    """What a run's checkpoint holds beside its optimizer."""

    config: Config
    stage: Stage  # the last one trained in
    step: int
    data: dict  # tokenizer, eos, vocab_size, hash of the data set
    state: dict[str, Tensor]  # parameters, fp32, on the CPU


class DamagedCheckpoint(ValueError):
    """A checkpoint that was cut short, or whose bytes are no longer those that were written."""


def checkpoints(out_dir: str | Path) -> list[Path]:
    """Those of a run, the newest first: checkpoint.pt, then checkpoint_STEP.pt, which were kept."""
    folder = Path(out_dir)
    older = [p for p in folder.glob("checkpoint_*.pt") if p.stem.removeprefix("checkpoint_").isdigit()]
    older.sort(key=lambda p: int(p.stem.removeprefix("checkpoint_")), reverse=True)
    newest = folder / "checkpoint.pt"
    return [newest, *older] if newest.exists() else older


def read_checkpoint(file: str | Path) -> dict:
    """What train.py saved, its tensors mapped from the file. ValueError if it is damaged or anything else."""
    advice = "put a whole copy in its place, delete all checkpoint*.pt to start over, or name another run"
    try:
        _check_crcs(file)
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:  # of a file that is whole
        raise ValueError(
            f"checkpoint {file} holds more than tensors and plain values, which may be code, so it is not "
            f"loaded; {advice}"
        ) from error
    except _DAMAGES as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of a seek in a file cut short
            raise
        raise DamagedCheckpoint(f"checkpoint {file} is cut short or damaged; {advice}") from error
    for key in ("format", "config", "stage", "step", "data", "model"):
        if not isinstance(saved, dict) or key not in saved:
            raise ValueError(f"checkpoint {file} was not saved by train.py, it has no {key!r}; {advice}")
    if saved["format"] != 1:
        raise ValueError(
            f"checkpoint {file} has format {saved['format']!r}, this code reads format 1; take the "
            "version of this repository that wrote it, or name another run"
        )
    return saved


# What reading a zip or unpickling raises where bytes have changed.
_DAMAGES = (zipfile.BadZipFile, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, IndexError)
_DAMAGES += (AttributeError, AssertionError, OverflowError, struct.error)


def _check_crcs(file: str | Path) -> None:
    """Reads the file once, 3 GB/s from memory: torch.save writes CRCs, and torch.load checks none of them."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:  # its CRC would be that of something unpacked
                raise zipfile.BadZipFile(f"{info.filename} is compressed")
        if bad := archive.testzip():
            raise zipfile.BadZipFile(f"the CRC of {bad} differs")


def load_checkpoint(out_dir: str | Path) -> dict | None:
    """The newest checkpoint of a run that is whole; None where there is none. ValueError if all are bad."""
    damaged = []
    for file in checkpoints(out_dir):
        try:
            saved = read_checkpoint(file)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        if damaged:
            skipped = ", ".join(p.name for p in checkpoints(out_dir)[: len(damaged)])
            print(
                f"{out_dir}: {skipped} cut short or damaged; {file.name}, of step {saved['step']}, instead",
                file=sys.stderr,
            )
        return saved
    if damaged:
        raise damaged[0]
    return None


def load_run(out_dir: str | Path) -> Run:
    """Reads the checkpoint of a run, without its optimizer. Raises ValueError where there is none."""
    saved = load_checkpoint(out_dir)
    if saved is None:
        if (Path(out_dir) / "config.json").exists():
            raise ValueError(
                f"out_dir: {out_dir} has no checkpoint.pt yet; a run saves every checkpoint_interval steps, "
                "at its end and on SIGTERM: wait for that"
            )
        raise ValueError(f"out_dir: {out_dir} holds no checkpoint.pt; train first, or name another run")
    config = from_dict(saved["config"])
    return Run(config, config.stages[saved["stage"]], saved["step"], saved["data"], saved["model"])
