import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import configs
from configs import Config, ConfigError, Stage, check, from_dict, load_config, to_dict
from model import Transformer

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/[!_]*.py"))
STAGE = Stage(steps=1, seq_len=1024, attention="sparse")


def valid(**changes) -> Config:
    return Config(**{"stages": [STAGE], "top_k": 512, **changes})


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "x.py"
    file.write_text(
        f"from configs import Stage\nstages = [Stage(steps=1, seq_len=128, attention='sparse')]\n{text}"
    )
    return str(file)


def fails(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- command line ---


@pytest.mark.parametrize(
    "arg, name, value",
    [
        ("--lr=1", "lr", 1.0),
        ("--learning_rate=1", "lr", 1.0),
        ("--wandb_run_name=a=b", "wandb_name", "a=b"),
        ("--compile=false", "compile", False),
        ("--lr=1e-3", "lr", 1e-3),
        ("--lr=.5", "lr", 0.5),
        ("--seed=7", "seed", 7),
        ("--lr_warmup_tokens=1e6", "lr_warmup_tokens", 1_000_000),
        ("--tokens_per_step=2**20", "tokens_per_step", 2**20),
        ("--eval_tokens=1_000", "eval_tokens", 1000),
        ("--stage_steps=3", "stage_steps", 3),
        ("--stage_steps=None", "stage_steps", None),
        ("--compile=False", "compile", False),
        ("--compile=true", "compile", True),
        ("--compile=0", "compile", False),
        ("--compile=yes", "compile", True),
        ("--compile=no", "compile", False),
        ("--compile=None", "compile", None),
        ("--compile", "compile", True),
        ("--dry_run", "dry_run", True),
        ("--wandb_name=123", "wandb_name", "123"),
        ("--wandb_name=a=b", "wandb_name", "a=b"),
        ("--wandb_name=None", "wandb_name", None),
        ("--wandb_project=None", "wandb_project", "None"),
        ("--wandb_project=1e3", "wandb_project", "1e3"),
        ("--retrieval_sets=a, b", "retrieval_sets", ["a", "b"]),
        ("--retrieval_sets=", "retrieval_sets", []),
    ],
)
def test_override(tmp_path, arg, name, value):
    file = write(tmp_path, "wandb_name = 'file'\nretrieval_sets = ['file']\nstage_steps = 9\ncompile = True")
    for argv in ([file, arg], [arg, file]):
        found = getattr(load_config(argv), name)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "arg, parts",
    [
        ("--lerning_rate=1", ["lerning_rate", "did you mean learning_rate?"]),
        (f"--seed={2**63}", ["seed is 9223372036854775808", "at most 9223372036854775807"]),
        ("--n_layer=2**99", ["n_layer is 6338", "at most 10000"]),
        ("--n_layer=1e300", ["n_layer is 1000", "at most 10000"]),
        ("--lr_warmup_tokens=2**63", ["lr_warmup_tokens is", "at most"]),
        ("--tokens_per_stp=1", ["tokens_per_stp", "did you mean tokens_per_step?"]),
        ("--zzzz=1", ["zzzz", "--help"]),
        ("--lr", ["--lr", "--lr=VALUE"]),
        ("--wandb_name", ["--wandb_name", "=VALUE"]),
        ("--lr=fast", ["lr", "fast", "a number"]),
        ("--lr=None", ["lr", "None", "a number"]),
        ("--lr=nan", ["lr", "nan", "finite"]),
        ("--seed=1.5", ["seed", "1.5", "whole"]),
        ("--seed=True", ["seed", "True", "whole"]),
        ("--seed=1e999", ["seed", "inf", "whole"]),
        ("--compile=maybe", ["compile", "maybe", "True or False"]),
        ("--stages=1", ["stages", "edit the file", "--stage_steps"]),
        ("-v", ["'-v'", "--field=value"]),
        ("--", ["''", "--help"]),
        ("other.py", ["other.py", "one config file", "--field=value"]),
    ],
)
def test_override_errors(tmp_path, arg, parts):
    message = fails([write(tmp_path, ""), arg])
    assert all(part in message for part in parts), message


def test_value_after_a_space(tmp_path):
    message = fails([write(tmp_path, ""), "--lr", "3"])
    assert "'3'" in message and "--field=value" in message


