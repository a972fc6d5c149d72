"""The kernels, sparse and dense, against the PyTorch reference, and promises that no oracle is needed for.

All but the test of the compiled code need a GPU of compute capability 9.0 and are skipped without one.
MSA_TEST_DEVICE=cpu is a switch for work on this file: the same logic at small sizes, where the reference in
bfloat16 stands in for the kernels.

Kernels compile per head layout and number of slots, so the tests share the few of LAYOUTS.
"""

import contextlib
import copy
import dataclasses
import gc
import importlib.util
import itertools
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
from model import Transformer, is_proxy
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


@pytest.fixture(autouse=True)
def leave_no_memory():
    """What the large tests leave in PyTorch's cache would be missing to other processes on the GPU."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


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


BOTH = pytest.mark.parametrize("mode", ["sparse", "warmup"])


def picks(mode, c):
    """The options that make a call sparse; warmup takes none."""
    return dict(top_k=c.slots * BLOCK) if mode == "sparse" else {}


def attend(*tensors, **options):
    """sparse_attention, or warmup_attention where no selection is asked for."""
    if "top_k" in options or "block_indices" in options:
        return msa.sparse_attention(*tensors, **options)
    return msa.warmup_attention(*tensors, **options)


@contextlib.contextmanager
def deterministic():
    """The same bits each time, also from what adds up in any order by default."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(tensors, grad_out, factor=KL_FACTOR, materialize_kl=False, **options):
    """Forward and backward of `attend`."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    probe = torch.zeros(tensors[3].shape[2], device=grad_out.device, requires_grad=True)
    out, kl = attend(*leaves, kl_probe=probe, materialize_kl=materialize_kl, **options)
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


@BOTH
@pytest.mark.parametrize("scale", [0.02, 0.3, 3.0])
def test_scale(scale, mode, device):
    """Scores that are nearly equal, and scores so far apart that most probabilities underflow."""
    c = Case(fitted(device, 2000, 600), **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=1)
    picked = make_indices(c, make_places(c, device), device) if mode == "sparse" else None
    want, _ = run_reference(tensors, grad_out, picked, scale=scale)
    got = run(tensors, grad_out, scale=scale, **({} if picked is None else dict(block_indices=picked)))
    check_bounds("out", got.out, want.out)
    check_kl("KL of the heads", got.kl_heads, want.kl_heads, c.B * c.S)
    for name, grad in want.grads.items():
        check_bounds(name, got.grads[name], grad, scale)
        check_cosine(name, got.grads[name], grad, 0.999)


@BOTH
def test_tiny_kl_factor(mode, device):
    """1 / (N Hp) is about 5e-7: it is applied in fp32, so that a power of two costs no digit."""
    c = Case(fitted(device, 1000, 500), **FEW)
    tensors, grad_out = make_inputs(c, device, seed=2)
    with deterministic():
        one = run(tensors, grad_out, factor=1.0, **picks(mode, c)).grads
        tiny = run(tensors, grad_out, factor=2.0**-21, **picks(mode, c)).grads
    for name in ("dq_proxy", "dk_proxy"):
        assert torch.equal(one[name].float() * 2.0**-21, tiny[name].float()), name


@BOTH
def test_strided_inputs(mode, device):
    """(B, H, S, D) memory seen as (B, S, H, D), and gradients that arrive expanded or transposed."""
    c = Case(300, B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=3)

    def other(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    strided = [other(x) for x in tensors]
    assert not strided[0].is_contiguous()
    ones = grad_out.new_ones(()).expand(grad_out.shape)
    with deterministic():
        got = run(strided, other(grad_out), **picks(mode, c)).tensors()
        want = run(tensors, grad_out, **picks(mode, c)).tensors()
        got_ones = run(tensors, ones, **picks(mode, c)).grads
        want_ones = run(tensors, ones.contiguous(), **picks(mode, c)).grads
    for name in want:
        check_equal(device, name, got[name], want[name])
    for name in want_ones:
        check_equal(device, name, got_ones[name], want_ones[name])


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
    Case(1500, B=2, slots=4, H=6, Hkv=3, Hp=3),
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
    "all scores of some queries negative": lambda q, k: (
        q.abs_().add_(1),
        q[:, ::3].neg_(),
        k.abs_().add_(1),
    ),
    "the same, and nan in some keys": lambda q, k: (
        q.abs_().add_(1),
        q[:, ::3].neg_(),
        k.abs_().add_(1),
        k[:, ::97, 0, 5].fill_(NAN),
    ),
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
# the schedule

# rows of all sequences, proxy heads, slots, seq_len, the chunk's first row and rows, entries of an item
SCHEDULES = [
    (1000, 2, 16, 1000, 0, 1000, 256),
    (4096, 2, 16, 4096, 0, 4096, 2048),
    (1536, 4, 4, 512, 512, 1024, 256),
    (8192, 1, 32, 8192, 2048, 3072, 256),
    (6400, 3, 2, 6400, 0, 6400, 128),
]


def random_selection(rows, proxy_heads, slots, seq_len, device):
    g = generator(device, 41)
    scores = torch.rand(
        rows // seq_len, proxy_heads, seq_len, -(-seq_len // BLOCK), generator=g, device=device
    )
    local = (torch.arange(seq_len, device=device) // BLOCK)[None]
    picked = reference.rank_blocks(scores, local, torch.zeros_like(local), slots).contiguous()
    dropped = torch.rand(picked.shape, generator=g, device=device) < 0.1
    dropped[..., 0] = False
    return picked.masked_fill(dropped, -1).view(rows, proxy_heads, slots)


@pytest.mark.parametrize("rows, heads, slots, seq_len, first, n, cap", SCHEDULES)
def test_schedule_reference_lists_every_entry(rows, heads, slots, seq_len, first, n, cap):
    """Against loops over a dictionary; on the CPU."""
    pytest.importorskip("cutlass")
    from msa.hopper.schedule import QUERY_BITS, schedule_reference

    n = min(n, 1024)
    picked = random_selection(rows, heads, slots, seq_len, torch.device("cpu"))
    blocks = -(-seq_len // BLOCK)
    got = schedule_reference(picked, first, n, seq_len, blocks, cap)
    lists = {}
    for row, chosen in enumerate(picked[first : first + n].tolist()):
        sequence = (first % seq_len + row) // seq_len
        for head, slot in itertools.product(range(heads), range(slots)):
            if chosen[head][slot] >= 0:
                bucket = head * got.n_blocks + sequence * blocks + chosen[head][slot]
                lists.setdefault(bucket, ([], []))[slot > 0].append(row | slot << QUERY_BITS)
    items = got.items.tolist()
    for bucket in range(heads * got.n_blocks):
        local, others = lists.get(bucket, ([], []))
        mine = items[int(got.bucket_items[bucket]) : int(got.bucket_items[bucket + 1])]
        entries, n_local = [], 0
        for start, count, block, head_local, _, *_ in mine:
            assert 0 < count <= cap and start % 16 == 0
            assert block == got.first_block + bucket % got.n_blocks
            assert head_local >> 16 == bucket // got.n_blocks
            entries += got.entries[start : start + count].tolist()
            n_local += head_local & 65535
        assert entries == local + others and n_local == len(local)


@pytest.mark.parametrize("rows, heads, slots, seq_len, first, n, cap", SCHEDULES)
def test_schedule_is_exact(rows, heads, slots, seq_len, first, n, cap, device):
    only_cuda(device)
    from msa.hopper.schedule import make_schedule, schedule_reference

    picked = random_selection(rows, heads, slots, seq_len, device)
    got = make_schedule(picked, first, n, seq_len, -(-seq_len // BLOCK), cap)
    want = schedule_reference(picked, first, n, seq_len, -(-seq_len // BLOCK), cap)
    assert torch.equal(got.bucket_items, want.bucket_items)
    n_items = int(want.bucket_items[-1])
    items = got.items[:n_items]
    assert torch.equal(items[items[:, 4].argsort()], want.items[:n_items])  # the order of work is free
    known = want.entries >= 0  # between the lists is whatever was there
    assert torch.equal(got.entries[known], want.entries[known])


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


@BOTH
def test_documents_never_meet(mode, device):
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
        with deterministic():
            step = run(tensors, grad_out, **picks(mode, c), **places)
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


@pytest.mark.parametrize("group", [8, 4])  # as many proxy heads as key heads, and twice as many
def test_workspace_changes_nothing(group, device, monkeypatch):
    """Queries go through in chunks that fit a workspace; its size does not show."""
    import msa.hopper

    c = case(group, fitted(device, 8000, 900), B=2, docs=True)
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


@BOTH
def test_compiles_once(mode, device):
    """Neither lengths, nor the batch, nor documents, nor data compile anything again."""
    import msa.hopper

    shape = dict(H=16, Hkv=2, Hp=2, slots=16)
    run(*make_inputs(Case(BLOCK, **shape), device), **picks(mode, Case(BLOCK, **shape)))
    compiled = msa.hopper.jit.compile_count
    lengths = (1, 1000, 2048, 4096, 16384, 65536) if device.type == "cuda" else (1, 200, 384)
    for i, S in enumerate(lengths):
        c = Case(S, B=1 + i % 3 if S <= 4096 else 1, docs=i % 2 == 1, **shape)
        places = make_places(c, device, seed=i)
        step = run(*make_inputs(c, device, seed=i), **picks(mode, c), **places)
        assert all(bool(x.isfinite().all()) for x in step.tensors().values())
    c = Case(1000, more_keys=512, permute=mode == "sparse", **shape)
    places = make_places(c, device) if mode == "sparse" else last_places(c, device)
    run(*make_inputs(c, device), **picks(mode, c), **places)
    assert msa.hopper.jit.compile_count == compiled


@pytest.mark.parametrize("selection", ["top_k", "block_indices", "none"])
def test_never_waits_for_the_gpu(selection, device):
    only_cuda(device)
    c = Case(2300, B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=23)
    places = make_places(c, device, seed=23)
    calls = [places]
    if selection == "top_k":
        calls[0] |= dict(top_k=c.slots * BLOCK)
    elif selection == "block_indices":
        calls[0] |= dict(block_indices=make_indices(c, places, device))
    else:
        calls += [{}, last_places(c, device)]
    for options in calls:
        for materialize_kl in (False, True):
            run(tensors, grad_out, materialize_kl=materialize_kl, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in calls:
            for materialize_kl in (False, True):
                run(tensors, grad_out, materialize_kl=materialize_kl, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@BOTH
def test_cuda_graph(mode, device):
    """Captured once, forward and backward replay with whatever has been copied into their inputs."""
    only_cuda(device)
    c = Case(2300, B=2, docs=True, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=24)
    doc = make_places(c, device, seed=24)["doc_start_block"]
    options = dict(doc_start_block=doc, **picks(mode, c))
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
        want = run(fresh, fresh_grad, doc_start_block=fresh_doc, **picks(mode, c))
        if mode == "warmup":  # adds up in any order
            check_step(captured, want)
            continue
        for name, x in captured.tensors().items():
            assert torch.equal(x, want.tensors()[name]), name


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


def model_step(model, tokens, labels, attention="sparse"):
    """(mean loss, KL of the layers and heads) of one forward and backward."""
    probe = torch.zeros(2, 2, device=tokens.device, requires_grad=True)
    out = model(tokens, labels, attention=attention, kl_probe=probe)
    loss = out.nll.sum() / (labels >= 0).sum()
    (loss + out.kl / (2 * tokens.numel())).backward()
    return loss.item(), probe.grad / tokens.numel()


@BOTH
def test_torch_compile(mode, device):
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
        step = model_step(model, tokens, labels, attention=mode)
        results.append((*step, {n: p.grad for n, p in model.named_parameters()}))
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

    def recording(q, k, v, q_proxy, k_proxy, *, top_k, kl_probe, block_size, **places):
        assert block_size == BLOCK and all(x is None for x in places.values())
        selections.append(msa.select_blocks(q_proxy, k_proxy, top_k=top_k))
        return kernels(q, k, v, q_proxy, k_proxy, top_k=top_k, kl_probe=kl_probe)

    def replaying(q, k, v, q_proxy, k_proxy, *, top_k, kl_probe, block_size, **places):
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
# dense attention and warmup


DENSE_CASES = [
    case(8, 1),
    case(3, 1, B=3),
    case(1, 127),
    case(16, 127, B=3),
    case(8, 128),
    case(3, 1000),
    case(1, 1000, B=3),
    case(16, 1000, more_keys=300),  # behind the last query: nobody sees them
    case(8, 1000, B=2, docs=True),
    case(1, 2048, B=2, docs=True),
    case(16, 2300, B=2, docs=True),
    case(4, 3000, B=3, docs=True),
    case(3, 4096, docs=True),
    case(8, 4097, B=3),
    case(1, 4099),
    case(3, 4223, B=3),
    case(16, 4225),
    case(4, 4351),
]


def last_places(c, device):
    """Queries as one run up to the last key, whole blocks of earlier keys before them."""
    assert c.more_keys % BLOCK == 0
    first = c.more_keys // BLOCK
    blocks = torch.arange(first, first - (-c.S // BLOCK), device=device, dtype=torch.int32)
    return dict(doc_start_block=None, q_block=blocks)


def run_dense(tensors, grad_out, **places):
    """out and the gradients of dense_attention."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = msa.dense_attention(*leaves, **places)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return out.detach(), {f"d{n}": d for n, d in zip(NAMES, grads, strict=False)}


