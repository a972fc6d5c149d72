"""Samples from a run, token by token, with a cache that holds the proxy's keys too.

python sample.py --out_dir=out/quickstart --start="def main"
python sample.py --out_dir=out/quickstart --start=FILE:prompt.txt --attention=dense
python sample.py --out_dir=out/quickstart --export=qwen3_folder     # for transformers' from_pretrained
"""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import msa
from data import get_tokenizer, run_script
from model import KVCache, Run, Transformer, load_run, load_weights, save_qwen3

CACHE_ROOM = 1024  # new tokens that the cache has room for at first
SHOWN = 2000  # tokens of a prompt that are printed
PIECE = 2**16  # tokens of the prompts that go through the model at a time


def build(run: Run, device: torch.device) -> Transformer:
    """The model of a run, on `device`, in bfloat16 on GPUs that have it."""
    model = Transformer(run.config)
    load_weights(model, run.state, "its checkpoint", "out_dir")
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        model.compute_dtype = torch.bfloat16
    return model.to(device).eval()


def pick(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """logits (B, V) -> tokens (B,). Temperature 0 takes the likeliest; top_k and top_p cut the tail first."""
    if temperature == 0:
        return logits.argmax(-1)
    # At most 0 and in fp64, so that the smallest temperature leaves the likeliest at 0 and the rest at -inf.
    logits = ((logits - logits.amax(-1, keepdim=True)).double() / temperature).float()
    if top_k is not None:
        floor = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if top_p is not None:
        ordered, index = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        behind = p.cumsum(-1) - p >= top_p  # the token that crosses top_p stays
        logits = logits.masked_fill(behind.gather(-1, index.argsort(-1)), float("-inf"))
    # Drawn on the CPU: the same seed gives the same text wherever the logits agree.
    return torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)


def prefill(model: Transformer, tokens: Tensor, lengths: Tensor, **shared) -> Tensor:
    """Fills shared["cache"] with prompts tokens (B, S), of which lengths (B,) count, piece by piece.

    Returns the logits of each prompt's last token (B, V).
    """
    batch, longest = tokens.shape
    block = model.config.block_size
    piece = max(1, PIECE // batch // block) * block
    starts = list(range(0, max(1, longest - 1), piece))  # the last piece never is one token: that is decoding
    logits = None
    for begin, end in zip(starts, [*starts[1:], longest], strict=True):
        here = model(tokens[:, begin:end], prompt_lengths=lengths, **shared).logits
        ends_here = (lengths > begin) & (lengths <= end)
        logits = here if logits is None else torch.where(ends_here[:, None], here, logits)
    return logits


class Decoder:
    """One token a sequence behind what the cache holds. On a GPU a CUDA graph: launching a step's kernels one
    by one would take the host longer than they run."""

    def __init__(self, model: Transformer, **shared) -> None:
        self.model, self.cache, self.shared = model, shared["cache"], shared
        self.graph: torch.cuda.CUDAGraph | None = None
        self.room = 0  # of the cache in the last step

    def step(self, token: Tensor) -> Tensor:
        """token (B,) -> logits (B, V)"""
        if not token.is_cuda or self.room != self.cache.size:
            # The first step with room for so many loads what may not be loaded while a graph is recorded.
            self.graph, self.room = None, self.cache.size
            return self.model(token[:, None], **self.shared).logits
        if self.graph is None:
            self.token = token[:, None].clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # it is recorded, not run, but for `longest`, a number here
                self.logits = self.model(self.token, **self.shared).logits
        else:
            self.token.copy_(token[:, None])
            self.cache.longest += 1
        self.graph.replay()
        return self.logits


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    attention: str,
    rope_theta: float | None,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1337,
) -> Iterator[Tensor]:
    """Yields the next token of every prompt, (B,) int64, max_new_tokens times. Prompts may differ in length.

    ValueError on an empty prompt, or one with a token outside 0..vocab_size-1.
    Ids from vocab_size on are padding of the embedding and never drawn. attention: "sparse" or "dense".
    """
    if not prompts or min(map(len, prompts)) == 0:
        raise ValueError("prompts: at least one, each of at least one token")
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(
                f"prompts: tokens lie in {min(prompt)}..{max(prompt)}, the vocabulary in "
                f"0..{vocab_size - 1}; encode the text with the tokenizer of the run"
            )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    total = longest + max_new_tokens
    room = min(total, longest + CACHE_ROOM)  # it grows as tokens come
    cache = KVCache(model.config, len(prompts), room, device, model.compute_dtype)
    shared = {"attention": attention, "rope_theta": rope_theta, "cache": cache}
    logits = prefill(model, tokens, lengths, **shared)
    decoder = Decoder(model, **shared)
    for i in range(max_new_tokens):
        logits[:, vocab_size:] = float("-inf")
        token = pick(logits, temperature, top_k, top_p, generator)
        yield token
        if i + 1 < max_new_tokens:
            if cache.longest == cache.size:
                cache.grow(min(total, 2 * cache.size))
            logits = decoder.step(token)


