"""The whole configuration: one dataclass, its config files and its command line.

A config file is plain Python that assigns fields of `Config`; `--key=value` on the command line
overrides it. Names that start with an underscore and imported names are the file's own.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import io
import re
import runpy
import sys
import tokenize
import traceback
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTENTION = ("dense", "warmup", "sparse")


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum. Exactly one of `steps` and `tokens` sets its length."""

    seq_len: int  # tokens a sequence; divides tokens_per_step, a multiple of block_size
    attention: str  # "dense" (no proxy), "warmup" (dense, the proxy learns) or "sparse"
    steps: int | None = None  # length in optimizer steps
    tokens: int | None = None  # length in tokens, rounded up to whole steps
    rope_theta: float | None = None  # RoPE base of this stage; None: Config.rope_theta
    document_mask: bool = True  # keep the documents of a sequence apart
    freeze_backbone: bool = False  # train the proxy alone (warmup of a converted dense model)


@dataclass
class Config:
    # run
    out_dir: str = "out/run"  # checkpoint, metrics.jsonl, curves.png; an existing run is continued
    seed: int = 1337  # seeds weights and data order
    device: str = "auto"  # "auto" (cuda where there is one), "cuda" or "cpu"
    dtype: str = "auto"  # compute dtype: "auto" (bfloat16 on GPUs that have it), "bfloat16", "float32"
    compile: bool | None = None  # torch.compile all that is token-wise; None: on a GPU only
    init_from: str | None = None  # weights only: a Qwen3 folder or the out_dir of another run
    dry_run: bool = False  # print stages, parameters, tokens, memory and data commands, then stop
    curves: bool = False  # draw curves.png from the metrics.jsonl of out_dir, print its table, then stop
    profile: bool = False  # profile a step of each stage: profile_N.txt and trace_N.json.gz in out_dir
    # data
    dataset: str = "pysrc"  # a name under data/ or a folder with train.bin and val.bin
    retrieval_sets: list[str] = field(default_factory=list)  # data sets whose val.bin tests retrieval
    # model (Qwen3-shaped)
    n_layer: int = 4  # layers
    d_model: int = 192  # width of the residual stream
    n_head: int = 6  # query heads
    n_kv_head: int = 2  # key and value heads
    n_proxy_head: int = 2  # proxy query heads, a multiple of n_kv_head that divides n_head
    n_proxy_kv_head: int = 1  # proxy key heads
    head_dim: int = 32  # width of a head; the Hopper kernels take 128
    d_mlp: int = 512  # width of the SwiGLU
    vocab_size: int | None = None  # rows of the embedding; None: the data set's, rounded up to 64
    tie_embeddings: bool = True  # the output projection is the embedding
    norm_eps: float = 1e-6  # RMSNorm
    rope_theta: float = 10_000.0  # RoPE base where a stage sets none
    block_size: int = 128  # keys a block; the Hopper kernels take 128
    top_k: int = 2048  # selected tokens a query, a multiple of block_size
    dense_layers: int = 0  # the first n layers stay dense and have no proxy
    # schedule
    stages: list[Stage] = field(default_factory=list)  # the curriculum, in order
    stage_steps: int | None = None  # cap every stage at so many steps, to try a config out
    attention: str | None = None  # of every stage, whatever it says itself: "dense" for a baseline
    tokens_per_step: int = 2**19  # tokens an optimizer step, the same in every stage and world size
    micro_batch_tokens: int | None = None  # tokens a forward and rank; None: one sequence or 16384 tokens
    # optimizer
    optimizer: str = "adamw"  # "adamw", or "muon" for the backbone's matrices (AdamW for the rest)
    lr: float = 6e-4  # peak learning rate of the backbone
    proxy_lr: float = 1e-3  # peak learning rate of the proxy: its one knob, a loss weight would do nothing
    schedule: str = "wsd"  # "wsd" (linear warmup, constant, linear decay) or "cosine"
    lr_warmup_tokens: int = 0  # linear warmup
    lr_decay_share: float = 0.2  # wsd: the share of all tokens that the decay takes
    lr_min_share: float = 0.1  # final learning rate as a share of the peak
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    muon_momentum: float = 0.95  # Muon
    weight_decay: float = 0.1  # on matrices
    grad_clip: float = 1.0  # gradient norm of the backbone; 0: off
    proxy_grad_clip: float = 1.0  # gradient norm of the proxy; 0: off
    max_skipped_steps: int = 5  # so many non-finite steps in a row end the run
    # memory
    activations: str = "auto"  # kept for backward: all, attention, input or offload; "auto": the first to fit
    memory_limit_gib: float | None = None  # GPU memory that a process may take; None: all that is free
    row_chunk: int = 32_768  # tokens that a layer's token-wise parts (all but attention) take at a time
    loss_chunk: int = 8192  # tokens whose logits exist at a time
    # logging, evaluation, checkpoints (in steps; 0: never)
    log_interval: int = 10  # console, metrics.jsonl and wandb
    layer_interval: int = 100  # KL by layer
    eval_interval: int = 250  # validation; also at the end
    eval_tokens: int = 2**20  # tokens of the fixed validation batches
    kl_interval: int = 250  # forward with the KL materialised, and the recalls
    kl_rows: int = 256  # sampled query rows for the full-support KL and the recalls
    checkpoint_interval: int = 500  # also at the end and on SIGTERM or SIGINT
    wandb: bool = False  # log to wandb; offline by itself where there is no key
    wandb_project: str = "nanomsa"  # wandb project
    wandb_name: str | None = None  # wandb run name; None: the last part of out_dir


