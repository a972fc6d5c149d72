"""Bad input ends a command with one line that says what, where and what to do, with exit code 2 and nothing
half-written; a disk that refuses ends it with one line and exit code 1."""

import errno
import gzip
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import data.hf.prepare as hf
import data.passkey.prepare as passkey
import data.pysrc.prepare as pysrc
import data.text.prepare as text
import msa
import sample
import train
from model import DamagedCheckpoint, load_run, read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
from configs import Stage

n_layer, d_model, n_head, n_kv_head, n_proxy_head, head_dim, d_mlp = 1, 32, 4, 2, 2, 8, 48
block_size, top_k, tokens_per_step = 8, 16, 256
eval_interval = kl_interval = 0
device, compile = "cpu", False
stages = [
    Stage(steps=1, seq_len=32, attention="dense"),
    Stage(steps=1, seq_len=64, attention="sparse"),
]
"""


def leave(monkeypatch, capsys, program, *argv):
    """(exit code, what it printed to stderr) of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, argv)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        if program is train:
            raise SystemExit(train.command())
        data.run_script(program.main)
    return stop.value.code or 0, capsys.readouterr().err


def tree(folder):
    """Every file below with its content, and every folder; but for the lock, which says who held it last."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*") if p.name != "lock"}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A command that must fail: returns its one line, and nothing below tmp_path may have changed."""

    def of(program, *argv, code=2):
        before = tree(tmp_path)
        got, err = leave(monkeypatch, capsys, program, *argv)
        lines = err.splitlines()
        assert got == code and len(lines) == 1 and lines[0].startswith("error: "), err
        folders = {p for p, content in before.items() if content is None}
        left = {p: content for p, content in tree(tmp_path).items() if content is not None or p in folders}
        assert left == before  # but for an empty folder of --out
        return lines[0]

    return of


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Small files only: waiting for the disk would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def write(path, n_docs, length, seed=0, tokenizer=None, source="toy"):
    rng = random.Random(seed)
    tokenizer = tokenizer or data.get_tokenizer("bytes")
    with data.TokenWriter(path, tokenizer=tokenizer, source=source) as writer:
        for _ in range(n_docs):
            writer.add([rng.randrange(97, 123) for _ in range(length)])


