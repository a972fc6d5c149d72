"""The table of GPU time by part: traces made by hand, and what torch.profiler writes on a CPU."""

import gzip
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import msa
from msa import bench, trace

ROOT = Path(__file__).resolve().parent.parent
V, D, M, T = 1000, 64, 160, 512  # vocabulary, d_model, d_mlp, tokens
SIZES = {"vocab_size": V, "d_model": D, "d_mlp": M}
TAIL = "_object_at__tensorptrbf16gmemalign16o_tensorptrf32gmemalign16o_0"
ATEN = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)"
NVJET = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"


def cutlass(name):
    return f"kernel_cutlass_kernel_{name}{TAIL}"


class Recording:
    """Events as export_chrome_trace writes them; times in microseconds."""

    def __init__(self):
        self.events, self.ids, self.clock = [], itertools.count(1), 1000.0

    def event(self, category, name, ts, dur, tid, pid=7, **args):
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        self.events.append(event | ({"args": args} if args else {}))
        return self.events[-1]

    def op(self, name, ts, dur, dims=None, tid=1, category="cpu_op"):
        id = next(self.ids)
        args = {"External id": id} | ({} if dims is None else {"Input Dims": dims})
        self.event(category, name, ts, dur, tid, **args)
        return id

    def launch(self, ts, tid=1, category="cuda_runtime"):
        correlation = 10**6 + next(self.ids)
        self.event(category, "cudaLaunchKernel", ts, 1.0, tid, correlation=correlation)
        return correlation

    def kernel(self, name, dur, ts=None, stream=7, category="kernel", **args):
        """Where no ts is given, behind the last one."""
        ts = self.clock if ts is None else ts
        self.clock = max(self.clock, ts + dur)
        args = {key.replace("_", " "): x for key, x in args.items() if x is not None}
        return self.event(category, name, ts, dur, stream, pid=0, device=0, stream=stream, **args)

    def run(self, ops, kernel, dur, tid=1, by_id=True, **more):
        """A kernel of `dur` that the innermost of nested ops [(name, dims), ...] launches."""
        at = float(len(self.events)) * 100
        ids = [self.op(name, at + i, 90 - 2 * i, dims, tid) for i, (name, dims) in enumerate(ops)]
        correlation = self.launch(at + len(ops), tid)
        id = {"External_id": ids[-1]} if ids and by_id else {}
        return self.kernel(kernel, dur, correlation=correlation, **id, **more)

    def trace(self):
        return {"schemaVersion": 1, "traceEvents": self.events}


def table(recording, **sizes):
    rows = trace.parts(recording.trace(), **(SIZES | sizes))
    return {row.name: (row.ms, row.kernels) for row in rows}


def part_of(ops, kernel=ATEN, **more):
    """The one part of a trace with one kernel."""
    recording = Recording()
    recording.run(ops, kernel, 5.0, **more)
    (part, idle) = trace.parts(recording.trace(), **SIZES)
    assert (part.ms, part.kernels, part.share) == (0.005, 1, 1.0) and idle == ("idle", 0.0, 0, 0.0, ())
    assert part.largest[0][1:] == (0.005, 1)
    return part.name