def test_last_override_wins(tmp_path):
    assert load_config([write(tmp_path, "seed = 1"), "--seed=2", "--seed=3"]).seed == 3


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as exit_:
        load_config(["missing.py", "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for cls, prefix in ((Config, "  --"), (Stage, "    ")):
        documented = {f.name: f for f in configs._documented(cls)}
        assert list(documented) == [f.name for f in dataclasses.fields(cls)]
        for f in documented.values():
            line = next(line for line in text.splitlines() if line.startswith(f"{prefix}{f.name} "))
            assert f.comment and f.comment in line and f.type in line and f.default in line
    assert "\nmodel (Qwen3-shaped)\n" in text


# --- config files ---


def test_file_names_of_its_own(tmp_path):
    text = (
        "import math\nfrom pathlib import Path\n_n = 3\ndef double(n):\n    return 2 * n\nseed = double(_n)\n"
    )
    assert load_config([write(tmp_path, text)]).seed == 6


@pytest.mark.parametrize(
    "text, parts",
    [
        ("n_layers = 3", ["x.py", "n_layers", "did you mean n_layer?", "underscore"]),
        ("lr = '3e-4'", ["x.py", "lr", "'3e-4'", "a number"]),
        ("seed = '1'", ["seed", "'1'", "a whole number"]),
        ("seed = True", ["seed", "True", "a whole number"]),
        ("seed = 1.5", ["seed", "1.5", "a whole number"]),
        ("seed = None", ["seed", "None", "a whole number"]),
        ("dry_run = 1", ["dry_run", "1", "True or False"]),
        ("compile = 1", ["compile", "1", "True or False or None"]),
        ("out_dir = 1", ["out_dir", "1", "a string"]),
        ("retrieval_sets = 'a'", ["retrieval_sets", "'a'", "a list of str"]),
        ("retrieval_sets = [1]", ["retrieval_sets[0]", "1", "a string"]),
        ("stages = [{}]", ["stages[0]", "{}", "a Stage"]),
        ("stages = [Stage(steps='9', seq_len=128, attention='dense')]", ["stages[0].steps", "'9'", "whole"]),
        ("def lr(): pass", ["lr", "a number"]),
    ],
)
def test_file_errors(tmp_path, text, parts):
    message = fails([write(tmp_path, text)])
    assert all(part in message for part in parts), message


def test_numbers_take_the_type_of_their_field(tmp_path):
    config = load_config(
        [write(tmp_path, "lr = 1\neval_tokens = 1e6\nstages = [Stage(128, 'dense', tokens=1e9)]")]
    )
    assert type(config.lr) is float
    assert (config.eval_tokens, type(config.eval_tokens)) == (1_000_000, int)
    assert (config.stages[0].tokens, type(config.stages[0].tokens)) == (1_000_000_000, int)


@pytest.mark.parametrize(
    "text, line, what",
    [
        ("n_layer = (3", 3, "SyntaxError: '(' was never closed"),
        ("seed = int('x')", 3, "ValueError: invalid literal"),
        ("\nlr = true", 4, "NameError: name 'true' is not defined"),
        ("import nothing_there", 3, "ModuleNotFoundError: No module named 'nothing_there'"),
        ("stages = [Stage(seqlen=3, attention='dense')]", 3, "unexpected keyword argument 'seqlen'"),
        ("def f():\n    return 1 / 0\nseed = f()", 4, "ZeroDivisionError: division by zero"),
        ("open('nowhere')", 3, "FileNotFoundError: "),
        ("assert 1 == 2", 3, "line 3: AssertionError; mend"),
        ("assert 1 == 2, 'never'", 3, "AssertionError: never"),
        ("raise RuntimeError('x')", 3, "RuntimeError: x"),
        ("def f():\n    f()\nf()", 4, "RecursionError: maximum recursion depth"),
    ],
)
def test_a_file_that_does_not_run_is_named_with_the_line(tmp_path, text, line, what):
    message = fails([write(tmp_path, text)])
    assert message.startswith(f"{tmp_path / 'x.py'} line {line}: ") and what in message
    assert "mend the file" in message


def test_a_file_that_is_no_python(tmp_path):
    (tmp_path / "x.py").write_bytes(b"\0\xff")
    assert fails([str(tmp_path / "x.py")]).startswith(f"{tmp_path / 'x.py'}: ")


@pytest.mark.parametrize("first", [b"", b"# -*- coding: latin-1 -*-\n"])
def test_a_file_of_another_encoding(tmp_path, first):
    (tmp_path / "x.py").write_bytes(first + b"# caf\xe9\nn_layer = 1\n")
    message = fails([str(tmp_path / "x.py")])
    assert message.startswith(f"{tmp_path / 'x.py'}: UnicodeDecodeError: 'utf-8' codec"), message


def test_names_of_nanogpt_in_a_file(tmp_path):
    config = load_config([write(tmp_path, "learning_rate = 1\nwandb_run_name = 'a'")])
    assert (config.lr, config.wandb_name) == (1.0, "a")


def test_file_lookup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(["configs/quickstart.py"]).out_dir == "out/quickstart"  # the repository's
    (tmp_path / "configs").mkdir()
    text = "from configs import Stage\nout_dir = 'mine'\nstages = [Stage(128, 'dense', steps=1)]"
    (tmp_path / "configs/quickstart.py").write_text(text)
    assert load_config(["configs/quickstart.py"]).out_dir == "mine"
    message = fails(["configs/quikstart.py"])
    assert "configs/quikstart.py" in message and "configs/quickstart.py" in message


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_repository_configs(file):
    config = load_config([str(file)])
    assert config.out_dir == f"out/{file.stem}"
    assert all(steps > 0 for steps in configs.stage_steps(config))
    assert f"configs/{file.name}" in file.read_text().split("from configs")[0]  # the launch line


# --- rules ---


def stage(**changes) -> dict:
    return {"stages": [STAGE, dataclasses.replace(STAGE, **changes)]}


RULES = [
    *[(name, {name: 0}) for name in configs._POSITIVE],
    *[(name, {name: -1}) for name in configs._NOT_NEGATIVE],
    *[(name, {name: "other"}) for name in configs._CHOICES],
    *[(name, {name: largest + 1}) for name, largest in configs._LARGEST.items()],
    ("seed", {"seed": 2**63}),
    ("eval_tokens", {"eval_tokens": 2**63}),
    ("vocab_size", {"vocab_size": 2**31}),
    ("head_dim", {"head_dim": 2**22}),
    ("rope_theta", {"rope_theta": float("inf")}),
    *[(name, {name: 1.5}) for name in ("lr_decay_share", "lr_min_share")],
    *[(name, {name: 1.0}) for name in ("beta1", "beta2", "muon_momentum")],
    ("lr", {"lr": float("inf")}),
    ("lr", {"lr": "1"}),
    ("out_dir", {"out_dir": ""}),
    ("dataset", {"dataset": ""}),
    ("n_head", {"n_head": 7}),
    ("n_head", {"n_proxy_head": 4}),
    ("n_proxy_head", {"n_proxy_head": 3}),
    ("n_proxy_head", {"n_proxy_kv_head": 4}),
    ("head_dim", {"head_dim": 33}),
    ("top_k", {"top_k": 100}),
    ("top_k", {"top_k": 64}),
    ("tokens_per_step", {"tokens_per_step": 1000}),
    ("dense_layers", {"dense_layers": 5}),
    ("activations", {"activations": "some"}),
    ("memory_limit_gib", {"memory_limit_gib": 0}),
    ("stages", {"stages": []}),
    ("stages", {"stages": None}),
    ("stages[0]", {"stages": ["dense"]}),
    ("stages[1].attention", stage(attention="full")),
    ("stages[1].steps", stage(steps=None)),
    ("stages[1].tokens", stage(tokens=5)),
    ("stages[1].steps", stage(steps=0)),
    ("stages[1].tokens", stage(steps=None, tokens=0)),
    ("stages[1].seq_len", stage(seq_len=0)),
    ("stages[1].seq_len", stage(seq_len=100)),
    ("stages[1].seq_len", stage(seq_len=128 * 3)),
    ("stages[1].seq_len", stage(seq_len=2**20)),
    ("stages[1].rope_theta", stage(rope_theta=0.0)),
    ("stages[1].rope_theta", stage(rope_theta=float("inf"))),
    ("stages[1].rope_theta", stage(rope_theta=float("nan"))),
    ("stages[1].steps", stage(steps=2**63)),
    ("stages[1].tokens", stage(steps=None, tokens=2**63)),
    ("stages[1].freeze_backbone", stage(freeze_backbone=True)),
    ("stages[0].attention", {"dense_layers": 4}),
]


@pytest.mark.parametrize("name, changes", RULES)
def test_rules_name_their_field(name, changes):
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)} is .*; it must be .") as error:
        check(valid(**changes))
    assert "\n" not in str(error.value)
    last = changes.get(name)
    assert last is None or repr(last) in str(error.value)