def check_warmup(c, tensors, grad_out, places, device):
    """warmup_attention and dense_attention against the reference."""
    want, want_lse = run_reference(tensors, grad_out, None, **places)
    got = run(tensors, grad_out, **places)
    assert got.out.dtype == torch.bfloat16 and got.kl.dtype == torch.float32 and got.kl.item() == 0.0
    assert all(d.dtype == torch.bfloat16 for d in got.grads.values())
    check_step(got, want, rows=c.S)

    known = (None, places["doc_start_block"], places["q_block"])
    with torch.no_grad():
        out, kl, lse, *_ = torch.ops.msa.attention(*tensors, *known, None, SCALE, BLOCK, True, False)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)
    check_kl("kl", kl, want.kl, c.B * c.S * c.Hp)
    check_kl("kl against kl_probe", kl, got.kl_heads.sum(), c.B * c.S * c.Hp, rtol=1e-3)
    assert torch.equal(out, got.out), "materialising the KL leaves out as it is"

    out, grads = run_dense(tensors, grad_out, **places)
    check_equal(device, "out of dense_attention", out, got.out)
    for name, grad in grads.items():
        check_bounds(name, grad, want.grads[name], where=" of dense_attention")
        if c.S > 8:
            check_cosine(name, grad, want.grads[name], 0.999)
    return got


