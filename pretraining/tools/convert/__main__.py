"""Run `python -m pretraining.tools.convert`."""

from pretraining.config.script import exit_with


def main() -> int:
    """Import here what needs extensions: `exit_with` reports one that is not there."""
    from pretraining.tools.convert.convert import main as convert

    return convert()


exit_with(main)
