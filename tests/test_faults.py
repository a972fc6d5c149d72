"""What happens to a run when the disk, the numbers, a rank or wandb fails, and that nothing is lost by it."""

import builtins
import contextlib
import errno
import fcntl
import itertools
import math
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import kill_resume
import pytest
import torch
from test_train import (  # noqa: F401, the fixtures are found by their names
    QUIET,
    ROOT,
    arguments,
    assert_same_run,
    checkpoint,
    environment,
    handlers,
    light,
    metrics,
    run,
    same_bits,
    toy,
    untimed,
    wait_for,
    whole,
    with_stages,
    wrapped,
)

import model
import train
from configs import Stage


def at_step(patch, step, what):
    """Does something once, before the training step of this number."""
    done = []

    def before(trainer, *_):
        if trainer.step + 1 == step and not done:
            done.append(step)
            what(trainer)

    wrapped(patch, train.Trainer, "train_step", before)


def crash(_):
    raise ZeroDivisionError("as good as a kill")


def crash_at(toy, out, step, *more):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, crash)
        with pytest.raises(ZeroDivisionError):
            run(toy, out, *more)


def names(out):
    return {p.name for p in Path(out).iterdir()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_compile_workers_outlive_a_signal(toy, tmp_path, monkeypatch, number):  # noqa: F811
    """To a process group, as schedulers, `timeout` and terminals send it: the step would wait for ever."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    children = []

    def start(*_, **__):
        if not children:
            children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

    wrapped(monkeypatch, train.Transformer, "forward", start)
    monkeypatch.setattr(torch, "compile", lambda module=None, **_: module)
    run(toy, tmp_path / "run", *QUIET, "--compile=True")
    (child,) = children
    try:
        child.send_signal(number)
        time.sleep(0.5)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


# --- memory ---


def test_out_of_memory_says_where_and_what_needs_less(toy, tmp_path, capsys, monkeypatch):  # noqa: F811
    def full(_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
        )

    at_step(monkeypatch, 3, full)
    assert train.command(arguments(toy, tmp_path / "run", *QUIET)) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: out of memory in ") and "Tried to allocate 20.00 GiB" in line
    for part in ("predicted were", "of weights, gradients and moments", "--activations=attention"):
        assert part in line
    assert "total capacity" not in line


@pytest.mark.parametrize("what", ["GPU", "CPU", "numpy"])
def test_out_of_memory_at_the_start(toy, tmp_path, capsys, monkeypatch, what):  # noqa: F811
    """While weights go to the device, before there is a trainer."""
    cpu = (
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    )
    error = {
        "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
        "CPU": RuntimeError(f"{cpu} to allocate 8 bytes. Error code 12 (Cannot allocate memory)\nat frame 0"),
        "numpy": MemoryError("Unable to allocate 20.0 GiB"),
    }[what]

    def full(*_):
        raise error

    monkeypatch.setattr(train.Transformer, "to", full)
    assert train.command(arguments(toy, tmp_path / "run", *QUIET)) == 1
    assert_one_error(capsys, "out of memory in the start: ", "llocate", "GiB of weights", "more ranks")


def test_other_runtime_errors_keep_their_traceback(toy, tmp_path, monkeypatch):  # noqa: F811
    def broken(*_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(train.Transformer, "to", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train.command(arguments(toy, tmp_path / "run", *QUIET))


def test_more_processes_than_gpus(toy, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert train.command(arguments(toy, tmp_path / "run", "--device=cuda")) == 2
    assert_one_error(capsys, "nproc_per_node", "process 3 of this node has no GPU", "sees 2")


# --- the console ---


def launch(toy, out, *more, **where):  # noqa: F811
    command = [sys.executable, str(ROOT / "train.py"), *arguments(toy, out, *QUIET, *more)]
    return subprocess.Popen(command, env=environment(), cwd=out.parent, **where)


@pytest.mark.parametrize("how", ["full", "both full", "a reader that died"])
def test_a_console_that_fails(toy, tmp_path, whole, how):  # noqa: F811
    """The run goes on to its end, and its exit code says so; stderr says it once."""
    out = tmp_path / "run"
    with open("/dev/full", "wb") as full:
        stdout = subprocess.PIPE if how == "a reader that died" else full
        stderr = full if how == "both full" else subprocess.PIPE
        process = launch(toy, out, stdout=stdout, stderr=stderr)
    if process.stdout:
        process.stdout.close()
    errors = process.stderr.read().decode() if process.stderr else ""
    assert process.wait(timeout=60) == 0, errors
    if process.stderr:
        process.stderr.close()
        assert errors.count("stdout can't be written: [Errno") == 1 and "Traceback" not in errors
    assert_same_run(out, whole(*QUIET))


def test_a_terminal_that_closes(toy, tmp_path, whole):  # noqa: F811
    """SIGHUP, and EIO from what is printed then: the step in hand is saved."""
    out, (ours, theirs) = tmp_path / "run", os.openpty()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = start(toy, out, *QUIET, code=SLOW_STEPS, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        wait_for(out / "metrics.jsonl", 7, process)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    assert 7 <= checkpoint(out)["step"] <= 8
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


def test_nohup(toy, tmp_path, monkeypatch):  # noqa: F811
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(monkeypatch, 2, lambda _: os.kill(os.getpid(), signal.SIGHUP))
    assert run(toy, tmp_path / "run", *QUIET) == 0
    assert checkpoint(tmp_path / "run")["step"] == 13


def test_ctrl_c_during_the_imports(toy, tmp_path):  # noqa: F811
    """Wherever it comes, at most a line, and the process is gone."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)"
    )
    command = [sys.executable, str(ROOT / "train.py"), *arguments(toy, tmp_path / "run")]
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stderr.count("\n") <= 1