@pytest.mark.parametrize("c", DENSE_CASES, ids=str)
def test_warmup_and_dense(c, device):
    c = c.on(device)
    tensors, grad_out = make_inputs(c, device, seed=32)
    got = check_warmup(c, tensors, grad_out, make_places(c, device, seed=32), device)
    for name in ("dk", "dv", "dk_proxy"):
        assert torch.count_nonzero(got.grads[name][:, c.S :]) == 0, name


@pytest.mark.parametrize(
    "c",
    [case(8, 1, more_keys=128), case(1, 700, more_keys=1280, B=2), case(16, 1024, more_keys=2048)],
    ids=str,
)
def test_warmup_with_earlier_keys(c, device):
    c = dataclasses.replace(c, S=fitted(device, c.S, 300), more_keys=fitted(device, c.more_keys, 512))
    tensors, grad_out = make_inputs(c, device, seed=33)
    check_warmup(c, tensors, grad_out, last_places(c, device), device)


def test_warmup_in_two_pieces(device):
    """The first queries with keys behind them, then the others: together one call over all."""
    c = Case(fitted(device, 2500, 900), B=2, **MAIN)
    cut = c.S // BLOCK // 2 * BLOCK
    tensors, grad_out = make_inputs(c, device, seed=34)
    whole = run(tensors, grad_out)
    q, k, v, q_proxy, k_proxy = tensors
    last = dataclasses.replace(c, S=c.S - cut, more_keys=cut)
    parts = [
        run([q[:, :cut], k, v, q_proxy[:, :cut], k_proxy], grad_out[:, :cut]),
        run([q[:, cut:], k, v, q_proxy[:, cut:], k_proxy], grad_out[:, cut:], **last_places(last, device)),
    ]
    for name in ("out", "dq", "dq_proxy"):
        check_bounds(name, torch.cat([x.tensors()[name] for x in parts], 1), whole.tensors()[name])
    for name in ("dk", "dv", "dk_proxy"):
        assert torch.count_nonzero(parts[0].grads[name][:, cut:]) == 0, name
        check_bounds(name, sum(x.grads[name].float() for x in parts), whole.grads[name])
    kl = sum(x.kl_heads for x in parts)
    torch.testing.assert_close(kl, whole.kl_heads, rtol=1e-4, atol=0.0)


