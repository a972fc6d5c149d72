"""The kernels of the sparse path against the PyTorch reference, and promises that no oracle is needed for.

All but the test of the compiled code need a GPU of compute capability 9.0 and are skipped without one.
MSA_TEST_DEVICE=cpu is a switch for work on this file: the same logic at small sizes, where the reference in
bfloat16 stands in for the kernels.

Kernels compile per head layout and number of slots, so the tests share the few of LAYOUTS.
"""

import dataclasses
import gc
import importlib.util
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import msa
from configs import Config
from model import Transformer
from msa import reference

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("q", "k", "v", "q_proxy", "k_proxy")
BLOCK = DIM = 128
SCALE = DIM**-0.5
KL_FACTOR = 0.37
MAX_PEAK_GIB = 32  # at 1M tokens, inputs and gradients among it


@pytest.fixture(scope="module")
def device():
    """Where the kernels run; without such a GPU its tests are skipped."""
    forced = os.environ.get("MSA_TEST_DEVICE")
    if forced is not None:
        return torch.device(forced)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return torch.device("cuda")


def only_cuda(device):
    if device.type != "cuda":
        pytest.skip("about CUDA alone")


def fitted(device, length, on_cpu):
    """A length that takes a GPU, or one that shows the same on a CPU."""
    return length if device.type == "cuda" else min(length, on_cpu)


# ---------------------------------------------------------------------------------------------------------
# shapes and inputs


LAYOUTS = {  # by heads a group
    1: dict(H=4, Hkv=1, Hp=4, slots=2),  # more proxy than key heads
    2: dict(H=8, Hkv=2, Hp=4, slots=32),
    3: dict(H=6, Hkv=2, Hp=2, slots=16),
    4: dict(H=16, Hkv=2, Hp=4, slots=16),
    5: dict(H=5, Hkv=1, Hp=1, slots=1),
    8: dict(H=16, Hkv=2, Hp=2, slots=16),
    16: dict(H=32, Hkv=2, Hp=2, slots=32),
}
MAIN = LAYOUTS[8]
FEW = MAIN | dict(slots=2)  # at few blocks there is still something to choose


@dataclasses.dataclass(frozen=True)
class Case:
    S: int
    B: int = 1
    H: int = 16
    Hkv: int = 2
    Hp: int = 2
    slots: int = 16
    more_keys: int = 0  # than queries
    docs: bool = False
    permute: bool = False  # query blocks at random places (wants more_keys >= 128)

    def __str__(self):
        text = f"S{self.S}-B{self.B}-H{self.H}-{self.Hkv}-{self.Hp}-k{self.slots}"
        return (
            text
            + "-docs" * self.docs
            + "-permute" * self.permute
            + f"+{self.more_keys}" * bool(self.more_keys)
        )

    @property
    def Sk(self):
        return self.S + self.more_keys

    def on(self, device):
        return dataclasses.replace(self, S=fitted(device, self.S, 900 + self.S % 256))


def case(group, S, **more):
    return Case(S, **(LAYOUTS[group] | more))


CASES = [
    case(4, 1),
    case(8, 1, B=3),
    case(8, 2, B=3),
    case(1, 127),
    case(5, 127, B=3),
    case(16, 128),
    case(3, 129),
    case(8, 129, B=3, slots=2),
    case(1, 129, B=3, more_keys=1),
    case(2, 1000),
    case(3, 1000, B=3, docs=True),
    case(4, 1000, B=3, more_keys=300, docs=True, permute=True),
    case(8, 1000, more_keys=500),
    case(8, 2048),
    case(5, 2049, B=3),
    case(16, 2176),  # 17 blocks
    case(1, 2300, B=3, docs=True),
    case(8, 2300, B=3, slots=2, more_keys=2000, permute=True),
    case(3, 3000, more_keys=1000, permute=True),
    case(16, 3000, more_keys=129, docs=True, permute=True),
    case(2, 4224, B=3),  # 33 blocks
    case(5, 5000, docs=True),
    case(4, 7000, B=3, docs=True),
    case(8, 8064),  # 63 blocks
    case(16, 8191),
    case(4, 8192),
]


def generator(device, seed):
    return torch.Generator(device).manual_seed(seed)


def randn(*size, g, scale=1.0):
    x = torch.randn(*size, generator=g, device=g.device, dtype=torch.bfloat16)
    return x if scale == 1.0 else x.mul_(scale)


def make_inputs(c, device, seed=0):
    """q, k, v, q_proxy, k_proxy and the gradient of out. Scores spread by 2: some tokens weigh much."""
    g = generator(device, seed)
    q = randn(c.B, c.S, c.H, DIM, g=g, scale=2.0)
    k, v = (randn(c.B, c.Sk, c.Hkv, DIM, g=g) for _ in range(2))
    q_proxy, k_proxy = randn(c.B, c.S, c.Hp, DIM, g=g, scale=2.0), randn(c.B, c.Sk, 1, DIM, g=g)
    return [q, k, v, q_proxy, k_proxy], randn(c.B, c.S, c.H, DIM, g=g)