# ---- one kernel at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, part",
    [
        (cutlass("msahopperselectSelect"), "selection"),
        (f"kernel_cutlass_count_BuildScheduleproxy_heads2{TAIL}", "schedule"),
        (cutlass("Forwardheads16_kv_heads2"), "attention forward"),
        (cutlass("Combineheads16_softmaxTrue_with_proxyTrue_times_grad_klFalse"), "attention forward"),
        (cutlass("Combineheads16_softmaxFalse_with_proxyFalse_times_grad_klFalse"), "attention backward"),
        (cutlass("Combineheads2_softmaxFalse_with_proxyFalse_times_grad_klTrue"), "proxy"),
        (cutlass("Prepareheads16"), "attention backward"),
        (cutlass("Backwardheads16"), "attention backward"),
        (cutlass("SumKeysproxy_heads2_times_grad_klFalse"), "attention backward"),
        (cutlass("SumKeysproxy_heads2_times_grad_klTrue"), "proxy"),
        (cutlass("ProxyLsegroup8"), "proxy"),
        (cutlass("ProxyBackwardgroup8"), "proxy"),
        (cutlass("SumKlproxy_heads2"), "proxy"),
        (cutlass("DenseLseproxy_heads2"), "proxy"),
        (cutlass("DenseKlheads16"), "proxy"),
        (cutlass("RoundQueriesproxy_heads2"), "proxy"),
        (cutlass("flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90"), "dense attention forward"),
        (cutlass("flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90"), "dense attention backward"),
        (cutlass("flash_attncuteflash_bwd_preprocessX"), "dense attention backward"),
        (cutlass("flash_attncuteflash_bwd_postprocessX"), "dense attention backward"),
        ("void pytorch_flash::flash_fwd_kernel<Traits<128> >(Params)", "dense attention forward"),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>(P)",
            "dense attention backward",
        ),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("triton_poi_fused__to_copy_mul_silu_2", "MLP"),
        ("triton_poi_fused__to_copy_mul_silu_silu_backward_0", "MLP"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_1", "loss"),
        ("triton_red_fused__log_softmax__log_softmax_backward_data_nll_loss_backward_view_0", "loss"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "other elementwise"),
        ("triton_poi_fused_cat_mul_sub_3", "other elementwise"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(float*)", "other elementwise"),
        ("Memcpy DtoD (Device -> Device)", "other elementwise"),
        ("Memset (Device)", "other elementwise"),
        (NVJET, "other"),
        ("triton_tem_fused_mm_0", "other"),
        (cutlass("somebodyelsesKernel"), "other"),
        ("void somebody::forward<float>(float*)", "other"),
    ],
)
def test_a_kernel_is_told_by_its_name_without_any_op(kernel, part):
    recording = Recording()
    recording.kernel(kernel, 5.0)
    (row, idle) = trace.parts(recording.trace(), **SIZES)
    assert row == (part, 0.005, 1, 1.0, ((kernel, 0.005, 1),))


def test_every_row_of_the_bench_belongs_to_a_part():
    assert {work.label for work in (*bench.WORK, *bench.FLASH)} <= set(trace.PART_OF_ROW)
    classes = {name for name in trace.PART_OF_ROW if name[0].isupper()}
    assert classes <= {work.kernel for work in bench.WORK}


@pytest.mark.parametrize("by_id", [True, False])  # else by the launch alone
@pytest.mark.parametrize(
    "m, k, n, part",
    [  # forward, the input's gradient, the weight's gradient
        (T, D, 128, "projections"),
        (T, 128, D, "projections"),
        (128, T, D, "projections"),
        (T, D, M, "MLP"),
        (T, M, D, "MLP"),
        (M, T, D, "MLP"),
        (D, T, M, "MLP"),
        (T, D, V, "loss"),
        (T, V, D, "loss"),
        (V, T, D, "loss"),
        (V, D, 128, "projections"),  # as many tokens as words
        (T, 77, 99, "other"),
    ],
)
def test_matmuls_are_told_by_shapes(m, k, n, part, by_id):
    chain = [("aten::linear", [[1, T, D], [n, D], []]), ("aten::matmul", [[T, D], [D, n]])]
    assert part_of([*chain, ("aten::mm", [[m, k], [k, n]])], NVJET, by_id=by_id) == part
    assert part_of([("aten::mm", [[m, k], [k, n], [m, n]])], "Memset (Device)", by_id=by_id) == part
    assert part_of([("aten::addmm", [[m, n], [m, k], [k, n], [], []])], NVJET, by_id=by_id) == part
    assert part_of([("aten::bmm", [[3, m, k], [3, k, n]])], NVJET, by_id=by_id) == part


def test_a_matmul_without_shapes_says_what_is_missing():
    recording = Recording()
    recording.run([("aten::mm", None)], NVJET, 5.0)
    (row, _) = trace.parts(recording.trace(), **SIZES)
    assert row.name == "other" and "record_shapes=True" in row.largest[0][0] and NVJET in row.largest[0][0]
    assert part_of([("aten::mm", [[], [D]])], NVJET) == "other"


BLOCK_INDICES = [1, T, 2, 4]
QKV = [[1, T, 4, 16]] * 5


