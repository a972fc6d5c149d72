"""The model: which loss reaches what, memory options, torch.compile, documents, RoPE, Qwen3 folders."""

import json
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef

import model as m
import msa
from configs import ACTIVATIONS, Config, load_config

ROOT = Path(__file__).resolve().parent.parent
VOCAB, BLOCK = 53, 4
TINY = {
    "n_layer": 3,
    "d_model": 32,
    "n_head": 4,
    "n_kv_head": 2,
    "n_proxy_head": 2,
    "head_dim": 12,  # not d_model / n_head
    "d_mlp": 48,
    "vocab_size": VOCAB,
    "norm_eps": 1e-5,
    "rope_theta": 1234.5,
    "block_size": BLOCK,
    "top_k": 2 * BLOCK,
}
LEARNING = ("warmup", "sparse")
MODES = ("dense", *LEARNING)


def gen(seed):
    return torch.Generator().manual_seed(seed)


def scramble(module, seed=0):
    """Weights at which every part matters: sharp attention, norms that differ from 1 and from each other."""
    g = gen(seed)
    with torch.no_grad():
        for _, param in sorted(module.named_parameters()):
            if param.dim() == 1:
                param.uniform_(0.5, 2.0, generator=g)
            else:
                param.normal_(0, param.shape[1] ** -0.5, generator=g)
    return module


def build(seed=0, **changes):
    return scramble(m.Transformer(Config(**(TINY | changes))), seed)


def draw(batch, length, seed=0):
    """tokens, labels (B, S); some labels are left out."""
    g = gen(100 + seed)
    tokens = torch.randint(VOCAB, (batch, length), generator=g)
    labels = torch.randint(VOCAB, (batch, length), generator=g)
    return tokens, labels.masked_fill_(torch.rand(batch, length, generator=g) < 0.2, -100)


def hidden_of(model, tokens, **kwargs):
    """What the output projection of a forward sees (B, S, d)."""
    seen = []
    handle = model.model["layers"][-1].register_forward_hook(lambda module, args, out: seen.append(out[0]))
    model(tokens, **kwargs)
    handle.remove()
    return model.model["norm"](seen[0])


def all_logits(model, tokens, **kwargs):
    with torch.no_grad():
        return model.lm_head(hidden_of(model, tokens, **kwargs))


def train_step(model, tokens, labels, **kwargs):
    """(nll, KL sums [layers, Hp], {name: gradient}) of one backward."""
    probe = torch.zeros(model.config.n_layer, model.config.n_proxy_head, requires_grad=True)
    model.zero_grad(set_to_none=True)
    out = model(tokens, labels, kl_probe=probe, **kwargs)
    (out.nll.sum() + out.kl / 7).backward()
    return out.nll.detach(), probe.grad, {n: p.grad for n, p in model.named_parameters()}


def close(got, want, tol=1e-5, name=None):
    """Equal but for `tol` of the largest entry; None equals None."""
    if want is None or got is None:
        assert got is want, name
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=tol * want.abs().max().item(), msg=name)


def same_step(got, want, tol):
    """Compares two results of train_step."""
    close(got[0], want[0], tol, "nll")
    close(got[1], want[1], tol, "KL")
    assert got[2].keys() == want[2].keys()
    for name, grad in want[2].items():
        close(got[2][name], grad, tol, name)


@pytest.fixture
def selections(monkeypatch):
    """Counts the executions of the selection, whoever asks for it."""
    calls = []
    original = msa.reference.select

    def counted(*args):
        calls.append(args[0].shape)
        return original(*args)

    monkeypatch.setattr(msa.reference, "select", counted)
    return calls


