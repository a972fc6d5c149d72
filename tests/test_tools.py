"""flash-msa's functions, `python -m msa.check` and `python -m msa.bench`, as far as a CPU shows them."""

import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import naive
import pytest
import torch

import msa
from msa import bench, check, reference
from msa.flash_msa import flash_msa_func, flash_msa_warmup_func

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("q_proxy", "k_proxy", "q", "k", "v")  # flash-msa's order
BLOCK = 128


# ---------------------------------------------------------------------------------------------------------
# flash_msa_func, flash_msa_warmup_func


def flash_inputs(S=320, B=1, H=4, Hkv=2, Hp=2, Hpk=1, D=16, seed=0):
    """Leaves in flash-msa's order and layout (B, heads, S, D)."""
    g = torch.Generator().manual_seed(seed)
    return [
        (1.5 * torch.randn(B, n, S, D, generator=g, dtype=torch.float64)).requires_grad_()
        for n in (Hp, Hpk, H, Hkv, Hkv)
    ]


def sequence_first(leaves):
    """The same leaves as q, k, v, q_proxy, k_proxy (B, S, heads, D)."""
    q_proxy, k_proxy, q, k, v = (x.transpose(1, 2) for x in leaves)
    return q, k, v, q_proxy, k_proxy


def loss_of(out, kl, weight):
    return (out * weight).sum() + 0.37 * kl