@pytest.mark.parametrize(
    "ops, part",
    [
        ([("aten::embedding", [[V, D], [1, T]]), ("aten::index_select", [[V, D], [], [T]])], "embedding"),
        ([("EmbeddingBackward0", None), ("aten::embedding_dense_backward", [[T, D], [T]])], "embedding"),
        ([("aten::cross_entropy_loss", None), ("aten::_log_softmax", [[T, V]])], "loss"),
        ([("NllLossBackward0", None), ("aten::nll_loss_backward", [[], [T, V]])], "loss"),
        ([("aten::to", None), ("aten::copy_", [[T, V], [T, V], []])], "loss"),
        ([("aten::add_", [[V, D], [V, D], []])], "loss"),
        ([("aten::copy_", [[V, 3], [V, 3], []])], "other elementwise"),
        ([("aten::silu", [[T, M]])], "MLP"),
        ([("SiluBackward0", None), ("aten::silu_backward", [[T, M], [T, M]])], "MLP"),
        ([("aten::mul", [[T, M], [T, M]])], "MLP"),
        ([("aten::mul", [[T, D], [D]])], "other elementwise"),
        ([("aten::copy_", [[D, M], [D, M]])], "other elementwise"),
        ([("aten::cat", [[[T, M], [T, M]], []])], "other elementwise"),  # a list of tensors
        # A layer that checkpointing runs again inside of a backward op is not part of that.
        ([("NllLossBackward0", None), ("aten::silu", None), ("Again", None), ("aten::add", [[T, D]])],)
        + ("other elementwise",),
        ([("aten::nll_loss", None), ("Again", None), ("aten::mm", [[T, D], [D, 8]])], "projections"),
        ([("msa::select_blocks", QKV), ("aten::fill_", [[3]])], "selection"),
        ([("msa::attention", [*QKV, BLOCK_INDICES, [], []]), ("aten::zeros", []), ("aten::zero_", [[9]])],)
        + ("attention forward",),
        ([("msa::attention", [*QKV, [], [], []]), ("aten::copy_", [[9], [9]])], "dense attention forward"),
        ([("msa::attention_backward", [*QKV, *QKV[:2], BLOCK_INDICES, []])], "attention backward"),
        ([("msa::attention_backward", [*QKV, *QKV[:2], [], []])], "dense attention backward"),
        ([("msa::attention_backward", None)], "attention backward"),
        ([("msa::attention", [*QKV, BLOCK_INDICES]), ("aten::bmm", [[2, T, D], [2, D, M]])],)
        + ("attention forward",),
    ],
)
def test_other_kernels_are_told_by_the_ops_around_them(ops, part):
    assert part_of(ops) == part
    assert part_of(ops, by_id=False, tid=12345) == part


def test_an_id_of_no_op_is_not_believed():
    """Older traces number kernels and ops apart."""
    recording = Recording()
    event = recording.run([("aten::mm", [[T, D], [D, M]])], NVJET, 5.0)
    event["args"]["External id"] = 999999
    assert table(recording)["MLP"] == (0.005, 1)


def test_an_op_is_found_by_its_id_where_the_launch_is_missing():
    recording = Recording()
    id = recording.op("aten::mm", 10.0, 5.0, [[T, D], [D, M]])
    recording.op("loss", 100.0, 50.0, category="user_annotation")
    inside = recording.op("aten::sum", 110.0, 5.0, [[T]])
    recording.kernel(NVJET, 5.0, External_id=id, correlation=4711)
    recording.kernel(ATEN, 3.0, External_id=inside)
    assert table(recording) == {"MLP": (0.005, 1), "loss": (0.003, 1), "idle": (0.0, 0)}


# ---- annotations ------------------------------------------------------------------------------------


def test_annotations_count_on_the_launching_thread_while_they_last():
    recording = Recording()
    recording.op("Optimizer.step#Muon.step", 100.0, 100.0, category="user_annotation")
    recording.op("gradients", 300.0, 100.0, category="user_annotation")
    recording.op("loss", 320.0, 20.0, category="user_annotation")  # the inner one counts
    recording.op("ProfilerStep#3", 0.0, 1000.0, category="user_annotation")
    recording.op("somebody's", 110.0, 10.0, category="user_annotation")
    recording.op("loss", 300.0, 300.0, category="gpu_user_annotation", tid=7)
    recording.op("optimizer", 600.0, 50.0, category="user_annotation", tid=2)
    recording.op("embedding", 700.0, 50.0, category="user_annotation")
    muon = recording.op("aten::mm", 112.0, 5.0, [[D, M], [M, D]])
    for ts, tid, dur, name, more in (
        (114.0, 1, 1.0, NVJET, {"External_id": muon}),
        (100.0, 1, 2.0, ATEN, {}),  # with the range's first moment
        (200.0, 1, 4.0, ATEN, {}),  # with its end
        (150.0, 2, 8.0, ATEN, {}),  # on another thread
        (310.0, 1, 16.0, ATEN, {}),
        (330.0, 1, 32.0, ATEN, {}),
        (350.0, 1, 64.0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args)", {}),
        (360.0, 1, 128.0, "Memcpy DtoH (Device -> Pinned)", {"bytes": 64}),
        (610.0, 2, 256.0, "void cub::Scan(int)", {}),
        (710.0, 1, 512.0, ATEN, {}),
        (710.0, 3, 1024.0, ATEN, {}),
    ):
        recording.kernel(name, dur, correlation=recording.launch(ts, tid), **more)
    assert table(recording) == {
        "embedding": (0.512, 1),
        "loss": (0.032, 1),
        "gradients": (0.144, 2),
        "optimizer": (0.259, 3),
        "other elementwise": (1.036, 3),
        "collectives": (0.064, 1),
        "idle": (0.0, 0),
    }


