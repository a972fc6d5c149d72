"""The trainer on a toy model and toy documents.

Most runs happen in this process through `train.main`. Real processes: one that is killed, torchrun with one
rank, wandb, and two ranks over gloo, which start once and leave what the tests then look at (`in_ranks`).
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import naive
import numpy as np
import pytest
import torch
import torch.distributed as dist

import data
import model as model_file
import train
from configs import Config, Stage, load_config

ROOT = Path(__file__).resolve().parent.parent
DRAW_CURVES = train.draw_curves
EOS = 256
TIMING = ("tokens_per_second", "mfu", "peak_memory_gib", "predicted_memory_gib", "host_memory_gib")
TIMING += (
    "reserved_memory_gib",
    "compiled",
    "eta_seconds",
    "seconds",
)  # and memory, which differs with the number of ranks

CONFIG = """
# A toy.
#     python data/passkey/prepare.py --out somewhere
from configs import Stage

device = "cpu"
n_layer = 2
d_model = 32
n_head = 4
n_kv_head = 2
n_proxy_head = 2
head_dim = 8
d_mlp = 64
block_size = 8
top_k = 16
tokens_per_step = 256
stages = [
    Stage(steps=3, seq_len=32, attention="dense"),
    Stage(steps=2, seq_len=64, attention="warmup", freeze_backbone=True),
    Stage(steps=2, seq_len=64, attention="warmup"),
    Stage(steps=3, seq_len=64, attention="sparse", rope_theta=5e4),
    Stage(steps=3, seq_len=128, attention="sparse", document_mask=False),
]
lr = 1e-2
proxy_lr = 5e-3
lr_warmup_tokens = 512
micro_batch_tokens = 256
log_interval = 1
layer_interval = 2
eval_interval = 4
eval_tokens = 416
kl_interval = 4
kl_rows = 16
checkpoint_interval = 4
"""
DENSE, FROZEN, WARMUP, SPARSE, LONG = range(5)
ENDS = [3, 5, 7, 10, 13]
QUIET = ("--eval_interval=0", "--kl_interval=0")


# --- the toy ---


def documents(n, seed, longest=150):
    """Letters that go round in a circle by steps of 1 or 3: two of them tell what follows."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        start, by, length = rng.randrange(16), rng.choice((1, 3)), rng.randrange(5, longest)
        found.append([97 + (start + by * i) % 16 for i in range(length)])
    return found


def write(path, docs, masks=None):
    tokenizer = data.get_tokenizer("bytes")
    with data.TokenWriter(path, tokenizer=tokenizer, source="toy", labels=masks is not None) as writer:
        for i, doc in enumerate(docs):
            writer.add(doc, masks[i] if masks else None)


def questions(n, seed):
    """Documents that fill 24 to 32 places, with two answers of 3 tokens in each."""
    rng = random.Random(seed)
    docs, masks = [], []
    for _ in range(n):
        length = rng.randrange(24, 32)
        docs.append([rng.randrange(97, 113) for _ in range(length)])
        masks.append([int(5 <= i < 8 or length - 3 <= i) for i in range(length)])
    return docs, masks


def make_toy(folder, config=CONFIG):
    write(folder / "data" / "train.bin", documents(60, seed=0))
    write(folder / "data" / "val.bin", documents(16, seed=1))
    write(folder / "recall" / "val.bin", *questions(10, seed=2))
    (folder / "config.py").write_text(config)
    with_stages(folder / "sparse.py", Stage(steps=2, seq_len=64, attention="sparse"))
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", autouse=True)
def light():
    """One thread, as the ranks have it; no waiting for the disk; no pictures but where they are the point."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(train, "draw_curves", lambda out_dir: Path(out_dir) / "curves.png")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def handlers():
    """A run that fails leaves its signal handlers behind."""
    kept = {s: signal.getsignal(s) for s in train.STOP_SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def arguments(toy, out, *more):
    first = [] if more and not more[0].startswith("-") else [str(toy / "config.py")]
    return [*first, f"--dataset={toy / 'data'}", f"--out_dir={out}", *more]


def run(toy, out, *more):
    return train.main(arguments(toy, out, *more))


def one_process(size=1):
    return train.World(0, size, torch.device("cpu"))


def trainer_of(toy, out, *more):
    return train.Trainer(load_config(arguments(toy, out, *more)), one_process())


def with_stages(path, *stages, text=CONFIG):
    """A config file whose stages are these."""
    path.write_text(f"{text}\nstages = [{', '.join(map(repr, stages))}]\n")
    return str(path)


def stages_of(toy):
    return load_config([str(toy / "config.py")]).stages


def not_json(name):
    raise AssertionError(f"{name} is no JSON")


def metrics(out, kind=None):
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=not_json) for line in lines]
    return [r for r in records if kind is None or r["kind"] == kind]


def untimed(out):
    return [{k: v for k, v in r.items() if k not in TIMING} for r in metrics(out)]


def checkpoint(out):
    return torch.load(Path(out) / "checkpoint.pt", weights_only=True)


def same_bits(a, b):
    """Nested dicts of tensors, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def assert_same_run(a, b):
    assert untimed(a) == untimed(b)
    one, other = checkpoint(a), checkpoint(b)
    for key in ("step", "stage", "skipped", "rng", "model", "optimizer", "data"):
        assert same_bits(one[key], other[key]), key


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def moments(trainer):
    state = train.gather_state(trainer.model, trainer.optimizers, True)[1]
    return {n: {k: v.clone() for k, v in values.items()} for n, values in state.items()}


def parts(state):
    """(backbone, proxy) of named tensors."""
    proxy = {n: w for n, w in state.items() if model_file.is_proxy(n)}
    return {n: w for n, w in state.items() if n not in proxy}, proxy


