"""`msa` against tests/naive.py, and the promises that no oracle is needed for."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import naive
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import msa
from msa import reference
from msa.metrics import attention_recall

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("q", "k", "v", "q_proxy", "k_proxy")
TOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}
KL_FACTOR = 0.37


# ---------------------------------------------------------------------------------------------------------
# shapes, inputs, running both sides


@dataclasses.dataclass
class Shape:
    B: int = 2
    S: int = 37
    Sk: int = 37
    H: int = 4
    Hkv: int = 2
    Hp: int = 2
    Hpk: int = 1
    D: int = 8
    block: int = 8
    slots: int = 2
    docs: bool = False
    permute: bool = False
    scale: float | None = None

    def __str__(self):
        return "-".join(f"{f.name}{getattr(self, f.name)}" for f in dataclasses.fields(self))


SHAPES = [
    Shape(),
    Shape(
        B=1, S=100, Sk=100, H=8, Hkv=2, Hp=4, Hpk=4, D=16, block=16, slots=3
    ),  # H = 2 Hp, Hp = 2 Hkv, Hpk = Hp
    Shape(B=2, S=29, Sk=29, H=3, Hkv=3, Hp=3, Hpk=1, D=4, block=4, slots=3),  # G = 1
    Shape(
        B=1, S=50, Sk=50, H=4, Hkv=1, Hp=2, Hpk=2, D=5, block=8, slots=1, scale=0.9
    ),  # the local block alone
    Shape(B=2, S=45, Sk=45, H=4, Hkv=2, Hp=2, D=8, block=4, slots=3, docs=True),
    Shape(B=2, S=27, Sk=61, H=4, Hkv=2, Hp=4, Hpk=2, D=8, block=8, slots=2, permute=True),
    Shape(
        B=3, S=40, Sk=77, H=8, Hkv=1, Hp=2, Hpk=1, D=3, block=8, slots=2, docs=True, permute=True, scale=0.5
    ),
    Shape(B=1, S=65, Sk=90, H=2, Hkv=1, Hp=1, D=8, block=32, slots=2),  # more keys than queries, no q_block
    Shape(B=1, S=1, Sk=1, H=2, Hkv=1, Hp=1, D=2, block=4, slots=2),
    Shape(B=2, S=30, Sk=30, H=4, Hkv=2, Hp=2, D=8, block=8, slots=9),  # more slots than blocks
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def gen(seed):
    return torch.Generator().manual_seed(seed)


def randn(*size, g, dtype=torch.float64, scale=1.0):
    return (torch.randn(*size, generator=g, dtype=torch.float64) * scale).to(dtype)


def inputs(s, seed=0, dtype=torch.float64):
    """q, k, v, q_proxy, k_proxy: leaves."""
    g = gen(seed)
    sizes = ((s.S, s.H), (s.Sk, s.Hkv), (s.Sk, s.Hkv), (s.S, s.Hp), (s.Sk, s.Hpk))
    return [randn(s.B, n, h, s.D, g=g, dtype=dtype, scale=1.5).requires_grad_() for n, h in sizes]


def random_q_block(S, Sk, block, g):
    """Distinct key blocks in any order; only the last one of the call may hold fewer queries than a block."""
    whole, rest = S // block, S % block
    order = torch.randperm(Sk // block, generator=g).tolist()
    chosen = order[:whole]
    if rest:
        spare = order[whole:] + ([Sk // block] if Sk % block >= rest else [])
        chosen.append(spare[int(torch.randint(len(spare), (1,), generator=g))])
    return torch.tensor(chosen, dtype=torch.int32)


def doc_starts(s, q_block, g):
    """(B, query blocks): documents of random lengths in blocks, their own in each sequence."""
    key_blocks, query_blocks = -(-s.Sk // s.block), -(-s.S // s.block)
    rows = []
    for _ in range(s.B):
        begins = [0] + [b for b in range(1, key_blocks) if torch.rand(1, generator=g).item() < 0.4]
        at = [j if q_block is None else int(q_block[j]) for j in range(query_blocks)]
        rows.append([max(b for b in begins if b <= a) for a in at])
    return torch.tensor(rows, dtype=torch.int32)


def options(s, seed=0):
    """doc_start_block, q_block, scale and block_size of a shape."""
    g = gen(1000 + seed)
    q_block = random_q_block(s.S, s.Sk, s.block, g) if s.permute else None
    doc_start_block = doc_starts(s, q_block, g) if s.docs else None
    return dict(doc_start_block=doc_start_block, q_block=q_block, scale=s.scale, block_size=s.block)


def foreign_indices(s, opts, seed=0):
    """A selection from outside: local first, then strictly earlier blocks in any order, -1 in between."""
    g = gen(2000 + seed)
    slots = s.slots + 2
    picked = torch.full((s.B, s.S, s.Hp, slots), -1, dtype=torch.int32)
    for b in range(s.B):
        for t, place in enumerate(naive.places(s.S, s.block, opts["q_block"])):
            first, local = naive.first_block(b, t, s.block, opts["doc_start_block"]), place // s.block
            for h in range(s.Hp):
                earlier = [first + i for i in torch.randperm(local - first, generator=g).tolist()]
                later = (earlier + [-1] * slots)[: slots - 1]
                later = [later[i] for i in torch.randperm(slots - 1, generator=g).tolist()]
                later = [-1 if torch.rand(1, generator=g).item() < 0.2 else x for x in later]
                picked[b, t, h] = torch.tensor([local] + later, dtype=torch.int32)
    return picked


def wide(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def grads(loss, tensors):
    """Gradients, zeros where none arrives."""
    got = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(tensors, got, strict=True)]


def close(name, got, want, tol):
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    worst = (got - want).abs().max().item() if got.numel() else 0.0
    assert worst <= tol * max(1.0, want.abs().max().item()), f"{name}: off by {worst:.3g}"


def call(mode, tensors, s, opts, **more):
    if mode == "sparse" and "block_indices" not in opts | more:
        more["top_k"] = s.slots * s.block
    return {"sparse": msa.sparse_attention, "warmup": msa.warmup_attention}[mode](*tensors, **opts, **more)


def oracle(mode, tensors, s, opts, **more):
    if mode == "sparse" and "block_indices" not in opts | more:
        more["top_k"] = s.slots * s.block
    return {"sparse": naive.sparse, "warmup": naive.warmup}[mode](*tensors, **opts, **more)


def compare(mode, s, opts, dtype=torch.float64, seed=0, **more):
    """Outputs, KL value, KL per head, all five gradients."""
    mine = inputs(s, seed, dtype)
    theirs = wide(mine)
    tol = TOL[dtype]
    go = randn(s.B, s.S, s.H, s.D, g=gen(3000 + seed), dtype=dtype)
    want, want_kl = oracle(mode, theirs, s, opts, **more)
    want_grads = grads((want * go.double()).sum() + KL_FACTOR * want_kl.sum(), theirs)

    out, kl = call(mode, mine, s, opts, **more)
    assert out.dtype == dtype and kl.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert kl.shape == () and kl.item() == 0.0
    close("out", out, want, tol)
    for name, x, got, expected in zip(
        NAMES, mine, grads((out * go).sum() + KL_FACTOR * kl, mine), want_grads, strict=True
    ):
        assert got.dtype == x.dtype
        close(f"d{name}", got, expected, tol)

    probe = torch.zeros(s.Hp, requires_grad=True)
    out, kl = call(mode, mine, s, opts, materialize_kl=True, kl_probe=probe, **more)
    close("out, KL materialised", out, want, tol)
    close("kl", kl, want_kl.sum(), tol)
    *got_grads, got_kl = grads((out * go).sum() + KL_FACTOR * kl, mine + [probe])
    for name, got, expected in zip(NAMES, got_grads, want_grads, strict=True):
        close(f"d{name}, KL materialised", got, expected, tol)
    close("kl_probe", got_kl, want_kl, max(tol, 1e-5))


# ---------------------------------------------------------------------------------------------------------
# the oracle itself


def test_oracle_is_causal_attention():
    s = Shape(B=2, S=21, Sk=21, H=6, Hkv=2, Hp=2)
    q, k, v, *_ = inputs(s)
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    want = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True).transpose(1, 2)
    close("out", naive.dense(q, k, v, block_size=8), want, 1e-12)


# ---------------------------------------------------------------------------------------------------------
# forward, KL and gradients against the oracle


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@each_shape
def test_dense(shape, dtype):
    opts = options(shape)
    mine = inputs(shape, 1, dtype)[:3]
    theirs = wide(mine)
    go = randn(shape.B, shape.S, shape.H, shape.D, g=gen(2), dtype=dtype)
    want, out = naive.dense(*theirs, **opts), msa.dense_attention(*mine, **opts)
    assert out.dtype == dtype
    close("out", out, want, TOL[dtype])
    want_grads = grads((want * go.double()).sum(), theirs)
    for name, got, expected in zip("qkv", grads((out * go).sum(), mine), want_grads, strict=True):
        assert got.dtype == dtype
        close(f"d{name}", got, expected, TOL[dtype])


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@each_shape
def test_warmup(shape, dtype):
    compare("warmup", shape, options(shape), dtype, seed=3)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@each_shape
def test_sparse(shape, dtype):
    compare("sparse", shape, options(shape), dtype, seed=4)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@each_shape
def test_sparse_with_block_indices(shape, dtype):
    opts = options(shape)
    compare("sparse", shape, opts, dtype, seed=5, block_indices=foreign_indices(shape, opts))


@pytest.mark.parametrize("elements", [1, 3000])
@each_shape
def test_chunks(shape, elements, monkeypatch):
    """The reference takes these shapes in one chunk; here in many, down to one row each."""
    monkeypatch.setitem(reference.CHUNK_ELEMENTS, "cpu", elements)
    opts = options(shape, 1)
    for mode in ("warmup", "sparse"):
        compare(mode, shape, opts, seed=55)
    compare("sparse", shape, opts, seed=56, block_indices=foreign_indices(shape, opts))
    test_dense(shape, torch.float64)
    test_select(shape, torch.float64)


@each_shape
def test_sparse_with_block_indices_and_no_proxy(shape):
    opts = options(shape)
    picked = foreign_indices(shape, opts, seed=1)
    mine = inputs(shape, 6)[:3]
    theirs = wide(mine)
    out, kl = msa.sparse_attention(*mine, block_indices=picked, **opts)
    want, _ = naive.sparse(*theirs, block_indices=picked, **opts)
    go = randn(*out.shape, g=gen(7))
    assert kl.shape == () and kl.item() == 0.0
    close("out", out, want, 1e-10)
    for name, got, expected in zip(
        "qkv", grads((out * go).sum() + kl, mine), grads((want * go).sum(), theirs), strict=True
    ):
        close(f"d{name}", got, expected, 1e-10)


@each_shape
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_select(shape, dtype):
    opts = options(shape)
    *_, q_proxy, k_proxy = inputs(shape, 8, dtype)
    got = msa.select_blocks(q_proxy, k_proxy, top_k=shape.slots * shape.block, **opts)
    assert got.dtype == torch.int32 and not got.requires_grad
    want = naive.select(q_proxy.detach(), k_proxy.detach(), top_k=shape.slots * shape.block, **opts)
    assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_strided_inputs(mode):
    """(B, H, S, D) memory seen as (B, S, H, D), and one proxy key expanded over the heads."""
    s = Shape(Hpk=2)
    opts = options(s)
    flat = [x.detach() for x in inputs(s, 9)]
    flat[4] = flat[4][:, :, :1].expand(-1, -1, 2, -1)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in flat[:4]] + [flat[4]]
    plain = [x.contiguous().requires_grad_() for x in flat[:4]] + [flat[4].contiguous()]
    assert not strided[0].is_contiguous()
    go = randn(s.B, s.H, s.S, s.D, g=gen(10)).transpose(1, 2)
    results = []
    for tensors in (strided, plain):
        out, kl = call(mode, tensors, s, opts)
        results.append([out, *grads((out * go).sum() + kl, tensors[:4])])
    for got, want in zip(*results, strict=True):
        close("strided", got, want, 1e-12)


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_extreme_scores(mode):
    """Probabilities that underflow give neither NaN nor a wrong KL."""
    s = Shape(scale=60.0)
    compare(mode, s, options(s), torch.float64, seed=11)


@settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_shape(data):
    def draw(lo, hi):
        return data.draw(st.integers(lo, hi))

    Hkv, block = draw(1, 2), draw(1, 9)
    Hp = Hkv * draw(1, 3)
    Hpk = data.draw(st.sampled_from([n for n in range(1, Hp + 1) if Hp % n == 0]))
    S = draw(1, 34)
    s = Shape(
        B=draw(1, 2),
        S=S,
        Sk=S + draw(0, 20),
        H=Hp * draw(1, 3),
        Hkv=Hkv,
        Hp=Hp,
        Hpk=Hpk,
        D=draw(1, 6),
        block=block,
        slots=draw(1, 5),
        docs=data.draw(st.booleans()),
    )
    # a permuted call needs a whole key block for each of its query blocks
    s.permute = s.Sk // block >= -(-S // block) and data.draw(st.booleans())
    seed = draw(0, 99)
    opts = options(s, seed)
    mode = data.draw(st.sampled_from(["sparse", "warmup", "indices"]))
    more = dict(block_indices=foreign_indices(s, opts, seed)) if mode == "indices" else {}
    compare("warmup" if mode == "warmup" else "sparse", s, opts, seed=seed, **more)


# ---------------------------------------------------------------------------------------------------------
# gradcheck


@pytest.mark.parametrize("mode", ["dense", "sparse", "warmup"])
def test_gradcheck_out(mode):
    s = Shape(B=1, S=7, Sk=11, H=4, Hkv=1, Hp=2, D=2, block=2, slots=2, docs=True, permute=True)
    opts = options(s, 3)
    q, k, v, q_proxy, k_proxy = inputs(s, 12)

    def f(q, k, v):
        if mode == "dense":
            return msa.dense_attention(q, k, v, **opts)
        return call(mode, (q, k, v, q_proxy, k_proxy), s, opts)[0]

    assert torch.autograd.gradcheck(f, (q, k, v))


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_gradcheck_kl(mode):
    s = Shape(B=1, S=11, Sk=15, H=4, Hkv=1, Hp=2, D=3, block=4, slots=2, docs=True, permute=True)
    opts = options(s, 3)
    q, k, v, q_proxy, k_proxy = inputs(s, 13)
    more = dict(block_indices=foreign_indices(s, opts)) if mode == "sparse" else {}

    def f(q_proxy, k_proxy):
        tensors = (q.detach(), k.detach(), v.detach(), q_proxy, k_proxy)
        return call(mode, tensors, s, opts, materialize_kl=True, **more)[1]

    assert torch.autograd.gradcheck(f, (q_proxy, k_proxy))


# ---------------------------------------------------------------------------------------------------------
# identities


@pytest.mark.parametrize("slots", [5, 6, 40])
@pytest.mark.parametrize("docs", [False, True])
def test_top_k_of_all_is_dense_and_warmup(slots, docs):
    s = Shape(S=37, Sk=37, block=8, slots=slots, docs=docs)
    opts = options(s)
    tensors = inputs(s, 14)
    go = randn(s.B, s.S, s.H, s.D, g=gen(15))
    close("out", call("sparse", tensors, s, opts)[0], msa.dense_attention(*tensors[:3], **opts), 1e-12)
    results = []
    for mode in ("sparse", "warmup"):
        probe = torch.zeros(s.Hp, requires_grad=True)
        out, kl = call(mode, tensors, s, opts, materialize_kl=True, kl_probe=probe)
        results.append([out, kl, *grads((out * go).sum() + kl, tensors + [probe])])
    assert results[0][1].item() > 1.0
    for got, want in zip(*results, strict=True):
        close("sparse = warmup", got, want, 1e-6 if got.dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("materialize_kl", [False, True])
@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_each_loss_reaches_its_own_inputs(mode, materialize_kl):
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 16)
    out, kl = call(mode, tensors, s, opts, materialize_kl=materialize_kl)
    from_kl = grads(kl, tensors)
    out, kl = call(mode, tensors, s, opts, materialize_kl=materialize_kl)
    from_lm = grads(out.square().sum(), tensors)
    for i, name in enumerate(NAMES):
        own, other = (from_lm, from_kl) if i < 3 else (from_kl, from_lm)
        assert own[i].abs().max() > 1e-3, name
        assert torch.count_nonzero(other[i]) == 0, name


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_frozen_backbone_and_frozen_proxy(mode):
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 17)
    go = randn(s.B, s.S, s.H, s.D, g=gen(18))
    out, kl = call(mode, tensors, s, opts)
    want = grads((out * go).sum() + kl, tensors)
    for free in ([0, 1, 2], [3, 4], [0], [1], [2], [3], [4]):
        some = [x.detach().requires_grad_(i in free) for i, x in enumerate(tensors)]
        out, kl = call(mode, some, s, opts)
        got = grads((out * go).sum() + kl, [some[i] for i in free])
        for i, d in zip(free, got, strict=True):
            assert torch.equal(d, want[i]), NAMES[i]


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_no_grad(mode):
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 19)
    want, want_kl = oracle(mode, tensors, s, opts)
    with torch.no_grad():
        out, kl = call(mode, tensors, s, opts)
        _, value = call(mode, tensors, s, opts, materialize_kl=True)
    close("out", out, want, 1e-10)
    close("kl", value, want_kl.sum(), 1e-10)
    assert kl.item() == 0.0 and not kl.requires_grad and not out.requires_grad


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_kl_gradient_rows_sum_to_zero(mode):
    """With one vector for all proxy keys, dq_proxy is that vector times the sum of (student - teacher)."""
    s = Shape(docs=True)
    opts = options(s)
    tensors = inputs(s, 20)
    tensors[4] = torch.ones_like(tensors[4])
    _, kl = call(mode, tensors, s, opts)
    (dq,) = grads(kl, tensors[3:4])
    assert dq.abs().max() < 1e-13
    # and not because there is no gradient: the same rows do move when the keys differ
    tensors[4] = inputs(s, 20)[4].detach()
    _, kl = call(mode, tensors, s, opts)
    assert grads(kl, tensors[3:4])[0].abs().max() > 1e-2


@pytest.mark.parametrize("mode", ["dense", "sparse", "warmup"])
def test_documents_never_meet(mode):
    """Another document's tensors can change at will: this one's outputs and gradients stay bit for bit."""
    s = Shape(B=2, S=48, Sk=48, block=8, slots=2)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 4, 4]], dtype=torch.int32)
    opts = dict(doc_start_block=starts, block_size=8)
    spans = [(0, 0, 16), (0, 16, 40), (0, 40, 48), (1, 0, 8), (1, 8, 32), (1, 32, 48)]
    go = randn(s.B, s.S, s.H, s.D, g=gen(21), dtype=torch.float32)

    def everything(tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        if mode == "dense":
            out = msa.dense_attention(*leaves[:3], **opts)
            return [out, *grads((out * go).sum(), leaves[:3])]
        out, kl = call(mode, leaves, s, opts)
        return [out, *grads((out * go).sum() + kl, leaves)]

    base = inputs(s, 22, torch.float32)
    before = everything(base)
    for b, lo, hi in spans:
        changed = [x.detach().clone() for x in base]
        for x in changed:
            x[b, lo:hi] = randn(hi - lo, *x.shape[2:], g=gen(23), dtype=torch.float32, scale=30.0)
        keep = torch.ones(s.B, s.S, dtype=torch.bool)
        keep[b, lo:hi] = False
        for i, (x, y) in enumerate(zip(before, everything(changed), strict=True)):
            assert torch.equal(x[keep], y[keep]), (i, b, lo)
            assert not torch.equal(x[~keep], y[~keep]), (i, b, lo)


@pytest.mark.parametrize("mode", ["dense", "sparse", "warmup", "indices"])
@pytest.mark.parametrize("docs", [False, True])
def test_pieces_equal_the_whole(mode, docs):
    """One call over all query blocks, or several over some of them each: the same outputs and sums."""
    s = Shape(B=2, S=45, Sk=45, block=8, slots=2, docs=docs)  # blocks 0..4 whole, 5 of 5 tokens
    opts = options(s)
    doc, scale = opts["doc_start_block"], 0.4
    picked = foreign_indices(s, opts)
    tensors = inputs(s, 24)
    go = randn(s.B, s.S, s.H, s.D, g=gen(25))

    def run(rows, blocks, probe):
        q, k, v, q_proxy, k_proxy = tensors
        some = (q[:, rows], k, v, q_proxy[:, rows], k_proxy)
        where = dict(
            doc_start_block=None if doc is None else doc[:, blocks],
            q_block=torch.tensor(blocks, dtype=torch.int32),
            scale=scale,
            block_size=8,
        )
        if mode == "dense":
            return msa.dense_attention(*some[:3], **where), q.new_zeros(())
        if mode == "indices":
            where["block_indices"] = picked[:, rows]
        return call(
            "warmup" if mode == "warmup" else "sparse", some, s, where, materialize_kl=True, kl_probe=probe
        )

    results = []
    for pieces in ([[0, 1, 2, 3, 4, 5]], [[3, 0], [4], [1, 2, 5]], [[4, 2, 5], [3, 1, 0]]):
        out, loss, kls = torch.zeros_like(go), 0.0, 0.0
        probe = torch.zeros(s.Hp, requires_grad=True)
        for blocks in pieces:
            rows = torch.cat([torch.arange(b * 8, min(b * 8 + 8, s.S)) for b in blocks])
            part, kl = run(rows, blocks, probe)
            out[:, rows] = part.detach()
            loss, kls = loss + (part * go[:, rows]).sum() + 0.7 * kl, kls + kl
        used = tensors[:3] if mode == "dense" else tensors + [probe]
        results.append([out, kls, *grads(loss, used)])
    for other in results[1:]:
        for i, (got, want) in enumerate(zip(other, results[0], strict=True)):
            close(f"piece result {i}", got, want, 1e-5 if got.dtype == torch.float32 else 1e-11)


# ---------------------------------------------------------------------------------------------------------
# selection


def test_select_by_hand():
    """Four blocks of two keys, one feature; every query's score of a key is the key."""
    k = torch.tensor([1.0, 5.0, 3.0, 4.0, 5.0, 0.0, 9.0, 9.0]).reshape(1, 8, 1, 1)
    got = msa.select_blocks(torch.ones(1, 8, 1, 1), k, top_k=6, block_size=2)
    want = [[0, -1, -1]] * 2 + [[1, 0, -1]] * 2 + [[2, 0, 1]] * 2 + [[3, 0, 2]] * 2
    assert got[0, :, 0].tolist() == want
    got = msa.select_blocks(-torch.ones(1, 8, 1, 1), k, top_k=4, block_size=2)  # block scores -1, -3, -0
    assert got[0, :, 0].tolist() == [[0, -1]] * 2 + [[1, 0]] * 2 + [[2, 0]] * 2 + [[3, 2]] * 2
    starts = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    got = msa.select_blocks(torch.ones(1, 8, 1, 1), k, top_k=6, block_size=2, doc_start_block=starts)
    want = [[0, -1, -1]] * 2 + [[1, 0, -1]] * 2 + [[2, 1, -1]] * 2 + [[3, 2, 1]] * 2
    assert got[0, :, 0].tolist() == want
    order = torch.tensor([3, 1], dtype=torch.int32)
    got = msa.select_blocks(torch.ones(1, 3, 1, 1), k, top_k=4, block_size=2, q_block=order)
    assert got[0, :, 0].tolist() == [[3, 0], [3, 0], [1, 0]]