# --- two starts in one folder ---


def test_two_starts_in_one_folder(toy, tmp_path, whole, capsys):  # noqa: F811
    """The second is refused and changes nothing; after a kill -9 nothing is in the way."""
    out = tmp_path / "run"
    process = start(toy, out, *QUIET, code=SLOW_STEPS)
    try:
        wait_for(out / "metrics.jsonl", 7, process)
        assert train.command(arguments(toy, out, *QUIET)) == 2
        holder = f"another process (pid {process.pid} on {socket.gethostname()}) trains in {out}"
        assert_one_error(capsys, holder, "--out_dir")
        assert run(toy, out, "--dry_run=True") == 0 and run(toy, out, "--curves=True") == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


def test_two_starts_of_two_ranks(toy, tmp_path):  # noqa: F811
    """Every rank refuses, with the same message."""
    out = tmp_path / "run"
    out.mkdir()
    with open(out / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        processes = start_ranks(toy, out, "", (QUIET, QUIET))
        try:
            errors = [process.communicate(timeout=60)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [2, 2], errors
    assert all("another process (unknown) trains in" in text for text in errors)
    assert names(out) == {"lock"}


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(toy, tmp_path, monkeypatch, capsys, code):  # noqa: F811
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run(toy, tmp_path / "run", "--stage_steps=1", *QUIET) == 0
    assert "make sure that no other run has this out_dir" in capsys.readouterr().out


# --- kills ---


@pytest.mark.slow
@pytest.mark.parametrize("variant", kill_resume.VARIANTS)
def test_killed_again_and_again(tmp_path, variant):
    """`python tests/kill_resume.py --kills 100` does the same more often."""
    hit = kill_resume.run_variant(tmp_path, variant, 6, random.Random(variant))
    assert hit.total() == 6


def start(toy, out, *more, code="", stdout=subprocess.PIPE, stderr=subprocess.PIPE):  # noqa: F811
    """A process that trains, with something done to it first."""
    text = f"import sys, time, train\n{code}\nsys.exit(train.command({arguments(toy, out, *more)!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env=environment(),
        cwd=out.parent,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


SLOW_STEPS = """
inner = train.Trainer.train_step
def slow(self, *args):
    time.sleep(0.0 if self.step < 6 else 1.0)
    return inner(self, *args)
train.Trainer.train_step = slow
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(toy, tmp_path, whole, times):  # noqa: F811
    """Once: the step is finished and saved, exit code 0. Twice: the end, at once."""
    out = tmp_path / "run"
    process = start(toy, out, *QUIET, code=SLOW_STEPS)
    try:
        wait_for(out / "metrics.jsonl", 7, process)
        time.sleep(0.3)
        begin = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        text, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "a second Ctrl-C ends at once, and the last checkpoint is that of step 7" in errors
    if times == 1:
        assert process.returncode == 0 and checkpoint(out)["step"] == 8
        assert "stopped by SIGINT at step 8, saved; the same command continues" in text
    else:
        assert process.returncode == -signal.SIGINT and time.monotonic() - begin < 0.8
        assert checkpoint(out)["step"] == 7 and "Traceback" not in errors
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


# --- the checkpoints that are kept ---


@pytest.mark.parametrize("kept", [1, 2, 5])
@pytest.mark.parametrize("links", [True, False])
def test_the_last_checkpoints_are_kept(toy, tmp_path, monkeypatch, whole, kept, links):  # noqa: F811
    """With hard links or without; each is what an earlier end would have left."""

    def no_links(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(train, "KEPT_CHECKPOINTS", kept)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    out = tmp_path / "run"
    crash_at(toy, out, 9, *QUIET)  # a resume does not forget what is there
    assert run(toy, out, *QUIET) == 0
    steps = [3, 4, 5, 7, 8, 10, 12, 13]
    want = [out / "checkpoint.pt", *(out / f"checkpoint_{s}.pt" for s in reversed(steps[-kept:-1]))]
    assert model.checkpoints(out) == want
    assert [model.read_checkpoint(p)["step"] for p in want] == list(reversed(steps[-kept:]))
    assert_same_run(out, whole(*QUIET))


def test_a_kill_between_two_renames(toy, tmp_path, whole):  # noqa: F811
    """Without hard links there is a moment in which only the older name exists."""
    out = tmp_path / "run"
    crash_at(toy, out, 7, *QUIET)
    os.replace(out / "checkpoint.pt", out / "checkpoint_5.pt")
    assert model.load_run(out).step == 5
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


def test_a_kill_before_the_oldest_is_dropped(toy, tmp_path):  # noqa: F811
    """After the last save of all; the next start drops it, though nothing is left to do."""
    out = tmp_path / "run"
    assert run(toy, out, *QUIET) == 0
    before = model.checkpoints(out)
    shutil.copy(before[-1], out / "checkpoint_3.pt")
    assert run(toy, out, *QUIET) == 0
    assert model.checkpoints(out) == before


def test_what_is_half_written_is_cleared_away(toy, tmp_path, whole):  # noqa: F811
    out = tmp_path / "run"
    crash_at(toy, out, 6, *QUIET)
    for name in ("checkpoint.pt", "config.json", "metrics.jsonl", "curves.png"):
        (out / f"{name}.new").write_bytes(b"half")
    (out / "mine.new").write_bytes(b"somebody else's")
    assert run(toy, out, *QUIET) == 0
    assert {name for name in names(out) if name.endswith(".new")} == {"mine.new"}
    assert_same_run(out, whole(*QUIET))


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(toy, tmp_path, whole, capsys, size):  # noqa: F811
    out = tmp_path / "run"
    crash_at(toy, out, 9, *QUIET)
    os.truncate(out / "checkpoint.pt", size)
    assert run(toy, out, *QUIET) == 0
    text = capsys.readouterr()
    assert "checkpoint.pt cut short or damaged; checkpoint_7.pt, of step 7, instead" in text.err
    assert "at step 7 of 13" in text.out
    assert_same_run(out, whole(*QUIET))
    assert len(model.checkpoints(out)) == train.KEPT_CHECKPOINTS
    for file in model.checkpoints(out):
        model.read_checkpoint(file)


def test_a_run_does_not_start_over_damaged_checkpoints(toy, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "run"
    crash_at(toy, out, 9, *QUIET)
    for file in model.checkpoints(out):
        os.truncate(file, 1000)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert train.command(arguments(toy, out, *QUIET)) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and "checkpoint.pt is cut short or damaged" in errors[0]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_code_in_a_checkpoint_is_not_run(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    crash_at(toy, out, 6, *QUIET)
    torch.save({**checkpoint(out), "evil": Evil()}, out / "checkpoint.pt", pickle_module=pickle)
    assert train.command(arguments(toy, out, *QUIET)) == 2
    assert "holds more than tensors" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda s: s.pop("optimizer"), "optimizer is missing"),
        (lambda s: s.pop("rng"), "rng is missing"),
        (lambda s: s.pop("skipped"), "skipped is missing"),
        (lambda s: s.update(rng=torch.zeros(3)), "rng is no state"),
        (lambda s: s.update(skipped=None), "skipped is no int"),
        (lambda s: s["model"].pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda s: s["model"].update(extra=torch.ones(1)), "extra is (1,), the model has no such tensor"),
        (lambda s: s["model"].update({"model.norm.weight": torch.ones(5)}), "model.norm.weight is (5,), the"),
        (lambda s: s["optimizer"]["model.norm.weight"].pop("exp_avg"), "optimizer's state of model.norm"),
        (lambda s: s["data"].pop("hash"), "the data's hash was None"),
    ],
)
def test_a_checkpoint_that_lacks_something(toy, stopped_at_6, tmp_path, capsys, spoil, message):  # noqa: F811
    """One line that names the file and what it lacks, exit code 2; nothing is changed."""
    out = tmp_path / "run"
    shutil.copytree(stopped_at_6, out)
    saved = checkpoint(out)
    spoil(saved)
    torch.save(saved, out / "checkpoint.pt")
    before = (out / "checkpoint.pt").read_bytes()
    assert train.command(arguments(toy, out, *QUIET)) == 2
    named = () if "hash" in message else (str(out / "checkpoint.pt"),)
    assert_one_error(capsys, message, *named)
    assert (out / "checkpoint.pt").read_bytes() == before


@pytest.fixture(scope="module")
def stopped_at_6(toy, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("stopped") / "run"
    crash_at(toy, out, 6, *QUIET)
    return out


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_data_file_that_shrinks(toy, tmp_path, whole, name):  # noqa: F811
    """A message instead of SIGBUS; in a process of its own, which may die of it."""
    data = tmp_path / "data"
    shutil.copytree(toy / "data", data)
    code = f"""
import os
inner = train.Trainer.train_step
def shrink(self, *args):
    if self.step == 5:
        os.truncate({str(data / name)!r}, 0)
    return inner(self, *args)
train.Trainer.train_step = shrink
"""
    out = tmp_path / "run"
    process = start(toy, out, *QUIET, f"--dataset={data}", code=code)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2, errors
    assert f"{data / name} changed while it was read" in errors and "at step 6" in errors
    assert "Traceback" not in errors and checkpoint(out)["step"] == 5
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


@pytest.mark.slow
def test_memory_after_a_resume(toy, tmp_path):  # noqa: F811
    """Weights and moments are there once, not twice: the checkpoint's pages go away as they are copied."""
    stages = with_stages(tmp_path / "c.py", Stage(steps=3, seq_len=64, attention="sparse"))
    more = (stages, "--d_model=512", "--d_mlp=4096", "--n_layer=8", "--tokens_per_step=512", *QUIET)
    more += ("--checkpoint_interval=2",)
    for name in ("whole", "resumed"):
        if name == "resumed":
            shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
            os.replace(tmp_path / "resumed" / "checkpoint_2.pt", tmp_path / "resumed" / "checkpoint.pt")
        _, errors = (process := start(toy, tmp_path / name, *more)).communicate(timeout=200)
        assert process.returncode == 0, errors
    before, after = (metrics(tmp_path / n, "train")[-1]["peak_memory_gib"] for n in ("whole", "resumed"))
    assert before > 1 and after < 1.02 * before


# --- the disk ---


@pytest.fixture
def disk(tmp_path):
    """A tiny file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    with contextlib.suppress(OSError), open(folder / "filler", "wb") as file:
        while True:
            file.write(bytes(1 << 12))
            file.flush()


def remount(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def assert_one_error(capsys, *parts):
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and all(part in errors[0] for part in parts), errors


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_that_gives_out(toy, tmp_path, disk, whole, capsys, what):  # noqa: F811
    """One message, exit code 1, the last checkpoint whole; with space again the run comes to the same end."""
    out = disk / "run"
    with pytest.MonkeyPatch.context() as patch:

        def give_out(trainer):
            if what == "full":
                fill(disk)
            else:
                trainer.world.lock.close()  # a disk fails with files open for writing, `mount` waits
                remount(disk, "ro")

        at_step(patch, 6, give_out)
        assert train.command(arguments(toy, out, *QUIET)) == 1
    reason = "No space left" if what == "full" else "Read-only file system"
    assert_one_error(
        capsys, "checkpoint of step 7 can't be written", reason, "is that of step 5 in", "Free some"
    )
    assert [model.read_checkpoint(p)["step"] for p in model.checkpoints(out)] == [5, 4, 3]
    assert "checkpoint.pt.new" not in names(out)
    # A start cannot write either, and changes nothing.
    before = {name: (out / name).read_bytes() for name in names(out)}
    assert train.command(arguments(toy, out, *QUIET)) == 1
    assert_one_error(capsys, "out_dir: ", reason)
    assert {name: (out / name).read_bytes() for name in names(out)} == before
    remount(disk, "rw,size=16m")
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


def test_a_file_that_may_not_grow(toy, tmp_path, whole, capsys):  # noqa: F811
    """The same without a mount: a quota on the size of files."""
    out, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.MonkeyPatch.context() as patch:
            limit = lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # noqa: E731
            at_step(patch, 6, limit)
            code = train.command(arguments(toy, out, *QUIET))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert_one_error(capsys, "checkpoint of step 7 can't be written", "File too large", "that of step 5")
    assert checkpoint(out)["step"] == 5 and "checkpoint.pt.new" not in names(out)
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


def test_a_folder_that_goes_away(toy, tmp_path, whole, capsys):  # noqa: F811
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, lambda _: out.rename(tmp_path / "moved"))
        assert train.command(arguments(toy, out, *QUIET)) == 1
    text = capsys.readouterr()
    assert text.out.count("metrics.jsonl can't be written") == 1
    assert text.err.count("error: ") == 1 and "No such file" in text.err and not out.exists()
    assert f"the folder {out} is gone: put it back" in text.err
    (tmp_path / "moved").rename(out)
    assert run(toy, out, *QUIET) == 0
    assert_same_run(out, whole(*QUIET))


@pytest.mark.parametrize("out", ["file/run", "file"])
def test_an_out_dir_that_cannot_be(toy, tmp_path, capsys, out):  # noqa: F811
    (tmp_path / "file").write_text("")
    assert train.command(arguments(toy, tmp_path / out, *QUIET)) == 1
    assert_one_error(capsys, "out_dir: ", str(tmp_path / "file"), "take another --out_dir")


def failing_log(patch, steps):
    """metrics.jsonl takes half a line and an error from these steps on, until they are over."""

    def open_log(path, mode="r", *args, **kwargs):
        file = builtins.open(path, mode, *args, **kwargs)
        if Path(path).name != "metrics.jsonl" or "a" not in mode or now[0] not in steps:
            return file

        @contextlib.contextmanager
        def half():
            with file:
                yield SimpleNamespace(
                    tell=file.tell, truncate=file.truncate, flush=file.flush, fileno=file.fileno, write=cut
                )

        def cut(text):
            file.write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        return half()

    now = [0]
    wrapped(patch, train.Trainer, "train_step", lambda trainer, *_: now.__setitem__(0, trainer.step + 1))
    patch.setattr(train, "open", open_log, raising=False)


def test_a_log_that_fails_for_a_while(toy, tmp_path, whole, monkeypatch, capsys):  # noqa: F811
    """The run goes on, and the lines come when they can."""
    failing_log(monkeypatch, range(4, 9))
    assert run(toy, tmp_path / "run") == 0
    text = capsys.readouterr().out
    assert text.count("metrics.jsonl can't be written: [Errno 28]") == 1
    assert text.count("metrics.jsonl is written again") == 1
    assert_same_run(tmp_path / "run", whole())


def test_a_log_that_fails_to_the_end(toy, tmp_path, whole, monkeypatch, capsys):  # noqa: F811
    failing_log(monkeypatch, range(9, 14))
    assert run(toy, tmp_path / "run", *QUIET) == 0
    assert "metrics.jsonl lacks up to 5 of its last lines" in capsys.readouterr().out
    got, want = checkpoint(tmp_path / "run"), checkpoint(whole(*QUIET))
    assert same_bits(got["model"], want["model"])
    lines = train.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 8 <= len(lines) < 13 and [r["step"] for r in lines] == list(range(1, len(lines) + 1))


def test_curves_that_cannot_be_drawn(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    def full(out_dir):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train, "draw_curves", full)
    assert run(toy, tmp_path / "run", "--stage_steps=1", *QUIET) == 0
    assert "no curves.png: [Errno 28]" in capsys.readouterr().out


# --- bad numbers ---


def test_a_skipped_step_is_logged_with_its_place(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Between the lines of a log_interval, too, and once, whatever is resumed."""
    stop = {"left": 1}

    def forward(self, *args, **kwargs):
        out = inner(self, *args, **kwargs)
        return out._replace(nll=out.nll * math.nan) if "kl_probe" in kwargs and self.step == 5 else out

    inner = train.Trainer.forward
    monkeypatch.setattr(train.Trainer, "forward", forward)
    more = ("--log_interval=100", *QUIET)
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda _: stop.update(left=0) or crash(_))
        with pytest.raises(ZeroDivisionError):
            run(toy, tmp_path / "run", *more)
    assert run(toy, tmp_path / "run", *more) == 0
    assert "step 6: skipped, not finite: loss nan" in capsys.readouterr().out
    (line,) = metrics(tmp_path / "run", "skipped")
    assert (line["step"], line["tokens"], line["stage"]) == (6, 6 * 256, 2)
    assert (line["first_token"], line["last_token"], line["epoch"]) == (5 * 256, 6 * 256 - 1, 0)
    assert line["loss"] is None and line["ranks"] == [0] and line["skipped_in_a_row"] == 1
    # The place is the stream's own: its tokens are the batch's.
    trainer_tokens = []
    loader = train.Loader.step
    monkeypatch.setattr(
        train.Loader, "step", lambda self, *a: trainer_tokens.append((a[0], self)) or loader(self, *a)
    )
    assert run(toy, tmp_path / "again", "--stage_steps=2", *QUIET) == 0
    step, found = next((s, x) for s, x in trainer_tokens if s == 5)
    tokens = found.stream.read(line["first_token"], line["last_token"] + 1 - line["first_token"])[0]
    assert torch.equal(loader(found, step, 64, True).tokens.flatten(), torch.from_numpy(tokens))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nan_in_the_weights(toy, tmp_path, whole, monkeypatch, capsys, optimizer):  # noqa: F811
    """Every step is skipped until the run ends, and what was saved before is finite."""
    more = ("--max_skipped_steps=2", f"--optimizer={optimizer}", *QUIET)

    def poison(trainer):
        with torch.no_grad():
            trainer.backbone[2].view(-1)[7] = math.nan

    with monkeypatch.context() as patch:
        at_step(patch, 6, poison)
        assert train.command(arguments(toy, tmp_path / "run", *more)) == 1
    assert_one_error(
        capsys, "2 steps in a row", "up to step 7", "checkpoint is that of step 5", "--init_from="
    )
    assert [r["step"] for r in metrics(tmp_path / "run", "skipped")] == [6, 7]
    assert run(toy, tmp_path / "run", *more) == 0
    assert_same_run(tmp_path / "run", whole(f"--optimizer={optimizer}", *QUIET))


def test_nan_that_a_step_leaves_is_not_saved(toy, tmp_path, monkeypatch, capsys):  # noqa: F811
    """The step itself was finite, and the next would come after the checkpoint."""

    calls = itertools.count(1)

    def poison(optimizer, *_):
        if next(calls) == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].fill_(math.inf)

    wrapped(monkeypatch, torch.optim.AdamW, "step", after=poison)
    assert train.command(arguments(toy, tmp_path / "run", *QUIET)) == 1
    assert_one_error(capsys, "not finite after step 4", "not saved", "checkpoint is that of step 3")
    assert checkpoint(tmp_path / "run")["step"] == 3


