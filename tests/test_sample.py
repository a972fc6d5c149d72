"""Sampling: the cache against the full forward, the draw against a naive one, and sample.py end to end."""

import io
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import model as m
import sample
from configs import Config, Stage, to_dict
from data import get_tokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCAB, EOS = 320, 256  # the rows of the embedding; ids from 257 on are padding
TINY = {
    "n_layer": 3,
    "d_model": 32,
    "n_head": 4,
    "n_kv_head": 2,
    "n_proxy_head": 2,
    "head_dim": 8,
    "d_mlp": 48,
    "vocab_size": VOCAB,
    "rope_theta": 1234.5,
    "block_size": 4,
    "top_k": 8,
    "tokens_per_step": 64,
}
BOTH = pytest.mark.parametrize("attention", ["sparse", "dense"])


def gen(seed):
    return torch.Generator().manual_seed(seed)


def build(seed=0, **changes):
    """A model whose weights make every part matter: sharp attention, norms that differ."""
    model = m.Transformer(Config(**(TINY | changes)))
    g = gen(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.uniform_(0.5, 2.0, generator=g)
            else:
                param.normal_(0, param.shape[1] ** -0.5, generator=g)
    return model.eval()


def draw(batch, length, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=gen(100 + seed))


@torch.no_grad()
def full_logits(model, tokens, attention, **kwargs):
    """Logits at every position by one forward without a cache (B, S, V)."""
    seen = []
    handle = model.model["layers"][-1].register_forward_hook(lambda module, args, out: seen.append(out[0]))
    model(tokens, attention=attention, **kwargs)
    handle.remove()
    return model.lm_head(model.model["norm"](seen[0]))


def new_cache(model, batch, size):
    return m.KVCache(model.config, batch, size, torch.device("cpu"), torch.float32)


def new_cache_of(tokens, model):
    """One that holds some, with room for more."""
    cache = new_cache(model, 2, tokens + 10)
    with torch.no_grad():
        model(draw(2, tokens), attention="dense", cache=cache)
    return cache


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


# ---------------------------------------------------------------------------------------------------------
# the cache


@BOTH
@pytest.mark.parametrize("prompt", [1, 8, 17])
@pytest.mark.parametrize("block,slots,dense_layers", [(4, 2, 0), (8, 2, 1), (5, 3, 0), (4, 1, 0)])
@torch.no_grad()
def test_decoding_gives_the_logits_of_the_full_forward(attention, prompt, block, slots, dense_layers):
    model = build(block_size=block, top_k=slots * block, dense_layers=dense_layers)
    tokens = draw(2, 60)
    want = full_logits(model, tokens, attention, rope_theta=77.0)
    cache = new_cache(model, 2, 60)
    for begin, end in [(0, prompt), *((t, t + 1) for t in range(prompt, 60))]:
        out = model(tokens[:, begin:end], attention=attention, rope_theta=77.0, cache=cache)
        close(out.logits, want[:, end - 1])
        assert out.nll is None and cache.lengths.tolist() == [end, end]


def test_the_modes_differ_in_what_is_tested_above():
    model, tokens = build(), draw(2, 60)
    sparse, dense = (full_logits(model, tokens, attention) for attention in ("sparse", "dense"))
    assert ((sparse - dense).abs().amax(-1)[:, 8:] > 0.01).float().mean() > 0.9


@BOTH
@pytest.mark.parametrize("lengths", [[1, 3, 8, 9, 25], [1, 1, 1], [4, 1]])
@torch.no_grad()
def test_prompts_of_different_lengths_in_one_batch(attention, lengths):
    model = build()
    steps, longest = 24, max(lengths)
    tokens = draw(len(lengths), longest + steps)
    cache = new_cache(model, len(lengths), longest + steps)
    prompts = tokens[:, :longest].clone()
    for row, length in zip(prompts, lengths, strict=True):
        row[length:] = 7  # whatever pads on the right
    got = [
        model(prompts, attention=attention, cache=cache, prompt_lengths=torch.tensor(lengths)).logits.clone()
    ]
    for i in range(steps):
        at = torch.tensor(lengths) + i
        assert cache.lengths.tolist() == at.tolist()
        following = tokens[torch.arange(len(lengths)), at][:, None]
        got.append(model(following, attention=attention, cache=cache).logits)
    for row, length in enumerate(lengths):
        want = full_logits(model, tokens[row : row + 1], attention)[0]
        for i, logits in enumerate(got):
            close(logits[row], want[length - 1 + i])


@BOTH
@pytest.mark.parametrize("piece", [4, 8, 12, 1000])
@pytest.mark.parametrize("lengths", [[25, 24, 3, 1], [9], [17], [5, 5]])
@torch.no_grad()
def test_prompts_in_pieces(attention, piece, lengths, monkeypatch):
    """Of whole blocks of 4; a prompt may end in any of them."""
    model, calls = build(), []
    monkeypatch.setattr(sample, "PIECE", piece * len(lengths))
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    tokens, n = draw(len(lengths), 40), torch.tensor(lengths)
    cache = new_cache(model, len(lengths), 40)
    shared = {"attention": attention, "cache": cache}
    got = sample.prefill(model, tokens[:, : max(lengths)], n, **shared)
    assert sum(calls) == max(lengths) and max(calls) <= piece + 1
    assert cache.lengths.tolist() == lengths and cache.longest == max(lengths)
    following = tokens[torch.arange(len(lengths)), n][:, None]
    after = model(following, **shared).logits
    for row, length in enumerate(lengths):
        want = full_logits(model, tokens[row : row + 1], attention)[0]
        close(got[row], want[length - 1])
        close(after[row], want[length])


@torch.no_grad()
def test_a_dense_prompt_may_be_continued_sparsely():
    model, tokens = build(n_layer=1), draw(2, 40)  # in the first layer keys do not depend on attention
    want = full_logits(model, tokens, "sparse")
    cache = new_cache(model, 2, 40)
    model(tokens[:, :30], attention="dense", cache=cache)
    for t in range(30, 40):
        close(model(tokens[:, t : t + 1], attention="sparse", cache=cache).logits, want[:, t])


@torch.no_grad()
def test_errors_of_the_cache():
    model, tokens = build(), draw(2, 12)
    cache = new_cache(model, 2, 10)
    with pytest.raises(ValueError, match="^tokens: the cache has room for 10 tokens"):
        model(tokens, attention="dense", cache=cache)
    with pytest.raises(ValueError, match="^doc_start_block: "):
        starts = torch.zeros(2, 3, dtype=torch.int32)
        model(tokens[:, :10], attention="dense", cache=cache, doc_start_block=starts)
    model(tokens[:, :9], attention="dense", cache=cache, prompt_lengths=torch.tensor([4, 9]))
    with pytest.raises(ValueError, match=r"^tokens: a piece of 2 tokens begins with a block.* holds 9 a seq"):
        model(tokens[:, :2], attention="dense", cache=new_cache_of(9, model))
    model(tokens[:, :1], attention="dense", cache=cache)
    with pytest.raises(ValueError, match="^tokens: the cache has room for 10 tokens"):
        model(tokens[:, :1], attention="dense", cache=cache)


# ---------------------------------------------------------------------------------------------------------
# drawing


def naive_distribution(logits, temperature, top_k, top_p):
    """What a token's probability is, in plain Python, from the likeliest token down."""
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = ranked[: top_k or len(ranked)]
    weights = {i: math.exp((logits[i] - logits[ranked[0]]) / temperature) for i in kept}
    if top_p is not None:
        total, held, nucleus = sum(weights.values()), 0.0, {}
        for i in kept:
            if held >= top_p * total:
                break
            nucleus[i] = weights[i]
            held += weights[i]
        weights = nucleus
    return {i: w / sum(weights.values()) for i, w in weights.items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k,top_p", [(None, None), (4, None), (1, None), (99, None), (None, 0.6)])
@pytest.mark.parametrize("more_top_p", [None, 0.9])
def test_pick_draws_from_the_right_distribution(temperature, top_k, top_p, more_top_p):
    top_p = top_p or more_top_p
    logits = torch.randn(2, 9, generator=gen(3)) * 1.5
    logits[:, 8] = -math.inf
    n = 20_000
    drawn = sample.pick(logits.repeat_interleave(n, 0), temperature, top_k, top_p, gen(5)).view(2, n)
    for row in range(2):
        want = naive_distribution(logits[row].tolist(), temperature, top_k, top_p)
        want = {i: p for i, p in want.items() if p > 0}
        counts = torch.bincount(drawn[row], minlength=9) / n
        assert not [i for i in range(9) if i not in want and counts[i] > 0]
        for i, p in want.items():
            assert abs(counts[i].item() - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-9, (i, p)


def test_pick_keeps_the_token_that_crosses_top_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()[:, [2, 0, 3, 1]].repeat(4000, 1)
    for top_p, kept in ((0.01, {1}), (0.49, {1}), (0.51, {1, 3}), (0.74, {1, 3}), (1.0, {0, 1, 2, 3})):
        assert set(sample.pick(logits, 1.0, None, top_p, gen(0)).tolist()) == kept


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-9])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_pick_at_the_smallest_temperatures_is_the_likeliest(temperature, cut):
    logits = torch.tensor([[1e4, 2e4, -float("inf"), 1.9e4], [-3.0, -5.0, -2.0, -float("inf")]])
    cut = {"top_k": None, "top_p": None, **cut}
    assert sample.pick(logits, temperature, generator=gen(1), **cut).tolist() == [1, 2]


def test_pick_at_temperature_zero_is_the_likeliest():
    logits = torch.randn(50, 20, generator=gen(0))
    for cut in ({"top_k": None, "top_p": None}, {"top_k": 3, "top_p": 0.5}):
        assert torch.equal(sample.pick(logits, 0, generator=gen(1), **cut), logits.argmax(-1))


def texts(model, prompts, n=30, attention="sparse", **kwargs):
    kwargs = {"rope_theta": None, "vocab_size": 257} | kwargs
    drawn = list(sample.generate(model, prompts, n, attention=attention, **kwargs))
    assert len(drawn) == n and all(t.shape == (len(prompts),) and t.dtype == torch.int64 for t in drawn)
    return torch.stack(drawn, 1).tolist()


PROMPTS = [[5, 9, 200], [11], list(range(1, 20))]


@BOTH
def test_greedy_is_the_argmax_of_the_full_forward(attention):
    model = build()
    got = texts(model, PROMPTS, attention=attention, temperature=0, rope_theta=77.0)
    assert got == texts(model, PROMPTS, attention=attention, temperature=0, rope_theta=77.0, seed=8)
    assert got == texts(model, PROMPTS, attention=attention, top_k=1, temperature=1.3, rope_theta=77.0)
    assert len({tuple(row) for row in got}) == 3 and all(len(set(row)) > 3 for row in got)
    for prompt, row in zip(PROMPTS, got, strict=True):
        tokens = torch.tensor([prompt + row])
        logits = full_logits(model, tokens, attention, rope_theta=77.0)[0, len(prompt) - 1 : -1, :257]
        assert logits.argmax(-1).tolist() == row


def test_the_seed_sets_the_text():
    model = build()
    kwargs = {"temperature": 1.5, "top_p": 0.95}
    first = texts(model, PROMPTS, seed=1, **kwargs)
    torch.manual_seed(99)
    assert texts(model, PROMPTS, seed=1, **kwargs) == first
    assert texts(model, PROMPTS, seed=2, **kwargs) != first


@pytest.mark.parametrize("kwargs", [{"temperature": 0}, {"temperature": 5.0}, {"top_k": 300, "top_p": 1.0}])
def test_padding_of_the_embedding_is_never_drawn(kwargs):
    model = build(tie_embeddings=False)
    with torch.no_grad():  # or else the padding would be nearly all
        model.lm_head.weight[257:] = model.lm_head.weight[:63] * 20
    assert max(map(max, texts(model, PROMPTS, vocab_size=VOCAB, **kwargs))) > 256
    assert max(map(max, texts(model, PROMPTS, **kwargs))) <= 256


@pytest.mark.parametrize("prompts", [[], [[1], []], [[1], [2, 257]], [[-1]]])
def test_prompts_without_tokens_or_outside_the_vocabulary(prompts):
    with pytest.raises(ValueError, match="^prompts: "):
        next(sample.generate(build(), prompts, 3, attention="dense", rope_theta=None, vocab_size=257))


# ---------------------------------------------------------------------------------------------------------
# sample.py


def save_run(folder, model, stages, **changes):
    """A checkpoint as train.py writes it; returns the folder as an argument."""
    config = model.config
    config.stages = stages
    saved = {
        "format": 1,
        "config": to_dict(config),
        "stage": len(stages) - 1,
        "step": 12,
        "skipped": 0,
        "skipped_in_a_row": 0,
        "data": {"hash": "0" * 64, "tokenizer": "bytes", "eos": EOS, "vocab_size": 257},
        "rng": torch.get_rng_state(),
        "model": {n: p.detach().clone() for n, p in model.named_parameters()},
        "optimizer": {},
    }
    folder.mkdir(exist_ok=True)
    torch.save(saved | changes, folder / "checkpoint.pt")
    return f"--out_dir={folder}"


STAGES = [
    Stage(steps=2, seq_len=32, attention="warmup"),
    Stage(steps=10, seq_len=64, attention="sparse", rope_theta=77.0),
]


def successor_model(text: bytes, start: int):
    """A model that goes on from byte `start` with `text` and then EOS; bytes may not come twice."""
    model = build(n_layer=1, d_model=VOCAB, tie_embeddings=False)
    chain = [start, *text, EOS]
    assert len(set(chain)) == len(chain)
    with torch.no_grad():
        model.model["embed_tokens"].weight.copy_(torch.eye(VOCAB))
        for name, param in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                param.zero_()
        for token, following in zip(chain[:-1], chain[1:], strict=True):
            model.lm_head.weight[following, token] = 10.0
    return model


class Recorder(io.StringIO):
    """stdout that remembers what was written between two flushes."""

    def __init__(self):
        super().__init__()
        self.shown = [""]

    def write(self, text):
        self.shown[-1] += text
        return super().write(text)

    def flush(self):
        self.shown.append("")


def test_characters_of_several_tokens_stream_whole_and_eos_stops(tmp_path, monkeypatch, capsys):
    out_dir = save_run(tmp_path, successor_model("€né😀z".encode(), ord("a")), STAGES)
    (tmp_path / "prompt.txt").write_text("naïve € a", encoding="utf-8")
    out = Recorder()
    monkeypatch.setattr(sys, "stdout", out)
    sample.main([out_dir, f"--start=FILE:{tmp_path / 'prompt.txt'}", "--temperature=0", "--num_samples=2"])
    steps = ["naïve € a", "", "€", "n", "", "é", "", "", "", "😀", "z"]  # what each token adds
    assert out.shown == [*steps, "\n" + steps[0], *steps[1:], "\n"]
    err = capsys.readouterr().err
    assert "step 12, sparse attention, 12 prompt tokens, on " in err
    assert err.count("--- 12 tokens in ") == 2  # EOS is a token, and what comes after it is not drawn


@pytest.mark.parametrize(
    "raw,text",
    [
        (b"\xffab\xe2\x82\xac", "\ufffdab€"),  # a broken byte spoils no later character
        (b"a\xe2\x82", "a\ufffd"),
        (b"\xe2\x82a\xf0\x9f\x98\x80", "\ufffda😀"),
        (b"\x80\x80\xc3\xa9", "\ufffd\ufffdé"),
        (b"", ""),
    ],
)
def test_broken_characters_are_replaced(raw, text, capsys):
    tokenizer = get_tokenizer("bytes")
    tokens = (torch.tensor([t]) for t in [*raw, EOS, 65])
    count = sample.stream_text(tokenizer, EOS, list("né".encode()), tokens)
    assert capsys.readouterr().out == f"né{text}\n" and count == len(raw) + 1
    assert next(tokens).item() == 65  # nothing is taken past EOS


@pytest.mark.parametrize("last", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize("asked", [None, "dense", "sparse"])
def test_attention_is_that_of_the_last_stage_unless_asked(last, asked, tmp_path, capsys):
    model = build()
    first = Stage(steps=2, seq_len=32, attention="dense")
    stages = [first, Stage(steps=10, seq_len=64, attention=last, rope_theta=77.0)]
    out_dir = save_run(tmp_path, model, stages)
    start = "0123456789" * 3
    argv = [
        out_dir,
        "--device=cpu",
        f"--start={start}",
        "--max_new_tokens=20",
        "--temperature=1.5",
        "--seed=4",
        "--top_k=9",
    ]
    sample.main(argv + ([f"--attention={asked}"] if asked else []))
    attention = asked or ("sparse" if last == "sparse" else "dense")
    out, err = capsys.readouterr()
    assert f"{attention} attention, 30 prompt tokens" in err
    assert ("has trained the proxy" in err) == (attention == "sparse" and last == "dense")
    kwargs = {"attention": attention, "rope_theta": 77.0, "temperature": 1.5, "seed": 4, "top_k": 9}
    (drawn,) = texts(model, [list(start.encode())], 20, **kwargs)
    drawn = drawn[: drawn.index(EOS)] if EOS in drawn else drawn
    assert out == start + bytes(drawn).decode(errors="replace") + "\n"


def test_samples_differ_and_each_has_its_seed(tmp_path, capsys):
    out_dir = save_run(tmp_path, build(), STAGES)

    def drawn(*argv):
        sample.main([out_dir, "--start=abc", "--max_new_tokens=10", "--temperature=2", *argv])
        return capsys.readouterr().out

    first, second = drawn("--seed=4"), drawn("--seed=5")
    assert first != second and drawn("--seed=4", "--num_samples=2") == first + second


def test_an_empty_prompt_starts_a_document(tmp_path, capsys):
    out_dir = save_run(tmp_path, successor_model(b"abc", EOS - 1), STAGES)
    sample.main([out_dir, "--start=", "--max_new_tokens=3", "--temperature=0"])
    assert "1 prompt tokens" in capsys.readouterr().err


def test_export(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build(dense_layers=1)
    out_dir = save_run(tmp_path / "run", model, STAGES)
    sample.main([out_dir, f"--export={tmp_path / 'qwen3'}"])
    assert str(tmp_path / "qwen3") in capsys.readouterr().out
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3").eval()
    assert theirs.config.max_position_embeddings == 64
    tokens = draw(2, 20)
    with torch.no_grad():  # the last stage's RoPE base
        close(theirs(tokens).logits, full_logits(model, tokens, "dense", rope_theta=77.0))


def test_export_to_a_full_disk(tmp_path, monkeypatch):
    out_dir = save_run(tmp_path / "run", build(), STAGES)
    folder = tmp_path / "qwen3"
    folder.mkdir()
    (folder / "model.safetensors").write_text("what was there")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(OSError, match=f"cannot write {folder}: .*too large"):
            sample.main([out_dir, f"--export={folder}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_text() == "what was there"


@pytest.mark.parametrize(
    "argument,says",
    [
        ("--temperature=-1", "--temperature must be at least 0 and finite, got -1"),
        ("--temperature=nan", "--temperature must be at least 0 and finite, got nan"),
        ("--temperature=inf", "--temperature must be at least 0 and finite, got inf"),
        (f"--seed={2**64}", "--seed must be at least 0 and below 2**63, got 18446744073709551616"),
        ("--seed=-1", "--seed must be at least 0 and below 2**63, got -1"),
        ("--top_k=0", "--top_k must be at least 1, got 0"),
        ("--top_p=0", "--top_p must be above 0 and at most 1, got 0"),
        ("--top_p=1.5", "--top_p must be above 0 and at most 1, got 1.5"),
        ("--max_new_tokens=0", "--max_new_tokens and --num_samples must be at least 1"),
        ("--num_samples=0", "--max_new_tokens and --num_samples must be at least 1"),
        ("--attention=warmup", "'sparse', 'dense'|sparse, dense"),
        ("--device=tpu", "'auto', 'cuda', 'cpu'|auto, cuda, cpu"),
        ("--seed=x", "invalid int value"),
        ("--colour=red", "unrecognized arguments: --colour=red"),
    ],
)
def test_errors_of_arguments_say_what_is_allowed(argument, says, capsys):
    with pytest.raises(SystemExit) as caught:
        sample.main(["--out_dir=nowhere", argument])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and any(s in err for s in says.split("|")), err


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        sample.main(["--out_dir=nowhere", "--device=cuda"])
    assert "--device=cuda" in (err := capsys.readouterr().err) and "auto or cpu" in err


def test_errors_of_files_name_them(tmp_path):
    out_dir = save_run(tmp_path / "run", successor_model(b"bc", ord("a")), STAGES)
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    broken = save_run(tmp_path / "other", build(n_layer=1), STAGES, data={"tokenizer": "gpt5", "eos": 0})
    for argv, says in (
        ([f"--out_dir={tmp_path}"], f"out_dir: {tmp_path} holds no checkpoint.pt"),
        ([out_dir, "--start=FILE:not/there.txt"], "not/there.txt"),
        ([out_dir, f"--start=FILE:{tmp_path / 'latin.txt'}"], "latin.txt: 'utf-8' codec can't decode"),
        (
            [out_dir, "--start=" + "a" * 65],
            "--start has 65 tokens, and the run has trained on sequences of 64",
        ),
        ([broken], "allowed are 'gpt2' and 'bytes'"),
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            sample.main(argv)
        assert says in str(caught.value)


def test_as_a_program(tmp_path):
    out_dir = save_run(tmp_path, successor_model(b"bc", ord("a")), STAGES)

    def run(*argv, **variables):
        command, env = [sys.executable, "sample.py", *argv], os.environ | variables
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    done = run(out_dir, "--start=a", "--temperature=0")
    assert done.returncode == 0 and done.stdout == "abc\n"
    done = run(out_dir, "--start=é", "--temperature=0", "--max_new_tokens=1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.startswith("?"), done.stderr
    done = run("--out_dir=nowhere")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: out_dir: nowhere holds no checkpoint.pt"), done.stderr


@BOTH
def test_the_cache_grows_as_tokens_come(attention, monkeypatch):
    kwargs = {"attention": attention, "temperature": 1.5, "rope_theta": 77.0}
    whole = texts(build(), PROMPTS, **kwargs)
    monkeypatch.setattr(sample, "CACHE_ROOM", 1)
    assert texts(build(), PROMPTS, **kwargs) == whole


def test_more_tokens_than_memory_holds_end_at_eos(tmp_path, capsys):
    out_dir = save_run(tmp_path, successor_model(b"bc", ord("a")), STAGES)
    sample.main([out_dir, "--start=a", "--temperature=0", "--max_new_tokens=99999999999"])
    assert capsys.readouterr().out == "abc\n"


@pytest.mark.parametrize("argv", [["--start=a", "--temperature=0"], ["--help"]])
def test_a_reader_that_has_enough(tmp_path, argv):
    out_dir = save_run(tmp_path, successor_model(b"bc", ord("a")), STAGES)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "sample.py", out_dir, *argv]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode in (0, 141)  # argparse passes over what it cannot print
    assert "roken" not in done.stderr and "rror" not in done.stderr, done.stderr


@pytest.mark.slow
@BOTH
def test_speed(attention):
    model = build(n_layer=4, d_model=128, head_dim=32, d_mlp=384, block_size=32, top_k=128)
    kwargs = {"attention": attention, "rope_theta": None, "vocab_size": 257, "top_k": 50}
    begin = time.process_time()  # on one thread: what else runs on the machine does not count
    count = len(list(sample.generate(model, [list(range(200))], 300, **kwargs)))
    rate = count / (time.process_time() - begin)
    print(f"{attention}: {rate:.0f} tokens/s")
    assert rate > 50


# ---------------------------------------------------------------------------------------------------------
# on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
@torch.no_grad()
def test_graphs_decode_as_steps_do(attention, monkeypatch):
    """Prompts of different lengths, a cache that grows, another text in the same process."""
    model = build().cuda()
    monkeypatch.setattr(sample, "CACHE_ROOM", 9)
    prompts, n, graphs = PROMPTS, 40, []
    kwargs = {"attention": attention, "rope_theta": 77.0, "vocab_size": 257, "temperature": 0}
    record = torch.cuda.CUDAGraph

    def counted():
        graphs.append(record())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", counted)
    got = [torch.stack(list(sample.generate(model, prompts, n, **kwargs)), 1).tolist() for _ in range(2)]
    assert len(graphs) >= 4 and got[0] == got[1]
    monkeypatch.setattr(sample.Decoder, "step", lambda self, t: self.model(t[:, None], **self.shared).logits)
    assert got[0] == torch.stack(list(sample.generate(model, prompts, n, **kwargs)), 1).tolist()
    assert got[0] == texts(model.cpu(), prompts, n, **kwargs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cache_that_does_not_fit(monkeypatch):
    model = build().cuda()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**20, 2**30))
    with pytest.raises(ValueError, match="^--start: keys and values of 1,000,000 tokens take"):
        sample.check_memory(model, 1_000_000)
    sample.check_memory(model, 10)