class ConfigError(ValueError):
    """A field, file or argument that cannot be right; the message says what is allowed and what to do."""


def load_config(argv: list[str]) -> Config:
    """The checked Config of a command line: at most one config file, then any number of --field=value.

    --help prints and leaves; a mistake is a ConfigError.
    """
    if "-h" in argv or "--help" in argv:
        print(_help())
        raise SystemExit(0)
    paths = [arg for arg in argv if not arg.startswith("-")]
    if len(paths) > 1:
        raise ConfigError(f"{paths} are not one config file; overrides are written --field=value")
    config = Config()
    for path in paths:
        for name, value in _run_file(_find_file(path)).items():
            setattr(config, name, _typed(f"{path}: {name}", value, _hints(Config)[name]))
    for arg in argv:
        if arg not in paths:
            name, value = _parse_argument(arg)
            setattr(config, name, value)
    check(config)
    return config


def check(config: Config) -> None:
    """Types of all fields and the rules between them; whole floats become ints and ints floats, in place."""
    c = config
    _convert(c)
    for name in _POSITIVE:
        if getattr(c, name) is not None:
            _need(0 < getattr(c, name) < float("inf"), c, name, "positive and finite")
    for name in _NOT_NEGATIVE:
        _need(0 <= getattr(c, name) < float("inf"), c, name, "at least 0 and finite")
    for name, hint in _hints(Config).items():
        if _kind(hint)[0] is int and getattr(c, name) is not None:
            largest = _LARGEST.get(name, 2**63 - 1)
            _need(getattr(c, name) <= largest, c, name, f"at most {largest}")
    _need(c.n_head * c.head_dim <= _WIDEST, c, "head_dim", f"at most {_WIDEST} / n_head ({c.n_head})")
    for name in ("lr_decay_share", "lr_min_share"):
        _need(0 <= getattr(c, name) <= 1, c, name, "a share from 0 to 1")
    for name in ("beta1", "beta2", "muon_momentum"):
        _need(0 <= getattr(c, name) < 1, c, name, "at least 0 and below 1")
    for name, allowed in _CHOICES.items():
        _need(getattr(c, name) in allowed, c, name, f"one of {', '.join(map(str, allowed))}")
    if c.attention is not None:
        c.stages = [
            dataclasses.replace(
                s, attention=c.attention, freeze_backbone=s.freeze_backbone and c.attention == "warmup"
            )
            for s in c.stages
        ]
    for name in ("out_dir", "dataset"):
        _need(getattr(c, name), c, name, "a name or a folder")

    for name, divisor in _MULTIPLES:
        n = getattr(c, divisor)
        low = getattr(c, name) // n * n
        tip = f"use {low} or {low + n}" if low else f"use {n}"
        _need(getattr(c, name) % n == 0, c, name, f"a multiple of {divisor} ({n})", tip)
    _need(c.head_dim % 2 == 0, c, "head_dim", "even, since RoPE turns pairs", "128 is what the kernels take")
    _need(c.dense_layers <= c.n_layer, c, "dense_layers", f"at most n_layer ({c.n_layer})")

    if not c.curves:  # which needs nothing but out_dir
        tip = "name a config file, such as configs/quickstart.py"
        _need(c.stages, c, "stages", "a list of at least one Stage", tip)
    for i, stage in enumerate(c.stages):
        _check_stage(c, stage, f"stages[{i}].")


