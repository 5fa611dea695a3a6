"""Download a data set from the Hugging Face hub, as a source that training can name.

    python setup/download_prepare_hf_data.py fineweb_edu_10bt [--dir data]
    python setup/download_prepare_hf_data.py owner/name --pattern 'en/*.parquet' [--name english]

The files go to DIR/NAME as they are: training tokenizes them when it first needs them. Running it
again downloads what is missing. A repository that is not public needs HF_TOKEN.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # it runs without an installation

from lingua.base.errors import UserError, nearest
from lingua.data.files import find_files
from lingua.parallel.program import run_program
from lingua.tools.storage.fetch import download_matching

# name -> (repository, patterns); a * goes across folders
DATA_SETS = {
    # The repository has samples besides, which are parts of the same data.
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", ["data/*.parquet"]),
    "fineweb_edu_10bt": ("HuggingFaceFW/fineweb-edu", ["sample/10BT/*.parquet"]),
    "dclm_baseline_1.0": ("mlfoundations/dclm-baseline-1.0", ["*.jsonl.zst"]),
    "dclm_baseline_1.0_10prct": (
        "mlfoundations/dclm-baseline-1.0",
        ["global-shard_01_of_10/*.jsonl.zst"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(DATA_SETS)
    parser.add_argument("data", help=f"one of {known}; or a repository, owner/name")
    parser.add_argument("--dir", type=Path, default=Path("data"), help="data.root_dir of training")
    parser.add_argument(
        "--pattern", action="append", help="glob of a repository's files; may be given many times"
    )
    parser.add_argument("--name", help="of the source; default: that of the data or repository")
    args = parser.parse_args()

    repo, patterns = choose(args.data, args.pattern)
    name = args.name or args.data.rpartition("/")[2]
    if re.fullmatch(r"[^./\\][^/\\]*", name) is None:
        raise UserError(f'--name "{name}": must be the name of a folder in --dir, without a path')
    folder = args.dir / name
    wanted = download_matching(f"hf://datasets/{repo}", patterns, folder)

    files = {file.path for file in find_files(name, args.dir)}
    print(f"{folder} has all {len(wanted):,} files")
    if others := files - wanted:
        print(f"and {len(others):,} others that are part of the source, as {min(others)}")
    print(f"train on it with data.root_dir={args.dir} 'data.sources={{{name}: 1.0}}'")


def choose(data: str, patterns: list[str] | None) -> tuple[str, list[str]]:
    """(repository, patterns) of what was asked for."""
    repo, known = DATA_SETS.get(data, (data, []))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is None:
        need = f"must be one of {', '.join(DATA_SETS)}, or a repository owner/name"
        raise UserError(f'"{data}": {need}{nearest(data, DATA_SETS)}')
    if not patterns and not known:
        raise UserError(
            f"--pattern: must be given for a repository, so that only text is taken of {data}, "
            "such as '*.parquet' or 'data/*.jsonl'"
        )
    return repo, patterns or known


if __name__ == "__main__":
    run_program(main)