def wrapped(patch, owner, name, before=None, after=None):
    """Replaces owner.name by itself with something to do first or last."""
    inner = getattr(owner, name)

    def outer(*args, **kwargs):
        if before is not None:
            before(*args)
        result = inner(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    patch.setattr(owner, name, outer)


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def stop_at(patch, *steps):
    """SIGTERM, once each, in the steps that end at these numbers."""
    left = list(steps)

    def before(trainer, *_):
        if trainer.step + 1 in left:
            left.remove(trainer.step + 1)
            terminate()

    wrapped(patch, train.Trainer, "train_step", before)
    return left


def spoil(patch, *steps, rank=0):
    """The loss of these steps (counted from 0) is NaN on one rank."""
    inner = train.Trainer.forward

    def forward(self, *args, **kwargs):
        out = inner(self, *args, **kwargs)
        if "kl_probe" in kwargs and self.step in steps and self.world.rank == rank:
            return out._replace(nll=out.nll * math.nan)
        return out

    patch.setattr(train.Trainer, "forward", forward)


def spoil_gradient(patch, step):
    """The loss is finite, what comes back of it through this rank is not."""
    inner = train.Trainer.forward

    def forward(self, *args, **kwargs):
        out = inner(self, *args, **kwargs)
        if "kl_probe" in kwargs and self.step == step:
            out.nll.register_hook(lambda g: g * math.nan)
        return out

    patch.setattr(train.Trainer, "forward", forward)


def spoil_weights(patch, step):
    """A weight that this rank holds."""

    def before(trainer, *_):
        if trainer.step == step:
            local = trainer.backbone[2].detach()
            with torch.no_grad():
                getattr(local, "to_local", lambda: local)().view(-1)[0] = math.nan

    wrapped(patch, train.Trainer, "train_step", before)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """A whole run with everything on."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "draw_curves", DRAW_CURVES)
        assert run(toy, out, f"--retrieval_sets={toy / 'recall'}") == 0
    return out


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """Uninterrupted runs by their arguments, each made once."""
    made = {}

    def of(*more):
        if more not in made:
            made[more] = tmp_path_factory.mktemp("whole") / "run"
            assert run(toy, made[more], *more) == 0
        return made[more]

    return of


# --- a whole run ---


def test_train_lines(finished):
    lines = metrics(finished, "train")
    assert [r["step"] for r in lines] == list(range(1, 14))
    assert [r["tokens"] for r in lines] == [256 * i for i in range(1, 14)]
    assert [r["stage"] for r in lines] == [0] * 3 + [1] * 2 + [2] * 2 + [3] * 3 + [4] * 3
    assert [r["seq_len"] for r in lines] == [32] * 3 + [64] * 7 + [128] * 3
    assert [r["attention"] for r in lines] == ["dense"] * 3 + ["warmup"] * 4 + ["sparse"] * 6
    for r in lines:
        assert 0 < r["loss"] < 10 and r["skipped"] == 0 and 0 <= r["pad_share"] < 0.5
        assert r["tokens_per_second"] > 0 and r["peak_memory_gib"] > 0.01 and r["mfu"] is None
        assert r["eta_seconds"] == pytest.approx((13 - r["step"]) * 256 / r["tokens_per_second"])
        assert r["activations"] == "all" and r["predicted_memory_gib"] > 0
        for key in ("grad_norm", "first_layer_grad_norm", "last_layer_grad_norm"):
            assert (r[key] > 0) == (r["stage"] != FROZEN)
        assert r["first_layer_grad_norm"] ** 2 + r["last_layer_grad_norm"] ** 2 <= 1.001 * r["grad_norm"] ** 2
        for key in ("kl", "proxy_grad_norm", "proxy_update_norm"):
            assert r[key] is None if r["attention"] == "dense" else r[key] > 0, key
        by_layer = r["attention"] != "dense" and (r["step"] % 2 == 0 or r["step"] in ENDS)
        assert ("layer_kl" in r) == by_layer
        if by_layer:
            assert len(r["layer_kl"]) == 2 and sum(r["layer_kl"]) / 2 == pytest.approx(r["kl"])


def test_evaluation_lines(finished):
    due = [3, 4, 5, 7, 8, 10, 12, 13]
    lines = metrics(finished, "val")
    assert [r["step"] for r in lines] == due
    assert all(r["seconds"] > 0 for r in lines + metrics(finished, "proxy"))
    for r in lines:
        assert r["tokens"] == 256 * r["step"]
        for name in ("", "stage_"):
            assert 0 < r[f"{name}loss"] < 10
            # A byte a token, but EOS is a label without one.
            assert r[f"{name}loss"] < r[f"{name}bits_per_byte"] * math.log(2) < 1.1 * r[f"{name}loss"]
            assert r[f"{name}loss_from_0"] == pytest.approx(r[f"{name}loss"])
        assert 0 <= r["recall_accuracy"] <= 1 and 0 <= r["recall_token_accuracy"] <= 1
        assert r["recall_loss"] > 0 and "recall_bits_per_byte" not in r
    lines = metrics(finished, "proxy")
    assert [r["step"] for r in lines] == [s for s in due if s > ENDS[DENSE]]
    for r in lines:
        assert r["kl_selected"] > 0 and r["kl_full"] > 0 and r["kl_rows"] == 16 * (416 // r_length(r))
        assert 0 < r["block_recall"] <= 1 and 0 < r["score_recall"] <= r["score_best"] <= 1
        assert 0 < r["recall_rows"] <= r["kl_rows"]
        assert np.mean(r["layer_kl_selected"]) == pytest.approx(r["kl_selected"])
        assert set(r["by_layer"]) == {"kl_full", "block_recall", "score_recall", "score_best"}
        for name, rows in r["by_layer"].items():
            assert np.shape(rows) == (2, 2) and np.mean(rows) == pytest.approx(r[name])


def r_length(record):
    return [32, 64, 64, 64, 128][record["stage"]]


def test_run_leaves_its_files(finished, toy):
    assert {p.name for p in finished.iterdir()} == {
        "checkpoint.pt",
        "checkpoint_10.pt",
        "checkpoint_12.pt",
        "config.json",
        "curves.png",
        "lock",
        "metrics.jsonl",
    }
    saved = json.loads((finished / "config.json").read_text())
    assert saved["vocab_size"] == 320 and saved["lr"] == 1e-2 and saved["dataset"] == str(toy / "data")
    state = checkpoint(finished)
    assert state["config"] == saved
    assert (state["step"], state["stage"], state["skipped"]) == (13, LONG, 0)
    assert state["data"]["tokenizer"] == "bytes" and state["data"]["eos"] == EOS
    assert all(w.dtype == torch.float32 for w in state["model"].values())
    loaded = model_file.load_run(finished)
    assert loaded.stage == stages_of(toy)[LONG] and same_bits(loaded.state, state["model"])


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_curves_of_an_older_run(finished, tmp_path, capsys):
    old = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    new = ("activations", "predicted_memory_gib", "host_memory_gib", "reserved_memory_gib", "compiled")
    lines = [json.dumps({k: v for k, v in r.items() if k not in new}) + "\n" for r in old]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert train.main(["--curves=True", f"--out_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[7:9:1][0] == "-"


def test_curves(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "draw_curves", DRAW_CURVES)
    assert is_png(finished / "curves.png")
    shutil.copy(finished / "metrics.jsonl", tmp_path)
    assert train.main(["--curves=True", f"--out_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert is_png(tmp_path / "curves.png") and "curves.png" in out
    rows = [line.split() for line in out.splitlines()[-5:]]
    assert [row[:4] for row in rows] == [
        ["0", "dense", "32", "3"],
        ["1", "warmup", "64", "2"],
        ["2", "warmup", "64", "2"],
        ["3", "sparse", "64", "3"],
        ["4", "sparse", "128", "3"],
    ]
    lines = metrics(finished, "train")
    assert all(len(row) == 13 and row[6] == "-" and row[7] == "all" for row in rows)
    assert [float(row[11]) for row in rows] == pytest.approx([lines[i - 1]["loss"] for i in ENDS], abs=1e-4)
    speed = float(np.median([r["tokens_per_second"] for r in lines if r["stage"] == 4]))
    assert float(rows[4][4]) == pytest.approx(256 / speed, abs=0.01)
    with pytest.raises(ValueError, match=r"out_dir.*no metrics\.jsonl"):
        train.main(["--curves=True", f"--out_dir={tmp_path / 'nothing'}"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls(toy, tmp_path, optimizer):
    stages = (
        Stage(steps=20, seq_len=64, attention="warmup"),
        Stage(steps=60, seq_len=64, attention="sparse"),
    )
    file = with_stages(tmp_path / "c.py", *stages)
    fast = (f"--optimizer={optimizer}", "--lr=2e-2", "--weight_decay=0", *QUIET)
    assert run(toy, tmp_path / "run", file, *fast) == 0
    loss = [r["loss"] for r in metrics(tmp_path / "run", "train")]
    assert loss[0] > 5.5 and np.mean(loss[-5:]) < 1
    kl = [r["kl"] for r in metrics(tmp_path / "run", "train")]
    assert min(kl[:20]) < kl[0] / 2


# --- the numbers of a step, against naive attention and whole logits ---


def by_hand(trainer, stage, step):
    """Loss, KL by layer and both gradient norms of a step: no chunks, no micro-batches, autograd's KL."""
    c = trainer.config
    stream = data.Stream(trainer.train_file, seed=c.seed, block_size=c.block_size)
    batch = data.Loader(stream, tokens_per_step=c.tokens_per_step).step(
        step, stage.seq_len, stage.document_mask
    )
    kls, hidden = [], []

    def with_kl(attend):
        def attention(q, k, v, q_proxy, k_proxy, kl_probe=None, **options):
            out, kl = attend(q, k, v, q_proxy, k_proxy, **options)
            kls.append(kl)
            return out.to(q.dtype), kl.sum().float()

        return attention

    last = trainer.model.model["layers"][-1]
    hook = last.register_forward_hook(lambda module, x, y: hidden.append(trainer.model.model["norm"](y[0])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model_file.msa, "dense_attention", lambda q, k, v, **o: naive.dense(q, k, v, **o).float()
        )
        patch.setattr(model_file.msa, "warmup_attention", with_kl(naive.warmup))
        patch.setattr(model_file.msa, "sparse_attention", with_kl(naive.sparse))
        trainer.forward(batch, slice(None), stage)
    hook.remove()
    logits = hidden[0] @ trainer.model.lm_head.weight.T
    labelled = batch.labels != -100
    picked = logits.log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    loss = -(picked * labelled).sum() / labelled.sum()
    layer_kl = [kl.sum() / (c.tokens_per_step * c.n_proxy_head) for kl in kls]
    named = dict(trainer.model.named_parameters())
    grads = torch.autograd.grad(loss + sum(layer_kl), named.values(), allow_unused=True)
    found = parts({n: g for n, g in zip(named, grads, strict=True) if g is not None})
    norms = [math.sqrt(sum(float(g.square().sum()) for g in part.values())) for part in found]
    pads = int((batch.tokens == EOS).sum()) / c.tokens_per_step
    return SimpleNamespace(
        loss=loss.item(), layer_kl=[kl.item() for kl in layer_kl], norms=norms, pad_share=pads
    )


@pytest.mark.parametrize("micro", [64, 256])
@pytest.mark.parametrize("attention", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize("masked", [True, False])
def test_step_equals_naive(toy, tmp_path, attention, masked, micro):
    trainer = trainer_of(toy, tmp_path / "run", f"--micro_batch_tokens={micro}")
    stage = Stage(steps=1, seq_len=64, attention=attention, document_mask=masked, rope_theta=300.0)
    trainer.step = 2
    want = by_hand(trainer, stage, 2)
    before = weights(trainer)
    got = trainer.train_step(stage, True)
    moved = parts({n: w - before[n] for n, w in weights(trainer).items()})[1]
    assert got["loss"] == pytest.approx(want.loss, rel=1e-5)
    assert got["grad_norm"] == pytest.approx(want.norms[0], rel=1e-4)
    assert got["pad_share"] == want.pad_share > 0
    if attention == "dense":
        assert got["kl"] is got["layer_kl"] is got["proxy_grad_norm"] is got["proxy_update_norm"] is None
        assert all(not w.any() for w in moved.values())
    else:
        assert got["layer_kl"] == pytest.approx(want.layer_kl, rel=1e-4) and min(want.layer_kl) > 0.01
        assert got["kl"] == pytest.approx(np.mean(want.layer_kl), rel=1e-4)
        assert got["proxy_grad_norm"] == pytest.approx(want.norms[1], rel=1e-4)
        update = math.sqrt(sum(float(w.square().sum()) for w in moved.values()))
        assert got["proxy_update_norm"] == pytest.approx(update, rel=1e-5) and update > 1e-3


def test_kl_is_a_mean_over_layers_with_a_proxy(toy, tmp_path):
    trainer = trainer_of(toy, tmp_path / "run", "--dense_layers=1")
    want = by_hand(trainer, stages_of(toy)[SPARSE], 0)
    got = trainer.train_step(stages_of(toy)[SPARSE], True)
    assert len(want.layer_kl) == len(got["layer_kl"]) == 1
    assert got["kl"] == pytest.approx(want.layer_kl[0], rel=1e-4)


def gradients_of_a_step(toy, out, stage, *more):
    """What reaches the optimizer, clipping off."""
    trainer = trainer_of(toy, out, "--grad_clip=0", "--proxy_grad_clip=0", *more)
    with pytest.MonkeyPatch.context() as patch:
        found = {}

        def keep(*_):
            found.update(
                {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
            )

        wrapped(patch, torch.optim.AdamW, "step", keep)
        record = trainer.train_step(stage, True)
    return record, found


@pytest.mark.parametrize(
    "option",
    [
        ("--micro_batch_tokens=64",),
        ("--micro_batch_tokens=192",),
        ("--loss_chunk=7",),
        ("--row_chunk=19",),
        ("--activations=attention",),
        ("--activations=input", "--row_chunk=100"),
        ("--activations=offload",),
    ],
    ids=lambda option: "+".join(o.strip("-") for o in option),
)
def test_how_a_step_is_cut_changes_nothing(toy, tmp_path, option):
    stage = stages_of(toy)[SPARSE]
    record, want = gradients_of_a_step(toy, tmp_path / "a", stage)
    other, got = gradients_of_a_step(toy, tmp_path / "b", stage, *option)
    for key in ("loss", "kl", "grad_norm", "proxy_grad_norm"):
        assert other[key] == pytest.approx(record[key], rel=1e-6), key
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).abs().max() <= 1e-6 * want[name].abs().max() + 1e-9, name


def test_clipping_is_apart(toy, tmp_path):
    stage, applied = stages_of(toy)[SPARSE], {}
    trainer = trainer_of(toy, tmp_path / "run", "--grad_clip=0.1", "--proxy_grad_clip=0.02")

    def keep(*_):
        for name, params in (("backbone", trainer.backbone), ("proxy", trainer.proxy)):
            applied[name] = math.sqrt(sum(float(p.grad.square().sum()) for p in params))

    with pytest.MonkeyPatch.context() as patch:
        wrapped(patch, torch.optim.AdamW, "step", keep)
        record = trainer.train_step(stage, True)
    assert record["grad_norm"] > 0.2 and record["proxy_grad_norm"] > 0.05  # logged as they were
    assert applied == pytest.approx({"backbone": 0.1, "proxy": 0.02}, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_learning_rates_are_apart(toy, tmp_path, optimizer):
    stage = stages_of(toy)[SPARSE]
    for still, option in ((0, "--lr=0"), (1, "--proxy_lr=0")):
        trainer = trainer_of(toy, tmp_path / f"{still}", option, f"--optimizer={optimizer}")
        before = parts(weights(trainer))
        trainer.train_step(stage, False)
        after = parts(weights(trainer))
        assert same_bits(before[still], after[still])
        assert all(not torch.equal(before[1 - still][n], w) for n, w in after[1 - still].items())


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_the_backbone(toy, tmp_path, tied):
    trainer = trainer_of(toy, tmp_path / "run", "--optimizer=muon", f"--tie_embeddings={tied}")
    names = {p: n for n, p in trainer.model.named_parameters()}
    took, decay = {}, {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                took[names[p]], decay[names[p]] = type(optimizer).__name__, group["weight_decay"]
    assert took.keys() == set(names.values())
    for name, kind in took.items():
        plain = re.search("norm|embed_tokens|lm_head|_proxy_", name)
        assert kind == ("AdamW" if plain else "Muon"), name
        assert decay[name] == (0.0 if "norm" in name else 0.1), name


def test_bfloat16(toy, tmp_path):
    """Computes in bfloat16, with weights and optimizer in fp32."""
    assert run(toy, tmp_path / "run", "--dtype=bfloat16", *QUIET) == 0
    state = checkpoint(tmp_path / "run")
    moments = [v for values in state["optimizer"].values() for v in values.values()]
    assert all(w.dtype == torch.float32 for w in [*state["model"].values(), *moments])
    loss = [r["loss"] for r in metrics(tmp_path / "run", "train")]
    assert loss[-1] < loss[0] - 1
    trainer = trainer_of(toy, tmp_path / "other", "--dtype=bfloat16")
    hidden = []
    trainer.model.model["norm"].register_forward_hook(lambda module, x, y: hidden.append(y.dtype))
    trainer.train_step(stages_of(toy)[SPARSE], False)
    assert set(hidden) == {torch.bfloat16}


# --- stages and schedule ---


def test_the_tokens_of_a_step_do_not_depend_on_its_stage(toy, tmp_path, monkeypatch):
    seen = {}

    def before(trainer, batch, rows, stage, **kwargs):
        seen.setdefault(trainer.step, []).append((batch.tokens[rows], batch.labels[rows]))

    inner = train.Trainer.forward

    def forward(self, batch, rows, stage, **kwargs):
        before(self, batch, rows, stage)
        return inner(self, batch, rows, stage, **kwargs)

    monkeypatch.setattr(train.Trainer, "forward", forward)
    assert run(toy, tmp_path / "run", "--micro_batch_tokens=64", *QUIET) == 0
    stream = data.Stream(data.TokenFile(toy / "data" / "train.bin"), seed=1337, block_size=8)
    assert sorted(seen) == list(range(13))
    for step, pieces in seen.items():
        tokens, labels, _ = stream.read(256 * step, 256)
        assert torch.cat([t.flatten() for t, _ in pieces]).tolist() == tokens.tolist()
        assert torch.cat([y.flatten() for _, y in pieces]).tolist() == labels.tolist()
        assert max(t.numel() for t, _ in pieces) == max(64, 128 if step >= ENDS[SPARSE] else 0)


def schedule(**changes):
    stages = [Stage(steps=4, seq_len=8, attention="dense"), Stage(tokens=95, seq_len=8, attention="dense")]
    return train.Schedule(Config(**{"stages": stages, "tokens_per_step": 16, **changes}))


def test_stages_by_step():
    s = schedule()
    assert (s.steps, s.ends, s.total) == ([4, 6], [4, 10], 10)
    assert [s.stage_of(i) for i in range(10)] == [0] * 4 + [1] * 6
    assert schedule(stage_steps=3).steps == [3, 3] and schedule(stage_steps=5).steps == [4, 5]


@pytest.mark.parametrize(
    "changes, shares",
    [
        # warmup over 2 steps, then constant, then down over the last 30 %: the end would be the 11th step
        (
            dict(lr_warmup_tokens=32, lr_decay_share=0.3, lr_min_share=0.1),
            [0.5, 1, 1, 1, 1, 1, 1, 1, 0.7, 0.4],
        ),
        (dict(lr_decay_share=0.0), [1] * 10),
        (dict(lr_decay_share=1.0, lr_min_share=0.0), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (dict(lr_warmup_tokens=40), [0.4, 0.8, 1, 1, 1, 1, 1, 1, 1, 0.55]),
        (
            dict(schedule="cosine", lr_warmup_tokens=32, lr_min_share=0.1),
            [0.5, 1, 1, *(0.55 + 0.45 * math.cos(math.pi * i / 8) for i in range(1, 8))],
        ),
        (dict(lr_warmup_tokens=10_000), [0.0016 * (i + 1) for i in range(10)]),
    ],
    ids=["wsd", "constant", "all decay", "uneven warmup", "cosine", "warmup alone"],
)
def test_lr_schedule(changes, shares):
    s = schedule(**changes)
    assert [s.lr_share(i) for i in range(10)] == pytest.approx(shares)


def test_lr_is_logged_and_applied(finished, toy):
    s = train.Schedule(load_config([str(toy / "config.py")]))
    for r in metrics(finished, "train"):
        share = s.lr_share(r["step"] - 1)
        assert r["lr"] == pytest.approx(1e-2 * share) and r["proxy_lr"] == pytest.approx(5e-3 * share)


def test_lr_reaches_the_optimizers(toy, tmp_path, monkeypatch):
    found = []
    keep = lambda optimizer, *_: found.append({g["lr"] / g["peak"] for g in optimizer.param_groups})  # noqa: E731
    wrapped(monkeypatch, torch.optim.AdamW, "step", keep)
    wrapped(monkeypatch, torch.optim.Muon, "step", keep)
    assert run(toy, tmp_path / "run", "--optimizer=muon", "--schedule=cosine", *QUIET) == 0
    s = train.Schedule(load_config([str(toy / "config.py"), "--schedule=cosine"]))
    assert len(found) == 26 and all(len(shares) == 1 for shares in found)
    assert [share for (share,) in found] == pytest.approx([s.lr_share(i // 2) for i in range(26)])


def test_stage_steps_cap_every_stage(toy, tmp_path):
    assert run(toy, tmp_path / "run", "--stage_steps=1", *QUIET) == 0
    assert [r["stage"] for r in metrics(tmp_path / "run", "train")] == [0, 1, 2, 3, 4]


def test_rope_theta_of_the_stage(toy, tmp_path, monkeypatch):
    seen = []
    wrapped(monkeypatch, model_file, "rope_table", lambda position, dim, theta: seen.append(theta))
    assert run(toy, tmp_path / "run", "--rope_theta=700", "--stage_steps=1", *QUIET) == 0
    assert seen == [700.0, 700.0, 700.0, 5e4, 700.0]


def test_frozen_backbone(toy, tmp_path):
    """After a dense stage has filled the moments, the backbone still does not move, nor do its moments."""
    for optimizer in ("adamw", "muon"):
        out = tmp_path / optimizer
        trainer = trainer_of(toy, out, f"--optimizer={optimizer}")
        dense, frozen = stages_of(toy)[DENSE], stages_of(toy)[FROZEN]
        trainer.train_step(dense, False)
        trainer.step += 1
        before, state = parts(weights(trainer)), moments(trainer)
        record = trainer.train_step(frozen, True)
        after = parts(weights(trainer))
        assert same_bits(before[0], after[0])
        assert same_bits(parts(state)[0], parts(moments(trainer))[0])
        assert all(not torch.equal(before[1][n], w) for n, w in after[1].items())
        assert record["loss"] > 0 and record["kl"] > 0 and record["grad_norm"] == 0
        trainer.step += 1
        assert trainer.train_step(stages_of(toy)[WARMUP], False)["grad_norm"] > 0


def test_frozen_stage_leaves_the_dense_loss(finished):
    dense = {r["step"]: r["loss"] for r in metrics(finished, "val")}
    assert dense[3] == dense[4] == dense[5] != dense[7]


def test_intervals(toy, tmp_path, whole):
    every = ("--log_interval=2", "--layer_interval=0", "--checkpoint_interval=0", *QUIET)
    assert run(toy, tmp_path / "a", *every) == 0
    assert [r["step"] for r in metrics(tmp_path / "a")] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13]
    assert not any("layer_kl" in r for r in metrics(tmp_path / "a"))
    assert same_bits(checkpoint(tmp_path / "a")["model"], checkpoint(whole(*QUIET))["model"])
    assert run(toy, tmp_path / "b", "--log_interval=0", "--stage_steps=1", *QUIET) == 0
    assert metrics(tmp_path / "b") == [] and checkpoint(tmp_path / "b")["step"] == 5


# --- evaluation ---


def test_fixed_validation_is_fixed(toy, tmp_path):
    """With weights that do not move, its loss is one number through all stages of one RoPE base."""
    still = ("--lr=0", "--proxy_lr=0", "--kl_interval=0")
    assert run(toy, tmp_path / "run", *still) == 0
    lines = metrics(tmp_path / "run", "val")
    plain = [r for r in lines if r["stage"] != SPARSE]  # which has a RoPE base of its own
    for key in ("loss", "bits_per_byte"):
        assert len({r[key] for r in plain}) == 1
    assert len({r["stage_loss"] for r in lines}) == 4  # dense at 32, warmup at 64, sparse at 64 and 128
    assert plain[0]["loss"] == plain[0]["stage_loss"]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "eval_tokens, micro, count",
    [(1024, 512, 1024), (800, 256, 768), (800, 512, 768), (10**6, 768, 1280), (600, 2**20, 512), (1, 1, 256)],
)
def test_validation_against_its_own_sum(toy, tmp_path, masked, eval_tokens, micro, count):
    """On as many whole sequences as fit into eval_tokens and the set, however many go through at a time."""
    sizes = ("--tokens_per_step=512", f"--eval_tokens={eval_tokens}", f"--micro_batch_tokens={micro}")
    trainer = trainer_of(toy, tmp_path / "run", *sizes)
    stage = Stage(steps=1, seq_len=256, attention="dense", document_mask=masked)
    got = trainer.evaluate(trainer.val_file, stage)
    stream = data.Stream(trainer.val_file, seed=1337, block_size=8)
    assert 1280 <= stream.epoch_tokens < 1536
    tokens, labels, doc_start = stream.read(0, count)
    total, n_bytes, by_place = [], 0, {}
    for begin in range(0, count, 256):
        hidden = []
        last = trainer.model.model["layers"][-1]
        hook = last.register_forward_hook(lambda module, x, y: hidden.append(y[0]))  # noqa: B023
        starts = np.maximum(doc_start[begin // 8 : begin // 8 + 32] - begin, 0) // 8
        docs = torch.tensor(starts, dtype=torch.int32)[None] if masked else None
        row = torch.tensor(tokens[begin : begin + 256])[None]
        with torch.no_grad():
            trainer.model(row, row, attention="dense", doc_start_block=docs)
        hook.remove()
        logp = (
            (trainer.model.model["norm"](hidden[0])[0] @ trainer.model.lm_head.weight.T)
            .double()
            .log_softmax(-1)
        )
        for i in range(256):
            label = labels[begin + i]
            if label == -100:
                continue
            nll = -logp[i, label].item()
            place = i - starts[i // 8] * 8 if masked else i
            total.append(nll)
            n_bytes += label != EOS
            by_place.setdefault(0 if place < 128 else 128, []).append(nll)
    assert got["loss"] == pytest.approx(np.mean(total), rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(sum(total) / math.log(2) / n_bytes, rel=1e-5)
    places = {f"loss_from_{b}": np.mean(v) for b, v in by_place.items()}
    assert {k: v for k, v in got.items() if k.startswith("loss_from")} == pytest.approx(places, rel=1e-5)
    assert len(places) == 2 or count == 256


def test_evaluation_leaves_the_training_alone(toy, tmp_path, whole):
    a, b = whole(*QUIET), whole()
    assert [r for r in untimed(a) if r["kind"] == "train"] == [r for r in untimed(b) if r["kind"] == "train"]
    assert same_bits(checkpoint(a)["model"], checkpoint(b)["model"])


def test_answers_right():
    labelled = torch.tensor([[0, 1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 1, 1, 0], [0] * 7]).bool()
    correct = torch.tensor([[1, 1, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0, 1, 0], [1] * 7]).bool()
    # answers: 1-2 right, 4 wrong, 6 right; then, of another row, 0 right, 3-5 wrong in the middle
    assert train.answers_right(correct, labelled) == (3, 5)
    assert train.answers_right(correct, torch.zeros_like(labelled)) == (0, 0)
    assert train.answers_right(labelled, labelled) == (5, 5)


def test_retrieval_accuracy(toy, tmp_path, monkeypatch):
    """Predictions that are wrong where the label is one of four letters."""
    wrong = torch.tensor([97, 100, 103, 106])
    inner = train.Trainer.forward

    def forward(self, batch, rows, stage, **kwargs):
        out = inner(self, batch, rows, stage, **kwargs)
        return out._replace(correct=~torch.isin(batch.labels[rows], wrong))

    monkeypatch.setattr(train.Trainer, "forward", forward)
    trainer = trainer_of(toy, tmp_path / "run", f"--retrieval_sets={toy / 'recall'}")
    docs, masks = questions(10, seed=2)
    answers = []
    for doc, mask in zip(docs, masks, strict=True):
        at = [i for i, m in enumerate(mask) if m]
        answers += [[doc[i] not in wrong for i in part] for part in (at[:3], at[3:])]
    stage = stages_of(toy)[SPARSE]
    got = trainer.validate(dataclasses.replace(stage, seq_len=32))
    assert got["recall_token_accuracy"] == pytest.approx(np.mean(answers))
    assert got["recall_accuracy"] == pytest.approx(np.mean([all(a) for a in answers]))
    assert 0 < got["recall_accuracy"] < got["recall_token_accuracy"] < 1


def test_retrieval_set_must_fit(toy, tmp_path):
    with pytest.raises(ValueError, match="retrieval_sets: .*answers marked"):
        trainer_of(toy, tmp_path / "run", f"--retrieval_sets={toy / 'data'}")
    with pytest.raises(ValueError, match="there is no data set 'nowhere'"):
        trainer_of(toy, tmp_path / "run", "--retrieval_sets=nowhere")


@pytest.mark.parametrize("masked", [True, False])
def test_proxy_report_equals_naive(toy, tmp_path, monkeypatch, masked):
    trainer = trainer_of(toy, tmp_path / "run", "--eval_tokens=128")
    stage = Stage(steps=1, seq_len=64, attention="sparse", document_mask=masked)
    seen, batches = [], []
    recall, forward = model_file.attention_recall, train.Trainer.forward

    def keep(*tensors, **options):
        seen.append((tensors, options))
        return recall(*tensors, **options)

    def keep_batch(self, batch, *more, **options):
        batches.append(batch)
        return forward(self, batch, *more, **options)

    monkeypatch.setattr(model_file, "attention_recall", keep)
    monkeypatch.setattr(train.Trainer, "forward", keep_batch)
    got = trainer.inspect_proxy(stage)
    stream = data.Stream(trainer.val_file, seed=1337, block_size=8)
    (batch,) = batches
    assert batch.tokens.flatten().tolist() == stream.read(0, 128)[0].tolist() and len(seen) == 2
    for layer, ((q, k, q_proxy, k_proxy, indices, rows), where) in enumerate(seen):
        assert (
            sorted(set(rows.tolist())) == rows.tolist() and len(rows) == 16 and 0 <= rows[0] <= rows[-1] < 64
        )
        assert (where["doc_start_block"] is not None) == masked
        picked = naive.select(q_proxy, k_proxy, top_k=16, **where)
        assert torch.equal(indices, picked)
        _, kl = naive.sparse(q, k, k, q_proxy, k_proxy, block_indices=picked, **where)
        assert got["layer_kl_selected"][layer] == pytest.approx(float(kl.sum()) / (128 * 2), rel=1e-4)
        want = naive.recall(q, k, q_proxy, k_proxy, picked, rows, **where)
        assert got["recall_rows"] == want.pop("n_rows") > 0
        for name, values in want.items():
            assert got["by_layer"][name][layer] == pytest.approx(values.tolist(), rel=1e-4), name
    for name, rows in got["by_layer"].items():
        assert got[name] == pytest.approx(np.mean(rows))
    assert got["kl_selected"] == pytest.approx(np.mean(got["layer_kl_selected"])) and got["kl_rows"] == 32


def test_proxy_report_without_a_row_that_counts(toy, tmp_path):
    """Where every row sees all its blocks there are no recalls: null in the file, which stays JSON."""
    assert run(toy, tmp_path / "run", "--top_k=128", "--stage_steps=1", "--eval_interval=0") == 0
    lines = metrics(tmp_path / "run", "proxy")
    assert len(lines) == 4
    for r in lines:
        assert r["recall_rows"] == 0 and r["block_recall"] is None and r["kl_selected"] > 0
        assert r["kl_full"] > 0


# --- stopping and continuing ---


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupted_equals_uninterrupted(toy, tmp_path, whole, monkeypatch, optimizer, capsys):
    """In a stage, at its border, where an evaluation is due, and directly after one."""
    more = (f"--optimizer={optimizer}",)
    stops = [2, 3, 4, 6, 8, 9, 13]
    left = stop_at(monkeypatch, *stops)
    for step in stops:
        assert run(toy, tmp_path / "run", *more) == 0
        assert checkpoint(tmp_path / "run")["step"] == step
        assert metrics(tmp_path / "run")[-1]["kind"] == "train"  # it did not wait for an evaluation
        assert (
            f"stopped by SIGTERM at step {step}, saved; the same command continues" in capsys.readouterr().out
        )
    assert left == []
    assert run(toy, tmp_path / "run", *more) == 0
    assert_same_run(tmp_path / "run", whole(*more))
    assert run(toy, tmp_path / "run", *more) == 0  # there is nothing left to do
    assert_same_run(tmp_path / "run", whole(*more))


@pytest.mark.parametrize(
    "moment", ["loading", "ranks agreed", "optimizer", "saving", "evaluating", "logging"]
)
def test_a_signal_at_any_moment(toy, tmp_path, whole, monkeypatch, moment):
    owner, name = {
        "loading": (train.Loader, "step"),
        "ranks agreed": (train.World, "sum"),
        "optimizer": (torch.optim.AdamW, "step"),
        "saving": (train.Trainer, "save"),
        "evaluating": (train.Trainer, "validate"),
        "logging": (train.Trainer, "report_step"),
    }[moment]
    more = () if moment == "evaluating" else QUIET
    calls = itertools.count(1)
    with monkeypatch.context() as patch:
        wrapped(patch, owner, name, after=lambda *_: terminate() if next(calls) == 3 else None)
        assert run(toy, tmp_path / "run", *more) == 0
    # The third call is in the third step, the third evaluation at step 5, the third save there too.
    at = 5 if moment in ("saving", "evaluating") else 3
    assert at <= checkpoint(tmp_path / "run")["step"] <= at + 1
    assert run(toy, tmp_path / "run", *more) == 0
    assert_same_run(tmp_path / "run", whole(*more))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal(toy, tmp_path, monkeypatch, number):
    """A second Ctrl-C does not wait; a second SIGTERM may be torchrun's, of one that all processes got."""
    found = []

    def before(trainer, *_):
        os.kill(os.getpid(), number)
        found.append(signal.getsignal(number))
        if number == signal.SIGTERM and found[-1] != signal.SIG_DFL:
            os.kill(os.getpid(), number)

    wrapped(monkeypatch, train.Trainer, "train_step", before)
    own = signal.getsignal(number)
    assert run(toy, tmp_path / "run") == 0
    assert (found == [signal.SIG_DFL]) == (number == signal.SIGINT)
    assert signal.getsignal(number) is own and checkpoint(tmp_path / "run")["step"] == 1


def test_lines_past_the_checkpoint_are_dropped(toy, tmp_path, whole):
    """A kill leaves a log that is ahead of the checkpoint and a line cut short."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        wrapped(patch, train.Trainer, "train_step", lambda t, *_: 1 / 0 if t.step == 6 else None)
        with pytest.raises(ZeroDivisionError):
            run(toy, out)
    assert checkpoint(out)["step"] == 5 and metrics(out)[-1]["step"] == 6
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert run(toy, out) == 0
    assert_same_run(out, whole())


def test_a_run_without_a_checkpoint_starts_again(toy, tmp_path, whole):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        wrapped(patch, train.Trainer, "train_step", lambda t, *_: 1 / 0 if t.step == 2 else None)
        with pytest.raises(ZeroDivisionError):
            run(toy, out)
    assert len(metrics(out)) == 2 and not (out / "checkpoint.pt").exists()
    assert run(toy, out) == 0
    assert_same_run(out, whole())


def environment(**changes):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return {**keep, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def wait_for(path, lines, process, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)
    raise AssertionError(f"the run wrote no {lines} lines (exit code {process.poll()})")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_process_that_is_killed(toy, tmp_path, whole, number):
    """A real one, at a moment of chance; what it left is continued to the same end."""
    stages = (
        Stage(steps=60, seq_len=32, attention="dense"),
        Stage(steps=40, seq_len=64, attention="warmup"),
        Stage(steps=20, seq_len=64, attention="sparse"),
    )
    file = with_stages(toy / "longer.py", *stages)
    more = (file, "--eval_interval=40", "--kl_interval=0", "--checkpoint_interval=3", "--log_interval=5")
    out, delay = tmp_path / "run", random.Random(int(number)).uniform(0, 0.5)
    command = [sys.executable, str(ROOT / "train.py"), *arguments(toy, out, *more)]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(out / "metrics.jsonl", 3, process)
        time.sleep(delay)
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (-number if number == signal.SIGKILL else 0), text
    assert 0 < checkpoint(out)["step"] < 120
    assert run(toy, out, *more) == 0
    assert_same_run(out, whole(*more))


def change(field, value):
    return lambda toy, stages: ((f"--{field}={value}",), stages)


def change_stage(i, **fields):
    def changed(toy, stages):
        stages[i] = dataclasses.replace(stages[i], **fields)
        return (), stages

    return changed


def change_data(name):
    def changed(toy, stages):
        write(toy / "data" / name, documents(60, seed=5))
        return (), stages

    return changed


REFUSED = {
    "lr": (change("lr", 2e-2), "lr was 0.01, is 0.02"),
    "d_model": (change("d_model", 64), "d_model was 32, is 64"),
    "seed": (change("seed", 3), "seed was 1337, is 3"),
    "optimizer": (change("optimizer", "muon"), "optimizer was 'adamw', is 'muon'"),
    "tokens_per_step": (change("tokens_per_step", 512), "tokens_per_step was 256, is 512"),
    "top_k": (change("top_k", 24), "top_k was 16, is 24"),
    "data": (change_data("train.bin"), "data's hash was"),
    "validation data": (change_data("val.bin"), "data's val_hash was"),
    "attention of an earlier stage": (change_stage(0, attention="sparse"), r"stages\[0\] was .*'dense'"),
    "length of an earlier stage": (change_stage(0, steps=4), r"stages\[0\] was 3 steps long, is 4"),
    "mask of this stage": (change_stage(2, document_mask=False), r"stages\[2\] was"),
    "this stage shortened": (change_stage(2, steps=1), r"stages\[2\] ends at step 6, 7 are done"),
    "stage gone": (lambda toy, stages: ((), stages[:2]), r"stages\[2\] is gone"),
    "stage_steps": (change("stage_steps", 1), "steps long, is 1"),
}


@pytest.fixture(scope="module")
def stopped(toy, tmp_path_factory):
    """A run that stopped after step 7, at the end of the third stage."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 7)
        assert run(toy, out, *QUIET) == 0
    return out


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_continue(toy, stopped, tmp_path, what):
    alter, message = REFUSED[what]
    shutil.copytree(toy, tmp_path / "toy")
    shutil.copytree(stopped, tmp_path / "run")
    more, stages = alter(tmp_path / "toy", stages_of(toy))
    file = with_stages(tmp_path / "c.py", *stages)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    # The data of the copy, at the path of the run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "find_dataset", lambda name: tmp_path / "toy" / Path(name).name)
        with pytest.raises(ValueError, match=f"holds another run: .*(?:{message})"):
            run(toy, tmp_path / "run", file, *QUIET, *more)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_what_may_change(toy, stopped, tmp_path, capsys):
    """Memory and logging, a longer last stage, another one behind it; then the end comes later."""
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    stages = stages_of(toy)
    stages[LONG] = dataclasses.replace(stages[LONG], steps=4)
    stages.append(Stage(steps=2, seq_len=256, attention="sparse"))
    file = with_stages(tmp_path / "c.py", *stages)
    more = ("--micro_batch_tokens=64", "--log_interval=2", "--activations=input", *QUIET)
    assert run(toy, out, file, *more) == 0
    assert "at step 7 of 16" in capsys.readouterr().out
    assert checkpoint(out)["step"] == 16
    lines = metrics(out, "train")
    assert [r["step"] for r in lines] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert lines[-1]["seq_len"] == 256 and json.loads((out / "config.json").read_text())["log_interval"] == 2
    # A run that is done is lengthened by its last stage alone, too.
    stages[-1] = dataclasses.replace(stages[-1], steps=None, tokens=3 * 256)
    assert run(toy, out, with_stages(tmp_path / "d.py", *stages), *more) == 0
    assert checkpoint(out)["step"] == 17


def test_moved_data_continues(toy, stopped, tmp_path):
    """The hash says what the data are, not where they lie."""
    shutil.copytree(stopped, tmp_path / "run")
    shutil.copytree(toy / "data", tmp_path / "elsewhere")
    more = (f"--dataset={tmp_path / 'elsewhere'}", *QUIET)
    assert train.main([str(toy / "config.py"), f"--out_dir={tmp_path / 'run'}", *more]) == 0


def test_continued_with_other_micro_batches(toy, stopped, tmp_path, whole):
    shutil.copytree(stopped, tmp_path / "run")
    assert run(toy, tmp_path / "run", "--micro_batch_tokens=64", *QUIET) == 0
    got, want = metrics(tmp_path / "run", "train"), metrics(whole(*QUIET), "train")
    assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in want], rel=1e-4)


# --- checkpoints ---


def test_a_failing_save_leaves_the_old_checkpoint(toy, tmp_path, whole, monkeypatch):
    out, inner, calls = tmp_path / "run", torch.save, itertools.count(1)

    def save(state, file):
        if next(calls) == 2:
            file.write(b"half of a checkpoint")
            raise OSError(errno.ENOSPC, "the disk is full")
        inner(state, file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(
        train.RunError, match="checkpoint of step 4 .* full.* last checkpoint is that of step 3"
    ):
        run(toy, out)
    assert checkpoint(out)["step"] == 3 and not list(out.glob("*.new"))
    assert run(toy, out) == 0  # over what the failure left
    assert_same_run(out, whole())
    assert not list(out.glob("*.new"))


@pytest.mark.parametrize("what", ["validate", "inspect_proxy"])
def test_saved_before_the_evaluation(toy, tmp_path, whole, monkeypatch, what):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        wrapped(patch, train.Trainer, what, lambda t, *_: 1 / 0 if t.step == 8 else None)
        with pytest.raises(ZeroDivisionError):
            run(toy, out)
    assert checkpoint(out)["step"] == 8
    assert run(toy, out) == 0
    assert_same_run(out, whole())


# --- steps without a finite loss or gradient ---


@pytest.mark.parametrize("what", ["loss", "backbone", "proxy", "kl"])
def test_non_finite_step_is_skipped(toy, tmp_path, what, capsys):
    trainer = trainer_of(toy, tmp_path / "run")
    stage = stages_of(toy)[SPARSE]
    trainer.train_step(stage, True)
    trainer.step += 1
    before, state = weights(trainer), moments(trainer)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if what == "loss":
            spoil(patch, 1)
        else:
            bad = {"backbone": trainer.backbone[3], "proxy": trainer.proxy[0], "kl": trainer.kl_probe}[what]
            stack.callback(bad.register_hook(lambda g: g * math.inf).remove)
        record = trainer.train_step(stage, True)
    assert record["skipped"] == 1 and trainer.skipped_in_a_row == 1 and record["proxy_update_norm"] is None
    assert "step 2: skipped, not finite: " in capsys.readouterr().out
    assert same_bits(before, weights(trainer))
    assert same_bits(state, moments(trainer))
    trainer.step += 1
    record = trainer.train_step(stage, True)
    assert record["skipped"] == 1 and trainer.skipped_in_a_row == 0
    assert math.isfinite(record["loss"]) and not same_bits(before, weights(trainer))


def test_skipped_steps_in_a_run(toy, tmp_path, monkeypatch):
    """Counted and logged, null where there is no number, and carried over a stop."""
    spoil(monkeypatch, 3, 8)
    stop_at(monkeypatch, 6)
    assert run(toy, tmp_path / "run") == 0
    assert run(toy, tmp_path / "run") == 0
    lines = metrics(tmp_path / "run", "train")
    assert [r["skipped"] for r in lines] == [0] * 3 + [1] * 5 + [2] * 5
    assert [r["step"] for r in lines if r["loss"] is None] == [4, 9]
    assert all(math.isfinite(w.sum()) for w in checkpoint(tmp_path / "run")["model"].values())


def test_many_skipped_steps_end_the_run(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, 3, 5, 6, 7, 8)
    with pytest.raises(RuntimeError, match="3 steps in a row had a non-finite loss or gradient"):
        run(toy, tmp_path / "run", "--max_skipped_steps=3", *QUIET)
    assert [r["skipped"] for r in metrics(tmp_path / "run", "train")][:7] == [0, 0, 0, 1, 1, 2, 3]
    # The third in a row is step 8, where a checkpoint would be due.
    assert checkpoint(tmp_path / "run")["step"] == 7


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("first", [0, 3])
def test_advice_after_skipped_steps(toy, tmp_path, monkeypatch, first, clip):
    """It names what there is: no weights of a run without a checkpoint, no smaller grad_clip than none."""
    spoil(monkeypatch, first, first + 1)
    with pytest.raises(train.RunError) as caught:
        run(toy, tmp_path / "run", "--max_skipped_steps=2", f"--grad_clip={clip}", *QUIET)
    assert (f"--init_from={tmp_path / 'run'}" in str(caught.value)) == (first > 0)
    assert ("no checkpoint yet" in str(caught.value)) == (first == 0)
    assert ("a smaller grad_clip" in str(caught.value)) == (clip > 0)
    assert ("--grad_clip=1" in str(caught.value)) == (clip == 0)


def test_lines_that_are_no_records(tmp_path):
    record = {"kind": "train", "step": 1, "tokens": 256}
    others = [5, [1], None, {"a": 1}, {**record, "kind": "x"}, {**record, "step": "1"}]
    text = "".join(json.dumps(x) + "\n" for x in (others[0], record, *others[1:]))
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
    assert train.read_metrics(tmp_path / "metrics.jsonl") == [record]


# --- dry run, bad input ---


def test_dry_run(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(toy, tmp_path / "run", "--dry_run=True") == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "prepare: python data/passkey/prepare.py --out somewhere" in text
    rows = [line.split() for line in text.splitlines() if re.match(r"\s+\d ", line)]
    assert [row[:6] for row in rows] == [
        ["0", "dense", "32", "8", "3", "768"],
        ["1", "warmup", "64", "4", "2", "512"],
        ["2", "warmup", "64", "4", "2", "512"],
        ["3", "sparse", "64", "4", "3", "768"],
        ["4", "sparse", "128", "2", "3", "768"],
    ]
    assert "total 13 steps, 3,328 tokens" in text
    trainer = trainer_of(toy, tmp_path / "run")
    backbone, proxy = parts(weights(trainer))
    sizes = {"total": 0, "embedding": 320 * 32, "proxy": sum(w.numel() for w in proxy.values())}
    sizes["backbone"] = sum(w.numel() for w in backbone.values()) - sizes["embedding"]
    total = sum(sizes.values())
    assert f"parameters {total:,}: backbone {sizes['backbone']:,}, embedding 10,240, proxy" in text
    found = re.findall(
        r"^stage \d keeps 'all' for backward \(the first that fits .*?: ([\d.]+) GiB", text, re.M
    )
    assert len(found) == 5


def test_dry_run_without_data(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ("--dry_run=True", "--dataset=nowhere", "--stage_steps=1")
    assert run(toy, tmp_path / "run", *more) == 0
    text = capsys.readouterr().out
    assert "there is no data set 'nowhere'" in text and "50304 assumed" in text and "total 5 steps" in text
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_a_config_by_its_name(tmp_path, capsys, monkeypatch):
    """Found in the repository from any folder, its data commands too."""
    monkeypatch.chdir(tmp_path)
    assert train.main(["configs/quickstart.py", "--dry_run=True"]) == 0
    assert "prepare: python data/pysrc/prepare.py" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "more, error, message",
    [
        (("--learningrate=1",), ValueError, "'learningrate' is not a field of Config"),
        (("--lr=fast",), ValueError, "lr is 'fast'; it must be a number"),
        (("--tokens_per_step=384",), ValueError, r"stages\[4\].seq_len|seq_len is 128|a divisor"),
        (("--dataset=nowhere",), ValueError, "there is no data set 'nowhere'"),
        (("--vocab_size=200",), ValueError, "vocab_size: 200 is less than .*257"),
        (("--init_from=nowhere",), ValueError, "init_from: nowhere is neither a run"),
        (("--device=cuda",), ValueError, "device is 'cuda', but torch sees no GPU"),
    ],
)
def test_bad_input(toy, tmp_path, monkeypatch, more, error, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "384" in more[0]:
        more = ("--tokens_per_step=384", "--stage_steps=1")
        message = "seq_len is"
        stages = [Stage(steps=1, seq_len=256, attention="dense")]
        more = (with_stages(tmp_path / "c.py", *stages), *more)
    with pytest.raises(error, match=message) as caught:
        run(toy, tmp_path / "run", *more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_sequences_that_ranks_cannot_share(toy, tmp_path):
    """Said before anything is read, made or trained; at 128 a step has two sequences."""
    config = load_config(arguments(toy, tmp_path / "run", "--dataset=nowhere"))
    for size, message in ((3, "seq_len 32 makes 8 sequences a step, which 3"), (4, "seq_len 128 makes 2")):
        with pytest.raises(ValueError, match=message):
            train.Trainer(config, one_process(size))
    assert not (tmp_path / "run").exists()


# --- starting from other weights ---


def test_init_from_a_run(toy, finished, tmp_path, capsys):
    trainer = trainer_of(toy, tmp_path / "run", f"--init_from={finished}", "--lr=0.5", "--seed=3")
    assert same_bits(weights(trainer), checkpoint(finished)["model"])
    assert trainer.step == 0 and not trainer.optimizers[0].state
    trainer.world.lock.close()
    assert f"weights from {finished}" in capsys.readouterr().out
    # Only a fresh run starts from them: continuing takes what it saved itself.
    assert run(toy, tmp_path / "run", f"--init_from={finished}", "--stage_steps=1", *QUIET) == 0
    again = trainer_of(toy, tmp_path / "run", f"--init_from={finished}", "--stage_steps=1", *QUIET)
    assert same_bits(weights(again), checkpoint(tmp_path / "run")["model"]) and again.step == 5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_proxy", [True, False])
def test_init_from_qwen3(toy, tmp_path, capsys, tied, with_proxy):
    shape = (f"--tie_embeddings={tied}", "--vocab_size=320")
    source = trainer_of(toy, tmp_path / "a", *shape, "--seed=5")
    state = weights(source)
    kept = state if with_proxy else parts(state)[0]
    model_file.save_qwen3(kept, source.config, tmp_path / "qwen", 10_000.0, 128)
    capsys.readouterr()
    trainer = trainer_of(toy, tmp_path / "b", *shape, f"--init_from={tmp_path / 'qwen'}")
    text = capsys.readouterr().out
    fresh = weights(trainer_of(toy, tmp_path / "c", *shape))
    want = {**fresh, **kept}
    assert same_bits(weights(trainer), want)
    assert ("8 proxy tensors start fresh" in text) == (not with_proxy)


def test_init_from_what_does_not_fit(toy, finished, tmp_path):
    with pytest.raises(ValueError, match=r"init_from: .*\(96, 32\) in .*\(64, 32\) here|init_from: .* here"):
        trainer_of(toy, tmp_path / "run", f"--init_from={finished}", "--d_mlp=96")
    with pytest.raises(ValueError, match="init_from: .* lacks"):
        trainer_of(toy, tmp_path / "run", f"--init_from={finished}", "--n_layer=3")
    source = trainer_of(toy, tmp_path / "a")
    model_file.save_qwen3(weights(source), source.config, tmp_path / "qwen", 10_000.0, 128)
    qwen = f"--init_from={tmp_path / 'qwen'}"
    with pytest.raises(ValueError, match=r"init_from: .*set --d_mlp=64 --rope_theta=10000\.0"):
        trainer_of(toy, tmp_path / "run", qwen, "--d_mlp=96", "--rope_theta=500")
    (tmp_path / "qwen" / "model.safetensors").unlink()
    (tmp_path / "qwen" / "proxy.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\*\.safetensors"):
        trainer_of(toy, tmp_path / "run", qwen)


# --- what a step costs ---


def pairs_one_by_one(batch, block, top_k):
    seen = selected = 0
    for b, row in enumerate(batch.tokens.tolist()):
        for t in range(len(row)):
            first = 0 if batch.doc_start_block is None else int(batch.doc_start_block[b, t // block]) * block
            seen += t - first + 1
            local = t % block + 1
            earlier = t // block - first // block
            selected += local + block * min(earlier, top_k // block - 1)
    return seen, selected


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("top_k", [8, 16, 40, 512])
def test_visible_pairs(toy, tmp_path, masked, top_k):
    trainer = trainer_of(toy, tmp_path / "run", f"--top_k={top_k}")
    batch = trainer.loader.step(1, 128, masked)
    want = pairs_one_by_one(batch, 8, top_k)
    assert train.visible_pairs(batch, trainer.config) == want
    assert (want[0] == want[1]) == (top_k == 512)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "attention, dense_layers", [("dense", 0), ("warmup", 0), ("sparse", 0), ("sparse", 1)]
)
def test_step_flops(toy, tmp_path, attention, dense_layers, tied):
    more = (f"--dense_layers={dense_layers}", f"--tie_embeddings={tied}")
    trainer = trainer_of(toy, tmp_path / "run", *more)
    batch = trainer.loader.step(1, 128, True)
    seen, selected = pairs_one_by_one(batch, 8, 16)
    total = 6 * 256 * 320 * 32  # the head
    for layer in range(2):
        proxy = attention != "dense" and layer >= dense_layers
        matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
        sparse = proxy and attention == "sparse"
        total += 6 * 256 * matrices + (4 + 10) * 8 * 4 * (selected if sparse else seen)
        total += 4 * 256 * (32 * 16 + 32 * 8) * proxy  # its input has no gradient
        if sparse:  # select, then normalise and learn over what was selected
            total += 8 * 2 * (2 * seen + (2 + 6) * selected)
        elif proxy:
            total += 8 * 2 * (2 + 6) * seen
    stage = Stage(steps=1, seq_len=128, attention=attention)
    assert train.step_flops(trainer.model, batch, stage) == pytest.approx(total, rel=1e-12)
    if attention == "warmup":
        frozen = dataclasses.replace(stage, freeze_backbone=True)
        learns = 2 - dense_layers
        head = 256 * 320 * 32
        backbone = (
            2 * (head + 2 * 256 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)) + 2 * 4 * 8 * 4 * seen
        )
        proxy = learns * (4 * 256 * (32 * 16 + 32 * 8) + 8 * 2 * (2 + 6) * seen)
        assert train.step_flops(trainer.model, batch, frozen) == pytest.approx(backbone + proxy, rel=1e-12)


# --- memory ---


def bytes_kept(config, attention, activations, dtype, compiles, tokens):
    """What autograd saves of a layer's forward, by storages, without the model's own weights."""
    torch._dynamo.reset()
    model = model_file.Transformer(config)
    model.compute_dtype = dtype
    if compiles:  # inductor's choice of what to keep, without inductor
        model.compile_rows(backend="aot_eager_decomp_partition")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    x = torch.randn(1, tokens, config.d_model, dtype=dtype, requires_grad=True)
    table = model_file.rope_table(torch.arange(tokens)[None], config.head_dim, 1e4)
    cos, sin = (y.flatten(0, 1) for y in table)
    own |= {y.untyped_storage().data_ptr() for y in (cos, sin)}
    kept = {}

    def pack(y):
        storage = y.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return y

    context = model_file.Context(cos, sin, attention, activations)
    probe = torch.zeros(config.n_proxy_head, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        model.model["layers"][0](x, context, probe)
    return sum(kept.values())


@pytest.mark.parametrize("attention", ["dense", "sparse"])
@pytest.mark.parametrize("kept", ["all", "attention", "input"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiles", [True, False])
def test_what_layers_keep_is_as_predicted(attention, kept, dtype, compiles):
    config = Config(
        **{"n_layer": 1, "d_model": 512, "n_head": 8, "n_kv_head": 2, "n_proxy_head": 2, "head_dim": 64},
        **{"d_mlp": 1408, "vocab_size": 320, "block_size": 32, "top_k": 256, "row_chunk": 128},
        micro_batch_tokens=512,
        stages=[Stage(steps=1, seq_len=512, attention=attention)],
    )
    got = bytes_kept(config, attention, kept, dtype, compiles, 512)
    plan = train.plan_memory(config, one_process(), config.stages[0], kept, dtype, compiles)
    exact = kept != "all"
    assert plan.kept * 2**30 == pytest.approx(got, rel=0.02 if exact else 0.04 if compiles else 0.15)
    torch._dynamo.reset()


MILLION = {"n_layer": 24, "d_model": 1024, "n_head": 16, "n_kv_head": 4, "n_proxy_head": 4, "head_dim": 128}
MILLION |= {"d_mlp": 2816, "vocab_size": 50304, "micro_batch_tokens": 2**16, "tokens_per_step": 2**20}


@pytest.mark.parametrize(
    "gib, want",
    [
        (139, ["all", "attention", "input"]),
        (76, ["attention", "attention", "offload"]),
        (10, [None] * 3),
    ],
)
def test_the_first_that_fits(gib, want, capsys, monkeypatch):
    """Predictions for a large model as for a GPU, whose attention works in little here."""
    stages = [Stage(steps=1, seq_len=2**n, attention="sparse") for n in (13, 17, 20)]
    config = Config(**MILLION, stages=stages)
    world = SimpleNamespace(device=torch.device("cuda"), size=1, say=print)
    monkeypatch.setattr(train.msa, "backward_workspace", lambda **_: 8 * 2**30)
    for index, kept in enumerate(want):
        if kept is None:
            message = rf"^stages\[{index}\] .*'offload'.* there are {gib}\.0 GiB.*or a shorter seq_len$"
            with pytest.raises(ValueError, match=message):
                train.choose_activations(config, world, index, (gib, 200), torch.bfloat16, True)
            continue
        plan = train.choose_activations(config, world, index, (gib, 200), torch.bfloat16, True)
        assert plan.activations == kept and plan.total < 0.95 * gib
        said = capsys.readouterr().out
        assert f"stage {index} keeps {kept!r} for backward (the first that fits 95% of {gib}.0 GiB" in said
        assert (plan.host > 40) == (kept == "offload") == ("host memory" in said)
    with pytest.raises(ValueError, match=r"and 40\.0 GiB of host memory"):
        config.activations = "offload"
        train.choose_activations(config, world, 2, (gib, 40), torch.bfloat16, True)


def test_a_rank_plans_for_its_own_sequences(monkeypatch):
    """Not for more than a step has; and with FSDP for what it gathers."""
    stage = Stage(steps=1, seq_len=512, attention="sparse")
    config = Config(**MILLION | {"micro_batch_tokens": 8192, "tokens_per_step": 4096}, stages=[stage])
    monkeypatch.setattr(train.msa, "backward_workspace", lambda **_: 0)
    tokens = [train.forward_tokens(config, stage, ranks) for ranks in (1, 2, 8, 16)]
    assert tokens == [4096, 2048, 512, 512]
    one, two = (train.plan_memory(config, one_process(n), stage, "all", torch.bfloat16, True) for n in (1, 2))
    assert one.states / 2 < two.states < one.states and two.kept == pytest.approx(one.kept / 2, rel=0.3)
    config.micro_batch_tokens = 512
    several = train.plan_memory(config, one_process(2), stage, "all", torch.bfloat16, True)
    assert several.states == pytest.approx(two.states + one.states / 4)  # of 16 bytes 4 are gradients


def test_advice_is_what_helps(monkeypatch):
    """Where the logits are what is large, neither layers nor their chunks are named."""
    stage = Stage(steps=1, seq_len=512, attention="sparse")
    more = {"n_layer": 1, "vocab_size": 2**20, "micro_batch_tokens": 512, "loss_chunk": 512}
    config = Config(**MILLION | more, stages=[stage])
    monkeypatch.setattr(train.msa, "backward_workspace", lambda **_: 0)
    plan = train.plan_memory(config, one_process(), stage, "input", torch.bfloat16, True)
    advice = train.needs_less(config, one_process(), stage, plan, torch.bfloat16, True)
    assert re.fullmatch(r"--loss_chunk=128 \([\d.]+ GiB\), more ranks, or a shorter seq_len", advice)


def test_memory_that_a_container_may_take(tmp_path, monkeypatch):
    system = train.host_memory_left()
    assert system > 2**28
    monkeypatch.setattr(train, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 300\ninactive_file 400\n")
    assert train.host_memory_left() == pytest.approx(system, rel=0.5)
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    assert train.host_memory_left() == 2**20 - 300
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("7000\n")
    (tmp_path / "memory" / "memory.stat").write_text("cache 1\n")
    assert train.host_memory_left() == 0


def test_bases_of_the_million_token_config():
    """Above the bound that its comment names."""
    for stage in load_config([str(ROOT / "configs" / "1m_ctx.py")]).stages:
        assert stage.rope_theta >= 0.0424 * stage.seq_len**1.628


def test_what_does_not_fit_is_refused_before_anything_is_written(toy, tmp_path):
    with pytest.raises(
        ValueError, match=r"^stages\[0\] .*does not fit.*there are 0\.0 GiB.*a shorter seq_len"
    ):
        run(toy, tmp_path / "run", "--memory_limit_gib=0.0001")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_profile(toy, tmp_path, capsys):
    """The second step of each stage, which leaves no tokens a second; on a CPU no kernel shows."""
    out = tmp_path / "run"
    assert run(toy, out, "--profile=True", "--stage_steps=2", *QUIET) == 0
    for stage in range(5):
        assert (out / f"trace_{stage}.json.gz").stat().st_size > 1000
        text = (out / f"profile_{stage}.txt").read_text()
        assert text.startswith(f"step {2 * stage + 2}, Stage(") and "nothing ran on a GPU" in text
        assert text in capsys.readouterr().out or stage
    speeds = [r["tokens_per_second"] for r in metrics(out, "train")]
    assert [s is None for s in speeds] == [False, True] * 5


# --- torch.compile, with a backend that costs little ---


def compile_cheaply(patch):
    """Without inductor; returns the list that every compiled graph is put into."""
    graphs, aot_eager = [], torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compile = torch.compile
    patch.setattr(torch, "compile", lambda f, **options: compile(f, backend=backend, **options))
    return graphs


@pytest.mark.parametrize("activations", ["all", "auto", pytest.param("input", marks=pytest.mark.slow)])
def test_compiles_once_a_run(toy, tmp_path, monkeypatch, activations):
    """Whatever the layer, the stage, the length, the place in the run, and evaluations in between."""
    graphs, at_step = compile_cheaply(monkeypatch), {}
    keep = lambda trainer, *_: at_step.update({trainer.step: len(graphs)})  # noqa: E731
    wrapped(monkeypatch, train.Trainer, "train_step", after=keep)
    file = with_stages(
        tmp_path / "c.py",
        Stage(steps=4, seq_len=32, attention="warmup"),
        Stage(steps=4, seq_len=64, attention="sparse", rope_theta=5e4),
    )
    more = ("--eval_interval=2", "--kl_interval=2", "--micro_batch_tokens=128", "--row_chunk=64")
    more += (f"--activations={activations}",)
    if activations == "auto":  # of a GPU on which the second stage fits no more
        choose = train.choose_activations

        def switching(config, world, index, *rest):
            plan = choose(config, world, index, *rest)
            return plan._replace(activations=("all", "input")[index])

        monkeypatch.setattr(train, "choose_activations", switching)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert run(toy, tmp_path / "run", file, "--compile=True", *more) == 0
    # Projections, the rest of a layer and the loss; if nothing but inputs is kept, the proxy's projections
    # alone, for the selection: all of it before the first step.
    graphs_of = {"all": 4, "input": 7, "auto": 7}[activations]
    assert at_step == dict.fromkeys(range(8), graphs_of)
    assert len({r["compiled"] for r in metrics(tmp_path / "run", "train")}) == 1
    assert run(toy, tmp_path / "eager", file, *more) == 0
    for key in ("loss", "kl", "grad_norm"):
        got, want = ([r[key] for r in metrics(tmp_path / n, "train")] for n in ("run", "eager"))
        assert got == pytest.approx(want, rel=1e-4)


# --- wandb ---


def wandb_records(path):
    """The records of an offline run: a LevelDB log, in blocks of 32768 bytes."""
    from wandb.proto import wandb_internal_pb2

    raw, at, whole = path.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", raw, at + 4)
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_offline(toy, tmp_path):
    """No key and no network: a run on disk, of one id over a resume, with the tokens as its axis."""
    pytest.importorskip("wandb")
    (tmp_path / "home").mkdir()
    stages = [Stage(steps=2, seq_len=64, attention="sparse"), Stage(steps=4, seq_len=64, attention="sparse")]
    files = [with_stages(tmp_path / f"{i}.py", stage) for i, stage in enumerate(stages)]
    more = ("--wandb=True", "--eval_interval=4", "--kl_interval=4", "--wandb_name=toy")
    code = "import train\n" + "".join(
        f"train.main({arguments(toy, tmp_path / 'run', file, *more)!r})\n" for file in files
    )
    env = environment(HOME=str(tmp_path / "home"), NETRC=str(tmp_path / "home" / "netrc"))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wandb: offline (there is no API key") == 2
    assert "deprecated" not in done.stderr
    name = (tmp_path / "run" / "wandb_id").read_text().split()[0]
    runs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 2 and all(p.name == f"run-{name}.wandb" for p in runs)
    for path, steps in zip(runs, ([1, 2], [3, 4]), strict=True):
        axes, rows = {}, []
        for record in wandb_records(path):
            if record.HasField("metric"):
                axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            if record.HasField("history"):
                items = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
                rows.append(items)
            if record.HasField("run"):
                assert record.run.run_id == name and record.run.display_name == "toy"
        assert axes.get("*") == "tokens" and "tokens" in axes
        assert [json.loads(r["step"]) for r in rows if "train/loss" in r] == steps
        for r in rows:
            assert json.loads(r["tokens"]) == 256 * json.loads(r["step"])
        keys = set().union(*rows)
        wanted = {"train/kl", "train/grad_norm", "train/lr", "val/loss", "val/stage_loss"}
        assert wanted | {"proxy/block_recall"} <= keys
        assert any(k.startswith("proxy_layers/block_recall") for k in keys)
    want = {r["step"]: r["loss"] for r in metrics(tmp_path / "run", "train")}
    assert json.loads(rows[-1]["step"]) == 4 and len(want) == 4


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_wandb_without_network(toy, tmp_path, monkeypatch, capsys, mode):
    """A key but no answer: what is left of the attempt is cleared away, and the run goes offline."""
    calls = []

    class CommError(Exception):
        pass

    def init(*, mode, id, **options):
        calls.append((mode, id))
        if mode == "online":
            raise CommError("nobody answers")
        nothing = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(define_metric=nothing, log=nothing, finish=nothing)

    fake = SimpleNamespace(
        Image=lambda picture: picture,
        init=init,
        login=lambda **options: True,
        teardown=lambda: calls.append("teardown"),
        Settings=dict,
        errors=SimpleNamespace(CommError=CommError),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    assert run(toy, tmp_path / "run", "--wandb=True", "--stage_steps=1", *QUIET) == 0
    name = (tmp_path / "run" / "wandb_id").read_text().split()[0]
    if mode:
        assert calls == [("disabled", name)]
        assert "wandb: disabled (WANDB_MODE says so)" in capsys.readouterr().out
    else:
        assert calls == [("online", name), "teardown", ("offline", name)]
        assert "wandb: offline (no network: nobody answers)" in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_with_a_key_and_no_network(toy, tmp_path):
    """The same with wandb itself, which takes its time."""
    pytest.importorskip("wandb")
    lost = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    more = ("--wandb=True", "--stage_steps=1", *QUIET)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments(toy, tmp_path / "run", *more)],
        env=environment(**lost),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "wandb: offline (no network: " in done.stdout
    (found,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    rows = [r for r in wandb_records(found) if r.HasField("history")]
    assert len(rows) == 5


# --- ranks ---


def test_torchrun_with_one_process(toy, tmp_path, whole):
    """From another folder; the same bits as without torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += [str(ROOT / "train.py"), *arguments(toy, tmp_path / "run", *QUIET)]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", whole(*QUIET))
    assert is_png(tmp_path / "run" / "curves.png")


def in_ranks(folder):
    """What every rank does under torchrun; exit codes and errors go to <folder>/rank<r>.json as they come."""
    dist.init_process_group("gloo")
    rank, codes = dist.get_rank(), {}
    torch.set_num_threads(1)
    os.fsync = lambda handle: None
    train.draw_curves = lambda out_dir: Path(out_dir) / "curves.png"
    train.dist.destroy_process_group = lambda: None  # one group for all runs

    def go(name, *more, out=None):
        before = {s: signal.getsignal(s) for s in train.STOP_SIGNALS}
        try:
            codes[name] = run(folder, folder / "ranks" / (out or name), *more, "--micro_batch_tokens=64")
        except (RuntimeError, ValueError) as error:
            codes[name] = str(error)
        for number, handler in before.items():
            signal.signal(number, handler)
        (folder / f"rank{rank}.json").write_text(json.dumps(codes))

    go("adamw")
    go("muon", "--optimizer=muon", *QUIET)
    go("bfloat16", "--dtype=bfloat16", *QUIET)
    go("offload", "--activations=offload", "--row_chunk=24", *QUIET)
    with pytest.MonkeyPatch.context() as patch:
        graphs = compile_cheaply(patch)
        go("compiled", str(folder / "sparse.py"), "--compile=True", *QUIET)
        codes["graphs"] = len(graphs)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            stop_at(patch, 6)
        go("stopped")
    if rank == 0:
        shutil.copytree(folder / "ranks" / "stopped", folder / "ranks" / "left")
    go("continued", out="stopped")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 2)
        go("both", *QUIET)
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, 4, 8, rank=1)
        go("spoiled", *QUIET)
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, *range(20), rank=1)
        go("hopeless", "--max_skipped_steps=2", *QUIET)
    go("uneven", "--eval_tokens=32")  # one sequence: the second rank has none
    for name, spoiled, at in (("spoiled gradient", spoil_gradient, 6), ("spoiled weights", spoil_weights, 4)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                spoiled(patch, at)
            go(name, "--max_skipped_steps=2", *QUIET)
    if rank == 1:  # the one that reads it
        write(folder / "other" / "train.bin", documents(60, seed=9))
        shutil.copy(folder / "data" / "val.bin", folder / "other")
    with pytest.MonkeyPatch.context() as patch:
        leave = train.Watch.leave  # which would end the ranks here
        patch.setattr(train.Watch, "leave", lambda watch, failed: leave(watch, False))
        go("other config", *(["--lr=0.5", "--max_skipped_steps=7"] if rank else []))
        go("other data", *([f"--dataset={folder / 'other'}"] if rank else []))
    # Last, for a disagreement between the ranks would hang here: rank 1 hears of it after they agreed.
    for name, owner, what in (("late", train.World, "sum"), ("later", torch.optim.AdamW, "step")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                calls = itertools.count(1)
                wrapped(patch, owner, what, after=lambda *_: terminate() if next(calls) == 3 else None)  # noqa: B023
            go(name, *QUIET)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two ranks, started once."""
    folder = make_toy(tmp_path_factory.mktemp("ranks"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen(
        [*command, __file__, str(folder)],
        env=environment(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text = ""
    try:
        text, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        text, _ = process.communicate()
    finally:
        process.kill()
    files = [folder / f"rank{r}.json" for r in range(2)]
    codes = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    return SimpleNamespace(folder=folder, out=folder / "ranks", codes=codes, text=text)


def codes_of(ranks, name):
    assert all(name in codes for codes in ranks.codes), ranks.text[-3000:]
    return [codes[name] for codes in ranks.codes]


def assert_close_runs(got, want, rel, kinds=("train", "val", "proxy")):
    a, b = untimed(got), untimed(want)
    assert [(r["kind"], r["step"]) for r in a] == [(r["kind"], r["step"]) for r in b]
    for x, y in zip(a, b, strict=True):
        if x["kind"] in kinds:
            assert x.keys() == y.keys()
            for key, value in y.items():
                where = f"{key} of step {y['step']}"
                if isinstance(value, float):
                    assert x[key] == pytest.approx(value, rel=rel, abs=1e-7), where
                elif isinstance(value, list):
                    assert x[key] == pytest.approx(value, rel=rel), where
                elif not isinstance(value, dict):
                    assert x[key] == value, where


def test_two_ranks_equal_one(ranks, toy, whole):
    assert codes_of(ranks, "adamw") == [0, 0]
    assert_close_runs(ranks.out / "adamw", whole(), rel=1e-4, kinds=("train", "val"))
    # Before the differences in rounding have grown through the optimizer:
    first = [[r for r in metrics(out, "train") if r["step"] <= 4] for out in (ranks.out / "adamw", whole())]
    for key in ("loss", "kl", "grad_norm", "proxy_grad_norm", "proxy_update_norm"):
        got, want = ([r[key] for r in lines if r[key] is not None] for lines in first)
        assert got == pytest.approx(want, rel=1e-5), key


def test_two_ranks_with_muon(ranks, whole):
    assert codes_of(ranks, "muon") == [0, 0]
    want = whole("--optimizer=muon", *QUIET)
    assert_close_runs(ranks.out / "muon", want, rel=0.1)
    got, want = ([r["loss"] for r in metrics(out, "train")] for out in (ranks.out / "muon", want))
    assert got == pytest.approx(want, rel=5e-3)


def test_two_ranks_in_bfloat16(ranks, whole):
    assert codes_of(ranks, "bfloat16") == [0, 0]
    want = whole("--dtype=bfloat16", *QUIET)
    got, want = ([r["loss"] for r in metrics(out, "train")] for out in (ranks.out / "bfloat16", want))
    assert got == pytest.approx(want, rel=0.02)


def test_two_ranks_that_keep_little(ranks, whole):
    """FSDP gathers and scatters the same where layers are computed again, a chunk at a time."""
    assert codes_of(ranks, "offload") == [0, 0]
    first = [
        [r for r in metrics(out, "train") if r["step"] <= 4]
        for out in (ranks.out / "offload", whole("--row_chunk=24", *QUIET))
    ]
    for key in ("loss", "kl", "grad_norm", "last_layer_grad_norm", "proxy_grad_norm"):
        got, want = ([r[key] for r in lines if r[key] is not None] for lines in first)
        assert got == pytest.approx(want, rel=1e-5), key


def test_two_ranks_with_compiled_layers(ranks, toy, whole):
    assert codes_of(ranks, "compiled") == [0, 0] and codes_of(ranks, "graphs") == [4, 4]
    assert_close_runs(ranks.out / "compiled", whole(str(toy / "sparse.py"), *QUIET), rel=1e-4)


def test_checkpoint_of_two_ranks(ranks, finished):
    """Whole tensors by their names, as one process writes them."""
    codes_of(ranks, "adamw")
    two, one = checkpoint(ranks.out / "adamw"), checkpoint(finished)
    for key in ("model", "optimizer"):
        assert two[key].keys() == one[key].keys()
    for name, w in one["model"].items():
        assert two["model"][name].shape == w.shape
        assert {k: v.shape for k, v in two["optimizer"][name].items()} == {
            k: v.shape for k, v in one["optimizer"][name].items()
        }


def test_two_ranks_stop_and_continue(ranks):
    """A signal that one rank gets stops both at one step."""
    assert codes_of(ranks, "stopped") == [0, 0]
    assert checkpoint(ranks.out / "left")["step"] == 6
    assert codes_of(ranks, "continued") == [0, 0]
    assert_same_run(ranks.out / "stopped", ranks.out / "adamw")


def test_one_process_continues_two(ranks, tmp_path):
    codes_of(ranks, "stopped")
    shutil.copytree(ranks.out / "left", tmp_path / "run")
    assert run(ranks.folder, tmp_path / "run", "--micro_batch_tokens=64") == 0
    assert_close_runs(tmp_path / "run", ranks.out / "adamw", rel=1e-4, kinds=("train", "val"))


def test_two_ranks_get_the_same_signal(ranks):
    assert codes_of(ranks, "both") == [0, 0]
    assert checkpoint(ranks.out / "both")["step"] == 2


def test_non_finite_on_one_rank(ranks, toy, tmp_path, monkeypatch):
    assert codes_of(ranks, "spoiled") == [0, 0]
    spoil(monkeypatch, 4, 8)
    assert run(toy, tmp_path / "run", *QUIET) == 0
    assert_close_runs(ranks.out / "spoiled", tmp_path / "run", rel=1e-4)
    assert metrics(ranks.out / "spoiled")[-1]["skipped"] == 2
    lines = metrics(ranks.out / "spoiled", "skipped")
    assert [(r["step"], r["ranks"]) for r in lines] == [(5, [1]), (9, [1])]
    assert "tokens 1,024 to 1,279 of the stream, in epoch 0; rank 1's own loss, over" in ranks.text
    assert all("2 steps in a row" in error for error in codes_of(ranks, "hopeless"))


def test_non_finite_gradient_or_weight_of_one_rank(ranks):
    """A gradient is NaN once, a weight for ever."""
    assert codes_of(ranks, "spoiled gradient") == [0, 0]
    assert [r["step"] for r in metrics(ranks.out / "spoiled gradient", "skipped")] == [7]
    assert all("not finite after step 5" in error for error in codes_of(ranks, "spoiled weights"))
    assert [r["step"] for r in metrics(ranks.out / "spoiled weights", "skipped")] == [5]
    assert all(w.isfinite().all() for w in checkpoint(ranks.out / "spoiled weights")["model"].values())


def test_uneven_validation(ranks, toy, tmp_path):
    assert codes_of(ranks, "uneven") == [0, 0]
    assert run(toy, tmp_path / "run", "--eval_tokens=32") == 0
    assert_close_runs(ranks.out / "uneven", tmp_path / "run", rel=1e-4, kinds=("train", "val"))


def test_ranks_that_disagree(ranks):
    """Refused at the start, by both, before anything is written."""
    for error in codes_of(ranks, "other config"):
        assert error.startswith("the ranks disagree: ")
        assert "lr is 0.01 on rank 0, 0.5 on rank 1; max_skipped_steps is 5 on rank 0, 7 on rank 1" in error
    for error in codes_of(ranks, "other data"):
        assert error.startswith("the ranks disagree: the data's hash is ")
    assert not (ranks.out / "other config").exists() and not (ranks.out / "other data").exists()


@pytest.mark.parametrize("name", ["late", "later"])
def test_a_signal_after_the_ranks_agreed(ranks, name):
    assert codes_of(ranks, name) == [0, 0]
    assert 3 <= checkpoint(ranks.out / name)["step"] <= 4


if __name__ == "__main__":
    in_ranks(Path(sys.argv[1]))