# --- ranks ---

FAULTS = """
import os, signal
train.RANK_TIMEOUT, train.SILENCE = 4, 6
loader = train.Loader.step
def step(self, number, *args):
    if os.environ["RANK"] == "{rank}" and number == 8 and len(args) > 2:
        {what}
    return loader(self, number, *args)
train.Loader.step = step
"""


def start_ranks(toy, out, code, more=((), ())):  # noqa: F811
    """Two ranks without torchrun, which would end the other one in its own time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        text = (
            f"import sys, time, train\n{code}\nsys.exit(train.command({arguments(toy, out, *more[rank])!r}))"
        )
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", text],
                env=environment(**place),
                cwd=out.parent,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


@pytest.mark.parametrize(
    "rank, what, message",
    [
        (1, "os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 gave no sign of life"),
        pytest.param(
            0,
            "os.kill(os.getpid(), signal.SIGKILL)",
            "torchrun or rank 0, which coordinates the ranks, is gone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1, "os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 of 2 gave no sign", marks=pytest.mark.slow
        ),
        pytest.param(1, "time.sleep(1000)", "rank 1 of 2 did not move for 4 s", marks=pytest.mark.slow),
    ],
    ids=["killed", "coordinator killed", "stopped", "hung"],
)
def test_a_rank_that_is_gone(toy, tmp_path, rank, what, message):  # noqa: F811
    """The other one ends, says which it was and what is left; the same command continues."""
    out, begin = tmp_path / "run", time.monotonic()
    processes = start_ranks(toy, out, FAULTS.format(rank=rank, what=what), (QUIET, QUIET))
    try:
        errors = [processes[1 - rank].communicate(timeout=60)[1]]
        seconds = time.monotonic() - begin
        if "SIGSTOP" in what:
            processes[rank].kill()
        errors.append(processes[rank].communicate(timeout=20)[1])
    finally:
        for process in processes:
            process.kill()
    said = [line for text in errors for line in text.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and message in said[0], errors
    assert f"the last checkpoint is that of step 8 in {out}; the same command continues" in said[0]
    assert processes[1 - rank].returncode == 1 and seconds < 45
    assert checkpoint(out)["step"] == 8


def test_a_failure_of_one_rank_ends_all(toy, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    what = "raise ValueError('its disk is broken')"
    processes = start_ranks(toy, out, FAULTS.format(rank=1, what=what), (QUIET, QUIET))
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 2], errors
    assert "error: rank 1: its disk is broken" in errors[1] and "Traceback" not in errors[1]


# --- wandb ---


class Server:
    """What wandb's server would have: rows by their step, of which it takes none twice or going back."""

    def __init__(self):
        self.rows, self.calls, self.broken, self.lost = {}, [], None, False

    def module(self):
        server = self

        def init(*, mode, id, resume, **options):
            server.calls.append((mode, id, resume))
            if server.broken == "init":
                raise AttributeError("wandb's own fault")
            first = max(server.rows, default=-1) + 1
            return SimpleNamespace(
                starting_step=first, define_metric=lambda *a, **k: None, log=server.log, finish=server.finish
            )

        return SimpleNamespace(
            Image=lambda picture: "picture",
            init=init,
            login=lambda **options: True,
            teardown=lambda: None,
            Settings=dict,
            errors=SimpleNamespace(CommError=ConnectionError),
        )

    def log(self, row, step):
        if self.broken == "hangs":
            threading.Event().wait()
        if self.broken == "log":
            raise BrokenPipeError("the service died")
        assert step > max(self.rows, default=-1), "wandb drops rows that go back"
        if not self.lost:
            self.rows[step] = row

    def finish(self):
        if self.broken == "finish":
            threading.Event().wait()


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server.module())
    monkeypatch.setattr(train, "heat_map", lambda rows, title: rows)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return server