@each_shape
def test_selection_is_well_formed(shape):
    opts = options(shape)
    *_, q_proxy, k_proxy = inputs(shape, 26, torch.float32)
    picked = msa.select_blocks(q_proxy, k_proxy, top_k=shape.slots * shape.block, **opts)
    assert picked.shape == (shape.B, shape.S, shape.Hp, shape.slots)
    for b in range(shape.B):
        for t, place in enumerate(naive.places(shape.S, shape.block, opts["q_block"])):
            first, local = naive.first_block(b, t, shape.block, opts["doc_start_block"]), place // shape.block
            n = min(shape.slots, local - first + 1)
            for row in picked[b, t].tolist():
                assert row[0] == local
                assert row[n:] == [-1] * (shape.slots - n)
                assert len(set(row[:n])) == n and all(first <= x < local for x in row[1:n])


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("docs", [False, True])
def test_ties_go_to_the_lower_block(dtype, docs):
    s = Shape(B=2, S=90, Sk=90, Hp=4, Hpk=2, D=3, block=4, slots=6, docs=docs)
    opts = options(s)
    g = gen(27)
    q = torch.randint(-1, 2, (s.B, s.S, s.Hp, s.D), generator=g).to(dtype)
    k = torch.randint(-1, 2, (s.B, s.Sk, s.Hpk, s.D), generator=g).to(dtype)
    got = msa.select_blocks(q, k, top_k=24, **opts)
    want = naive.select(q, k, top_k=24, **opts)
    assert torch.equal(got, want)
    same = msa.select_blocks(torch.zeros_like(q), k, top_k=24, **opts)  # every score 0
    if not docs:
        assert same[0, 80, 0].tolist() == [20, 0, 1, 2, 3, 4]
    assert torch.equal(same, naive.select(torch.zeros_like(q), k, top_k=24, **opts))


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_odd_scores(dtype):
    """-0.0 equals +0.0, NaN ranks as -inf, and -inf is picked while slots remain."""
    nan, inf = math.nan, math.inf
    values = torch.tensor([-inf, -inf, nan, nan, -0.0, 0.0, 1.0, -1.0, inf])
    g = gen(28)
    for trial in range(12):
        keys = values[torch.randint(len(values), (2, 60, 1, 1), generator=g)]
        if trial % 3 == 1:
            keys = torch.where(torch.isfinite(keys), -inf, keys)
        q = torch.ones(2, 60, 3, 1)
        q[:, ::2] *= -1
        q[1, ::5] = nan
        q, keys = q.to(dtype), keys.to(dtype)
        got = msa.select_blocks(q, keys, top_k=15, block_size=3)
        assert torch.equal(got, naive.select(q, keys, top_k=15, block_size=3)), trial