def test_what_the_rules_allow():
    check(valid())
    check(Config(curves=True))
    check(valid(dense_layers=4, stages=[Stage(1024, "dense", steps=1)]))
    check(valid(stages=[Stage(1024, "warmup", steps=1, freeze_backbone=True, rope_theta=5)]))
    check(valid(activations="offload", memory_limit_gib=80, top_k=128, grad_clip=0, log_interval=0))


def test_attention_of_every_stage():
    stages = [Stage(1024, "warmup", steps=1), Stage(2048, "sparse", steps=2, rope_theta=7.0)]
    config = valid(stages=stages, attention="dense")
    check(config)
    assert config.stages == [Stage(1024, "dense", steps=1), Stage(2048, "dense", steps=2, rope_theta=7.0)]
    with pytest.raises(ConfigError, match=r"attention is 'dens'; it must be one of None, dense, warmup"):
        check(valid(attention="dens"))
    frozen = dataclasses.replace(stages[0], freeze_backbone=True)
    for attention in ("dense", "warmup"):
        check(config := valid(stages=[frozen], attention=attention))
        assert config.stages[0].freeze_backbone == (attention == "warmup")


def test_a_config_of_an_older_run():
    old = to_dict(valid()) | {
        "activation_checkpoint": True,
        "activation_offload": False,
        "mlp_chunk": 131_072,
    }
    assert from_dict(old) == from_dict(to_dict(valid()))


