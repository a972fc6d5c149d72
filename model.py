"""A Qwen3-shaped GQA transformer whose attention is MiniMax Sparse Attention.

Parameter names and RoPE layout are those of Hugging Face's Qwen3, so dense checkpoints load one to one:

    python sample.py --out_dir=out/quickstart --export=qwen3_folder     # for from_pretrained

Beside q, k, v stands the proxy (the paper's Index Branch): q_proxy and k_proxy, projected from the detached
input, so that the KL trains the proxy alone and the language-model loss never reaches it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import msa
from configs import Config, Stage, from_dict
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
    parts = [p.double()[..., None, None] * rate for p in position.split(ROPE_ROWS, dim=1)]
    return torch.cat([p.cos().float() for p in parts], 1), torch.cat([p.sin().float() for p in parts], 1)


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
        """Puts x (B, S, heads, D) behind what layer `layer` holds; returns what is in use of it."""
        if x.shape[1] == 1:
            cache[layer][torch.arange(x.shape[0], device=x.device), self.lengths] = x[:, 0]
        else:
            cache[layer][:, : x.shape[1]] = x
        return cache[layer][:, : self.longest + x.shape[1]]


class Context(NamedTuple):
    """What every layer of one forward needs beside its input."""

    cos: Tensor
    sin: Tensor
    attention: str  # "dense", "warmup" or "sparse"
    doc_start_block: Tensor | None = None
    cache: KVCache | None = None
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

    def heads(self, x: Tensor, proj: Linear, norm: RMSNorm, context: Context) -> Tensor:
        """(B, S, d) -> normed and rotated heads (B, S, H, D)."""
        return rotate(norm(proj(x).unflatten(-1, (-1, self.head_dim))), context.cos, context.sin)

    def forward(self, x: Tensor, context: Context, kl_probe: Tensor | None) -> tuple[Tensor, Tensor]:
        q = self.heads(x, self.q_proj, self.q_norm, context)
        k = self.heads(x, self.k_proj, self.k_norm, context)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        mode = context.attention if self.has_proxy else "dense"
        kl = x.new_zeros((), dtype=torch.float32)
        q_proxy = k_proxy = None
        # With a cache the proxy's keys are kept whatever the mode, so that decoding may turn sparse.
        if mode != "dense" or (self.has_proxy and context.cache is not None):
            detached = x.detach()
            q_proxy = self.heads(detached, self.q_proxy_proj, self.q_proxy_norm, context)
            k_proxy = self.heads(detached, self.k_proxy_proj, self.k_proxy_norm, context)
        if context.cache is not None:
            cache, single = context.cache, x.shape[1] == 1
            all_k, all_v = cache.write(cache.k, self.layer, k), cache.write(cache.v, self.layer, v)
            all_k_proxy = cache.write(cache.k_proxy, self.layer, k_proxy) if self.has_proxy else None
            if single:
                sparse = {"q_proxy": q_proxy, "k_proxy": all_k_proxy, "top_k": self.top_k}
                out = msa.decode_attention(
                    q,
                    all_k,
                    all_v,
                    lengths=cache.lengths + 1,
                    block_size=self.block_size,
                    **(sparse if mode == "sparse" else {}),
                )
                return self.o_proj(out.flatten(2)), kl
        shared = {"doc_start_block": context.doc_start_block, "block_size": self.block_size}
        if context.report is not None and q_proxy is not None:
            context.report.append(self.report(q, k, v, q_proxy, k_proxy, context.report_rows, shared))
        if mode == "dense":
            out = msa.dense_attention(q, k, v, **shared)
        elif mode == "warmup":
            out, kl = msa.warmup_attention(q, k, v, q_proxy, k_proxy, kl_probe=kl_probe, **shared)
        else:
            out, kl = msa.sparse_attention(
                q, k, v, q_proxy, k_proxy, top_k=self.top_k, kl_probe=kl_probe, **shared
            )
        return self.o_proj(out.flatten(2)), kl

    def report(self, q, k, v, q_proxy, k_proxy, rows: Tensor, shared: dict) -> dict[str, Tensor]:
        """The recalls and both KLs of this layer: what the sparse mode does, or would do, here and now."""
        indices = msa.select_blocks(q_proxy, k_proxy, top_k=self.top_k, **shared)
        _, kl = msa.sparse_attention(
            q, k, v, q_proxy, k_proxy, block_indices=indices, materialize_kl=True, **shared
        )
        recall = attention_recall(q, k, q_proxy, k_proxy, indices, rows, **shared)
        return {"kl_selected": kl, **recall}


class MLP(nn.Module):
    """SwiGLU, `chunk` tokens at a time where there are more: its hidden layer is the widest tensor."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_mlp)
        self.up_proj = Linear(config.d_model, config.d_mlp)
        self.down_proj = Linear(config.d_mlp, config.d_model)
        self.chunk = config.mlp_chunk

    def one(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if rows.shape[0] <= self.chunk:
            return self.one(x)
        run = self.one
        if torch.is_grad_enabled():
            run = functools.partial(checkpoint, self.one, use_reentrant=False)
        return torch.cat([run(part) for part in rows.split(self.chunk)]).view_as(x)


def _keep_selection(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Selecting is quadratic in the length: activation checkpointing keeps what it found."""
    keep = op is torch.ops.msa.select_blocks.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.activation_checkpoint = config.activation_checkpoint

    def body(self, x: Tensor, context: Context, kl_probe: Tensor | None) -> tuple[Tensor, Tensor]:
        attended, kl = self.self_attn(self.input_layernorm(x), context, kl_probe)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kl

    def forward(self, x: Tensor, context: Context, kl_probe: Tensor | None) -> tuple[Tensor, Tensor]:
        if not (self.activation_checkpoint and torch.is_grad_enabled()):
            return self.body(x, context, kl_probe)
        keep = functools.partial(create_selective_checkpoint_contexts, _keep_selection)
        return checkpoint(self.body, x, context, kl_probe, use_reentrant=False, context_fn=keep)


def offload(x: Tensor) -> torch.autograd.graph.saved_tensors_hooks:
    """Under this context what autograd saves of x itself waits in host memory until backward."""
    pointer, shape = x.data_ptr(), x.shape  # autograd keeps pack, which must not keep x

    def pack(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if saved.data_ptr() != pointer or saved.shape != shape:
            return saved
        host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=saved.is_cuda)
        return saved.device, host.copy_(saved, non_blocking=True)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of hidden (N, d) @ weight (V, d)^T against labels (N,), `chunk` rows of logits at a time.

    Returns nll (N,) fp32, 0 where the label is -100, and, without gradients, whether the likeliest token is
    the label (N,) bool. In backward the logits of a chunk are computed again.
    """
    learning = torch.is_grad_enabled()
    weight = weight.float()  # the chunks' gradients add up in fp32, also where FSDP hands over bfloat16

    def nll_of(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = F.linear(h, weight.to(h.dtype)).float()
        nll = F.cross_entropy(logits, y, ignore_index=IGNORE, reduction="none")
        return nll, None if learning else logits.argmax(-1) == y

    run = functools.partial(checkpoint, nll_of, use_reentrant=False) if learning else nll_of
    parts = [run(h, y) for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True)]
    nll = torch.cat([p[0] for p in parts])
    return nll, None if learning else torch.cat([p[1] for p in parts])


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

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        attention: str,
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
        doc_start_block (B, ceil(S / block_size)) int32: borders of documents; positions start again there.
        kl_probe (layers, Hp): its gradient receives the KL sums of the layers.
        cache: with S = 1 decodes one token a sequence; otherwise it must be empty, and the prompts of
            prompt_lengths (B,) tokens (S by default) are padded on the right.
        report: a list that receives, from each layer with a proxy, its KL and recalls on report_rows (R,).
        """
        batch, length = tokens.shape
        block_size = self.config.block_size
        position = torch.arange(length, device=tokens.device)[None]  # (1, S)
        if doc_start_block is not None:
            position = position - block_size * doc_start_block.repeat_interleave(block_size, 1)[:, :length]
        if cache is not None:
            if doc_start_block is not None:
                raise ValueError("doc_start_block: a cache holds one document a sequence, leave it out")
            if length == 1:
                position = cache.lengths[:, None]
            elif cache.longest:
                raise ValueError(
                    f"tokens: {length} a sequence need an empty cache, this one holds {cache.longest}"
                )
            if cache.longest + length > cache.size:
                raise ValueError(f"tokens: the cache has room for {cache.size} tokens a sequence")
        cos, sin = rope_table(position, self.config.head_dim, rope_theta or self.config.rope_theta)
        context = Context(cos, sin, attention, doc_start_block, cache, report, report_rows)

        x = self.model["embed_tokens"](tokens).to(self.compute_dtype)  # (B, S, d)
        kl = x.new_zeros((), dtype=torch.float32)
        for i, layer in enumerate(self.model["layers"]):
            offloads = self.config.activation_offload and torch.is_grad_enabled()
            with offload(x) if offloads else contextlib.nullcontext():
                x, layer_kl = layer(x, context, None if kl_probe is None else kl_probe[i])
            kl = kl + layer_kl
        x = self.model["norm"](x)

        if labels is not None:
            nll, correct = chunked_cross_entropy(
                x.flatten(0, 1), self.lm_head.weight, labels.flatten(), self.config.loss_chunk
            )
            return Output(
                nll.view(batch, length), None if correct is None else correct.view(batch, length), None, kl
            )
        if cache is None:
            last = torch.full((batch,), length - 1, device=tokens.device)
        elif length == 1:
            last = torch.zeros_like(cache.lengths)
            cache.lengths += 1
            cache.longest += 1
        else:
            cache.lengths += length if prompt_lengths is None else prompt_lengths
            cache.longest = length
            last = cache.lengths - 1
        x = x[torch.arange(batch, device=tokens.device), last]  # (B, d)
        return Output(None, None, self.lm_head(x).float(), kl)


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