def make_places(c, device, seed=0):
    """doc_start_block and q_block of a case."""
    g = generator("cpu", seed)
    q_block = doc_start_block = None
    at = torch.arange(-(-c.S // BLOCK))
    if c.permute:
        at = torch.randperm(c.Sk // BLOCK, generator=g)[: len(at)]
        q_block = at.to(device, torch.int32)
    if c.docs:
        begins = torch.rand(c.B, -(-c.Sk // BLOCK), generator=g) < 0.25
        begins[:, 0] = True
        starts = torch.where(begins, torch.arange(begins.shape[1]), 0).cummax(1).values
        doc_start_block = starts[:, at].to(device, torch.int32)
    return dict(doc_start_block=doc_start_block, q_block=q_block)


def blocks_of(c, places, device):
    """The own block of each query and the first of its document: (1, S, 1), (B or 1, S, 1)."""
    local = reference.query_places(c.S, places["q_block"], BLOCK, device)[None, :, None] // BLOCK
    first = torch.zeros_like(local)
    if places["doc_start_block"] is not None:
        first = places["doc_start_block"].long().repeat_interleave(BLOCK, 1)[:, : c.S, None]
    return local, first


def make_indices(c, places, device, seed=0):
    """A selection from outside: own block first, then distinct earlier ones in any order, -1 anywhere."""
    g = generator(device, seed)
    local, first = blocks_of(c, places, device)
    picked = torch.full((c.B, c.S, c.Hp, c.slots), -1, dtype=torch.int32, device=device)
    picked[..., 0] = local
    blocks = torch.arange(-(-c.Sk // BLOCK), device=device)
    eligible = ((blocks < local[..., None]) & (blocks >= first[..., None])).expand(c.B, c.S, c.Hp, -1)
    draw = torch.rand(c.B, c.S, c.Hp, len(blocks), generator=g, device=device).masked_fill_(~eligible, -1.0)
    chosen = draw.topk(min(c.slots - 1, len(blocks)), dim=-1)
    later = torch.where(chosen.values >= 0.1, chosen.indices, -1).to(torch.int32)  # rarely a hole more
    order = torch.rand(later.shape, generator=g, device=device).argsort(-1)
    picked[..., 1 : 1 + later.shape[-1]] = later.gather(-1, order)
    return picked


# ---------------------------------------------------------------------------------------------------------
# both sides


@dataclasses.dataclass
class Step:
    out: Tensor
    kl: Tensor
    kl_heads: Tensor  # (Hp,)
    grads: dict[str, Tensor]

    def tensors(self):
        return {"out": self.out, "kl": self.kl, "KL of the heads": self.kl_heads} | self.grads


def run(tensors, grad_out, factor=KL_FACTOR, materialize_kl=False, **options):
    """Forward and backward of the op."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    probe = torch.zeros(tensors[3].shape[2], device=grad_out.device, requires_grad=True)
    out, kl = msa.sparse_attention(*leaves, kl_probe=probe, materialize_kl=materialize_kl, **options)
    *grads, kl_heads = torch.autograd.grad(
        [out, kl], [*leaves, probe], [grad_out, torch.full_like(kl, factor)]
    )
    return Step(out.detach(), kl.detach(), kl_heads, {f"d{n}": d for n, d in zip(NAMES, grads, strict=True)})


def run_reference(tensors, grad_out, picked, doc_start_block=None, q_block=None, scale=SCALE):
    """The same from the reference in fp32, in which products of bf16 are exact, and the logsumexp."""
    args = (*(x.detach().float() for x in tensors), picked, doc_start_block, q_block)
    out, kl, lse, lse_proxy = reference.forward(*args, scale, BLOCK, True)
    grad_kl = torch.full_like(kl, KL_FACTOR)
    *grads, kl_heads = reference.backward(
        grad_out.float(), grad_kl, *args, out, lse, lse_proxy, scale, BLOCK, True
    )
    return Step(out, kl, kl_heads, {f"d{n}": d for n, d in zip(NAMES, grads, strict=True)}), lse


# How far a row may be off: by this share of its own and of the mean length, plus this much. The terms of a
# gradient cancel before they are summed, so a row may be small beside what was rounded on its way: for dq
# and dk that is out in bf16, whose error reaches all terms of a query through delta. The means at these
# inputs are 2 for dq, 10 for dk and dv, 0.1 for dq_proxy, 0.5 for dk_proxy: a row that lacks a block or a
# query is off by more. The floors grow with the scale, as the gradients of scores do.
BOUNDS = {
    "out": (1e-2, 0.0),
    "dq": (3e-2, 0.15),
    "dk": (3e-2, 0.05),
    "dv": (1e-2, 0.02),
    "dq_proxy": (1.5e-2, 3e-3),
    "dk_proxy": (1.5e-2, 5e-3),
}


def check_bounds(name, got, want, scale=SCALE, where=""):
    relative, floor = BOUNDS[name]
    check_rows(name + where, got, want, relative, floor * max(1.0, scale / SCALE))


def check_rows(name, got, want, relative, floor):
    """No row is off by more than `relative` of its own and of the mean length, plus the floor."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.detach().float(), want.detach().float()
    assert bool(got.isfinite().all()), f"{name}: not finite"
    error, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    excess = error - relative * (size + size.mean()) - floor
    at = int(excess.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), excess.shape))
    assert excess.flatten()[at] <= 0, (
        f"{name}: row {where} is off by {error.flatten()[at]:.3g}, its length is {size.flatten()[at]:.3g}; "
        f"{int((excess > 0).sum())} of {excess.numel()} rows are wrong"
    )


def check_cosine(name, got, want, least):
    got, want = got.detach().double().flatten(), want.detach().double().flatten()
    cosine = (got @ want / (got.norm() * want.norm())).item()
    assert cosine > least, f"{name}: cosine {cosine:.6f}"


def check_step(got, want, rows=None):
    """out, KL and all gradients; where `rows` counts too few for cosines they are left out."""
    check_bounds("out", got.out, want.out)
    check_cosine("out", got.out, want.out, 0.9999)
    for name, grad in want.grads.items():
        check_bounds(name, got.grads[name], grad)
        if rows is None or rows > 8:
            check_cosine(name, got.grads[name], grad, 0.999)
    check_kl("KL of the heads", got.kl_heads, want.kl_heads, got.out.shape[0] * got.out.shape[1])


def check_kl(name, got, want, rows, rtol=2e-3):
    """Sums over `rows` queries and heads; the teacher's rounding to bf16 is worth about 0.01 in each."""
    torch.testing.assert_close(
        got.float(), want.float(), rtol=rtol, atol=1e-2 * math.sqrt(rows), msg=lambda text: f"{name}: {text}"
    )


def check_equal(device, name, got, want, floor=2e-2):
    """Bit for bit; on the CPU, whose matmul sums by shape, closely."""
    if device.type == "cuda":
        assert torch.equal(got, want), f"{name}: differs in {int((got != want).sum())} of {got.numel()}"
    else:
        torch.testing.assert_close(got, want, rtol=2e-2, atol=floor, msg=lambda text: f"{name}: {text}")


# ---------------------------------------------------------------------------------------------------------
# against the reference


@pytest.mark.parametrize("c", CASES, ids=str)
def test_forward_and_gradients(c, device):
    c = c.on(device)
    tensors, grad_out = make_inputs(c, device)
    places = make_places(c, device)
    picked = make_indices(c, places, device)
    want, want_lse = run_reference(tensors, grad_out, picked, **places)
    got = run(tensors, grad_out, block_indices=picked, **places)
    assert got.out.dtype == torch.bfloat16 and got.kl.dtype == torch.float32 and got.kl.item() == 0.0
    assert all(d.dtype == torch.bfloat16 for d in got.grads.values())
    check_step(got, want, rows=c.S)

    known = (picked, places["doc_start_block"], places["q_block"])
    with torch.no_grad():
        out, kl, lse, *_ = torch.ops.msa.attention(*tensors, *known, None, SCALE, BLOCK, True, False)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)
    check_kl("kl", kl, want.kl, c.B * c.S * c.Hp)
    check_kl("kl against kl_probe", kl, got.kl_heads.sum(), c.B * c.S * c.Hp, rtol=1e-3)
    assert torch.equal(out, got.out), "materialising the KL leaves out as it is"


@pytest.mark.parametrize("scale", [0.02, 0.3, 3.0])
def test_scale(scale, device):
    """Scores that are nearly equal, and scores so far apart that most probabilities underflow."""
    c = Case(fitted(device, 2000, 600), **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=1)
    picked = make_indices(c, make_places(c, device), device)
    want, _ = run_reference(tensors, grad_out, picked, scale=scale)
    got = run(tensors, grad_out, block_indices=picked, scale=scale)
    check_bounds("out", got.out, want.out)
    check_kl("KL of the heads", got.kl_heads, want.kl_heads, c.B * c.S)
    for name, grad in want.grads.items():
        check_bounds(name, got.grads[name], grad, scale)
        check_cosine(name, got.grads[name], grad, 0.999)


def test_tiny_kl_factor(device):
    """1 / (N Hp) is about 5e-7: it is applied in fp32, so that a power of two costs no digit."""
    c = Case(fitted(device, 1000, 500), **FEW)
    tensors, grad_out = make_inputs(c, device, seed=2)
    picked = make_indices(c, make_places(c, device), device)
    one = run(tensors, grad_out, block_indices=picked, factor=1.0).grads
    tiny = run(tensors, grad_out, block_indices=picked, factor=2.0**-21).grads
    for name in ("dq_proxy", "dk_proxy"):
        assert torch.equal(one[name].float() * 2.0**-21, tiny[name].float()), name


def test_strided_inputs(device):
    """(B, H, S, D) memory seen as (B, S, H, D), and gradients that arrive expanded or transposed."""
    c = Case(300, B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=3)
    picked = make_indices(c, make_places(c, device), device)

    def other(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    strided = [other(x) for x in tensors]
    assert not strided[0].is_contiguous()
    got = run(strided, other(grad_out), block_indices=picked).tensors()
    want = run(tensors, grad_out, block_indices=picked).tensors()
    for name in want:
        check_equal(device, name, got[name], want[name])
    ones = grad_out.new_ones(()).expand(grad_out.shape)
    got = run(tensors, ones, block_indices=picked).grads
    want = run(tensors, ones.contiguous(), block_indices=picked).grads
    for name in want:
        check_equal(device, name, got[name], want[name])


# ---------------------------------------------------------------------------------------------------------
# selection


SELECT_CASES = [
    Case(1),
    Case(127, B=3),
    Case(128, slots=1),
    Case(129, slots=2),
    Case(1000, B=3, slots=2),
    Case(2048, docs=True, slots=2),
    Case(2300, B=3, docs=True),
    Case(2300, B=3, more_keys=1000, permute=True, slots=2),
    Case(3001, B=2, more_keys=200, docs=True, permute=True),
    Case(5000, slots=32, Hp=4),
    Case(7777, slots=32, Hp=1, H=16, Hkv=1),
    Case(8192, slots=5),
]


def select(c, q_proxy, k_proxy, places):
    """What the kernel and what the reference select."""
    got = msa.select_blocks(q_proxy, k_proxy, top_k=c.slots * BLOCK, **places)
    want = reference.select(q_proxy, k_proxy, *places.values(), c.slots, SCALE, BLOCK)
    assert got.dtype == torch.int32 and got.shape == want.shape
    return got, want


def integers(c, device, seed=0):
    """Proxies of small integers: all sums are exact in any order, and many blocks tie."""
    g = generator(device, seed)
    shapes = ((c.B, c.S, c.Hp, DIM), (c.B, c.Sk, 1, DIM))
    return [torch.randint(-2, 3, s, generator=g, device=device).bfloat16() for s in shapes]


def check_same(got, want):
    wrong = (got != want).any(-1)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} rows differ, {at}: {got[at].tolist()}, not {want[at].tolist()}"
        )


def check_ranking(got, want, block_scores, tolerance):
    """Slot by slot the same block, or another whose score is as good within `tolerance` (..., 1)."""
    assert torch.equal(got < 0, want < 0) and torch.equal(got[..., 0], want[..., 0])
    slots = got.sort(-1).values
    assert not ((slots[..., 1:] == slots[..., :-1]) & (slots[..., 1:] >= 0)).any(), "a block twice"
    a, b = (block_scores.gather(-1, x.clamp(min=0).long()) for x in (got, want))
    off = ((a - b).abs() - tolerance).masked_fill(got < 0, -math.inf)[..., 1:]
    if off.numel():
        assert off.max() <= 0, f"{int((off > 0).sum())} picks are not the best, by up to {off.max():.3g}"
    assert (got != want).float().mean() < 1e-2  # of a few hundred sampled picks, two may have swapped


@pytest.mark.parametrize("c", SELECT_CASES, ids=str)
def test_select_is_exact_on_integers(c, device):
    c = c.on(device)
    check_same(*select(c, *integers(c, device), make_places(c, device)))


@pytest.mark.parametrize("c", SELECT_CASES, ids=str)
def test_select_ranks_by_score(c, device):
    c = c.on(device)
    tensors, _ = make_inputs(c, device, seed=5)
    q_proxy, k_proxy = tensors[3:]
    places = make_places(c, device, seed=5)
    got, want = select(c, q_proxy, k_proxy, places)
    reference.check_block_indices(got, places["q_block"], places["doc_start_block"], BLOCK)
    q, k = q_proxy.float(), k_proxy[:, :, 0].float()
    scores = torch.einsum("bshd,btd->bsht", q, k)
    scores = torch.nn.functional.pad(scores, (0, -c.Sk % BLOCK), value=-math.inf).unflatten(-1, (-1, BLOCK))
    # the order of 128 fp32 additions: far below the gap between two blocks
    tolerance = 2.0**-18 * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).max()
    check_ranking(got, want, scores.amax(-1), tolerance)


INF, NAN = math.inf, math.nan
ODD = {  # what is written where, in q_proxy (B, S, Hp, D) and k_proxy (B, Sk, 1, D)
    "nan in some keys": lambda q, k: k[:, ::97, 0, 5].fill_(NAN),
    "nan in all keys of a block": lambda q, k: k[:, BLOCK : 2 * BLOCK].fill_(NAN),
    "nan in all keys": lambda q, k: k.fill_(NAN),
    "inf in some keys": lambda q, k: k[:, 30::211, 0, 3].fill_(INF),  # times 0 it is a NaN
    "-inf in some keys": lambda q, k: k[:, 30::211, 0, 3].fill_(-INF),
    "both in one key": lambda q, k: (k[:, ::131, 0, 3].fill_(-INF), k[:, ::131, 0, 9].fill_(INF)),
    "-inf in all keys of two blocks": lambda q, k: (
        q[..., 0].fill_(1),
        k[:, : 2 * BLOCK, 0, 0].fill_(-INF),
    ),
    "-inf everywhere": lambda q, k: (q[..., 0].fill_(1), k[..., 0].fill_(-INF)),
    "nan in some queries": lambda q, k: q[:, ::3, :, 7].fill_(NAN),
    "inf in some queries": lambda q, k: q[:, ::3, 0, 7].fill_(INF),
    "all scores equal": lambda q, k: k.copy_(k[:, :1].expand_as(k).clone()),
    "all scores zero": lambda q, k: q.zero_(),
    "negative zeros": lambda q, k: (q.fill_(0), q[..., ::2].fill_(-0.0)),
    "blocks of the same keys": lambda q, k: k.copy_(k[:, torch.arange(k.shape[1]) % (3 * BLOCK)]),
    "all scores negative": lambda q, k: (q.abs_().add_(1), k.abs_().add_(1).neg_()),
    "large": lambda q, k: (q.mul_(2.0**60), k.mul_(2.0**50)),
    "small": lambda q, k: (q.mul_(2.0**-40), k.mul_(2.0**-40)),
}


@pytest.mark.parametrize("slots", [2, 16])
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("write", ODD.values(), ids=ODD.keys())
def test_select_odd_scores(write, docs, slots, device):
    c = Case(fitted(device, 2900, 1000), B=2, docs=docs, slots=slots)
    q_proxy, k_proxy = integers(c, device, seed=6)
    write(q_proxy, k_proxy)
    check_same(*select(c, q_proxy, k_proxy, make_places(c, device, seed=6)))


def test_select_scale_and_strides(device):
    c = Case(fitted(device, 2000, 700), B=2, slots=2)
    q_proxy, k_proxy = integers(c, device, seed=7)
    want = reference.select(q_proxy, k_proxy, None, None, 2, SCALE, BLOCK)
    for q, k in (
        (q_proxy, k_proxy),
        (q_proxy.mT.contiguous().mT, k_proxy.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        for scale in (None, 1e-3, 7.0):
            check_same(msa.select_blocks(q, k, top_k=2 * BLOCK, scale=scale), want)


# ---------------------------------------------------------------------------------------------------------
# borders of the selection


@pytest.mark.parametrize("docs", [False, True])
def test_all_blocks_selected_is_dense_and_warmup(docs, device):
    c = Case(fitted(device, 1999, 700), B=2, docs=docs, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=8)
    places = make_places(c, device, seed=8)
    want, _ = run_reference(tensors, grad_out, None, **places)
    check_step(run(tensors, grad_out, top_k=c.slots * BLOCK, **places), want)


def test_all_blocks_selected_is_flash_attention(device):
    only_cuda(device)
    cute = pytest.importorskip("flash_attn.cute")
    c = Case(2048, B=2, **MAIN)
    tensors, _ = make_inputs(c, device, seed=9)
    want = cute.flash_attn_func(*tensors[:3], causal=True)
    want = want[0] if isinstance(want, tuple) else want
    out, _ = msa.sparse_attention(*tensors, top_k=c.slots * BLOCK)
    check_rows("out", out, want, 2e-2, 0.0)
    check_cosine("out", out, want, 0.9999)


def test_blocks_without_queries_get_zero_gradients(device):
    """Queries at odd blocks that select nothing else but block 2: the other even blocks stay untouched."""
    c = Case(fitted(device, 2048, 512), B=2, more_keys=fitted(device, 2048, 512) + 70, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=10)
    q_block = torch.arange(1, 2 * (c.S // BLOCK), 2, device=device, dtype=torch.int32)
    own = q_block.repeat_interleave(BLOCK)[None, :, None].expand(c.B, c.S, c.Hp)
    picked = torch.stack([own, torch.where(own > 2, 2, -1)], -1).to(torch.int32).contiguous()
    want, _ = run_reference(tensors, grad_out, picked, q_block=q_block)
    # memory that held something else: a gradient that is not written would show
    del tensors[:], grad_out
    tensors, grad_out = make_inputs(c, device, seed=10)
    got = run(tensors, grad_out, block_indices=picked, q_block=q_block)
    check_step(got, want)
    block = torch.arange(c.Sk, device=device) // BLOCK
    untouched = (block % 2 == 0) & (block != 2) | (block > int(q_block[-1]))
    for name in ("dk", "dv", "dk_proxy"):
        assert torch.count_nonzero(got.grads[name][:, untouched]) == 0, name
        assert (got.grads[name][:, ~untouched].abs().amax((2, 3)) > 0).all(), name


@pytest.mark.parametrize("crowded", [0, 5])
def test_blocks_that_every_query_selects(crowded, device):
    """The longest lists there can be; all other blocks keep their own queries alone."""
    c = Case(fitted(device, 8100, 1100), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=11)
    own = (torch.arange(c.S, device=device) // BLOCK)[None, :, None].expand(c.B, c.S, c.Hp)
    picked = torch.stack([own, torch.where(own > crowded, crowded, -1)], -1).to(torch.int32).contiguous()
    want, _ = run_reference(tensors, grad_out, picked)
    check_step(run(tensors, grad_out, block_indices=picked), want)


def test_slots_in_any_order(device):
    """The order of later slots and the holes between them say nothing."""
    c = Case(fitted(device, 3000, 900), **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=12)
    picked = make_indices(c, make_places(c, device), device, seed=12)
    order = torch.rand(picked[..., 1:].shape, device=device, generator=generator(device, 13)).argsort(-1)
    shuffled = torch.cat([picked[..., :1], picked[..., 1:].gather(-1, order)], -1)
    got = run(tensors, grad_out, block_indices=shuffled)
    want = run(tensors, grad_out, block_indices=picked)
    check_bounds("out", got.out, want.out)
    for name, grad in want.grads.items():
        check_bounds(name, got.grads[name], grad)


# ---------------------------------------------------------------------------------------------------------
# lengths at which nothing can be compared as a whole


def rows_directly(tensors, grad_out, picked, b, rows, head):
    """What queries `rows` of sequence b and proxy head `head` compute, in fp32, with their keys gathered."""
    q, k, v, q_proxy, k_proxy = tensors
    group = q.shape[2] // q_proxy.shape[2]
    heads, kv_head = slice(head * group, (head + 1) * group), head * k.shape[2] // q_proxy.shape[2]
    blocks = picked[b, rows, head].long()  # (n, k)
    token = blocks[..., None] * BLOCK + torch.arange(BLOCK, device=q.device)
    hidden = ((blocks < 0)[..., None] | (token > rows[:, None, None])).flatten(1)  # (n, k * 128)
    token = token.clamp(0, k.shape[1] - 1).flatten(1)
    keys, values = k[b, token, kv_head].float(), v[b, token, kv_head].float()  # (n, k * 128, D)
    proxy_keys = k_proxy[b, token, 0].float()
    queries, grad, proxy_queries = (
        q[b, rows, heads].float(),
        grad_out[b, rows, heads].float(),
        q_proxy[b, rows, head],
    )
    proxy_queries = proxy_queries.float()

    p = torch.einsum("ngd,nmd->ngm", queries, keys).mul_(SCALE)
    p = p.masked_fill_(hidden[:, None], -math.inf).softmax(-1)
    out = torch.einsum("ngm,nmd->ngd", p, values)
    student = torch.einsum("nd,nmd->nm", proxy_queries, proxy_keys).mul_(SCALE)
    student = student.masked_fill_(hidden, -math.inf).softmax(-1)
    ds = p * (torch.einsum("ngd,nmd->ngm", grad, values) - (grad * out).sum(-1, keepdim=True)) * SCALE
    ds_proxy = (student - p.mean(1)) * (SCALE * KL_FACTOR)
    dq, dq_proxy = torch.einsum("ngm,nmd->ngd", ds, keys), torch.einsum("nm,nmd->nd", ds_proxy, proxy_keys)
    return out, dq, dq_proxy, p, ds, ds_proxy, queries, grad, proxy_queries


def block_directly(tensors, grad_out, picked, b, block, chunk=128):
    """dk, dv (128, Hkv, D) and dk_proxy (128, 1, D) of a key block from all the queries that chose it."""
    q, k, _, q_proxy, _ = tensors
    proxy_heads, slots = q_proxy.shape[2], picked.shape[3]
    dk, dv = torch.zeros(2, BLOCK, k.shape[2], DIM, device=q.device)
    dk_proxy = torch.zeros(BLOCK, 1, DIM, device=q.device)
    for head in range(proxy_heads):
        kv_head = head * k.shape[2] // proxy_heads
        chosen = (picked[b, :, head] == block).nonzero()
        for rows, slot in (part.unbind(1) for part in chosen.split(chunk)):
            _, _, _, *terms = rows_directly(tensors, grad_out, picked, b, rows, head)
            p, ds, ds_proxy, queries, grad, proxy_queries = terms
            n = torch.arange(len(rows), device=q.device)
            p, ds = (x.unflatten(-1, (slots, BLOCK))[n, :, slot] for x in (p, ds))  # (n, G, 128)
            ds_proxy = ds_proxy.unflatten(-1, (slots, BLOCK))[n, slot]
            dk[:, kv_head] += torch.einsum("ngm,ngd->md", ds, queries)
            dv[:, kv_head] += torch.einsum("ngm,ngd->md", p, grad)
            dk_proxy[:, 0] += torch.einsum("nm,nd->md", ds_proxy, proxy_queries)
    return dk, dv, dk_proxy


def check_samples(tensors, grad_out, picked, got, b, rows, blocks):
    """Sampled queries with all proxy heads, and sampled key blocks, of sequence b."""
    q, _, _, q_proxy, k_proxy = tensors
    n_blocks, slots = k_proxy.shape[1] // BLOCK, picked.shape[3]
    local = rows[None] // BLOCK
    parts = []
    for head in range(q_proxy.shape[2]):
        parts.append(rows_directly(tensors, grad_out, picked, b, rows, head)[:3])
        queries, keys = q_proxy[b, rows, head].float(), k_proxy[b, : n_blocks * BLOCK, 0].float()
        scores = (queries @ keys.T).unflatten(1, (n_blocks, BLOCK)).amax(-1)[None, None]  # (1, 1, n, blocks)
        want = reference.rank_blocks(scores, local, torch.zeros_like(local), slots)[0, :, 0]
        tolerance = 2.0**-18 * queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).max()
        whole = torch.cat([scores[0, 0], scores.new_zeros(len(rows), 1)], 1)  # the last block may be partial
        check_ranking(picked[b, rows, head], want, whole, tolerance)
    out, dq, dq_proxy = (torch.stack(x, 1).flatten(1, -2) for x in zip(*parts, strict=True))
    dq_proxy = dq_proxy.view(len(rows), -1, DIM)
    check_bounds("out", got.out[b, rows], out)
    check_bounds("dq", got.grads["dq"][b, rows], dq)
    check_bounds("dq_proxy", got.grads["dq_proxy"][b, rows], dq_proxy)
    for block in blocks:
        span = slice(block * BLOCK, (block + 1) * BLOCK)
        for name, want in zip(
            ("dk", "dv", "dk_proxy"), block_directly(tensors, grad_out, picked, b, block), strict=True
        ):
            n = got.grads[name][b, span].shape[0]
            check_bounds(name, got.grads[name][b, span], want[:n], where=f" of block {block}")


def test_a_million_tokens(device):
    c = Case(fitted(device, 2**20, 2048), **(MAIN if device.type == "cuda" else FEW))
    gc.collect()
    tensors, grad_out = make_inputs(c, device, seed=14)
    for warm in (True, False):  # compiled and loaded first: that is not the op's memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if warm:
            small = Case(2 * BLOCK, **dict(H=c.H, Hkv=c.Hkv, Hp=c.Hp, slots=c.slots))
            run(*make_inputs(small, device), top_k=c.slots * BLOCK)
        else:
            got = run(tensors, grad_out, top_k=c.slots * BLOCK)
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"peak at {c.S} tokens: {peak:.1f} GiB")
        assert peak <= MAX_PEAK_GIB
    picked = msa.select_blocks(*tensors[3:], top_k=c.slots * BLOCK)
    reference.check_block_indices(picked, None, None, BLOCK)
    rows = torch.randint(c.S, (48,), generator=generator(device, 15), device=device)
    rows = torch.cat(
        [rows, torch.tensor([0, 1, 127, 128, c.S // 2, c.S - 129, c.S - 128, c.S - 1], device=device)]
    )
    last = c.S // BLOCK - 1
    check_samples(tensors, grad_out, picked, got, 0, rows, [1, last // 3, last // 2, last - 1, last])


@pytest.mark.parametrize(
    "c",
    [Case(2**19 + 384, B=2, **MAIN), Case(2**19 + 200, **LAYOUTS[16])],
    ids=str,
)
def test_past_2_to_31_elements(c, device):
    """q, out and their gradients end past 2^31 elements."""
    assert c.B * c.S * c.H * DIM > 2**31
    c = dataclasses.replace(c, S=fitted(device, c.S, 900 + c.S % BLOCK))
    tensors, grad_out = make_inputs(c, device, seed=16)
    got = run(tensors, grad_out, top_k=c.slots * BLOCK)
    picked = msa.select_blocks(*tensors[3:], top_k=c.slots * BLOCK)
    rows = torch.arange(c.S - 520, c.S, 13, device=device)
    last = (c.S - 1) // BLOCK
    check_samples(tensors, grad_out, picked, got, c.B - 1, rows, [last // 2, last - 1, last])


# ---------------------------------------------------------------------------------------------------------
# the same numbers


def test_same_numbers_twice(device):
    c = Case(fitted(device, 8000, 900), B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=17)
    places = make_places(c, device, seed=17)
    known = (places["doc_start_block"], places["q_block"])
    results = []
    for _ in range(2):
        step = run(tensors, grad_out, top_k=c.slots * BLOCK, materialize_kl=True, **places).tensors()
        picked = msa.select_blocks(*tensors[3:], top_k=c.slots * BLOCK, **places)
        with torch.no_grad():
            _, _, lse, *_ = torch.ops.msa.attention(
                *tensors, picked, *known, None, SCALE, BLOCK, False, False
            )
        results.append(step | {"lse": lse, "block_indices": picked})
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


def test_documents_never_meet(device):
    """Another document's tensors can change at will: this one's outputs and gradients stay bit for bit."""
    c = Case(fitted(device, 3000, 900), B=2, **FEW)
    n_blocks = -(-c.S // BLOCK)
    borders = [0, 1, n_blocks // 2, n_blocks - 2, n_blocks]
    starts = torch.zeros(c.B, n_blocks, dtype=torch.int32)
    for lo, hi in zip(borders, borders[1:], strict=False):
        starts[0, lo:hi] = lo
    places = dict(doc_start_block=starts.to(device))  # the second sequence is one document
    tensors, grad_out = make_inputs(c, device, seed=18)

    def everything(tensors):
        step = run(tensors, grad_out, top_k=c.slots * BLOCK, **places)
        return {"out": step.out} | step.grads

    before = everything(tensors)
    spans = [(0, lo, hi) for lo, hi in zip(borders, borders[1:], strict=False)] + [(1, 0, n_blocks)]
    for b, lo, hi in spans:
        span = slice(lo * BLOCK, hi * BLOCK)
        changed = [x.clone() for x in tensors]
        for x in changed:
            x[b, span] = randn(*x[b, span].shape, g=generator(device, 19), scale=5.0)
        keep = torch.ones(c.B, c.S, dtype=torch.bool, device=device)
        keep[b, span] = False
        for name, x in everything(changed).items():
            assert torch.equal(x[keep], before[name][keep]), (name, b, lo)
            assert not torch.equal(x[~keep], before[name][~keep]), (name, b, lo)


@pytest.mark.parametrize("docs", [False, True])
def test_pieces_equal_the_whole(docs, device):
    """One call over all query blocks, or several over some of them each, in any order."""
    c = Case(fitted(device, 2500, 900), B=2, docs=docs, **FEW)
    n_blocks = -(-c.S // BLOCK)
    tensors, grad_out = make_inputs(c, device, seed=20)
    doc = make_places(c, device, seed=20)["doc_start_block"]
    whole = run(tensors, grad_out, top_k=c.slots * BLOCK, doc_start_block=doc)
    order = torch.randperm(n_blocks - 1, generator=generator("cpu", 21)).tolist()
    got = {name: torch.full_like(whole.tensors()[name], NAN) for name in ("out", "dq", "dq_proxy")}
    sums = {
        name: torch.zeros_like(whole.grads[name], dtype=torch.float32) for name in ("dk", "dv", "dk_proxy")
    }
    kl = torch.zeros_like(whole.kl_heads)
    for blocks in (order[:1], order[1:4], order[4:] + [n_blocks - 1]):  # the partial one last
        rows = torch.cat([torch.arange(i * BLOCK, min((i + 1) * BLOCK, c.S)) for i in blocks]).to(device)
        q, k, v, q_proxy, k_proxy = tensors
        part = run(
            [q[:, rows], k, v, q_proxy[:, rows], k_proxy],
            grad_out[:, rows],
            top_k=c.slots * BLOCK,
            q_block=torch.tensor(blocks, dtype=torch.int32, device=device),
            doc_start_block=None if doc is None else doc[:, blocks].contiguous(),
        )
        kl += part.kl_heads
        for name, x in got.items():
            x[:, rows] = part.tensors()[name]
        for name, x in sums.items():
            x += part.grads[name]
    for name, x in got.items():
        check_equal(device, name, x, whole.tensors()[name])
    for name, x in sums.items():
        check_rows(name, x, whole.grads[name], 1e-2, 1e-3)  # each piece is rounded to bf16
    torch.testing.assert_close(kl, whole.kl_heads, rtol=1e-4, atol=0.0)


def test_workspace_changes_nothing(device, monkeypatch):
    """Queries go through in chunks that fit a workspace; its size does not show."""
    import msa.hopper

    c = Case(fitted(device, 8000, 900), B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=22)
    places = make_places(c, device, seed=22)
    want = run(tensors, grad_out, top_k=c.slots * BLOCK, materialize_kl=True, **places)
    for size in (2**28, 2**26):  # a query takes 64 KiB and more, all of them about 1 GiB
        monkeypatch.setattr(msa.hopper, "workspace_bytes", size)
        got = run(tensors, grad_out, top_k=c.slots * BLOCK, materialize_kl=True, **places)
        for name in ("out", "dq", "dq_proxy"):
            assert torch.equal(got.tensors()[name], want.tensors()[name]), name
        for name in ("dk", "dv", "dk_proxy"):  # sums of chunks, in fp32
            check_rows(name, got.grads[name], want.grads[name], 3e-3, 1e-3)
        torch.testing.assert_close(got.kl, want.kl, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(got.kl_heads, want.kl_heads, rtol=1e-5, atol=0.0)


# ---------------------------------------------------------------------------------------------------------
# what a training run asks for


def test_compiles_once(device):
    """Neither lengths, nor the batch, nor documents, nor data compile anything again."""
    import msa.hopper

    shape = dict(H=16, Hkv=2, Hp=2, slots=16)
    run(*make_inputs(Case(BLOCK, **shape), device), top_k=16 * BLOCK)
    compiled = msa.hopper.jit.compile_count
    lengths = (1, 1000, 2048, 4096, 16384, 65536) if device.type == "cuda" else (1, 200, 384)
    for i, S in enumerate(lengths):
        c = Case(S, B=1 + i % 3 if S <= 4096 else 1, docs=i % 2 == 1, **shape)
        places = make_places(c, device, seed=i)
        step = run(*make_inputs(c, device, seed=i), top_k=c.slots * BLOCK, **places)
        assert all(bool(x.isfinite().all()) for x in step.tensors().values())
    c = Case(1000, more_keys=500, permute=True, **shape)
    run(*make_inputs(c, device), top_k=c.slots * BLOCK, **make_places(c, device))
    assert msa.hopper.jit.compile_count == compiled


@pytest.mark.parametrize("given", [False, True], ids=["top_k", "block_indices"])
def test_never_waits_for_the_gpu(given, device):
    only_cuda(device)
    c = Case(2300, B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=23)
    options = make_places(c, device, seed=23)
    if given:
        options["block_indices"] = make_indices(c, options, device)
    else:
        options["top_k"] = c.slots * BLOCK
    for materialize_kl in (False, True):
        run(tensors, grad_out, materialize_kl=materialize_kl, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for materialize_kl in (False, True):
            run(tensors, grad_out, materialize_kl=materialize_kl, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph(device):
    """Captured once, forward and backward replay with whatever has been copied into their inputs."""
    only_cuda(device)
    c = Case(2300, B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=24)
    doc = make_places(c, device, seed=24)["doc_start_block"]
    options = dict(top_k=c.slots * BLOCK, doc_start_block=doc)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(tensors, grad_out, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors, grad_out, **options)
    for seed in (25, 26):
        fresh, fresh_grad = make_inputs(c, device, seed=seed)
        fresh_doc = make_places(c, device, seed=seed)["doc_start_block"]
        for static, x in zip([*tensors, grad_out, doc], [*fresh, fresh_grad, fresh_doc], strict=True):
            static.copy_(x)
        graph.replay()
        want = run(fresh, fresh_grad, top_k=c.slots * BLOCK, doc_start_block=fresh_doc).tensors()
        for name, x in captured.tensors().items():
            assert torch.equal(x, want[name]), name


def small_model(device, seed=0):
    config = Config(
        n_layer=2,
        d_model=256,
        n_head=16,
        n_kv_head=2,
        n_proxy_head=2,
        head_dim=DIM,
        d_mlp=512,
        vocab_size=256,
        top_k=2 * BLOCK,
        seed=seed,
    )
    model = Transformer(config).to(device)
    model.compute_dtype = torch.bfloat16  # as the trainer sets it: weights stay in fp32
    return model


def model_batch(device, length, seed=0):
    g = generator("cpu", seed)
    tokens = torch.randint(32, (2, length), generator=g)  # of 256: something to learn
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    return tokens.to(device), labels.to(device)


def model_step(model, tokens, labels):
    """(mean loss, KL of the layers and heads) of one forward and backward."""
    probe = torch.zeros(2, 2, device=tokens.device, requires_grad=True)
    out = model(tokens, labels, attention="sparse", kl_probe=probe)
    loss = out.nll.mean()
    (loss + out.kl / (2 * tokens.numel())).backward()
    return loss.item(), probe.grad / tokens.numel()


def test_torch_compile(device):
    """One graph a layer, as the trainer compiles them, with the losses and gradients of the plain model."""
    torch._dynamo.reset()
    tokens, labels = model_batch(device, fitted(device, 1024, 400))
    results = []
    for compiles in (False, True):
        model = small_model(device)
        if compiles:
            for layer in model.model["layers"]:
                backend = "inductor" if device.type == "cuda" else "aot_eager"
                layer.compile(fullgraph=True, dynamic=False, backend=backend)
        results.append((*model_step(model, tokens, labels), {n: p.grad for n, p in model.named_parameters()}))
    torch._dynamo.reset()
    (loss, kl, grads), (compiled_loss, compiled_kl, compiled_grads) = results
    assert compiled_loss == pytest.approx(loss, rel=2e-3)
    torch.testing.assert_close(compiled_kl, kl, rtol=2e-2, atol=0.0)
    for name, grad in grads.items():
        check_cosine(name, compiled_grads[name], grad, 0.99)  # a pick near a tie may differ


class ReferenceAttention(torch.autograd.Function):
    """The reference with a selection that is handed over, wherever the tensors are."""

    @staticmethod
    def forward(ctx, q, k, v, q_proxy, k_proxy, probe, picked):
        args = (q, k, v, q_proxy, k_proxy, picked, None, None)
        out, kl, lse, lse_proxy = reference.forward(*args, SCALE, BLOCK, False)
        ctx.save_for_backward(*args[:6], out, lse, lse_proxy)
        return out, kl

    @staticmethod
    def backward(ctx, grad_out, grad_kl):
        *args, out, lse, lse_proxy = ctx.saved_tensors
        *grads, kl = reference.backward(
            grad_out, grad_kl, *args, None, None, out, lse, lse_proxy, SCALE, BLOCK, True
        )
        return *grads, kl, None


def test_training_follows_the_reference(device, monkeypatch):
    """20 optimizer steps with the kernels, and with the reference on the same selections."""
    steps, length = fitted(device, 20, 4), fitted(device, 1024, 512)
    selections, kernels = [], msa.sparse_attention

    def recording(q, k, v, q_proxy, k_proxy, *, top_k, kl_probe, doc_start_block, block_size):
        selections.append(msa.select_blocks(q_proxy, k_proxy, top_k=top_k))
        return kernels(q, k, v, q_proxy, k_proxy, top_k=top_k, kl_probe=kl_probe)

    def replaying(q, k, v, q_proxy, k_proxy, *, top_k, kl_probe, doc_start_block, block_size):
        return ReferenceAttention.apply(q, k, v, q_proxy, k_proxy, kl_probe, selections.pop(0))

    curves = []
    for attention in (recording, replaying):
        monkeypatch.setattr(msa, "sparse_attention", attention)
        model = small_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(steps):
            loss, kl = model_step(model, *model_batch(device, length, seed=step))
            losses.append([loss, *kl.flatten().tolist()])
            optimizer.step()
            optimizer.zero_grad()
        curves.append(torch.tensor(losses))
    assert not selections
    got, want = curves
    torch.testing.assert_close(got[:, 0], want[:, 0], rtol=3e-3, atol=0.0)
    torch.testing.assert_close(got[:, 1:], want[:, 1:], rtol=2e-2, atol=1e-4)
    assert want[-1, 0] < want[0, 0]


# ---------------------------------------------------------------------------------------------------------
# which loss reaches what


def test_each_loss_reaches_its_own_inputs(device):
    c = Case(fitted(device, 1500, 600), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=27)
    both = run(tensors, grad_out, top_k=c.slots * BLOCK, factor=1.0).grads

    leaves = [x.detach().requires_grad_() for x in tensors]
    out, kl = msa.sparse_attention(*leaves, top_k=c.slots * BLOCK)
    from_kl = torch.autograd.grad(kl, leaves, allow_unused=True, retain_graph=True)
    from_out = torch.autograd.grad(out, leaves, grad_out, allow_unused=True)
    for i, name in enumerate(NAMES):
        own, other = (from_out, from_kl) if i < 3 else (from_kl, from_out)
        assert other[i] is None or torch.count_nonzero(other[i]) == 0, name
        check_bounds(f"d{name}", own[i], both[f"d{name}"])


def test_probe_with_a_frozen_backbone_or_proxy(device):
    """kl_probe receives the KL whatever else asks for gradients; materialised it is the same."""
    c = Case(fitted(device, 1500, 600), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=28)
    want = run(tensors, grad_out, top_k=c.slots * BLOCK).kl_heads
    for free in ((0, 1, 2), (3, 4), (0,), (4,), ()):
        some = [x.detach().requires_grad_(i in free) for i, x in enumerate(tensors)]
        probe = torch.zeros(c.Hp, device=device, requires_grad=True)
        out, kl = msa.sparse_attention(*some, top_k=c.slots * BLOCK, kl_probe=probe, materialize_kl=True)
        torch.testing.assert_close(kl.detach(), want.sum(), rtol=1e-3, atol=0.0)
        ((out * grad_out).sum() + 0.0 * kl).backward()
        torch.testing.assert_close(probe.grad, want, rtol=1e-3, atol=0.0)
        for i in free:
            assert some[i].grad is not None and some[i].grad.isfinite().all(), NAMES[i]


def test_without_a_proxy(device):
    """block_indices alone: the same out and gradients, and no KL."""
    c = Case(fitted(device, 1500, 600), B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=29)
    places = make_places(c, device, seed=29)
    picked = make_indices(c, places, device, seed=29)
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out, kl = msa.sparse_attention(*leaves, block_indices=picked, **places)
    assert kl.item() == 0.0
    want = run(tensors, grad_out, block_indices=picked, **places)
    check_equal(device, "out", out.detach(), want.out)
    for name, grad in zip(NAMES, torch.autograd.grad(out, leaves, grad_out), strict=False):
        check_bounds(f"d{name}", grad, want.grads[f"d{name}"])


def test_no_grad(device):
    c = Case(fitted(device, 1500, 600), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=30)
    want = run(tensors, grad_out, top_k=c.slots * BLOCK)
    with torch.no_grad():
        out, kl = msa.sparse_attention(*tensors, top_k=c.slots * BLOCK)
        _, value = msa.sparse_attention(*tensors, top_k=c.slots * BLOCK, materialize_kl=True)
    assert torch.equal(out, want.out) and kl.item() == 0.0
    torch.testing.assert_close(value, want.kl_heads.sum(), rtol=1e-3, atol=0.0)


def test_what_the_kernels_do_not_take_runs_the_reference(device):
    """Other dtypes, block sizes, head dims and proxy key heads: still right."""
    g = generator(device, 31)

    def draw(*size, dtype=torch.float32):
        return torch.randn(*size, generator=g, device=device).to(dtype)

    for dim, block, proxy_keys, dtype in (
        (128, 128, 1, torch.float32),
        (64, 128, 1, torch.bfloat16),
        (128, 64, 1, torch.bfloat16),
        (128, 128, 2, torch.bfloat16),
    ):
        sizes = ((300, 4), (300, 2), (300, 2), (300, 2), (300, proxy_keys))
        tensors = [draw(1, n, h, dim, dtype=dtype) for n, h in sizes]
        out, _ = msa.sparse_attention(*tensors, top_k=2 * block, block_size=block)
        picked = reference.select(*tensors[3:], None, None, 2, dim**-0.5, block)
        want, *_ = reference.forward(*tensors, picked, None, None, dim**-0.5, block, False)
        assert torch.equal(out, want)


# ---------------------------------------------------------------------------------------------------------
# compiled kernels on disk


PROCESS = """
import hashlib
import torch
import msa
import msa.hopper

g = torch.Generator("cuda").manual_seed(0)
leaves = [
    torch.randn(1, 300, heads, 128, generator=g, device="cuda").bfloat16().requires_grad_()
    for heads in (16, 2, 2, 2, 1)
]
out, kl = msa.sparse_attention(*leaves, top_k=2048)
(out.float().square().sum() + kl).backward()
digest = hashlib.sha256()
for x in (out, *(leaf.grad for leaf in leaves)):
    digest.update(x.detach().view(torch.int16).cpu().numpy().tobytes())
print(msa.hopper.jit.compile_count, digest.hexdigest())
"""


def test_compiled_kernels_are_kept(device, tmp_path):
    """The second process compiles nothing; files that are cut off or foreign are made anew."""
    only_cuda(device)

    def process():
        environment = os.environ | {"MSA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", PROCESS], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        count, digest = done.stdout.split()
        return int(count), digest, done.stderr

    compiled, digest, _ = process()
    files = sorted((tmp_path / "cache").glob("*.o"))
    assert compiled == len(files) >= 3
    kept = [file.read_bytes() for file in files]
    assert process()[:2] == (0, digest)
    files[0].write_bytes(kept[0][: len(kept[0]) // 2])
    files[1].write_bytes(b"\x7fELF and then nothing of ours" * 100)
    files[2].with_suffix(".sha256").unlink()
    count, again, said = process()
    assert (count, again) == (3, digest)
    assert "damaged" in said
    assert all(file.with_suffix(".sha256").exists() for file in files)


# ---------------------------------------------------------------------------------------------------------
# compiled code (no GPU needed)


@dataclasses.dataclass
class Code:
    """What a cubin says of one kernel."""

    registers: int | None = None  # at entry, per thread
    frame_bytes: int | None = None  # of local memory per thread: spills and arrays not in registers
    threads: int | None = None  # a block at most


def attributes(info):
    """(attribute, payload) of each record of a .nv.info section."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # `value` is the size of what follows
            yield attribute, info[at : at + value]
            at += value


def read_cubin(data):
    """{kernel: Code} of an ELF file for the GPU."""
    assert data[:4] == b"\x7fELF" and data[4] == 2  # 64 bit
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<3H", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]

    def body(header):
        return data[header[4] : header[4] + header[5]]

    def text(strings, at):
        return strings[at : strings.index(b"\0", at)].decode()

    names = body(headers[names_at])
    sections = {text(names, header[0]): header for header in headers}
    symbols = sections[".symtab"]
    strings = body(headers[symbols[6]])
    symbol = [text(strings, at) for at, *_ in struct.iter_unpack("<IBBHQQ", body(symbols))]
    codes = {name.removeprefix(".text."): Code() for name in sections if name.startswith(".text.")}
    for attribute, payload in attributes(body(sections[".nv.info"])):
        if attribute in (0x11, 0x2F):  # FRAME_SIZE, REGCOUNT: (symbol, value)
            index, value = struct.unpack("<II", payload)
            if symbol[index] in codes:
                setattr(codes[symbol[index]], "frame_bytes" if attribute == 0x11 else "registers", value)
    for name, code in codes.items():
        if f".nv.info.{name}" in sections:
            for attribute, payload in attributes(body(sections[f".nv.info.{name}"])):
                if attribute in (0x05, 0x10):  # MAX_THREADS, REQNTID: x, y, z
                    code.threads = math.prod(struct.unpack("<III", payload))
    return codes


def pytest_generate_tests(metafunc):
    if "kernel" in metafunc.fixturenames:
        kernels = []
        if importlib.util.find_spec("cutlass") is not None:  # without it the test is skipped
            import msa.hopper

            kernels = msa.hopper.all_kernels()
        metafunc.parametrize("kernel", kernels, ids=str)


def test_kernels_compile_without_spills(kernel, tmp_path):
    pytest.importorskip("cutlass")
    import msa.hopper

    msa.hopper.jit.compile(kernel, options=f"--keep-cubin --dump-dir={tmp_path}")
    files = sorted(tmp_path.rglob("*.cubin"))
    assert files
    for file in files:
        codes = read_cubin(file.read_bytes())
        assert codes
        for name, code in codes.items():
            assert code.frame_bytes == 0, f"{name}: {code}"
            assert code.registers is not None and code.threads is not None, f"{name}: {code}"
            # setmaxnreg deals out what the block owns: 384 threads may start with 168 each
            assert code.threads != 384 or code.registers <= 168, f"{name}: {code}"