@pytest.fixture
def toy(tmp_path):
    write(tmp_path / "data" / "train.bin", 60, 30)
    write(tmp_path / "data" / "val.bin", 8, 30, seed=1)
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A toy with its run, finished."""
    folder = tmp_path_factory.mktemp("trained")
    write(folder / "data" / "train.bin", 60, 30)
    write(folder / "data" / "val.bin", 8, 30, seed=1)
    (folder / "config.py").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "draw_curves", lambda out_dir: Path(out_dir) / "curves.png")
        assert train.main(command_of(folder)) == 0
    return folder


def command_of(folder, *more):
    return [str(folder / "config.py"), f"--dataset={folder / 'data'}", f"--out_dir={folder / 'run'}", *more]


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run, to be spoilt."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


# --- configs and command lines ---


@pytest.mark.parametrize(
    "lines, argument, parts",
    [
        ("n_layers = 3", "", ["config.py: 'n_layers' is not a field", "did you mean n_layer?"]),
        ("", "--lerning_rate=1", ["command line: 'lerning_rate' is not a field", "mean learning_rate?"]),
        ("n_layer = (3", "", ["config.py line 12: SyntaxError", "mend the file"]),
        ("", "--stages=3", ["--stages is for config files only"]),
        ("stages[1] = Stage(steps=1, seq_len=60, attention='dense')", "", ["stages[1].seq_len is 60", "(8)"]),
        ("stages[1] = Stage(steps=1, seq_len=96, attention='dense')", "", ["seq_len is 96", "(256)"]),
        ("", "--n_proxy_head=3", ["n_head is 4", "a multiple of n_proxy_head (3)", "use 3 or 6"]),
        ("", "--top_k=4", ["top_k is 4", "a multiple of block_size (8); use 8"]),
        ("", "--dataset=nowhere", ["there is no data set 'nowhere'", "python data/pysrc/prepare.py"]),
        ("", "--vocab_size=200", ["vocab_size: 200 is less than 257", "bytes"]),
        ("", "--init_from=nowhere", ["init_from: nowhere is neither a run"]),
    ],
)
def test_configs(toy, refused, lines, argument, parts):
    (toy / "config.py").write_text(CONFIG + lines)
    message = refused(train, *command_of(toy), *filter(None, [argument]))
    assert all(part in message for part in parts), message


def test_cuda_that_is_not_there(toy, trained, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device is 'cuda', but torch sees no GPU; use --device=cpu" in refused(
        train, *command_of(toy, "--device=cuda")
    )
    # argparse shows the usage too
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={trained / 'run'}", "--device=cuda"])
    with pytest.raises(SystemExit) as stop:
        data.run_script(sample.main)
    assert stop.value.code == 2


def test_a_gpu_other_than_hopper_takes_the_reference_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "need a Hopper GPU" in msa._no_kernels.__wrapped__(torch.device("cuda"))


@pytest.mark.parametrize("size, sequences", [(3, "seq_len 32 makes 8"), (8, "seq_len 64 makes 4")])
def test_ranks_that_the_sequences_do_not_suffice_for(toy, size, sequences):
    config = train.load_config(command_of(toy))
    with pytest.raises(ValueError, match=f"{sequences} sequences a step, which {size} ranks .*; raise"):
        train.check_ranks(config, train.World(0, size, torch.device("cpu")))


# --- token files ---


def test_data_of_another_kind(toy, refused):
    file = toy / "data" / "train.bin"
    raw = file.read_bytes()
    for content, part in (
        (raw[:3000], "train.bin: it is cut short"),
        (raw[:-100], "train.bin: its header asks for"),
        (raw[:8] + b"\0\0\0\1" + raw[12:], "train.bin: it is big-endian"),
        (raw[:8] + b"\2\0\0\0" + raw[12:], "train.bin: it has format version 2, this code reads version 1"),
        (b"PK" + raw[2:], "train.bin: it is no token file"),
    ):
        file.write_bytes(content)
        message = refused(train, *command_of(toy))
        assert part in message and "run the prepare.py of its data set again" in message
    file.write_bytes(raw)
    (toy / "data" / "val.bin").unlink()
    assert "val.bin does not exist: run the prepare.py" in refused(train, *command_of(toy))


def test_validation_of_another_vocabulary(toy, refused):
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    other = data.tiktoken.Encoding(
        "other", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}
    )
    write(toy / "data" / "val.bin", 8, 30, tokenizer=other)
    message = refused(train, *command_of(toy))
    assert "val.bin" in message and "'other'" in message and "'bytes'" in message


def test_too_few_tokens(toy, refused):
    write(toy / "data" / "train.bin", 7, 30)  # 7 * 32 tokens, with their EOS
    message = refused(train, *command_of(toy))
    assert "train.bin has 224 tokens" in message and "tokens_per_step (256)" in message
    write(toy / "data" / "train.bin", 8, 30)
    write(toy / "data" / "val.bin", 1, 30)
    message = refused(train, *command_of(toy))
    assert "val.bin has 32 tokens" in message and "seq_len" in message and "(64)" in message


# --- checkpoints ---


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_checkpoint_that_was_cut(run, refused):
    file = run / "run" / "checkpoint.pt"
    raw = file.read_bytes()
    for n in [0, 1, 10, len(raw) - 1, *random.Random(0).sample(range(len(raw)), 30)]:
        file.write_bytes(raw[:n])
        with pytest.raises(ValueError, match=f"checkpoint {file} is cut short or damaged; put a whole copy"):
            read_checkpoint(file)
    for other in run.glob("run/checkpoint_*.pt"):
        other.unlink()
    for program, argv in ((train, command_of(run)), (sample, [f"--out_dir={run / 'run'}"])):
        assert "is cut short or damaged" in refused(program, *argv)


def content_of(file):
    """Where in a checkpoint the bytes of its records lie."""
    places = []
    with zipfile.ZipFile(file) as archive, open(file, "rb") as raw:
        for info in archive.infolist():
            raw.seek(info.header_offset + 26)
            begin = info.header_offset + 30 + sum(struct.unpack("<HH", raw.read(4)))
            places.append(range(begin, begin + info.file_size))
    return places


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_checkpoint_with_a_changed_byte(run, refused):
    """One in what it holds is always refused; one elsewhere may be filler, and then nothing else differs."""
    file, rng = run / "run" / "checkpoint.pt", random.Random(0)
    raw, records = file.read_bytes(), content_of(file)
    whole = read_checkpoint(file)
    (pickled,) = (r for r in records if raw[r.start : r.start + 2] == b"\x80\x02")  # data.pkl
    places = [*rng.sample(pickled, 30), *(rng.choice(rng.choice(records)) for _ in range(30))]
    for i, at in enumerate([*places, *rng.sample(range(len(raw)), 30), *range(len(raw) - 200, len(raw), 5)]):
        mask = 1 << rng.randrange(8) if i % 2 else rng.randrange(1, 256)
        damaged = raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
        (run / "run" / "new").write_bytes(damaged)  # a mapped file must not change under its tensors
        os.replace(run / "run" / "new", file)
        try:
            loaded = read_checkpoint(file)
        except DamagedCheckpoint as error:
            assert str(error).startswith(f"checkpoint {file} is cut short or damaged; put a whole copy")
        else:
            assert i >= len(places) and same(loaded, whole), at
    file.write_bytes(raw)
    for other in run.glob("run/checkpoint*.pt"):
        content, at = other.read_bytes(), max(content_of(other), key=len)[7]
        other.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for program, argv in ((train, command_of(run)), (sample, [f"--out_dir={run / 'run'}"])):
        assert "damaged; put a whole copy in its place, delete all checkpoint*.pt to start over" in refused(
            program, *argv
        )


def test_a_resume_passes_over_a_changed_byte(run, monkeypatch, capsys):
    file = run / "run" / "checkpoint.pt"
    shutil.copy(file, run / "run" / "checkpoint_1.pt")
    raw = bytearray(file.read_bytes())
    raw[max(content_of(file), key=len)[7]] ^= 1  # of a weight
    file.write_bytes(raw)
    assert load_run(run / "run").step == 2
    assert (
        "checkpoint.pt cut short or damaged; checkpoint_1.pt, of step 2, instead" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), IndexError(), AttributeError(), ValueError()]
)
def test_a_checkpoint_that_does_not_unpickle(run, refused, monkeypatch, error):
    def load(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", load)
    message = refused(sample, f"--out_dir={run / 'run'}")
    assert f"{run / 'run' / 'checkpoint.pt'} is cut short or damaged" in message


def test_a_checkpoint_of_another_format(run, refused):
    file = run / "run" / "checkpoint.pt"
    torch.save(torch.load(file, weights_only=True) | {"format": 2}, file)
    for program, argv in ((train, command_of(run)), (sample, [f"--out_dir={run / 'run'}"])):
        assert "checkpoint.pt has format 2, this code reads format 1; take the version" in refused(
            program, *argv
        )


def test_a_checkpoint_with_code(run, refused, monkeypatch):
    monkeypatch.chdir(run)
    file = run / "run" / "checkpoint.pt"
    torch.save(torch.load(file, weights_only=True) | {"config": Code()}, file)
    for program, argv in ((train, command_of(run)), (sample, [f"--out_dir={run / 'run'}"])):
        assert "may be code, so it is not loaded" in refused(program, *argv)
    assert not (run / "ran").exists()
    torch.load(file, weights_only=False)
    assert (run / "ran").exists()  # it would have run


def test_checkpoints_of_something_else(run, refused):
    file = run / "run" / "checkpoint.pt"
    saved = torch.load(file, weights_only=True)
    torch.save(saved["model"], file)
    assert "was not saved by train.py, it has no 'format'" in refused(train, *command_of(run))
    torch.save([1, 2], file)
    assert "was not saved by train.py" in refused(sample, f"--out_dir={run / 'run'}")
    saved["model"] = {n: w[:1] for n, w in saved["model"].items()}
    torch.save(saved, file)
    message = refused(sample, f"--out_dir={run / 'run'}")
    assert message.startswith("error: out_dir: ") and "in its checkpoint" in message


@pytest.mark.parametrize(
    "argument, part",
    [
        ("--tokens_per_step=512", "tokens_per_step was 256, is 512"),
        ("--n_layer=2", "n_layer was 1, is 2"),
        ("--d_mlp=64", "d_mlp was 48, is 64"),
    ],
)
def test_resume_with_another_run(run, refused, argument, part):
    message = refused(train, *command_of(run, argument))
    assert part in message and "Take another --out_dir" in message


def test_resume_with_other_stages_or_data(run, refused):
    (run / "config.py").write_text(CONFIG.replace("seq_len=32", "seq_len=16"))
    assert "stages[0] was Stage(seq_len=32" in refused(train, *command_of(run))
    (run / "config.py").write_text(CONFIG)
    write(run / "data" / "train.bin", 60, 30, seed=9)
    assert "the data's hash was" in refused(train, *command_of(run))


@pytest.mark.parametrize("argument, part", [("--d_mlp=64", "(48, 32)"), ("--n_layer=2", "lacks")])
def test_weights_of_another_size(run, refused, argument, part):
    source = shutil.move(run / "run", run / "source")
    message = refused(train, *command_of(run, f"--init_from={source}", argument))
    assert "init_from: " in message and part in message and "set the fields of the model" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_qwen3_folder(run, refused, name):
    sample.main([f"--out_dir={run / 'run'}", f"--export={run / 'qwen3'}"])
    file = run / "qwen3" / name
    file.write_bytes(file.read_bytes()[:200])
    shutil.rmtree(run / "run")
    argv = command_of(run, f"--init_from={run / 'qwen3'}", "--vocab_size=320")
    message = refused(train, *argv)
    assert "init_from: " in message and name in message and "get it again" in message
    file.write_text("{}" if name == "config.json" else "")
    assert "init_from: " in refused(train, *argv)


# --- sample.py ---


def test_sampling(run, refused):
    out_dir = f"--out_dir={run / 'run'}"
    (run / "latin.txt").write_bytes(b"\xe9")
    for argument, part in (
        ("--start=" + "a" * 65, "--start has 65 tokens, and the run has trained on sequences of 64; shorten"),
        ("--start=FILE:nowhere", "nowhere: [Errno 2] No such file or directory"),
        (f"--start=FILE:{run / 'latin.txt'}", "name a file of UTF-8 text"),
    ):
        assert part in refused(sample, out_dir, argument)
    for file in run.glob("run/checkpoint*.pt"):
        file.unlink()
    assert "has no checkpoint.pt yet; a run saves every checkpoint_interval steps" in refused(sample, out_dir)
    assert "nowhere holds no checkpoint.pt; train first" in refused(sample, "--out_dir=nowhere")


# --- text ---


@pytest.fixture
def prepared(tmp_path):
    """A data set that is there already, and must stay where another is refused."""
    write(tmp_path / "out" / "train.bin", 3, 9)
    write(tmp_path / "out" / "val.bin", 3, 9)
    return tmp_path / "out"


def put(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def lines_of(*rows):
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


WRONG = [b'{"text": "x"', {"text": 3}, b'{"text": "\xe9"}', b"[" * 100_000]
RIGHT = [{"text": f"row {i}"} for i in range(40)]


@pytest.mark.parametrize(
    "files, parts",
    [
        ({"a_txt": b""}, ["no text in the input", "UTF-8 text 0"]),
        ({"a_txt": b"\xff\xfea\0"}, ["no text in the input", "UTF-8 text 1 (", "a.txt"]),
        ({"a_txt": bytes(100)}, ["UTF-8 text 1 (", "a.txt"]),
        ({"a_txt": "naïve".encode("latin-1"), "b_txt": b""}, ["UTF-8 text 1 (", "a.txt"]),
        ({"a_txt": b"one document"}, ["would hold no document", "--separator"]),
        ({"a_jsonl": b"\n\n"}, ["no text in the input"]),
        (
            {"a_jsonl": lines_of(*RIGHT, WRONG[0])},
            ["input: 1 (", "a.jsonl line 41 is no JSON", "--skip_broken"],
        ),
        ({"a_jsonl": lines_of(*RIGHT, WRONG[1])}, ["a.jsonl line 41 has no text in 'text' (--field)"]),
        ({"a_jsonl": lines_of(*RIGHT, WRONG[2])}, ["a.jsonl line 41 is not UTF-8"]),
        ({"a_jsonl": lines_of(*RIGHT, WRONG[3])}, ["a.jsonl line 41 is no JSON"]),
        (
            {"a_jsonl": lines_of(*RIGHT, *WRONG, *RIGHT, *WRONG[:2])},
            ["input: 6 (", "line 41 ", "line 44 ", "..."],
        ),
        ({"a_jsonl": lines_of(*[{"body": "x"}] * 500)}, ["input: 100 (", "but ['body']"]),
        ({"a_jsonl": lines_of(RIGHT[0], *[{"body": "x"}] * 500)}, ["input: 500 ("]),
        (
            {"a.jsonl.gz": gzip.compress(lines_of(*RIGHT))[:-9]},
            ["a.jsonl.gz is a damaged gzip file", "again"],
        ),
        ({"a.txt.gz": b"no gzip"}, ["a.txt.gz is a damaged gzip file"]),
        ({"a_parquet": b"PAR1 no parquet PAR1"}, ["a.parquet is a damaged parquet file"]),
    ],
)
def test_text(tmp_path, prepared, refused, files, parts):
    source = put(tmp_path / "in", **files)
    message = refused(text, "--input", source, "--out", prepared, "--val_share", "0.3")
    assert len(message) < 1500 and all(part in message for part in parts), message


def test_broken_rows_are_skipped_on_demand(tmp_path, capsys):
    source = put(tmp_path / "in", a_jsonl=lines_of(*RIGHT, *WRONG, *RIGHT))
    text.main(["--input", str(source), "--out", str(tmp_path / "out"), "--val_share", "0.3", "--skip_broken"])
    shown = capsys.readouterr().out
    assert "skipped broken rows: 4 (" in shown and "a.jsonl line 43 is not UTF-8" in shown
    files = [data.TokenFile(tmp_path / "out" / name) for name in ("train.bin", "val.bin")]
    assert sum(file.n_docs for file in files) == 80


def test_names_of_files_that_are_not_utf8(tmp_path, capsys):
    source = put(tmp_path / "in", a_jsonl=lines_of(*RIGHT))
    (source / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\xff")
    text.main(["--input", str(source), "--out", str(tmp_path / "out"), "--val_share", "0.3"])
    shown = capsys.readouterr().out
    assert shown.isascii() and "no UTF-8 text: 1 (" in shown and "caf\\udce9.txt" in shown


def test_all_documents_on_one_side_leave_nothing(tmp_path, prepared, refused):
    """val.bin is whole before train.bin turns out to be empty, and must not appear alone."""
    seed = next(s for s in range(99) if data.unit_hash("one document", s) < 0.3)
    source = put(tmp_path / "in", a_txt=b"one document")
    argv = ("--input", source, "--out", prepared, "--val_share", "0.3", "--seed", seed)
    assert "train.bin would hold no document" in refused(text, *argv)


def test_no_network_for_the_tokenizer(tmp_path, prepared, refused, monkeypatch):
    def fail(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(data.tiktoken, "get_encoding", fail)
    source = put(tmp_path / "in", a_txt=b"text")
    message = refused(text, "--input", source, "--out", prepared, "--tokenizer", "gpt2")
    assert "TIKTOKEN_CACHE_DIR" in message and "local copies of" in message and "'bytes'" in message


def test_other_sources(tmp_path, prepared, refused):
    pytest.importorskip("datasets")
    out = ("--out", prepared)
    assert "nowhere does not exist" in refused(text, "--input", "nowhere", *out)
    assert "max_bytes is 10" in refused(pysrc, "--max_bytes", "10", *out)
    assert "raise length" in refused(passkey, "--length", "50", "--haystack", "none", *out)
    assert "there is no data set 'nowhere'" in refused(passkey, "--haystack", "nowhere", *out)
    rows = put(tmp_path / "in", a_jsonl=lines_of(*RIGHT, WRONG[0]))
    files = (rows / "a.jsonl", rows / "nowhere.jsonl")
    for path, part in zip(files, ("a.jsonl cannot be read", "nowhere.jsonl cannot be read"), strict=True):
        message = refused(hf, "--path", "json", "--data_files", path, *out)
        assert part in message and "--data_files" in message


# --- disks that refuse ---


def prepare(folder, seed=0):
    put(
        folder / "in",
        **{f"{seed}_{i}.txt".replace("_", "-"): f"text {seed} {i} ".encode() * 99 for i in range(60)},
    )
    return ("--input", folder / "in", "--out", folder / "out", "--val_share", "0.3", "--workers", "1")


@pytest.mark.parametrize("limit", [1000, 5000, 20_000, 60_000])
def test_a_disk_that_fills_up(tmp_path, prepared, refused, limit):
    """At the header, while tokens are added, and at the end; EFBIG stands in for ENOSPC."""
    argv = prepare(tmp_path)
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, kept[1]))
    try:
        message = refused(text, *argv, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert (
        f"cannot write {prepared}" in message and "File too large" in message and "another --out" in message
    )


@pytest.mark.parametrize("call", [1, 2])
def test_a_disk_that_fills_up_at_the_end(tmp_path, prepared, refused, monkeypatch, call):
    calls = iter(range(1, 9))

    def fsync(handle):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    message = refused(text, *prepare(tmp_path), code=1)
    assert f"cannot write {prepared}" in message and "No space left on device" in message


def test_a_manifest_that_cannot_be_written_takes_the_data_with_it(tmp_path, prepared, refused, monkeypatch):
    put(tmp_path / "lib", **{f"m{i}.py": f"x = {i}".encode() for i in range(40)})
    paths = dict.fromkeys(("stdlib", "purelib", "platlib"), str(tmp_path / "lib"))
    monkeypatch.setattr(pysrc.sysconfig, "get_paths", lambda: paths)
    (prepared / "manifest.json").write_text("{}")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(data.json, "dump", full)
    message = refused(pysrc, "--out", prepared, "--val_share", "0.3", code=1)
    assert "manifest.json: No space left on device" in message


@pytest.mark.parametrize("out", ["a file", "below a file", "read-only"])
def test_folders_that_cannot_be_written(tmp_path, refused, out):
    argv = prepare(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "fixed").mkdir(mode=0o500)
    folder = {"a file": "file", "below a file": "file/out", "read-only": "fixed"}[out]
    if out == "read-only" and os.access(tmp_path / "fixed", os.W_OK):
        pytest.skip("root may write everywhere")
    assert f"cannot write {tmp_path / folder}" in refused(text, *argv, "--out", tmp_path / folder, code=1)


def test_a_folder_that_vanishes(tmp_path, monkeypatch, capsys):
    inner = data.TokenWriter.finish

    def finish(writer):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        inner(writer)

    monkeypatch.setattr(data.TokenWriter, "finish", finish)
    code, err = leave(monkeypatch, capsys, text, *prepare(tmp_path))
    assert code == 1 and len(err.splitlines()) == 1 and "cannot write" in err and "No such file" in err
    assert not (tmp_path / "out").exists()


def test_interrupted(tmp_path, prepared, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    argv, before = prepare(tmp_path), tree(prepared)
    monkeypatch.setattr(data.TokenWriter, "add", interrupt)
    code, err = leave(monkeypatch, capsys, text, *argv)
    assert code == 130 and err == "stopped by Ctrl-C\n" and tree(prepared) == before


# --- from the shell, anywhere ---


def shell(folder, *argv, **kwargs):
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, **kwargs)


@pytest.mark.parametrize(
    "argv",
    [
        ("train.py", "configs/quickstart.py", "--lerning_rate=1"),
        ("sample.py", "--out_dir=nowhere"),
        ("data/text/prepare.py", "--input", "nowhere"),
    ],
)
def test_from_the_shell(tmp_path, argv):
    done = shell(tmp_path, ROOT / argv[0], *argv[1:])
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_everything_from_another_folder(tmp_path):
    """Relative paths are the user's; the repository's configs and data sets are found from anywhere."""
    put(tmp_path / "in", **{f"{i}.txt": f"text {i} ".encode() * 40 for i in range(60)})
    (tmp_path / "mine.py").write_text(CONFIG)
    steps = [
        ("data/text/prepare.py", "--input", "in", "--out", "set", "--val_share", "0.3"),
        (
            "train.py",
            "mine.py",
            "--dataset=set",
            "--learning_rate=1",
            "--wandb_run_name=a=b",
            "--compile=false",
        ),
        ("sample.py", "--out_dir=out/run", "--max_new_tokens=3"),
    ]
    for name, *argv in steps:
        done = shell(tmp_path, ROOT / name, *argv)
        assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "run" / "config.json").read_text())
    assert (config["lr"], config["wandb_name"], config["compile"]) == (1.0, "a=b", False)
    assert {p.name for p in tmp_path.iterdir()} == {"in", "mine.py", "set", "out"}


# --- sizes ---


def test_long_runs_without_a_break_take_linear_time():
    """gpt2's pattern makes one piece of them, and merging a piece could take the square of its length."""
    ranks = {bytes([i]): i for i in range(256)} | {b"a" * 2**k: 255 + k for k in range(1, 8)}
    tokenizer = data.tiktoken.Encoding(
        "merges",
        pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 263},
    )
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert len(data.encode(tokenizer, "a" * 2_000_000)) == -(-2_000_000 // 128)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 10


MEASURE = """
import resource, sys
sys.path.insert(0, {root!r})
import data.text.prepare as text
text.main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)  # whose ru_maxrss is the parent's where that is larger
memory = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used.ru_utime + used.ru_stime, int(memory.split()[1]) / 1024)
"""


def measure(folder, *argv):
    """(CPU seconds, MiB at most) of a preparation."""
    done = shell(folder, "-c", MEASURE.format(root=str(ROOT)), *argv, "--out", "out", "--workers", "1")
    assert done.returncode == 0, done.stderr
    return map(float, done.stdout.splitlines()[-1].split())


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


@linux
@pytest.mark.slow
def test_a_hundred_thousand_files(tmp_path):
    """Ten times the files take ten times the time, and a kilobyte of memory each: their names."""
    for name, folders in (("few", 10), ("many", 100)):
        for i in range(folders):
            (tmp_path / name / f"{i:03}").mkdir(parents=True)
            for j in range(1000):
                (tmp_path / name / f"{i:03}" / f"a_file_with_some_name_{j:04}.txt").write_text(
                    f"text {i} {j}\n"
                )
    few_seconds, few_memory = measure(tmp_path, "--input", "few")
    many_seconds, many_memory = measure(tmp_path, "--input", "many")
    print(f"{few_seconds:.1f} s, {few_memory:.0f} MiB; {many_seconds:.1f} s, {many_memory:.0f} MiB")
    assert data.TokenFile(tmp_path / "out" / "train.bin").n_docs > 98_000
    assert many_seconds < 15 * few_seconds
    assert many_memory - few_memory < 90


@linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_one_line_of_50_mb(tmp_path, kind):
    line = "words without end " * (50_000_000 // 18)
    put(tmp_path / "in", **{f"{i}.txt": f"text {i}".encode() for i in range(300)})
    (tmp_path / "in" / f"long.{kind}").write_text(json.dumps({"text": line}) if kind == "jsonl" else line)
    seconds, memory = measure(tmp_path, "--input", "in")
    print(f"{seconds:.1f} s, {memory:.0f} MiB")
    file = data.TokenFile(tmp_path / "out" / "train.bin")
    assert np.diff(file.offsets).max() == len(line) and seconds < 30 and memory < 1500