def test_an_annotation_inside_of_the_op_that_a_kernel_names_counts():
    recording = Recording()
    id = recording.op("CheckpointFunction", 100.0, 50.0)
    recording.op("loss", 110.0, 10.0, category="user_annotation")
    for ts in (105.0, 115.0):
        recording.kernel(ATEN, ts, External_id=id, correlation=recording.launch(ts))
    assert table(recording) == {"loss": (0.115, 1), "other elementwise": (0.105, 1), "idle": (0.0, 0)}


# ---- a whole step -----------------------------------------------------------------------------------


def a_step():
    """Every part, with gaps, and copies on a second stream beside the kernels."""
    r = Recording()
    r.event("Trace", "PyTorch Profiler (0)", 0.0, 1e6, "PyTorch Profiler", pid="Spans")
    r.events.append({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}})
    r.events.append({"ph": "s", "id": 4, "pid": 7, "tid": 1, "ts": 3.0, "cat": "ac2g", "name": "ac2g"})
    r.event("cuda_sync", "Stream Sync", 0.0, 50.0, 7, pid=0)
    r.run([("aten::embedding", [[V, D], [1, T]])], ATEN, 10.0)
    r.run([("CompiledFunction", None), ("aten::mm", [[T, D], [D, 128]])], NVJET, 20.0)
    r.run([("CompiledFunction", None), ("aten::mm", [[T, D], [D, 128]])], NVJET, 20.0)
    r.run([("triton_poi_fused_cat_mul_sub_3", [[T, D]])], "triton_poi_fused_cat_mul_sub_3", 5.0)
    r.run([("msa::select_blocks", QKV)], cutlass("Select"), 30.0)
    r.run([("msa::attention", QKV)], f"kernel_cutlass_scatter_BuildSchedule{TAIL}", 2.0)
    r.run([("msa::attention", QKV)], cutlass("Forwardheads16"), 40.0)
    r.clock += 25.0  # idle
    r.kernel(cutlass("flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90"), 50.0)
    r.run([("aten::linear", None), ("aten::mm", [[T, D], [D, M]])], NVJET, 60.0)
    copies_from = r.clock
    r.run([("aten::mm", [[T, D], [D, V]])], NVJET, 70.0)
    r.run([("Backward", None)], cutlass("Backwardheads16"), 80.0, tid=2)
    r.run([], cutlass("ProxyBackwardgroup8"), 9.0, tid=2)
    r.run([], cutlass("flash_attncuteflash_bwd_sm90X"), 90.0, tid=2)
    copies = {"category": "gpu_memcpy", "stream": 20, "bytes": 2**24}
    r.kernel("Memcpy DtoH (Device -> Pinned)", 100.0, ts=copies_from, **copies)
    r.kernel("Memcpy HtoD (Pinned -> Device)", 30.0, ts=copies_from + 120, **copies)
    r.kernel("Memcpy HtoD (Pageable -> Device)", 1.0, category="gpu_memcpy", bytes=2**24)
    r.kernel("Memcpy DtoH (Device -> Pinned)", 2.0, category="gpu_memcpy", bytes=2**10)
    r.kernel("Memset (Device)", 1.0, category="gpu_memset", bytes=2**10)
    r.clock += 75.0
    for name, kernel, dur in (("gradients", ATEN, 11.0), ("Optimizer.step#AdamW.step", ATEN, 12.0)):
        at = 1e6 + dur
        r.op(name, at, 0.5, category="user_annotation")
        r.kernel(kernel, dur, correlation=r.launch(at + 0.25, category="cuda_driver"))
    r.kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(Args)", 13.0)
    r.kernel("void mystery<int>(int)", 3.0)
    r.kernel("enigma", 4.0)
    return r