def parse(argv: list[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--out_dir", required=True, help="the run to sample from")
    add("--start", default="\n", help="the prompt, or FILE:path to read it from a file")
    add("--num_samples", type=int, default=1, help="samples, one after the other (default 1)")
    add("--max_new_tokens", type=int, default=500, help="tokens a sample (default 500)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    add("--top_k", type=int, help="draw from the k likeliest tokens only")
    add("--top_p", type=float, help="draw from the likeliest tokens that hold this share of the probability")
    add("--seed", type=int, default=1337, help="of the draws (default 1337)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda where there is one")
    add("--attention", choices=("sparse", "dense"), help="default: as the run trained last")
    add("--export", metavar="FOLDER", help="write the run as a Qwen3 folder instead of sampling")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1 or args.num_samples < 1:
        parser.error("--max_new_tokens and --num_samples must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda needs a GPU that PyTorch can use, there is none here; take auto or cpu")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature must be at least 0 and finite, got {args.temperature}")
    if args.top_k is not None and args.top_k < 1:
        parser.error(f"--top_k must be at least 1, got {args.top_k}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top_p must be above 0 and at most 1, got {args.top_p}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be at least 0 and below 2**63, got {args.seed}")
    return args


def read_start(start: str) -> str:
    """The prompt of --start, from its file if it names one."""
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start.removeprefix("FILE:")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--start={start}: {error}; name a file of UTF-8 text") from error


def stream_text(tokenizer, eos: int, prompt: list[int], tokens: Iterator[Tensor]) -> int:
    """Prints the (end of the) prompt and what follows in whole characters, until EOS; returns how many tokens
    came."""
    if len(prompt) > SHOWN:
        sys.stdout.write(f"[... {len(prompt) - SHOWN:,} tokens]")
    sys.stdout.write(tokenizer.decode(prompt[-SHOWN:]))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # tokens may cut a character
    count = 0
    for token in tokens:
        count += 1
        if int(token[0]) == eos:
            break
        sys.stdout.write(decoder.decode(tokenizer.decode_single_token_bytes(int(token[0]))))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    return count


def timed(tokens: Iterator[Tensor], times: list[float]) -> Iterator[Tensor]:
    """Notes when each one is there."""
    for token in tokens:
        token = token.cpu()
        times.append(time.perf_counter())
        yield token


def check_memory(model: Transformer, tokens: int) -> None:
    """ValueError where the cache of so many tokens is more than a GPU has."""
    c = model.config
    heads = 2 * c.n_layer * c.n_kv_head + (c.n_layer - c.dense_layers) * c.n_proxy_kv_head
    cache = tokens * heads * c.head_dim * model.compute_dtype.itemsize / 2**30
    free = torch.cuda.mem_get_info()[0] / 2**30
    if cache > 0.95 * free:
        raise ValueError(
            f"--start: keys and values of {tokens:,} tokens take {cache:.1f} GiB, and {free:.1f} are free; "
            "shorten it, or take --device=cpu"
        )


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    run = load_run(args.out_dir)
    theta = run.stage.rope_theta or run.config.rope_theta
    if args.export:
        save_qwen3(run.state, run.config, args.export, theta, run.stage.seq_len)
        print(f"wrote {args.export}: transformers' from_pretrained loads it as a dense Qwen3")
        return
    kind = args.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = get_tokenizer(run.data["tokenizer"])
    prompt = tokenizer.encode_ordinary(read_start(args.start)) or [run.data["eos"]]
    if len(prompt) > run.stage.seq_len:
        raise ValueError(
            f"--start has {len(prompt):,} tokens, and the run has trained on sequences of "
            f"{run.stage.seq_len:,}; shorten it"
        )
    model = build(run, torch.device(kind))
    attention = args.attention or ("sparse" if run.stage.attention == "sparse" else "dense")
    print(
        f"{args.out_dir}, step {run.step}, {attention} attention, {len(prompt)} prompt tokens, on {kind}",
        file=sys.stderr,
    )
    stages = run.config.stages[: run.config.stages.index(run.stage) + 1]
    if attention == "sparse" and not run.config.init_from and all(s.attention == "dense" for s in stages):
        print("no stage of this run has trained the proxy: what it selects is random", file=sys.stderr)
    if len(prompt) + args.max_new_tokens > run.stage.seq_len:
        print(
            f"the run knows no places behind token {run.stage.seq_len:,}: expect little there",
            file=sys.stderr,
        )
    if kind == "cuda":
        check_memory(model, len(prompt) + min(args.max_new_tokens, CACHE_ROOM))
    msa.announce(kind)  # now, rather than in the middle of the text
    for i in range(args.num_samples):
        begin, times = time.perf_counter(), []
        tokens = generate(
            model,
            [prompt],
            args.max_new_tokens,
            attention=attention,
            rope_theta=theta,
            vocab_size=run.data["vocab_size"],
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed + i,
        )
        count = stream_text(tokenizer, run.data["eos"], prompt, timed(tokens, times))
        text = f"--- {count} tokens in {times[-1] - begin:.1f} s: the prompt {times[0] - begin:.1f} s"
        if count > 3:  # the first step loads what it needs, the second records its graph
            text += f", then {(count - 3) / (times[-1] - times[2]):.1f} tokens/s"
        if kind == "cuda":
            text += f"; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(text, file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
