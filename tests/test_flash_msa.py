"""msa.flash_msa_func beside flash-msa 0.1.1 itself: the same arguments, outputs and gradients.

flash-msa ranks blocks by scores rounded to bf16, so that on random data about one pick in a hundred differs.
Hence two comparisons: with its selection handed over, and, on inputs whose block scores lie further apart
than that rounding, of the function as it stands. They need a Hopper GPU, nvcc and the package
(pip install --no-deps flash-msa==0.1.1; it also needs ninja); what they build on is tested without.
"""

import dataclasses

import pytest
import torch

import msa
from msa import reference

BLOCK = DIM = 128
SCALE = DIM**-0.5
TOP_K = 1024  # of 2048 and 4096 tokens: blocks are dropped
NAMES = ("q_proxy", "k_proxy", "q", "k", "v")  # flash-msa's order


@dataclasses.dataclass(frozen=True)
class Case:
    S: int
    H: int
    Hkv: int
    Hp: int
    B: int = 1

    def __str__(self):
        return f"S{self.S}-B{self.B}-H{self.H}-{self.Hkv}-{self.Hp}"


CASES = [Case(S, 16, heads, heads) for S in (2048, 4096) for heads in (2, 4)] + [Case(2048, 16, 2, 2, B=2)]


@pytest.fixture(scope="module")
def flash():
    """(flash_msa_func, its selection), where both can run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    package = pytest.importorskip("flash_msa", exc_type=ImportError)
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        pytest.skip("flash-msa compiles with nvcc, and there is none")
    from flash_msa.msa_select_cutedsl import select_blocks

    return package.flash_msa_func, select_blocks


# ---------------------------------------------------------------------------------------------------------
# inputs, in flash-msa's order and layout (B, heads, S, D)


def random_inputs(c, device, seed=0):
    g = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(c.B, heads, c.S, DIM, generator=g, device=device, dtype=torch.bfloat16)
        for heads in (c.Hp, 1, c.H, c.Hkv, c.Hkv)
    ]


STEP = 0.25  # between the scores of two neighbours in a ranking, at the least


def separated_inputs(c, device, seed=0):
    """Inputs whose block scores differ by more than bf16 tells apart, ranked in four ways.

    Along each of two directions the blocks lie at distinct multiples of STEP around 0, in an order of its
    own. A query points up or down one of them: four rankings, drawn for each query and head. All the rest
    is noise, much less than a step in a score, so that keys of a block and queries of a ranking differ.
    """
    proxy, main = random_inputs(c, "cpu", seed)[:2], random_inputs(c, device, seed)[2:]
    g = torch.Generator().manual_seed(seed + 1)
    n = c.S // BLOCK
    directions = torch.linalg.qr(torch.randn(DIM, 2, generator=g)).Q.T  # orthonormal
    levels = torch.stack([torch.randperm(n, generator=g) for _ in range(2)], -1) - (n - 1) / 2  # (n, 2)
    noise_q, noise_k = (x.float() - x.float() @ directions.T @ directions for x in proxy)
    k_proxy = (STEP * levels @ directions).repeat_interleave(BLOCK, 0) + STEP / 20 * noise_k
    size = (c.B, c.Hp, c.S)
    length = (torch.rand(size, generator=g) + 1) / SCALE
    sign = torch.randint(2, size, generator=g) * 2 - 1
    q_proxy = directions[torch.randint(2, size, generator=g)] * (length * sign)[..., None] + noise_q
    return [q_proxy.to(device, torch.bfloat16), k_proxy.to(device, torch.bfloat16), *main]


def sequence_first(tensors):
    """q, k, v, q_proxy, k_proxy (B, S, heads, D) as views."""
    q_proxy, k_proxy, q, k, v = (x.transpose(1, 2) for x in tensors)
    return q, k, v, q_proxy, k_proxy


def block_indices_of(selected):
    """flash-msa's selection (B, Hp, S, k) as block_indices (B, S, Hp, k).

    It too puts a query's own block first. An empty slot holds the number of blocks, which no block has.
    """
    n_blocks = selected.shape[2] // BLOCK
    return torch.where(selected == n_blocks, -1, selected).transpose(1, 2).contiguous()


# ---------------------------------------------------------------------------------------------------------
# both sides


def step(function, tensors, grad_out, grad_kl):
    """out and the gradients of both losses."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, kl = function(*leaves)
    assert out.shape == grad_out.shape and kl.shape == () and kl.item() == 0.0
    grads = torch.autograd.grad([out, kl], leaves, [grad_out, torch.full_like(kl, grad_kl)])
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}


def compare(ours, theirs, tensors, seed=0):
    """The cosine of each result, and, since it says nothing of a factor, its length."""
    batch, heads, length, dim = tensors[2].shape
    g = torch.Generator(tensors[2].device).manual_seed(seed + 100)
    grad_out = torch.randn(
        batch, length, heads * dim, generator=g, device=tensors[2].device, dtype=torch.bfloat16
    )
    got, want = (step(function, tensors, grad_out, grad_kl=2.0) for function in (ours, theirs))
    for name, x in want.items():
        a, b = got[name].double().flatten(), x.double().flatten()
        assert bool(a.isfinite().all()) and bool(b.isfinite().all()) and b.norm() > 0, name
        assert a.shape == b.shape, name
        cosine, ratio = (a @ b / (a.norm() * b.norm())).item(), (a.norm() / b.norm()).item()
        assert cosine > 0.999, f"{name}: cosine {cosine:.6f}, {ratio:.4f} times as long"
        assert abs(ratio - 1) < 0.02, f"{name}: cosine {cosine:.6f}, {ratio:.4f} times as long"