STEP = {
    "embedding": (0.010, 1),
    "projections": (0.040, 2),
    "selection": (0.030, 1),
    "schedule": (0.002, 1),
    "attention forward": (0.040, 1),
    "attention backward": (0.080, 1),
    "proxy": (0.009, 1),
    "dense attention forward": (0.050, 1),
    "dense attention backward": (0.090, 1),
    "MLP": (0.060, 1),
    "loss": (0.070, 1),
    "gradients": (0.011, 1),
    "optimizer": (0.012, 1),
    "other elementwise": (0.009, 4),
    "offload": (0.130, 2),
    "collectives": (0.013, 1),
    "other": (0.007, 2),
    "overlap": (-0.130, 0),
    "idle": (0.100, 0),
}


def test_a_step_has_every_part_in_order_and_adds_up():
    recording = a_step()
    rows = trace.parts(recording.trace(), **SIZES)
    assert [row.name for row in rows] == [*trace.PARTS, "overlap", "idle"]
    assert {row.name: (pytest.approx(row.ms, abs=1e-12), row.kernels) for row in rows} == STEP
    ends = [
        e["ts"] + e["dur"] for e in recording.events if e.get("pid") == 0 and "stream" in e.get("args", {})
    ]
    span = (max(ends) - 1000.0) / 1e3
    assert sum(row.ms for row in rows) == pytest.approx(span, abs=1e-12)
    assert all(row.share == pytest.approx(row.ms / span) for row in rows)
    other = rows[-3]
    assert other.largest == (("enigma", 0.004, 1), ("void mystery<int>(int)", 0.003, 1))


def test_idle_is_when_no_stream_has_work():
    recording = Recording()
    for ts, dur, stream in ((0.0, 100.0, 7), (10.0, 10.0, 8), (150.0, 10.0, 8), (155.0, 15.0, 7)):
        recording.kernel(ATEN, dur, ts=2.0**40 + ts, stream=stream)
    (part, overlap, idle) = trace.parts(recording.trace(), **SIZES)
    assert part[:4] == ("other elementwise", 0.135, 4, 135 / 170)
    assert overlap[:4] == ("overlap", -0.015, 0, -15 / 170) and idle[:4] == ("idle", 0.05, 0, 50 / 170)


def test_events_may_come_in_any_order():
    recording = a_step()
    recording.events.reverse()
    assert table(recording) == {name: (pytest.approx(ms), n) for name, (ms, n) in STEP.items()}


def test_format_parts():
    rows = trace.parts(a_step().trace(), **SIZES)
    lines = trace.format_parts(rows, 0.9).splitlines()
    assert lines[0].split() == ["part", "ms", "share", "launches"]
    assert [line[:26].strip() for line in lines[1:20]] == [row.name for row in rows]
    total, wall, gap, heading, *others = lines[20:]
    assert total.split()[-3:] == ["0.63", "100.0%", "23"] and total.startswith("first to last kernel")
    assert wall.split() == ["wall", "clock", "0.90"] and gap == "" and "other" in heading
    assert [line.split(maxsplit=2)[2] for line in others] == ["enigma", "void mystery<int>(int)"]
    lines = trace.format_parts(rows, kernels=1).splitlines()
    assert "wall" not in "".join(lines) and lines[4].split() == ["0.04", "2", NVJET]
    assert not any("mystery" in line for line in lines) and max(map(len, lines)) <= 110