def assert_every_row(server, out):
    """wandb has every record of metrics.jsonl, once, under the same figures."""
    records = metrics(out)
    assert len(server.rows) == len(records)
    for row, record in zip((server.rows[s] for s in sorted(server.rows)), records, strict=True):
        assert row["step"] == record["step"] and row["tokens"] == record["tokens"]
        for key in ("loss", "kl_selected"):
            if record.get(key) is not None:
                assert row[f"{record['kind']}/{key}"] == pytest.approx(record[key], rel=1e-12)


@pytest.mark.parametrize("broken", ["init", "log", "hangs", "finish"])
def test_wandb_never_ends_a_run(toy, tmp_path, whole, server, monkeypatch, capsys, broken):  # noqa: F811
    server.broken = broken
    monkeypatch.setattr(train, "WANDB_TIMEOUT", 0.5)
    assert run(toy, tmp_path / "run", "--wandb=True") == 0
    text = capsys.readouterr().out
    if broken in ("init", "log"):
        assert text.count("; the run goes on, and metrics.jsonl has what wandb lacks") == 1
    else:
        assert "wandb: it does not finish; `wandb sync`" in text
    assert untimed(tmp_path / "run") == untimed(whole())


@pytest.mark.parametrize("how", ["killed", "outage", "late"])
def test_wandb_over_a_resume(toy, tmp_path, server, how):  # noqa: F811
    """One id, no row lost or doubled: after a kill, after an outage, and if it is asked for only then."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        if how == "outage":
            at_step(patch, 4, lambda trainer: server.__setattr__("lost", True))
        first = () if how == "late" else ("--wandb=True",)
        wrapped(patch, train.Trainer, "train_step", lambda t, *_: crash(t) if t.step == 6 else None)
        with pytest.raises(ZeroDivisionError):
            run(toy, out, *first)
    assert checkpoint(out)["step"] == 5 and metrics(out)[-1]["step"] == 6
    server.lost = False
    assert run(toy, out, "--wandb=True") == 0
    assert_every_row(server, out)
    assert len({id for _, id, _ in server.calls}) == 1
    assert all(resume == "allow" for _, _, resume in server.calls)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\0", b"some words here", b"abc x\n", b"\n\n"])
def test_a_damaged_wandb_id(toy, tmp_path, server, text):  # noqa: F811
    """It counts as none: a new id, and every row is sent."""
    out = tmp_path / "run"
    crash_at(toy, out, 6, *QUIET)
    (out / "wandb_id").write_bytes(text)
    assert run(toy, out, "--wandb=True", *QUIET) == 0
    assert_every_row(server, out)
    (name,) = {id for _, id, _ in server.calls}
    assert (out / "wandb_id").read_text().split()[0] == name and len(name) == 8


def test_wandb_offline_over_kills(toy, tmp_path, server, monkeypatch):  # noqa: F811
    """Offline nobody says what is there already: rows that an earlier start had are not written again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    for step in (7, 7, 12):
        crash_at(toy, out, step, "--wandb=True")
    assert run(toy, out, "--wandb=True") == 0
    assert_every_row(server, out)
    assert len({id for _, id, _ in server.calls}) == 1