def test_pieces_that_dense_kernels_do_not_take_run_the_reference(device):
    """Documents with earlier keys, and keys that are no whole blocks more than the queries."""
    for c, docs in ((Case(300, more_keys=384, **FEW), True), (Case(300, more_keys=70, **FEW), False)):
        tensors, _ = make_inputs(c, device, seed=35)
        places = dict(q_block=torch.tensor([1, 0, 2], dtype=torch.int32, device=device), doc_start_block=None)
        if docs:
            places = last_places(c, device)
            places["doc_start_block"] = torch.tensor([[1, 4, 4]], dtype=torch.int32, device=device)
        out, kl = msa.warmup_attention(*tensors, materialize_kl=True, **places)
        known = (None, places["doc_start_block"], places["q_block"])
        want, want_kl, *_ = reference.forward(*tensors, *known, SCALE, BLOCK, True)
        assert torch.equal(out, want) and torch.equal(kl, want_kl)


@pytest.mark.parametrize("blocks", [3, 400])
def test_documents_as_sequences_of_their_own(blocks):
    """Where they start: 257 at least, since FlashAttention-4 compiles again for more than 256."""
    from msa.hopper import dense

    S = blocks * BLOCK - 28
    starts = torch.zeros(2, blocks, dtype=torch.int32)
    starts[0, 2:] = 2
    q = torch.zeros(2, S, 1, 8)
    for borders in dense.Places(q, q, starts, None).cu_seqlens:
        assert borders.dtype == torch.int32 and len(borders) == max(257, 2 * blocks) + 1
        assert borders[:3].tolist() == [0, 2 * BLOCK, S] and set(borders[3:].tolist()) == {2 * S}


@pytest.mark.parametrize("docs", [False, True])
def test_sparse_with_all_blocks_is_warmup(docs, device):
    c = Case(fitted(device, 2000, 700), B=2, docs=docs, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=36)
    places = make_places(c, device, seed=36)
    sparse = run(tensors, grad_out, top_k=c.slots * BLOCK, materialize_kl=True, **places)
    warmup = run(tensors, grad_out, materialize_kl=True, **places)
    check_step(sparse, warmup)
    check_kl("kl", sparse.kl, warmup.kl, c.B * c.S * c.Hp)