@pytest.fixture
def offline(monkeypatch):
    """transformers, with nothing but this machine to load from."""

    def refuse(*args, **kwargs):
        raise AssertionError("a local folder must not need the network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    import transformers

    return transformers


# ---------------------------------------------------------------------------------------------------------
# which loss reaches what


@pytest.mark.parametrize("mode", LEARNING)
def test_each_loss_reaches_its_own_parameters_alone(mode):
    model = build()
    tokens, labels = draw(2, 23)
    for of_proxy in (False, True):
        model.zero_grad(set_to_none=True)
        out = model(tokens, labels, attention=mode)
        (out.kl if of_proxy else out.nll.sum()).backward()
        for name, param in model.named_parameters():
            if m.is_proxy(name) == of_proxy:
                assert param.grad.abs().max() > 1e-4, f"{name} learns nothing"
                assert param.grad.isfinite().all(), name
            else:
                assert param.grad is None or not param.grad.any(), f"{name} meets the other loss"


def test_dense_mode_leaves_the_proxy_out():
    model = build()
    tokens, labels = draw(2, 23)
    probe = torch.zeros(3, 2, requires_grad=True)
    out = model(tokens, labels, attention="dense", kl_probe=probe)
    assert out.kl.item() == 0 and not out.kl.requires_grad
    (out.nll.sum() + out.kl).backward()
    assert probe.grad is None
    for name, param in model.named_parameters():
        assert (param.grad is None) == m.is_proxy(name), name


@pytest.mark.parametrize("dense_layers", [1, 3])
def test_dense_layers_have_no_proxy(dense_layers):
    model = build(dense_layers=dense_layers)
    with_proxy = {int(n.split(".")[2]) for n, _ in model.named_parameters() if m.is_proxy(n)}
    assert with_proxy == set(range(dense_layers, 3))
    tokens, labels = draw(2, 23)
    probe = torch.zeros(3, 2, requires_grad=True)
    out = model(tokens, labels, attention="sparse", kl_probe=probe)
    (out.nll.sum() + out.kl).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    if dense_layers == 3:
        assert probe.grad is None
        assert torch.equal(out.nll, model(tokens, labels, attention="dense").nll)
    else:
        assert not probe.grad[:dense_layers].any() and (probe.grad[dense_layers:] > 0).all()


def test_sparse_is_dense_where_all_blocks_are_selected_and_differs_elsewhere():
    tokens, labels = draw(2, 24)
    few, all_blocks = build(), build(top_k=6 * BLOCK)
    dense = few(tokens, labels, attention="dense").nll
    warmup, sparse = (train_step(all_blocks, tokens, labels, attention=mode) for mode in LEARNING)
    close(warmup[0], dense)
    same_step(sparse, warmup, 1e-5)
    chosen = few(tokens, labels, attention="sparse").nll
    close(chosen[:, : 2 * BLOCK], dense[:, : 2 * BLOCK])  # two blocks are all there are
    assert (chosen[:, 2 * BLOCK :] - dense[:, 2 * BLOCK :]).abs().max() > 0.01


@pytest.mark.parametrize("mode", MODES)
def test_no_token_sees_a_later_one(mode):
    model = build()
    tokens, _ = draw(1, 22)
    before = all_logits(model, tokens, attention=mode)
    for place in (5, 8, 15, 21):
        changed = tokens.clone()
        changed[0, place] = (tokens[0, place] + 1) % VOCAB
        after = all_logits(model, changed, attention=mode)
        close(after[:, :place], before[:, :place])
        assert (after[0, place] - before[0, place]).abs().max() > 0.01


# ---------------------------------------------------------------------------------------------------------
# the loss


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 100])
def test_rows_in_chunks_are_the_rows_at_once(chunk, recompute):
    """Outputs, gradients of rows and of weights, where an input, a weight or an output has none."""
    g = gen(0)
    a, b = (torch.randn(33, 8, generator=g).requires_grad_() for _ in range(2))
    number = torch.randint(5, (33,), generator=g)
    weight, unused = (torch.randn(5, 8, generator=g).requires_grad_() for _ in range(2))

    def function(a, b, number):
        return a @ weight.T + b.detach().sum(-1, keepdim=True), (a * weight[number]).sum(-1), b * 2

    weights = [weight, unused]
    want = function(a, b, number)
    got = m.by_rows(function, chunk, (a, b, number), weights, recompute=recompute)
    for x, y in zip(got, want, strict=True):
        close(x, y)
    upstream = [torch.randn(x.shape, generator=g) for x in want]
    for given in ([0, 1, 2], [0], [1, 2], [2]):
        grads = [
            torch.autograd.grad(
                [outputs[i] for i in given],
                [a, b, *weights],
                [upstream[i] for i in given],
                retain_graph=True,
                allow_unused=True,
            )
            for outputs in (got, want)
        ]
        assert grads[0][3] is None
        for x, y in zip(*grads, strict=True):
            assert (x is None) == (y is None) or not y.any()
            close(0 * weight if x is None else x, 0 * weight if y is None else y)
    with torch.no_grad():
        for x, y in zip(m.by_rows(function, chunk, (a, b, number), weights), want, strict=True):
            close(x, y)


