"""Kills runs at random moments, continues them by the same command, and compares with runs left alone.

    python tests/kill_resume.py --kills 100 --seed 0       # a quarter of an hour on 2 CPU cores

Every variant goes dense, frozen warmup, warmup, sparse, longer. Weights, optimizer state, metrics, the kept
checkpoints and a sample must come out bit-equal, however often the run was killed.
"""

import argparse
import collections
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import test_train as toys

import model
import sample
import train
from configs import Stage

STAGES = (
    Stage(steps=8, seq_len=32, attention="dense"),
    Stage(steps=6, seq_len=64, attention="warmup", freeze_backbone=True),
    Stage(steps=6, seq_len=64, attention="warmup"),
    Stage(steps=10, seq_len=64, attention="sparse", rope_theta=5e4),
    Stage(steps=6, seq_len=128, attention="sparse", document_mask=False),
)
ENDS = [sum(s.steps for s in STAGES[: i + 1]) for i in range(len(STAGES))]
OPTIONS = ("--checkpoint_interval=3", "--eval_interval=4", "--kl_interval=5", "--micro_batch_tokens=128")
VARIANTS = {"adamw": (1, ()), "muon": (1, ("--optimizer=muon",)), "two ranks": (2, ())}  # processes, options
MOMENTS = ("start", "step", "save", "evaluation", "switch")


def command(ranks, arguments):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else []), str(toys.ROOT / "train.py"), *arguments]


def family(pid):
    """A process and all that it started; torchrun's ranks are in sessions of their own."""
    children = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            child, _, rest = stat.read_text().rpartition(")")
            children[int(rest.split()[1])].append(int(child.split()[0]))
    found = [pid]
    for member in found:
        found += children[member]
    return found


def kill(process, rank=None):
    """SIGKILL to all of it, as when a machine goes down, or to one rank: torchrun then ends the others."""
    members = family(process.pid)
    for pid in members if rank is None else members[1 + rank : 2 + rank]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)


def come(moment, out, process, rng, startup):
    """Waits for a moment of this kind; False where the run ended before."""
    if moment == "start":
        time.sleep(rng.uniform(0, 1.2 * startup))
        return process.poll() is None
    path, skip = out / "metrics.jsonl", rng.randrange(1, 12)
    seen = len(train.read_metrics(path)) if path.exists() else 0
    while process.poll() is None:
        lines = train.read_metrics(path) if path.exists() else []
        seen = min(seen, len(lines))  # what lies past the checkpoint is dropped when it starts
        step = lines[-1]["step"] if lines and lines[-1]["kind"] == "train" else None
        reached = {
            "step": True,
            "save": (out / "checkpoint.pt.new").exists(),
            "evaluation": step is not None and (step % 4 == 0 or step % 5 == 0),
            "switch": step in ENDS,
        }[moment]
        if reached and len(lines) >= seen + (skip if moment == "step" else 1):
            time.sleep(rng.uniform(0, {"step": 0.05, "save": 0.002}.get(moment, 0.02)))
            return process.poll() is None
        time.sleep(0.0005)
    return False


def sampled(out):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        sample.main([f"--out_dir={out}", "--start=abc", "--max_new_tokens=40", "--device=cpu"])
    return text.getvalue()


def run_variant(folder, name, kills, rng, say=print):
    """Kills runs of a variant so many times in all, and lets each come to its end."""
    ranks, more = VARIANTS[name]
    toy = toys.make_toy(folder)
    file = toys.with_stages(folder / "kills.py", *STAGES)
    environment = toys.environment()

    def start(out):
        arguments = toys.arguments(toy, out, file, *OPTIONS, *more)
        return subprocess.Popen(
            command(ranks, arguments),
            env=environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=open(folder / "errors", "ab"),  # noqa: SIM115, the process's own
        )

    whole, begin = folder / "whole", time.monotonic()
    process = start(whole)
    toys.wait_for(whole / "metrics.jsonl", 1, process)
    startup = time.monotonic() - begin
    assert process.wait(timeout=300) == 0, (folder / "errors").read_text()
    hit, runs = collections.Counter(), 0
    while hit.total() < kills:
        out = folder / f"run{runs}"
        runs += 1
        while True:
            moment = rng.choice(MOMENTS)
            process = start(out)
            try:
                if hit.total() < kills and come(moment, out, process, rng, startup):
                    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
                    kill(process, rank)
                    hit[moment] += process.returncode != 0
                code = process.wait(timeout=300)
            finally:
                if process.poll() is None:
                    kill(process)
            if code == 0:
                break
            assert hit.total() <= kills and code in (1, -signal.SIGKILL), (folder / "errors").read_text()
            if model.checkpoints(out):  # at any moment the newest can be read
                model.read_checkpoint(model.checkpoints(out)[0])
        toys.assert_same_run(out, whole)
        assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
        for kept in model.checkpoints(whole)[1:]:
            one, other = model.read_checkpoint(kept), model.read_checkpoint(out / kept.name)
            assert all(toys.same_bits(one[key], other[key]) for key in ("step", "model", "optimizer"))
        assert sampled(out) == sampled(whole)
    moments = ", ".join(f"{moment} {hit[moment]}" for moment in MOMENTS)
    say(f"{name}: {hit.total()} kills ({moments}) in {runs} runs, all bit-equal to the run left alone")
    return hit


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="over all variants together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for i, name in enumerate(VARIANTS):
        share = args.kills * (i + 1) // len(VARIANTS) - args.kills * i // len(VARIANTS)
        with tempfile.TemporaryDirectory() as folder:
            run_variant(Path(folder), name, share, random.Random(f"{args.seed} {name}"))


if __name__ == "__main__":
    main()