def test_many_events_take_seconds():
    recording = Recording()
    n, deep = 60_000, [("aten::linear", None), ("aten::matmul", None), ("aten::mm", [[T, D], [D, M]])]
    shallow = [("Torch-Compiled Region: 0/0", None), ("triton_poi_fused_add_0", [[T, D]])]
    for i in range(n):
        recording.run(*((deep, NVJET) if i % 2 else (shallow, "triton_poi_fused_add_0")), 2.0, tid=i % 3)
    for _ in range(500_000 - len(recording.events)):
        recording.event("python_function", "nn.Module: Layer_0", 0.0, 1.0, 1)
    begin = time.perf_counter()
    rows = table(recording)
    assert time.perf_counter() - begin < 20  # 2 on a free core
    assert rows == {"MLP": (60.0, n // 2), "other elementwise": (60.0, n // 2), "idle": (0.0, 0)}


# ---- files ------------------------------------------------------------------------------------------


def test_files_plain_and_compressed_and_the_command(tmp_path, capsys):
    text = json.dumps(a_step().trace())
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    rows = trace.parts(plain, **SIZES)
    assert rows == trace.parts(packed, **SIZES) == trace.parts(str(packed), **SIZES)
    sizes = ["--vocab-size", str(V), "--d-model", str(D), "--d-mlp", str(M)]
    assert trace.main([str(packed), *sizes]) == 0
    assert capsys.readouterr().out == trace.format_parts(rows) + "\n"
    assert trace.main([str(packed), *sizes, "--kernels", "2"]) == 0
    assert capsys.readouterr().out == trace.format_parts(rows, kernels=2) + "\n"
    assert trace.main([str(tmp_path / "none.json"), *sizes]) == 2
    out, err = capsys.readouterr()
    assert not out and "none.json" in err and "Traceback" not in err


def test_the_command_explains_itself():
    result = subprocess.run(
        [sys.executable, "-m", "msa.trace", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0 and "record_shapes=True" in result.stdout and "--d-mlp" in result.stdout


GOOD = json.dumps(a_step().trace()).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        GOOD[:-100],
        gzip.compress(GOOD)[:-100],
        b"\x1f\x8b" + b"x" * 50,
        gzip.compress(GOOD)[:20] + b"\0" * 200,
        b"\xff\xfe\xff",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"traceEvents": 3}',
        b'{"traceEvents": null}',
        b'{"traceEvents": []}',
        b'{"traceEvents": [3]}',
        b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a"}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "1", "dur": "2"}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 3, "ts": 1, "dur": 2}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 2, "args": 4}]}',
    ],
)
def test_what_is_no_trace_is_an_error_that_names_it(tmp_path, data):
    file = tmp_path / "step_10.json.gz"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"step_10\.json\.gz is no trace .* profile again with train\.py"):
        trace.parts(file, **SIZES)


def test_missing_files_folders_and_traces_in_memory(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=f"{path.name} is no trace"):
            trace.parts(path, **SIZES)
    with pytest.raises(ValueError, match="the trace is no trace .*no events"):
        trace.parts({"traceEvents": []}, **SIZES)


def test_control_characters_in_names_are_read(tmp_path):
    file = tmp_path / "trace.json"
    file.write_bytes(b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a\tb", "ts": 1, "dur": 2}]}')
    assert trace.parts(file, **SIZES)[0].largest == (("a\tb", 0.002, 1),)


# ---- what torch.profiler writes ---------------------------------------------------------------------


def test_a_profile_on_a_cpu_is_read_and_has_no_parts(tmp_path, capsys):
    """Also holds ops, shapes and annotations to what `Host` expects of torch.profiler."""
    shape = [1, 256, 2, 16]
    q, k, v, q_proxy = (torch.randn(shape, requires_grad=True) for _ in range(4))
    k_proxy = torch.randn(1, 256, 1, 16, requires_grad=True)
    weight = torch.randn(M, D, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for attend in (msa.warmup_attention, msa.sparse_attention):
            more = {} if attend is msa.warmup_attention else {"top_k": 128}
            out, kl = attend(q, k, v, q_proxy, k_proxy, **more)
            (out.sum() + kl).backward()
        with record_function("loss"):
            torch.nn.functional.linear(torch.randn(2, 8, D), weight).sum().backward()
        optimizer.step()
    file = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    rows = trace.parts(file, **SIZES)
    assert rows == [] and "on a GPU" in trace.format_parts(rows, 1.0)
    assert trace.main([str(file), "--vocab-size", "1", "--d-model", "1", "--d-mlp", "1"]) == 1
    assert "nothing ran on a GPU" in capsys.readouterr().out

    # The parts that kernels would have had, had these ops launched some.
    events = trace.read(file)
    host = trace.Host(events)
    assert len(host.by_id) == sum(e["cat"] == "cpu_op" for e in events)
    parts: dict[str, list] = {}
    for e in events:
        if e["cat"] == "cpu_op":
            ops, annotated = host.of(e)
            assert ops[0] is e
            parts.setdefault(e["name"], []).append(
                (trace.part_by_ops(ATEN, ops, trace.Sizes(V, D, M)), annotated)
            )
    assert parts["msa::select_blocks"] == [("selection", None)]
    forward, backward = parts["msa::attention"], parts["msa::attention_backward"]
    assert forward == [("dense attention forward", None), ("attention forward", None)]
    assert backward == [("dense attention backward", None), ("attention backward", None)]
    # Forward, and the weight's gradient: the backward of a CPU runs on the thread of the annotation.
    assert parts["aten::mm"] == [("MLP", "loss")] * 2
    assert ("other elementwise", "optimizer") in parts["aten::add_"]