def test_recomputed_rows_keep_their_inputs_alone():
    weight = torch.randn(8, 8, generator=gen(0)).requires_grad_()
    x = torch.randn(64, 8, generator=gen(1)).requires_grad_()
    calls, alive = [], []

    def function(x):
        calls.append(x.shape[0])
        y = (x @ weight).exp()
        alive.append(StorageWeakRef(y.untyped_storage()))
        return (y.sin(),)

    (y,) = m.by_rows(function, 16, (x,), [weight], recompute=True)
    assert calls == [16] * 4 and all(ref.expired() for ref in alive)
    y.sum().backward()
    assert calls == [16] * 8
    (y,) = m.by_rows(function, 16, (x,), [weight], recompute=True, undefined=True)
    assert len(calls) == 8 and y.shape == x.shape
    y.sum().backward()
    assert calls == [16] * 12


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss_chunk", [10, 1000])
def test_loss_of_the_model_is_cross_entropy(tied, loss_chunk):
    model = build(tie_embeddings=tied, loss_chunk=loss_chunk)
    assert ("lm_head.weight" in dict(model.named_parameters())) != tied
    tokens, labels = draw(2, 23)
    params = list(model.parameters())
    nll = model(tokens, labels, attention="dense").nll
    logits = model.lm_head(hidden_of(model, tokens, attention="dense"))
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 23)
    close(nll, want)
    got = torch.autograd.grad(nll.sum(), params, allow_unused=True)
    for grad, expected in zip(got, torch.autograd.grad(want.sum(), params, allow_unused=True), strict=True):
        close(grad, expected)
    with torch.no_grad():
        out = model(tokens, labels, attention="dense")
        assert torch.equal(out.correct, logits.argmax(-1) == labels)
        last = model(tokens, attention="dense")
        close(last.logits, logits[:, -1])
    assert out.logits is None and last.nll is None and last.correct is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_the_loss_add_their_gradients_in_fp32(dtype):
    """bfloat16 is what FSDP hands over; there the sum is rounded once, not with every chunk."""
    g = gen(0)
    hidden, labels = torch.randn(4096, 32, generator=g), torch.randint(VOCAB, (4096,), generator=g)
    weight = (torch.randn(VOCAB, 32, generator=g) * 0.1).to(dtype).requires_grad_()

    def gradient(hidden, chunk, recompute=True):
        def nll(h, y):
            return (F.cross_entropy((h @ weight.to(h.dtype).T).float(), y, reduction="none"),)

        (loss,) = m.by_rows(nll, chunk, (hidden, labels), [weight], recompute=recompute)
        return torch.autograd.grad(loss.sum(), weight)[0]

    exact = gradient(hidden.double(), 4096).double()
    half = hidden.bfloat16()
    whole, pieces, rounded = gradient(half, 4096), gradient(half, 32), gradient(half, 32, recompute=False)
    assert whole.dtype == pieces.dtype == dtype
    whole, pieces, rounded = ((x.double() - exact).norm() for x in (whole, pieces, rounded))
    assert pieces < 1.5 * whole
    assert dtype == torch.float32 or rounded > 3 * pieces


def test_bfloat16_stays_close_and_keeps_loss_and_gradients_in_fp32():
    tokens, labels = draw(2, 23)
    model = build()
    want = train_step(model, tokens, labels, attention="warmup")
    model.compute_dtype = torch.bfloat16
    got = train_step(model, tokens, labels, attention="warmup")
    assert got[0].dtype == torch.float32
    assert (got[0] - want[0]).abs().mean() < 0.05 * want[0].mean()
    for name, grad in got[2].items():
        assert grad.dtype == torch.float32
        assert (grad - want[2][name]).norm() < 0.2 * want[2][name].norm(), name