@pytest.mark.parametrize("warmup", [False, True])
def test_flash_msa_functions_are_the_package_in_other_clothes(warmup):
    B, S, H, Hp, D, scale = 2, 256, 4, 2, 16, 0.3
    leaves = flash_inputs(S=S, B=B)
    weight = torch.randn(B, S, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    function = flash_msa_warmup_func if warmup else flash_msa_func
    out, kl = function(*leaves, BLOCK, scale)
    assert out.shape == (B, S, H * D) and kl.shape == () and kl.item() == 0.0
    got = torch.autograd.grad(loss_of(out, kl, weight), leaves)

    own = msa.warmup_attention if warmup else msa.sparse_attention
    more = {} if warmup else {"top_k": BLOCK}
    expected, total = own(*sequence_first(leaves), scale=scale, **more)
    assert torch.equal(out.view(B, S, H, D), expected)
    want = torch.autograd.grad(loss_of(expected.flatten(2), total / (B * Hp * S), weight), leaves)
    for name, x, y in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("warmup", [False, True])
def test_flash_msa_functions_against_the_oracle(warmup):
    """Output, and all five gradients, with the KL as a mean over batch, queries and proxy heads."""
    S, top_k, scale = 320, 2 * BLOCK, 0.25
    leaves = flash_inputs(S=S)
    out, kl = (flash_msa_warmup_func if warmup else flash_msa_func)(*leaves, top_k, scale)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(loss_of(out, kl, weight), leaves)

    if warmup:
        expected, kl_heads = naive.warmup(*sequence_first(leaves), scale=scale)
    else:
        expected, kl_heads = naive.sparse(*sequence_first(leaves), top_k=top_k, scale=scale)
    torch.testing.assert_close(out, expected.flatten(2), rtol=1e-10, atol=1e-10)
    mean = kl_heads.sum() / (2 * S)  # B = 1, Hp = 2
    want = torch.autograd.grad(loss_of(expected.flatten(2), mean, weight), leaves)
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert x.abs().max() > 1e-6, name
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_flash_msa_kl_gradient_does_not_depend_on_the_batch():
    """A mean: the batch twice gives each copy half the gradient."""
    leaves = flash_inputs(S=256)
    doubled = [torch.cat([x, x]).detach().requires_grad_() for x in leaves]
    (single,) = torch.autograd.grad(flash_msa_func(*leaves, BLOCK, 0.3)[1], leaves[:1])
    (double,) = torch.autograd.grad(flash_msa_func(*doubled, BLOCK, 0.3)[1], doubled[:1])
    torch.testing.assert_close(double, torch.cat([single, single]) / 2)


@pytest.mark.parametrize("function", [flash_msa_func, flash_msa_warmup_func])
@pytest.mark.parametrize("index", range(5))
def test_flash_msa_functions_name_what_they_refuse(function, index):
    leaves = flash_inputs(S=128)
    for bad in (leaves[index][0], None, leaves[index].float()):
        arguments = [*leaves[:index], bad, *leaves[index + 1 :]]
        with pytest.raises(ValueError, match=r"^(q_proxy|k_proxy|q|k|v): "):
            function(*arguments, BLOCK, 0.3)
    arguments = [*leaves[:index], leaves[index][0], *leaves[index + 1 :]]
    with pytest.raises(ValueError, match=rf"^{NAMES[index]}: must be \(batch, heads, sequence, head_dim\)"):
        function(*arguments, BLOCK, 0.3)


def test_flash_msa_func_refuses_what_flash_msa_alone_takes():
    leaves = flash_inputs(S=128)
    for top_k in (100, 256.0, 0, None):
        with pytest.raises(ValueError, match="top_k"):
            flash_msa_func(*leaves, top_k, 0.3)
    with pytest.raises(ValueError, match="q_proxy: 1 heads are no multiple of k's 2"):
        flash_msa_func(*flash_inputs(S=128, Hp=1), BLOCK, 0.3)


def test_flash_msa_func_takes_any_strides():
    """Heads first in memory, as flash-msa has them, or views of (B, S, heads, D)."""
    leaves = flash_inputs(S=256)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    assert torch.equal(flash_msa_func(*leaves, BLOCK, 0.3)[0], flash_msa_func(*views, BLOCK, 0.3)[0])


def test_flash_msa_functions_compile_without_a_graph_break():
    leaves = flash_inputs(S=256)
    for function in (flash_msa_func, flash_msa_warmup_func):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for x, y in zip(compiled(*leaves, BLOCK, 0.3), function(*leaves, BLOCK, 0.3), strict=True):
            torch.testing.assert_close(x, y)


# ---------------------------------------------------------------------------------------------------------
# python -m msa.check


def run_module(name, *arguments, **environment):
    command = [sys.executable, "-m", name, *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@no_gpu
@pytest.mark.slow
def test_check_runs_here(tmp_path):
    done = run_module("msa.check", MSA_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert f"torch                {torch.__version__}" in done.stdout
    for name in ("selection", "out", "kl", "kl_probe", "dq", "dk", "dv", "dq_proxy", "dk_proxy"):
        assert f"\n{name:<20} ok, " in done.stdout
    assert "attention runs the PyTorch reference" in done.stdout


@pytest.fixture
def quiet_check(monkeypatch):
    """check.main without a GPU, without compiling kernels, and with what a driver would say."""

    def run(gpus=(), driver_cuda=None):
        monkeypatch.setattr(check, "ask_driver", lambda: (list(gpus), driver_cuda))
        monkeypatch.setattr(check, "check_kernels", lambda report, run: False)
        monkeypatch.setattr(check, "check_cache", lambda report: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return check.main([])

    return run


def test_check_exits_0_without_a_gpu(quiet_check, capsys):
    assert quiet_check() == 0
    assert (
        "All that this machine should do works: attention runs the PyTorch reference."
        in capsys.readouterr().out
    )


def test_check_finds_a_wrong_result(quiet_check, capsys, monkeypatch):
    real = msa.sparse_attention
    monkeypatch.setattr(
        msa, "sparse_attention", lambda *a, **kw: (1.01 * real(*a, **kw)[0], real(*a, **kw)[1])
    )
    assert quiet_check() == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[0] for line in lines if "FAILED: " in line]
    assert "out" in failed and "dq" in failed and "dq_proxy" not in failed
    assert all("remedy: " in lines[i + 1] for i, line in enumerate(lines) if "FAILED: " in line)


def test_check_reports_an_op_that_raises(quiet_check, capsys, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setattr(msa, "sparse_attention", broken)
    assert quiet_check() == 1
    assert "FAILED: RuntimeError: no such luck\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "build, driver, remedy",
    [
        (None, "13.0", "whl/cu130"),
        (None, "12.8", "whl/cu128"),
        ("13.0", "12.4", "install an NVIDIA driver for CUDA 13"),
        ("13.0", "13.1", "CUDA_VISIBLE_DEVICES is '': unset it"),
    ],
)
def test_check_has_a_remedy_for_a_gpu_that_pytorch_cannot_use(
    quiet_check, capsys, monkeypatch, build, driver, remedy
):
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert quiet_check(["GPU 0: NVIDIA H200"], driver) == 1
    out = capsys.readouterr().out
    assert f"{'CUDA':<20} FAILED: " in out and remedy in out


def test_check_names_missing_packages(capsys, monkeypatch):
    monkeypatch.setattr(check, "package_version", lambda name: None)
    report = check.Report()
    assert not check.check_packages(report, needed=False) and report.failed == 0
    assert not check.check_packages(report, needed=True) and report.failed == len(check.KERNEL_PACKAGES)
    assert check.INSTALL_KERNELS in capsys.readouterr().out


@pytest.mark.parametrize("output", ["CUDA Version: 13.0  ", "CUDA UMD Version: 13.0 "])
def test_ask_driver_reads_nvidia_smi(monkeypatch, output):
    def fake(command, **options):
        text = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" if "-L" in command else f"| Driver Version: 580 {output}|"
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(subprocess, "run", fake)
    assert check.ask_driver() == (["GPU 0: NVIDIA H200"], "13.0")


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_ask_driver_without_a_driver(monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert check.ask_driver() == ([], None)


def test_both_of_check_s_oracles_agree():
    inputs, grad_out = check.make_inputs("cpu", torch.float32, **check.SMALL)
    picked = msa.select_blocks(*inputs[3:], top_k=64, block_size=32)
    one = check.by_reference(inputs, grad_out, picked, 32)
    other = check.by_autograd(inputs, grad_out, picked, 32)
    assert one.keys() == other.keys() == check.by_op(inputs, grad_out, picked, 32).keys()
    for name, value in one.items():
        assert check.distance(value, other[name])[0] < 1e-5, name


# ---------------------------------------------------------------------------------------------------------
# python -m msa.bench


@no_gpu
def test_bench_without_a_gpu(capsys):
    assert bench.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "no NVIDIA GPU" in captured.err and "msa.check" in captured.err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seq-len", "0"], "--seq-len must be at least 1"),
        (["--top-k", "100"], "--top-k must be a multiple of 128"),
        (["--heads", "6", "--kv-heads", "4"], "--heads must be a multiple of --proxy-heads"),
        (["--kv-heads", "2", "--proxy-heads", "1"], "that of --kv-heads"),
        (["--iterations", "0"], "--iterations must be at least 1"),
        (["--pattern", "sorted"], "invalid choice"),
        (["--peers", "fa9"], "invalid choice"),
        (["--mode", "dense"], "invalid choice"),
        (["--mode", "warmup", "--pattern", "local"], "--pattern is of sparse alone"),
        (["--peers", "none", "fa4"], "--peers none stands alone"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--workspace-gib", "0"], "--workspace-gib must be above 0"),
        (["--what"], "unrecognized arguments"),
    ],
)
def test_bench_refuses(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_bench_proxy_heads_are_the_kv_heads_by_default():
    assert bench.parse(["--kv-heads", "4"]).proxy_heads == 4
    assert bench.parse(["--kv-heads", "4", "--proxy-heads", "8"]).proxy_heads == 8


SHAPES = [
    bench.Shape(batch=1, seq_len=1024, heads=16, kv_heads=2, proxy_heads=2, top_k=512),
    bench.Shape(batch=2, seq_len=700, heads=8, kv_heads=1, proxy_heads=4, top_k=256),  # a partial block
    bench.Shape(
        batch=1, seq_len=300, heads=4, kv_heads=2, proxy_heads=2, top_k=2048
    ),  # more slots than blocks
    bench.Shape(batch=1, seq_len=100, heads=2, kv_heads=1, proxy_heads=1, top_k=128),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bench_counts_edges_as_a_selection_has_them(shape):
    g = torch.Generator().manual_seed(0)
    q_proxy = torch.randn(shape.batch, shape.seq_len, shape.proxy_heads, 4, generator=g)
    k_proxy = torch.randn(shape.batch, shape.seq_len, 1, 4, generator=g)
    picked = msa.select_blocks(q_proxy, k_proxy, top_k=shape.top_k)
    assert shape.edges == (picked >= 0).sum().item()
    assert shape.rows == shape.edges * shape.heads // shape.proxy_heads


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bench_flops_are_those_of_the_loops(shape):
    """Multiply-adds counted twice, one matrix product after the other."""
    work = {w.label: w for w in bench.WORK if w.flops}
    causal = sum(2 * 128 * (t + 1) for t in range(shape.seq_len)) * shape.batch * shape.proxy_heads
    assert work["select"].flops(shape) == pytest.approx(causal, rel=2 / shape.seq_len)
    forward = backward = proxy_lse = proxy_backward = 0
    for t in range(shape.seq_len):
        for _ in range(min(shape.slots, t // 128 + 1) * shape.batch * shape.proxy_heads):
            product = 2 * 128 * 128  # one row against a block, through the head dimension
            group = shape.heads // shape.proxy_heads
            forward += group * 2 * product  # q k, p v
            backward += group * 5 * product  # q k, do v, p do, ds k, ds q
            proxy_lse += product
            proxy_backward += 3 * product  # q k, ds k, ds q
    assert work["forward"].flops(shape) == forward
    assert work["backward"].flops(shape) == backward
    assert work["proxy lse"].flops(shape) == proxy_lse
    assert work["proxy backward"].flops(shape) == proxy_backward


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bench_flops_of_dense_work(shape):
    """Of every product over all visible keys, in half the square."""
    work = {w.label: w.flops(shape) for w in (*bench.WORK, *bench.FLASH) if w.flops}
    pairs = sum(t + 1 for t in range(shape.seq_len)) * shape.batch
    product, rel = 2 * 128 * pairs, 2 / shape.seq_len
    heads, proxy_heads = shape.heads, shape.proxy_heads
    assert work["flash forward"] == pytest.approx(2 * heads * product, rel=rel)  # q k, p v
    assert work["flash backward"] == pytest.approx(5 * heads * product, rel=rel)
    assert work["dense lse"] == pytest.approx(proxy_heads * product, rel=rel)
    # q k of every head; of every proxy head q k, ds k, ds q
    assert work["dense kl"] == pytest.approx((heads + 3 * proxy_heads) * product, rel=rel)


@pytest.mark.parametrize("pattern", ["skewed", "local"])
@pytest.mark.parametrize("seq_len, slots", [(1500, 4), (1024, 16), (700, 1), (100, 3), (2048, 5)])
def test_bench_patterns_are_valid_selections(pattern, seq_len, slots):
    build = dict(batch=2, seq_len=seq_len, proxy_heads=3, slots=slots)
    for elements in (2**26, 2000):  # in one go, and in chunks
        g = torch.Generator().manual_seed(3)
        indices = bench.build_indices(pattern, **build, generator=g, elements=elements)
        assert indices.shape == (2, seq_len, 3, slots) and indices.dtype == torch.int32
        reference.check_block_indices(indices, None, None, BLOCK)
        blocks = torch.arange(seq_len) // BLOCK + 1
        assert torch.equal((indices >= 0).sum(-1), blocks.clamp(max=slots)[None, :, None].expand(2, -1, 3))


def test_bench_patterns_are_what_they_say():
    g = torch.Generator().manual_seed(0)
    skewed = bench.build_indices("skewed", 1, 4096, 2, 6, g)
    late = skewed[:, 10 * BLOCK :]
    local = (torch.arange(10 * BLOCK, 4096) // BLOCK)[None, :, None].expand(1, -1, 2)
    for block in (torch.zeros_like(local), local - 1, local - 2):
        assert (late == block[..., None]).any(-1).all()
    others = [set(row.tolist()) for row in late[0, -BLOCK:, 0]]
    assert len({frozenset(x) for x in others}) > 100  # the rest is random
    near = bench.build_indices("local", 1, 4096, 1, 4, g)
    assert near[0, -1, 0].tolist() == [31, 30, 29, 28] and near[0, 200, 0].tolist() == [1, 0, -1, -1]
    with pytest.raises(ValueError, match="pattern"):
        bench.build_indices("random", 1, 256, 1, 2, g)


@pytest.mark.parametrize(
    "mode, pattern", [("sparse", "random"), ("sparse", "skewed"), ("warmup", "random")], ids="-".join
)
def test_bench_runs_ours(mode, pattern, monkeypatch):
    """The call that is timed, on the CPU: six gradients, the last of them the KL of each proxy head."""
    called = []
    for name in ("sparse_attention", "warmup_attention"):
        function = getattr(msa, name)
        monkeypatch.setattr(msa, name, lambda *x, f=function, n=name, **y: called.append(n) or f(*x, **y))
    shape = bench.Shape(batch=1, seq_len=400, heads=4, kv_heads=2, proxy_heads=2, top_k=256)
    data = bench.make_data(shape, pattern, 0, "cpu")
    assert (data.block_indices is None) == (pattern == "random")
    variant = bench.ours(shape, mode, "cpu")
    leaves = variant.leaves(data)
    outputs, grads = variant.forward(leaves, data)
    *gradients, kl = torch.autograd.grad(outputs, leaves, grads)
    assert [g.shape for g in gradients] == [
        x.shape for x in (data.q, data.k, data.v, data.q_proxy, data.k_proxy)
    ]
    assert kl.shape == (2,) and bool((kl > 0).all())
    assert called == [f"{mode}_attention"]


class FakeClock:
    """Remembers what was asked for, and takes a made-up time for it."""

    def __init__(self, seconds=1.0, fail=()):
        self.calls, self.seconds, self.fail = [], seconds, dict(fail)

    def sample(self, variant, data):
        self.calls.append((variant.name, data))
        if self.fail.get(variant.name) == self.calls.count((variant.name, data)):
            raise RuntimeError(f"{variant.name} gave up\nat length")
        variant.seconds += self.seconds
        return {"total_ms": float(len(self.calls)), "peak_gib": 1.0}


def fake_variants(names=("msa", "fa4", "flash-msa, same data")):
    return [bench.Variant(n, None, None, (RuntimeError,), same_data="same" in n) for n in names]


def test_bench_takes_turns():
    clock, pool = FakeClock(), ["a", "b", "c"]
    variants = bench.measure(clock, fake_variants(), pool, 3, 1000.0)
    names = ["msa", "fa4", "flash-msa, same data"]
    first = [("msa", "a"), ("fa4", "a"), ("flash-msa, same data", "a")]
    new = [("flash-msa, new data", "b"), ("flash-msa, new data", "c")]
    assert clock.calls[:5] == first + new
    assert [name for name, _ in clock.calls[5:]] == names * 4  # a round to warm up and three that count
    for name in names[:2]:
        data = [d for n, d in clock.calls if n == name]
        assert all(x != y for x, y in itertools.pairwise(data))
    assert {d for n, d in clock.calls if "same" in n} == {"a"}
    assert [(v.name, len(v.samples)) for v in variants] == [
        *((n, 3) for n in names),
        ("flash-msa, new data", 2),
    ]
    assert [v.first_call_seconds for v in variants] == [1.0, 1.0, 1.0, None]


def test_bench_keeps_a_slow_peer_short():
    variants = bench.measure(FakeClock(seconds=40.0), fake_variants(), ["a", "b", "c"], 5, 60.0)
    assert [len(v.samples) for v in variants] == [5, 1, 1, 2]


def test_bench_goes_on_without_a_peer_that_fails():
    clock = FakeClock(fail={"fa4": 1, "flash-msa, same data": 3})
    mine, fa4, same, new = bench.measure(clock, fake_variants(), ["a", "b", "c"], 5, 1000.0)
    assert mine.error is None and len(mine.samples) == 5
    assert fa4.error == "RuntimeError: fa4 gave up" and not fa4.samples
    assert same.error and len(same.samples) == 1 and len(new.samples) == 2
    rows = [bench.summarize(v) for v in (mine, fa4, same, new)]
    assert set(bench.compare(rows)) == {"flash-msa, same data", "flash-msa, new data"}


def test_bench_says_which_peer_is_not_installed(monkeypatch):
    monkeypatch.setattr(bench, "package_version", lambda name: None)
    monkeypatch.setattr(bench, "ours", lambda shape, mode: fake_variants(["msa"])[0])
    _, fa4, flash = bench.make_variants(SHAPES[0], "sparse", ["fa4", "flash-msa"])
    assert "not installed: pip install" in fa4.error and "not installed: pip install" in flash.error


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_bench_calls_flash_msa_s_function_of_the_mode(mode, monkeypatch):
    """With ours in its place, which takes the same arguments."""
    module = types.SimpleNamespace(
        flash_msa_func=msa.flash_msa_func, flash_msa_warmup_func=msa.flash_msa_warmup_func
    )
    monkeypatch.setitem(sys.modules, "flash_msa", module)
    shape = bench.Shape(batch=1, seq_len=200, heads=4, kv_heads=2, proxy_heads=2, top_k=128)
    data = bench.make_data(shape, "random", 0, "cpu")
    kls = []
    for variant in (bench.ours(shape, mode, "cpu"), bench.flash_msa(shape, mode)):
        leaves = variant.leaves(data)
        outputs, grads = variant.forward(leaves, data)
        kls.append([outputs[0].flatten(2), *torch.autograd.grad(outputs, leaves, grads)])
    ours, theirs = kls
    torch.testing.assert_close(theirs[0], ours[0])
    torch.testing.assert_close(theirs[1].transpose(1, 2), ours[4])  # dq_proxy
    assert variant.same_data == (mode == "sparse")


CUTLASS = "kernel_cutlass_kernel_"
TAIL = "_tensorptrbf16_gmem_align16_o_1281281__0"


@pytest.mark.parametrize(
    "kernel, label",
    [
        (f"{CUTLASS}Selectproxy_heads2_slots16{TAIL}", "select"),
        (f"kernel_cutlass_local_kernel_Selectproxy_heads2_slots1{TAIL}", "select"),
        (f"kernel_cutlass_count_BuildScheduleproxy_heads2_slots16{TAIL}", "schedule: count"),
        (f"kernel_cutlass_scan_BuildScheduleproxy_heads2_slots16{TAIL}", "schedule: scan"),
        (f"kernel_cutlass_scatter_BuildScheduleproxy_heads2_slots16{TAIL}", "schedule: scatter"),
        (f"{CUTLASS}SumKeysproxy_heads2_key_heads2_outputs2_times_grad_klFalse{TAIL}", "sum dk, dv"),
        (f"{CUTLASS}SumKeysproxy_heads2_key_heads1_outputs1_times_grad_klTrue{TAIL}", "sum dk_proxy"),
        (f"{CUTLASS}SumKlproxy_heads2{TAIL}", "sum kl"),
        (f"{CUTLASS}Forwardheads16_kv_heads2_proxy_heads2_slots16{TAIL}", "forward"),
        (f"{CUTLASS}Backwardheads16{TAIL}", "backward"),
        (f"{CUTLASS}ProxyBackwardgroup8{TAIL}", "proxy backward"),
        (f"{CUTLASS}ProxyLsegroup8_flagFalse{TAIL}", "proxy lse"),
        (f"{CUTLASS}Combineheads16_slots16_softmaxTrue_with_proxyTrue_times_grad_klFalse{TAIL}", "combine"),
        (f"{CUTLASS}Combineheads16_slots16_softmaxFalse_with_proxyFalse_times_grad_klFalse{TAIL}", "sum dq"),
        (
            f"{CUTLASS}Combineheads2_slots16_softmaxFalse_with_proxyFalse_times_grad_klTrue{TAIL}",
            "sum dq_proxy",
        ),
        (f"{CUTLASS}Novelheads16{TAIL}", "Novelheads16"),
        (
            f"{CUTLASS}flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__{TAIL}",
            "flash forward",
        ),
        (
            f"{CUTLASS}flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__{TAIL}",
            "flash backward",
        ),
        (
            f"{CUTLASS}flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object_at__{TAIL}",
            "flash backward, before",
        ),
        (
            f"{CUTLASS}flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_object_at__{TAIL}",
            "flash backward, after",
        ),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128> >(Params)", "flash forward"),
        (f"{CUTLASS}DenseLseproxy_heads2{TAIL}", "dense lse"),
        (f"{CUTLASS}DenseKlheads16_kv_heads2_proxy_heads2_gradsTrue_orderedFalse{TAIL}", "dense kl"),
        (f"{CUTLASS}RoundQueriesproxy_heads2{TAIL}", "round dq_proxy"),
        (f"{CUTLASS}somethingelseentirely{TAIL}", "somethingelseentirely"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, "
            "std::array<char*, 1>>(int, at::native::FillFunctor<int>, std::array<char*, 1>)",
            "vectorized_elementwise_kernel Fill",
        ),
        ("Memset (Device)", "Memset "),
    ],
)
def test_bench_groups_kernels_by_their_class(kernel, label):
    assert bench.label_of(kernel, {work.kernel for work in bench.WORK})[0] == label


def test_bench_breakdown_adds_up_and_tells_rates():
    shape = SHAPES[0]
    rows = bench.breakdown(
        [
            ("Memset (Device)", 1.0, 2),
            (f"{CUTLASS}flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__{TAIL}", 3.0, 2),
            (f"{CUTLASS}Backwardheads16{TAIL}", 4.0, 2),
            (f"kernel_cutlass_scan_BuildScheduleslots16{TAIL}", 0.5, 2),
            (f"kernel_cutlass_scan_BuildScheduleslots8{TAIL}", 0.5, 2),
        ],
        shape,
        2,
    )
    assert [row["kernel"] for row in rows] == ["flash forward", "schedule: scan", "backward", "Memset "]
    flash, *rows = rows
    assert flash["tflops"] == pytest.approx(2 * 128 * 16 * shape.seq_len**2 / 1.5e-3 / 1e12)
    assert rows[0]["ms"] == 0.5 and rows[0]["launches"] == 2.0
    assert rows[1]["tflops"] == pytest.approx(10 * 128 * 128 * shape.rows / 2e-3 / 1e12)
    assert "tflops" not in rows[2]


def test_bench_table_and_json():
    clock = FakeClock()
    variants = bench.measure(clock, fake_variants(), ["a", "b", "c"], 3, 1000.0)
    for variant in variants:
        for sample in variant.samples:
            sample.update(forward_ms=0.5, backward_ms=1234.5, host_ms=12.0)
    variants[1].error = "OutOfMemoryError: no room"
    rows = [bench.summarize(v) for v in variants]
    shape = SHAPES[0]
    result = {
        "title": f"{shape}, top_k 512, random",
        "mode": "sparse",
        "variants": rows,
        "kernels": bench.breakdown([(f"{CUTLASS}Backwardheads16{TAIL}", 4.0, 2)], shape, 2),
        "ratios": bench.compare(rows),
    }
    json.dumps(result)
    lines = bench.format_result(result, {"matmul_tflops": 800.0, "copy_tb_per_s": 4.0}).splitlines()
    assert lines[0] == "== 1,024 tokens, batch 1, 16/2/2 heads, top_k 512, random"
    assert any(line.startswith("msa ") and "1,234" in line for line in lines)
    assert any("stopped: OutOfMemoryError: no room" in line for line in lines)
    assert "of matmul" in "\n".join(lines)
    assert lines[-1].startswith("msa against flash-msa, new data")

    result |= {
        "mode": "warmup",
        "ratios": {"fa4": {"time": 0.8, "memory": 1.1}, "flash-msa": {"time": 8.0, "memory": 0.5}},
    }
    *_, fa4, flash = bench.format_result(result, {"matmul_tflops": 800.0, "copy_tb_per_s": 4.0}).splitlines()
    assert fa4 == "msa warmup takes 1.25 times FA4 dense, 1.10x the memory"
    assert flash.split() == "msa against flash-msa 8.00x as fast, 0.50x the memory".split()
