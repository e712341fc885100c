"""Run `python -m pretraining.tools.prepare`."""

from pretraining.config.script import exit_with


def main() -> int:
    """Import here what needs extensions: `exit_with` reports one that is not there."""
    from pretraining.tools.prepare.prepare import main as prepare

    return prepare()


exit_with(main)