# ---------------------------------------------------------------------------------------------------------
# memory options and torch.compile


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row_chunk", [1000, 10])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_memory_options_change_nothing(mode, row_chunk, activations, selections):
    tokens, labels = draw(2, 23)
    kwargs = {
        "attention": mode,
        "doc_start_block": torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]]).int(),
    }
    want = train_step(build(), tokens, labels, **kwargs)
    plain = len(selections)
    assert plain == (3 if mode == "sparse" else 0)
    got = train_step(build(row_chunk=row_chunk), tokens, labels, activations=activations, **kwargs)
    assert len(selections) - plain == plain, "each layer selects once"
    assert (want[1] is None) == (mode == "dense")
    same_step(got, want, 1e-5)  # the same arithmetic, but for the order of sums
    if activations != "all":
        twice = train_step(build(row_chunk=row_chunk), tokens, labels, activations="attention", **kwargs)
        same_step(got, twice, 0)
    with torch.no_grad():
        close(build(row_chunk=row_chunk)(tokens, labels, activations=activations, **kwargs).nll, want[0])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_proxy_learns_the_same_with_the_backbone_frozen(compiles, activations):
    tokens, labels = draw(2, 23)
    want = train_step(build(), tokens, labels, attention="warmup")
    model = build(row_chunk=10)
    for name, param in model.named_parameters():
        param.requires_grad_(m.is_proxy(name))
    if compiles:
        torch._dynamo.reset()
        model.compile_rows(backend="aot_eager", fullgraph=True)
    got = train_step(model, tokens, labels, attention="warmup", activations=activations)
    close(got[0], want[0])
    close(got[1], want[1])
    for name, grad in got[2].items():
        close(grad, want[2][name] if m.is_proxy(name) else None, name=name)
    torch._dynamo.reset()


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_what_waits_for_backward(activations):
    """Of the inputs of layers, and of what lies between."""
    inputs, hidden = [], []
    model = build()
    for layer in model.model["layers"]:
        layer.register_forward_pre_hook(
            lambda module, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        )
        layer.self_attn.register_forward_pre_hook(
            lambda module, args: hidden.append(StorageWeakRef(args[0].untyped_storage()))
        )
    tokens, labels = draw(2, 23)
    out = model(tokens, labels, attention="sparse", activations=activations)
    # The last layer's input stays: it is what backward begins with, and that before it is on its way back.
    assert [ref.expired() for ref in inputs] == [activations == "offload"] * 2 + [False]
    assert [ref.expired() for ref in hidden] == [activations in ("input", "offload")] * 3
    out.nll.sum().backward()


def test_layers_are_recomputed_without_their_last_part():
    """The MLP runs forward twice, not three times: what it gives is not needed to go back."""
    model, calls = build(), []
    inner = m.MLP.forward
    for layer in model.model["layers"]:
        layer.mlp.forward = lambda x, mlp=layer.mlp: calls.append(1) or inner(mlp, x)
    tokens, labels = draw(2, 23)
    for activations, times in (("all", 1), ("attention", 2), ("input", 2), ("offload", 2)):
        calls.clear()
        model(tokens, labels, attention="sparse", activations=activations).nll.sum().backward()
        assert len(calls) == times * 3


def test_offload_moves_its_tensor_and_no_other():
    x = torch.randn(4, generator=gen(0)).requires_grad_()
    with m.HostCopies(x.device).take(x):
        y, z = x.exp(), x.square()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()
    moved = z.grad_fn._saved_self
    assert moved.data_ptr() != x.data_ptr() and torch.equal(moved, x)


