"""Train the demo model of the package, in steps that each can be run on their own.

    python scripts/train_demo_model.py tokenizer   --corpus DIR --work DIR
    python scripts/train_demo_model.py train       --work DIR --state DIR --minutes 9
    python scripts/train_demo_model.py anti-repeat --work DIR --state DIR --tuned DIR --minutes 7.3
    python scripts/train_demo_model.py export      --work DIR --tuned DIR --model DIR
    python scripts/train_demo_model.py evaluate    --work DIR --model DIR --report FILE

``tokenizer`` cleans the corpus and writes the tokenizer and the token arrays; it needs no accelerator.
``train`` goes on from the state folder if one is there, so it can be run several times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
from demo_model import export as export_module
from demo_model import text, training, tuning
from demo_model.network import Shape


def add_fields(parser: argparse.ArgumentParser, recipe: object) -> None:
    """One option for each number of a recipe."""
    for item in dataclasses.fields(recipe):  # type: ignore[arg-type]
        parser.add_argument(
            f"--{item.name.replace('_', '-')}", type=type(item.default), default=item.default, dest=item.name
        )


def picked(kind: type, arguments: argparse.Namespace) -> dict[str, float]:
    """The options that belong to a recipe."""
    return {item.name: getattr(arguments, item.name) for item in dataclasses.fields(kind)}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model, step by step.")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--work", type=Path, required=True, help="folder of tokenizer and token arrays")
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    common.add_argument("--shape", type=json.loads, default={}, help="JSON that overrides sizes (for tests)")

    prepare = commands.add_parser("tokenizer", parents=[common])
    prepare.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    prepare.add_argument("--limit-books", type=int, default=None)

    train = commands.add_parser("train", parents=[common])
    train.add_argument("--state", type=Path, required=True)
    train.add_argument("--minutes", type=float, default=9.0)
    add_fields(train, training.Recipe())

    tune = commands.add_parser("anti-repeat", parents=[common])
    tune.add_argument("--state", type=Path, required=True)
    tune.add_argument("--tuned", type=Path, required=True)
    tune.add_argument("--minutes", type=float, default=7.3)
    add_fields(tune, tuning.AntiRepeat())

    out = commands.add_parser("export", parents=[common])
    out.add_argument("--tuned", type=Path, required=True)
    out.add_argument("--model", type=Path, default=Path("cellar/demo/story-11m"))

    measure = commands.add_parser("evaluate", parents=[common])
    measure.add_argument("--model", type=Path, default=Path("cellar/demo/story-11m"))
    measure.add_argument("--report", type=Path, required=True)
    measure.add_argument("--transformers", action="store_true", help="also compare with transformers")
    return parser


def main() -> int:
    """Run one step."""
    arguments = build_parser().parse_args()
    shape = Shape(**arguments.shape)
    device = torch.device(arguments.device)
    if arguments.command == "tokenizer":
        facts = text.prepare(arguments.corpus, arguments.work, shape.vocab_size, arguments.limit_books)
        print(json.dumps(facts, indent=1))
    elif arguments.command == "train":
        recipe = training.Recipe(**picked(training.Recipe, arguments))  # type: ignore[arg-type]
        progress = training.train(arguments.work, arguments.state, shape, recipe, arguments.minutes, device)
        print(f"step {progress.step}, {progress.tokens:,} tokens, {progress.seconds:.0f} s")
    elif arguments.command == "anti-repeat":
        plan = tuning.AntiRepeat(**picked(tuning.AntiRepeat, arguments))  # type: ignore[arg-type]
        tuning.tune(arguments.work, arguments.state, arguments.tuned, shape, plan, arguments.minutes, device)
    elif arguments.command == "export":
        export_module.export(arguments.work, arguments.tuned, arguments.model, shape)
    elif arguments.command == "evaluate":
        report = export_module.evaluate(arguments.work, arguments.model, shape, device)
        if arguments.transformers:
            report["transformers"] = export_module.compare_with_transformers(arguments.work, arguments.model, shape)
        arguments.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(json.dumps({key: value for key, value in report.items() if key != "stories"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