@pytest.mark.parametrize("first", [-0.0, 0.0])
def test_negative_zero_ties(first):
    keys = torch.tensor([first, -1.0, -first, -1.0, -1.0, -1.0, 3.0, 3.0]).reshape(1, 8, 1, 1)
    got = msa.select_blocks(torch.ones(1, 8, 1, 1), keys, top_k=4, block_size=2)
    assert got[0, 7, 0].tolist() == [3, 0]
    got = msa.select_blocks(-torch.ones(1, 8, 1, 1), keys.abs().copysign(-keys), top_k=4, block_size=2)
    assert got[0, 7, 0].tolist() == [3, 0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_blocks_without_a_score_are_still_picked(bad):
    k = torch.full((1, 32, 1, 2), bad)
    k[0, 20:24] = -3.0
    got = msa.select_blocks(torch.ones(1, 32, 1, 2), k, top_k=16, block_size=4)
    assert got[0, 31, 0].tolist() == [7, 5, 0, 1]
    assert got[0, 9, 0].tolist() == [2, 0, 1, -1]


def test_acausal_scores_are_never_seen():
    """What lies after a query, its own block included, does not move its selection, not even as NaN."""
    s = Shape(B=1, S=40, Sk=40, block=8, slots=3)
    *_, q_proxy, k_proxy = (x.detach() for x in inputs(s, 29, torch.float32))
    want = msa.select_blocks(q_proxy, k_proxy, top_k=24, block_size=8)
    for bad in (1e9, math.nan, math.inf):
        for t in (0, 7, 8, 19, 38):
            poisoned = k_proxy.clone()
            poisoned[:, t + 1 :] = bad
            got = msa.select_blocks(q_proxy, poisoned, top_k=24, block_size=8)
            assert torch.equal(got[:, : t + 1], want[:, : t + 1])


def test_bf16_scores_are_compared_in_fp32():
    """256 and 257 are one number in bf16; the scores of bf16 inputs must still tell them apart."""
    q = torch.ones(1, 16, 1, 2, dtype=torch.bfloat16)
    k = torch.zeros(1, 16, 1, 2, dtype=torch.bfloat16)
    k[0, 0, 0] = torch.tensor([256.0, 0.0])
    k[0, 5, 0] = torch.tensor([256.0, 1.0])
    k[0, 9, 0] = torch.tensor([256.0, 0.5])
    got = msa.select_blocks(q, k, top_k=16, block_size=4)
    assert got[0, 15, 0].tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("small", ["q_proxy", "k_proxy"])
def test_fp32_inputs_are_not_rounded(small):
    """A score that lives in the bits which TF32 and the half types drop."""
    q, k = torch.tensor([1.0, -1.0]).repeat(1, 16, 1, 1), torch.zeros(1, 16, 1, 2)
    k[0, 5, 0] = 1.0
    (q[..., 0] if small == "q_proxy" else k[0, 5, 0, :1]).add_(2.0**-12)
    got = msa.select_blocks(q, k, top_k=12, block_size=4)
    assert got[0, 15, 0].tolist() == [3, 1, 0]


def test_scale_does_not_change_the_order_but_its_default_is_by_head_dim():
    s = Shape()
    tensors = inputs(s, 30)
    default = call("sparse", tensors, s, dict(block_size=8), materialize_kl=True)
    given_ = call("sparse", tensors, s, dict(block_size=8, scale=1 / math.sqrt(s.D)), materialize_kl=True)
    other = call("sparse", tensors, s, dict(block_size=8, scale=1.0), materialize_kl=True)
    assert torch.equal(default[0], given_[0]) and torch.equal(default[1], given_[1])
    assert not torch.allclose(default[0], other[0]) and not torch.allclose(default[1], other[1])


# ---------------------------------------------------------------------------------------------------------
# the KL in training: probe, checkpointing, compile, tiny factors


def step_loss(out, kl, use):
    """Losses of which the KL is all, a tiny part, or nothing."""
    return {
        "out": out.square().sum(),
        "kl": kl,
        "both": out.square().sum() + 1e-6 * kl,
        "zero": (out * 0).sum(),
    }[use]


@pytest.mark.parametrize("use", ["out", "kl", "both", "zero"])
@pytest.mark.parametrize("materialize_kl", [False, True])
@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_probe_is_the_kl_whatever_gradients_arrive(mode, materialize_kl, use):
    s = Shape(docs=True)
    opts = options(s)
    tensors = inputs(s, 31, torch.float32)
    _, want = oracle(mode, wide(tensors), s, opts)
    probe = torch.zeros(s.Hp, requires_grad=True)
    out, kl = call(mode, tensors, s, opts, kl_probe=probe, materialize_kl=materialize_kl)
    step_loss(out, kl, use).backward()
    assert probe.grad.dtype == torch.float32
    close("kl_probe", probe.grad, want, 1e-5)


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
@pytest.mark.parametrize("free", [[], [0], [0, 1, 2], [3, 4], [4]])
def test_probe_with_frozen_inputs(mode, free):
    s = Shape()
    opts = options(s)
    tensors = [x.detach().requires_grad_(i in free) for i, x in enumerate(inputs(s, 32))]
    _, want = oracle(mode, wide(tensors), s, opts)
    for use in ("out", "kl"):
        probe = torch.zeros(s.Hp, requires_grad=True)
        step_loss(*call(mode, tensors, s, opts, kl_probe=probe), use).backward()
        close("kl_probe", probe.grad, want, 1e-5)


def test_probe_takes_fp64_with_fp64_inputs():
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 33)
    _, want = oracle("sparse", wide(tensors), s, opts)
    probe = torch.zeros(s.Hp, dtype=torch.float64, requires_grad=True)
    call("sparse", tensors, s, opts, kl_probe=probe)[1].backward()
    close("kl_probe", probe.grad, want, 1e-11)


