"""python data/passkey/prepare.py --length 8192

Writes train.bin and val.bin of a retrieval task whose answers alone carry labels. A document is filler text
with many keys at spread depths, `The passkey of amber-falcon is 48213.`, and questions,
`What is the passkey of amber-falcon? 48213.`, in which the label mask is 1 on the tokens of ` 48213`.

A document has length - 1 tokens, so that with its EOS it fills `length`: prepare with the length that you
evaluate at (and one data set a length; several lengths in one are for training).
"""

import sys
import time
from pathlib import Path

import numpy as np
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import data

ADJECTIVES = (
    "amber ancient autumn bitter black blue bold brave brief bright broad broken bronze calm clever cold "
    "cool copper crimson curious damp dark deep distant dry dusty early empty faint fair fierce fine"
).split()
NOUNS = (
    "anchor arrow badger basin beacon birch bridge brook candle canyon cedar cliff cloud comet coral crane "
    "creek dune eagle ember falcon fern field fjord flame forest fox garden glacier grove harbor hawk"
).split()
NAMES = [f"{a}-{n}" for a in ADJECTIVES for n in NOUNS]
SENTENCES = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
    "The river runs down to the sea. ",
    "Nobody had come by since noon.\n",
    "A train passed far away, and then it was quiet.\n",
)


class Filler:
    """Endless filler tokens: the text of a token file, or drawn sentences if there is none."""

    def __init__(self, file: data.TokenFile | None, tokenizer: tiktoken.Encoding) -> None:
        self.file = file
        self.sentences = [data.encode(tokenizer, text) for text in SENTENCES]

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """n tokens, int64 [n]."""
        if self.file is None:
            shortest = min(map(len, self.sentences))
            picks = rng.integers(len(self.sentences), size=n // shortest + 1)
            return np.concatenate([self.sentences[i] for i in picks])[:n].astype(np.int64)
        # A stretch from a random place on, around the end of the file if need be.
        return self.file.tokens[(rng.integers(len(self.file)) + np.arange(n)) % len(self.file)].astype(
            np.int64
        )


def make_document(
    length: int,
    keys: int,
    questions: int,
    spread: bool,
    filler: Filler,
    tokenizer: tiktoken.Encoding,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 [length - 1] and the label mask uint8 [length - 1] of a document.

    Text before an answer, the answer and the text behind it are encoded apart, so that an answer has the same
    tokens wherever it stands. ValueError if keys and questions do not fit.
    """

    def piece(before: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        parts = [data.encode(tokenizer, text) for text in (before, answer, ".\n")]
        mask = np.repeat(np.array([0, 1, 0], np.uint8), [len(part) for part in parts])
        return np.concatenate(parts).astype(np.int64), mask

    names = [NAMES[i] for i in rng.choice(len(NAMES), keys, replace=False)]
    values = [f" {v}" for v in 10_000 + rng.choice(90_000, keys, replace=False)]
    lines = [piece(f"\nThe passkey of {n} is", v) for n, v in zip(names, values, strict=True)]
    asked = rng.choice(keys, questions, replace=False)
    answers = [piece(f"\nWhat is the passkey of {names[i]}?", values[i]) for i in asked]
    n_filler = length - 1 - sum(len(tokens) for tokens, _ in lines + answers)
    if n_filler < 0:
        raise ValueError(
            f"length is {length}; {keys} keys and {questions} questions alone take {length - n_filler} with "
            "this tokenizer: raise length, or lower keys or questions"
        )
    # Each key in a stretch of its own, at a random place there: all depths come alike.
    places = ((np.arange(keys) + rng.random(keys)) / keys * n_filler).astype(int)
    inserts = [(at, tokens, np.zeros_like(mask)) for at, (tokens, mask) in zip(places, lines, strict=True)]
    for i, (tokens, mask) in zip(asked, answers, strict=True):
        inserts.append((rng.integers(places[i], n_filler + 1) if spread else n_filler, tokens, mask))
    inserts.sort(key=lambda insert: insert[0])  # stable: at the same place the keys stay before the questions
    text = filler.draw(n_filler, rng)
    tokens, masks, at = [], [], 0
    for place, inserted, mask in [*inserts, (n_filler, text[:0], np.empty(0, np.uint8))]:
        tokens += [text[at:place], inserted]
        masks += [np.zeros(place - at, np.uint8), mask]
        at = place
    return np.concatenate(tokens), np.concatenate(masks)


def main(argv: list[str] | None = None) -> None:
    parser = data.prepare_parser(__file__, __doc__)
    parser.add_argument(
        "--length", type=int, nargs="+", default=[8192], help="tokens of a document, with EOS"
    )
    parser.add_argument("--documents", type=int, default=256, help="documents of each length in train.bin")
    parser.add_argument("--val_documents", type=int, default=32, help="documents of each length in val.bin")
    parser.add_argument("--keys", type=int, default=16, help=f"keys in a document, at most {len(NAMES)}")
    parser.add_argument("--questions", type=int, default=16, help="questions in a document, at most --keys")
    parser.add_argument("--spread", action="store_true", help="ask anywhere behind the key, not at the end")
    parser.add_argument(
        "--haystack", default="pysrc", help="data set to take filler from; none: plain sentences"
    )
    args = parser.parse_args(argv)
    if not 1 <= args.questions <= args.keys <= len(NAMES):
        raise ValueError(
            f"questions is {args.questions}, keys {args.keys}; need 1 <= questions <= keys <= {len(NAMES)}"
        )
    if min(args.documents, args.val_documents) < 1:
        raise ValueError(f"documents is {args.documents}, val_documents {args.val_documents}; need 1 or more")
    started = time.monotonic()
    tokenizer = data.get_tokenizer(args.tokenizer)
    source = f"passkey, {args.keys} keys, {args.questions} questions, haystack {args.haystack}"[:200]
    bar = data.Progress("tokens", sum(args.length) * (args.documents + args.val_documents))
    with data.write_splits(args.out, tokenizer=tokenizer, source=source, labels=True) as (train, val):
        for split, (writer, count) in enumerate(((train, args.documents), (val, args.val_documents))):
            haystack = None
            if args.haystack != "none":
                haystack = data.TokenFile(data.find_dataset(args.haystack) / ("train.bin", "val.bin")[split])
                if haystack.tokenizer != args.tokenizer:
                    raise ValueError(
                        f"haystack {args.haystack} has the tokenizer {haystack.tokenizer!r}, not "
                        f"{args.tokenizer!r}: prepare it again, or give --tokenizer {haystack.tokenizer}"
                    )
            filler = Filler(haystack, tokenizer)
            rng = np.random.default_rng([args.seed, split])
            for length in args.length:
                for _ in range(count):
                    shape = (length, args.keys, args.questions, args.spread)
                    writer.add(*make_document(*shape, filler, tokenizer, rng))
                    bar.add(length)
    data.report((train, val), started)


if __name__ == "__main__":
    data.run_script(main)