def stage_steps(config: Config) -> list[int]:
    """Optimizer steps of each stage: tokens are rounded up to whole steps, stage_steps caps them all."""
    steps = [s.steps if s.tokens is None else -(-s.tokens // config.tokens_per_step) for s in config.stages]
    return steps if config.stage_steps is None else [min(n, config.stage_steps) for n in steps]


def to_dict(config: Config) -> dict[str, Any]:
    """What is saved with a run: plain values that JSON keeps."""
    return dataclasses.asdict(config)


def from_dict(saved: dict[str, Any]) -> Config:
    """The Config that `to_dict` saved; fields that are missing there keep their defaults."""
    saved = {name: value for name, value in saved.items() if name not in _REMOVED}
    config = Config(**_known(Config, saved, "saved config"))
    stages = []
    for i, stage in enumerate(config.stages):
        where = f"saved config: stages[{i}]"
        missing = [name for name in ("seq_len", "attention") if name not in stage]
        if missing:
            raise ConfigError(f"{where} is {stage!r}; it must have {' and '.join(missing)}")
        stages.append(Stage(**_known(Stage, stage, where)))
    config.stages = stages
    _convert(config)
    return config


def describe(config: Config) -> str:
    """The resolved config, a `field = value` a line."""
    lines = []
    for f in dataclasses.fields(Config):
        if f.name == "stages":
            lines += [f"stages[{i}] = {stage}" for i, stage in enumerate(config.stages)]
        else:
            lines.append(f"{f.name} = {getattr(config, f.name)!r}")
    return "\n".join(lines)


def config_table() -> str:
    """All fields as the Markdown tables of README.md."""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    section = None
    for f in _documented(Config):
        if f.section != section:
            section = f.section
            lines.append(f"| **{section}** | | |")
        lines.append(f"| `{f.name}` | `{f.default}` | {f.comment.replace('|', chr(92) + '|')} |")
    lines += ["", "| field of a `Stage` | default | meaning |", "|---|---|---|"]
    for f in _documented(Stage):
        default = f"`{f.default}`" if f.default else "must be given"
        lines.append(f"| `{f.name}` | {default} | {f.comment.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


# --- what the functions above are made of ---

_POSITIVE = (
    *("n_layer", "d_model", "n_head", "n_kv_head", "n_proxy_head", "n_proxy_kv_head", "head_dim", "d_mlp"),
    *("vocab_size", "norm_eps", "rope_theta", "block_size", "top_k", "stage_steps", "tokens_per_step"),
    *("micro_batch_tokens", "max_skipped_steps", "row_chunk", "loss_chunk", "eval_tokens", "kl_rows"),
    "memory_limit_gib",
)
_NOT_NEGATIVE = (
    *("seed", "dense_layers", "lr", "proxy_lr", "lr_warmup_tokens", "weight_decay", "grad_clip"),
    *("proxy_grad_clip", "log_interval", "layer_interval", "eval_interval", "kl_interval"),
    *("checkpoint_interval",),
)
_WIDEST = 2**24  # with it no tensor has 2^63 bytes
_LARGEST = {  # of others, and of the seed: what 64 bits hold
    "n_layer": 10_000,
    **dict.fromkeys(("d_model", "n_head", "head_dim", "d_mlp"), _WIDEST),
    **dict.fromkeys(("vocab_size", "block_size", "top_k"), 2**31 - 1),
}
ACTIVATIONS = ("all", "attention", "input", "offload")  # from the most memory to the least
_CHOICES = {
    "activations": ("auto", *ACTIVATIONS),
    "attention": (None, *ATTENTION),
    "device": ("auto", "cuda", "cpu"),
    "dtype": ("auto", "bfloat16", "float32"),
    "optimizer": ("adamw", "muon"),
    "schedule": ("wsd", "cosine"),
}
_REMOVED = {"activation_checkpoint", "activation_offload", "mlp_chunk"}  # of older runs
_ALIASES = {"learning_rate": "lr", "wandb_run_name": "wandb_name"}  # as nanoGPT calls them
# What a mistake in a config file raises when it is run; SystemExit and the like are the file's own will.
_MISTAKES = (SyntaxError, NameError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_MISTAKES += (ImportError, OSError, AssertionError, RuntimeError)
_MULTIPLES = (
    ("n_head", "n_kv_head"),
    ("n_head", "n_proxy_head"),
    ("n_proxy_head", "n_kv_head"),
    ("n_proxy_head", "n_proxy_kv_head"),
    ("top_k", "block_size"),
    ("tokens_per_step", "block_size"),
)


def _need(ok: object, owner: object, name: str, allowed: str, remedy: str = "", prefix: str = "") -> None:
    if not ok:
        remedy = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{prefix}{name} is {getattr(owner, name)!r}; it must be {allowed}{remedy}")


def _check_stage(c: Config, s: Stage, prefix: str) -> None:
    need = functools.partial(_need, owner=s, prefix=prefix)
    need(s.attention in ATTENTION, name="attention", allowed=f"one of {', '.join(ATTENTION)}")
    tip = "give either, and leave the other out"
    if s.steps is not None:
        need(s.tokens is None, name="tokens", allowed=f"None beside steps={s.steps}", remedy=tip)
        need(0 < s.steps < 2**63, name="steps", allowed="positive and below 2**63")
    else:
        need(s.tokens is not None, name="steps", allowed="given where tokens is not", remedy=tip)
        need(0 < s.tokens < 2**63, name="tokens", allowed="positive and below 2**63")
    allowed = f"a positive multiple of block_size ({c.block_size})"
    need(s.seq_len > 0 and s.seq_len % c.block_size == 0, name="seq_len", allowed=allowed)
    allowed = f"a divisor of tokens_per_step ({c.tokens_per_step})"
    tip = "change one of them; powers of two fit"
    need(c.tokens_per_step % s.seq_len == 0, name="seq_len", allowed=allowed, remedy=tip)
    theta = 1 if s.rope_theta is None else s.rope_theta
    need(0 < theta < float("inf"), name="rope_theta", allowed="positive and finite, or None")
    if s.freeze_backbone:
        allowed = f'False where attention is "{s.attention}"'
        need(s.attention == "warmup", name="freeze_backbone", allowed=allowed, remedy='it goes with "warmup"')
    if s.attention != "dense":
        tip = "lower dense_layers: no layer would have a proxy"
        allowed = f'"dense" where all {c.n_layer} layers are dense_layers'
        need(c.dense_layers < c.n_layer, name="attention", allowed=allowed, remedy=tip)


def _find_file(path: str) -> Path:
    root = Path(__file__).parent.parent
    for file in (Path(path), root / path):
        if file.is_file():
            return file
    names = ", ".join(sorted(f"configs/{f.name}" for f in root.glob("configs/[!_]*.py")))
    raise ConfigError(f"config file {path!r} is neither here nor in the repository, which has {names}")


def _run_file(file: Path) -> dict[str, Any]:
    """The names that a config file assigns, less the file's own."""
    try:
        file.read_text(encoding="utf-8")  # Python itself lets other bytes pass in comments
        names = runpy.run_path(str(file))
    except _MISTAKES as error:
        inner = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else inner[-1] if inner else None
        where = f"{file} line {line}" if line else f"{file}"
        what = error.msg if isinstance(error, SyntaxError) else f"{error}"
        what = f"{type(error).__name__}: {what}" if what else type(error).__name__
        raise ConfigError(f"{where}: {what}; mend the file, --help lists the fields") from error
    found = {}
    for name, value in names.items():
        own = name.startswith("_") or callable(value) or isinstance(value, types.ModuleType)
        name = _ALIASES.get(name, name)
        if name in _hints(Config) or not own:
            found[name] = value
    return _known(Config, found, f"{file}", "; a name of the file's own begins with an underscore")


def _parse_argument(arg: str) -> tuple[str, Any]:
    flag, given, text = arg.partition("=")
    if not flag.startswith("--"):
        raise ConfigError(f"argument {arg!r} is not understood; overrides are written --field=value")
    name = _ALIASES.get(flag[2:], flag[2:])
    _known(Config, {name: text}, "command line")
    if name == "stages":
        raise ConfigError(
            "--stages is for config files only; edit the file, or cap every stage by --stage_steps"
        )
    kind, optional = _kind(_hints(Config)[name])
    if not given and kind is not bool:
        raise ConfigError(f"--{name} has no value; write --{name}=VALUE, with the equals sign")
    if optional and text.lower() == "none":
        return name, None
    return name, _parse(name, text if given else "true", kind)


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    if kind is list:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is bool:
        if text.lower() in ("true", "yes", "1"):
            return True
        if text.lower() in ("false", "no", "0"):
            return False
        raise ConfigError(f"{name} is {text!r}; it must be True or False")
    power = re.fullmatch(r"(\d{1,9})\*\*(\d{1,2})", text)
    try:
        if power:
            value = int(power[1]) ** int(power[2])
        elif re.fullmatch(r"[+-]?[\d_]+", text):
            value = int(text)
        else:
            value = float(text)
    except ValueError:
        example = "such as 4096, 1e6 or 2**20" if kind is int else "such as 3e-4"
        raise ConfigError(f"{name} is {text!r}; it must be {_NAMES[kind]}, {example}") from None
    return _typed(name, value, kind)


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "True or False"}


def _typed(label: str, value: Any, hint: Any) -> Any:
    """`value` as the annotation has it, or an error that names `label`."""
    kind, optional = _kind(hint)
    if value is None and optional:
        return None
    if kind is list:
        (item,) = typing.get_args(hint)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{label} is {value!r}; it must be a list of {item.__name__}")
        return [_typed(f"{label}[{i}]", element, item) for i, element in enumerate(value)]
    if kind is Stage and isinstance(value, Stage):
        hints = _hints(Stage)
        return Stage(**{name: _typed(f"{label}.{name}", getattr(value, name), hints[name]) for name in hints})
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    name = _NAMES.get(kind, f"a {kind.__name__}(...)")
    raise ConfigError(f"{label} is {value!r}; it must be {name}{' or None' if optional else ''}")


def _convert(config: Config) -> None:
    for name, hint in _hints(Config).items():
        setattr(config, name, _typed(name, getattr(config, name), hint))


def _kind(hint: Any) -> tuple[type, bool]:
    """(int, True) of `int | None`, (list, False) of `list[str]`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(option for option in options if option is not types.NoneType)
    return typing.get_origin(kind) or kind, types.NoneType in options


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _known(cls: type, values: dict[str, Any], where: str, note: str = "") -> dict[str, Any]:
    for name in values:
        if name not in _hints(cls):
            names = [*_hints(cls), *(_ALIASES if cls is Config else ())]
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            tip = f"did you mean {near[0]}?" if near else "--help lists the fields"
            raise ConfigError(f"{where}: {name!r} is not a field of {cls.__name__}; {tip}{note}")
    return values


@dataclass(frozen=True)
class _Documented:
    section: str
    name: str
    type: str
    default: str
    comment: str


def _documented(cls: type) -> list[_Documented]:
    """The fields of a dataclass as its source shows them; a comment on a line of its own opens a section."""
    found, section = [], ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type != tokenize.COMMENT:
            continue
        code, comment = token.line[: token.start[1]].strip(), token.string.lstrip("# ").strip()
        if not code:
            section = comment
            continue
        name, _, rest = code.partition(": ")
        kind, _, default = rest.partition(" = ")
        default = "[]" if default.startswith("field(") else default
        found.append(_Documented(section, name, kind, default, comment))
    return found


def _help() -> str:
    lines = [
        f"usage: {Path(sys.argv[0]).name} [CONFIG.py] [--field=value ...]",
        "",
        "CONFIG.py is plain Python that assigns these fields; --field=value overrides it, a bare --field is",
        "--field=True. learning_rate and wandb_run_name, as nanoGPT calls them, are understood too.",
    ]
    section = None
    for f in [*_documented(Config), *_documented(Stage)]:
        if f.section != section:
            section = f.section
            lines += ["", section or "Stage(...), an element of stages: in the config file only"]
        flag = f"--{f.name}" if section else f"  {f.name}"
        default = f"= {f.default}" if f.default else ""
        lines.append(f"  {flag:<24} {f.type:<12} {default:<14} {f.comment}")
    return "\n".join(lines)