def test_probe_does_not_change_the_step():
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 34, torch.float32)
    results = []
    for probe in (None, torch.zeros(s.Hp, requires_grad=True)):
        out, kl = call("sparse", tensors, s, opts, kl_probe=probe)
        results.append([out, kl, *grads(out.square().sum() + 0.1 * kl, tensors)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_probe_adds_up_over_micro_batches_and_layers():
    s = Shape(B=3)
    opts = options(s)
    layers = [inputs(s, 35), inputs(s, 36)]
    want = torch.stack([oracle("sparse", wide(t), s, opts)[1] for t in layers])
    probe = torch.zeros(2, s.Hp, requires_grad=True)
    for b in range(s.B):  # micro-batches of one sequence
        loss = 0.0
        for layer, tensors in enumerate(layers):
            out, kl = call("sparse", [x[b : b + 1] for x in tensors], s, opts, kl_probe=probe[layer])
            loss = loss + out.sum() + 1e-6 * kl
        loss.backward()
    close("kl_probe", probe.grad, want, 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_probe_counts_once_under_checkpointing(mode, use_reentrant):
    s = Shape(docs=True)
    opts = options(s)
    tensors = inputs(s, 37)
    _, want = oracle(mode, wide(tensors), s, opts)

    def layer(q, k, v, q_proxy, k_proxy, probe):
        return call(mode, (q * 1.0, k * 1.0, v * 1.0, q_proxy * 1.0, k_proxy * 1.0), s, opts, kl_probe=probe)

    results = []
    for checkpointed in (False, True):
        probe = torch.zeros(2, s.Hp, requires_grad=True)
        leaves = wide(tensors)
        if checkpointed:
            out, kl = checkpoint(layer, *leaves, probe[1], use_reentrant=use_reentrant)
        else:
            out, kl = layer(*leaves, probe[1])
        (out.square().sum() + 0.1 * kl).backward()
        assert torch.count_nonzero(probe.grad[0]) == 0
        close("kl_probe", probe.grad[1], want, 1e-5)
        results.append([x.grad for x in leaves])
    for name, got, expected in zip(NAMES, *results, strict=True):
        assert torch.equal(got, expected), name


class Recorder(TorchDispatchMode):
    """The calls of msa's custom ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if getattr(func, "namespace", "") == "msa":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_saves_the_selection():
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 38)

    def policy(ctx, op, *args, **kwargs):
        keep = getattr(op, "namespace", "") == "msa" and "select" in op.name()
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v, q_proxy, k_proxy):
        return call("sparse", (q * 1.0, k * 1.0, v * 1.0, q_proxy * 1.0, k_proxy * 1.0), s, opts)

    def selections(**how):
        with Recorder() as recorder:
            out, kl = checkpoint(layer, *tensors, use_reentrant=False, **how)
            got = grads(out.square().sum() + kl, tensors)
        return sum("select" in func.name() for func, *_ in recorder.calls), got

    plain, want = selections()
    saved, got = selections(context_fn=lambda: create_selective_checkpoint_contexts(policy))
    assert (plain, saved) == (2, 1)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["dense", "sparse", "warmup", "indices"])
@pytest.mark.parametrize("materialize_kl", [False, True])
def test_compile_makes_no_graph_break(mode, materialize_kl):
    s = Shape(B=1, S=21, Sk=21, docs=True)
    opts = options(s)
    picked = foreign_indices(s, opts)

    def step(tensors, probe, opts, picked):
        if mode == "dense":
            return msa.dense_attention(*tensors[:3], **opts).square().sum()
        more = dict(block_indices=picked) if mode == "indices" else {}
        kind = "warmup" if mode == "warmup" else "sparse"
        out, kl = call(kind, tensors, s, opts, kl_probe=probe[1], materialize_kl=materialize_kl, **more)
        return out.square().sum() + 0.1 * kl

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for seed in (39, 40):
        results = []
        for f in (step, compiled):
            tensors = inputs(s, seed, torch.float32)
            probe = torch.zeros(2, s.Hp, requires_grad=True)
            loss = f(tensors, probe, opts, picked)
            results.append([loss, *grads(loss, tensors + [probe])])
        for got, want in zip(results[1], results[0], strict=True):
            close("compiled", got, want, 1e-6)
        if mode != "dense":
            assert results[1][-1][1].min() > 0.01  # the probe


@pytest.mark.parametrize("dynamic, most", [(None, 2), (True, 1)])
def test_compile_once_for_all_lengths(dynamic, most):
    """One graph serves every sequence length: at once with symbolic sizes, else from the second length on."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, q_proxy, k_proxy):
        return msa.sparse_attention(q, k, v, q_proxy, k_proxy, top_k=16, block_size=8)[0]

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for S in (21, 40, 67, 90):
        s = Shape(S=S, Sk=S)
        tensors = inputs(s, 41)
        close("out", compiled(*tensors), step(*tensors), 1e-12)
    assert len(graphs) <= most


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_tiny_kl_factor_in_bf16(mode):
    """1 / (N Hp) is about 5e-7: it must neither flush the gradient to zero nor cost it digits."""
    s = Shape(B=1, S=90, Sk=90, D=16, block=16, slots=3)
    opts = options(s)
    tensors = inputs(s, 42, torch.bfloat16)
    theirs = wide(tensors)
    want = grads(oracle(mode, theirs, s, opts)[1].sum(), theirs)[3:]

    def scaled(factor):
        return grads(call(mode, tensors, s, opts)[1] * factor, tensors)[3:]

    for name, one, tiny, odd, expected in zip(
        NAMES[3:], scaled(1.0), scaled(2.0**-21), scaled(1 / (3e6 * s.Hp)), want, strict=True
    ):
        assert torch.equal(one.float() * 2.0**-21, tiny.float()), name  # a power of two costs nothing
        close(name, odd.double() * 3e6 * s.Hp, expected, 1e-2)
        # rounded once, at the end: elements that are not small are good to bf16's last bit
        big = expected.abs() > 0.05 * expected.abs().max()
        assert ((odd.double() * 3e6 * s.Hp - expected).abs() / expected.abs())[big].max() < 2.0**-8, name


def test_kl_is_a_sum_over_the_batch():
    s = Shape(B=3)
    opts = options(s)
    tensors = inputs(s, 43)
    whole = call("sparse", tensors, s, opts, materialize_kl=True)[1]
    parts = [
        call("sparse", [x[b : b + 1] for x in tensors], s, opts, materialize_kl=True)[1] for b in range(3)
    ]
    close("kl", sum(parts), whole, 1e-12)


def test_same_numbers_twice():
    s = Shape()
    opts = options(s)
    tensors = inputs(s, 44, torch.float32)
    results = []
    for _ in range(2):
        out, kl = call("sparse", tensors, s, opts, materialize_kl=True)
        results.append([out, kl, *grads(out.square().sum() + kl, tensors)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


# ---------------------------------------------------------------------------------------------------------
# the custom ops


class Wrapped(torch.Tensor):
    """A tensor whose ops are seen by a class of its own."""

    calls: list = []

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.name())
        args = tree_map(lambda x: x.x if isinstance(x, Wrapped) else x, args)
        return tree_map(
            lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, func(*args, **(kwargs or {}))
        )


def test_whoever_takes_part_sees_the_ops():
    """The short way past the dispatcher is for calls that are nobody else's: the same numbers either way."""
    s = Shape()
    tensors = inputs(s, 59, torch.float32)
    names = {"msa::select_blocks", "msa::attention", "msa::attention_backward"}

    def step(tensors=tensors):
        out, kl = msa.sparse_attention(*tensors, top_k=16, block_size=8)
        return [out, *grads(out.square().sum() + kl, tensors)]

    want = step()
    with torch.profiler.profile(record_shapes=True) as trace:
        results = [step()]
    events = {event.name: event.input_shapes for event in trace.events() if event.name in names}
    assert events.keys() == names
    assert events["msa::attention"][5] == [s.B, s.S, s.Hp, 2]  # python -m msa.trace reads it
    with Recorder() as recorder:
        results.append(step())
    assert {func.name() for func, *_ in recorder.calls} == names
    for got in results:
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)

    proxies = [x.detach() for x in tensors[3:]]
    select = functools.partial(msa.select_blocks, top_k=16, block_size=8)
    both = torch.func.vmap(select)(*(torch.stack([x, -x]) for x in proxies))
    assert torch.equal(both[1], select(*(-x for x in proxies)))
    Wrapped.calls.clear()
    assert torch.equal(select(*map(Wrapped, proxies)).x, select(*proxies))
    assert "msa::select_blocks" in Wrapped.calls


def test_a_second_derivative_is_refused():
    s = Shape()
    tensors = inputs(s, 60)
    out, _ = call("sparse", tensors, s, options(s))
    dq = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="twice"):
        dq.sum().backward()


def test_opcheck():
    """Schema, fake implementation and autograd of every op under torch.ops.msa that these calls reach."""
    s = Shape(B=1, S=13, Sk=21, H=4, Hkv=1, Hp=2, D=4, block=4, slots=2, docs=True, permute=True)
    opts = options(s)
    tensors = inputs(s, 45, torch.float32)
    with Recorder() as recorder:
        msa.select_blocks(tensors[3], tensors[4], top_k=8, **opts)
        for mode in ("sparse", "warmup"):
            probe = torch.zeros(s.Hp, requires_grad=True)
            for materialize_kl in (False, True):
                out, kl = call(mode, tensors, s, opts, kl_probe=probe, materialize_kl=materialize_kl)
                (out.sum() + kl).backward()
        msa.sparse_attention(*tensors[:3], block_indices=foreign_indices(s, opts), **opts)[0].sum().backward()
        msa.dense_attention(*tensors[:3], **opts).sum().backward()
    names = {func.name() for func, *_ in recorder.calls}
    assert any("select" in name for name in names) and len(names) >= 2, names
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")

    def leaf(x, differentiable):
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach().clone()
        return x.requires_grad_(differentiable and x.is_floating_point())

    for func, args, kwargs in recorder.calls:
        has_autograd = func.has_kernel_for_dispatch_key("Autograd") and "backward" not in func.name()
        args = tuple(leaf(x, has_autograd and "select" not in func.name()) for x in args)
        kwargs = {name: leaf(x, False) for name, x in kwargs.items()}
        torch.library.opcheck(func, args, kwargs, test_utils=checks)


# ---------------------------------------------------------------------------------------------------------
# memory

MEMORY_PROBE = """
import json, re, sys, torch, msa
S, mode = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
def kb(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1))
def step(S):
    q, k, v, qp, kp = (torch.randn(1, S, 1, 16, requires_grad=True) for _ in range(5))
    probe = torch.zeros(1, requires_grad=True)
    if mode == "warmup":
        out, kl = msa.warmup_attention(q, k, v, qp, kp, kl_probe=probe)
    else:
        out, kl = msa.sparse_attention(q, k, v, qp, kp, top_k=1024, kl_probe=probe)
    (out.square().mean() + kl / S).backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v, qp, kp, probe)) and probe.grad.item() > 0
step(2048)
before = kb("VmHWM")
step(S)
print(json.dumps((kb("VmHWM") - before) * 1024))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
@pytest.mark.parametrize(
    "S, mode",
    [
        (8192, "sparse"),
        pytest.param(8192, "warmup", marks=pytest.mark.slow),
        pytest.param(32768, "sparse", marks=pytest.mark.slow),
        pytest.param(32768, "warmup", marks=pytest.mark.slow),
    ],
)
def test_no_square_of_the_sequence(S, mode):
    """Forward and backward stay well below what one S x S tensor would take (at 32K, one of bytes)."""
    command = [sys.executable, "-c", MEMORY_PROBE, str(S), mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])
    limit = S * S // 2 if S > 16384 else S * S * 2  # chunk * S is not yet small beside S * S at 8K
    assert grown < limit, f"{grown / 2**20:.0f} MiB more, allowed {limit / 2**20:.0f}"


# ---------------------------------------------------------------------------------------------------------
# decoding


@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("top_k", [None, 8, 24, 96])
def test_decode_is_the_last_row(top_k, dtype, lengths_dtype):
    s = Shape(B=8, S=1, Sk=70, H=8, Hkv=2, Hp=4, Hpk=2, D=8, block=8)
    q, k, v, q_proxy, k_proxy = inputs(s, 46, dtype)
    lengths = torch.tensor([1, 2, 8, 9, 40, 41, 69, 70], dtype=lengths_dtype)
    for b, n in enumerate(lengths.tolist()):  # what a cache holds past its length is anything
        for x in (k, v, k_proxy):
            x.data[b, n:] = 77.0
    out = msa.decode_attention(q, k, v, q_proxy, k_proxy, lengths=lengths, top_k=top_k, block_size=8)
    assert out.shape == (8, 1, 8, 8) and out.dtype == dtype and not out.requires_grad
    for b, n in enumerate(lengths.tolist()):
        q_full, proxy_full = (x[b : b + 1].expand(1, n, -1, -1) for x in (q, q_proxy))
        keys = [x[b : b + 1, :n] for x in (k, v)]
        if top_k is None:
            want = msa.dense_attention(q_full, *keys, block_size=8)
        else:
            proxy = (proxy_full, k_proxy[b : b + 1, :n])
            want, _ = msa.sparse_attention(q_full, *keys, *proxy, top_k=top_k, block_size=8)
        close(f"length {n}", out[b, 0], want[0, -1], TOL[dtype])


@pytest.mark.parametrize("top_k", [None, 16])
def test_decode_looks_at_nothing_past_the_length(top_k):
    """A cache is allocated, not filled: NaN may lie behind the last token."""
    s = Shape(B=3, S=1, Sk=50, H=4, Hkv=2, Hp=2, D=8, block=8)
    q, k, v, q_proxy, k_proxy = (x.detach() for x in inputs(s, 54))
    lengths = torch.tensor([17, 50, 33])
    want = msa.decode_attention(q, k, v, q_proxy, k_proxy, lengths=lengths, top_k=top_k, block_size=8)
    for b, n in enumerate(lengths.tolist()):
        for x in (k, v, k_proxy):
            x[b, n:] = math.nan
    got = msa.decode_attention(q, k, v, q_proxy, k_proxy, lengths=lengths, top_k=top_k, block_size=8)
    assert torch.equal(got, want)


def test_decode_against_the_oracle():
    s = Shape(B=3, S=1, Sk=50, H=4, Hkv=2, Hp=2, D=8, block=8)
    q, k, v, q_proxy, k_proxy = (x.detach() for x in inputs(s, 47))
    lengths = torch.tensor([17, 50, 33])
    for scale in (None, 0.7):
        dense = msa.decode_attention(q, k, v, lengths=lengths, scale=scale, block_size=8)
        sparse = msa.decode_attention(
            q, k, v, q_proxy, k_proxy, lengths=lengths, top_k=16, scale=scale, block_size=8
        )
        for b, n in enumerate(lengths.tolist()):
            rows = [x[b : b + 1].expand(1, n, -1, -1) for x in (q, q_proxy)]
            keys = [x[b : b + 1, :n] for x in (k, v, k_proxy)]
            want = naive.dense(rows[0], *keys[:2], scale=scale, block_size=8)
            close("dense", dense[b, 0], want[0, -1], 1e-10)
            want, _ = naive.sparse(rows[0], *keys[:2], rows[1], keys[2], top_k=16, scale=scale, block_size=8)
            close("sparse", sparse[b, 0], want[0, -1], 1e-10)


def decode_selection(q_proxy, k_proxy, lengths, slots, block):
    """What decoding selects, and what select_blocks does for a query at each sequence's last place."""
    got = reference.decode_selection(q_proxy, k_proxy, lengths - 1, slots, 0.3, block)
    got = F.pad(got, (0, slots - got.shape[-1]), value=-1)
    want = []
    for b, n in enumerate(lengths.tolist()):
        queries = q_proxy[b : b + 1].expand(1, n, -1, -1)
        selected = msa.select_blocks(
            queries, k_proxy[b : b + 1, :n], top_k=slots * block, scale=0.3, block_size=block
        )
        want.append(selected[0, -1])
    return got, torch.stack(want).long()


@pytest.mark.parametrize("ranked", [512, 3])  # blocks that are sorted at a time
@pytest.mark.parametrize("slots", [1, 2, 5, 40])
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_decode_selects_what_select_blocks_does(dtype, slots, ranked, monkeypatch):
    """Small integers tie often; NaN, infinities and -0 are among them, and anything lies behind a length."""
    monkeypatch.setattr(reference, "RANKED_BLOCKS", ranked)
    monkeypatch.setattr(reference, "CACHE_ELEMENTS", {"cpu": 100})
    g = gen(55)
    q_proxy = torch.randint(-2, 3, (6, 1, 4, 3), generator=g).to(dtype)
    k_proxy = torch.randint(-1, 2, (6, 70, 2, 3), generator=g).to(dtype)
    lengths = torch.tensor([1, 5, 40, 41, 66, 70])
    k_proxy[:, 2:70:9, :, 1] = math.nan
    k_proxy[:, 8:16] = -math.inf
    k_proxy[:, 20] = math.inf
    k_proxy[:, 24:28] = -0.0
    k_proxy[3, :, :, 2] = math.nan  # all of a sequence
    got, want = decode_selection(q_proxy, k_proxy, lengths, slots, 4)
    assert torch.equal(got, want)
    for b, n in enumerate(lengths.tolist()):
        for behind in (math.nan, math.inf):
            k_proxy[b, n:] = behind
            assert torch.equal(decode_selection(q_proxy, k_proxy, lengths, slots, 4)[0], want)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_decode_of_a_short_cache(dtype):
    """No block before the query's own, a proxy without keys to score."""
    s = Shape(B=2, S=1, Sk=3, D=8, block=8)
    tensors = inputs(s, 56, dtype)
    lengths = torch.tensor([2, 3])
    out = msa.decode_attention(*tensors, lengths=lengths, top_k=24, block_size=8)
    dense = msa.decode_attention(*tensors[:3], lengths=lengths, block_size=8)
    close("out", out, dense, TOL[dtype])


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("top_k", [None, 24])
def test_decode_in_chunks(top_k, dtype, monkeypatch):
    s = Shape(B=3, S=1, Sk=70, H=8, Hkv=2, Hp=4, Hpk=2, D=8, block=8)
    cache = inputs(dataclasses.replace(s, Sk=90), 57, dtype)
    q, k, v, q_proxy, k_proxy = [
        x.detach()[:, : 70 if x.shape[1] > 1 else 1] for x in cache
    ]  # views of more room
    call = functools.partial(
        msa.decode_attention, q, k, v, q_proxy, k_proxy, lengths=torch.tensor([70, 1, 33]), block_size=8
    )
    want = call(top_k=top_k)
    for elements in (1, 200, 1000):
        monkeypatch.setattr(reference, "CACHE_ELEMENTS", {"cpu": elements})
        close(f"{elements} elements at a time", call(top_k=top_k), want, TOL[dtype])


@pytest.mark.parametrize("top_k", [None, 16, 4096])
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_decode_looks_at_no_values(dtype, top_k):
    """On the meta device, where to look at a value is an error: no shape and no branch depends on data."""
    s = Shape(B=2, S=1, Sk=8 * 700, H=8, Hkv=2, Hp=4, Hpk=2, D=8, block=8)  # blocks are sorted in pieces
    q, k, v, q_proxy, k_proxy = (x.detach().to("meta") for x in inputs(s, 58, dtype))
    lengths = torch.empty(2, dtype=torch.long, device="meta")
    out = msa.decode_attention(q, k, v, q_proxy, k_proxy, lengths=lengths, top_k=top_k, block_size=8)
    assert out.shape == q.shape and out.dtype == dtype


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("top_k", [None, 512])
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_decode_copies_no_cache(dtype, top_k):
    """Scores are all that grows with a cache; its tensors are copied or converted a few keys at a time."""
    n, D = 2**16, 64
    k, v, k_proxy = (torch.zeros(1, n, 1, D, dtype=dtype) for _ in range(3))
    q, q_proxy = torch.zeros(1, 1, 2, D, dtype=dtype), torch.zeros(1, 1, 1, D, dtype=dtype)
    proxy = {} if top_k is None else {"q_proxy": q_proxy, "k_proxy": k_proxy, "top_k": top_k}
    with Largest() as largest:
        msa.decode_attention(q, k, v, lengths=torch.tensor([n - 3]), **proxy)
    converted = 2**20 * reference.accumulate_dtype(dtype).itemsize
    assert largest.bytes <= max(n * 2 * 8, converted if top_k is None or dtype == torch.bfloat16 else 0)


# ---------------------------------------------------------------------------------------------------------
# errors

E = Shape(B=2, S=20, Sk=28, H=4, Hkv=2, Hp=2, Hpk=1, D=4, block=4, slots=2)
GOOD_INDICES = naive.select(*inputs(E, 48)[3:], top_k=8, block_size=4)


def i32(*x):
    return torch.tensor(x, dtype=torch.int32)


def z(*size, dtype=torch.float64):
    return torch.zeros(*size, dtype=dtype)


def indices(row=None, dtype=torch.int32):
    """A valid selection, with the last query's row of head 1 (place 19, block 4) replaced."""
    x = GOOD_INDICES.clone()
    if row is not None:
        x[1, 19, 1] = torch.tensor(row, dtype=torch.int32)
    return x.to(dtype)


DOC = i32([0, 0, 2, 2, 2], [0, 1, 1, 3, 3])
GEOMETRY = {
    "doc_start_block, one dimension": (dict(doc_start_block=i32(0, 0, 0, 0, 0)), "doc_start_block"),
    "doc_start_block, batch": (dict(doc_start_block=DOC[:1]), "doc_start_block"),
    "doc_start_block, blocks": (dict(doc_start_block=DOC[:, :4]), "doc_start_block"),
    "doc_start_block, dtype": (dict(doc_start_block=DOC.long()), "doc_start_block"),
    "doc_start_block, float": (dict(doc_start_block=DOC.float()), "doc_start_block"),
    "doc_start_block, negative": (dict(doc_start_block=DOC - 1), "doc_start_block"),
    "doc_start_block, acausal": (dict(doc_start_block=DOC + 1), "doc_start_block"),
    "doc_start_block, acausal by q_block": (
        dict(doc_start_block=DOC, q_block=i32(4, 3, 1, 0, 2)),
        "doc_start_block",
    ),
    "q_block, rank": (dict(q_block=i32([0, 1, 2, 3, 4])), "q_block"),
    "q_block, length": (dict(q_block=i32(0, 1, 2, 3)), "q_block"),
    "q_block, dtype": (dict(q_block=i32(0, 1, 2, 3, 4).long()), "q_block"),
    "q_block, twice": (dict(q_block=i32(0, 1, 2, 2, 4)), "q_block"),
    "q_block, negative": (dict(q_block=i32(0, 1, 2, -1, 4)), "q_block"),
    "q_block, past the keys": (dict(q_block=i32(0, 1, 2, 7, 4)), "q_block"),
}
SELECTING = {
    "q_proxy, rank": (dict(q_proxy=z(2, 20, 4)), "q_proxy"),
    "q_proxy, batch": (dict(q_proxy=z(1, 20, 2, 4)), "q_proxy|k_proxy"),
    "q_proxy, head dim": (dict(q_proxy=z(2, 20, 2, 5)), "q_proxy|k_proxy"),
    "k_proxy, rank": (dict(k_proxy=z(2, 28, 1, 4, 1)), "k_proxy"),
    "k_proxy, batch": (dict(k_proxy=z(3, 28, 1, 4)), "k_proxy"),
    "k_proxy, head dim": (dict(k_proxy=z(2, 28, 1, 5)), "k_proxy"),
    "k_proxy, heads": (dict(q_proxy=z(2, 20, 4, 4), k_proxy=z(2, 28, 3, 4)), "k_proxy"),
    "k_proxy, more heads": (dict(k_proxy=z(2, 28, 4, 4)), "k_proxy"),
    "k_proxy, too short": (dict(k_proxy=z(2, 19, 1, 4)), "k_proxy|q_proxy"),
    "k_proxy, dtype": (dict(k_proxy=z(2, 28, 1, 4, dtype=torch.float32)), "k_proxy"),
    "k_proxy, device": (
        dict(k_proxy=torch.zeros(2, 28, 1, 4, dtype=torch.float64, device="meta")),
        "k_proxy",
    ),
    "q_proxy, integers": (
        dict(q_proxy=z(2, 20, 2, 4, dtype=torch.int64), k_proxy=z(2, 28, 1, 4, dtype=torch.int64)),
        "q_proxy",
    ),
}
TOP_K = {
    "top_k, no multiple": (dict(top_k=6), "top_k"),
    "top_k, zero": (dict(top_k=0), "top_k"),
    "top_k, negative": (dict(top_k=-4), "top_k"),
}
MAIN = {
    "q, rank": (dict(q=z(2, 20, 16)), r"\bq\b"),
    "k, rank": (dict(k=z(2, 28, 8)), r"\bk\b"),
    "v, rank": (dict(v=z(2, 28, 8)), r"\bv\b"),
    "k, batch": (dict(k=z(3, 28, 2, 4)), r"\bk\b"),
    "k, head dim": (dict(k=z(2, 28, 2, 5)), r"\bk\b"),
    "v, head dim": (dict(v=z(2, 28, 2, 5)), r"\bv\b"),
    "v, length": (dict(v=z(2, 27, 2, 4)), r"\bv\b"),
    "v, heads": (dict(v=z(2, 28, 1, 4)), r"\bv\b"),
    "q, heads no multiple of the key's": (dict(q=z(2, 20, 3, 4)), r"\bq\b"),
    "k, fewer keys than queries": (
        dict(k=z(2, 19, 2, 4), v=z(2, 19, 2, 4), k_proxy=z(2, 19, 1, 4)),
        r"\b[qk]\b",
    ),
    "k, dtype": (dict(k=z(2, 28, 2, 4, dtype=torch.float32)), r"\bk\b"),
    "v, dtype": (dict(v=z(2, 28, 2, 4, dtype=torch.bfloat16)), r"\bv\b"),
    "v, device": (dict(v=torch.zeros(2, 28, 2, 4, dtype=torch.float64, device="meta")), r"\bv\b"),
}
WITH_PROXY = {
    "H no multiple of Hp": (dict(q=z(2, 20, 6, 4), q_proxy=z(2, 20, 4, 4)), r"\bq\b|q_proxy"),
    "Hp no multiple of Hkv": (dict(q_proxy=z(2, 20, 1, 4)), "q_proxy"),
    "q_proxy, length": (dict(q_proxy=z(2, 19, 2, 4)), "q_proxy"),
    "k_proxy, length": (dict(k_proxy=z(2, 27, 1, 4)), "k_proxy"),
    "proxy, head dim": (dict(q_proxy=z(2, 20, 2, 8), k_proxy=z(2, 28, 1, 8)), "q_proxy"),
    "kl_probe, length": (dict(kl_probe=torch.zeros(3)), "kl_probe"),
    "kl_probe, rank": (dict(kl_probe=torch.zeros(1, 2)), "kl_probe"),
    "kl_probe, dtype": (dict(kl_probe=torch.zeros(2, dtype=torch.bfloat16)), "kl_probe"),
}
PICK = dict(top_k=None)
SPARSE = {
    "no q_proxy": (dict(q_proxy=None), "q_proxy"),
    "no k_proxy": (dict(k_proxy=None), "k_proxy"),
    "no proxy": (dict(q_proxy=None, k_proxy=None), "q_proxy|k_proxy"),
    "neither": (PICK, "top_k|block_indices"),
    "both": (dict(block_indices=indices()), "top_k|block_indices"),
    "half a proxy": (PICK | dict(block_indices=indices(), k_proxy=None), "k_proxy"),
    "kl_probe without proxy": (
        PICK | dict(block_indices=indices(), q_proxy=None, k_proxy=None, kl_probe=torch.zeros(2)),
        "kl_probe",
    ),
    "materialize_kl without proxy": (
        PICK | dict(block_indices=indices(), q_proxy=None, k_proxy=None, materialize_kl=True),
        "materialize_kl",
    ),
    "block_indices, rank": (PICK | dict(block_indices=indices()[:, :, 0]), "block_indices"),
    "block_indices, batch": (PICK | dict(block_indices=indices()[:1]), "block_indices"),
    "block_indices, length": (PICK | dict(block_indices=indices()[:, :19]), "block_indices"),
    "block_indices, heads": (PICK | dict(block_indices=indices()[:, :, :1]), "block_indices"),
    "block_indices, Hp no multiple of Hkv": (
        PICK | dict(block_indices=indices()[:, :, :1], q_proxy=None, k_proxy=None),
        "block_indices",
    ),
    "block_indices, no slots": (PICK | dict(block_indices=indices()[..., :0]), "block_indices"),
    "block_indices, int64": (PICK | dict(block_indices=indices(dtype=torch.int64)), "block_indices"),
    "block_indices, float": (PICK | dict(block_indices=indices(dtype=torch.float32)), "block_indices"),
    "block_indices, slot 0 not local": (PICK | dict(block_indices=indices([3, 4])), "block_indices"),
    "block_indices, slot 0 empty": (PICK | dict(block_indices=indices([-1, 4])), "block_indices"),
    "block_indices, the local block twice": (PICK | dict(block_indices=indices([4, 4])), "block_indices"),
    "block_indices, another block twice": (
        PICK | dict(block_indices=torch.cat([indices([4, 2]), indices([4, 2])[..., 1:]], -1)),
        "block_indices",
    ),
    "block_indices, acausal": (PICK | dict(block_indices=indices([4, 5])), "block_indices"),
    "block_indices, past the keys": (PICK | dict(block_indices=indices([4, 7])), "block_indices"),
    "block_indices, below -1": (PICK | dict(block_indices=indices([4, -2])), "block_indices"),
    "block_indices, another document": (
        PICK
        | dict(
            block_indices=naive.select(*inputs(E, 48)[3:], top_k=8, block_size=4),
            doc_start_block=i32([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ),
        "block_indices",
    ),
    "block_indices of other places": (
        PICK | dict(block_indices=indices(), q_block=i32(1, 0, 2, 3, 4)),
        "block_indices",
    ),
}


def bad_calls():
    cases = []
    for name, extra in (
        ("select_blocks", SELECTING | TOP_K),
        ("sparse_attention", MAIN | SELECTING | WITH_PROXY | TOP_K | SPARSE),
        ("warmup_attention", MAIN | SELECTING | WITH_PROXY),
        ("dense_attention", MAIN),
    ):
        for what, (change, match) in (GEOMETRY | extra).items():
            if name == "dense_attention":
                change = {key: x for key, x in change.items() if "proxy" not in key}
            cases.append(pytest.param(name, change, match, id=f"{name}: {what}"))
    return cases


def good_call(name):
    q, k, v, q_proxy, k_proxy = inputs(E, 48)
    main, proxy = dict(q=q, k=k, v=v), dict(q_proxy=q_proxy, k_proxy=k_proxy)
    return {
        "select_blocks": proxy | dict(top_k=8),
        "sparse_attention": main | proxy | dict(top_k=8),
        "warmup_attention": main | proxy,
        "dense_attention": main,
    }[name] | dict(block_size=4)


@pytest.mark.parametrize("name, change, match", bad_calls())
def test_value_errors_name_the_argument(name, change, match):
    getattr(msa, name)(**good_call(name))  # what is remembered of a good call excuses no other
    with pytest.raises(ValueError, match=match):
        getattr(msa, name)(**good_call(name) | change)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(top_k=8.0), "top_k"),
        (dict(block_size=4.0), "block_size"),
        (dict(top_k=[8]), "top_k"),
        (dict(scale=math.nan), "scale"),
        (dict(scale=0.0), "scale"),
        (dict(q="q"), r"\bq\b"),
    ],
)
def test_an_equal_value_of_another_type_is_another_call(change, match):
    good = good_call("sparse_attention")
    msa.sparse_attention(**good)
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            msa.sparse_attention(**good | change)
    msa.sparse_attention(**good)


def test_the_calls_that_errors_are_made_of_are_good():
    for name in ("select_blocks", "sparse_attention", "warmup_attention", "dense_attention"):
        getattr(msa, name)(**good_call(name))
        getattr(msa, name)(**good_call(name) | dict(doc_start_block=DOC, q_block=i32(0, 1, 2, 3, 4)))
    good = good_call("sparse_attention")
    for row in ([4, 2], [4, -1], [4, 0], [4, 3]):
        msa.sparse_attention(**good | PICK | dict(block_indices=indices(row)))


@pytest.mark.parametrize(
    "change, match",
    {
        "lengths, zero": (dict(lengths=torch.tensor([0, 5])), "lengths"),
        "lengths, too long": (dict(lengths=torch.tensor([29, 5])), "lengths"),
        "lengths, negative": (dict(lengths=torch.tensor([3, -1])), "lengths"),
        "lengths, number": (dict(lengths=torch.tensor([3])), "lengths"),
        "lengths, rank": (dict(lengths=torch.tensor([[3, 4]])), "lengths"),
        "lengths, float": (dict(lengths=torch.tensor([3.0, 4.0])), "lengths"),
        "two queries": (dict(q=z(2, 2, 4, 4)), r"\bq\b"),
        "top_k, no multiple": (dict(top_k=6), "top_k"),
        "top_k without proxy": (dict(q_proxy=None, k_proxy=None), "q_proxy|k_proxy"),
        "k_proxy, heads": (dict(k_proxy=z(2, 28, 3, 4)), "k_proxy"),
        "v, length": (dict(v=z(2, 27, 2, 4)), r"\bv\b"),
    }.values(),
)
def test_decode_value_errors(change, match):
    q, k, v, q_proxy, k_proxy = (x.detach() for x in inputs(dataclasses.replace(E, S=1), 49))
    good = dict(
        q=q, k=k, v=v, q_proxy=q_proxy, k_proxy=k_proxy, lengths=torch.tensor([28, 5]), top_k=8, block_size=4
    )
    msa.decode_attention(**good)
    with pytest.raises(ValueError, match=match):
        msa.decode_attention(**good | change)


# ---------------------------------------------------------------------------------------------------------
# metrics


def same_metrics(got, want, tol):
    assert int(torch.as_tensor(got["n_rows"]).flatten()[0]) == want["n_rows"]
    for name in ("block_recall", "score_recall", "score_best", "kl_full"):
        x, y = got[name].double(), want[name].double()
        assert x.shape == y.shape, name
        assert torch.equal(x.isnan(), y.isnan()), name
        assert torch.allclose(x, y, rtol=tol, atol=tol, equal_nan=True), (
            f"{name}: {x.tolist()}, not {y.tolist()}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_shape
def test_recall(shape, dtype):
    opts = options(shape)
    q, k, _, q_proxy, k_proxy = (x.detach() for x in inputs(shape, 50, dtype))
    rows = torch.randperm(shape.S, generator=gen(51))[: max(1, shape.S // 2)]
    for picked in (
        naive.select(q_proxy, k_proxy, top_k=shape.slots * shape.block, **opts),
        foreign_indices(shape, opts),
    ):
        got = attention_recall(q, k, q_proxy, k_proxy, picked, rows, **opts)
        same_metrics(got, naive.recall(q, k, q_proxy, k_proxy, picked, rows, **opts), 1e-5)


def test_perfect_selection_has_recall_one():
    """Queries that look at their own block most; the selection is the teacher's own ranking."""
    s = Shape(B=2, S=64, Sk=64, H=4, Hkv=2, Hp=2, D=16, block=8, slots=3)
    q, k, _, q_proxy, k_proxy = (x.detach() for x in inputs(s, 52))
    here = F.one_hot(torch.arange(s.S) // s.block, s.D).double()
    q, k = 0.5 * q + 8 * here[None, :, None], 0.5 * k + 4 * here[None, :, None]
    visible = naive.visible_mask(s.B, s.S, s.Sk, block_size=s.block)
    teacher = naive.teacher_of(naive.attend(q, k, k, visible[:, :, None])[1], s.Hp)
    mass = teacher.reshape(s.B, s.S, s.Hp, s.Sk // s.block, s.block).sum(-1)
    picked = torch.full((s.B, s.S, s.Hp, s.slots), -1, dtype=torch.int32)
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in (s.B, s.S, s.Hp))).tolist():
        blocks = range(t // s.block + 1)
        order = sorted(blocks, key=lambda c: (-mass[b, t, h, c].item(), c))[: s.slots]
        assert order[0] == t // s.block
        picked[b, t, h, : len(order)] = torch.tensor(order, dtype=torch.int32)
    rows = torch.arange(s.S)
    got = attention_recall(q, k, q_proxy, k_proxy, picked, rows, block_size=s.block)
    assert torch.equal(got["block_recall"].double(), torch.ones(s.Hp, dtype=torch.float64))
    assert torch.allclose(got["score_recall"], got["score_best"], rtol=1e-6)
    assert int(torch.as_tensor(got["n_rows"]).flatten()[0]) == 2 * (64 - 3 * 8)
    # and drop the best remote block: one of three is missed
    worse = picked.clone()
    worse[..., 1] = -1
    got = attention_recall(q, k, q_proxy, k_proxy, worse, rows, block_size=s.block)
    assert torch.allclose(got["block_recall"].double(), torch.full((s.Hp,), 2 / 3, dtype=torch.float64))
    assert (got["score_recall"] < got["score_best"]).all()


def test_recall_ties_go_to_the_lower_block():
    """A teacher that looks at everything alike: the best k blocks are the first k."""
    s = Shape(B=1, S=48, Sk=48, H=2, Hkv=1, Hp=1, block=8, slots=2)
    q, k, _, q_proxy, k_proxy = (x.detach() for x in inputs(s, 57))
    q = torch.zeros_like(q)
    picked = torch.tensor([5, 0], dtype=torch.int32).expand(1, 48, 1, 2).contiguous()
    rows = torch.tensor([47])  # six whole blocks of equal mass
    got = attention_recall(q, k, q_proxy, k_proxy, picked, rows, block_size=8)
    assert got["block_recall"].tolist() == [0.5]  # of blocks 0 and 1
    assert torch.allclose(got["score_recall"].double(), torch.tensor([1 / 3], dtype=torch.float64))
    assert torch.allclose(got["score_best"].double(), torch.tensor([1 / 3], dtype=torch.float64))


def test_recall_without_a_row_that_counts():
    s = Shape(B=1, S=16, Sk=16, block=8, slots=2)
    q, k, _, q_proxy, k_proxy = (x.detach() for x in inputs(s, 53))
    picked = naive.select(q_proxy, k_proxy, top_k=16, block_size=8)
    got = attention_recall(q, k, q_proxy, k_proxy, picked, torch.arange(16), block_size=8)
    assert int(torch.as_tensor(got["n_rows"]).flatten()[0]) == 0
    assert got["block_recall"].isnan().all() and got["score_recall"].isnan().all()
    assert got["kl_full"].isfinite().all()
