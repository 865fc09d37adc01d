"""What `ict` and `ict --help` print, at once: even the command-line library is loaded only for real work."""

import sys

COMMANDS = {
    "train": "Train a recipe and write its model, log, samples and report.",
    "sample": "Draw images from a trained model.",
    "eval": "Score a model, or saved images: FID, KID, precision, recall.",
    "tune": "Find the best noise levels for two and more steps.",
    "blend": "Find the best combination of the averages that a run has kept.",
    "report": "Write the page of a run again.",
    "data": "Inspect, prepare or bring a set of images.",
    "bench": "Measure how fast a recipe trains and samples here.",
    "info": "Describe a recipe or a model file.",
    "recipes": "List the recipes that come with ict.",
}

PAGE = """\
ict trains and uses one-step image generators (improved consistency training).

usage: ict COMMAND [OPTIONS]

commands:
{commands}

Start with a small one, on any machine, in a few minutes:
  ict train digits                       writes runs/digits/report.html
  ict sample runs/digits --out some.png

`ict COMMAND --help` explains a command; `ict --version` prints the version.
"""


def page() -> str:
    return PAGE.format(commands="\n".join(f"  {name:<9}{text}" for name, text in COMMANDS.items()))


def main() -> int:
    arguments = sys.argv[1:]
    if arguments in ([], ["--help"], ["-h"], ["help"]):
        print(page(), end="")
        return 0
    if arguments == ["--version"]:
        from ict import __version__

        print(f"ict {__version__}")
        return 0
    from ict.cli import run_command

    return run_command()