def test_offload_brings_the_next_input_while_a_layer_works():
    copies, x = m.HostCopies(torch.device("cpu")), torch.randn(4, generator=gen(0)).requires_grad_()
    inputs = [x]
    for _ in range(3):
        with copies.take(inputs[-1]):
            inputs.append(inputs[-1].square())
    under_way = []
    for y in inputs[1:]:
        y.register_hook(lambda g: under_way.append([c.back is not None for c in copies.packed]))
    copies.turn()
    inputs[-1].sum().backward()
    assert under_way == [[False, False, True], [False, True, False], [True, False, False]]
    close(x.grad, 8 * x.detach() ** 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slow", [False, True])
def test_copies_to_the_host_and_back_change_no_bit(slow):
    """Over some steps, which reuse the pinned memory; slow: the copies come late, both ways."""
    wide = {"d_model": 256, "n_layer": 4, "row_chunk": 512}
    tokens, labels = (x.cuda() for x in draw(2, 1024))
    results = []
    for activations in ("input", "offload"):
        model = build(**wide).cuda()
        copy = m._HostCopy.copy

        def late(self, to, x, copy=copy):
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(20_000_000)
            return copy(self, to, x)

        with pytest.MonkeyPatch.context() as patch:
            if slow:
                patch.setattr(m._HostCopy, "copy", late)
            for _ in range(3):
                probe = torch.zeros(4, model.config.n_proxy_head, requires_grad=True, device="cuda")
                out = model(tokens, labels, attention="warmup", activations=activations, kl_probe=probe)
                (out.nll.sum() + out.kl).backward()
        results.append([p.grad.clone() for p in model.parameters()])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activations", ["all", "input"])  # others run the same graphs
def test_compiled_on_a_gpu(activations):
    """With gradients torch.compile is first called in autograd's own thread, if rows are computed again."""
    torch._dynamo.reset()
    tokens, labels = (x.cuda() for x in draw(2, 64))
    eager, compiled = build(row_chunk=32).cuda(), build(row_chunk=32).cuda()
    compiled.compile_rows()

    def gradients(model):
        probe = torch.zeros(3, model.config.n_proxy_head, requires_grad=True, device="cuda")
        out = model(tokens, labels, attention="sparse", activations=activations, kl_probe=probe)
        (out.nll.sum() + out.kl / 7).backward()
        return {n: p.grad for n, p in model.named_parameters()} | {"probe": probe.grad}

    want, got = gradients(eager), gradients(compiled)
    for name, grad in want.items():
        close(got[name], grad, 1e-4, name)
    torch._dynamo.reset()


@pytest.mark.parametrize("activations", ["all", "input"])
@pytest.mark.parametrize("mode", LEARNING)
def test_compiled_rows_are_whole_graphs_compiled_once(mode, activations, selections):
    torch._dynamo.reset()
    eager, compiled = build(row_chunk=10), build(row_chunk=10, loss_chunk=10)
    counter = CompileCounterWithBackend("aot_eager")
    compiled.compile_rows(backend=counter, fullgraph=True)  # fullgraph: a graph break is an error
    counts = []
    for i, length in enumerate((20, 20, 40)):
        starts = [0, 0, 2, 2, 2, 2, 6, 7, 7, 7] if i else [0, 1, 1, 1, 4, 5, 5, 5, 5, 5]
        tokens, labels = draw(1, length, seed=i)
        kwargs = {
            "rope_theta": 1e4 * (i + 1),
            "doc_start_block": torch.tensor([starts[: -(-length // 4)]], dtype=torch.int32),
        }
        want = train_step(eager, tokens, labels, attention=mode, **kwargs)
        plain = len(selections)
        got = train_step(compiled, tokens, labels, attention=mode, activations=activations, **kwargs)
        same_step(got, want, 1e-5)
        assert len(selections) == (plain + 3 if mode == "sparse" else 0), "each layer selects once"
        selections.clear()
        counts.append(counter.frame_count)
    # project and finish, with gradients and without, the loss, and the proxy's part that selects
    assert counts[0] <= 7 and counts == counts[:1] * 3, "neither layer, data nor length compiles again"
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------
# the KL and its report


def test_kl_probe_is_the_kl_of_the_report():
    model = build(dense_layers=1)
    tokens, labels = draw(2, 23)
    kwargs = {"doc_start_block": torch.tensor([[0, 0, 0, 3, 3, 3], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)}
    rows = torch.arange(23)
    _, probe, _ = train_step(model, tokens, labels, attention="sparse", **kwargs)
    report = []
    with torch.no_grad():
        out = model(tokens, labels, attention="sparse", report=report, report_rows=rows, **kwargs)
    assert out.kl.item() == 0 and len(report) == 2
    close(torch.stack([r["kl_selected"] for r in report]), probe[1:].sum(1))
    assert not probe[0].any() and probe[1:].min() > 0.1

    # In warmup the support is everything, and the report has that head by head, as a mean over its rows.
    _, probe, _ = train_step(model, tokens, labels, attention="warmup", **kwargs)
    report.clear()
    with torch.no_grad():
        model(tokens, labels, attention="warmup", report=report, report_rows=rows, **kwargs)
    close(torch.stack([r["kl_full"] for r in report]) * 2 * 23, probe[1:])


def test_kl_probe_adds_up_over_micro_batches():
    model = build()
    tokens, labels = draw(3, 23)
    _, whole, _ = train_step(model, tokens, labels, attention="sparse")
    parts = [train_step(model, tokens[i : i + 1], labels[i : i + 1], attention="sparse")[1] for i in range(3)]
    close(sum(parts), whole)


# ---------------------------------------------------------------------------------------------------------
# documents and positions


@pytest.mark.parametrize("mode", MODES)
def test_documents_do_not_see_each_other(mode):
    model = build()
    tokens, labels = draw(2, 23)
    borders = ([0, 12], [0, 4, 20])  # where the documents of the two sequences start
    starts = [[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]]
    with torch.no_grad():
        together = model(
            tokens, labels, attention=mode, doc_start_block=torch.tensor(starts, dtype=torch.int32)
        ).nll
        mixed = model(tokens, labels, attention=mode).nll
        for row, begins in enumerate(borders):
            for begin, end in zip(begins, [*begins[1:], 23], strict=True):
                cut = slice(begin, end)
                alone = model(tokens[row : row + 1, cut], labels[row : row + 1, cut], attention=mode).nll[0]
                close(together[row, cut], alone)
                if begin:
                    assert (mixed[row, cut] - alone).abs().max() > 0.01
                else:
                    close(mixed[row, cut], alone)


def test_positions_start_again_with_each_document(monkeypatch):
    seen = []
    original = m.rope_table

    def recorded(position, *args):
        seen.append(position.tolist())
        return original(position, *args)

    monkeypatch.setattr(m, "rope_table", recorded)  # attention itself sees no shift of a whole document
    model = build()
    tokens, labels = draw(2, 23)
    starts = torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]], dtype=torch.int32)
    model(tokens, labels, attention="dense", doc_start_block=starts)
    model(tokens, labels, attention="dense")
    first, second = [*range(12), *range(11)], [*range(4), *range(16), *range(3)]
    assert seen == [[first, second], [list(range(23))]]


def test_rope_theta_of_the_call_replaces_the_config():
    model, other = build(), build(rope_theta=77.0)
    tokens, labels = draw(1, 23)
    with torch.no_grad():
        want = other(tokens, labels, attention="sparse").nll
        assert torch.equal(model(tokens, labels, attention="sparse", rope_theta=77.0).nll, want)
        assert not torch.allclose(model(tokens, labels, attention="sparse").nll, want)


@pytest.mark.parametrize("theta", [1e4, 1e8])
def test_rope_table_is_exact_at_a_million(theta):
    position = torch.tensor([[0, 1, 4097, 999_983, 2**20 - 1], [5, 2**20, 7, 123_456, 2**21 - 1]])
    cos, sin = m.rope_table(position, 128, theta)
    assert cos.shape == sin.shape == (2, 5, 1, 64) and cos.dtype == sin.dtype == torch.float32
    # The angle reduced by whole turns in 80-bit floats, where the platform has them.
    rate = np.longdouble(theta) ** (-np.arange(0, 128, 2).astype(np.longdouble) / 128)
    angle = position.numpy().astype(np.longdouble)[..., None, None] * rate
    angle = np.remainder(angle, 2 * np.arctan2(np.longdouble(0), np.longdouble(-1)))
    for got, want in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert np.abs(got.numpy() - want).max() < 1e-7


def test_rope_table_is_the_same_in_pieces(monkeypatch):
    position = torch.arange(23)[None]
    whole = m.rope_table(position, 12, 1e4)
    monkeypatch.setattr(m, "ROPE_ROWS", 5)
    for got, want in zip(m.rope_table(position, 12, 1e4), whole, strict=True):
        assert torch.equal(got, want)


def test_rotation_is_that_of_transformers(offline):
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    g = gen(0)
    q, k = torch.randn(2, 9, 4, 12, generator=g), torch.randn(2, 9, 2, 12, generator=g)
    cos, sin = m.rope_table(torch.arange(9)[None] + 1000, 12, 1e4)
    theirs = [torch.cat([x, x], -1)[:, :, 0] for x in (cos, sin)]  # (1, S, D)
    for x, want in zip((q, k), apply_rotary_pos_emb(q, k, *theirs, unsqueeze_dim=2), strict=True):
        close(m.rotate(x, cos, sin), want)
    low = m.rotate(q.bfloat16(), cos, sin)  # in fp32 inside
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, m.rotate(q.bfloat16().float(), cos, sin).bfloat16())


# ---------------------------------------------------------------------------------------------------------
# Qwen3 folders


def qwen3_of(transformers, tied=False, **changes):
    """A randomly initialised Qwen3 of the shape of TINY."""
    theirs = transformers.Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": TINY["d_model"],
            "intermediate_size": TINY["d_mlp"],
            "num_hidden_layers": TINY["n_layer"],
            "num_attention_heads": TINY["n_head"],
            "num_key_value_heads": TINY["n_kv_head"],
            "head_dim": TINY["head_dim"],
            "rms_norm_eps": TINY["norm_eps"],
            "rope_theta": TINY["rope_theta"],
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
        }
        | changes
    )
    return scramble(transformers.Qwen3ForCausalLM(theirs).eval(), seed=5)