def test_the_largest_that_the_rules_allow_has_sizes_that_64_bits_hold():
    n = 2**24
    shape = {"n_layer": 1, "d_model": n, "d_mlp": n, "head_dim": 2, "vocab_size": 2**31 - 1}
    config = valid(**shape, n_head=n // 2, n_kv_head=n // 2, n_proxy_head=n // 2, n_proxy_kv_head=n // 2)
    check(config)
    with torch.device("meta"):
        assert max(p.nbytes for p in Transformer(config).parameters()) < 2**63


def test_stage_steps():
    stages = [
        Stage(1024, "dense", steps=7),
        Stage(1024, "dense", tokens=2**20 + 1),
        Stage(1024, "dense", tokens=1),
    ]
    assert configs.stage_steps(valid(stages=stages, tokens_per_step=2**19)) == [7, 3, 1]
    assert configs.stage_steps(valid(stages=stages, tokens_per_step=2**19, stage_steps=2)) == [2, 2, 1]


# --- saved and shown ---


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_round_trip(file):
    config = load_config([str(file), "--wandb_name=a", "--retrieval_sets=x,y"])
    saved = json.loads(json.dumps(configs.to_dict(config)))
    before = json.dumps(saved)
    assert configs.from_dict(saved) == config
    assert json.dumps(saved) == before


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"n_layers": 3}, ["n_layers", "did you mean n_layer?"]),
        ({"lr": "3"}, ["lr", "'3'"]),
        ({"stages": [{"seq_len": 128, "attention": "dense", "setps": 3}]}, ["stages[0]", "setps", "steps"]),
        ({"stages": [{"seq_len": 128}]}, ["stages[0]", "attention"]),
    ],
)
def test_saved_config_errors(change, parts):
    with pytest.raises(ConfigError) as error:
        configs.from_dict({**configs.to_dict(valid()), **change})
    assert all(part in str(error.value) for part in parts)


def test_missing_saved_fields_are_defaults():
    assert configs.from_dict({}) == Config()


def test_describe():
    lines = configs.describe(valid(wandb_name="a")).splitlines()
    assert "lr = 0.0006" in lines and "wandb_name = 'a'" in lines and f"stages[0] = {STAGE}" in lines
    assert len(lines) == len(dataclasses.fields(Config))


def test_readme_has_the_table():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md")
    found = re.findall("<!-- config table -->\n(.*?)\n<!-- /config table -->", readme.read_text(), re.DOTALL)
    assert found == [configs.config_table()], "run `python -m configs --write README.md`"


def test_table_command(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("a\n<!-- config table -->\nold\n<!-- /config table -->\nb\n")
    command = [sys.executable, "-m", "configs"]
    for _ in range(2):
        subprocess.run([*command, "--write", str(file)], cwd=ROOT, check=True)
        table = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        assert file.read_text() == f"a\n<!-- config table -->\n{table}\n<!-- /config table -->\nb\n"
    assert all(line.count("|") - line.count(r"\|") == 4 for line in table.splitlines() if line)
    file.write_text("no markers")
    failed = subprocess.run([*command, "--write", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode and "markers" not in failed.stderr and "config table" in failed.stderr


def test_uv_constraints_match():
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["uv"]["constraint-dependencies"]) <= pinned