@pytest.mark.parametrize("docs", [False, True])
def test_warmup_is_deterministic_on_request(docs, device):
    c = Case(fitted(device, 8000, 900), B=2, docs=docs, **MAIN)
    tensors, grad_out = make_inputs(c, device, seed=37)
    places = make_places(c, device, seed=37)
    default, *again = (run(tensors, grad_out, materialize_kl=True, **places) for _ in range(4))
    with deterministic():
        first, *others = (run(tensors, grad_out, materialize_kl=True, **places) for _ in range(6))
    for other in others:
        for name, x in first.tensors().items():
            assert torch.equal(x, other.tensors()[name]), name
    check_step(first, default)
    for other in again:  # what is not added up in any order has the same bits by default
        for name in ("out", "kl", "KL of the heads", "dk_proxy"):
            check_equal(device, name, other.tensors()[name], default.tensors()[name])
    torch.testing.assert_close(first.kl_heads, default.kl_heads, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("docs", [False, True])
def test_warmup_past_2_to_31_elements(docs, device):
    """q, out and their gradients end past 2^31 elements: in a batch, and in a sequence of documents."""
    c = Case(2**19 + 200, **LAYOUTS[16]) if docs else Case(4100, B=129, **LAYOUTS[16])
    assert c.B * c.S * c.H * DIM > 2**31
    c = dataclasses.replace(c, B=fitted(device, c.B, 2), S=fitted(device, c.S, 900))
    doc_start_block, begin = None, 0
    if docs:
        blocks, length = torch.arange(-(-c.S // BLOCK)), fitted(device, 30, 3)
        doc_start_block = (blocks // length * length)[None].to(device, torch.int32)
        begin = int(doc_start_block[0, -1]) * BLOCK
    gc.collect()
    tensors, grad_out = make_inputs(c, device, seed=38)
    got = run(tensors, grad_out, doc_start_block=doc_start_block)
    last = (slice(c.B - 1, None), slice(begin, None))  # the last document of the last sequence
    want, _ = run_reference([x[last] for x in tensors], grad_out[last], None)
    check_bounds("out", got.out[last], want.out)
    for name, grad in want.grads.items():
        check_bounds(name, got.grads[name][last], grad)
        check_cosine(name, got.grads[name][last], grad, 0.999)


@pytest.mark.parametrize("docs", [False, True])
def test_warmup_takes_little_more_memory_than_flash_attention(docs, device):
    only_cuda(device)
    cute = pytest.importorskip("flash_attn.cute")
    c = Case(32768, docs=docs, **MAIN)
    gc.collect()
    before = torch.cuda.memory_allocated()
    tensors, grad_out = make_inputs(c, device, seed=39)
    places = make_places(c, device, seed=39)

    def alone():
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = cute.flash_attn_func(*leaves, causal=True)
        torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, grad_out)

    def peak(call):
        for _ in range(2):  # compiled and loaded first: that is not the op's memory
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    ours = peak(lambda: run(tensors, grad_out, **places))
    flash = peak(alone) - sum(x.nbytes for x in tensors[3:])
    print(f"peak at {c.S} tokens: {ours / 2**30:.2f} GiB, flash attention alone {flash / 2**30:.2f} GiB")
    assert ours <= 1.3 * flash


@pytest.mark.parametrize(
    "c",
    [case(8, 1000, B=3), case(3, 2300, B=2, docs=True), case(1, 700, B=2, more_keys=256)],
    ids=str,
)
def test_warmup_without_flash_attention_4(c, device, monkeypatch):
    """PyTorch's own flash attention takes its place."""
    only_cuda(device)
    import msa.hopper

    tensors, grad_out = make_inputs(c, device, seed=40)
    places = last_places(c, device) if c.more_keys else make_places(c, device, seed=40)
    want = run(tensors, grad_out, **places)
    asked = []
    monkeypatch.setattr(msa.hopper.dense, "flash", lambda: asked.append(1))
    got = check_warmup(c, tensors, grad_out, places, device)
    assert asked
    check_step(got, want)


def test_model_sees_no_difference_with_all_blocks(device):
    """Loss, KL and gradients of a model whose top_k covers the sequence, sparse and in warmup."""
    tokens, labels = model_batch(device, 2 * BLOCK, seed=41)
    results = []
    for mode in ("sparse", "warmup"):
        model = small_model(device)
        step = model_step(model, tokens, labels, attention=mode)
        results.append((*step, {n: p.grad for n, p in model.named_parameters()}))
    (loss, kl, grads), (other_loss, other_kl, other_grads) = results
    assert other_loss == pytest.approx(loss, rel=1e-3)
    torch.testing.assert_close(other_kl, kl, rtol=1e-2, atol=1e-5)
    for name, grad in grads.items():
        check_cosine(name, other_grads[name], grad, 0.999)


def lookup_batch(g, batch, length, block_size, keys=6, values=4):
    """Blocks that state one fact each, a key's value, and at the end two blocks that ask for the values.

    Of the answers exactly a fifth is wrong, so that the loss of a model that looks up well is the same in
    each batch; a model that can't find the blocks again only guesses.
    """
    place = torch.arange(length) // block_size
    facts = length - 2 * block_size
    key = torch.randint(keys, (batch, length), generator=g)
    key[:, :facts] = torch.rand(batch, keys, generator=g).argsort(1)[:, place[:facts]]
    value = torch.randint(values, (batch, keys), generator=g).gather(1, key)
    tokens = torch.where(torch.arange(length) < facts, key * values + value, keys * values + key)
    wrong = facts + torch.rand(batch, length - facts, generator=g).argsort(1)[:, : (length - facts) // 5]
    other = value.gather(1, wrong) + torch.randint(1, values, wrong.shape, generator=g)
    labels = value.scatter(1, wrong, other % values)
    labels[:, :facts] = -100
    return tokens, labels


def test_switch_to_sparse_costs_no_loss(device):
    """Warmup on lookups in 8 blocks, then 4 blocks a query: its own, and those that the proxy has learnt.

    With 2 blocks a model of 16 heads loses some percent here, on the reference too: it is not sparse enough.
    """
    gpu = device.type == "cuda"
    block_size = BLOCK if gpu else 32
    config = Config(
        n_layer=2,
        d_model=64,
        n_head=16 if gpu else 4,
        n_kv_head=2,
        n_proxy_head=2,
        head_dim=DIM if gpu else 32,
        d_mlp=128,
        vocab_size=64,
        tie_embeddings=False,
        block_size=block_size,
        top_k=4 * block_size,
    )
    model = Transformer(config).to(device)
    model.compute_dtype = torch.bfloat16
    g = generator("cpu", 42)
    backbone = [p for n, p in model.named_parameters() if not is_proxy(n)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    warmup = fitted(device, 400, 120)
    # The last steps before the switch and those after it are small: what is compared is not noise of AdamW.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, max(0.1, (warmup - step) / (0.3 * warmup)))
    )
    losses = []
    for step in range(warmup + 5):
        tokens, labels = (x.to(device) for x in lookup_batch(g, 16 if gpu else 8, 8 * block_size, block_size))
        if step == warmup:  # what the switch costs with a proxy that has learnt nothing
            untaught, fresh = copy.deepcopy(model), Transformer(config).to(device).state_dict()
            untaught.load_state_dict({n: x for n, x in fresh.items() if is_proxy(n)}, strict=False)
            guessing, _ = model_step(untaught, tokens, labels)
        loss, _ = model_step(model, tokens, labels, attention="warmup" if step < warmup else "sparse")
        losses.append(loss)
        torch.nn.utils.clip_grad_norm_(backbone, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    before, after = sum(losses[-10:-5]) / 5, sum(losses[-5:]) / 5
    print(
        f"loss before the switch {before:.4f}, after it {after:.4f}, with an untaught proxy {guessing:.4f};"
        f" the last ten {[round(x, 4) for x in losses[-10:]]}"
    )
    assert before < 0.6 * math.log(4), "it has learnt to look up"
    assert guessing > 1.2 * before, "a bad selection shows"
    assert after <= 1.02 * before


# ---------------------------------------------------------------------------------------------------------
# which loss reaches what


@BOTH
def test_each_loss_reaches_its_own_inputs(mode, device):
    c = Case(fitted(device, 1500, 600), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=27)
    both = run(tensors, grad_out, factor=1.0, **picks(mode, c)).grads

    leaves = [x.detach().requires_grad_() for x in tensors]
    out, kl = attend(*leaves, **picks(mode, c))
    from_kl = torch.autograd.grad(kl, leaves, allow_unused=True, retain_graph=True)
    from_out = torch.autograd.grad(out, leaves, grad_out, allow_unused=True)
    for i, name in enumerate(NAMES):
        own, other = (from_out, from_kl) if i < 3 else (from_kl, from_out)
        assert other[i] is None or torch.count_nonzero(other[i]) == 0, name
        check_bounds(f"d{name}", own[i], both[f"d{name}"])


@BOTH
def test_probe_with_a_frozen_backbone_or_proxy(mode, device):
    """kl_probe receives the KL whatever else asks for gradients; materialised it is the same."""
    c = Case(fitted(device, 1500, 600), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=28)
    want = run(tensors, grad_out, **picks(mode, c)).kl_heads
    for free in ((0, 1, 2), (3, 4), (0,), (4,), ()):
        some = [x.detach().requires_grad_(i in free) for i, x in enumerate(tensors)]
        probe = torch.zeros(c.Hp, device=device, requires_grad=True)
        out, kl = attend(*some, kl_probe=probe, materialize_kl=True, **picks(mode, c))
        torch.testing.assert_close(kl.detach(), want.sum(), rtol=1e-3, atol=0.0)
        ((out * grad_out).sum() + 0.0 * kl).backward()
        torch.testing.assert_close(probe.grad, want, rtol=1e-3, atol=0.0)
        for i in free:
            assert some[i].grad is not None and some[i].grad.isfinite().all(), NAMES[i]


@BOTH
def test_gradient_of_the_kl_at_any_address(mode, device):
    """Stacked KLs hand back elements of one vector, of which only every fourth lies at 16 bytes."""
    c = Case(fitted(device, 600, 300), **FEW)
    tensors, _ = make_inputs(c, device, seed=50)
    factors = torch.tensor([0.3, 0.7], device=device)
    leaves = [[x.clone().requires_grad_() for x in tensors] for _ in factors]
    kl = torch.stack([attend(*mine, **picks(mode, c))[1] for mine in leaves])
    kl.backward(factors)
    for name in (3, 4):
        first, second = (
            mine[name].grad.float() / factor for mine, factor in zip(leaves, factors, strict=True)
        )
        check_rows(NAMES[name], second, first, 2e-2, 1e-6)


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


@BOTH
def test_no_grad(mode, device):
    c = Case(fitted(device, 1500, 600), B=2, **FEW)
    tensors, grad_out = make_inputs(c, device, seed=30)
    want = run(tensors, grad_out, **picks(mode, c))
    with torch.no_grad():
        out, kl = attend(*tensors, **picks(mode, c))
        _, value = attend(*tensors, materialize_kl=True, **picks(mode, c))
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
# decoding


@pytest.mark.parametrize("top_k", [None, 16 * BLOCK])
def test_decode(top_k, device):
    """Of a cache with room behind its sequences: as in fp32, in a CUDA graph too, and without waiting."""
    only_cuda(device)
    g = generator(device, 32)
    room = 600 * BLOCK + 77  # more blocks than are sorted at a time
    q, k, v = (randn(2, n, h, DIM, g=g) for n, h in ((1, 16), (room, 2), (room, 2)))
    # Sums of small integers are the same in any order, so that both select the same.
    q_proxy, k_proxy = (
        torch.randint(-3, 4, (2, n, h, DIM), generator=g, device=device).bfloat16()
        for n, h in ((1, 2), (room, 1))
    )
    lengths = torch.tensor([room, 300], device=device)
    for x in (k, v, k_proxy):
        x[1, 300:] = math.nan
    slots = None if top_k is None else top_k // BLOCK
    proxy = {} if top_k is None else dict(q_proxy=q_proxy, k_proxy=k_proxy, top_k=top_k)

    def decode():
        return msa.decode_attention(q, k, v, lengths=lengths, **proxy)

    def check(got):
        wide = [x.float() for x in (q, k, v, q_proxy, k_proxy)]
        want = reference.decode(*wide, lengths, slots, SCALE, BLOCK)
        for b in range(2):
            assert (got[b].float() - want[b]).abs().max() <= 1e-2 * want[b].abs().max(), b

    check(decode())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for n in (room - 5000, 129):
        lengths[0] = n
        graph.replay()
        check(out)


@pytest.mark.parametrize("top_k", [None, 16 * BLOCK])
def test_decode_copies_no_cache(top_k, device):
    """What decoding takes beside the cache grows by the scores: little beside K and V."""
    only_cuda(device)
    room = 2**19
    q, k, v, q_proxy, k_proxy = (
        torch.zeros(1, n, h, DIM, device=device, dtype=torch.bfloat16)
        for n, h in ((1, 16), (room, 2), (room, 2), (1, 2), (room, 1))
    )
    proxy = {} if top_k is None else dict(q_proxy=q_proxy, k_proxy=k_proxy, top_k=top_k)
    lengths = torch.tensor([room - 1], device=device)
    msa.decode_attention(q, k, v, lengths=lengths, **proxy)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    msa.decode_attention(q, k, v, lengths=lengths, **proxy)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < (k.nbytes + v.nbytes if top_k is None else k_proxy.nbytes) / 3, f"{taken / 2**20:.0f} MiB"


# ---------------------------------------------------------------------------------------------------------
# the host's side (no GPU needed)


def check_arguments(kernel, *arguments):
    """Stands in for a compiled kernel: what it takes fits what it was compiled for."""
    from msa.hopper.jit import DTYPES

    names = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32"}
    expected = kernel.arguments()
    assert len(arguments) == len(expected)
    for at, (x, want) in enumerate(zip(arguments, expected, strict=True)):
        where = f"{kernel}, argument {at}"
        if not hasattr(want, "shape"):
            assert type(x) in (int, float), where
            continue
        assert x.is_contiguous() and x.data_ptr() % 16 == 0, where
        assert DTYPES[names[x.dtype]] is want.element_type and x.dim() == len(want.shape), where
        for n, m in zip(x.shape, want.shape, strict=True):
            fits = n == m if isinstance(m, int) else n < 2**31
            assert fits, f"{where}: {tuple(x.shape)}, not {want.shape}"


@pytest.fixture
def no_launches(monkeypatch):
    """Runs all but the kernels, on any device; a list of what they are called with."""
    pytest.importorskip("cutlass")
    import msa.hopper

    calls = []

    def load(kernel):
        def launch(*arguments):
            check_arguments(kernel, *arguments)
            calls.append((kernel, arguments))

        return launch

    monkeypatch.setattr(msa.hopper.jit, "load", load)
    monkeypatch.setattr(msa.hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(msa, "_use_kernels", lambda *call: True)
    return calls


@pytest.mark.parametrize("workspace", [6 * 2**30, 2**20])
@pytest.mark.parametrize(
    "c",
    [
        case(8, 300),
        case(8, 257, B=3),
        case(4, 1300, B=2, more_keys=300),
        case(1, 384, B=2),
        case(5, 1, more_keys=200),
        case(16, 2600),
    ],
    ids=str,
)
def test_kernels_get_what_they_were_compiled_for(c, workspace, no_launches, monkeypatch):
    import msa.hopper

    monkeypatch.setattr(msa.hopper, "workspace_bytes", workspace)
    tensors, grad_out = make_inputs(c, torch.device("cpu"))
    picked = torch.zeros(c.B, c.S, c.Hp, c.slots, dtype=torch.int32)
    some = dict(top_k=c.slots * BLOCK)
    for n, options, wanted in (
        (5, some, "out kl probe"),
        (5, some, "out"),
        (5, some, "kl"),
        (5, some, "probe"),
        (5, some | dict(materialize_kl=True), "out kl"),
        (5, dict(block_indices=picked), "out kl probe"),
        (3, dict(block_indices=picked), "out"),
    ):
        no_launches.clear()
        leaves = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in tensors[:n]]
        leaves = [x.requires_grad_() for x in leaves]  # not contiguous, where there is more than one sequence
        probe = torch.zeros(c.Hp, requires_grad=True) if "probe" in wanted else None
        out, kl = msa.sparse_attention(*leaves, kl_probe=probe, **options)
        assert out.shape == leaves[0].shape and out.dtype == torch.bfloat16 and out.is_contiguous()
        assert kl.shape == () and kl.dtype == torch.float32
        outputs = {"out": (out, grad_out), "kl": (kl, torch.tensor(KL_FACTOR))}
        outputs = [x for name, x in outputs.items() if name in wanted] or [(out, grad_out)]
        inputs = leaves if probe is None else [*leaves, probe]
        roots, factors = zip(*outputs, strict=True)
        grads = torch.autograd.grad(roots, inputs, factors, allow_unused=True)
        reached = ["out" in wanted or "kl" not in wanted] * 3 + ["kl" in wanted] * 2 + [True]
        for x, grad, yes in zip(inputs, grads, reached, strict=False):
            assert (grad is not None) == yes
            assert grad is None or (grad.shape == x.shape and grad.dtype == x.dtype)
        # Forward and backward see every row once, in chunks.
        rows = c.B * msa.hopper.padded_length(c.B, c.S)
        for name in ("SparseForward", "SparseBackward"):
            spans = [a[-21:-19] for kernel, a in no_launches if type(kernel).__name__ == name]
            passes = 1 + (name == "SparseBackward" and "materialize_kl" in options)
            seen = [row for first, n_rows in spans for row in range(first, first + n_rows)]
            assert sorted(seen) == sorted([*range(rows)] * passes)


@pytest.mark.parametrize("S", [2**20, 2**22])
def test_kernels_take_millions_of_tokens(S, no_launches):
    """Of everything that a compiled kernel takes, no dimension leaves its 32 bits."""
    import msa.hopper

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k, v, q_proxy, k_proxy = (empty(1, S, n, DIM) for n in (16, 2, 2, 2, 1))
    picked = msa.hopper.select(q_proxy, k_proxy, None, None, 16)
    tensors = (q, k, v, q_proxy, k_proxy, picked)
    out, _, lse, lse_proxy = msa.hopper.forward(*tensors, SCALE, False)
    grad_kl = empty((), dtype=torch.float32)
    msa.hopper.backward(empty(1, S, 16, DIM), grad_kl, *tensors, out, lse, lse_proxy, SCALE, True)
    assert {type(kernel).__name__ for kernel, _ in no_launches} == {
        "Select",
        "SparseForward",
        "SparseBackward",
    }


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

            others = [pytest.param(k, marks=pytest.mark.slow) for k in msa.hopper.other_kernels()]
            kernels = [*msa.hopper.all_kernels(), *others]
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