def edit(folder, **changes):
    """Changes config.json of a folder; None drops a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_qwen3_loads_one_to_one(tied, sharded, offline, tmp_path):
    theirs = qwen3_of(offline, tied)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    ours = m.Transformer(Config(**TINY, tie_embeddings=tied))
    fresh = {n: p.clone() for n, p in ours.named_parameters() if m.is_proxy(n)}
    missing = m.load_weights(ours, m.load_qwen3(tmp_path, ours.config), "there")
    assert set(missing) == set(fresh)
    assert all(torch.equal(p, fresh[n]) for n, p in ours.named_parameters() if n in fresh)
    assert set(dict(theirs.named_parameters())) == {n for n, _ in ours.named_parameters()} - set(fresh)

    tokens, labels = draw(2, 23)
    with torch.no_grad():
        want = theirs(tokens).logits
        close(all_logits(ours, tokens, attention="dense"), want)
        close(ours(tokens, attention="dense").logits, want[:, -1])
        nll = F.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="none").view(2, 23)
        out = ours(tokens, labels, attention="dense")
        close(out.nll, nll)
        assert torch.equal(out.correct, want.argmax(-1) == labels)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_export_loads_with_from_pretrained(tied, offline, tmp_path):
    ours = build(tie_embeddings=tied, dense_layers=1)
    state = {n: p.detach() for n, p in ours.named_parameters()}
    m.save_qwen3(ours.state_dict(), ours.config, tmp_path / "new" / "folder", rope_theta=77.0, context=4096)
    folder = tmp_path / "new" / "folder"
    theirs, loading = offline.Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert theirs.config.max_position_embeddings == 4096 and theirs.dtype == torch.float32
    auto = offline.AutoModelForCausalLM.from_pretrained(folder)
    assert type(auto) is type(theirs)
    tokens, _ = draw(2, 23)
    want = all_logits(ours, tokens, attention="dense", rope_theta=77.0)
    with torch.no_grad():
        close(theirs.eval()(tokens).logits, want)

    # And back, the proxy with it.
    again = m.load_qwen3(folder, Config(**(TINY | {"rope_theta": 77.0}), tie_embeddings=tied, dense_layers=1))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[n], w) for n, w in state.items())
    assert m.load_weights(build(seed=9, tie_embeddings=tied, dense_layers=1), again, "there") == []


def test_qwen3_in_bfloat16_loads_as_fp32(offline, tmp_path):
    theirs = qwen3_of(offline).bfloat16()
    theirs.save_pretrained(tmp_path)
    state = m.load_qwen3(tmp_path, Config(**TINY, tie_embeddings=False))
    assert {w.dtype for w in state.values()} == {torch.float32}
    assert torch.equal(state["lm_head.weight"], theirs.lm_head.weight.float())


def test_config_json_of_older_transformers_loads(offline, tmp_path):
    qwen3_of(offline).save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters=None, rope_theta=1234.5, rope_scaling=None)
    assert m.load_qwen3(tmp_path, Config(**TINY, tie_embeddings=False))


def test_error_of_another_shape_says_what_to_set(offline, tmp_path):
    qwen3_of(offline).save_pretrained(tmp_path)
    config = load_config(["configs/quickstart.py", "--n_layer=4"])
    with pytest.raises(ValueError, match="^init_from: ") as caught:
        m.load_qwen3(tmp_path, config)
    advice = re.findall(r"--\S+", str(caught.value))
    assert {a.split("=")[0] for a in advice} == {
        *("--vocab_size", "--d_model", "--d_mlp", "--n_layer", "--head_dim", "--norm_eps", "--rope_theta"),
        "--tie_embeddings",
    }
    followed = load_config(["configs/quickstart.py", *advice])
    m.load_weights(m.Transformer(followed), m.load_qwen3(tmp_path, followed), "there")
    followed.n_head, followed.n_kv_head = 8, 4
    with pytest.raises(ValueError, match=r"set --n_head=4 --n_kv_head=2$"):
        m.load_qwen3(tmp_path, followed)


def test_errors_of_folders_that_cannot_be_loaded(offline, tmp_path):
    config = Config(**TINY, tie_embeddings=False)
    qwen3_of(offline).save_pretrained(tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())
    yarn = {"rope_theta": 1234.5, "rope_type": "yarn", "factor": 4.0}
    for changes, says in (
        ({"model_type": "llama"}, "'llama'.*only 'qwen3'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": yarn}, "RoPE scaling"),
        ({"rope_parameters": None, "rope_theta": 1234.5, "rope_scaling": {"type": "yarn"}}, "RoPE scaling"),
    ):
        edit(tmp_path, **changes)
        with pytest.raises(ValueError, match=f"^init_from: .*{says}"):
            m.load_qwen3(tmp_path, config)
        (tmp_path / "config.json").write_text(json.dumps(original))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="^init_from: .* no model.*safetensors"):
        m.load_qwen3(tmp_path, config)


def test_errors_of_weights_that_do_not_fit():
    model = build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: torch.zeros_like(p) for n, p in before.items()}
    q = "model.layers.0.self_attn.q_proj.weight"
    for broken, says in (
        (state | {q: torch.zeros(3, 4)}, rf"{q} is \(3, 4\) in there, \(48, 32\) here"),
        ({n: w for n, w in state.items() if n != q}, rf"there lacks \['{q}'\]"),
        (state | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, ".*unknown .*layers.9"),
    ):
        with pytest.raises(ValueError, match=f"^init_from: {says}"):
            m.load_weights(model, broken, "there")
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), "nothing half-loaded"
    # A proxy of layers that are dense here has no place, one that is lacking starts fresh.
    fewer = build(dense_layers=1)
    assert m.load_weights(fewer, state, "there") == []
    assert not any(p.any() for p in fewer.parameters())
    own = {n for n in before if ".layers.0." in n and m.is_proxy(n)}
    assert set(m.load_weights(model, {n: state[n] for n in state if n not in own}, "there")) == own
    assert all(torch.equal(p, before[n] if n in own else state[n]) for n, p in model.named_parameters())


# ---------------------------------------------------------------------------------------------------------
# initialisation and size


def test_the_seed_alone_sets_the_weights():
    weights = []
    for config_seed, global_seed in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(global_seed)
        weights.append(dict(m.Transformer(Config(**TINY, seed=config_seed)).named_parameters()))
    same, other = weights[1], weights[2]
    for name, param in weights[0].items():
        assert torch.equal(param, same[name]), name
        if param.dim() == 2:
            assert not torch.equal(param, other[name]), name


def test_initialisation():
    config = Config(**(TINY | {"d_model": 256, "d_mlp": 512, "vocab_size": 512}), tie_embeddings=False)
    model = m.Transformer(config)
    assert any(m.is_proxy(n) for n, _ in model.named_parameters())
    for name, param in model.named_parameters():
        assert param.isfinite().all() and param.requires_grad and param.dtype == torch.float32, name
        if param.dim() == 1:
            assert (param == 1).all(), name
        else:
            writes = "o_proj" in name or "down_proj" in name
            std = 0.02 / 6**0.5 if writes else 0.02
            assert abs(param.std().item() / std - 1) < 0.05 and abs(param.mean().item()) < std / 10, name
    tokens, labels = draw(2, 23)
    nll = model(tokens, labels, attention="sparse").nll
    assert abs(nll[labels >= 0].mean().item() - np.log(512)) < 0.3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dense_layers", [0, 1, 3])
def test_parameters_are_counted_without_a_model(tied, dense_layers):
    model = build(tie_embeddings=tied, dense_layers=dense_layers)
    parts = (model, model.model["layers"])
    assert m.count_parameters(model.config) == tuple(sum(p.numel() for p in x.parameters()) for x in parts)


def test_size_of_the_million_token_config():
    config = load_config([str(ROOT / "configs" / "1m_ctx.py")])
    with torch.device("meta"):
        model = m.Transformer(config)
    count = {n: p.numel() for n, p in model.named_parameters()}
    total, embedding = sum(count.values()), count["model.embed_tokens.weight"]
    layers = sum(n for name, n in count.items() if ".layers." in name)
    proxy = sum(n for name, n in count.items() if m.is_proxy(name))
    print(f"{total / 1e6:.1f}M parameters: layers {layers / 1e6:.1f}M, embedding {embedding / 1e6:.1f}M")
    print(f"the proxy's share of the layers: {proxy / 1e6:.1f}M")
    assert all(p.is_meta for p in model.parameters())
    assert abs(total - 400e6) < 5e6 and abs(layers - 350e6) < 5e6 and abs(embedding - 51e6) < 1e6