def picked_by_flash(select, tensors):
    """flash-msa's selection, as block_indices."""
    n_blocks = tensors[0].shape[2] // BLOCK
    selected = select(*tensors[:2], scale=SCALE, num_blocks=n_blocks, top_k_blocks=TOP_K // BLOCK)
    picked = block_indices_of(selected)
    reference.check_block_indices(picked, None, None, BLOCK)
    return picked


@pytest.mark.parametrize("c", CASES, ids=str)
def test_with_the_selection_of_flash_msa(c, flash):
    theirs, select = flash
    tensors = random_inputs(c, "cuda")
    picked = picked_by_flash(select, tensors)

    def ours(*leaves):
        out, kl = msa.sparse_attention(*sequence_first(leaves), block_indices=picked, scale=SCALE)
        return out.flatten(2), kl / (c.B * c.Hp * c.S)

    compare(ours, lambda *leaves: theirs(*leaves, TOP_K, SCALE), tensors)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_where_scores_lie_apart(c, flash):
    theirs, select = flash
    tensors = separated_inputs(c, "cuda")
    picked = msa.select_blocks(*sequence_first(tensors)[3:], top_k=TOP_K, scale=SCALE)
    assert torch.equal(picked, picked_by_flash(select, tensors))
    compare(
        lambda *leaves: msa.flash_msa_func(*leaves, TOP_K, SCALE),
        lambda *leaves: theirs(*leaves, TOP_K, SCALE),
        tensors,
    )


# ---------------------------------------------------------------------------------------------------------
# what these build on (no GPU needed)


def scores_of(tensors):
    """The proxy's scores (B, Hp, S, S) in fp32."""
    q_proxy, k_proxy = (x.float() for x in tensors[:2])
    return q_proxy @ k_proxy.mT * SCALE


def ranked(scores, slots):
    """The blocks before a query's own by descending best score, as reference.select ranks them."""
    local = torch.arange(scores.shape[2])[None] // BLOCK
    blocks = scores.unflatten(-1, (-1, BLOCK)).amax(-1)
    return reference.rank_blocks(blocks, local, torch.zeros_like(local), slots)


@pytest.mark.parametrize("c", [c for c in CASES if c.S == 4096 or c.B > 1], ids=str)
def test_separated_scores_rank_alike_when_rounded(c):
    tensors = separated_inputs(c, "cpu")
    assert [tuple(x.shape) for x in tensors] == [
        (c.B, heads, c.S, DIM) for heads in (c.Hp, 1, c.H, c.Hkv, c.Hkv)
    ]
    scores = scores_of(tensors)
    slots = TOP_K // BLOCK
    exact = ranked(scores, slots)
    assert torch.equal(exact, ranked(scores.bfloat16().float(), slots))
    q_proxy, k_proxy = sequence_first(tensors)[3:]
    assert torch.equal(exact, msa.select_blocks(q_proxy, k_proxy, top_k=TOP_K, scale=SCALE))

    # Neighbours in a ranking are several roundings apart, and the four rankings all occur.
    blocks = scores.unflatten(-1, (-1, BLOCK)).amax(-1).sort(-1).values  # (B, Hp, S, n)
    rounding = 2.0**-8 * blocks.abs().amax(-1, keepdim=True)
    assert (blocks.diff(dim=-1) > 2 * rounding).all()
    for head in range(c.Hp):
        assert len(exact[0, -BLOCK:, head].unique(dim=0)) == 4
    assert (exact[:, -BLOCK:] >= 0).all() and slots < c.S // BLOCK


def test_random_scores_do_not():
    """Otherwise it would show nothing that the selections agree above."""
    scores = scores_of(random_inputs(CASES[0], "cpu"))
    exact, rounded = (ranked(x, TOP_K // BLOCK) for x in (scores, scores.bfloat16().float()))
    differ = (exact != rounded).any(-1).float().mean().item()
    assert 0.005 < differ < 0.5


def test_selection_of_flash_msa_as_block_indices():
    selected = torch.full((1, 2, 3 * BLOCK, 2), 3, dtype=torch.int32)  # 3: none
    selected[0, :, :, 0] = torch.arange(3 * BLOCK) // BLOCK
    selected[0, 0, BLOCK:, 1] = 0
    selected[0, 1, 2 * BLOCK :, 1] = 1
    picked = block_indices_of(selected)
    assert picked.shape == (1, 3 * BLOCK, 2, 2) and picked.dtype == torch.int32 and picked.is_contiguous()
    assert picked[0, 5].tolist() == [[0, -1], [0, -1]]
    assert picked[0, BLOCK].tolist() == [[1, 0], [1, -1]]
    assert picked[0, -1].tolist() == [[2, 0], [2, 1]]
    reference.check_block_indices(picked, None, None, BLOCK)
