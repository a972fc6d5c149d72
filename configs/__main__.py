"""The table of fields in README.md: `python -m configs` prints it, `--write README.md` renews it there."""

import re
import sys
from pathlib import Path

from configs import config_table

BEGIN, END = "<!-- config table -->", "<!-- /config table -->"


def main(argv: list[str]) -> None:
    if not argv:
        print(config_table())
        return
    if len(argv) != 2 or argv[0] != "--write":
        raise SystemExit("usage: python -m configs [--write README.md]")
    path = Path(argv[1])
    text, count = re.subn(
        f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{config_table()}\n{END}", path.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{path} has {count} pairs of {BEGIN} and {END}; it needs one, where the table goes")
    path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
